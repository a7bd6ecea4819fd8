"""From one wide row to heads and back: no arithmetic, only where the numbers lie.

The fused projection x·wqkv has columns q, k, v; seen as (B, T, Hq + 2·Hkv, d) its head axis holds
the query heads, then the key heads, then the value heads. Splitting cuts that axis, so the gradient
joins the parts again; merging lays the heads of a token side by side.
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array


class SplitHeadsCache(NamedTuple):
    heads: tuple[int, ...]


class MergeHeadsCache(NamedTuple):
    n_heads: int  # H
    d_head: int  # d


def split_heads_forward(
    x: Array, *, heads: tuple[int, ...]
) -> tuple[tuple[Array, ...], SplitHeadsCache]:
    """Cut x (B, T, H, d) along its heads into parts of ``heads`` heads each, in order.

    Raises
    ------
    ValueError
        When the parts do not add up to H.
    """
    if x.ndim != 4 or sum(heads) != x.shape[2]:
        raise ValueError(
            f"split_heads: heads {heads} must add up to the head axis of x (B, T, H, d), "
            f"got x {x.shape}"
        )
    return tuple(np.split(x, np.cumsum(heads)[:-1], axis=2)), SplitHeadsCache(heads)


def split_heads_backward(dout: tuple[Array, ...], cache: SplitHeadsCache) -> Array:
    """Return dx (B, T, H, d) from the gradients of the parts."""
    if tuple(part.shape[2] for part in dout) != cache.heads:
        raise ValueError(f"split_heads: the gradients must have {cache.heads} heads, in order")
    return np.concatenate(dout, axis=2)


def merge_heads_forward(x: Array) -> tuple[Array, MergeHeadsCache]:
    """Return x (B, T, H, d) as (B, T, H·d)."""
    if x.ndim != 4:
        raise ValueError(f"merge_heads: x must be (B, T, H, d), got {x.shape}")
    batch, length, n_heads, d_head = x.shape
    return x.reshape(batch, length, n_heads * d_head), MergeHeadsCache(n_heads, d_head)


def merge_heads_backward(dout: Array, cache: MergeHeadsCache) -> Array:
    """Return dx (B, T, H, d)."""
    return dout.reshape(*dout.shape[:-1], cache.n_heads, cache.d_head)
