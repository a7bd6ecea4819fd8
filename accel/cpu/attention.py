"""Attention for the CPU: ``reference/attention.py`` tile by tile, in memory linear in T.

The mathematics is the reference's; how it is cut into tiles and tasks is told in
``attention_kernels.py``. This file is the boundary: it checks what arrives, says where it lies in
memory, and allocates what leaves. Arrays are read where they are, whatever the strides of their
first three axes; q, k and v are usually views of one array (B, T, Hq + 2·Hkv, d), and then dq, dk
and dv are as well, so that joining them costs nothing.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from accel.cpu import attention_kernels
from accel.cpu.attention_tiles import BLOCK, Dropout, Mask, Sizes, View
from accel.cpu.memory import empty
from reference.attention import check_documents, check_heads
from reference.checks import check_dout, check_float, check_mask, check_number, check_shape
from reference.dropout import check_dropout
from reference.philox import check_counters
from reference.types import Array, DropoutKey

# The backward cuts its work into at least this many tasks where a batch has fewer key/value heads.
# A number of tasks that followed the number of threads would make results depend on it.
TASKS = 16


class Extras(NamedTuple):
    """What the options of an attention come to, and the arrays that their addresses point into."""

    mask: Mask
    dropout: Dropout
    owners: tuple[Array, ...]


class AttentionCache(NamedTuple):
    """What the backward needs: linear in T and S."""

    q: Array  # (B, T, Hq, d)
    k: Array  # (B, S, Hkv, d)
    v: Array  # (B, S, Hkv, dv)
    out: Array  # (B, T, Hq, dv)
    lse: Array  # (B, Hq, T) log₂ Σ 2^s
    scale: float
    extras: Extras


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    alibi: Array | None = None,
    key_mask: Array | None = None,
    documents: Array | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: DropoutKey | None = None,
) -> tuple[Array, AttentionCache]:
    """Scaled dot-product attention: q (B, T, Hq, d), k (B, S, Hkv, d), v (B, S, Hkv, dv).

    Parameters and result are those of ``reference.attention.attention_forward``.

    Raises
    ------
    ValueError
        When shapes, head counts or dtypes do not fit.
    """
    return tiled_forward(
        attention_kernels,
        q,
        k,
        v,
        alibi,
        key_mask,
        documents,
        causal,
        scale,
        dropout_p,
        dropout_key,
    )


def attention_backward(dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v.

    Raises
    ------
    ValueError
        When ``dout`` does not have the shape and dtype of the result.
    """
    return tiled_backward(attention_kernels, dout, cache)


# --- for both compute modes ----------------------------------------------------------------------


def tiled_forward(
    kernels: Any,
    q: Array,
    k: Array,
    v: Array,
    alibi: Array | None,
    key_mask: Array | None,
    documents: Array | None,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    dropout_key: DropoutKey | None,
) -> tuple[Array, AttentionCache]:
    """Return ``attention_forward`` by the kernels of a module with ``forward`` and its scratch."""
    check_float("attention", q=q, k=k, v=v, alibi=alibi)
    check_heads(q, k, v)
    extras = gather_extras(
        q, k, alibi, key_mask, documents, causal=causal, p=dropout_p, key=dropout_key
    )
    sizes = sizes_of(q, k, v)
    if scale is not None:
        check_number("attention", "scale", scale)
    scale = 1 / math.sqrt(sizes.width) if scale is None else float(scale)
    q, k, v = readable(q), readable(k), readable(v)
    out = empty((*q.shape[:3], sizes.value_width), q.dtype)
    lse = empty((sizes.batch, sizes.heads, sizes.queries), q.dtype)
    if out.size:
        kernels.forward(
            sizes,
            view(q),
            view(k),
            view(v),
            view(out),
            lse,
            q.dtype.type(scale),
            extras.mask,
            extras.dropout,
            empty(kernels.packed_elements(sizes), q.dtype),
            scratch(kernels.forward_scratch(sizes), q.dtype),
        )
    return out, AttentionCache(q, k, v, out, lse, scale, extras)


def tiled_backward(kernels: Any, dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return ``attention_backward`` by the kernels of a module."""
    q, k, v, out, lse, scale, extras = cache
    check_dout("attention", dout, out.shape, q)
    sizes = sizes_of(q, k, v)
    dq, dk, dv = gradients(sizes, q.dtype)
    if not out.size:
        for gradient in (dq, dk, dv):
            gradient.fill(0)
        return dq, dk, dv
    dout = readable(dout)
    cuts = cut_runs(sizes, extras.mask.causal)
    runs = len(cuts) - 1
    dk_of_runs, dv_of_runs = dk, dv
    if runs > 1:
        dk_of_runs = empty((runs * sizes.batch, *dk.shape[1:]), dk.dtype)
        dv_of_runs = empty((runs * sizes.batch, *dv.shape[1:]), dv.dtype)
    kernels.backward(
        sizes,
        view(q),
        view(k),
        view(v),
        view(out),
        view(dout),
        lse,
        view(dq),
        view(dk_of_runs),
        view(dv_of_runs),
        cuts,
        q.dtype.type(scale),
        extras.mask,
        extras.dropout,
        scratch(kernels.backward_scratch(sizes), q.dtype),
    )
    if runs > 1:
        for parts, total in ((dk_of_runs, dk), (dv_of_runs, dv)):
            width = total.shape[-1]
            kernels.add_runs(sizes, view(parts), runs, view(total), width, q.dtype.type(0))
    return dq, dk, dv


def sizes_of(q: Array, k: Array, v: Array) -> Sizes:
    """Return the extents."""
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    return Sizes(B, T, S, Hq, Hkv, d, dv)


def view(x: Array) -> View:
    """Return where x (B, T, H, d) lies; its last axis must be contiguous."""
    batch, position, head = (stride // x.itemsize for stride in x.strides[:3])
    return View(x.ctypes.data, batch, position, head)


def readable(x: Array) -> Array:
    """Return x, or a copy if its last axis is not contiguous or its elements lie crooked."""
    steps = [stride % x.itemsize for stride in x.strides[:3]]
    if x.strides[3] != x.itemsize or any(steps) or not x.flags.aligned:
        return np.ascontiguousarray(x)
    return x


def scratch(elements: int, dtype: np.dtype) -> Array:
    """Return scratch memory for every thread: (threads, elements)."""
    return empty((numba.get_num_threads(), -(-elements // 16) * 16), dtype)


def gather_extras(
    q: Array,
    k: Array,
    alibi: Array | None,
    key_mask: Array | None,
    documents: Array | None,
    *,
    causal: bool,
    p: float,
    key: DropoutKey | None,
) -> Extras:
    """Check the options and put them into the form that the kernels read.

    Raises
    ------
    ValueError
        When one does not fit q (B, T, Hq, d) and k (B, S, Hkv, d).
    """
    B, T, Hq, _ = q.shape
    S = k.shape[1]
    owners: list[Array] = []

    def keep(array: Array | None, dtype: type) -> int:
        if array is None:
            return 0
        owners.append(np.ascontiguousarray(array, dtype))
        return int(owners[-1].ctypes.data)

    if alibi is not None:
        check_shape("attention", "alibi", alibi, (Hq,), f"the query heads of q {q.shape}")
    if key_mask is not None:
        check_mask("attention", "key_mask", key_mask, (B, S), "the batch and keys")
    if documents is not None:
        check_documents(documents, B, T, S)
        if not np.can_cast(documents.dtype, np.int32):  # only which are equal matters
            documents = np.unique(documents, return_inverse=True)[1].reshape(B, S)
    mask = Mask(
        bool(causal), keep(alibi, q.dtype.type), keep(key_mask, np.uint8), keep(documents, np.int32)
    )
    check_dropout(p, key)
    dropout = Dropout(False, 0, 1.0, 0, 0, 0, 0, 0)
    if p > 0 and key is not None:
        key = check_counters(B, Hq * T * S, key)
        dropout = Dropout(
            True,
            int(p * 2**32),
            1 / (1 - float(p)),
            key.seed & 0xFFFFFFFF,
            key.seed >> 32,
            key.step,
            key.sample,
            key.site,
        )
    return Extras(mask, dropout, tuple(owners))


def gradients(sizes: Sizes, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """Allocate dq, dk and dv: views of one array when q, k and v can have been that."""
    B, T, S, Hq, Hkv, d, dv = sizes
    if T == S and d == dv:
        joined = empty((B, T, Hq + 2 * Hkv, d), dtype)
        return joined[:, :, :Hq], joined[:, :, Hq : Hq + Hkv], joined[:, :, Hq + Hkv :]
    return (
        empty((B, T, Hq, d), dtype),
        empty((B, S, Hkv, d), dtype),
        empty((B, S, Hkv, dv), dtype),
    )


def cut_runs(sizes: Sizes, causal: bool, tasks: int = TASKS) -> Array:
    """Cut the query tiles of a group into runs of about equal work, by shapes alone.

    The list has the tiles of the group's first head, then those of its second, and so on; the work
    of a tile is the number of key tiles that it can see.

    Returns
    -------
    cuts : (runs + 1,) int64
        Run r has the tiles cuts[r] .. cuts[r + 1] - 1 of the list.
    """
    group = sizes.heads // sizes.kv_heads
    ends = np.minimum(np.arange(BLOCK, sizes.queries + BLOCK, BLOCK), sizes.queries)
    if causal:
        ends = np.clip(ends + sizes.keys - sizes.queries, 0, sizes.keys)
    else:
        ends = np.full_like(ends, sizes.keys)
    work = np.tile(-(-ends // BLOCK), group)
    runs = min(len(work), -(-tasks // (sizes.batch * sizes.kv_heads)))
    done = np.cumsum(work)
    cuts = np.searchsorted(done, done[-1] * np.arange(1, runs) / runs, side="right")
    return np.concatenate([[0], cuts, [len(work)]]).astype(np.int64)
