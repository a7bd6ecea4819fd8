"""Read reference/study/tiled_attention.py first: attention for the CPU, in memory linear in T.

The mathematics is ``reference/attention.py``'s, and who may see whom its ``Visibility``; how it is
cut into tiles and tasks is told in ``attention_kernels.py``. This file says where arrays lie in
memory, and allocates what leaves. Arrays are read where they are, whatever the strides of their
first three axes; q, k and v are usually views of one array (B, T, Hq + 2·Hkv, d), and then dq, dk
and dv are as well, so that joining them costs nothing.
"""

from typing import Any, NamedTuple

import numpy as np

from accel.cpu import attention_kernels
from accel.cpu.attention_layout import (
    Attention,
    BackwardRoom,
    Drawn,
    ForwardRoom,
    Mask,
    Sizes,
    View,
    backward_passes,
    lay_out,
)
from accel.cpu.kernels import address, scratch
from accel.cpu.memory import empty
from accel.threads import team
from reference.types import Array, Dropout
from reference.visibility import Visibility


class AttentionCache(NamedTuple):
    """What the backward needs: linear in T and S. In the mode bf16 q, k and v are ``keep``'s."""

    q: Array  # (B, T, Hq, d)
    k: Array  # (B, S, Hkv, d)
    v: Array  # (B, S, Hkv, dv)
    out: Array  # (B, T, Hq, dv)
    lse2: Array  # (B, Hq, T) log₂ Σ 2^s of scores in units of log 2: log₂e times the natural one
    who: Visibility  # its arrays as the kernels read them
    scale: float
    dropout: Drawn


def attention_forward(
    q: Array, k: Array, v: Array, who: Visibility, *, scale: float, dropout: Dropout | None
) -> tuple[Array, AttentionCache]:
    """Return o (B, T, Hq, dv), as ``reference.attention.forward``."""
    return tiled_forward(attention_kernels, q, k, v, who, scale=scale, dropout=dropout)


def attention_backward(dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v."""
    return tiled_backward(attention_kernels, dout, cache)


# --- for both compute modes ----------------------------------------------------------------------


def drawn(dropout: Dropout | None) -> Drawn:
    """Return the dropout of the probabilities in the form that the kernels read."""
    if dropout is None:
        return Drawn(False, 0, 1.0, 0, 0, 0, 0, 0)
    p, (seed, step, sample, site) = dropout
    low, high = seed & 0xFFFFFFFF, seed >> 32
    return Drawn(True, int(p * 2**32), 1 / (1 - p), low, high, step, sample, site)


def tiled_forward(
    kernels: Any,
    q: Array,
    k: Array,
    v: Array,
    who: Visibility,
    *,
    scale: float,
    dropout: Dropout | None,
) -> tuple[Array, AttentionCache]:
    """Return ``attention_forward`` by the kernels of a module with ``forward``."""
    q, k, v, who = readable(q), readable(k), readable(v), owned(who, q.dtype)
    sizes = sizes_of(q, k, v)
    out = empty((*q.shape[:3], sizes.value_width), q.dtype)
    lse2 = empty((sizes.batch, sizes.heads, sizes.queries), q.dtype)
    cache = AttentionCache(q, k, v, out, lse2, who, scale, drawn(dropout))
    if out.size:
        packed = empty(kernels.packed_elements(sizes), q.dtype)
        room = lay_out(ForwardRoom, sizes, kernels.OPERANDS)
        kernels.forward(*attention(cache), lse2, packed, room, scratch(room.end, q.dtype))
    return out, cache


def tiled_backward(kernels: Any, dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return ``attention_backward`` by the kernels of a module."""
    q, k, v, out, lse2, who, _, _ = cache
    sizes = sizes_of(q, k, v)
    dq, dk, dv = gradients(sizes, out.dtype)
    if not out.size:
        for gradient in (dq, dk, dv):
            gradient.fill(0)
        return dq, dk, dv
    dout = readable(dout)
    by_position = who._replace(alibi=None, key_mask=None, documents=None)
    runs, passes = backward_passes(sizes, by_position, team())
    dk_of_runs, dv_of_runs = dk, dv
    if len(runs) > 1:
        dk_of_runs = empty((len(runs) * sizes.batch, *dk.shape[1:]), dk.dtype)
        dv_of_runs = empty((len(runs) * sizes.batch, *dv.shape[1:]), dv.dtype)
    views = [view(x) for x in (dout, dq, dk_of_runs, dv_of_runs)]
    room = lay_out(BackwardRoom, sizes, kernels.OPERANDS)
    own = scratch(room.end, out.dtype)
    for table, wanted in passes:
        kernels.backward(*attention(cache), *views, lse2, table, wanted, room, own)
    if len(runs) > 1:
        for parts, total in ((dk_of_runs, dk), (dv_of_runs, dv)):
            width, zero = total.shape[-1], out.dtype.type(0)
            attention_kernels.add_runs(sizes, view(parts), runs, view(total), width, zero)
    return dq, dk, dv


def attention(cache: AttentionCache) -> Attention:
    """Return what the drivers of both directions read; addresses hold while the cache does."""
    q, k, v, out, _, who, scale, dropout = cache
    arrays = (address(x) for x in (who.alibi, who.key_mask, who.documents))
    return Attention(
        sizes_of(q, k, v),
        view(q),
        view(k),
        view(v),
        view(out),
        out.dtype.type(scale),
        Mask(who.causal, who.window, *arrays),
        dropout,
    )


def owned(who: Visibility, dtype: np.dtype) -> Visibility:
    """Return the rules with arrays of the layout and element types that the kernels read."""
    documents = who.documents
    if documents is not None and not np.can_cast(documents.dtype, np.int32):
        # only which are equal matters
        documents = np.unique(documents, return_inverse=True)[1].reshape(documents.shape)
    return who._replace(
        alibi=None if who.alibi is None else np.ascontiguousarray(who.alibi, dtype),
        key_mask=None if who.key_mask is None else np.ascontiguousarray(who.key_mask, np.uint8),
        documents=None if documents is None else np.ascontiguousarray(documents, np.int32),
    )


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
    """Return x, or a copy if its last axis is not contiguous or its elements are misaligned."""
    steps = [stride % x.itemsize for stride in x.strides[:3]]
    if x.strides[3] != x.itemsize or any(steps) or not x.flags.aligned:
        return np.ascontiguousarray(x)
    return x


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
