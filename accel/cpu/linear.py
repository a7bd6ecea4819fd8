"""The linear layer, the head, and heads; the mathematics is in ``reference/linear.py``.

Products are ``gemm.gemm``; a bias is written first and the product added onto it. Splitting and
merging heads only changes how the same memory is seen; nothing is copied but where a gradient
arrives in parts that do not lie side by side.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accel.cpu.gemm import gemm
from accel.cpu.kernels import as_rows, contiguous, delivered, receiver, sum_rows
from accel.cpu.memory import empty
from reference.checks import check_float, check_shape, given_again

Array = npt.NDArray[Any]


class LinearCache(NamedTuple):
    x: Array | None  # (N, I); None when the backward is to be given it again
    weight: Array  # (I, O)
    x_shape: tuple[int, ...]
    has_bias: bool


def linear_forward(
    x: Array, weight: Array, bias: Array | None = None, *, keep_x: bool = True
) -> tuple[Array, LinearCache]:
    """Return x W + b, shape (..., O)."""
    check_float("linear", x=x, weight=weight, bias=bias)
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        hint = "; is it transposed?" if weight.ndim == 2 and weight.shape[1] == x.shape[-1] else ""
        raise ValueError(
            f"linear: weight must be (in, out) with in = {x.shape[-1]}, the last axis of x "
            f"{x.shape}, got {weight.shape}{hint}"
        )
    if bias is not None:
        check_shape("linear", "bias", bias, weight.shape[1:], f"weight {weight.shape}")
    rows, weight = as_rows(x), contiguous(weight)
    out = empty((len(rows), weight.shape[1]), x.dtype)
    affine(rows, weight, bias, out)
    cache = LinearCache(rows if keep_x else None, weight, x.shape, bias is not None)
    return out.reshape(*x.shape[:-1], weight.shape[1]), cache


def linear_backward(
    dout: Array,
    cache: LinearCache,
    *,
    x: Array | None = None,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dweight, dbias); dbias is None when the forward had no bias."""
    kept, weight, x_shape, has_bias = cache
    x, rows = as_rows(given_again("linear", kept, x, x_shape)), as_rows(dout)
    weight_out, bias_out = (None, None) if out is None else out
    dx = empty(x.shape, x.dtype)
    gemm(rows, weight, dx, tb=True)
    dweight, elsewhere = receiver(weight_out, weight.shape, x.dtype)
    gemm(x, rows, dweight, ta=True)
    dweight = delivered(dweight, elsewhere)
    dbias = None
    if has_bias:
        dbias, elsewhere = receiver(bias_out, weight.shape[1:], x.dtype)
        sum_rows(rows, dbias)
        dbias = delivered(dbias, elsewhere)
    return dx.reshape(x_shape), dweight, dbias


def affine(
    x: Array, weight: Array, bias: Array | None, out: Array, *, transposed: bool = False
) -> None:
    """Write x W + b, or x Wᵀ + b where ``transposed``, into ``out``; two-dimensional all."""
    if bias is not None:
        np.copyto(out, bias)
    gemm(x, weight, out, tb=transposed, accumulate=bias is not None)


def logits(x: Array, head: Array, bias: Array | None = None) -> Array:
    """Return x headᵀ + bias, shape (..., V)."""
    check_float("logits", x=x, head=head, bias=bias)
    if head.ndim != 2 or head.shape[1] != x.shape[-1]:
        raise ValueError(
            f"logits: head must be (V, {x.shape[-1]}) to match x {x.shape}, got {head.shape}"
        )
    if bias is not None:
        check_shape("logits", "bias", bias, head.shape[:1], f"head {head.shape}")
    rows = as_rows(x)
    out = empty((len(rows), len(head)), x.dtype)
    affine(rows, contiguous(head), bias, out, transposed=True)
    return out.reshape(*x.shape[:-1], len(head))


# ---- heads ---------------------------------------------------------------------------------------


class SplitHeadsCache(NamedTuple):
    heads: tuple[int, ...]


class MergeHeadsCache(NamedTuple):
    n_heads: int  # H
    d_head: int  # d


def split_heads_forward(
    x: Array, *, heads: tuple[int, ...]
) -> tuple[tuple[Array, ...], SplitHeadsCache]:
    """Return views of x (B, T, H, d) with ``heads`` heads each, in order."""
    if x.ndim != 4 or sum(heads) != x.shape[2]:
        raise ValueError(
            f"split_heads: heads {heads} must add up to the head axis of x (B, T, H, d), "
            f"got x {x.shape}"
        )
    ends = np.cumsum(heads)
    return tuple(
        x[:, :, end - n : end] for n, end in zip(heads, ends, strict=True)
    ), SplitHeadsCache(tuple(heads))


def split_heads_backward(dout: tuple[Array, ...], cache: SplitHeadsCache) -> Array:
    """Return dx (B, T, H, d) from the gradients of the parts."""
    if tuple(part.shape[2] for part in dout) != cache.heads:
        raise ValueError(f"split_heads: the gradients must have {cache.heads} heads, in order")
    whole = _side_by_side(dout)
    if whole is not None:
        return whole
    batch, length, _, d_head = dout[0].shape
    dx = empty((batch, length, sum(cache.heads), d_head), dout[0].dtype)
    end = 0
    for part in dout:
        dx[:, :, end : end + part.shape[2]] = part
        end += part.shape[2]
    return dx


def _side_by_side(parts: tuple[Array, ...]) -> Array | None:
    """Return the array that the parts are adjacent views of, as attention's gradients are."""
    owner, (batch, length, _, d_head) = parts[0].base, parts[0].shape
    if not isinstance(owner, np.ndarray) or any(part.base is not owner for part in parts):
        return None
    shape = (batch, length, sum(part.shape[2] for part in parts), d_head)
    start = parts[0].ctypes.data - owner.ctypes.data
    size = math.prod(shape) * parts[0].itemsize
    if not owner.flags.c_contiguous or start < 0 or start + size > owner.nbytes:
        return None
    whole: Array = owner.reshape(-1).view(np.uint8)[start : start + size]
    whole = whole.view(parts[0].dtype).reshape(shape)
    end = 0
    for part in parts:
        seen = whole[:, :, end : end + part.shape[2]]
        if part.ctypes.data != seen.ctypes.data or part.strides != seen.strides:
            return None
        end += part.shape[2]
    return whole


def merge_heads_forward(x: Array) -> tuple[Array, MergeHeadsCache]:
    """Return x (B, T, H, d) as (B, T, H·d)."""
    if x.ndim != 4:
        raise ValueError(f"merge_heads: x must be (B, T, H, d), got {x.shape}")
    batch, length, n_heads, d_head = x.shape
    merged = contiguous(x).reshape(batch, length, n_heads * d_head)
    return merged, MergeHeadsCache(n_heads, d_head)


def merge_heads_backward(dout: Array, cache: MergeHeadsCache) -> Array:
    """Return dx (B, T, H, d)."""
    return dout.reshape(*dout.shape[:-1], cache.n_heads, cache.d_head)
