"""Softmax, and the head and loss together; see ``reference/linear_cross_entropy.py``.

The rows are taken in chunks whose logits are about 32 MB, or more where that would be few rows: the
product of each chunk for dhead reads and writes an array of the head's size. Where no gradient of a
bias is a sum over all of a chunk, it is taken in the parts that the product sums by. While logits
are at hand the forward turns them, in place, into their own gradient for a total of weight 1, and
multiplies them into dx and dhead; the backward only scales. That saves making the logits twice,
which is a fifth of a small model's step, for one more array of the head's size. Where all rows are
one chunk, and no more than the model is wide, their logits are the smaller array: they are kept
instead, and the backward makes dhead where it is wanted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import get_thread_id, prange, types
from numba.extending import intrinsic, overload

from accel.cpu.elementwise import scale_into, scaled
from accel.cpu.gemm import DEPTH, depth_of, gemm
from accel.cpu.kernels import (
    COMPILED,
    FEW_THREADS,
    ROW_PIECE,
    SERIAL,
    SUM,
    address,
    as_rows,
    contiguous,
    delivered,
    receiver,
    scratch,
    sum_rows,
)
from accel.cpu.memory import empty
from accel.cpu.simd import at, exp_below, pointer
from accel.cpu.simd import start as start_of
from accel.cpu.streaming import ask, is_far, leave, settle
from accel.jit import jit
from accel.threads import team
from reference.types import Array, Loss

CHUNK_ELEMENTS = 8 << 20  # logits of a chunk
LEAST_ROWS = 256  # of a chunk, even if they have more
AT_ONCE = 512  # elements of a softmax's row: written, while as many of the next one are read
CHUNK_ROWS = 96  # a chunk is a multiple of it: whole register blocks of a product


def _turned(bits: Any) -> Any:
    """Invert the bits of negative numbers but the sign: integers then order as the floats do."""
    raise TypeError(COMPILED)


@overload(_turned)
def _turned_overload(bits: Any) -> Callable[..., Any]:
    if bits == types.int32:

        def turned_32(bits: Any) -> Any:
            return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))

        return turned_32

    def turned_64(bits: Any) -> Any:
        return bits ^ ((bits >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF))

    return turned_64


@intrinsic
def _bits(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float as an integer, and of such an integer as a float."""
    other = {
        types.float32: types.int32,
        types.float64: types.int64,
        types.int32: types.float32,
        types.int64: types.float64,
    }[x]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return other(x), codegen


@jit(**SERIAL)
def _row_max(x: Any, n: int) -> Any:
    """Return the largest element, compared as an integer.

    The maximum of floats does not vectorise unless the compiler may assume that there is no NaN. Of
    integers (see ``_turned``) it does, and NaN is above or below every number.
    """
    top = _turned(_bits(x[0]))
    for j in range(n):
        top = max(top, _turned(_bits(x[j])))
    return _bits(_turned(top))


@jit(**SUM)
def _softmax(one: Any, x: int, out: int, rooms: Any, rows: int, width: int, far: Any) -> None:
    a, y = pointer(x, one), pointer(out, one)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        start, end = piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)
        top, r = _row_max(at(a, start * width), width), one
        # While a row is written the one behind it is read, so that neither waits for the other.
        for i in range(start, end + 1):
            u, s = at(a, i * width), one - one
            e, z = at(y, i * width), at(y, (i - 1) * width)
            made = z
            if far is not None:
                room = at(start_of(rooms), get_thread_id() * rooms.shape[1])
                e, made = at(room, i % 2 * width), at(room, (i - 1) % 2 * width)
            for first in range(0, width, AT_ONCE):
                n = min(AT_ONCE, width - first)
                if i < end:
                    v, w = at(u, first), at(e, first)
                    ask(at(v, width), n, True)
                    for j in range(n):
                        w[j] = exp_below(v[j] - top)
                        s += w[j]
                if i > start:
                    w = at(made, first)
                    for j in range(n):
                        w[j] *= r
                    leave(w, at(z, first), n, far)
            if i < end:
                # The maximum of the next row waits for nothing, where all else waits for the sum.
                top, r = _row_max(at(a, min(i + 1, end - 1) * width), width), one / s
        settle(far)


@jit(**SERIAL)
def row_cross_entropy(
    one: Any, z: Any, target: int, valid: bool, loss: Any, width: int, need_backward: bool
) -> None:
    """Write the loss of a row of logits, in float64, and turn the logits into their gradient."""
    zero = one - one
    if not valid:
        loss[0] = 0.0
        if need_backward:
            for j in range(width):
                z[j] = zero
        return
    top = _row_max(z, width)
    at_target = z[target]
    s = zero
    if need_backward:
        for j in range(width):
            z[j] = exp_below(z[j] - top)
            s += z[j]
        r = one / s
        for j in range(width):
            z[j] *= r
        z[target] -= one
    else:
        for j in range(width):
            s += exp_below(z[j] - top)
    loss[0] = np.log(np.float64(s)) + (np.float64(top) - np.float64(at_target))


@jit(**SUM)
def _cross_entropy(
    one: Any,
    logits: int,
    targets: int,
    mask: int,
    losses: int,
    rows: int,
    width: int,
    need_backward: bool,
) -> None:
    """Do so for every row."""
    a, y = pointer(logits, one), pointer(targets, np.int32(0))
    valid, all_losses = pointer(mask, np.uint8(0)), pointer(losses, np.float64(0))
    for i in prange(rows):
        row_cross_entropy(
            one, at(a, i * width), y[i], valid[i] != 0, at(all_losses, i), width, need_backward
        )


def softmax(x: Array) -> Array:
    """Return the softmax of x (..., n) over its last axis."""
    x = contiguous(x)
    out = empty(x.shape, x.dtype)
    width = x.shape[-1]
    if out.size:
        one, far = x.dtype.type(1), is_far(out)
        rooms = scratch(2 * width if far else 0, x.dtype)
        _softmax(one, address(x), address(out), rooms, x.size // width, width, far)
    return out


class Later(NamedTuple):
    """A gradient that is not made yet."""

    shape: tuple[int, ...]
    make: Callable[[Array], None]  # writes it into an array


class LinearCrossEntropyCache(NamedTuple):
    dx: Array | None  # (..., D) of the total; None when no backward was to follow
    dhead: Array | Later | None  # (V, D)
    dbias: Array | None  # (V,)


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
    head = contiguous(head)
    at_hand = DEPTH if team() <= FEW_THREADS else None  # many threads need larger products

    def step(
        rows: Array, z: Array, start: int, arguments: Arguments, gradients: Gradients
    ) -> Callable[[Array], None]:
        height = len(rows) if len(rows) <= len(z) else depth_of(len(rows))
        for first in range(0, len(rows), height):
            part = slice(first, first + height)
            some = rows[part]
            logits = z[: len(some)]
            gemm(some, head, logits, tb=True, bias=bias)
            _cross_entropy(*arguments(start + first, logits))
            if gradients is not None:
                dx, dhead = gradients
                gemm(logits, head, dx[part])
                if dhead is not None:
                    gemm(logits, some, dhead, ta=True, accumulate=start + first > 0)
        return partial(gemm, z[: len(rows)], rows, ta=True)

    return in_chunks(step, CHUNK_ROWS, x, head, targets, mask, bias, need_backward, at_hand)


Gradients = tuple[Array, Array | None] | None  # dx of a chunk's rows, and dhead
Arguments = Callable[[int, Array], tuple[Any, ...]]


def chunk_of(vocabulary: int, multiple: int) -> int:
    """Return the rows of a chunk, a multiple of ``multiple``."""
    most = CHUNK_ELEMENTS // max(vocabulary, 1) // multiple
    return max(most, -(-LEAST_ROWS // multiple)) * multiple


def in_chunks(
    step: Callable[[Array, Array, int, Arguments, Gradients], Callable[[Array], None]],
    multiple: int,
    x: Array,
    head: Array,
    targets: Array,
    mask: Array | None,
    bias: Array | None,
    need_backward: bool,
    at_hand: int | None = None,
) -> tuple[Loss, LinearCrossEntropyCache]:
    """Return what ``linear_cross_entropy_forward`` does, by one call of ``step`` for each chunk.

    A chunk is a multiple of ``multiple`` rows.
    ``step(rows, z, start, arguments, gradients)`` fills z with the logits of the rows of x from
    ``start`` on, runs a kernel like ``_cross_entropy`` on ``arguments(start, z)``, writes dx, and
    writes dhead or, after the first chunk, adds to it. With ``at_hand`` z has so many rows at most,
    for a part of the chunk, where there is no bias (whose gradient is a sum over z). Where dhead is
    None, what ``step`` returns is to make it later, from what it finds in z.
    """
    vocabulary = len(head)
    valid = np.ones(targets.shape, np.bool_) if mask is None else mask
    rows = as_rows(x)
    ids = np.ascontiguousarray(targets, dtype=np.int32).reshape(-1)
    flags = np.ascontiguousarray(valid).reshape(-1).view(np.uint8)

    height = chunk = chunk_of(vocabulary, multiple)
    if at_hand is not None and bias is None:
        height = min(chunk, at_hand)
    losses = empty(len(rows), np.float64)
    dx = dhead = dbias = None
    later = 0 < len(rows) <= min(height, rows.shape[1])  # the logits are no more than dhead
    if need_backward:
        dx, dhead = empty(rows.shape, x.dtype), None if later else empty(head.shape, x.dtype)
        if bias is not None:
            dbias = np.zeros_like(bias)

    def arguments(start: int, z: Array) -> tuple[Any, ...]:
        part = slice(start, start + len(z))
        return (
            *(x.dtype.type(1), address(z), address(ids[part]), address(flags[part])),
            *(address(losses[part]), len(z), vocabulary, need_backward),
        )

    # The logits are allocated last: what is freed first should not lie below what stays.
    z = empty((min(height, len(rows)), vocabulary), x.dtype)
    for start in range(0, len(rows), chunk):
        part = slice(start, min(start + chunk, len(rows)))
        some = z[: part.stop - start]
        gradients = None if dx is None else (dx[part], dhead)
        make = step(rows[part], some, start, arguments, gradients)
        if dbias is not None:
            once = empty(dbias.shape, dbias.dtype)
            sum_rows(some, once)
            dbias += once
    if dhead is not None and not len(rows):
        dhead.fill(0)
    to_head = Later(head.shape, make) if need_backward and later else dhead
    cache = LinearCrossEntropyCache(None if dx is None else dx.reshape(x.shape), to_head, dbias)
    return Loss(float(np.sum(losses)), int(np.sum(valid))), cache


def linear_cross_entropy_backward(
    dloss: float, cache: LinearCrossEntropyCache, *, out: tuple[Array | None, Array | None]
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dhead, dbias) of dloss · total; dbias is None when there was no bias."""
    assert cache.dx is not None and cache.dhead is not None
    head_out, bias_out = out
    dx = cache.dx if dloss == 1 else scaled(cache.dx, dloss)
    if isinstance(cache.dhead, Later):
        made, elsewhere = receiver(head_out, cache.dhead.shape, cache.dx.dtype)
        cache.dhead.make(made)
        if dloss != 1:
            scale_into(made, dloss, made)
        dhead = delivered(made, elsewhere)
    else:
        dhead = _scaled_into(cache.dhead, dloss, head_out)
    dbias = None if cache.dbias is None else _scaled_into(cache.dbias, dloss, bias_out)
    return dx, dhead, dbias


def _scaled_into(gradient: Array, factor: float, out: Array | None) -> Array:
    target, elsewhere = receiver(out, gradient.shape, gradient.dtype)
    scale_into(gradient, factor, target)
    return delivered(target, elsewhere)
