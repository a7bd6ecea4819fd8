"""Read reference/study/tiled_attention.py first: its two loops in the mode bf16.

Operands are bfloat16; scores, softmax and sums are float32. ``forward`` and ``backward`` are those
of ``reference/attention.py``; a tile of queries meets the keys in its range of
``reference/visibility.py`` and no others.

The order of work is that of ``attention_kernels.py``, and so are the functions that mask, bias and
drop. What differs is that operands are packed tiles (``bf16_tiles.py``) and that everything is kept
transposed, keys or widths along the rows and queries along the columns. Then softmax runs across
queries, and P and dS come out of it as tiles of the next product without being transposed::

    forward    Sᵀ = K (Q')ᵀ     P = 2^(Sᵀ - m)       Oᵀ = Vᵀ P        Q' = scale · log₂e · Q
    backward   Sᵀ = K (Q')ᵀ     dPᵀ = V dOᵀ          P, dS as in attention_kernels.py
               dV = P dO        dK = dS Q'           dQᵀ = Kᵀ dS

(P and dS stand for tiles with keys along the rows.) The factors that Q' has and dK must not have,
and those that dQ lacks, are applied when dK and dQ are written out. As Q', K and V are only ever
multiplied, the backward is given them rounded (``keep``), with the bits of rounding them there.

A forward tile has up to 128 keys by 64 queries: scores of 32 KiB and probabilities of 16 KiB in the
first-level cache, for 2 · 128·64·64 multiply-adds in half a microsecond. K and Vᵀ are packed once
for all query tiles: 2 bytes an element, of which a tile reads 32 KiB. A backward tile has 64 by 64.
Tails are padded with zeros to multiples of 32, and the padded keys are masked.
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
    row,
    run_tile,
)
from accel.cpu.attention_tiles import (
    LOG2_E,
    LOW,
    SKIP,
    START,
    UNSEEN,
    copy_rows,
    dot,
    dropout_tile,
    exponentials,
    fill,
    keys_of,
    mask_tile,
    multiply,
    running_maximum,
    score_gradients,
    tile_kind,
)
from accel.cpu.bf16_portable import SIDE, STEP
from accel.cpu.bf16_softmax import gradients, probabilities
from accel.cpu.bf16_tiles import (
    block,
    configure,
    pack_columns,
    pack_rows,
    release,
    transpose_16,
)
from accel.cpu.halves import as_type
from accel.cpu.kernels import MAP, SERIAL, SUM
from accel.cpu.simd import at, exp2, pointer, start
from accel.jit import jit

KEYS = 128  # of a forward tile
LOG2_E_32 = np.float32(LOG2_E)

OPERANDS = Operands(keys=KEYS, side=SIDE, pair=2, spare=1024)


def packed_elements(sizes: Sizes) -> int:
    """Return the elements (4 bytes) of K and Vᵀ, packed for every key/value head."""
    keys, d, dv = (-(-n // SIDE) * SIDE for n in (sizes.keys, sizes.width, sizes.value_width))
    return sizes.batch * sizes.kv_heads * keys * (d + dv) // 2


@jit(**SERIAL)
def _copy_scaled(source: Any, step: int, target: Any, rows: int, n: int, factor: Any) -> None:
    for t in range(rows):
        x, y = at(source, t * step), at(target, t * n)
        for e in range(n):
            y[e] = x[e] * factor


@jit(**MAP)
def keep(x: View, factor: Any, out: int, batch: int, length: int, heads: int, width: int) -> None:
    """Write factor · x (B, T, H, width) as bfloat16, contiguous."""
    half = np.uint16(0)
    for bt in prange(batch * length):
        for h in range(heads):
            u = row(x, bt // length, bt % length, h, factor)
            z = at(pointer(out, half), (bt * heads + h) * width)
            for e in range(width):
                z[e] = as_type(half, u[e] * factor)


@jit(**SERIAL)
def _widen(source: Any, step: int, target: Any, rows: int, n: int) -> None:
    """Write rows of n bfloat16, ``step`` apart, as float32 side by side."""
    for t in range(rows):
        x, y = at(source, t * step), at(target, t * n)
        for e in range(n):
            y[e] = as_type(y[e], x[e])


@jit(**SERIAL)
def _write_transposed(
    source: Any, width: int, target: Any, step: int, rows: int, columns: int, spare: Any
) -> None:
    """Write target[t, e] = source[e, t] for ``rows`` t and ``columns`` e."""
    for t in range(0, rows, 16):
        for e in range(0, columns, 16):
            x, y = at(source, e * width + t), at(target, t * step + e)
            if t + 16 <= rows and e + 16 <= columns:
                transpose_16(x, width, y, step)
            else:
                transpose_16(x, width, spare, 16)
                for i in range(min(16, rows - t)):
                    for j in range(min(16, columns - e)):
                        y[i * step + j] = spare[16 * i + j]


@jit(**SERIAL, apart=True)
def _scores(keys: Any, queries: Any, d_steps: int, key_rows: int, width: int, s: Any) -> None:
    """S = A B for ``key_rows`` rows of packed A, ``width`` columns of packed B, k = 32 d_steps."""
    for i in range(0, key_rows, SIDE):
        for j in range(0, width, SIDE):
            a, b = at(keys, i // SIDE * d_steps * STEP), at(queries, j // SIDE * d_steps * STEP)
            block(a, b, at(s, i * width + j), width, d_steps, False)


@jit(**SUM)
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
    """Attention of q over k and v; parameters as in ``attention_kernels.forward``."""
    d, dv = sizes.width, sizes.value_width
    steps = (sizes.keys + SIDE - 1) // SIDE
    d_steps, dv_steps = (d + SIDE - 1) // SIDE, (dv + SIDE - 1) // SIDE
    heads = sizes.batch * sizes.kv_heads
    all_packed = pointer(packed.ctypes.data, np.uint32(0))
    all_values = at(all_packed, heads * steps * d_steps * STEP)
    base = scratch.ctypes.data
    thread_bytes = 4 * scratch.shape[1]
    for task in prange(heads * steps):
        bg, step = task // steps, task % steps
        b, g = bg // sizes.kv_heads, bg % sizes.kv_heads
        u0 = step * SIDE
        nk = min(SIDE, sizes.keys - u0)
        spare = at(pointer(base + get_thread_id() * thread_bytes, scale), room.spare)
        target = at(all_packed, (bg * steps + step) * d_steps * STEP)
        pack_rows(row(k, b, u0, g, scale), k.position, nk, d, target, 0, spare)
        target = at(all_values, (bg * dv_steps * steps + step) * STEP)
        source = row(v, b, u0, g, scale)
        pack_columns(source, v.position, nk, dv, target, steps * STEP, 0, spare)

    for task in prange(forward_tasks(sizes)):
        b, h, bg, first, last = forward_task(sizes, task)
        call = Attention(sizes, q, k, v, out, scale, mask, dropout)
        keys = at(all_packed, bg * steps * d_steps * STEP)
        data = at(all_values, bg * dv_steps * steps * STEP)
        own = base + get_thread_id() * thread_bytes
        line = at(start(lse2), (b * sizes.heads + h) * sizes.queries)
        configure()
        for i in range(first, last + 1, max(1, last - first)):
            _forward_tile(call, keys, data, line, room, own, b, h, i)
        release()


@jit(**SERIAL, apart=True)
def _forward_tile(
    call: Attention,
    keys: Any,
    values: Any,
    lse2: Any,
    room: ForwardRoom,
    own: int,
    b: int,
    h: int,
    i: int,
) -> None:
    """Compute the rows of query tile i of one head from its packed K and Vᵀ."""
    sizes, q, scale = call.sizes, call.q, call.scale
    d, dv = sizes.width, sizes.value_width
    steps = (sizes.keys + SIDE - 1) // SIDE
    d_steps, dv_steps = (d + SIDE - 1) // SIDE, (dv + SIDE - 1) // SIDE
    t0 = i * BLOCK
    n = min(BLOCK, sizes.queries - t0)
    width = (n + SIDE - 1) // SIDE * SIDE
    zero, one = scale * 0, scale * 0 + 1

    floats, words = pointer(own, scale), pointer(own, np.uint32(0))
    spare, queries = at(floats, room.spare), at(floats, room.scaled)
    m, l, shrink = at(floats, room.m), at(floats, room.l), at(floats, room.shrink)
    ot, s, p = at(floats, room.o), at(floats, room.s), at(words, room.p)
    packed_queries = at(words, room.queries_t)
    factors, drawn = at(floats, room.factors), at(floats, room.drawn)

    factor = scale * type(scale)(LOG2_E)
    _copy_scaled(row(q, b, t0, h, scale), q.position, queries, n, d, factor)
    for c in range(0, width, SIDE):
        target = at(packed_queries, c // SIDE * d_steps * STEP)
        pack_rows(at(queries, c * d), d, min(SIDE, n - c), d, target, 1, spare)
    fill(m, type(scale)(START), width)
    fill(l, zero, width)
    fill(ot, zero, SIDE * dv_steps * width)
    low, end = keys_of(sizes, call.mask, t0, t0 + n)
    for u0 in range(low // BLOCK * BLOCK, end, KEYS):
        nk = min(KEYS, end - u0)
        tile = Tile(b, h, t0, n, width, u0, nk)
        kind = tile_kind(call, tile)
        if kind == SKIP:
            continue
        key_steps = (nk + SIDE - 1) // SIDE
        first = u0 // SIDE
        _scores(
            at(keys, first * d_steps * STEP), packed_queries, d_steps, key_steps * SIDE, width, s
        )
        mask_tile(s, call, tile, kind)
        fill(at(s, nk * width), type(scale)(LOW), (key_steps * SIDE - nk) * width)
        for c in range(width):
            shrink[c] = m[c]
        running_maximum(s, m, width, nk)
        fallen = zero  # a sum, which LLVM makes of vectors, as it does not a flag
        for c in range(width):
            x = exp2(shrink[c] - m[c])
            shrink[c] = x
            l[c] *= x
            fallen += one - x
        if call.dropout.active:
            exponentials(s, m, l, width, key_steps * SIDE)
            dropout_tile(factors, drawn, call, tile)
            multiply(s, factors, nk * width)
            for step in range(key_steps):
                source, target = at(s, step * SIDE * width), at(p, step * STEP)
                pack_columns(source, width, SIDE, width, target, key_steps * STEP, 1, spare)
        else:
            for c in range(0, width, 16):
                target = at(p, c // SIDE * key_steps * STEP + c % SIDE * 16)
                probabilities(at(s, c), width, key_steps, at(m, c), at(l, c), target)
        if fallen != zero:
            for e in range(dv):
                line = at(ot, e * width)
                for c in range(width):
                    line[c] *= shrink[c]
        for e in range(0, SIDE * dv_steps, SIDE):
            for c in range(0, width, SIDE):
                x = at(values, (e // SIDE * steps + first) * STEP)
                y = at(p, c // SIDE * key_steps * STEP)
                block(x, y, at(ot, e * width + c), width, key_steps, True)
    for c in range(width):
        some = l[c] != zero
        shrink[c] = one / l[c] if some else zero
        if c < n:
            lse2[t0 + c] = m[c] + np.log2(l[c]) if some else type(scale)(UNSEEN)
    for e in range(dv):
        line = at(ot, e * width)
        for c in range(width):
            line[c] *= shrink[c]
    out = row(call.out, b, t0, h, scale)
    _write_transposed(ot, width, out, call.out.position, n, dv, spare)


@jit(**SUM)
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
    """Gradients of attention; parameters as in ``attention_kernels.backward``.

    But q, k and v, which are bfloat16, and q is Q'.
    """
    half = np.uint16(0)
    d, dv = sizes.width, sizes.value_width
    steps = (sizes.keys + SIDE - 1) // SIDE
    d_steps, dv_steps = (d + SIDE - 1) // SIDE, (dv + SIDE - 1) // SIDE
    d_pad, dv_pad = SIDE * d_steps, SIDE * dv_steps
    base = scratch.ctypes.data
    thread_bytes = 4 * scratch.shape[1]
    for task in prange(sizes.batch * sizes.kv_heads * len(runs)):
        r, bg = task % len(runs), task // len(runs)
        b, g = bg // sizes.kv_heads, bg % sizes.kv_heads
        call = Attention(sizes, q, k, v, out, scale, mask, dropout)
        first, end, low, high = runs[r, 0], runs[r, 1], runs[r, 2], runs[r, 3]
        own = base + get_thread_id() * thread_bytes
        floats, words = pointer(own, scale), pointer(own, np.uint32(0))
        spare = at(floats, room.spare)
        # Where key 0 would lie: what lies there begins with key ``low``.
        dkeys = at(floats, room.dkeys - low * d_pad)
        dvalues = at(floats, room.dvalues - low * dv_pad)
        keys = at(words, room.keys - low // SIDE * d_steps * STEP)
        values = at(words, room.values - low // SIDE * dv_steps * STEP)
        keys_t = at(words, room.keys_t - low // SIDE * STEP)
        for u0 in range(low, high, SIDE):
            step, nk = u0 // SIDE, min(SIDE, high - u0)
            source, data = at(floats, room.scaled), at(floats, room.gradient_t)  # free till later
            _widen(row(k, b, u0, g, half), k.position, source, nk, d)
            _widen(row(v, b, u0, g, half), v.position, data, nk, dv)
            pack_rows(source, d, nk, d, at(keys, step * d_steps * STEP), 0, spare)
            pack_rows(data, dv, nk, dv, at(values, step * dv_steps * STEP), 0, spare)
            pack_columns(source, d, nk, d, at(keys_t, step * STEP), steps * STEP, 0, spare)
            if wanted & DKV:
                fill(at(dkeys, u0 * d_pad), scale * 0, SIDE * d_pad)
                fill(at(dvalues, u0 * dv_pad), scale * 0, SIDE * dv_pad)
        configure()
        for place in range(first, end):
            h, i = run_tile(sizes, mask, g, place)
            line = at(start(lse2), (b * sizes.heads + h) * sizes.queries)
            _backward_tile(
                call, keys, values, keys_t, dout, line, dq, dkeys, dvalues, room, own, b, h, i,
                low, high, wanted,
            )  # fmt: skip
        release()
        if wanted & DKV:
            slot = runs[r, 4] * sizes.batch + b
            ln2 = type(scale)(1 / LOG2_E)
            for u in range(low, high):
                _copy_scaled(at(dkeys, u * d_pad), d, row(dk, slot, u, g, scale), 1, d, ln2)
            x, y = at(dvalues, low * dv_pad), row(dvalue, slot, low, g, scale)
            copy_rows(x, dv_pad, y, dvalue.position, high - low, dv)


@jit(**SERIAL, apart=True)
def _backward_tile(
    call: Attention,
    keys: Any,
    values: Any,
    keys_t: Any,
    dout: View,
    lse2: Any,
    dq: View,
    dkeys: Any,
    dvalues: Any,
    room: BackwardRoom,
    own: int,
    b: int,
    h: int,
    i: int,
    low: int,
    stop: int,
    wanted: int,
) -> None:
    """Compute dQ of query tile i of head h, and add its part to dK and dV.

    Of these the keys ``low`` .. ``stop - 1``, where tiles of keys begin and end.
    """
    sizes, q, scale = call.sizes, call.q, call.scale
    d, dv = sizes.width, sizes.value_width
    steps = (sizes.keys + SIDE - 1) // SIDE
    d_steps, dv_steps = (d + SIDE - 1) // SIDE, (dv + SIDE - 1) // SIDE
    d_pad, dv_pad = SIDE * d_steps, SIDE * dv_steps
    t0 = i * BLOCK
    n = min(BLOCK, sizes.queries - t0)
    width = (n + SIDE - 1) // SIDE * SIDE
    query_steps = width // SIDE
    zero = scale * 0
    visible, end = keys_of(sizes, call.mask, t0, t0 + n)
    low, end = max(low, visible), min(end, stop)
    if low >= end and not wanted & DQ:
        return

    floats, words = pointer(own, scale), pointer(own, np.uint32(0))
    spare, source, dqt = at(floats, room.spare), at(floats, room.scaled), at(floats, room.dq)
    lse, delta = at(floats, room.lse2), at(floats, room.delta)
    s, dp = at(floats, room.s), at(floats, room.dp)
    factors, drawn = at(floats, room.factors), at(floats, room.drawn)
    queries_t, gradient_t = at(words, room.queries_t), at(words, room.gradient_t)
    queries, gradient = at(words, room.queries), at(words, room.gradient)
    p_rows, ds_rows = at(words, room.p_rows), at(words, room.ds_rows)
    ds_columns = at(words, room.ds_columns)

    upstream = row(dout, b, t0, h, scale)
    _widen(row(q, b, t0, h, np.uint16(0)), q.position, source, n, d)
    for j in range(query_steps):
        left = min(SIDE, n - j * SIDE)
        x, y = at(source, j * SIDE * d), at(upstream, j * SIDE * dout.position)
        pack_rows(x, d, left, d, at(queries_t, j * d_steps * STEP), 1, spare)
        pack_rows(y, dout.position, left, dv, at(gradient_t, j * dv_steps * STEP), 1, spare)
        panel = query_steps * STEP
        pack_columns(x, d, left, d, at(queries, j * STEP), panel, 1, spare)
        pack_columns(y, dout.position, left, dv, at(gradient, j * STEP), panel, 1, spare)
    fill(dqt, zero, d_pad * width)
    for t in range(n):
        lse[t] = lse2[t0 + t]
        delta[t] = dot(at(upstream, t * dout.position), row(call.out, b, t0 + t, h, scale), dv)
    for t in range(n, width):
        lse[t] = type(scale)(UNSEEN)
        delta[t] = zero

    for u0 in range(low // BLOCK * BLOCK, end, BLOCK):
        nk = min(BLOCK, end - u0)
        tile = Tile(b, h, t0, n, width, u0, nk)
        kind = tile_kind(call, tile)
        if kind == SKIP:
            continue
        key_steps = (nk + SIDE - 1) // SIDE
        first = u0 // SIDE
        rows = key_steps * SIDE
        _scores(at(keys, first * d_steps * STEP), queries_t, d_steps, rows, width, s)
        _scores(at(values, first * dv_steps * STEP), gradient_t, dv_steps, rows, width, dp)
        mask_tile(s, call, tile, kind)
        fill(at(s, nk * width), type(scale)(LOW), (rows - nk) * width)
        if call.dropout.active:
            dropout_tile(factors, drawn, call, tile)
            fill(at(factors, nk * width), zero, (rows - nk) * width)
            multiply(dp, factors, rows * width)
            score_gradients(s, dp, lse, delta, zero + 1, width, rows)
            multiply(s, factors, rows * width)
            for j in range(key_steps):
                x, y = at(s, j * SIDE * width), at(dp, j * SIDE * width)
                panel = j * query_steps * STEP
                pack_rows(x, width, SIDE, width, at(p_rows, panel), 0, spare)
                pack_rows(y, width, SIDE, width, at(ds_rows, panel), 0, spare)
                target = at(ds_columns, j * STEP)
                pack_columns(y, width, SIDE, width, target, key_steps * STEP, 1, spare)
        else:
            for j in range(key_steps):
                for c in range(query_steps):
                    here, panel = j * SIDE * width + c * SIDE, (j * query_steps + c) * STEP
                    gradients(
                        at(s, here), at(dp, here), width, at(lse, c * SIDE), at(delta, c * SIDE),
                        at(p_rows, panel), at(ds_rows, panel),
                        at(ds_columns, (c * key_steps + j) * STEP),
                    )  # fmt: skip
        for j in range(key_steps if wanted & DKV else 0):
            x, y = at(p_rows, j * query_steps * STEP), at(ds_rows, j * query_steps * STEP)
            z = at(dvalues, (u0 + j * SIDE) * dv_pad)
            for e in range(dv_steps):
                right = at(gradient, e * query_steps * STEP)
                block(x, right, at(z, e * SIDE), dv_pad, query_steps, True)
            z = at(dkeys, (u0 + j * SIDE) * d_pad)
            for e in range(d_steps):
                right = at(queries, e * query_steps * STEP)
                block(y, right, at(z, e * SIDE), d_pad, query_steps, True)
        for e in range(d_steps if wanted & DQ else 0):
            x = at(keys_t, (e * steps + first) * STEP)
            for c in range(query_steps):
                y = at(ds_columns, c * key_steps * STEP)
                z = at(dqt, e * SIDE * width + c * SIDE)
                block(x, y, z, width, key_steps, True)
    if not wanted & DQ:
        return
    for e in range(d):
        line = at(dqt, e * width)
        for c in range(width):
            line[c] *= scale
    _write_transposed(dqt, width, row(dq, b, t0, h, scale), dq.position, n, d, spare)
