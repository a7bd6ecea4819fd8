"""Matrix products in float32 and float64, for the shapes of a transformer.

After Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication". The sum over k
is cut into blocks of at most DEPTH. For each block

1. the right operand is packed into panels, ``block_columns`` wide, whose rows lie one behind the
   other: 128 KiB a panel, which the second-level cache holds while many rows pass by it; not more
   than some megabytes of it at a time, where a head's would be as large as the head;
2. a transposed left operand is packed too, some of its columns at a time (an untransposed one is
   read in place: its rows are already in the order of the sum);
3. tasks of about ROWS rows and some panels multiply, 6 rows by one panel at a time
   (``simd.tile_gemm``). Rows, in sixes, and panels are divided evenly, and where there are many
   tasks their number is a multiple of TOGETHER: all threads wait for the one that has most. More
   than eight threads get a cut of their own (``kernels.cut_evenly``).

To pack an operand costs as much as some reads of it. So an untransposed right one that is narrow,
or that few rows pass by, is read in place (NARROW), and so is a transposed left one whose rows are
SHORT: the steps of its sum are a row apart there, and those that are a page or its multiples apart
would fall onto the same lines of the first-level cache.

A row of the register block is as long as one cache line with the registers of AVX2, four with those
of AVX-512. One line is soon multiplied, so that there it counts what each step of a sum brings into
the first-level cache: six numbers of a transposed left operand, and with them the rest of the line
that they lie in. So where the block is one line wide, the left operand is packed TWELVE columns at
a time, half as many rows make a task, and an operand is read in place only if it is small (HELD;
HELD_BY_MANY where one thread would pack what another reads, and cores may share no cache), or it is
a right one that FEW rows pass by, and its own rows do not fall onto the same lines of a cache.

A bias, and what else is to be added, join a tile when its sum is complete, in the nearest cache.

Every element of the product is the sum over k in ascending order, block by block, in fused
multiply-adds; where a task begins and ends does not matter. So the bits depend on the shape
alone. A BLAS with threads does not promise as much, and two thread pools in one process (its own
and Numba's) spin against each other: 39 % of a training step went there. One product of OpenBLAS
split over our threads is as fast as this only where the split follows the number of threads.
"""

import functools
from typing import Any

from numba import prange

from accel.cpu.kernels import FEW_THREADS, MAP, add_tile, address, contiguous, cut_evenly, like
from accel.cpu.memory import empty
from accel.cpu.packing import pack_columns, pack_rows, prefetch
from accel.cpu.simd import (
    STEPS,
    at,
    block_columns,
    block_vectors,
    pointer,
    tile_gemm,
    vector_bytes,
    vector_columns,
)
from accel.jit import jit
from accel.threads import team
from reference.types import Array

DEPTH = 512  # of the sum, at most, in one block; a multiple of 8
ROWS = 192  # of the product in one task, about; a multiple of SIX
FEW_ROWS = 24  # in one task, at least, where the product is too narrow to be cut by columns
SIX = 6  # rows of the register block
TOGETHER = 8  # tasks: 2, 4 and 8 threads share a multiple of it evenly
PACK_ROWS = 16  # rows that are packed by one task
PACKED = 1 << 20  # elements of an operand that are packed at a time
NARROW = 96 << 10  # elements: rows of the product, times those from row to row of the right operand
SHORT = 3 << 10  # bytes from row to row of the left operand
LINE = 64  # bytes of a cache line
TWELVE = 12  # columns of the left operand that are packed side by side; a multiple of SIX
HELD = 128 << 10  # bytes of an operand, for one thread
HELD_BY_MANY = 512 << 10
FEW = 48  # rows of the product
PAGE = 4 << 10  # bytes
MIN_TASKS = 16  # where the product is large enough


@jit(**MAP)
def _product(
    like: Any,
    ta: bool,
    tb: bool,
    m: int,
    n: int,
    k: int,
    a_address: int,
    lda: int,
    b_address: int,
    ldb: int,
    accumulate: bool,
    c_address: int,
    ldc: int,
    bias_address: int,
    plus_address: int,
    right_address: int,
    left_address: int,
    depth: int,
    high: int,
    wide: int,
    rows: int,
    row_tasks: int,
    column_tasks: int,
) -> None:
    a, b, c = pointer(a_address, like), pointer(b_address, like), pointer(c_address, like)
    right, left = pointer(right_address, like), pointer(left_address, like)
    bias, plus = pointer(bias_address, like), pointer(plus_address, like)
    width = block_columns(a)
    line = vector_columns(a)  # elements of a vector, which is a cache line or a part of one
    across = (n + wide - 1) // wide
    for step in range((k + depth - 1) // depth * across):
        k0, j0 = step // across * depth, step % across * wide
        kc, columns = min(depth, k - k0), min(wide, n - j0)
        panels = (columns + width - 1) // width
        add, last = accumulate or k0 > 0, k0 + kc == k
        if tb:
            for p in prange(panels):
                w = min(width, columns - p * width)
                panel = at(right, p * width * depth)
                pack_columns(at(b, (j0 + p * width) * ldb + k0), ldb, panel, width, w, kc)
        for top in range(0, m, high):
            count = min(high, m - top)
            sixes = (count + SIX - 1) // SIX
            pack_right = right_address and not tb and top == 0
            pack_left = left_address and (j0 == 0 or high < m)  # else it is packed still
            if pack_right or pack_left:
                for t in prange((kc + PACK_ROWS - 1) // PACK_ROWS):
                    begin, until = t * PACK_ROWS, min(kc, (t + 1) * PACK_ROWS)
                    if pack_right:
                        size, block = width * depth, at(b, k0 * ldb + j0)
                        pack_rows(block, ldb, right, width, size, begin, until, columns)
                    if pack_left:
                        size, block = rows * depth, at(a, k0 * lda + top)
                        pack_rows(block, lda, left, rows, size, begin, until, count)
            for task in prange(row_tasks * column_tasks):
                t = task // column_tasks
                i = sixes * t // row_tasks * SIX
                end = min(count, sixes * (t + 1) // row_tasks * SIX)
                column = task % column_tasks
                start, stop = panels * column // column_tasks, panels * (column + 1) // column_tasks
                for p in range(start, stop):
                    w, j = min(width, columns - p * width), j0 + p * width
                    to = at(c, (top + i) * ldc + j)
                    if right_address:
                        panel, b_row = at(right, p * width * depth), width
                        # While it multiplies, the next one comes into the nearer cache.
                        following = at(panel, width * depth) if p + 1 < panels else panel
                    else:
                        panel, b_row = at(b, k0 * ldb + j), ldb
                        following = panel
                    part = (width * STEPS * SIX + end - i - 1) // max(end - i, 1)
                    for row in range(i, end, SIX):
                        ahead = at(following, (row - i) // SIX * (kc // STEPS) * part)
                        height, made = min(SIX, end - row), at(to, (row - i) * ldc)
                        stream = at(plus, (top + row) * n + j)
                        if last and plus_address:
                            for r in range(height):
                                prefetch(at(stream, r * n), 0, w, line)
                        if left_address:
                            row_step, column_step = 1, rows
                            block = at(left, row // rows * rows * depth + row % rows)
                        elif ta:
                            row_step, column_step = 1, lda
                            block = at(a, k0 * lda + top + row)
                        else:
                            row_step, column_step = lda, 1
                            block = at(a, (top + row) * lda + k0)
                        tile_gemm(
                            height,
                            w,
                            kc,
                            block,
                            row_step,
                            column_step,
                            panel,
                            b_row,
                            made,
                            ldc,
                            add,
                            ahead,
                            part,
                        )
                        if last and bias_address:
                            add_tile(made, ldc, at(bias, j), 0, height, w)
                        if last and plus_address:
                            add_tile(made, ldc, stream, n, height, w)


def depth_of(k: int) -> int:
    """Return the length of the blocks that a sum over k numbers is cut into: even ones."""
    return -(-k // -(-k // DEPTH) // 8) * 8


def gemm(
    a: Array,
    b: Array,
    out: Array,
    *,
    ta: bool = False,
    tb: bool = False,
    accumulate: bool = False,
    bias: Array | None = None,
    plus: Array | None = None,
) -> None:
    """Write op(a) op(b) into ``out``, or add it there; op transposes where ``ta`` or ``tb`` is set.

    Parameters
    ----------
    a, b, out : two-dimensional, of one float type, rows of adjacent elements
        op(a) is (m, k), op(b) is (k, n), out is (m, n).
    accumulate : bool
        Add to ``out``; else it is overwritten, and may hold anything.
    bias : (n,), optional
        Added to each row of the sum.
    plus : (m, n), contiguous, optional
        Added after that.
    """
    m, n = out.shape
    k = a.shape[0] if ta else a.shape[1]
    if k == 0:  # a sum over nothing
        out[...] = out if accumulate else 0
        for more in (bias, plus):
            out += 0 if more is None else more
    if m == 0 or n == 0 or k == 0:
        return
    bias = None if bias is None else contiguous(bias)
    size = out.itemsize
    lda, ldb = a.strides[0] // size, b.strides[0] // size
    (right, left), cut = _cut(m, n, k, ta, tb, lda, ldb, size, team())
    packed = empty(right + left, out.dtype) if right + left else None
    there = address(packed)
    at_right, at_left = there if right else 0, there + right * size if left else 0
    _product(
        *(like(out), ta, tb, m, n, k, address(a), lda, address(b)),
        *(ldb, accumulate, address(out), out.strides[0] // size),
        *(address(bias), address(plus), at_right, at_left, *cut),
    )


@functools.lru_cache(4096)
def _cut(
    m: int, n: int, k: int, ta: bool, tb: bool, lda: int, ldb: int, size: int, threads: int
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return how many elements of the operands are packed, and how ``_product`` cuts its work.

    ``lda`` and ``ldb`` are the elements from row to row of the operands, ``size`` is the bytes of
    one; the rest is as in ``gemm``.
    """
    width = block_vectors() * vector_bytes() // size
    depth = depth_of(k)
    one_line, held = width * size <= LINE, HELD if threads == 1 else HELD_BY_MANY
    few = m < FEW and ldb * size % PAGE != 0
    pack_right = tb or m * ldb > NARROW or (one_line and k * ldb * size > held and not few)
    pack_left = ta and (lda * size >= SHORT or (one_line and k * lda * size > held))
    # Operands are packed in passes of at most PACKED elements, or a panel, of equal extent.
    panels = -(-n // width)
    panels = -(-panels // -(-panels * width * depth // PACKED)) if pack_right else panels
    passes = -(-m // (PACKED // depth)) if pack_left else 1
    high = -(-m // passes // SIX) * SIX
    task_rows = ROWS // 2 if one_line else ROWS
    rows = min(TWELVE if one_line else ROWS, high)
    row_tasks = max(round(high / task_rows), min(high // FEW_ROWS, MIN_TASKS // panels), 1)
    if row_tasks > TOGETHER:
        row_tasks = round(row_tasks / TOGETHER) * TOGETHER
    column_tasks = min(panels, -(-MIN_TASKS // row_tasks))
    if threads > FEW_THREADS:
        most = max(high // FEW_ROWS, row_tasks)
        row_tasks, column_tasks = cut_evenly(-(-high // SIX), panels, threads, row_tasks, most)
    right = panels * width * depth if pack_right else 0
    left = -(-high // rows) * rows * depth if pack_left else 0
    return (right, left), (depth, high, panels * width, rows, row_tasks, column_tasks)
