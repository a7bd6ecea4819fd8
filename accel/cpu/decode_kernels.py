"""The kernels of ``decode.py``: one token through all layers in one compiled call.

One token does two floating-point operations for each weight it reads, so reading the weights once,
from end to end, is all the time there is to spend: 4 bytes a weight in float32, 2 where they are
stored as bfloat16, 1.0625 as blocks of eight bits; and the KV cache, 4 bytes a number or 2.

* A product with a weight (in, out) is cut by rows of the weight into tasks of MATVEC_TASK elements
  and TASK_ROWS rows at least. Each task reads its rows once, for all rows of the batch, and leaves
  a partial sum; the partial sums are added in order. The head (V, D) is a dot product a row, and so
  is a product with a weight in bfloat16, which is kept as (out, in): a row of it is half as long in
  memory, and read as (in, out), where each row adds to all sums, it took up to 1.8 times the time
  of the reading. Matrices of eight bits have kernels of their own (``q8_kernels.py``).
* Attention reads the cache in blocks of KEY_BLOCK keys. A task takes one block of one row, with all
  heads, so that it reads from end to end: four keys at a time, and the next four are asked for.
  The blocks are joined by their maxima and sums, as tiles are in
  ``reference/study/tiled_attention.py``, whose m, l and shrink they are.

What a kernel is told of a model stands in records, by name. Where a record holds an address, 0 says
that the model has no such array.
"""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from numba import prange, types
from numba.extending import overload

from accel.cpu import q8_kernels
from accel.cpu.activations import normal
from accel.cpu.halves import as_type
from accel.cpu.kernels import COMPILED, EACH, SERIAL, SUM
from accel.cpu.packing import prefetch
from accel.cpu.simd import at, exp, pad_columns, pointer
from accel.jit import jit
from reference.config import FeedForward

MATVEC_TASK = 32_768  # elements of a weight that one task reads, at least
MAX_TASKS = 64  # of one product
TASK_ROWS = 48  # of a weight that one task reads; its partial sum is written and read like two
SUM_COLUMNS = 256  # of a product, whose partial sums one task adds
KEY_BLOCK = 32  # keys of one task
DOT_ROWS = 64  # rows of a weight whose dot products are one task


def record(*integers: str, floats: tuple[str, ...] = (), dtype: Any = np.float64) -> Any:
    """Return the type of a record of such fields."""
    return np.dtype([(name, np.int64) for name in integers] + [(name, dtype) for name in floats])


# The weights of a layer, after their parameters' names (``w_up`` is SwiGLU's gate and up too), and
# its part of the KV cache, a ring of ``slots`` tokens of which the last ``window`` are seen.
LAYER = record(
    *("attention_norm_gain", "attention_norm_bias", "wqkv", "bqkv", "q_norm_gain", "k_norm_gain"),
    *("wo", "bo", "ffn_norm_gain", "ffn_norm_bias", "w_up", "b_up", "w_down", "b_down"),
    *("keys", "values", "slots", "window"),
)
# What is not of one layer: weights, and what there is to work with for this token.
TOKEN = record(
    *("final_norm_gain", "final_norm_bias", "head", "head_bias"),
    *("cos", "sin", "slopes", "positions", "x", "out"),
    *("h", "qkv", "attended", "up", "active", "scores", "joined", "partial"),
    *("batch", "length"),
)


def model_record(dtype: Any) -> Any:
    """Return the type of a model's sizes, its activation (one flag is set) and its constants."""
    sizes = ("width", "heads", "kv_heads", "d", "hidden", "vocabulary", "pre")
    numbers = ("one", "inv_width", "inv_head", "eps", "scale", "tanh_2c", "tanh_cubic")
    return record(*sizes, *get_args(FeedForward), floats=numbers, dtype=dtype)


@jit(**SUM)
def _matvec(
    one: Any,
    weight_like: Any,
    x: Any,
    weight_address: int,
    bias_address: int,
    out: Any,
    partial: Any,
    batch: int,
    n_in: int,
    n_out: int,
) -> None:
    """Write x W + b: x (B, n_in), weight (n_in, n_out), partial with room for tasks·B·n_out."""
    weight, bias = pointer(weight_address, weight_like), pointer(bias_address, one)
    tasks = 1
    while 2 * tasks <= min(MAX_TASKS, n_in // TASK_ROWS, n_in * n_out // MATVEC_TASK):
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
                    y[j] += (u0 * w0[j] + u1 * w1[j]) + (u2 * w2[j] + u3 * w3[j])
                i += 4
            while i < high:
                w0, u0 = at(weight, i * n_out), u[i]
                for j in range(n_out):
                    y[j] += u0 * w0[j]
                i += 1
    for piece in prange((n_out + SUM_COLUMNS - 1) // SUM_COLUMNS):
        first = piece * SUM_COLUMNS
        columns = min(SUM_COLUMNS, n_out - first)
        for b in range(batch):
            z = at(out, b * n_out + first)
            for j in range(columns):
                z[j] = 0
            if bias_address:
                for j in range(columns):
                    z[j] = bias[first + j]
            for task in range(tasks):
                y = at(partial, (task * batch + b) * n_out + first)
                for j in range(columns):
                    z[j] += y[j]


@jit(**SUM)
def _dots(
    one: Any,
    weight_like: Any,
    x: Any,
    weight_address: int,
    bias_address: int,
    out: Any,
    partial: Any,
    batch: int,
    n_in: int,
    n_out: int,
) -> None:
    """Write x Wᵀ + b: x (B, n_in), weight (n_out, n_in); ``partial`` is not needed."""
    zero = one - one
    weight, bias = pointer(weight_address, weight_like), pointer(bias_address, one)
    for task in prange((n_out + DOT_ROWS - 1) // DOT_ROWS):
        for i in range(task * DOT_ROWS, min(n_out, (task + 1) * DOT_ROWS)):
            w = at(weight, i * n_in)
            for b in range(batch):
                u = at(x, b * n_in)
                s = zero
                for j in range(n_in):
                    s += u[j] * as_type(one, w[j])
                if bias_address:
                    s += bias[i]
                out[b * n_out + i] = s


def _by_type(kernels: dict[Any, Any], otherwise: Any) -> Callable[..., Any]:
    """Return a product by the kernel for the type of its second argument, a scalar."""

    def multiply(*arguments: Any) -> None:
        raise TypeError(COMPILED)

    @overload(multiply)
    def multiply_overload(*arguments: Any) -> Callable[..., Any]:
        kernel = kernels.get(arguments[1], otherwise)

        def call(*arguments: Any) -> None:
            kernel(*arguments)

        return call

    return multiply


_multiply = _by_type({types.int8: q8_kernels.matvec, types.uint16: _dots}, _matvec)
_multiply_head = _by_type({types.int8: q8_kernels.matvec}, _dots)


@jit(**SERIAL)
def _norm(
    one: Any,
    inv: Any,
    eps: Any,
    x: Any,
    gain_address: int,
    bias_address: int,
    out: Any,
    batch: int,
    width: int,
) -> None:
    """Write RMSNorm of each row, or LayerNorm, which has a bias; ``out`` may be x."""
    gain, bias, centred = pointer(gain_address, one), pointer(bias_address, one), bias_address != 0
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
        _scaled(u, mean, one / np.sqrt(s * inv + eps), gain, z, width)
        if centred:
            for j in range(width):
                z[j] += bias[j]


@jit(**EACH)
def _scaled(u: Any, mean: Any, r: Any, gain: Any, z: Any, width: int) -> None:
    for j in range(width):
        z[j] = (u[j] - mean) * r * gain[j]


@jit(**EACH)
def _turn_and_store(
    model: Any, layer: Any, token: Any, kept_like: Any, qkv: Any, positions: Any
) -> None:
    """Norm and turn queries and keys, and write keys and values into the token's slot."""
    one, heads, kv_heads, d = model.one, model.heads, model.kv_heads, model.d
    cos, sin = pointer(token.cos, one), pointer(token.sin, one)
    k_cache, v_cache = pointer(layer.keys, kept_like), pointer(layer.values, kept_like)
    for b in range(token.batch):
        row = at(qkv, b * (heads + 2 * kv_heads) * d)
        if layer.q_norm_gain:
            q, k = row, at(row, heads * d)
            inv, eps = model.inv_head, model.eps
            _norm(one, inv, eps, q, layer.q_norm_gain, 0, q, heads, d)
            _norm(one, inv, eps, k, layer.k_norm_gain, 0, k, kv_heads, d)
        if token.cos:
            c, s = at(cos, b * (d // 2)), at(sin, b * (d // 2))
            for h in range(heads + kv_heads):
                u = at(row, h * d)
                for j in range(d // 2):
                    even, odd = u[2 * j], u[2 * j + 1]
                    u[2 * j] = even * c[j] - odd * s[j]
                    u[2 * j + 1] = even * s[j] + odd * c[j]
        start = (b * layer.slots + positions[b] % layer.slots) * kv_heads * d
        keys, values = at(k_cache, start), at(v_cache, start)
        new_keys, new_values = at(row, heads * d), at(row, (heads + kv_heads) * d)
        for j in range(kv_heads * d):
            keys[j] = as_type(kept_like, new_keys[j])
            values[j] = as_type(kept_like, new_values[j])


@jit(**SERIAL)
def _attend_block(
    one: Any,
    kept_like: Any,
    scale: Any,
    queries: Any,
    keys: Any,
    values: Any,
    slopes_address: int,
    distance: int,
    scores: Any,
    results: Any,
    heads: int,
    kv_heads: int,
    d: int,
    count: int,
    stride: int,
) -> None:
    """Attend from all heads to ``count`` keys, the first of them ``distance`` tokens back.

    A head's result is its largest score, its sum of exponentials, and the sum of values that they
    weigh; the results of two heads lie ``stride`` apart.
    """
    zero, group, step = one - one, heads // kv_heads, kv_heads * d
    slopes, line = pointer(slopes_address, one), pad_columns(kept_like)
    for h in range(heads):
        result = at(results, h * stride)
        for j in range(d + 2):
            result[j] = zero
        result[0] = -np.inf
    whole = max(count, 0) // 4 * 4
    for t in range(0, whole, 4):
        for h in range(heads):
            q, s = at(queries, h * d), at(scores, h * KEY_BLOCK + t)
            k0 = at(keys, t * step + h // group * d)
            k1, k2, k3 = at(k0, step), at(k0, 2 * step), at(k0, 3 * step)
            if h % group == 0:
                for ahead in range(4, 8):
                    prefetch(at(k0, ahead * step), 0, d, line)
            s0, s1, s2, s3 = zero, zero, zero, zero
            for j in range(d):
                s0 += q[j] * as_type(one, k0[j])
                s1 += q[j] * as_type(one, k1[j])
                s2 += q[j] * as_type(one, k2[j])
                s3 += q[j] * as_type(one, k3[j])
            s[0], s[1], s[2], s[3] = s0, s1, s2, s3
    for t in range(whole, count):
        for h in range(heads):
            q, k, dot = at(queries, h * d), at(keys, t * step + h // group * d), zero
            for j in range(d):
                dot += q[j] * as_type(one, k[j])
            scores[h * KEY_BLOCK + t] = dot
    for h in range(heads if count > 0 else 0):
        s, result = at(scores, h * KEY_BLOCK), at(results, h * stride)
        slope = slopes[h] if slopes_address else zero
        m, l = result[0], zero
        for t in range(count):
            s[t] = s[t] * scale - slope * (distance - t)
            m = max(m, s[t])
        base = zero if m == -np.inf else m  # of scores that are all -inf: exp(-inf) = 0
        for t in range(count):
            s[t] = exp(s[t] - base)
            l += s[t]
        result[0], result[1] = m, l
    for t in range(0, whole, 4):
        for h in range(heads):
            p, o = at(scores, h * KEY_BLOCK + t), at(results, h * stride + 2)
            p0, p1, p2, p3 = p[0], p[1], p[2], p[3]
            v0 = at(values, t * step + h // group * d)
            v1, v2, v3 = at(v0, step), at(v0, 2 * step), at(v0, 3 * step)
            if h % group == 0:
                for ahead in range(4, 8):
                    prefetch(at(v0, ahead * step), 0, d, line)
            for j in range(d):
                o[j] += (p0 * as_type(one, v0[j]) + p1 * as_type(one, v1[j])) + (
                    p2 * as_type(one, v2[j]) + p3 * as_type(one, v3[j])
                )
    for t in range(whole, count):
        for h in range(heads):
            p0, o = scores[h * KEY_BLOCK + t], at(results, h * stride + 2)
            v = at(values, t * step + h // group * d)
            for j in range(d):
                o[j] += p0 * as_type(one, v[j])


@jit(**SUM)
def _attend(
    one: Any,
    kept_like: Any,
    scale: Any,
    qkv: Any,
    keys_address: int,
    values_address: int,
    slopes_address: int,
    positions: Any,
    out: Any,
    scores: Any,
    partial: Any,
    batch: int,
    heads: int,
    kv_heads: int,
    d: int,
    slots: int,
    window: int,
    length: int,
) -> None:
    """Write attention of one query of each row over the tokens it sees: out (B, Hq·d).

    ``scores`` has room for B·Hq·blocks·KEY_BLOCK elements, ``partial`` for B·Hq·blocks·(d + 2).
    ``length`` is that of the longest row.
    """
    zero = one - one
    k_cache = pointer(keys_address, kept_like)
    v_cache = pointer(values_address, kept_like)
    blocks = (min(length, slots) + KEY_BLOCK - 1) // KEY_BLOCK
    for task in prange(batch * blocks):
        b, block = task // blocks, task % blocks
        position = np.int64(positions[b])
        # a ring has gone round once its slots are full; a longer cache shows its last window
        full: Any = min(position + 1, slots)
        low = max(block * KEY_BLOCK, full - window if window else 0)
        start = (b * slots + low) * kv_heads * d
        _attend_block(
            one,
            kept_like,
            scale,
            at(qkv, b * (heads + 2 * kv_heads) * d),
            at(k_cache, start),
            at(v_cache, start),
            slopes_address,
            position - low,
            at(scores, task * heads * KEY_BLOCK),
            at(partial, (b * heads * blocks + block) * (d + 2)),
            heads,
            kv_heads,
            d,
            min((block + 1) * KEY_BLOCK, full) - low,
            blocks * (d + 2),
        )
    for row in prange(batch * heads):
        z = at(out, row * d)
        m = partial[row * blocks * (d + 2)]
        for block in range(1, blocks):
            m = max(m, partial[(row * blocks + block) * (d + 2)])
        l, base = zero, zero if m == -np.inf else m
        for j in range(d):
            z[j] = zero
        for block in range(blocks):
            result = at(partial, (row * blocks + block) * (d + 2))
            shrink = exp(result[0] - base)
            l += shrink * result[1]
            o = at(result, 2)
            for j in range(d):
                z[j] += shrink * o[j]
        r = zero if l == zero else one / l
        for j in range(d):
            z[j] *= r


@jit(**EACH)
def _activate(model: Any, x: Any, out: Any, batch: int) -> None:
    """Write the activation of each row of x: (B, 2F) for SwiGLU, else (B, F)."""
    one, width = model.one, model.hidden
    if model.swiglu:
        for b in range(batch):
            gate, up, z = at(x, 2 * b * width), at(x, (2 * b + 1) * width), at(out, b * width)
            for j in range(width):
                z[j] = gate[j] * up[j] / (one + exp(-gate[j]))
    elif model.gelu:
        for i in range(batch * width):
            cdf, _ = normal(x[i])
            out[i] = x[i] * cdf
    elif model.gelu_tanh:
        c2, cubic = model.tanh_2c, model.tanh_cubic
        for i in range(batch * width):
            out[i] = x[i] / (one + exp(-c2 * x[i] * (one + cubic * x[i] * x[i])))
    elif model.relu:
        for i in range(batch * width):
            out[i] = one - one if x[i] < one - one else x[i]


@jit(**SERIAL)
def _add_to(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        x[i] += y[i]


@jit(**SERIAL)
def _copy(x: Any, out: Any, n: int) -> None:
    for i in range(n):
        out[i] = x[i]


@jit(**SERIAL)
def decode_token(models: Any, layers: Any, tokens: Any, like: Any, kept_like: Any) -> None:
    """Run the layers on x (B, D), in place, and write the logits.

    ``models`` and ``tokens`` are one record each, ``layers`` one for each layer; ``like`` is a
    scalar of the matrices' type, ``kept_like`` one of the cache's.
    """
    model, token = models[0], tokens[0]
    one, width, batch, d = model.one, model.width, token.batch, model.d
    heads, kv_heads, inv, eps = model.heads, model.kv_heads, model.inv_width, model.eps
    fused = (heads + 2 * kv_heads) * d
    inner = 2 * model.hidden if model.swiglu else model.hidden
    positions = pointer(token.positions, np.int32(0))
    x, h, partial = pointer(token.x, one), pointer(token.h, one), pointer(token.partial, one)
    qkv, attended = pointer(token.qkv, one), pointer(token.attended, one)
    up, active = pointer(token.up, one), pointer(token.active, one)
    scores, joined = pointer(token.scores, one), pointer(token.joined, one)

    for n in range(len(layers)):
        w = layers[n]
        if model.pre:
            gain, bias = w.attention_norm_gain, w.attention_norm_bias
            _norm(one, inv, eps, x, gain, bias, h, batch, width)
        else:
            _copy(x, h, batch * width)
        _multiply(one, like, h, w.wqkv, w.bqkv, qkv, partial, batch, width, fused)
        _turn_and_store(model, w, token, kept_like, qkv, positions)
        _attend(
            one, kept_like, model.scale, qkv, w.keys, w.values, token.slopes, positions, attended,
            scores, joined, batch, heads, kv_heads, d, w.slots, w.window, token.length,
        )  # fmt: skip
        _multiply(one, like, attended, w.wo, w.bo, h, partial, batch, heads * d, width)
        _add_to(x, h, batch * width)
        if model.pre:
            _norm(one, inv, eps, x, w.ffn_norm_gain, w.ffn_norm_bias, h, batch, width)
        else:
            gain, bias = w.attention_norm_gain, w.attention_norm_bias
            _norm(one, inv, eps, x, gain, bias, x, batch, width)
            _copy(x, h, batch * width)
        _multiply(one, like, h, w.w_up, w.b_up, up, partial, batch, width, inner)
        _activate(model, up, active, batch)
        _multiply(one, like, active, w.w_down, w.b_down, h, partial, batch, model.hidden, width)
        _add_to(x, h, batch * width)
        if not model.pre:
            _norm(one, inv, eps, x, w.ffn_norm_gain, w.ffn_norm_bias, x, batch, width)

    if model.pre:
        gain, bias = token.final_norm_gain, token.final_norm_bias
        _norm(one, inv, eps, x, gain, bias, h, batch, width)
    else:
        _copy(x, h, batch * width)
    out = pointer(token.out, one)
    _multiply_head(
        one, like, h, token.head, token.head_bias, out, partial, batch, width, model.vocabulary
    )
