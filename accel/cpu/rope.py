"""RoPE; the mathematics is in ``reference/rope.py``.

One pass over x: a task takes the tokens of ROW_PIECE positions, rotates the first heads and
copies the others. The tables of cosines and sines are made in float64 and kept for the next call:
every layer of every step asks for the same ones.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from accel.cpu.kernels import MAP, ROW_PIECE, address, contiguous
from accel.cpu.memory import empty
from accel.cpu.simd import at, pointer
from accel.jit import jit
from reference.rope import frequencies
from reference.types import Array, RopeScaling


class RopeCache(NamedTuple):
    cos: Array  # (T, d/2), or (B, T, d/2) when rows start at positions of their own
    sin: Array  # the same
    rotate_heads: int  # heads that are rotated, from the first on


@jit(**MAP)
def _rope(
    sign: Any,
    x: int,
    cos: int,
    sin: int,
    out: int,
    tokens: int,
    period: int,
    heads: int,
    turning: int,
    half: int,
) -> None:
    """Turn ``tokens`` tokens; token i has row i mod ``period`` of the tables."""
    a, y, cs, sn = pointer(x, sign), pointer(out, sign), pointer(cos, sign), pointer(sin, sign)
    width = 2 * half
    for piece in prange((tokens + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(tokens, (piece + 1) * ROW_PIECE)):
            c, s = at(cs, i % period * half), at(sn, i % period * half)
            for h in range(turning):
                u, z = at(a, (i * heads + h) * width), at(y, (i * heads + h) * width)
                for j in range(half):
                    even, odd, t = u[2 * j], u[2 * j + 1], sign * s[j]
                    z[2 * j] = even * c[j] - odd * t
                    z[2 * j + 1] = even * t + odd * c[j]
            u, z = at(a, (i * heads + turning) * width), at(y, (i * heads + turning) * width)
            for j in range((heads - turning) * width):
                z[j] = u[j]


@functools.lru_cache(maxsize=16)
def _table(
    base: float, scaling: RopeScaling | None, d_head: int, start: int, length: int, dtype: Any
) -> tuple[Array, Array]:
    """Return cos and sin (T, d/2) of t·ω_j for positions t = start, start + 1, …."""
    return turns_of(frequencies(base, d_head, scaling), np.arange(start, start + length), dtype)


def turns_of(omega: Array, position: Array, dtype: Any) -> tuple[Array, Array]:
    """Return cos and sin (..., d/2) of position · ω."""
    angle = position[..., None] * omega  # in float64, as 8191·ω in float32 is off by 1e-4
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def rope_forward(
    x: Array,
    *,
    base: float,
    start: int | Array,
    rotate_heads: int | None,
    scaling: RopeScaling | None,
) -> tuple[Array, RopeCache]:
    """Return x (B, T, H, d) with the coordinate pairs of its first heads rotated."""
    _, length, n_heads, d_head = x.shape
    if isinstance(start, int):
        cos, sin = _table(base, scaling, d_head, start, length, x.dtype)
    else:
        position = np.expand_dims(start, -1) + np.arange(length)
        cos, sin = turns_of(frequencies(base, d_head, scaling), position, x.dtype)
    cache = RopeCache(cos, sin, n_heads if rotate_heads is None else rotate_heads)
    return _rotate(x, cache, 1), cache


def rope_backward(dout: Array, cache: RopeCache) -> Array:
    """Return dx: the gradient rotated back."""
    return _rotate(dout, cache, -1)


def _rotate(x: Array, cache: RopeCache, sign: int) -> Array:
    x = contiguous(x)
    batch, length, n_heads, d_head = x.shape
    out = empty(x.shape, x.dtype)
    if out.size:
        period = cache.cos.size // (d_head // 2)
        _rope(
            *(x.dtype.type(sign), address(x), address(cache.cos), address(cache.sin)),
            *(address(out), batch * length, period, n_heads, cache.rotate_heads, d_head // 2),
        )
    return out
