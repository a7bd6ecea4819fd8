"""The kernels of ``decode.py``: one token through all layers in one compiled call.

One token does two floating-point operations for each weight it reads, so reading the weights once,
from end to end, is all the time there is to spend: 4 bytes a weight in float32, 2 where they are
stored as bfloat16.

* A product with a weight (in, out) is cut by rows of the weight into tasks of about MATVEC_TASK
  elements. Each task reads its rows once, for all rows of the batch, and leaves a partial sum; the
  partial sums are added in order. The head (V, D) is a dot product a row.
* Attention reads the cache in blocks of KEY_BLOCK keys. A task takes one block of one key/value
  head of one row, with all query heads of the group; the blocks are joined by their maxima and
  sums, as in tiled attention.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from accel.cpu.activations import normal
from accel.cpu.kernels import SERIAL, SUM, store
from accel.cpu.simd import at, exp, pointer
from accel.jit import jit

MATVEC_TASK = 32_768  # elements of a weight that one task reads, about
MAX_TASKS = 64  # of one product
KEY_BLOCK = 512  # keys of one task
HEAD_ROWS = 64  # rows of the head in one task


def _widen(w: Any) -> Any:
    """Return a weight as a float; a uint16 holds the upper half of a float32. Kernels only."""
    raise NotImplementedError


@overload(_widen)
def _widen_overload(w: Any) -> Callable[..., Any]:
    if w == types.uint16:

        def widen_bfloat16(w: Any) -> Any:
            bits = np.uint32(np.uint32(w) << np.uint32(16))
            return bits.view(np.float32)

        return widen_bfloat16

    def widen_float(w: Any) -> Any:
        return w

    return widen_float


@jit(**SUM)
def _matvec(
    x: Any,
    weight: Any,
    bias: Any,
    has_bias: bool,
    out: Any,
    partial: Any,
    batch: int,
    n_in: int,
    n_out: int,
    task_elements: int,
    max_tasks: int,
) -> None:
    """Write x W + b: x (B, n_in), weight (n_in, n_out), partial with room for tasks·B·n_out."""
    tasks = 1
    while tasks < max_tasks and 2 * tasks * task_elements <= n_in * n_out:
        tasks *= 2
    rows = ((n_in + tasks - 1) // tasks + 3) // 4 * 4
    for task in prange(tasks):
        low, high = min(n_in, task * rows), min(n_in, (task + 1) * rows)
        for b in range(batch):
            u, y = at(x, b * n_in), at(partial, (task * batch + b) * n_out)
            for j in range(n_out):
                y[j] = 0
            i = low
            while i + 4 <= high:
                w0, w1 = at(weight, i * n_out), at(weight, (i + 1) * n_out)
                w2, w3 = at(weight, (i + 2) * n_out), at(weight, (i + 3) * n_out)
                u0, u1, u2, u3 = u[i], u[i + 1], u[i + 2], u[i + 3]
                for j in range(n_out):
                    y[j] += (u0 * _widen(w0[j]) + u1 * _widen(w1[j])) + (
                        u2 * _widen(w2[j]) + u3 * _widen(w3[j])
                    )
                i += 4
            while i < high:
                w0, u0 = at(weight, i * n_out), u[i]
                for j in range(n_out):
                    y[j] += u0 * _widen(w0[j])
                i += 1
    for b in range(batch):
        z = at(out, b * n_out)
        for j in range(n_out):
            z[j] = 0
        if has_bias:
            for j in range(n_out):
                z[j] = bias[j]
        for task in range(tasks):
            y = at(partial, (task * batch + b) * n_out)
            for j in range(n_out):
                z[j] += y[j]


@jit(**SUM)
def _head(
    zero: Any,
    x: Any,
    head: Any,
    bias: Any,
    has_bias: bool,
    out: Any,
    batch: int,
    vocabulary: int,
    width: int,
    task_rows: int,
) -> None:
    """Write x headᵀ + b: x (B, D), head (V, D), out (B, V)."""
    for task in prange((vocabulary + task_rows - 1) // task_rows):
        for v in range(task * task_rows, min(vocabulary, (task + 1) * task_rows)):
            w = at(head, v * width)
            for b in range(batch):
                u = at(x, b * width)
                s = zero
                for j in range(width):
                    s += u[j] * _widen(w[j])
                if has_bias:
                    s += bias[v]
                out[b * vocabulary + v] = s


@jit(**SERIAL)
def _norm(
    one: Any,
    inv: Any,
    eps: Any,
    x: Any,
    gain: Any,
    bias: Any,
    centred: bool,
    out: Any,
    batch: int,
    width: int,
) -> None:
    """Write RMSNorm, or LayerNorm where ``centred``, of each row; ``out`` may be x."""
    for b in range(batch):
        u, z = at(x, b * width), at(out, b * width)
        mean = one - one
        if centred:
            for j in range(width):
                mean += u[j]
            mean *= inv
        s = one - one
        for j in range(width):
            s += (u[j] - mean) * (u[j] - mean)
        r = one / np.sqrt(s * inv + eps)
        for j in range(width):
            z[j] = (u[j] - mean) * r * gain[j]
        if centred:
            for j in range(width):
                z[j] += bias[j]


@jit(**SERIAL)
def _rope_and_store(
    one: Any,
    qkv: Any,
    cos: Any,
    sin: Any,
    turn: bool,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    d: int,
    room: int,
) -> None:
    """Turn queries and keys, and write keys and values of one layer where the token stands."""
    for b in range(batch):
        row = at(qkv, b * (heads + 2 * kv_heads) * d)
        if turn:
            c, s = at(cos, b * (d // 2)), at(sin, b * (d // 2))
            for h in range(heads + kv_heads):
                u = at(row, h * d)
                for j in range(d // 2):
                    even, odd = u[2 * j], u[2 * j + 1]
                    u[2 * j] = even * c[j] - odd * s[j]
                    u[2 * j + 1] = even * s[j] + odd * c[j]
        start = (b * room + positions[b]) * kv_heads * d
        keys, values = at(k_cache, start), at(v_cache, start)
        new_keys, new_values = at(row, heads * d), at(row, (heads + kv_heads) * d)
        for j in range(kv_heads * d):
            keys[j] = new_keys[j]
            values[j] = new_values[j]


@jit(**SUM)
def _attend(
    one: Any,
    scale: Any,
    qkv: Any,
    k_cache: Any,
    v_cache: Any,
    slopes: Any,
    has_slopes: bool,
    positions: Any,
    out: Any,
    scores: Any,
    partial: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    d: int,
    room: int,
    blocks: int,
    block_keys: int,
) -> None:
    """Write attention of one query of each row over keys 0 .. position: out (B, Hq·d).

    ``scores`` has room for B·Hq·blocks·block_keys elements, ``partial`` for B·Hq·blocks·(d + 2):
    a block's largest score, its sum of exponentials, and the sum of values they weigh.
    """
    zero = one - one
    group = heads // kv_heads
    for task in prange(batch * kv_heads * blocks):
        b, g, block = task // (kv_heads * blocks), task // blocks % kv_heads, task % blocks
        position = np.int64(positions[b])
        first = block * block_keys
        count = min(position + 1 - first, block_keys)
        for i in range(group):
            h = g * group + i
            q = at(qkv, (b * (heads + 2 * kv_heads) + h) * d)
            s = at(scores, (task * group + i) * block_keys)
            result = at(partial, ((b * heads + h) * blocks + block) * (d + 2))
            for j in range(d + 2):
                result[j] = zero
            store(result, 0, -np.inf)
            if count <= 0:
                continue
            slope = slopes[h] if has_slopes else zero
            top = result[0]
            for t in range(count):
                k = at(k_cache, ((b * room + first + t) * kv_heads + g) * d)
                dot = zero
                for j in range(d):
                    dot += q[j] * k[j]
                s[t] = dot * scale - slope * (position - first - t)
                top = max(top, s[t])
            total = zero
            for t in range(count):
                s[t] = exp(s[t] - top)
                total += s[t]
            o = at(result, 2)
            for t in range(count):
                v = at(v_cache, ((b * room + first + t) * kv_heads + g) * d)
                p = s[t]
                for j in range(d):
                    o[j] += p * v[j]
            store(result, 0, top)
            store(result, 1, total)
    for row in range(batch * heads):
        z = at(out, row * d)
        top = partial[row * blocks * (d + 2)]
        for block in range(1, blocks):
            top = max(top, partial[(row * blocks + block) * (d + 2)])
        total = zero
        for j in range(d):
            z[j] = zero
        for block in range(blocks):
            result = at(partial, (row * blocks + block) * (d + 2))
            weight = exp(result[0] - top)
            total += weight * result[1]
            o = at(result, 2)
            for j in range(d):
                z[j] += weight * o[j]
        r = one / total
        for j in range(d):
            z[j] *= r


@jit(**SERIAL)
def _activate(
    one: Any, c2: Any, cubic: Any, x: Any, out: Any, batch: int, width: int, kind: int
) -> None:
    """Write the activation of each row of x: (B, 2F) for SwiGLU, else (B, F)."""
    if kind == 0:
        for b in range(batch):
            gate, up, z = at(x, 2 * b * width), at(x, (2 * b + 1) * width), at(out, b * width)
            for j in range(width):
                z[j] = gate[j] * up[j] / (one + exp(-gate[j]))
    elif kind == 1:
        for i in range(batch * width):
            cdf, _ = normal(x[i])
            out[i] = x[i] * cdf
    elif kind == 2:
        for i in range(batch * width):
            out[i] = x[i] / (one + exp(-c2 * x[i] * (one + cubic * x[i] * x[i])))
    else:
        for i in range(batch * width):
            out[i] = one - one if x[i] < one - one else x[i]


@jit(**SERIAL)
def _add_to(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        x[i] += y[i]


@jit(**SERIAL)
def decode_token(
    one: Any,
    inv_width: Any,
    eps: Any,
    scale: Any,
    c2: Any,
    cubic: Any,
    weight_like: Any,
    weights: Any,
    layers: int,
    batch: int,
    width: int,
    heads: int,
    kv_heads: int,
    d: int,
    hidden: int,
    vocabulary: int,
    kind: int,
    pre: bool,
    centred: bool,
    turn: bool,
    has_slopes: bool,
    cos_address: int,
    sin_address: int,
    slopes_address: int,
    positions_address: int,
    k_address: int,
    v_address: int,
    room: int,
    blocks: int,
    x_address: int,
    work_address: int,
    out_address: int,
) -> None:
    """Run the layers on x (B, D), in place, and write the logits; ``work`` is long enough."""
    cos, sin, slopes = (
        pointer(cos_address, one),
        pointer(sin_address, one),
        pointer(slopes_address, one),
    )
    positions = pointer(positions_address, np.int32(0))
    k_cache, v_cache = pointer(k_address, one), pointer(v_address, one)
    x, out = pointer(x_address, one), pointer(out_address, one)
    fused = (heads + 2 * kv_heads) * d
    inner = 2 * hidden if kind == 0 else hidden

    h = pointer(work_address, one)
    qkv = at(h, batch * width)
    attended = at(qkv, batch * fused)
    up = at(attended, batch * heads * d)
    active = at(up, batch * inner)
    scores = at(active, batch * hidden)
    joined = at(scores, batch * heads * blocks * KEY_BLOCK)
    partial = at(joined, batch * heads * blocks * (d + 2))

    for layer in range(layers):
        w = weights[layer]
        if pre:
            gain, bias = pointer(w[0], one), pointer(w[1], one)
            _norm(one, inv_width, eps, x, gain, bias, centred, h, batch, width)
        else:
            for j in range(batch * width):
                h[j] = x[j]
        matrix, bias = pointer(w[2], weight_like), pointer(w[3], one)
        _matvec(
            h, matrix, bias, w[3] != 0, qkv, partial, batch, width, fused, MATVEC_TASK, MAX_TASKS
        )
        at_layer = layer * batch * room * kv_heads * d
        keys, values = at(k_cache, at_layer), at(v_cache, at_layer)
        _rope_and_store(
            one, qkv, cos, sin, turn, positions, keys, values, batch, heads, kv_heads, d, room
        )
        _attend(
            one,
            scale,
            qkv,
            keys,
            values,
            slopes,
            has_slopes,
            positions,
            attended,
            scores,
            joined,
            batch,
            heads,
            kv_heads,
            d,
            room,
            blocks,
            KEY_BLOCK,
        )
        matrix, bias = pointer(w[4], weight_like), pointer(w[5], one)
        _matvec(
            attended,
            matrix,
            bias,
            w[5] != 0,
            h,
            partial,
            batch,
            heads * d,
            width,
            MATVEC_TASK,
            MAX_TASKS,
        )
        _add_to(x, h, batch * width)
        gain, bias = pointer(w[6], one), pointer(w[7], one)
        if pre:
            _norm(one, inv_width, eps, x, gain, bias, centred, h, batch, width)
        else:
            first_gain, first_bias = pointer(w[0], one), pointer(w[1], one)
            _norm(one, inv_width, eps, x, first_gain, first_bias, centred, x, batch, width)
            for j in range(batch * width):
                h[j] = x[j]
        matrix, bias = pointer(w[8], weight_like), pointer(w[9], one)
        _matvec(
            h, matrix, bias, w[9] != 0, up, partial, batch, width, inner, MATVEC_TASK, MAX_TASKS
        )
        _activate(one, c2, cubic, up, active, batch, hidden, kind)
        matrix, bias = pointer(w[10], weight_like), pointer(w[11], one)
        _matvec(
            active,
            matrix,
            bias,
            w[11] != 0,
            h,
            partial,
            batch,
            hidden,
            width,
            MATVEC_TASK,
            MAX_TASKS,
        )
        _add_to(x, h, batch * width)
        if not pre:
            bias = pointer(w[7], one)
            _norm(one, inv_width, eps, x, gain, bias, centred, x, batch, width)

    last = weights[layers]
    if pre:
        gain, bias = pointer(last[0], one), pointer(last[1], one)
        _norm(one, inv_width, eps, x, gain, bias, centred, h, batch, width)
    else:
        for j in range(batch * width):
            h[j] = x[j]
    matrix, bias = pointer(last[2], weight_like), pointer(last[3], one)
    _head(one - one, h, matrix, bias, last[3] != 0, out, batch, vocabulary, width, HEAD_ROWS)
