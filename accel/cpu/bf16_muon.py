"""Muon in the mode bf16: the products of Newton-Schulz take bfloat16 operands.

As in the source (Jordan et al. 2024), but that X and what is added up stay float32: rounding is an
error of the products alone, and a direction that X has a little of keeps what it has of it. All is
as in ``muon.py`` otherwise, and the products as in ``bf16_gemm.py``.

A task has some strips of 32 rows of a product. While these are near it adds what is to be added,
and packs them for the products that follow, so that a step goes three times over its matrices.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from accel.cpu.bf16_gemm import ROW_PANELS, A, B, multiply_panels, panels, part
from accel.cpu.bf16_portable import SIDE, STEP
from accel.cpu.bf16_tiles import configure, enable, pack_columns, pack_rows, release
from accel.cpu.kernels import MAP, SERIAL, address
from accel.cpu.memory import several
from accel.cpu.muon import scale_to_one, take_step
from accel.cpu.packing import room
from accel.cpu.simd import at, pointer
from accel.jit import jit
from accel.threads import team
from reference import muon as reference

Array = npt.NDArray[Any]

TASKS = 8  # of a product, if it has as many strips: 2, 4 and 8 threads share them evenly


@jit(**SERIAL, apart=True)
def _pack(
    x: Any,
    rows: int,
    first: int,
    count: int,
    width: int,
    left: int,
    turned: int,
    right: int,
    spare: Any,
) -> None:
    """Pack ``count`` of the rows of X (rows, width), from the strip ``first`` on.

    ``left`` is X as the left operand of a product, ``turned`` its transpose as one, and ``right``
    is X as the right operand; 0 for one that is not needed.
    """
    down, across = (rows + SIDE - 1) // SIDE, (width + SIDE - 1) // SIDE
    for i in range(0, count, SIDE):
        strip, source, high = first + i // SIDE, at(x, i * width), min(SIDE, count - i)
        if left:
            target = at(pointer(left, np.uint32(0)), strip * across * STEP)
            pack_rows(source, width, high, width, target, A, spare)
        if turned:
            target = at(pointer(turned, np.uint32(0)), strip * STEP)
            pack_columns(source, width, high, width, target, down * STEP, A, spare)
        if right:
            target = at(pointer(right, np.uint32(0)), strip * STEP)
            pack_columns(source, width, high, width, target, down * STEP, B, spare)


@jit(**MAP)
def _product(
    a: int,
    b: int,
    out: int,
    rows: int,
    columns: int,
    depth: int,
    factor: Any,
    other: int,
    of_other: Any,
    left: int,
    turned: int,
    right: int,
    tasks: int,
) -> None:
    """Write factor · A B + of_other · other (rows, columns) to ``out``, and pack it.

    A and B, packed, have ``depth`` columns and rows; without B, ``out`` is packed as it is. A task
    may write over those strips of A that it has read.
    """
    steps = (depth + SIDE - 1) // SIDE
    for task in prange(tasks):
        spare = room(np.float32(0))
        i0, i1 = part(rows, tasks, task)
        count = min(rows, i1 * SIDE) - i0 * SIDE
        made = at(pointer(out, factor), i0 * SIDE * columns)
        if b:
            x, y = at(pointer(a, np.uint32(0)), i0 * steps * STEP), pointer(b, np.uint32(0))
            configure()
            multiply_panels(x, y, made, count, columns, steps, columns, False, 0, 0, 0, spare)
            release()
        if other:
            more = at(pointer(other, factor), i0 * SIDE * columns)
            for j in range(count * columns):
                made[j] = factor * made[j] + of_other * more[j]
        _pack(made, rows, i0, count, columns, left, turned, right, spare)


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
    turned: int,
    right: int,
    gram_left: int,
    gram_right: int,
    p_right: int,
    tasks: int,
    side_tasks: int,
) -> None:
    """Take steps from X (long, side) to ``following``, and from there to X, by turns."""
    one = a / a
    _product(0, 0, x, long, side, 0, one, 0, one, left, turned, right, tasks)
    for turn in range(steps):
        now, then = x, following
        if turn % 2:
            now, then = then, now
        _product(
            turned, right, gram, side, side, long, one, 0, one, gram_left, 0, gram_right, side_tasks
        )
        _product(gram_left, gram_right, p, side, side, side, c, gram, b, 0, 0, p_right, side_tasks)
        if turn + 1 == steps:
            left_next, turned, right = 0, 0, 0
        else:
            left_next = left
        _product(
            left, p_right, then, long, side, side, one, now, a, left_next, turned, right, tasks
        )


def orthogonalise(x: Array) -> Array:
    """Return a contiguous x (s, r), s >= r, with its singular values near 1; x is used up."""
    scale_to_one(x)
    long, side = x.shape
    down, across = panels(long), panels(side)
    packed, gram_packed = (down * across, STEP), (across * across, STEP)
    gram, p, following, left, turned, right, gram_left, gram_right, p_right = several(
        *(x.dtype, (side, side), (side, side), x.shape),
        *(packed, packed, packed, gram_packed, gram_packed, gram_packed),
    )
    number, turns = x.dtype.type, reference.ITERATIONS
    enable()
    _newton_schulz(
        *(number(reference.A), number(reference.B), number(reference.C)),
        *(address(x), address(following), address(gram), address(p), long, side, turns),
        *(address(left), address(turned), address(right)),
        *(address(gram_left), address(gram_right), address(p_right), _tasks(down), _tasks(across)),
    )
    return following if turns % 2 else x


def _tasks(strips: int) -> int:
    """Return how many tasks have the strips of a product; it decides no bits."""
    return min(strips, max(-(-strips // (ROW_PANELS * TASKS)) * TASKS, 2 * team()))


def muon(master: Array, m: Array, grad: Array, **options: Any) -> None:
    """Take one step of Muon on a matrix (I, O), in place; see ``reference/muon.py``."""
    take_step(orthogonalise, master, m, grad, **options)
