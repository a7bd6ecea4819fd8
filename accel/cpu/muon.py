"""Muon: five steps of Newton-Schulz, between passes over memory.

The mathematics is in ``reference/muon.py``. Of a matrix (I, O) with r the smaller and s the larger
side, a step takes 4 r² s + 2 r³ floating-point operations, in products whose bits depend on the
shapes alone. What stands around them reads each number a few times and is a few per cent.

A wide matrix is transposed as it is taken, so all that is orthogonalised is tall, X (s, r), and
none of its products needs a transposed right operand. What is small enough for the caches near a
core is multiplied where it lies, by one kernel for all five steps; larger ones by ``gemm.gemm``,
which packs. (A small model's matrices are smaller than what a call and its packing cost.)
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from accel.cpu.elementwise import scale_into
from accel.cpu.gemm import SIX, gemm
from accel.cpu.kernels import MAP, PIECE, ROW_PIECE, SERIAL, address, contiguous
from accel.cpu.memory import empty, several, step
from accel.cpu.optimizer import square_sums
from accel.cpu.simd import at, pointer, tile_gemm
from accel.jit import jit
from reference.muon import ITERATIONS, RMS, TINY, A, B, C
from reference.types import Array

NEAR = 1 << 20  # bytes of a matrix that is multiplied where it lies
TASKS = 16  # of a product of such, which threads share


@jit(**MAP)
def _nesterov(scale: Any, momentum: Any, grad: int, m: int, out: int, n: int) -> None:
    """Write momentum · m + g into m, and the same of the new m into ``out``; g = scale · grad."""
    g, sums, ahead = pointer(grad, scale), pointer(m, scale), pointer(out, scale)
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            x = scale * g[i]
            sums[i] = momentum * sums[i] + x
            ahead[i] = momentum * sums[i] + x


@jit(**MAP)
def _take(like: Any, x: int, rows: int, columns: int, row: int, column: int, out: int) -> None:
    """Copy a matrix, whose neighbours are ``row`` and ``column`` apart, to one without gaps."""
    source, target = pointer(x, like), pointer(out, like)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            s, t = at(source, i * row), at(target, i * columns)
            for j in range(columns):
                t[j] = s[j * column]


@jit(**MAP)
def _descend(
    rate: Any,
    decay: Any,
    x: int,
    row: int,
    column: int,
    master: int,
    rows: int,
    columns: int,
    ld: int,
) -> None:
    """Take rate · x and decay · θ off columns θ of the master, whose rows are ``ld`` apart."""
    source, target = pointer(x, rate), pointer(master, rate)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            s, t = at(source, i * row), at(target, i * ld)
            for j in range(columns):
                t[j] -= rate * s[j * column] + decay * t[j]


@jit(**MAP)
def _product(
    rows: int,
    side: int,
    k: int,
    x: Any,
    row: int,
    column: int,
    y: Any,
    out: Any,
    factor: Any,
    other: Any,
    of_other: Any,
) -> None:
    """Write factor · x y + of_other · other (rows, side), or x y if the last factor is 0.

    y is (k, side); the neighbours in x are ``row`` and ``column`` apart.
    """
    sixes = (rows + SIX - 1) // SIX
    for task in prange(TASKS):
        i, end = sixes * task // TASKS * SIX, min(sixes * (task + 1) // TASKS * SIX, rows)
        made, more = at(out, i * side), at(other, i * side)
        tile_gemm(end - i, side, k, at(x, i * row), row, column, y, side, made, side, False)
        if of_other != 0:
            for j in range((end - i) * side):
                made[j] = factor * made[j] + of_other * more[j]


@jit(**SERIAL)
def _newton_schulz(
    a: Any, b: Any, c: Any, x: int, other: int, gram: int, p: int, long: int, side: int, steps: int
) -> None:
    """Take steps from X (long, side) to ``other``, and from there to X, by turns."""
    g, q, zero, one = pointer(gram, a), pointer(p, a), a - a, a / a
    for turn in range(steps):
        now, then = pointer(x, a), pointer(other, a)
        if turn % 2:
            now, then = then, now
        _product(side, side, long, now, 1, side, now, g, one, g, zero)
        _product(side, side, side, g, side, 1, g, q, c, g, b)
        _product(long, side, side, now, side, 1, q, then, one, now, a)


def scale_to_one(x: Array) -> None:
    """Divide a contiguous x by its Frobenius norm, in place."""
    norm = math.sqrt(float(np.sum(square_sums(x.reshape(-1)))))
    scale_into(x, 1 / max(norm, TINY), x)


def orthogonalise(x: Array) -> Array:
    """Return a contiguous x (s, r), s >= r, with its singular values near 1; x is used up."""
    scale_to_one(x)
    long, side = x.shape
    gram, p, following = several(x.dtype, (side, side), (side, side), x.shape)
    if x.nbytes <= NEAR:
        number = x.dtype.type
        _newton_schulz(
            *(number(A), number(B), number(C), address(x), address(following), address(gram)),
            *(address(p), long, side, ITERATIONS),
        )
        return following if ITERATIONS % 2 else x
    for _ in range(ITERATIONS):
        gemm(x, x, gram, ta=True)
        scale_into(gram, B / C, p)
        gemm(gram, gram, p, accumulate=True)
        scale_into(p, C, p)
        scale_into(x, A, following)
        gemm(x, p, following, accumulate=True)
        x, following = following, x
    return x


def muon(master: Array, m: Array, grad: Array, **options: Any) -> None:
    """Take one step of Muon on a matrix (I, O), in place; see ``reference/muon.py``."""
    take_step(orthogonalise, master, m, grad, **options)


def take_step(
    orthogonalise: Callable[[Array], Array],
    master: Array,
    m: Array,
    grad: Array,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    parts: tuple[int, ...],
    grad_scale: float,
) -> None:
    """Take the step by a function that orthogonalises a contiguous tall matrix, and uses it up."""
    given = (master, m)
    theta, sums = states = [contiguous(array) for array in given]
    grad = contiguous(grad)
    number, (rows, columns) = master.dtype.type, master.shape
    with step():
        ahead = empty(master.shape, master.dtype)
        _nesterov(
            *(number(grad_scale), number(momentum), address(grad), address(sums), address(ahead)),
            master.size,
        )
        first = 0
        for width in parts:
            long, side = max(rows, width), min(rows, width)
            x, size = empty((long, side), master.dtype), master.itemsize * first
            tall = rows >= width
            row, column = (columns, 1) if tall else (1, columns)
            _take(number(0), address(ahead) + size, long, side, row, column, address(x))
            x = orthogonalise(x)
            row, column = (side, 1) if tall else (1, side)
            _descend(
                *(number(lr * RMS * math.sqrt(long)), number(lr * weight_decay)),
                *(address(x), row, column, address(theta) + size, rows, width, columns),
            )
            first += width
    for array, state in zip(given, states, strict=True):
        if state is not array:
            np.copyto(array, state)
