"""Muon in the mode bf16: the products of Newton-Schulz take bfloat16 operands.

As in the source (Jordan et al. 2024), but that X and what is added up stay float32: rounding is an
error of the products alone, and a direction that X has a little of keeps what it has of it. All is
as in ``muon.py`` otherwise, and the products as in ``bf16_gemm.py``.

A task has a part of a product's rows and columns. While it is near it adds to it what is to be
added, and packs it for the products that follow: a step goes three times over its matrices.
"""

from typing import Any

import numpy as np
from numba import prange

from accel.cpu.bf16_gemm import cut, multiply_panels, part
from accel.cpu.bf16_packing import pack_part, panels
from accel.cpu.bf16_portable import SIDE, STEP
from accel.cpu.bf16_tiles import configure, enable, release
from accel.cpu.kernels import MAP, SERIAL, address
from accel.cpu.memory import several
from accel.cpu.muon import scale_to_one, take_step
from accel.cpu.packing import room
from accel.cpu.simd import at, pointer
from accel.jit import jit
from reference import muon as reference
from reference.types import Array


@jit(**MAP)
def _product(
    a: int,
    b: int,
    out: int,
    rows: int,
    width: int,
    depth: int,
    factor: Any,
    other: int,
    of_other: Any,
    left: int,
    turned: int,
    right: int,
    row_parts: int,
    column_parts: int,
) -> None:
    """Write A B, or factor · A B + of_other · other, to ``out`` (rows, width), and pack it.

    A (rows, depth) and B are packed; without B, ``out`` is packed as it is.
    """
    steps, down = (depth + SIDE - 1) // SIDE, (rows + SIDE - 1) // SIDE
    for task in prange(row_parts * column_parts):
        spare = room(np.float32(0))
        i0, i1 = part(rows, row_parts, task % row_parts)
        j0, j1 = part(width, column_parts, task // row_parts)
        count, columns = min(rows, i1 * SIDE) - i0 * SIDE, min(width, j1 * SIDE) - j0 * SIDE
        whole, first = pointer(out, factor), i0 * SIDE * width + j0 * SIDE
        if b:
            x = at(pointer(a, np.uint32(0)), i0 * steps * STEP)
            y = at(pointer(b, np.uint32(0)), j0 * steps * STEP)
            made = at(whole, first)
            configure()
            multiply_panels(
                x, y, made, count, columns, steps, width, False, 0, 0, 0, 0, 0, 0, depth, spare
            )  # fmt: skip
            release()
        if other:
            for i in range(count):
                made = at(whole, first + i * width)
                more = at(pointer(other, factor), first + i * width)
                for j in range(columns):
                    made[j] = factor * made[j] + of_other * more[j]
        pack_part(whole, width, i0, count, j0, columns, down, left, turned, right, 0, spare)


@jit(**SERIAL)
def _newton_schulz(
    a: Any,
    b: Any,
    c: Any,
    x: int,
    following: int,
    gram: int,
    p: int,
    long: int,
    side: int,
    steps: int,
    left: int,
    next_left: int,
    turned: int,
    right: int,
    gram_left: int,
    gram_right: int,
    p_right: int,
    row_parts: int,
    column_parts: int,
    side_rows: int,
    side_columns: int,
) -> None:
    """Take steps from X (long, side) to ``following``, and from there to X, by turns."""
    one = a / a
    _product(
        *(0, 0, x, long, side, 0, one, 0, one),
        *(left, turned, right, row_parts, column_parts),
    )
    for turn in range(steps):
        _product(
            *(turned, right, gram, side, side, long, one, 0, one),
            *(gram_left, 0, gram_right, side_rows, side_columns),
        )
        _product(
            *(gram_left, gram_right, p, side, side, side, c, gram, b),
            *(0, 0, p_right, side_rows, side_columns),
        )
        if turn + 1 == steps:
            next_left, turned, right = 0, 0, 0
        _product(
            *(left, p_right, following, long, side, side, one, x, a),
            *(next_left, turned, right, row_parts, column_parts),
        )
        x, following, left, next_left = following, x, next_left, left


def orthogonalise(x: Array) -> Array:
    """Return a contiguous x (s, r), s >= r, with its singular values near 1; x is used up."""
    if not x.size:
        return x
    scale_to_one(x)
    long, side = x.shape
    down, across = panels(long), panels(side)
    packed, gram_packed = (
        (down * across, STEP),
        (across * across, STEP),
    )  # 4 bytes a pair, as float32
    gram, p, following, left, next_left, turned, right, gram_left, gram_right, p_right = several(
        *(x.dtype, (side, side), (side, side), x.shape),
        *(packed, packed, packed, packed, gram_packed, gram_packed, gram_packed),
    )
    number, turns = x.dtype.type, reference.ITERATIONS
    enable()
    _newton_schulz(
        *(number(reference.A), number(reference.B), number(reference.C)),
        *(address(x), address(following), address(gram), address(p), long, side, turns),
        *(address(left), address(next_left), address(turned), address(right)),
        *(address(gram_left), address(gram_right), address(p_right)),
        *(*cut(down, across), *cut(across, across)),
    )
    return following if turns % 2 else x


def muon(master: Array, m: Array, grad: Array, **options: Any) -> None:
    """Take one step of Muon on a matrix (I, O), in place; see ``reference/muon.py``."""
    take_step(orthogonalise, master, m, grad, **options)
