"""SwiGLU and GELU, exact and by tanh; see ``reference/swiglu.py`` and ``gelu.py``.

All of them need an exponential for each element, so they vectorise as far as the exponential does
(``simd.exp``). GELU needs the distribution function Φ of the standard normal. For t ≥ 0

    Φ(-t) = exp(-t²/2) g(t),    Φ(t) = 1 - Φ(-t)

where g is smooth and falls from 1/2 like 1/(t√(2π)): in float32 it is w P(w) with w = 1/(1 + 0.3t)
and P of degree 9, fitted to relative error 4·10⁻⁹ (iteratively reweighted least squares on
0 ≤ t ≤ 14.5, beyond which float32 has no Φ(-t)). So the far tail keeps its relative accuracy, and
the density φ(t) = exp(-t²/2)/√(2π) that the backward needs shares the exponential. float64 takes
the library's erfc.

The input may be bfloat16, as the mode bf16 keeps it: a number is widened as it is read.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from accel.cpu.halves import as_type, wide
from accel.cpu.kernels import COMPILED, MAP, PIECE, ROW_PIECE, address, contiguous, like
from accel.cpu.memory import empty
from accel.cpu.simd import INLINE, at, exp, exp_below, held, pointer
from accel.jit import jit
from reference.types import Array


class ActivationCache(NamedTuple):
    x: Array  # the input, float or bfloat16


# ---- swiglu --------------------------------------------------------------------------------------


@jit(**MAP)
def _swiglu_forward(one: Any, kind: Any, a: int, out: int, rows: int, width: int) -> None:
    x, y = pointer(a, kind), pointer(out, one)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            gate, up, z = at(x, 2 * i * width), at(x, (2 * i + 1) * width), at(y, i * width)
            for j in range(width):
                g = as_type(one, gate[j])
                z[j] = g * as_type(one, up[j]) / (one + exp(-g))


@jit(**MAP)
def _swiglu_backward(
    one: Any, kind: Any, a: int, dout: int, out: int, rows: int, width: int
) -> None:
    x, dy, dx = pointer(a, kind), pointer(dout, one), pointer(out, one)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            gate, up, d = at(x, 2 * i * width), at(x, (2 * i + 1) * width), at(dy, i * width)
            dgate, dup = at(dx, 2 * i * width), at(dx, (2 * i + 1) * width)
            for j in range(width):
                g = as_type(one, gate[j])
                sigma = one / (one + exp(-g))
                dup[j] = d[j] * g * sigma
                dgate[j] = d[j] * as_type(one, up[j]) * sigma * (one + g * (one - sigma))


def swiglu_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return silu(gate) · up, shape (..., F), of x (..., 2F) whose first half is the gate."""
    x = contiguous(x)
    width = x.shape[-1] // 2
    out = empty((*x.shape[:-1], width), wide(x))
    rows = out.size // max(width, 1)
    _swiglu_forward(out.dtype.type(1), like(x), address(x), address(out), rows, width)
    return out, ActivationCache(x)


def swiglu_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx (..., 2F)."""
    x = cache.x
    width = x.shape[-1] // 2
    dout = contiguous(dout)
    dx = empty(x.shape, dout.dtype)
    rows = dout.size // max(width, 1)
    one = dout.dtype.type(1)
    _swiglu_backward(one, like(x), address(x), address(dout), address(dx), rows, width)
    return dx


# ---- the normal distribution function ------------------------------------------------------------

_F = np.float32
_SLOPE = _F(0.3)
# P(w), highest power first
_P = tuple(
    _F(c)
    for c in (
        *(-0.020622830513145552, 0.11243229846047666, -0.22820614343669804, 0.19177500869697492),
        *(-0.07941588589465118, 0.0961529036913639, 0.07839096071260142, 0.11023515266419526),
        *(0.11957184567470819, 0.11968668822448317),
    )
)
_P9, _P8, _P7, _P6, _P5, _P4, _P3, _P2, _P1, _P0 = _P
_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


def normal(x: Any) -> Any:
    """Return (Φ(x), exp(-x²/2)); kernels only."""
    raise TypeError(COMPILED)


@overload(normal, jit_options=INLINE)
def _normal_overload(x: Any) -> Callable[..., Any] | None:
    if x == types.float64:

        def normal_float64(x: Any) -> Any:
            return 0.5 * math.erfc(-x * _SQRT_HALF), np.exp(-0.5 * x * x)

        return normal_float64
    if x != types.float32:
        return None

    def normal_float32(x: Any) -> Any:
        bell, one = exp_below(held(_F(-0.5)) * x * x), held(_F(1))
        w = one / (one + held(_SLOPE) * abs(x))
        p = (held(_P9) * w + held(_P8)) * w + held(_P7)
        p = ((p * w + held(_P6)) * w + held(_P5)) * w + held(_P4)
        p = ((p * w + held(_P3)) * w + held(_P2)) * w + held(_P1)
        tail = bell * ((p * w + held(_P0)) * w)
        return (one - tail if x > _F(0) else tail), bell

    return normal_float32


# ---- gelu ----------------------------------------------------------------------------------------


@jit(**MAP)
def _gelu_forward(like: Any, kind: Any, a: int, out: int, n: int) -> None:
    x, z = pointer(a, kind), pointer(out, like)
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            v = as_type(like, x[i])
            cdf, _ = normal(v)
            z[i] = v * cdf


@jit(**MAP)
def _gelu_backward(scale: Any, kind: Any, a: int, dout: int, out: int, n: int) -> None:
    x, dy, z = pointer(a, kind), pointer(dout, scale), pointer(out, scale)
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            v = as_type(scale, x[i])
            cdf, bell = normal(v)
            z[i] = dy[i] * (cdf + v * bell * scale)


def gelu_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return x Φ(x), of x's shape."""
    x = contiguous(x)
    out = empty(x.shape, wide(x))
    _gelu_forward(like(out), like(x), address(x), address(out), x.size)
    return out, ActivationCache(x)


def gelu_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx."""
    x = cache.x
    dout = contiguous(dout)
    out = empty(x.shape, dout.dtype)
    scale = dout.dtype.type(_INV_SQRT_2PI)
    _gelu_backward(scale, like(x), address(x), address(dout), address(out), x.size)
    return out


# ---- gelu by tanh --------------------------------------------------------------------------------
#
# With y = c (x + a x³): ½ (1 + tanh y) = 1/(1 + exp(-2y)) =: σ, which keeps the relative accuracy
# of the tail that 1 + tanh y would cancel away, and 1 - tanh² y = 4σ(1 - σ).

TANH_CUBIC = 0.044715
TANH_2C = 2 * math.sqrt(2 / math.pi)


@jit(**MAP)
def _gelu_tanh_forward(one: Any, c2: Any, cubic: Any, kind: Any, a: int, out: int, n: int) -> None:
    x, z = pointer(a, kind), pointer(out, one)
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            v = as_type(one, x[i])
            z[i] = v / (one + exp(-c2 * v * (one + cubic * v * v)))


@jit(**MAP)
def _gelu_tanh_backward(
    one: Any, c2: Any, cubic: Any, kind: Any, a: int, dout: int, out: int, n: int
) -> None:
    x, dy, z = pointer(a, kind), pointer(dout, one), pointer(out, one)
    three = one + one + one
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            v = as_type(one, x[i])
            square = cubic * v * v
            sigma = one / (one + exp(-c2 * v * (one + square)))
            slope = c2 * v * (one + three * square)
            z[i] = dy[i] * sigma * (one + (one - sigma) * slope)


def _constants(x: Array) -> tuple[Any, Any, Any, Any]:
    number = wide(x).type
    return number(1), number(TANH_2C), number(TANH_CUBIC), like(x)


def gelu_tanh_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), of x's shape."""
    x = contiguous(x)
    out = empty(x.shape, wide(x))
    _gelu_tanh_forward(*_constants(x), address(x), address(out), x.size)
    return out, ActivationCache(x)


def gelu_tanh_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx."""
    x = cache.x
    dout = contiguous(dout)
    out = empty(x.shape, dout.dtype)
    _gelu_tanh_backward(*_constants(x), address(x), address(dout), address(out), x.size)
    return out
