"""RMSNorm and LayerNorm; the mathematics is in ``reference/rmsnorm.py`` and ``layernorm.py``.

A row is read once from memory and once or twice more from the nearest cache. The caches keep the
input and one or two numbers a row; the backward recomputes the normalised rows, and adds ``plus``
to dx as it writes it, with the bits of ``add``. Gradients of gain and shift are sums over all
rows: each task adds up SUM_PIECE rows, and the tasks' sums are added in order.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from accel.cpu.kernels import (
    EACH,
    ROW_PIECE,
    SUM,
    SUM_PIECE,
    address,
    contiguous,
    delivered,
    receiver,
    sum_partials,
)
from accel.cpu.memory import empty
from accel.cpu.simd import at, pointer
from accel.cpu.streaming import ask, is_far, landing, leave, part, settle
from accel.jit import jit
from reference.types import Array


@jit(**EACH | {"fastmath": False})
def _sum(a: Any, b: Any) -> Any:
    """Return a + b, where b has been rounded: it is not joined to the product that b is."""
    return a + b


# ---- rmsnorm -------------------------------------------------------------------------------------


class RMSNormCache(NamedTuple):
    x: Array  # (..., D)
    gain: Array  # (D,)
    rstd: Array  # (N,) reciprocal of the root mean square of each row


@jit(**SUM)
def _rmsnorm_forward(
    eps: Any,
    one: Any,
    inv: Any,
    x: int,
    gain: int,
    out: int,
    rstd: int,
    rows: int,
    width: int,
    far: Any,
) -> None:
    a, g, y, rs = pointer(x, eps), pointer(gain, eps), pointer(out, eps), pointer(rstd, eps)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            u, z = at(a, i * width), at(y, i * width)
            s = one - one
            for j in range(width):
                s += u[j] * u[j]
            r = one / np.sqrt(s * inv + eps)
            rs[i] = r
            first = 0
            while first < width:
                n, v, k = part(width - first, far), at(u, first), at(g, first)
                w = landing(at(z, first), far)
                ask(at(v, width), n, far)
                for j in range(n):
                    w[j] = v[j] * r * k[j]
                leave(w, at(z, first), n, far)
                first += n
        settle(far)


@jit(**SUM)
def _rmsnorm_backward(
    inv: Any,
    x: int,
    gain: int,
    rstd: int,
    dout: int,
    dx: int,
    partial: int,
    rows: int,
    width: int,
    plus: int,
    far: Any,
) -> None:
    a, g, rs = pointer(x, inv), pointer(gain, inv), pointer(rstd, inv)
    dy, da, sums = pointer(dout, inv), pointer(dx, inv), pointer(partial, inv)
    others = pointer(plus, inv)  # null where nothing is to be added
    zero = inv - inv
    for piece in prange((rows + SUM_PIECE - 1) // SUM_PIECE):
        dg = at(sums, piece * width)
        for j in range(width):
            dg[j] = zero
        for i in range(piece * SUM_PIECE, min(rows, (piece + 1) * SUM_PIECE)):
            u, d, z, r = at(a, i * width), at(dy, i * width), at(da, i * width), rs[i]
            e = at(others, i * width)
            s, first = zero, 0
            while first < width:
                count, v, c, k = part(width - first, far), at(u, first), at(d, first), at(g, first)
                ask(at(v, width), count, far)
                for j in range(count):
                    s += c[j] * k[j] * (v[j] * r)
                first += count
            mean = s * inv
            first = 0
            while first < width:
                count, v, c = part(width - first, far), at(u, first), at(d, first)
                k, t, f, w = at(g, first), at(dg, first), at(e, first), landing(at(z, first), far)
                ask(at(c, width), count, far)
                if plus:
                    ask(at(f, width), count, far)
                for j in range(count):
                    n = v[j] * r
                    t[j] += c[j] * n
                    into = r * (c[j] * k[j] - n * mean)
                    w[j] = _sum(f[j], into) if plus else into
                leave(w, at(z, first), count, far)
                first += count
        settle(far)


def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> tuple[Array, RMSNormCache]:
    """Return x / √(mean(x²) + eps) · gain, shape (..., D)."""
    x, gain = contiguous(x), contiguous(gain)
    width = x.shape[-1]
    rows = x.size // max(width, 1)
    out, rstd = empty(x.shape, x.dtype), empty(rows, x.dtype)
    number = x.dtype.type
    _rmsnorm_forward(
        *(number(eps), number(1), number(1 / max(width, 1))),
        *(address(x), address(gain), address(out), address(rstd), rows, width),
        is_far(out),
    )
    return out, RMSNormCache(x, gain, rstd)


def rmsnorm_backward(
    dout: Array, cache: RMSNormCache, *, out: tuple[Array | None], plus: Array | None
) -> tuple[Array, Array]:
    """Return (dx + plus, dgain)."""
    x, gain, rstd = cache
    dout = contiguous(dout)
    plus = None if plus is None else contiguous(plus)
    rows, width = len(rstd), len(gain)
    dx = empty(x.shape, x.dtype)
    partial = empty((-(-rows // SUM_PIECE), width), x.dtype)
    _rmsnorm_backward(
        *(x.dtype.type(1 / max(width, 1)), address(x), address(gain), address(rstd)),
        *(address(dout), address(dx), address(partial), rows, width),
        *(address(plus), is_far(dx)),
    )
    dgain, elsewhere = receiver(out[0], gain.shape, x.dtype)
    sum_partials(partial, dgain)
    return dx, delivered(dgain, elsewhere)


# ---- layernorm -----------------------------------------------------------------------------------


class LayerNormCache(NamedTuple):
    x: Array  # (..., D)
    gain: Array  # (D,)
    stats: Array  # (2, N) mean, and reciprocal of the standard deviation, of each row


@jit(**SUM)
def _layernorm_forward(
    eps: Any,
    one: Any,
    inv: Any,
    x: int,
    gain: int,
    bias: int,
    out: int,
    stats: int,
    rows: int,
    width: int,
    far: Any,
) -> None:
    a, g, b = pointer(x, eps), pointer(gain, eps), pointer(bias, eps)
    y, st = pointer(out, eps), pointer(stats, eps)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            u, z = at(a, i * width), at(y, i * width)
            s = one - one
            for j in range(width):
                s += u[j]
            mean = s * inv
            # The variance of the centred row, in a second pass: mean(x²) - mean(x)² would cancel.
            s = one - one
            first = 0
            while first < width:
                n, v = part(width - first, far), at(u, first)
                ask(at(v, width), n, far)
                for j in range(n):
                    s += (v[j] - mean) * (v[j] - mean)
                first += n
            r = one / np.sqrt(s * inv + eps)
            st[i] = mean
            st[rows + i] = r
            first = 0
            while first < width:
                n, v, k, c = part(width - first, far), at(u, first), at(g, first), at(b, first)
                w = landing(at(z, first), far)
                for j in range(n):
                    w[j] = (v[j] - mean) * r * k[j] + c[j]
                leave(w, at(z, first), n, far)
                first += n
        settle(far)


@jit(**SUM)
def _layernorm_backward(
    inv: Any,
    x: int,
    gain: int,
    stats: int,
    dout: int,
    dx: int,
    gain_partial: int,
    bias_partial: int,
    rows: int,
    width: int,
    plus: int,
    far: Any,
) -> None:
    a, g, st = pointer(x, inv), pointer(gain, inv), pointer(stats, inv)
    dy, da = pointer(dout, inv), pointer(dx, inv)
    gain_sums, bias_sums = pointer(gain_partial, inv), pointer(bias_partial, inv)
    others = pointer(plus, inv)  # null where nothing is to be added
    zero = inv - inv
    for piece in prange((rows + SUM_PIECE - 1) // SUM_PIECE):
        dg, db = at(gain_sums, piece * width), at(bias_sums, piece * width)
        for j in range(width):
            dg[j] = zero
            db[j] = zero
        for i in range(piece * SUM_PIECE, min(rows, (piece + 1) * SUM_PIECE)):
            u, d, z = at(a, i * width), at(dy, i * width), at(da, i * width)
            e, mean, r = at(others, i * width), st[i], st[rows + i]
            s = zero
            along = zero
            first = 0
            while first < width:
                count, v, c, k = part(width - first, far), at(u, first), at(d, first), at(g, first)
                q = at(db, first)
                ask(at(v, width), count, far)
                for j in range(count):
                    q[j] += c[j]
                    dn = c[j] * k[j]
                    s += dn
                    along += dn * ((v[j] - mean) * r)
                first += count
            s *= inv
            along *= inv
            first = 0
            while first < width:
                count, v, c = part(width - first, far), at(u, first), at(d, first)
                k, t, f = at(g, first), at(dg, first), at(e, first)
                w = landing(at(z, first), far)
                ask(at(c, width), count, far)
                if plus:  # which LLVM does not take out of a loop of this size
                    ask(at(f, width), count, far)
                    for j in range(count):
                        n = (v[j] - mean) * r
                        t[j] += c[j] * n
                        w[j] = _sum(f[j], r * (c[j] * k[j] - s - n * along))
                else:
                    for j in range(count):
                        n = (v[j] - mean) * r
                        t[j] += c[j] * n
                        w[j] = r * (c[j] * k[j] - s - n * along)
                leave(w, at(z, first), count, far)
                first += count
        settle(far)


def layernorm_forward(
    x: Array, gain: Array, bias: Array, *, eps: float
) -> tuple[Array, LayerNormCache]:
    """Return (x - mean) / √(var + eps) · gain + bias, shape (..., D)."""
    x, gain, bias = contiguous(x), contiguous(gain), contiguous(bias)
    width = x.shape[-1]
    rows = x.size // max(width, 1)
    out, stats = empty(x.shape, x.dtype), empty((2, rows), x.dtype)
    number = x.dtype.type
    _layernorm_forward(
        *(number(eps), number(1), number(1 / max(width, 1)), address(x), address(gain)),
        *(address(bias), address(out), address(stats), rows, width),
        is_far(out),
    )
    return out, LayerNormCache(x, gain, stats)


def layernorm_backward(
    dout: Array,
    cache: LayerNormCache,
    *,
    out: tuple[Array | None, Array | None],
    plus: Array | None,
) -> tuple[Array, Array, Array]:
    """Return (dx + plus, dgain, dbias)."""
    x, gain, stats = cache
    dout = contiguous(dout)
    plus = None if plus is None else contiguous(plus)
    rows, width = stats.shape[1], len(gain)
    dx = empty(x.shape, x.dtype)
    partial = empty((2, -(-rows // SUM_PIECE), width), x.dtype)
    _layernorm_backward(
        *(x.dtype.type(1 / max(width, 1)), address(x), address(gain), address(stats)),
        *(address(dout), address(dx), address(partial[0]), address(partial[1]), rows, width),
        *(address(plus), is_far(dx)),
    )
    dgain, gain_elsewhere = receiver(out[0], gain.shape, x.dtype)
    dbias, bias_elsewhere = receiver(out[1], gain.shape, x.dtype)
    sum_partials(partial[0], dgain)
    sum_partials(partial[1], dbias)
    return dx, delivered(dgain, gain_elsewhere), delivered(dbias, bias_elsewhere)
