"""Whole matrices, and what a task reads of them, packed into panels (``bf16_tiles.py``)."""

from typing import Any

import numpy as np
from numba import prange

from accel.cpu.bf16_portable import SIDE, STEP
from accel.cpu.bf16_tiles import pack_columns, pack_rows
from accel.cpu.kernels import MAP, SERIAL, address, contiguous
from accel.cpu.memory import empty
from accel.cpu.packing import prefetch, room
from accel.cpu.simd import at, pointer
from accel.jit import jit
from accel.threads import team
from reference.types import Array

# For pack_rows and pack_columns: the side of the product that the packed panel is for.
A, B = 0, 1

RUN = 512  # columns of 32 rows that are asked for, and then packed
_ONE = np.float32(1)


def panels(n: int) -> int:
    """Return the panels of 32 that ``n`` rows or columns take."""
    return -(-n // SIDE)


def pack(x: Array, side: int, *, transposed: bool) -> Array:
    """Pack a float32 matrix (R, C), or its transpose, as the operand ``A`` or ``B``.

    Returns
    -------
    packed : (panels, steps, 512) uint32
        Panels are along M for A, along N for B.
    """
    x, (rows, columns) = contiguous(x), x.shape
    down, across = panels(rows), panels(columns)
    as_rows = (side == A) != transposed  # 32 rows of x are a panel, else a step of all panels
    packed = empty((down, across, STEP) if as_rows else (across, down, STEP), np.uint32)
    forms = [0, 0, 0, 0]  # as pack_part has them
    forms[2 * side + transposed] = address(packed)
    pack_pieces(_ONE, address(x), rows, columns, _pieces(down, across), down, *forms)
    return packed


def pack_twice(x: Array, also: int | None) -> tuple[Array, Array | None]:
    """Return x packed as A and, on the way, xᵀ as A or x as B, as ``multiply_rows`` says."""
    x, (rows, columns) = contiguous(x), x.shape
    down, across = panels(rows), panels(columns)
    packed, twin = empty((down, across, STEP), np.uint32), None
    forms = [address(packed), 0, 0, 0]
    if also is not None:
        twin = empty((across, down, STEP), np.uint32)
        forms[1 if also == A else 2] = address(twin)
    pack_pieces(_ONE, address(x), rows, columns, _pieces(down, across), down, *forms)
    return packed, twin


def pack_right(b: Array) -> Array:
    """Pack a right operand (K, N) that is contiguous, or the transpose of what is."""
    if b.flags.c_contiguous:
        return pack(b, B, transposed=False)
    return pack(b.T, B, transposed=True)


def _pieces(down: int, across: int) -> int:
    """Return into how many pieces panels of rows are cut so that all threads have some."""
    threads = team()
    return 1 if down >= threads else max(1, min(across, -(-2 * threads // max(down, 1))))


@jit(**MAP)
def pack_pieces(
    one: Any,
    x: int,
    rows: int,
    width: int,
    pieces: int,
    down: int,
    left: int,
    turned: int,
    right: int,
    turned_right: int,
) -> None:
    """Write the forms of x (rows, width) that ``pack_part`` does, 32 rows in so many pieces."""
    across = (width + SIDE - 1) // SIDE
    whole = pointer(x, one)
    for task in prange((rows + SIDE - 1) // SIDE * pieces):
        spare = room(np.float32(0))
        panel, piece = task // pieces, task % pieces
        count = min(SIDE, rows - panel * SIDE)
        end = min(width, (piece + 1) * across // pieces * SIDE)
        for j in range(piece * across // pieces * SIDE, end, RUN):
            columns = min(RUN, end - j)
            for r in range(count):
                prefetch(at(whole, (panel * SIDE + r) * width + j), 0, columns, 16)
            pack_part(
                whole, width, panel, count, j // SIDE, columns, down,
                left, turned, right, turned_right, spare,
            )  # fmt: skip


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
    turned_right: int,
    spare: Any,
) -> None:
    """Pack ``count`` rows of x (., width) from panel i0 on, and ``columns`` of it from panel j0 on.

    ``left`` is for x as the left operand of a product, ``turned`` for its transpose as one,
    ``right`` for x as the right operand and ``turned_right`` for its transpose; 0 for one that is
    not needed. ``turned`` and ``right`` have ``down`` panels of rows. ``spare`` is room for 512
    elements.
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
        if turned_right:
            target = at(pointer(turned_right, np.uint32(0)), (strip * across + j0) * STEP)
            pack_rows(source, width, high, columns, target, B, spare)


# What a task packs as right operand: B as it is, its transpose, or this in bfloat16.
PLAIN, TURNED, HALVES = 0, 1, 2


@jit(**SERIAL, apart=True)
def pack_group(
    weight: int,
    form: int,
    row: int,
    k0: int,
    depth: int,
    j0: int,
    columns: int,
    out: Any,
    panel: int,
    spare: Any,
) -> None:
    """Pack rows ``k0`` .. of B, ``depth`` of them, and columns ``j0`` .. as right operand.

    From row to row of what lies at ``weight`` are ``row`` elements, from panel to panel of ``out``
    ``panel``.
    """
    if form == PLAIN:
        for k in range(0, depth, SIDE):
            source = at(pointer(weight, np.float32(0)), (k0 + k) * row + j0)
            count, target = min(SIDE, depth - k), at(out, k // SIDE * STEP)
            for r in range(count):
                prefetch(at(source, r * row), 0, columns, 16)
            pack_columns(source, row, count, columns, target, panel, B, spare)
        return
    for j in range(0, columns, SIDE):
        first, count, target = (
            (j0 + j) * row + k0,
            min(SIDE, columns - j),
            at(out, j // SIDE * panel),
        )
        if form == TURNED:
            source = at(pointer(weight, np.float32(0)), first)
            pack_rows(source, row, count, depth, target, B, spare)
        else:
            halves = at(pointer(weight, np.uint16(0)), first)
            pack_rows(halves, row, count, depth, target, B, room(np.uint16(0)))
