"""The linear layer, the head, and heads; the mathematics is in ``reference/linear.py``.

Products are ``gemm.gemm``, which adds a bias and a residual stream as well. Splitting and merging
heads only changes how the same memory is seen; nothing is copied but where a gradient arrives in
parts that do not lie side by side.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from accel.cpu.gemm import gemm
from accel.cpu.kernels import as_rows, contiguous, delivered, receiver, sum_rows
from accel.cpu.memory import empty
from reference.types import Array


class LinearCache(NamedTuple):
    x: Array | None  # (N, I); None when the backward is to be given x
    weight: Array  # (I, O)
    x_shape: tuple[int, ...]
    has_bias: bool


def linear_forward(
    x: Array, weight: Array, bias: Array | None, *, keep_x: bool, plus: Array | None
) -> tuple[Array, LinearCache]:
    """Return x W + b + plus, shape (..., O)."""
    rows, weight = as_rows(x), contiguous(weight)
    out = empty((len(rows), weight.shape[1]), x.dtype)
    gemm(rows, weight, out, bias=bias, plus=None if plus is None else as_rows(plus))
    cache = LinearCache(rows if keep_x else None, weight, x.shape, bias is not None)
    return out.reshape(*x.shape[:-1], weight.shape[1]), cache


def linear_backward(
    dout: Array, cache: LinearCache, *, x: Array | None, out: tuple[Array | None, Array | None]
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dweight, dbias); dbias is None when the forward had no bias."""
    kept, weight, x_shape, has_bias = cache
    rows = as_rows(dout)
    if x is not None:
        kept = as_rows(x)
    assert kept is not None
    weight_out, bias_out = out
    dx = empty(kept.shape, kept.dtype)
    gemm(rows, weight, dx, tb=True)
    dweight, elsewhere = receiver(weight_out, weight.shape, kept.dtype)
    gemm(kept, rows, dweight, ta=True)
    dweight = delivered(dweight, elsewhere)
    dbias = None
    if has_bias:
        dbias, elsewhere = receiver(bias_out, weight.shape[1:], kept.dtype)
        sum_rows(rows, dbias)
        dbias = delivered(dbias, elsewhere)
    return dx.reshape(x_shape), dweight, dbias


def logits(x: Array, head: Array, bias: Array | None) -> Array:
    """Return x headᵀ + bias, shape (..., V)."""
    rows = as_rows(x)
    out = empty((len(rows), len(head)), x.dtype)
    gemm(rows, contiguous(head), out, tb=True, bias=bias)
    return out.reshape(*x.shape[:-1], len(head))


# ---- heads ---------------------------------------------------------------------------------------


def split_heads_forward(
    x: Array, *, heads: tuple[int, ...]
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """Return views of x (B, T, H, d) with ``heads`` heads each, in order, and the shape of x."""
    ends = itertools.accumulate(heads)  # np.split takes 20 µs more
    return tuple(x[:, :, end - n : end] for n, end in zip(heads, ends, strict=True)), x.shape


def split_heads_backward(dout: tuple[Array, ...], x_shape: tuple[int, ...]) -> Array:
    """Return dx (B, T, H, d) from the gradients of the parts."""
    whole = _side_by_side(dout)
    if whole is not None:
        return whole
    dx = empty(x_shape, dout[0].dtype)
    end = 0
    for part in dout:
        dx[:, :, end : end + part.shape[2]] = part
        end += part.shape[2]
    return dx


def _side_by_side(parts: tuple[Array, ...]) -> Array | None:
    """Return the array that the parts are adjacent views of, as attention's gradients are."""
    owner, (batch, length, _, d_head) = parts[0].base, parts[0].shape
    # a piece of the arena has a type of its own, which what is returned would have as well
    if type(owner) is not np.ndarray or any(part.base is not owner for part in parts):
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


def merge_heads_forward(x: Array) -> tuple[Array, tuple[int, ...]]:
    """Return x (B, T, H, d) as (B, T, H·d), and the shape of x."""
    batch, length, n_heads, d_head = x.shape
    return contiguous(x).reshape(batch, length, n_heads * d_head), x.shape


def merge_heads_backward(dout: Array, x_shape: tuple[int, ...]) -> Array:
    """Return dx (B, T, H, d)."""
    return dout.reshape(x_shape)
