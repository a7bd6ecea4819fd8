"""Tiled exact attention, forward and backward, for float32 and float64.

The tables S and P of T × S numbers never exist: a tile of 64 keys by 64 queries at a time is made,
used and forgotten (Dao et al. 2022, algorithm 1; Rabe & Staats 2021), and the forward keeps one
number for each query, log₂ Σ 2^s, from which the backward makes every tile again.

Forward. K and V are first copied head by head, so that the rows of a head are neighbours: in a
fused (B, T, Hq + 2 Hkv, d) array they are kilobytes apart, often a power of two, which wastes page
table entries and makes all rows of a tile compete for the same few lines of the first-level cache.
A task then owns the query tiles i and last - i of one head, which have together the same number of
keys below the diagonal for every i. For a query tile, Qᵀ is copied once, scaled; then for each key
tile::

    Sᵀ = K Qᵀ                   64·64·d multiply-adds
    top' = max(top, S); P = 2^(S - top'); total = total · 2^(top - top') + Σ P
    O = O · 2^(top - top') + P V         64·64·dv multiply-adds

Sᵀ, Qᵀ and O (16 KiB each at d = 64) fill the first-level cache; K and V come from the second level
or beyond: 32 KiB for 2 · 64·64·64 multiply-adds, 0.06 bytes each. O is divided by ``total`` when it
is written out.

Backward. A task owns a run of query tiles of the G heads that read one key/value head: it writes
their dQ, and sums dK and dV of its own in scratch memory. For each query tile Qᵀ, dOᵀ, Q and dO are
copied, and for each key tile that it sees::

    Sᵀ = K Qᵀ;  dPᵀ = V dOᵀ;  P = 2^(S - lse);  dS = scale · P (dP - delta)
    dV += Pᵀ dO;  dK += dSᵀ Q;  dQ += dS K            delta_t = Σ dO_t O_t

For 5 · 64·64·64 multiply-adds, 32 KiB of K and V are read and 32 KiB of dK and dV read and written.
Nothing is shared between tasks, so nothing is locked, and no result depends on the number of
threads. Where a batch has few key/value heads, the query tiles of a group are cut into several runs
of about equal work, by shapes alone; a second pass then adds the dK and dV of the runs, in order.
"""

from typing import Any

import numpy as np
from numba import get_thread_id, prange

from accel.cpu.attention_tiles import (
    BLOCK,
    FAST,
    MASKED,
    SKIP,
    START,
    Dropout,
    Mask,
    Sizes,
    View,
    add_alibi,
    copy_rows,
    dot,
    dropout_tile,
    exponentials,
    fill,
    keys_end,
    mask_tile,
    multiply,
    padded,
    row,
    running_maximum,
    scale_row,
    score_gradients,
    tile_kind,
    transpose,
)
from accel.cpu.simd import at, exp2, pointer, start, tile_gemm, wide_vectors
from accel.jit import jit

LOG2_E = 1.4426950408889634

# lse of a query that sees no key: 2^(s - UNSEEN) is 0 for every score, LOW among them.
UNSEEN = 1e38


def packed_elements(sizes: Sizes) -> int:
    """Return the elements of the head-by-head copy of K and V."""
    return sizes.batch * sizes.kv_heads * sizes.keys * (sizes.width + sizes.value_width)


def forward_scratch(sizes: Sizes) -> int:
    """Return the elements of scratch memory that a thread needs in ``forward``."""
    return BLOCK * (sizes.width + sizes.value_width) + _TILES + 3 * BLOCK


def backward_scratch(sizes: Sizes) -> int:
    """Return the elements of scratch memory that a thread needs in ``backward``."""
    widths = sizes.width + sizes.value_width
    return (
        (2 * sizes.keys + 2 * BLOCK) * widths
        + BLOCK * sizes.width
        + BLOCK * BLOCK
        + _TILES
        + 2 * BLOCK
    )


# Elements of a tile of scores, of its dropout factors, and of the draws behind them.
_TILES = BLOCK * (3 * BLOCK + 7)


@jit(nogil=True, parallel=True, fastmath=FAST)
def forward(
    sizes: Sizes,
    q: View,
    k: View,
    v: View,
    out: View,
    lse: Any,
    scale: Any,
    mask: Mask,
    dropout: Dropout,
    packed: Any,
    scratch: Any,
) -> None:
    """Attention of q over k and v.

    Parameters
    ----------
    q, k, v, out : View
        (B, T, Hq, d), (B, S, Hkv, d), (B, S, Hkv, dv) and the result, (B, T, Hq, dv).
    lse : (B, Hq, T)
        Receives log₂ Σ 2^s of each query.
    scale : scalar of the element type
    packed : (packed_elements,)
    scratch : (threads, forward_scratch)
    """
    blocks = (sizes.keys + BLOCK - 1) // BLOCK
    heads = sizes.batch * sizes.kv_heads
    values = heads * sizes.keys * sizes.width  # where V begins
    for task in prange(heads * blocks):
        bg, u0 = task // blocks, task % blocks * BLOCK
        b, g = bg // sizes.kv_heads, bg % sizes.kv_heads
        nk = min(BLOCK, sizes.keys - u0)
        kept = bg * sizes.keys + u0
        d, dv = sizes.width, sizes.value_width
        copy_rows(row(k, b, u0, g, scale), k.position, at(start(packed), kept * d), d, nk, d)
        target = at(start(packed), values + kept * dv)
        copy_rows(row(v, b, u0, g, scale), v.position, target, dv, nk, dv)

    tiles = (sizes.queries + BLOCK - 1) // BLOCK
    pairs = (tiles + 1) // 2
    for task in prange(sizes.batch * sizes.heads * pairs):
        bh, first = task // pairs, task % pairs
        b, h = bh // sizes.heads, bh % sizes.heads
        bg = b * sizes.kv_heads + h // (sizes.heads // sizes.kv_heads)
        keys = at(start(packed), bg * sizes.keys * sizes.width)
        data = at(start(packed), values + bg * sizes.keys * sizes.value_width)
        own = at(start(scratch), get_thread_id() * scratch.shape[1])
        line = at(start(lse), bh * sizes.queries)
        last = tiles - 1 - first
        _forward_tile(sizes, q, keys, data, out, line, scale, mask, dropout, own, b, h, first)
        if last != first:
            _forward_tile(sizes, q, keys, data, out, line, scale, mask, dropout, own, b, h, last)


@jit(fastmath=FAST)
def _forward_tile(
    sizes: Sizes,
    q: View,
    keys: Any,
    values: Any,
    out: View,
    lse: Any,
    scale: Any,
    mask: Mask,
    dropout: Dropout,
    scratch: Any,
    b: int,
    h: int,
    i: int,
) -> None:
    """Compute the rows of query tile i of one head from its K (S, d) and V (S, dv)."""
    wide_vectors()
    d, dv = sizes.width, sizes.value_width
    t0 = i * BLOCK
    n = min(BLOCK, sizes.queries - t0)
    width = padded(n, scale)
    log2_e = type(scale)(LOG2_E)

    qt = scratch
    o = at(qt, BLOCK * d)
    s = at(o, BLOCK * dv)
    factors = at(s, BLOCK * BLOCK)
    drawn = at(factors, BLOCK * BLOCK)
    top = at(drawn, BLOCK * (BLOCK + 7))
    total = at(top, BLOCK)
    correction = at(total, BLOCK)

    transpose(row(q, b, t0, h, scale), q.position, d, n, qt, width, scale * log2_e)
    fill(top, type(scale)(START), width)
    fill(total, scale * 0, width)
    fill(o, scale * 0, n * dv)
    for u0 in range(0, keys_end(mask, sizes, t0 + n), BLOCK):
        nk = min(BLOCK, sizes.keys - u0)
        kind = tile_kind(mask, sizes, b, t0, n, u0, nk)
        if kind == SKIP:
            continue
        tile_gemm(nk, width, d, at(keys, u0 * d), d, 1, qt, width, s, width, False)
        if mask.alibi != 0:
            slope = pointer(mask.alibi, scale)[h] * log2_e
            add_alibi(s, slope, sizes, t0, width, u0, nk)
        if kind == MASKED:
            mask_tile(s, mask, sizes, b, t0, n, width, u0, nk)
        for c in range(width):
            correction[c] = top[c]
        running_maximum(s, top, width, nk)
        for c in range(width):
            x = exp2(correction[c] - top[c])
            correction[c] = x
            total[c] *= x
        exponentials(s, top, total, width, nk)
        if dropout.active:
            dropout_tile(factors, drawn, dropout, sizes, b, h, t0, n, width, u0, nk)
            multiply(s, factors, nk * width)
        for t in range(n):
            if correction[t] != 1:
                scale_row(at(o, t * dv), correction[t], dv)
        tile_gemm(n, dv, nk, s, 1, width, at(values, u0 * dv), dv, o, dv, True)
    for t in range(n):
        some = total[t] != 0
        scale_row(at(o, t * dv), 1 / total[t] if some else scale * 0, dv)
        lse[t0 + t] = top[t] + np.log2(total[t]) if some else type(scale)(UNSEEN)
    copy_rows(o, dv, row(out, b, t0, h, scale), out.position, n, dv)


@jit(nogil=True, parallel=True, fastmath=FAST)
def backward(
    sizes: Sizes,
    q: View,
    k: View,
    v: View,
    out: View,
    dout: View,
    lse: Any,
    dq: View,
    dk: View,
    dvalue: View,
    cuts: Any,
    scale: Any,
    mask: Mask,
    dropout: Dropout,
    scratch: Any,
) -> None:
    """Gradients of attention.

    Parameters
    ----------
    out, lse
        What ``forward`` made.
    dout, dq, dk, dvalue : View
        Laid out as out, q, k and v, but each run has its own B batch rows of dk and dvalue: run r
        writes rows r · B ...
    cuts : (runs + 1,) int64
        Where the runs of query tiles begin in the list of the G · tiles of a group.
    scratch : (threads, backward_scratch)
    """
    runs = len(cuts) - 1
    tiles = (sizes.queries + BLOCK - 1) // BLOCK
    group = sizes.heads // sizes.kv_heads
    d, dv = sizes.width, sizes.value_width
    for task in prange(sizes.batch * sizes.kv_heads * runs):
        run, bg = task % runs, task // runs
        b, g = bg // sizes.kv_heads, bg % sizes.kv_heads
        keys = at(start(scratch), get_thread_id() * scratch.shape[1])
        values = at(keys, sizes.keys * d)
        dkeys = at(values, sizes.keys * dv)
        dvalues = at(dkeys, sizes.keys * d)
        own = at(dvalues, sizes.keys * dv)
        copy_rows(row(k, b, 0, g, scale), k.position, keys, d, sizes.keys, d)
        copy_rows(row(v, b, 0, g, scale), v.position, values, dv, sizes.keys, dv)
        fill(dkeys, scale * 0, sizes.keys * (d + dv))
        for tile in range(cuts[run], cuts[run + 1]):
            h, i = g * group + tile // tiles, tile % tiles
            line = at(start(lse), (b * sizes.heads + h) * sizes.queries)
            _backward_tile(
                sizes, q, keys, values, out, dout, line, dq, dkeys, dvalues, scale, mask, dropout,
                own, b, h, i,
            )  # fmt: skip
        slot = run * sizes.batch + b
        copy_rows(dkeys, d, row(dk, slot, 0, g, scale), dk.position, sizes.keys, d)
        copy_rows(dvalues, dv, row(dvalue, slot, 0, g, scale), dvalue.position, sizes.keys, dv)


@jit(fastmath=FAST)
def _backward_tile(
    sizes: Sizes,
    q: View,
    keys: Any,
    values: Any,
    out: View,
    dout: View,
    lse: Any,
    dq: View,
    dkeys: Any,
    dvalues: Any,
    scale: Any,
    mask: Mask,
    dropout: Dropout,
    scratch: Any,
    b: int,
    h: int,
    i: int,
) -> None:
    """Compute dQ of query tile i of head h, and add its part to dK (S, d) and dV (S, dv)."""
    wide_vectors()
    d, dv = sizes.width, sizes.value_width
    t0 = i * BLOCK
    n = min(BLOCK, sizes.queries - t0)
    width = padded(n, scale)
    zero = scale * 0
    log2_e = type(scale)(LOG2_E)

    qt = scratch  # (d, width), scaled
    dot_ = at(qt, BLOCK * d)  # (dv, width)
    queries = at(dot_, BLOCK * dv)  # (n, d)
    gradient = at(queries, BLOCK * d)  # (n, dv)
    dqueries = at(gradient, BLOCK * dv)  # (n, d)
    s = at(dqueries, BLOCK * d)
    dp = at(s, BLOCK * BLOCK)
    factors = at(dp, BLOCK * BLOCK)
    drawn = at(factors, BLOCK * BLOCK)
    top = at(drawn, BLOCK * (BLOCK + 7))  # lse
    delta = at(top, BLOCK)

    copy_rows(row(q, b, t0, h, scale), q.position, queries, d, n, d)
    copy_rows(row(dout, b, t0, h, scale), dout.position, gradient, dv, n, dv)
    transpose(queries, d, d, n, qt, width, scale * log2_e)
    transpose(gradient, dv, dv, n, dot_, width, zero + 1)
    fill(dqueries, zero, n * d)
    for t in range(n):
        top[t] = lse[t0 + t]
        delta[t] = dot(at(gradient, t * dv), row(out, b, t0 + t, h, scale), dv)
    for t in range(n, width):
        top[t] = type(scale)(UNSEEN)
        delta[t] = zero

    for u0 in range(0, keys_end(mask, sizes, t0 + n), BLOCK):
        nk = min(BLOCK, sizes.keys - u0)
        kind = tile_kind(mask, sizes, b, t0, n, u0, nk)
        if kind == SKIP:
            continue
        tile_keys, tile_values = at(keys, u0 * d), at(values, u0 * dv)
        tile_gemm(nk, width, d, tile_keys, d, 1, qt, width, s, width, False)
        tile_gemm(nk, width, dv, tile_values, dv, 1, dot_, width, dp, width, False)
        if mask.alibi != 0:
            slope = pointer(mask.alibi, scale)[h] * log2_e
            add_alibi(s, slope, sizes, t0, width, u0, nk)
        if kind == MASKED:
            mask_tile(s, mask, sizes, b, t0, n, width, u0, nk)
        if dropout.active:
            dropout_tile(factors, drawn, dropout, sizes, b, h, t0, n, width, u0, nk)
            multiply(dp, factors, nk * width)
        score_gradients(s, dp, top, delta, scale, width, nk)
        if dropout.active:
            multiply(s, factors, nk * width)
        tile_gemm(nk, dv, n, s, width, 1, gradient, dv, at(dvalues, u0 * dv), dv, True)
        tile_gemm(nk, d, n, dp, width, 1, queries, d, at(dkeys, u0 * d), d, True)
        tile_gemm(n, d, nk, dp, 1, width, tile_keys, d, dqueries, d, True)
    copy_rows(dqueries, d, row(dq, b, t0, h, scale), dq.position, n, d)


@jit(nogil=True, parallel=True, fastmath=FAST)
def add_runs(sizes: Sizes, parts: View, runs: int, target: View, width: int, like: Any) -> None:
    """Sum what the runs wrote, (runs · B, S, Hkv, width), in order into (B, S, Hkv, width)."""
    for bu in prange(sizes.batch * sizes.keys):
        b, u = bu // sizes.keys, bu % sizes.keys
        for g in range(sizes.kv_heads):
            x = row(target, b, u, g, like)
            for e in range(width):
                total = row(parts, b, u, g, like)[e]
                for r in range(1, runs):
                    total += row(parts, r * sizes.batch + b, u, g, like)[e]
                x[e] = total
