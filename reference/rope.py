"""RoPE: turn queries and keys by an angle that grows with their position.

Su et al. 2021, "RoFormer", eq. 15 and 34. Each adjacent pair of coordinates (x_2j, x_2j+1) of a
token at position t turns by the angle t ω_j, ω_j = base^(-2j/d)::

    y_2j   = x_2j cos(tω_j) - x_2j+1 sin(tω_j)
    y_2j+1 = x_2j sin(tω_j) + x_2j+1 cos(tω_j)

This is a rotation R_t, and R_tᵀ R_u = R_(u-t): the score of a query at t with a key at u depends on
u - t alone. A rotation's transpose is its inverse, so the backward turns dy by -tω_j.

Llama 3.1 stretches a model to a context longer than the C tokens that it was trained with (the
scaling of frequencies in Meta's published ``llama3/model.py``). A pair turns n_j = C ω_j / 2π times
within C. One that turns often, n_j ≥ h, tells near tokens apart and met every angle in training: it
keeps ω_j. One that turns about once or less, n_j ≤ l, would meet angles it never saw: ω_j / f
brings f C tokens into the angles of C. Between them the frequency goes over from the one to the
other in proportion to n_j, so that no pair is far from its neighbours::

    kept_j = (n_j - l) / (h - l), cut to [0, 1]
    ω'_j   = kept_j ω_j + (1 - kept_j) ω_j / f

Hugging Face's Llama pairs coordinate j with j + d/2 instead: the same function after a permutation
of the columns of wq and wk.
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array, RopeScaling


class RopeCache(NamedTuple):
    cos: Array  # (T, 1, d/2) or (B, T, 1, d/2)
    sin: Array  # the same
    rotate_heads: int | None


def frequencies(base: float, d: int, scaling: RopeScaling | None = None) -> Array:
    """Return ω_j of each pair, shape (d/2,), in radians a token, float64."""
    omega = base ** (-np.arange(0, d, 2) / d)
    return omega if scaling is None else omega / stretch(omega, scaling)


def stretch(omega: Array, scaling: RopeScaling) -> Array:
    """Return by what Llama 3's scaling divides each frequency, from 1 to the factor."""
    factor, low, high, original = scaling
    turns = original * omega / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / (kept + (1 - kept) / factor))


def forward(
    x: Array,
    base: float,
    start: int | Array = 0,
    rotate_heads: int | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[Array, RopeCache]:
    """Return x (B, T, H, d) with its coordinate pairs rotated by their positions.

    Parameters
    ----------
    x : (B, T, H, d), d even
    base : float
        The slowest pair turns once in 2π·base^(1 - 2/d) tokens.
    start : int or (B,) int
        Position of the first token, of each row or of all: a decoder with a cache starts late.
    rotate_heads : int, optional
        How many heads are rotated, from the first on; the fused q, k, v has values behind them.
    scaling : RopeScaling, optional
        Llama 3's, for a longer context.
    """
    T, d = x.shape[1], x.shape[3]
    omega = frequencies(base, d, scaling)
    t = np.expand_dims(start, -1) + np.arange(T)  # (T,) or (B, T)
    angle = t[..., None, None] * omega  # in float64, as 8191·ω in float32 is off by 1e-4
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    return _rotate(x, cos, sin, rotate_heads), RopeCache(cos, sin, rotate_heads)


def backward(dy: Array, cache: RopeCache) -> Array:
    """Return dx: the gradient rotated back."""
    cos, sin, rotate_heads = cache
    return _rotate(dy, cos, -sin, rotate_heads)


def _rotate(x: Array, cos: Array, sin: Array, rotate_heads: int | None) -> Array:
    y = x.copy()
    even, odd = x[:, :, :rotate_heads, 0::2], x[:, :, :rotate_heads, 1::2]
    y[:, :, :rotate_heads, 0::2] = even * cos - odd * sin
    y[:, :, :rotate_heads, 1::2] = even * sin + odd * cos
    return y
