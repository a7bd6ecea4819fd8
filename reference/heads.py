"""From one wide row to heads and back: no arithmetic, only where the numbers lie.

The fused projection x·wqkv has columns q, k, v; seen as (B, T, Hq + 2·Hkv, d) its head axis holds
the query heads, then the key heads, then the value heads. Splitting cuts that axis, so the gradient
joins the parts again; merging lays the heads of a token side by side.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import check_shape
from reference.types import Array


class SplitHeadsCache(NamedTuple):
    heads: tuple[int, ...]
    x_shape: tuple[int, ...]  # (B, T, H, d)


class MergeHeadsCache(NamedTuple):
    x_shape: tuple[int, ...]  # (B, T, H, d)


def split_heads_forward(
    x: Array, *, heads: tuple[int, ...]
) -> tuple[tuple[Array, ...], SplitHeadsCache]:
    """Cut x (B, T, H, d) along its heads into parts of ``heads`` heads each, in order.

    Raises
    ------
    ValueError
        When the parts do not add up to H.
    """
    heads = tuple(heads)
    if x.ndim != 4 or sum(heads) != x.shape[2] or min(heads, default=0) < 1:
        raise ValueError(
            f"split_heads: heads {heads} must add up to the head axis of x (B, T, H, d), "
            f"got x {x.shape}"
        )
    return tuple(np.split(x, np.cumsum(heads)[:-1], axis=2)), SplitHeadsCache(heads, x.shape)


def split_heads_backward(dout: tuple[Array, ...], cache: SplitHeadsCache) -> Array:
    """Return dx (B, T, H, d) from the gradients of the parts."""
    B, T, _, d = cache.x_shape
    if len(dout) != len(cache.heads):
        raise ValueError(f"split_heads_backward: {len(cache.heads)} parts, got {len(dout)}")
    for part, n_heads in zip(dout, cache.heads, strict=True):
        check_shape("split_heads_backward", "dout", part, (B, T, n_heads, d), "its part")
    return np.concatenate(dout, axis=2)


def merge_heads_forward(x: Array) -> tuple[Array, MergeHeadsCache]:
    """Return x (B, T, H, d) as (B, T, H·d)."""
    if x.ndim != 4:
        raise ValueError(f"merge_heads: x must be (B, T, H, d), got {x.shape}")
    batch, length, n_heads, d_head = x.shape
    return x.reshape(batch, length, n_heads * d_head), MergeHeadsCache(x.shape)


def merge_heads_backward(dout: Array, cache: MergeHeadsCache) -> Array:
    """Return dx (B, T, H, d)."""
    B, T, H, d = cache.x_shape
    check_shape("merge_heads_backward", "dout", dout, (B, T, H * d), "the output")
    return dout.reshape(cache.x_shape)
