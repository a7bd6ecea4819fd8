"""Muon: five steps of Newton-Schulz by ``gemm.gemm``, between passes over memory.

The mathematics is in ``reference/muon.py``. Of a matrix (I, O) with r the smaller and s the larger
side, a step takes 4 r² s + 2 r³ floating-point operations, in products whose bits depend on the
shapes alone. What stands around them reads each number a few times and is a few per cent.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from accel.cpu.elementwise import scale_into
from accel.cpu.gemm import gemm
from accel.cpu.kernels import MAP, PIECE, ROW_PIECE, address, contiguous
from accel.cpu.memory import empty, step
from accel.cpu.optimizer import square_sums
from accel.cpu.simd import at, pointer
from accel.jit import jit
from reference.muon import ITERATIONS, RMS, TINY, A, B, C

Array = npt.NDArray[Any]


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
def _take_columns(like: Any, x: int, rows: int, width: int, ld: int, out: int) -> None:
    """Write columns of x, whose rows are ``ld`` apart, one row behind the other."""
    source, target = pointer(x, like), pointer(out, like)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            s, t = at(source, i * ld), at(target, i * width)
            for j in range(width):
                t[j] = s[j]


@jit(**MAP)
def _descend(rate: Any, decay: Any, x: int, rows: int, width: int, ld: int, master: int) -> None:
    """Take rate · x and decay · θ off columns θ of the master."""
    source, target = pointer(x, rate), pointer(master, rate)
    for piece in prange((rows + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(rows, (piece + 1) * ROW_PIECE)):
            s, t = at(source, i * width), at(target, i * ld)
            for j in range(width):
                t[j] -= rate * s[j] + decay * t[j]


def orthogonalise(x: Array) -> Array:
    """Return a contiguous x (I, O) with its singular values near 1; x is used up."""
    norm = math.sqrt(float(np.sum(square_sums(x.reshape(-1)))))
    scale_into(x, 1 / max(norm, TINY), x)
    wide = x.shape[0] <= x.shape[1]
    side = min(x.shape)
    gram, p, following = (empty(shape, x.dtype) for shape in ((side, side), (side, side), x.shape))
    for _ in range(ITERATIONS):
        gemm(x, x, gram, ta=not wide, tb=wide)
        scale_into(gram, B / C, p)
        gemm(gram, gram, p, accumulate=True)
        scale_into(p, C, p)
        scale_into(x, A, following)
        gemm(*((p, x) if wide else (x, p)), following, accumulate=True)
        x, following = following, x
    return x


def muon(
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
    """Take one step of Muon on a matrix (I, O), in place; see ``reference/muon.py``."""
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
            x = empty((rows, width), master.dtype)
            size = master.itemsize * first
            _take_columns(number(0), address(ahead) + size, rows, width, columns, address(x))
            x = orthogonalise(x)
            _descend(
                *(number(lr * RMS * math.sqrt(max(rows, width))), number(lr * weight_decay)),
                *(address(x), rows, width, columns, address(theta) + size),
            )
            first += width
    for array, state in zip(given, states, strict=True):
        if state is not array:
            np.copyto(array, state)
