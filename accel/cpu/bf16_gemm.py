"""Matrix products with bfloat16 operands and float32 sums.

C (M, N) = A (M, K) B (K, N), all float32 in memory; A and B are rounded to bfloat16 as they are
packed (``bf16_tiles.py``), products are exact in float32 and added in float32. A task owns a group
of row panels and a group of column panels of C. Within it the order is::

    for the column panels, as many at a time as fill 768 KiB:
        for k, up to 1024 at a time:
            for each row panel i, for each column panel j:   C[i, j] (+)= A[i] B[j]

so the columns of B stay in the second-level cache (1 or 2 MiB) while all rows of the task pass by,
and C is written in long runs. A block of C at K = 1024 is 2.1 million operations for 128 KiB of A
and B.

With AMX, at 2 TFLOP/s a core, the products of a small model are no longer what a step waits for;
reading and writing float32 activations is. So a product that converts its left operand does so in
the same task, into memory that stays in the cache, and writes the transposed form that the weight
gradient will need while the numbers are at hand: activations are read once, and kept at half the
size.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import get_thread_id, prange

from accel.cpu.bf16_portable import SIDE, STEP
from accel.cpu.bf16_tiles import (
    block,
    configure,
    enable,
    pack_columns,
    pack_rows,
    release,
)
from accel.cpu.kernels import MAP, SERIAL, add_tile, address, contiguous, cut_evenly
from accel.cpu.memory import empty
from accel.cpu.packing import prefetch, room
from accel.cpu.simd import at, pointer
from accel.jit import jit
from accel.threads import most, team

Array = npt.NDArray[Any]

# For pack_rows and pack_columns: the side of the product that the packed panel is for.
A, B = 0, 1

ROW_PANELS = 8  # of A in a task, at most
CACHED = 768 << 10  # bytes of B that are used again and again
K_STEPS = 32  # steps along k of one pass over C
RUN = 512  # columns of 32 rows that are asked for, and then packed


def panels(n: int) -> int:
    """Return the panels of 32 that ``n`` rows or columns take."""
    return -(-n // SIDE)


# --- packing whole matrices ----------------------------------------------------------------------


def pack(x: Array, side: int, *, transposed: bool, out: Array | None = None) -> Array:
    """Pack a float32 matrix.

    Parameters
    ----------
    x : (R, C) float32, rows contiguous
    side : int
        ``A`` or ``B``.
    transposed : bool
        The operand is xᵀ.
    out : optional
        What an earlier call returned for a matrix of this shape, to be written again.

    Returns
    -------
    packed : (panels, steps, 512) uint32
        Panels are along M for A, along N for B.
    """
    rows, columns = x.shape
    down, across = panels(rows), panels(columns)
    as_rows = (side == A) != transposed  # 32 rows of x are a panel, else a step of all panels
    if out is None:
        out = empty((down, across, STEP) if as_rows else (across, down, STEP), np.uint32)
    _pack(address(x), x.strides[0] // 4, rows, columns, address(out), side, as_rows)
    return out


@jit(**MAP)
def _pack(x: int, step: int, rows: int, columns: int, out: int, side: int, as_rows: bool) -> None:
    down, across = (rows + SIDE - 1) // SIDE, (columns + SIDE - 1) // SIDE
    for i in prange(down):
        spare = room(np.float32(0))
        target = at(pointer(out, np.uint32(0)), i * (across if as_rows else 1) * STEP)
        left = min(SIDE, rows - i * SIDE)
        for j in range(0, columns, RUN):
            source = at(pointer(x, np.float32(0)), i * SIDE * step + j)
            count = min(RUN, columns - j)
            for r in range(left):
                prefetch(at(source, r * step), 0, count, 16)
            if as_rows:
                pack_rows(source, step, left, count, at(target, j // SIDE * STEP), side, spare)
            else:
                panel = at(target, j // SIDE * down * STEP)
                pack_columns(source, step, left, count, panel, down * STEP, side, spare)


@jit(**SERIAL, apart=True)
def pack_part(
    x: Any,
    width: int,
    i0: int,
    count: int,
    j0: int,
    columns: int,
    down: int,
    left: int,
    turned: int,
    right: int,
    spare: Any,
) -> None:
    """Pack ``count`` rows of x (., width) from panel i0 on, and ``columns`` of it from panel j0 on.

    ``left`` is for x as the left operand of a product, ``turned`` for its transpose as one, and
    ``right`` for x as the right operand; 0 for one that is not needed. The last two have ``down``
    panels of rows. ``spare`` is room for 512 elements.
    """
    across = (width + SIDE - 1) // SIDE
    for i in range(0, count, SIDE):
        strip, high = i0 + i // SIDE, min(SIDE, count - i)
        source = at(x, strip * SIDE * width + j0 * SIDE)
        if left:
            target = at(pointer(left, np.uint32(0)), (strip * across + j0) * STEP)
            pack_rows(source, width, high, columns, target, A, spare)
        if turned:
            target = at(pointer(turned, np.uint32(0)), (j0 * down + strip) * STEP)
            pack_columns(source, width, high, columns, target, down * STEP, A, spare)
        if right:
            target = at(pointer(right, np.uint32(0)), (j0 * down + strip) * STEP)
            pack_columns(source, width, high, columns, target, down * STEP, B, spare)


# --- products ------------------------------------------------------------------------------------


def multiply(a: Array, b: Array, out: Array, *, accumulate: bool = False) -> None:
    """Write A B, both packed, into ``out`` (M, N) float32, or add it.

    Raises
    ------
    ValueError
        When the packed shapes do not fit.
    """
    rows, columns = out.shape
    _check(a.shape[0] == panels(rows) and a.shape[1] == b.shape[1], a, b, out)
    _check(b.shape[0] == panels(columns), a, b, out)
    if not out.size or not a.shape[1]:  # a sum over nothing
        out[...] = out if accumulate else 0
        return
    enable()
    _multiply(
        address(a), address(b), address(out), rows, columns, a.shape[1], out.strides[0] // 4,
        accumulate, *cut(a.shape[0], b.shape[0]),
    )  # fmt: skip


def multiply_rows(
    x: Array,
    b: Array,
    out: Array,
    *,
    bias: Array | None = None,
    plus: Array | None = None,
    also: int | None = None,
) -> Array | None:
    """Write x B + bias + plus into ``out``, x being packed on the way.

    Parameters
    ----------
    x : (M, K) float32, rows contiguous
    b : packed (K, N)
    out : (M, N) float32
    bias : (N,) float32, optional
    plus : (M, N) float32, contiguous, optional; it comes last
    also : optional
        ``A`` or ``B``: also pack xᵀ as A, or x as B, for a product along M.

    Returns
    -------
    packed : (panels of K, panels of M, 512) uint32, or None
    """
    rows, depth = x.shape
    columns = out.shape[1]
    _check(b.shape[1] == panels(depth) and b.shape[0] == panels(columns), x, b, out)
    packed = None
    if also is not None:
        packed = empty((panels(depth), panels(rows), STEP), np.uint32)
    if not out.size:
        return packed
    bias = None if bias is None else contiguous(bias)
    if depth == 0:  # a sum over nothing
        out[...] = 0
        for more in (bias, plus):
            out += 0 if more is None else more
        return packed
    enable()
    row_parts, column_parts = cut(panels(rows), b.shape[0])
    own = -(-panels(rows) // row_parts) * panels(depth) * STEP
    scratch = empty((most(), own), np.uint32)
    _multiply_rows(
        address(x), x.strides[0] // 4, address(b), address(out), rows, columns, depth,
        out.strides[0] // 4, address(bias), address(plus), address(packed),
        A if also is None else also, row_parts, column_parts, address(scratch), own,
    )  # fmt: skip
    return packed


def cut(rows: int, columns: int) -> tuple[int, int]:
    """Return into how many parts panels of rows and of columns are cut; a task has one of each."""
    return cut_evenly(rows, columns, team(), -(-rows // ROW_PANELS), rows)


def _check(fits: bool, a: Array, b: Array, out: Array) -> None:
    if not fits:
        raise ValueError(f"operands {a.shape} and packed {b.shape} do not make {out.shape}")


@jit(nogil=True)
def part(n: int, parts: int, i: int) -> tuple[int, int]:
    """Return the first panel of part i of n rows or columns, and that of the next part."""
    count = (n + SIDE - 1) // SIDE
    return i * count // parts, (i + 1) * count // parts


@jit(**MAP)
def _multiply(
    a: int,
    b: int,
    c: int,
    rows: int,
    columns: int,
    steps: int,
    c_row: int,
    accumulate: bool,
    row_parts: int,
    column_parts: int,
) -> None:
    for task in prange(row_parts * column_parts):
        i0, i1 = part(rows, row_parts, task % row_parts)
        j0, j1 = part(columns, column_parts, task // row_parts)
        configure()
        multiply_panels(
            at(pointer(a, np.uint32(0)), i0 * steps * STEP),
            at(pointer(b, np.uint32(0)), j0 * steps * STEP),
            at(pointer(c, np.float32(0)), i0 * SIDE * c_row + j0 * SIDE),
            min(rows, i1 * SIDE) - i0 * SIDE,
            min(columns, j1 * SIDE) - j0 * SIDE,
            steps,
            c_row,
            accumulate,
            0,
            0,
            0,
            room(np.float32(0)),
        )
        release()


@jit(**MAP)
def _multiply_rows(
    x: int,
    x_row: int,
    b: int,
    c: int,
    rows: int,
    columns: int,
    depth: int,
    c_row: int,
    bias: int,
    plus: int,
    also: int,
    also_side: int,
    row_parts: int,
    column_parts: int,
    scratch: int,
    scratch_elements: int,
) -> None:
    all_panels = (rows + SIDE - 1) // SIDE
    steps = (depth + SIDE - 1) // SIDE
    for task in prange(row_parts * column_parts):
        own = scratch + 4 * get_thread_id() * scratch_elements
        packed, spare = pointer(own, np.uint32(0)), room(np.float32(0))
        i0, i1 = part(rows, row_parts, task % row_parts)
        j0, j1 = part(columns, column_parts, task // row_parts)
        count = min(rows, i1 * SIDE) - i0 * SIDE
        for i in range(0, count, SIDE):
            source = at(pointer(x, np.float32(0)), (i0 * SIDE + i) * x_row)
            left = min(SIDE, count - i)
            target = at(packed, i // SIDE * steps * STEP)
            pack_rows(source, x_row, left, depth, target, 0, spare)
            if also != 0 and j0 == 0:
                twin = at(pointer(also, np.uint32(0)), (i0 + i // SIDE) * STEP)
                pack_columns(source, x_row, left, depth, twin, all_panels * STEP, also_side, spare)
        configure()
        multiply_panels(
            packed,
            at(pointer(b, np.uint32(0)), j0 * steps * STEP),
            at(pointer(c, np.float32(0)), i0 * SIDE * c_row + j0 * SIDE),
            count,
            min(columns, j1 * SIDE) - j0 * SIDE,
            steps,
            c_row,
            False,
            bias and bias + 4 * j0 * SIDE,
            plus and plus + 4 * SIDE * (i0 * columns + j0),
            columns,
            spare,
        )
        release()


@jit(**SERIAL, apart=True)
def multiply_panels(
    a: Any,
    b: Any,
    c: Any,
    rows: int,
    columns: int,
    steps: int,
    c_row: int,
    accumulate: bool,
    bias: int,
    plus: int,
    plus_row: int,
    spare: Any,
) -> None:
    """Multiply the panels of one task; see the head of this file for the order."""
    shift, streams = pointer(bias, np.float32(0)), pointer(plus, np.float32(0))
    passes = (steps + K_STEPS - 1) // K_STEPS
    per_pass = (steps + passes - 1) // passes
    together = max(1, CACHED // (per_pass * STEP * 4)) * SIDE
    for first in range(0, columns, together):
        for k in range(0, steps, per_pass):
            depth = min(per_pass, steps - k)
            add = accumulate or k > 0
            last = k + depth == steps
            for i in range(0, rows, SIDE):
                x = at(a, (i // SIDE * steps + k) * STEP)
                for j in range(first, min(columns, first + together), SIDE):
                    y = at(b, (j // SIDE * steps + k) * STEP)
                    z = at(c, i * c_row + j)
                    height, width = min(SIDE, rows - i), min(SIDE, columns - j)
                    stream = at(streams, i * plus_row + j)
                    if last and plus:
                        for r in range(height):
                            prefetch(at(stream, r * plus_row), 0, width, 16)
                    if height == SIDE and width == SIDE:
                        block(x, y, z, c_row, depth, add)
                    else:
                        block(x, y, spare, SIDE, depth, False)
                        _finish(z, c_row, height, width, add, spare)
                    if last and bias:
                        add_tile(z, c_row, at(shift, j), 0, height, width)
                    if last and plus:
                        add_tile(z, c_row, stream, plus_row, height, width)


@jit(**SERIAL)
def _finish(c: Any, c_row: int, rows: int, columns: int, add: bool, made: Any) -> None:
    """Write the part of a block that exists, or add it."""
    for r in range(rows):
        x, y = at(c, r * c_row), at(made, r * SIDE)
        for j in range(columns):
            x[j] = y[j] + x[j] if add else y[j]
