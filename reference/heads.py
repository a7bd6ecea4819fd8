"""From one wide row to heads and back: no arithmetic, only where the numbers lie.

The fused projection x·wqkv has columns q, k, v; seen as (B, T, Hq + 2·Hkv, d) its head axis holds
the query heads, then the key heads, then the value heads. Splitting cuts that axis, so the gradient
joins the parts again; merging lays the heads of a token side by side.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import check_float, check_shape
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
    heads = check_split(x, heads)
    return tuple(np.split(x, np.cumsum(heads)[:-1], axis=2)), SplitHeadsCache(heads, x.shape)


def split_heads_backward(dout: tuple[Array, ...], cache: SplitHeadsCache) -> Array:
    """Return dx (B, T, H, d) from the gradients of the parts."""
    check_parts(dout, cache.heads, cache.x_shape)
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
    check_float("merge_heads_backward", dout=dout)
    return dout.reshape(cache.x_shape)


def check_split(x: Array, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the heads of each part as Python's integers, once they are seen to add up to x's."""
    heads = tuple(heads)
    whole = all(n == int(n) >= 1 for n in heads)
    if x.ndim != 4 or not whole or sum(heads) != x.shape[2]:
        raise ValueError(
            f"split_heads: heads {heads} must add up to the head axis of x (B, T, H, d), "
            f"got x {x.shape}"
        )
    return tuple(int(n) for n in heads)


def check_parts(dout: tuple[Array, ...], heads: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
    """Raise unless there is a gradient for each part, of its shape."""
    batch, length, _, d_head = x_shape
    if len(dout) != len(heads):
        raise ValueError(f"split_heads_backward: {len(heads)} parts, got {len(dout)}")
    for part, n_heads in zip(dout, heads, strict=True):
        shape = (batch, length, n_heads, d_head)
        check_shape("split_heads_backward", "dout", part, shape, "its part")
    if len({part.dtype for part in dout}) > 1:
        found = ", ".join(str(part.dtype) for part in dout)
        raise ValueError(f"split_heads_backward: the parts must share one dtype, got {found}")
