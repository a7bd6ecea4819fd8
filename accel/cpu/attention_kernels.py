"""Read reference/study/tiled_attention.py first: this is its two loops, for float32 and float64.

``forward`` and ``backward`` are those of ``reference/attention.py``; a tile of queries meets the
keys in its range of ``reference/visibility.py`` and no others.

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
    m' = max(m, S); P = 2^(S - m'); l = l · 2^(m - m') + Σ P
    O = O · 2^(m - m') + P V         64·64·dv multiply-adds

Sᵀ, Qᵀ and O (16 KiB each at d = 64) fill the first-level cache; K and V come from the second level
or beyond: 32 KiB for 2 · 64·64·64 multiply-adds, 0.06 bytes each. O is divided by l when it is
written out. Of a tile that the diagonal or a window cuts, strips of 16 queries or keys are
multiplied by the range that they meet (K Qᵀ in strips of half a register block where that is more);
what is left out are zeros.

Backward. A task owns a run of query tiles of the G heads that read one key/value head: it writes
their dQ, and sums dK and dV of its own in scratch memory. For each query tile Qᵀ, dOᵀ, Q and dO are
copied, and for each key tile that it sees::

    Sᵀ = K Qᵀ;  dPᵀ = V dOᵀ;  P = 2^(S - lse2);  dS = scale · P (dP - delta)
    dV += Pᵀ dO;  dK += dSᵀ Q;  dQ += dS K            delta_t = Σ dO_t O_t

For 5 · 64·64·64 multiply-adds, 32 KiB of K and V are read and 32 KiB of dK and dV read and written.
Where the threads are many more than the tasks, dK and dV are made by tasks of fewer keys, and dQ by
others (``backward_passes``): 7 products, each number by the same ones in the same order.
Nothing is shared between tasks, so nothing is locked, and no result depends on the number of
threads. Where a batch has few key/value heads, the query tiles of a group are cut into several runs
of about equal work, by shapes and window alone; a second pass then adds the dK and dV of the runs,
in order. With a window w, a run copies, sums and writes the keys alone that its queries can see:
together the runs read T + runs · w keys, and every part of the work is linear in T.
"""

from typing import Any

import numpy as np
from numba import get_thread_id, prange

from accel.cpu.attention_layout import (
    BLOCK,
    DKV,
    DQ,
    Attention,
    BackwardRoom,
    Drawn,
    ForwardRoom,
    Mask,
    Operands,
    Sizes,
    Tile,
    View,
    forward_task,
    forward_tasks,
    padded,
    row,
    run_tile,
)
from accel.cpu.attention_tiles import (
    FAST,
    LOG2_E,
    SKIP,
    START,
    UNSEEN,
    add_product,
    copy_rows,
    dot,
    dropout_tile,
    exponentials,
    fill,
    keys_of,
    mask_tile,
    multiply,
    running_maximum,
    scale_row,
    score_gradients,
    scores,
    tile_kind,
    transpose,
)
from accel.cpu.simd import at, exp2, start
from accel.jit import jit

OPERANDS = Operands(keys=BLOCK, side=1, pair=1, spare=0)


def packed_elements(sizes: Sizes) -> int:
    """Return the elements of the head-by-head copy of K and V."""
    return sizes.batch * sizes.kv_heads * sizes.keys * (sizes.width + sizes.value_width)


@jit(nogil=True, parallel=True, fastmath=FAST)
def forward(
    sizes: Sizes,
    q: View,
    k: View,
    v: View,
    out: View,
    scale: Any,
    mask: Mask,
    dropout: Drawn,
    lse2: Any,
    packed: Any,
    room: ForwardRoom,
    scratch: Any,
) -> None:
    """Attention of q over k and v.

    Parameters
    ----------
    sizes .. dropout
        Those of ``Attention``.
    lse2 : (B, Hq, T)
        Receives log₂ Σ 2^s of each query.
    packed : (packed_elements,)
        Receives K and V.
    room, scratch : ForwardRoom and (threads, room.end)
    """
    d, dv = sizes.width, sizes.value_width
    blocks = (sizes.keys + BLOCK - 1) // BLOCK
    heads = sizes.batch * sizes.kv_heads
    values = heads * sizes.keys * d  # where V begins
    for task in prange(heads * blocks):
        bg, u0 = task // blocks, task % blocks * BLOCK
        b, g = bg // sizes.kv_heads, bg % sizes.kv_heads
        nk = min(BLOCK, sizes.keys - u0)
        kept = bg * sizes.keys + u0
        copy_rows(row(k, b, u0, g, scale), k.position, at(start(packed), kept * d), d, nk, d)
        target = at(start(packed), values + kept * dv)
        copy_rows(row(v, b, u0, g, scale), v.position, target, dv, nk, dv)

    for task in prange(forward_tasks(sizes)):
        b, h, bg, first, last = forward_task(sizes, task)
        call = Attention(sizes, q, k, v, out, scale, mask, dropout)
        keys = at(start(packed), bg * sizes.keys * d)
        data = at(start(packed), values + bg * sizes.keys * dv)
        own = at(start(scratch), get_thread_id() * scratch.shape[1])
        line = at(start(lse2), (b * sizes.heads + h) * sizes.queries)
        for i in range(first, last + 1, max(1, last - first)):
            _forward_tile(call, keys, data, line, room, own, b, h, i)


@jit(fastmath=FAST, apart=True)
def _forward_tile(
    call: Attention,
    keys: Any,
    values: Any,
    lse2: Any,
    room: ForwardRoom,
    own: Any,
    b: int,
    h: int,
    i: int,
) -> None:
    """Compute the rows of query tile i of one head from its K (S, d) and V (S, dv)."""
    sizes, q, scale = call.sizes, call.q, call.scale
    d, dv = sizes.width, sizes.value_width
    t0 = i * BLOCK
    n = min(BLOCK, sizes.queries - t0)
    width = padded(n, scale)

    qt, o, s = at(own, room.queries_t), at(own, room.o), at(own, room.s)
    factors, drawn = at(own, room.factors), at(own, room.drawn)
    m, l, shrink = at(own, room.m), at(own, room.l), at(own, room.shrink)

    transpose(row(q, b, t0, h, scale), q.position, d, n, qt, width, scale * type(scale)(LOG2_E))
    fill(m, type(scale)(START), width)
    fill(l, scale * 0, width)
    fill(o, scale * 0, n * dv)
    low, end = keys_of(sizes, call.mask, t0, t0 + n)
    for u0 in range(low // BLOCK * BLOCK, end, BLOCK):
        nk = min(BLOCK, sizes.keys - u0)
        tile = Tile(b, h, t0, n, width, u0, nk)
        kind = tile_kind(call, tile)
        if kind == SKIP:
            continue
        scores(call, tile, kind, at(keys, u0 * d), d, qt, s)
        mask_tile(s, call, tile, kind)
        for c in range(width):
            shrink[c] = m[c]
        running_maximum(s, m, width, nk)
        for c in range(width):
            x = exp2(shrink[c] - m[c])
            shrink[c] = x
            l[c] *= x
        exponentials(s, m, l, width, nk)
        if call.dropout.active:
            dropout_tile(factors, drawn, call, tile)
            multiply(s, factors, nk * width)
        for t in range(n):
            if shrink[t] != 1:
                scale_row(at(o, t * dv), shrink[t], dv)
        add_product(call, tile, kind, s, True, at(values, u0 * dv), dv, o)
    for t in range(n):
        some = l[t] != 0
        scale_row(at(o, t * dv), 1 / l[t] if some else scale * 0, dv)
        lse2[t0 + t] = m[t] + np.log2(l[t]) if some else type(scale)(UNSEEN)
    copy_rows(o, dv, row(call.out, b, t0, h, scale), call.out.position, n, dv)


@jit(nogil=True, parallel=True, fastmath=FAST)
def backward(
    sizes: Sizes,
    q: View,
    k: View,
    v: View,
    out: View,
    scale: Any,
    mask: Mask,
    dropout: Drawn,
    dout: View,
    dq: View,
    dk: View,
    dvalue: View,
    lse2: Any,
    runs: Any,
    wanted: int,
    room: BackwardRoom,
    scratch: Any,
) -> None:
    """Gradients of attention.

    Parameters
    ----------
    sizes .. dropout
        Those of ``Attention``.
    dout, dq, dk, dvalue : View
        Laid out as out, q, k and v, but each run has its own B batch rows of dk and dvalue: run r
        writes rows r · B ..., of these the keys that it can see.
    lse2 : (B, Hq, T)
        What ``forward`` made.
    runs : (runs, 5) int64
        Made by ``cut_runs`` or ``cut_keys``.
    wanted : int
        ``DQ``, ``DKV`` or both: which gradients to write.
    room, scratch : BackwardRoom and (threads, room.end)
    """
    d, dv = sizes.width, sizes.value_width
    for task in prange(sizes.batch * sizes.kv_heads * len(runs)):
        r, bg = task % len(runs), task // len(runs)
        b, g = bg // sizes.kv_heads, bg % sizes.kv_heads
        call = Attention(sizes, q, k, v, out, scale, mask, dropout)
        first, end, low, span = runs[r, 0], runs[r, 1], runs[r, 2], runs[r, 3] - runs[r, 2]
        own = at(start(scratch), get_thread_id() * scratch.shape[1])
        keys, values = at(own, room.keys), at(own, room.values)
        dkeys, dvalues = at(own, room.dkeys), at(own, room.dvalues)
        copy_rows(row(k, b, low, g, scale), k.position, keys, d, span, d)
        copy_rows(row(v, b, low, g, scale), v.position, values, dv, span, dv)
        if wanted & DKV:
            fill(dkeys, scale * 0, span * d)
            fill(dvalues, scale * 0, span * dv)
        for place in range(first, end):
            h, i = run_tile(sizes, mask, g, place)
            line = at(start(lse2), (b * sizes.heads + h) * sizes.queries)
            _backward_tile(
                call, at(keys, -low * d), at(values, -low * dv), dout, line, dq,
                at(dkeys, -low * d), at(dvalues, -low * dv), room, own, b, h, i,
                low, low + span, wanted,
            )  # fmt: skip
        if wanted & DKV:
            slot = runs[r, 4] * sizes.batch + b
            copy_rows(dkeys, d, row(dk, slot, low, g, scale), dk.position, span, d)
            copy_rows(dvalues, dv, row(dvalue, slot, low, g, scale), dvalue.position, span, dv)


@jit(fastmath=FAST, apart=True)
def _backward_tile(
    call: Attention,
    keys: Any,
    values: Any,
    dout: View,
    lse2: Any,
    dq: View,
    dkeys: Any,
    dvalues: Any,
    room: BackwardRoom,
    own: Any,
    b: int,
    h: int,
    i: int,
    first: int,
    stop: int,
    wanted: int,
) -> None:
    """Compute dQ of query tile i of head h, and add its part to dK (S, d) and dV (S, dv).

    Of these the keys ``first`` .. ``stop - 1``, where tiles of keys begin and end.
    """
    sizes, q, scale = call.sizes, call.q, call.scale
    d, dv = sizes.width, sizes.value_width
    t0 = i * BLOCK
    n = min(BLOCK, sizes.queries - t0)
    width = padded(n, scale)
    zero = scale * 0
    low, end = keys_of(sizes, call.mask, t0, t0 + n)
    low, end = max(low, first), min(end, stop)
    if low >= end and not wanted & DQ:
        return

    queries_t, gradient_t = at(own, room.queries_t), at(own, room.gradient_t)
    queries, gradient = at(own, room.queries), at(own, room.gradient)
    dqueries, s, dp = at(own, room.dq), at(own, room.s), at(own, room.dp)
    factors, drawn = at(own, room.factors), at(own, room.drawn)
    lse, delta = at(own, room.lse2), at(own, room.delta)

    copy_rows(row(q, b, t0, h, scale), q.position, queries, d, n, d)
    copy_rows(row(dout, b, t0, h, scale), dout.position, gradient, dv, n, dv)
    transpose(queries, d, d, n, queries_t, width, scale * type(scale)(LOG2_E))
    transpose(gradient, dv, dv, n, gradient_t, width, zero + 1)
    fill(dqueries, zero, n * d)
    for t in range(n):
        lse[t] = lse2[t0 + t]
        delta[t] = dot(at(gradient, t * dv), row(call.out, b, t0 + t, h, scale), dv)
    for t in range(n, width):
        lse[t] = type(scale)(UNSEEN)
        delta[t] = zero

    for u0 in range(low // BLOCK * BLOCK, end, BLOCK):
        nk = min(BLOCK, sizes.keys - u0)
        tile = Tile(b, h, t0, n, width, u0, nk)
        kind = tile_kind(call, tile)
        if kind == SKIP:
            continue
        tile_keys, tile_values = at(keys, u0 * d), at(values, u0 * dv)
        scores(call, tile, kind, tile_keys, d, queries_t, s)
        scores(call, tile, kind, tile_values, dv, gradient_t, dp)
        mask_tile(s, call, tile, kind)
        if call.dropout.active:
            dropout_tile(factors, drawn, call, tile)
            multiply(dp, factors, nk * width)
        score_gradients(s, dp, lse, delta, scale, width, nk)
        if call.dropout.active:
            multiply(s, factors, nk * width)
        if wanted & DKV:
            add_product(call, tile, kind, s, False, gradient, dv, at(dvalues, u0 * dv))
            add_product(call, tile, kind, dp, False, queries, d, at(dkeys, u0 * d))
        if wanted & DQ:
            add_product(call, tile, kind, dp, True, tile_keys, d, dqueries)
    if wanted & DQ:
        copy_rows(dqueries, d, row(dq, b, t0, h, scale), dq.position, n, d)


@jit(nogil=True, parallel=True, fastmath=FAST)
def add_runs(sizes: Sizes, parts: View, runs: Any, target: View, width: int, like: Any) -> None:
    """Sum what the runs wrote, (runs · B, S, Hkv, width), in order into (B, S, Hkv, width)."""
    for bu in prange(sizes.batch * sizes.keys):
        b, u = bu // sizes.keys, bu % sizes.keys
        first = 0  # the runs that can see a key are neighbours
        while first < len(runs) and runs[first, 3] <= u:
            first += 1
        end = first
        while end < len(runs) and runs[end, 2] <= u:
            end += 1
        for g in range(sizes.kv_heads):
            x = row(target, b, u, g, like)
            if first == end:
                fill(x, like * 0, width)
                continue
            for e in range(width):
                total = row(parts, first * sizes.batch + b, u, g, like)[e]
                for r in range(first + 1, end):
                    total += row(parts, r * sizes.batch + b, u, g, like)[e]
                x[e] = total
