"""From one wide row to its heads: no arithmetic, only where the numbers lie.

The fused projection x·wqkv has columns q, k, v; seen as (B, T, Hq + 2·Hkv, d) its head axis holds
the query heads, then the key heads, then the value heads. Splitting cuts that axis, so the gradient
joins the parts again.
"""

import numpy as np

from reference.types import Array

Parts = tuple[Array, ...]


def forward(x: Array, heads: tuple[int, ...]) -> tuple[Parts, None]:
    """Return x (B, T, H, d) cut along its heads into parts of ``heads`` heads each, in order."""
    return tuple(np.split(x, np.cumsum(heads)[:-1], axis=2)), None


def backward(dy: Parts, cache: None) -> Array:
    """Return dx (B, T, H, d) from the gradients of the parts."""
    return np.concatenate(dy, axis=2)
