"""RoPE: turn queries and keys by an angle that grows with their position.

Su et al. 2021, "RoFormer", eq. 15 and 34. Each adjacent pair of coordinates (x_2j, x_2j+1) of a
token at position t turns by the angle t ω_j, ω_j = base^(-2j/d)::

    y_2j   = x_2j cos(tω_j) - x_2j+1 sin(tω_j)
    y_2j+1 = x_2j sin(tω_j) + x_2j+1 cos(tω_j)

This is a rotation R_t, and R_tᵀ R_u = R_(u-t): the score of a query at t with a key at u depends on
u - t alone. A rotation's transpose is its inverse, so the backward turns dy by -tω_j.

Hugging Face's Llama pairs coordinate j with j + d/2 instead: the same function after a permutation
of the columns of wq and wk.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import check_float, check_number, check_position, check_shape
from reference.types import Array


class RopeCache(NamedTuple):
    cos: Array  # (T, 1, d/2) or (B, T, 1, d/2)
    sin: Array  # the same
    rotate_heads: int  # the first so many heads turn
    x_shape: tuple[int, ...]  # (B, T, H, d)


def rope_forward(
    x: Array, *, base: float, start: int | Array = 0, rotate_heads: int | None = None
) -> tuple[Array, RopeCache]:
    """Return x (B, T, H, d) with its coordinate pairs turned by their positions.

    Parameters
    ----------
    x : (B, T, H, d), d even
    base : float
        The slowest pair turns once in about 2π·base tokens.
    start : int or (B,) int
        Position of the first token, of each row or of all: a decoder with a cache starts late.
    rotate_heads : int, optional
        Only the first so many heads turn; the fused q, k, v has values behind them. None: all.

    Raises
    ------
    ValueError
        When d is odd, start does not fit the batch or rotate_heads exceeds H.
    """
    check_float("rope", x=x)
    rotate_heads = check_rope(x, base, start, rotate_heads)
    _, length, _, d_head = x.shape
    omega = float(base) ** (-np.arange(0, d_head, 2) / d_head)  # (d/2,)
    position = np.expand_dims(start, -1) + np.arange(length)  # (T,) or (B, T)
    angle = position[..., None, None] * omega  # in float64, as 8191·ω in float32 is off by 1e-4
    cache = RopeCache(
        np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype), rotate_heads, x.shape
    )
    return _rotate(x, cache.cos, cache.sin, cache.rotate_heads), cache


def rope_backward(dout: Array, cache: RopeCache) -> Array:
    """Return dx: the gradient turned back."""
    check_shape("rope_backward", "dout", dout, cache.x_shape, "the output")
    check_float("rope_backward", dout=dout, forward=cache.cos)
    return _rotate(dout, cache.cos, -cache.sin, cache.rotate_heads)


def _rotate(x: Array, cos: Array, sin: Array, rotate_heads: int) -> Array:
    out = x.copy()
    even, odd = x[:, :, :rotate_heads, 0::2], x[:, :, :rotate_heads, 1::2]
    out[:, :, :rotate_heads, 0::2] = even * cos - odd * sin
    out[:, :, :rotate_heads, 1::2] = even * sin + odd * cos
    return out


def check_rope(x: Array, base: float, start: int | Array, rotate_heads: int | None) -> int:
    """Return how many heads turn, once all is seen to fit."""
    if x.ndim != 4 or x.shape[3] % 2:
        raise ValueError(f"rope: x must be (B, T, H, d) with d even, got {x.shape}")
    batch, _, n_heads, _ = x.shape
    rotate_heads = n_heads if rotate_heads is None else rotate_heads
    if rotate_heads != int(rotate_heads) or not 0 <= rotate_heads <= n_heads:
        raise ValueError(f"rope: rotate_heads must lie in 0..{n_heads}, got {rotate_heads}")
    check_number("rope", "base", base, above=0)
    check_position("rope", "start", start, batch)
    return int(rotate_heads)
