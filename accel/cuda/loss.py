"""Head and loss together, and softmax. Kernels: ``loss.cu``; the products go to cuBLAS.

Tokens are taken in chunks whose logits fill a fixed buffer. While a chunk's logits are at hand they
become dlogits in place, and dx and the float32 dhead are made from them at once, so that backward
recomputes nothing: it multiplies by the scalar. A training step takes 6·N·V·D operations here, of
which evaluation (``need_backward=False``) takes a third. The kernel reads a row of logits twice
and writes it once.
"""

from typing import NamedTuple

import numpy as np

from accel.cuda.arrays import (
    check_out,
    column_sums,
    contiguous,
    copy,
    fours,
    to_dtype,
)
from accel.cuda.device import F32, SCRATCH, THREADS, ceil_div, current, empty, launch, zeros
from accel.cuda.elementwise import scale_forward
from accel.cuda.embedding import count_ids
from accel.cuda.linear import add_bias, matmul, rows_of
from reference.types import Array, Loss

# Logits of one chunk: 512 MiB in bf16, 4,096 tokens at V = 65,536, enough rows for cuBLAS to run at
# full speed.
CHUNK_ELEMENTS = 1 << 28
EVEN = 64  # logits of a row, which so begins a cache line of its own
TILE = 128  # rows that a product takes at once; a chunk has whole tiles, where it has room for one


class LinearCrossEntropyCache(NamedTuple):
    dx: Array | None  # (..., D) of the total; None where no backward was to follow
    dhead: Array | None  # (V, D) float32
    dbias: Array | None  # (V,) float32; None without a bias


def linear_cross_entropy_forward(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array | None,
    bias: Array | None,
    *,
    need_backward: bool,
) -> tuple[Loss, LinearCrossEntropyCache]:
    """Return the summed loss of the logits x headᵀ + bias, and the number of valid targets."""
    V = head.shape[0]
    n_valid = count_ids("linear_cross_entropy", "targets", targets, mask, V)
    losses, cache = losses_of(x, head, targets, mask, bias, need_backward=need_backward)
    return Loss(total(losses), n_valid), cache


def total(losses: Array) -> float:
    """Wait for the losses (N,) of all targets and return their sum."""
    return float(np.sum(current().download(losses), dtype=np.float64))


def losses_of(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array | None,
    bias: Array | None,
    *,
    need_backward: bool,
) -> tuple[Array, LinearCrossEntropyCache]:
    """Return the loss (N,) float32 of each target; 0 of one that is masked, or does not exist."""
    V = head.shape[0]
    mask = None if mask is None else contiguous(mask).reshape(-1)
    rows, targets = rows_of(x), contiguous(targets).reshape(-1)
    N = rows.shape[0]
    height, width = chunk_shape(N, V)
    head = _padded(to_dtype(head, x.dtype), width)
    bias = None if bias is None else _padded(bias, width)
    losses = empty((N,), F32)
    dx = empty(rows.shape, x.dtype) if need_backward else None
    dhead = zeros(head.shape, F32) if need_backward else None
    dbias = zeros((width,), F32) if need_backward and bias is not None else None
    buffer = empty((height, width), x.dtype)
    for first in range(0, N, height):
        part = slice(first, min(first + height, N))
        z = matmul(rows[part], head, buffer[: part.stop - first], transpose_b=True)
        if bias is not None:
            add_bias(z, bias)
        given = {"targets": targets[part], "mask": None if mask is None else mask[part]}
        given |= {"logits": z, "losses": losses[part]}
        how = {"V": V, "width": width, "gradient": need_backward}
        launch("loss", "cross_entropy", part.stop - first, THREADS, SCRATCH, **given, **how)
        if dx is not None and dhead is not None:  # z holds dlogits now
            matmul(z, head, dx[part])
            matmul(z, rows[part], dhead, transpose_a=True, plus=dhead)
        if dbias is not None:
            column_sums(z, dbias, accumulate=True)
    return losses, LinearCrossEntropyCache(
        None if dx is None else dx.reshape(x.shape),
        None if dhead is None else dhead[:V],
        None if dbias is None else dbias[:V],
    )


def chunk_of(rows: int, most: int) -> int:
    """Return the rows of a chunk, at most so many: as few chunks as that takes, about as long."""
    most = most // TILE * TILE or most
    even = ceil_div(rows, max(1, ceil_div(rows, most)))
    return max(1, min(rows, most, TILE * ceil_div(even, TILE)))


def chunk_shape(rows: int, vocabulary: int) -> tuple[int, int]:
    """Return how many of the rows have their logits at a time, and how long their rows are."""
    width = EVEN * ceil_div(vocabulary, EVEN)
    return chunk_of(rows, max(1, CHUNK_ELEMENTS // width)), width


def _padded(array: Array, rows: int) -> Array:
    """Return an array with rows of zeros behind its own, so many in all; itself if it has them."""
    own = array.shape[0]
    if own == rows:
        return array
    out = empty((rows, *array.shape[1:]), array.dtype)
    copy(out[:own], contiguous(array))
    current().clear(out[own:])
    return out


def linear_cross_entropy_backward(
    dloss: float, cache: LinearCrossEntropyCache, *, out: tuple[Array | None, Array | None]
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dhead, dbias) of dloss · total; the last two are float32."""
    assert cache.dx is not None and cache.dhead is not None
    factor = float(dloss)
    to_head, to_bias = out
    dx = cache.dx if factor == 1 else scale_forward(cache.dx, factor=factor)[0]
    dbias = None if cache.dbias is None else _scaled(cache.dbias, factor, to_bias)
    return dx, _scaled(cache.dhead, factor, to_head), dbias


def _scaled(gradient: Array, factor: float, out: Array | None) -> Array:
    to = check_out(out, gradient.shape)
    launch("optimizer", "scale_into", fours(to), dst=to, src=gradient, n=to.size, factor=factor)
    return to


def softmax(x: Array) -> Array:
    """Return the softmax of x (..., n) over its last axis."""
    x = contiguous(x)
    out = empty(x.shape, x.dtype)
    V = x.shape[-1]
    launch("loss", "softmax", x.size // V, THREADS, SCRATCH, x=x, y=out, V=V)
    return out
