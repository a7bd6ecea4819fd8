"""Matrix products with bfloat16 operands and float32 sums.

C (M, N) = A (M, K) B (K, N), all float32 in memory; A and B are rounded to bfloat16 as they are
packed (``bf16_tiles.py``), products are exact in float32 and added in float32. A task owns a group
of row panels and a group of column panels of C. Within it the order is::

    for the column panels, as many at a time as fill 768 KiB (384, where it packs them):
        for k, up to 1024 at a time:
            for each row panel i, for each column panel j:   C[i, j] (+)= A[i] B[j]

so the columns of B stay in the second-level cache (1 or 2 MiB) while all rows of the task pass by,
and C is written in long runs. A block of C at K = 1024 is 2.1 million operations for 128 KiB of A
and B.

With AMX, at 2 TFLOP/s a core, the products of a small model are no longer what a step waits for;
reading and writing float32 operands is. So the larger of the two is packed by the task that
multiplies it, into memory that stays in the cache: activations of many rows, or the weight that few
rows meet, which is the whole traffic of such a step. The smaller one is packed beforehand, for all
tasks. While activations are at hand their transposed form is written as well, which the weight
gradient will need: they are read once, and kept at half the size.
"""

from typing import Any

import numpy as np
from numba import get_thread_id, prange

from accel.cpu.bf16_packing import (
    HALVES,
    PLAIN,
    TURNED,
    A,
    pack_group,
    pack_right,
    pack_twice,
    panels,
)
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
from reference.types import Array

ROW_PANELS = 8  # of A in a task, at most
CACHED = 768 << 10  # bytes of B that are used again and again
OWN = 384 << 10  # the same where the task packs them, from twice as many bytes
K_STEPS = 32  # steps along k of one pass over C


def multiply(
    a: Array,
    b: Array,
    out: Array,
    *,
    accumulate: bool = False,
    bias: Array | None = None,
    plus: Array | None = None,
) -> None:
    """Write A B + bias + plus into ``out`` (M, N) float32, or add A B.

    A is packed. B is, too, or is float32 as ``multiply_rows`` takes it: where it meets few rows,
    tasks have all of these, and each packs the columns that it multiplies.

    Raises
    ------
    ValueError
        When the shapes do not fit.
    """
    rows, columns = out.shape
    steps = a.shape[1]
    _check(a.shape[0] == panels(rows), a, b, out)
    _check_right(b, steps, columns, a, out)
    if not out.size or not steps:  # a sum over nothing
        out[...] = out if accumulate else 0
        for more in (bias, plus):
            out += 0 if more is None else more
        return
    enable()
    if b.dtype == np.float32 and not meets_few(rows, columns):
        b = pack_right(b)
    weight, form, own = None, PLAIN, 0
    parts = cut(a.shape[0], panels(columns))
    if b.dtype != np.uint32:
        weight, own = b, OWN // 4
        b = empty((most(), own), np.uint32)
        parts = 1, cut_columns(panels(columns))
        form = form_of(weight)
    bias = None if bias is None else contiguous(bias)
    _multiply(
        address(a), address(b), address(out), rows, columns, steps, out.strides[0] // 4, accumulate,
        address(bias), address(plus), *parts, address(weight), form,
        steps * SIDE if weight is None else len(weight), own,
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
    x : (M, K) float32
    b : (K, N) float32, contiguous or the transpose of what is; the transpose of what is contiguous
        in bfloat16 (uint16), for few rows; or packed
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
    _check_right(b, panels(depth), columns, x, out)
    few = b.dtype == np.uint16 or (b.dtype == np.float32 and meets_few(rows, columns))
    if few or not out.size or depth == 0:
        a, packed = pack_twice(x, also)
        multiply(a, b, out, bias=bias, plus=plus)
        return packed
    if b.dtype == np.float32:
        b = pack_right(b)
    x, packed = contiguous(x), None
    if also is not None:
        packed = empty((panels(depth), panels(rows), STEP), np.uint32)
    bias = None if bias is None else contiguous(bias)
    enable()
    row_parts, column_parts = cut(panels(rows), b.shape[0])
    own = -(-panels(rows) // row_parts) * panels(depth) * STEP
    scratch = empty((most(), own), np.uint32)
    _multiply_rows(
        address(x), address(b), address(out), rows, columns, depth, out.strides[0] // 4,
        address(bias), address(plus), address(packed),
        A if also is None else also, row_parts, column_parts, address(scratch), own,
    )  # fmt: skip
    return packed


def form_of(weight: Array) -> int:
    """Return in which form a right operand (K, N) lies that is not packed."""
    if weight.dtype == np.uint16:
        return HALVES
    return PLAIN if weight.flags.c_contiguous else TURNED


def meets_few(rows: int, columns: int) -> bool:
    """Return whether a right operand is larger than the left, and wide enough for all threads."""
    return panels(rows) < panels(columns) >= 4 * team()


def cut(rows: int, columns: int) -> tuple[int, int]:
    """Return into how many parts panels of rows and of columns are cut; a task has one of each."""
    return cut_evenly(rows, columns, team(), -(-rows // ROW_PANELS), rows)


def cut_columns(columns: int) -> int:
    """Return into how many parts panels of columns are cut where tasks have all rows."""
    return cut_evenly(1, columns, team(), 1, 1)[1]


def _check_right(b: Array, steps: int, columns: int, a: Array, out: Array) -> None:
    packed = b.shape[:2] == (panels(columns), steps)
    given = b.ndim == 2 and (panels(len(b)), b.shape[1]) == (steps, columns) and b.flags.forc
    _check(packed if b.dtype == np.uint32 else given, a, b, out)


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
    bias: int,
    plus: int,
    row_parts: int,
    column_parts: int,
    weight: int,
    form: int,
    depth: int,
    own: int,
) -> None:
    size = 2 if form == HALVES else 4
    for task in prange(row_parts * column_parts):
        i0, i1 = part(rows, row_parts, task % row_parts)
        j0, j1 = part(columns, column_parts, task // row_parts)
        configure()
        start = get_thread_id() * own if weight else j0 * steps * STEP
        multiply_panels(
            at(pointer(a, np.uint32(0)), i0 * steps * STEP),
            at(pointer(b, np.uint32(0)), start),
            at(pointer(c, np.float32(0)), i0 * SIDE * c_row + j0 * SIDE),
            min(rows, i1 * SIDE) - i0 * SIDE,
            min(columns, j1 * SIDE) - j0 * SIDE,
            steps,
            c_row,
            accumulate,
            bias and bias + 4 * j0 * SIDE,
            plus and plus + 4 * SIDE * (i0 * columns + j0),
            columns,
            weight and weight + size * SIDE * j0 * (1 if form == PLAIN else depth),
            form,
            columns if form == PLAIN else depth,
            depth,
            room(np.float32(0)),
        )
        release()


@jit(**MAP)
def _multiply_rows(
    x: int,
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
            source = at(pointer(x, np.float32(0)), (i0 * SIDE + i) * depth)
            left = min(SIDE, count - i)
            target = at(packed, i // SIDE * steps * STEP)
            pack_rows(source, depth, left, depth, target, 0, spare)
            if also != 0 and j0 == 0:
                twin = at(pointer(also, np.uint32(0)), (i0 + i // SIDE) * STEP)
                pack_columns(source, depth, left, depth, twin, all_panels * STEP, also_side, spare)
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
            0,
            PLAIN,
            0,
            depth,
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
    weight: int,
    form: int,
    weight_row: int,
    depth: int,
    spare: Any,
) -> None:
    """Multiply the panels of one task; see the head of this file for the order.

    With ``weight`` those of B (depth, columns) are packed from it (``pack_group``), into ``b``,
    which has room for those that are used again and again.
    """
    shift, streams = pointer(bias, np.float32(0)), pointer(plus, np.float32(0))
    passes = (steps + K_STEPS - 1) // K_STEPS
    per_pass = (steps + passes - 1) // passes
    together = max(1, (OWN if weight else CACHED) // (per_pass * STEP * 4)) * SIDE
    for first in range(0, columns, together):
        end = min(columns, first + together)
        for k in range(0, steps, per_pass):
            span = min(per_pass, steps - k)
            ys, panel = at(b, (first // SIDE * steps + k) * STEP), steps * STEP
            if weight:
                ys, panel = at(b, 0), span * STEP
                high = min(depth - k * SIDE, span * SIDE)
                pack_group(
                    weight, form, weight_row, k * SIDE, high, first, end - first, b, panel, spare
                )
            add = accumulate or k > 0
            last = k + span == steps
            for i in range(0, rows, SIDE):
                x = at(a, (i // SIDE * steps + k) * STEP)
                for j in range(first, end, SIDE):
                    y = at(ys, (j - first) // SIDE * panel)
                    z = at(c, i * c_row + j)
                    height, width = min(SIDE, rows - i), min(SIDE, columns - j)
                    stream = at(streams, i * plus_row + j)
                    if last and plus:
                        for r in range(height):
                            prefetch(at(stream, r * plus_row), 0, width, 16)
                    if height == SIDE and width == SIDE:
                        block(x, y, z, c_row, span, add)
                    else:
                        block(x, y, spare, SIDE, span, False)
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
