"""Attention, exact and tiled: neither scores nor probabilities ever leave the chip.

Kernels: ``attention_mma.cu`` on tensor cores, for bf16 with widths up to 128 that are multiples of
8; ``attention.cu`` for float32 and any other widths. Forward keeps the output and one float a row,
log Σ exp of its scores; backward makes the probabilities again from it, in two kernels, so that no
atomics are needed: one whose blocks own queries (dq), one whose blocks own keys and loop over all
query heads that read them (dk, dv).

A causal T × T head of width d takes 2·T²·d operations forward and 5·T²·d backward (half the full
square), of which the two kernels do 7·T²·d, since both make the scores again.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from accel.cuda.arrays import check_activations, check_dout, contiguous, strides
from accel.cuda.device import (
    BF16,
    F32,
    bf16_flag,
    ceil_div,
    current,
    empty,
    f32,
    i32,
    i64,
    launch,
    zeros,
)
from accel.cuda.elementwise import dropout_words
from reference.attention import check_documents, check_heads
from reference.checks import check_mask, check_number, check_shape
from reference.dropout import check_dropout
from reference.philox import check_counters
from reference.types import Array, DropoutKey

QUERIES, KEYS = 16, 32  # a tile of attention.cu
OWN, MMA_KEYS, MMA_QUERIES = 128, 64, 32  # rows of attention_mma.cu: of a block, of its tiles


RANGE = 32  # positions whose documents are summed up: RANGE in attention.cuh

_DROPPING = 12  # the place of ``dropping`` among AttentionCache.arguments


class AttentionCache(NamedTuple):
    q: Array  # (B, T, Hq, d)
    k: Array  # (B, S, Hkv, d)
    v: Array  # (B, S, Hkv, dv)
    out: Array  # (B, T, Hq, dv)
    lse: Array  # (B, Hq, T) float32: log Σ exp of each row's scores; +inf where it sees nothing
    arguments: tuple[Any, ...]  # of the kernels, from the slopes of ALiBi on


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
    """Return the attention of q (B, T, Hq, d) over k and v (B, S, Hkv, …): (B, T, Hq, dv)."""
    check_activations("attention", q=q, k=k, v=v)
    check_heads(q, k, v)
    check_dropout(dropout_p, dropout_key)
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    if alibi is not None:
        check_shape("attention", "alibi", alibi, (Hq,), f"the query heads of q {(B, T, Hq, d)}")
        if alibi.dtype != F32:
            raise ValueError(f"attention: alibi must be float32, got {alibi.dtype}")
    if key_mask is not None:
        check_mask("attention", "key_mask", key_mask, (B, S), "the batch and keys")
    if documents is not None:
        check_documents(documents, B, T, S)
        if documents.dtype != np.int32:
            raise ValueError(f"attention: documents must be int32, got {documents.dtype}")
    scale = 1 / math.sqrt(d) if scale is None else scale
    check_number("attention", "scale", scale)
    dropping = dropout_p > 0 and dropout_key is not None
    p, key = (float(dropout_p), dropout_key) if dropping else (0.0, DropoutKey(0, 0, 0, 0))
    assert key is not None
    if dropping:
        key = check_counters(B, Hq * T * S, key)

    q, k, v = (_with_rows(x) for x in (q, k, v))
    tensor_cores = _tensor_cores(q, k, v)
    alibi, key_mask, documents = (
        None if x is None else contiguous(x) for x in (alibi, key_mask, documents)
    )
    arguments = (
        *(alibi, key_mask, documents),
        _ranges(documents) if tensor_cores and documents is not None else None,
        *(i32(n) for n in (T, S, Hq, Hkv, d, dv, causal)),
        f32(scale),
        i32(dropping),
        f32(1 / (1 - p)),
        *dropout_words(p, key),
    )
    out, lse = empty((B, T, Hq, dv), q.dtype), empty((B, Hq, T), F32)
    inputs = (*_strided(q), *_strided(k), *_strided(v), *arguments, out, lse)
    if tensor_cores:
        head = _head(d, dv)
        shared = 2 * head * (OWN + 4 * MMA_KEYS)
        grid = (ceil_div(T, OWN), Hq, B)
        _launch_mma("attention_forward", grid, inputs, shared, head, arguments)
    else:
        floats = QUERIES * (d + dv + KEYS + 1) + KEYS * (d + 1 + dv)
        _launch("attention_forward", (ceil_div(T, QUERIES), Hq, B), inputs, floats, q)
    return out, AttentionCache(q, k, v, out, lse, arguments)


def attention_backward(dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v were given.

    Where the shapes allow they are neighbouring views of one (B, T, Hq + 2·Hkv, d) array, which
    ``split_heads_backward`` then returns without a copy.
    """
    q, k, v, out, lse, arguments = cache
    check_dout("attention", dout, out.shape, q.dtype)
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    if T == 0:  # nobody asks; the kernel of dk and dv counts on a query
        dq, dk, dvalue = (zeros(x.shape, x.dtype) for x in (q, k, v))
        return dq, dk, dvalue
    dout = _with_rows(dout)
    delta = empty((B, Hq, T), F32)
    rows = B * T * Hq
    launch(
        "attention",
        "attention_delta",
        ceil_div(rows, 8),
        256,
        *_strided(dout),
        out,
        delta,
        i64(rows),
        *(i32(n) for n in (T, Hq, dv)),
        BF16=bf16_flag(q),
    )
    if T == S and d == dv:
        whole = empty((B, T, Hq + 2 * Hkv, d), q.dtype)
        dq, dk, dvalue = whole[:, :, :Hq], whole[:, :, Hq : Hq + Hkv], whole[:, :, Hq + Hkv :]
    else:
        dq, dk, dvalue = (empty(x.shape, x.dtype) for x in (q, k, v))
    common = (*_strided(q), *_strided(k), *_strided(v), *arguments, *_strided(dout), lse, delta)
    inputs = (*common, *_strided(dq))
    key_inputs = (*common, *_strided(dk), *_strided(dvalue))
    if _tensor_cores(q, k, v, dout):
        head = _head(d, dv)
        shared = 2 * head * (2 * OWN + 4 * MMA_KEYS)
        grid = (ceil_div(T, OWN), Hq, B)
        _launch_mma("attention_dq", grid, inputs, shared, head, arguments)
        shared = 2 * head * (2 * OWN + 4 * MMA_QUERIES) + 4 * 4 * MMA_QUERIES
        grid = (ceil_div(S, OWN), Hkv, B)
        _launch_mma("attention_dkv", grid, key_inputs, shared, head, arguments)
    else:
        floats = QUERIES * (2 * d + dv + KEYS + 1) + KEYS * (d + 1 + dv + 1)
        _launch("attention_dq", (ceil_div(T, QUERIES), Hq, B), inputs, floats, q)
        floats = KEYS * (2 * d + 2 * dv + 2) + QUERIES * (d + dv + 2 * (KEYS + 1))
        _launch("attention_dkv", (ceil_div(S, KEYS), Hkv, B), key_inputs, floats, q)
    return dq, dk, dvalue


def _launch(
    kernel: str, grid: tuple[int, int, int], arguments: tuple[Any, ...], floats: int, q: Array
) -> None:
    launch("attention", kernel, grid, 128, *arguments, shared=4 * floats, BF16=bf16_flag(q))


def _tensor_cores(*arrays: Array) -> bool:
    """Return whether attention_mma.cu can read the arrays: bf16, narrow enough, 16-byte chunks."""
    return all(
        x.dtype == BF16
        and x.shape[3] <= 128
        and x.shape[3] % 8 == 0
        and all(s % 8 == 0 for s in strides(x)[:3])
        and current().address(x) % 16 == 0
        for x in arrays
    )


def _ranges(documents: Array) -> Array:
    """Return the least and greatest document of each 32 positions, (B, tiles, 2) int32."""
    B, S = documents.shape
    ranges = empty((B, ceil_div(S, RANGE), 2), np.int32)
    pairs = ranges.size // 2
    launch(
        "attention",
        "document_ranges",
        ceil_div(pairs, 256),
        256,
        documents,
        ranges,
        i64(pairs),
        i32(S),
        BF16=1,
    )
    return ranges


def _head(d: int, dv: int) -> int:
    """Return the width that attention_mma.cu is compiled for."""
    return 64 if max(d, dv) <= 64 else 128


def _launch_mma(
    kernel: str,
    grid: tuple[int, int, int],
    inputs: tuple[Any, ...],
    shared: int,
    head: int,
    arguments: tuple[Any, ...],
) -> None:
    alibi, key_mask, documents, *_ = arguments
    dropping = arguments[_DROPPING]
    launch(
        "attention_mma",
        kernel,
        grid,
        256,
        *inputs,
        shared=shared,
        BF16=1,
        HEAD=head,
        ALIBI=int(alibi is not None),
        MASKED=int(key_mask is not None or documents is not None),
        DROPOUT=int(dropping),
    )


def _with_rows(x: Array) -> Array:
    """Return x (B, T, H, d) with its last axis contiguous."""
    return x if x.shape[3] == 1 or strides(x)[3] == 1 else contiguous(x)


def _strided(x: Array) -> tuple[Any, ...]:
    """Return the arguments of one (B, T, H, d) array: itself and three strides in elements."""
    return (x, *(i64(s) for s in strides(x)[:3]))
