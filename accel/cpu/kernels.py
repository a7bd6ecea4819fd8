"""What every kernel file here needs: how work is cut, how the compiler is set, how arrays enter.

Kernels take addresses rather than arrays (``simd.pointer`` says why), with a scalar of the element
type beside them, so a kernel is compiled once for float32 and once for float64 whatever the arrays'
layout. All they are given is C-contiguous: ``contiguous`` sees to that at the boundary. The scalar
is called ``one`` and is 1, so ``one - one`` is the zero of the kernel's element type: a sum that
starts at the literal ``0.0`` would be float64.

Work is cut into pieces whose size follows from the shape alone, never from the number of threads,
and sums over pieces are added in a fixed order; so the number of threads changes no bit. (Products
alone are cut for their threads, in float32 from nine on: there no bit depends on the cut.)
"""

import ctypes
import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from accel.cpu.memory import empty
from accel.cpu.simd import at, pointer
from accel.jit import jit
from accel.threads import most
from reference.types import Array

PIECE = 16_384  # elements of a flat array that one task takes
ROW_PIECE = 16  # rows that one task takes, where rows are independent of each other
SUM_PIECE = 64  # rows that are added up by one task before the partial sums are

# How kernels are compiled. The liberties do not let the compiler assume that there are no NaN and
# no infinities: a NaN has to reach the loss, where it is noticed. Division by zero gives what
# NumPy gives; Python's exception would be a branch in every loop.
_LIBERTIES = {"contract", "nsz", "arcp"}
MAP: dict[str, Any] = {
    "nogil": True,
    "parallel": True,
    "error_model": "numpy",
    "fastmath": _LIBERTIES,
}
SUM = MAP | {"fastmath": _LIBERTIES | {"reassoc"}}  # sums may be split over the lanes of a vector
SERIAL = SUM | {"parallel": False}  # called from another kernel, within a task or between them
# The same for what has no sum. A loop that LLVM cuts into vectors has a second form, one element at
# a time, which it takes where arrays lie less than some vectors apart; were it free to choose the
# order of a product of three, each form might choose its own, and short arrays get other bits by
# where they lie.
EACH = MAP | {"parallel": False}

COMPILED = "kernels alone call this: it is compiled, never run"

FEW_THREADS = 8  # for more than these, float32 products and the loss are cut anew
EVEN = 0.9  # of the time of the thread that works longest, at least, every thread then works too


@functools.lru_cache(4096)
def cut_evenly(rows: int, columns: int, threads: int, row_cuts: int, most: int) -> tuple[int, int]:
    """Return into how many parts to cut the rows and the columns of a product for its threads.

    A thread takes as many tasks as any other, or one more. Of the cuts of the rows into
    ``row_cuts`` to ``most`` parts that leave threads ``EVEN``, it is that into the fewest tasks,
    with the fewest parts of the columns; where there is none, the most even.

    Parameters
    ----------
    rows, columns : int
        What tasks can be cut between: blocks of rows, panels of columns.
    """

    def evenness(r: int, c: int) -> float:
        longest = -(-r * c // threads) * -(-rows // r) * -(-columns // c)
        return rows * columns / (threads * longest)

    pairs = [
        (r, c)
        for r in range(row_cuts, min(most, row_cuts + 2 * threads) + 1)
        for c in range(1, min(columns, 2 * threads) + 1)
    ]
    even = [pair for pair in pairs if evenness(*pair) >= EVEN]
    if even:
        return min(even, key=lambda pair: (pair[0] * pair[1], pair[1]))
    return max(pairs, key=lambda pair: (evenness(*pair), -pair[0] * pair[1]))


def contiguous(x: Array) -> Array:
    """Return x itself if it is C-contiguous, else a copy that is."""
    if x.flags.c_contiguous:
        return x
    copy = empty(x.shape, x.dtype)
    np.copyto(copy, x)
    return copy


def as_rows(x: Array) -> Array:
    """Return x (..., n) as a contiguous (N, n), also where n or N is 0."""
    return contiguous(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def address(x: Array | None) -> int:
    """Return where the first element lies; 0, which is null, where there is no array."""
    if x is None:
        return 0
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(x.data))  # 0.25 µs
    except (TypeError, ValueError):  # read-only, or without elements: 0.9 µs
        return int(x.ctypes.data)


def like(x: Array) -> Any:
    """Return a scalar of the element type, which chooses the version of a kernel."""
    return x.dtype.type(0)


def receiver(out: Array | None, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array | None]:
    """Return the contiguous array that a kernel shall fill, and where to copy it after."""
    if out is None:
        return empty(shape, dtype), None
    if out.flags.c_contiguous:
        return out, None
    return empty(shape, dtype), out


def delivered(filled: Array, out: Array | None) -> Array:
    """Copy a gradient to the caller's array where the kernel could not write there itself."""
    if out is not None:
        np.copyto(out, filled)
    return filled


def scratch(elements: int, dtype: npt.DTypeLike) -> Array:
    """Return scratch memory for every thread: (threads, elements), rounded up to 64 bytes."""
    return empty((most(), -(-elements // 16) * 16), dtype)


@jit(**EACH)
def add_tile(c: Any, c_row: int, other: Any, other_row: int, rows: int, columns: int) -> None:
    """Add a tile whose rows are ``other_row`` apart, 0 where it is one row, to that at c."""
    for i in range(rows):
        x, y = at(c, i * c_row), at(other, i * other_row)
        for j in range(columns):
            x[j] += y[j]


@jit(**SUM)
def _sum_rows_partial(like: Any, x: int, partial: int, rows: int, width: int) -> None:
    source, target = pointer(x, like), pointer(partial, like)
    for piece in prange((rows + SUM_PIECE - 1) // SUM_PIECE):
        t = at(target, piece * width)
        for j in range(width):
            t[j] = 0
        for i in range(piece * SUM_PIECE, min(rows, (piece + 1) * SUM_PIECE)):
            s = at(source, i * width)
            for j in range(width):
                t[j] += s[j]


@jit(**SUM)
def _sum_partials(like: Any, partial: int, out: int, rows: int, width: int) -> None:
    source, target = pointer(partial, like), pointer(out, like)
    for piece in prange((width + 63) // 64):
        low, high = piece * 64, min(width, piece * 64 + 64)
        for j in range(low, high):
            target[j] = 0
        for i in range(rows):
            s = at(source, i * width)
            for j in range(low, high):
                target[j] += s[j]


def sum_partials(partial: Array, out: Array) -> None:
    """Write the sum of the rows of ``partial`` (n, D), added in their order, into ``out`` (D,)."""
    _sum_partials(like(out), address(partial), address(out), *partial.shape)


def sum_rows(x: Array, out: Array) -> None:
    """Write the sum of the rows of x (N, D) into ``out`` (D,): by pieces, then over the pieces."""
    rows, width = x.shape
    partial = empty((-(-rows // SUM_PIECE), width), x.dtype)
    _sum_rows_partial(like(x), address(x), address(partial), rows, width)
    sum_partials(partial, out)
