"""AdamW, the gradient's norm and accumulation: flat arrays, read and written once.

AdamW reads four arrays and writes three, 28 bytes an element in float32, and nothing but memory
bounds it. The mathematics is in ``reference/adamw.py`` and ``global_norm.py``.
"""

import math
from typing import Any

import numpy as np
from numba import prange

from accel.cpu.kernels import MAP, PIECE, SUM, address, contiguous, like
from accel.cpu.simd import at, pointer
from accel.jit import jit
from reference.global_norm import SUM_BLOCK
from reference.types import Array


@jit(**MAP)
def _adamw(
    scale: Any,
    beta1: Any,
    rest1: Any,
    beta2: Any,
    rest2: Any,
    rate: Any,
    root: Any,
    eps: Any,
    decay: Any,
    master: int,
    m: int,
    v: int,
    grad: int,
    first: int,
    last: int,
) -> None:
    """Update elements first .. last - 1, all of which decay alike."""
    theta, mean, var, g = (
        pointer(master, eps),
        pointer(m, eps),
        pointer(v, eps),
        pointer(grad, eps),
    )
    for piece in prange((last - first + PIECE - 1) // PIECE):
        low = first + piece * PIECE
        p, a, b, d = at(theta, low), at(mean, low), at(var, low), at(g, low)
        for i in range(min(PIECE, last - low)):
            x = d[i] * scale
            a[i] = beta1 * a[i] + rest1 * x
            b[i] = beta2 * b[i] + rest2 * x * x
            p[i] -= rate * a[i] / (np.sqrt(b[i]) * root + eps) + decay * p[i]


def adamw(
    master: Array,
    m: Array,
    v: Array,
    grad: Array,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    n_decayed: int,
    grad_scale: float,
) -> None:
    """Take one step of AdamW on flat arrays (n,), in place; see ``reference/adamw.py``."""
    grad = contiguous(grad)
    given = (master, m, v)
    states = [contiguous(array) for array in given]
    number = master.dtype.type
    scale, b1, rest1, b2, rest2, rate, root, small = (
        number(constant)
        for constant in (
            *(grad_scale, beta1, 1 - beta1, beta2, 1 - beta2),
            *(lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), eps),
        )
    )
    for first, last, decay in ((0, n_decayed, lr * weight_decay), (n_decayed, len(master), 0.0)):
        if last > first:
            _adamw(
                *(scale, b1, rest1, b2, rest2, rate, root, small, number(decay)),
                *(*(address(state) for state in states), address(grad), first, last),
            )
    for array, state in zip(given, states, strict=True):
        if state is not array:
            np.copyto(array, state)


@jit(**SUM)
def _square_sums(like: Any, x: int, sums: int, n: int, block: int) -> None:
    a, out = pointer(x, like), pointer(sums, np.float64(0))
    for i in prange((n + block - 1) // block):
        s = 0.0
        for j in range(i * block, min(n, (i + 1) * block)):
            s += np.float64(a[j]) * np.float64(a[j])
        out[i] = s


def square_sums(x: Array) -> Array:
    """Return Σx² of each block of 65,536 elements of x (n,), in float64."""
    x = contiguous(x)
    sums = np.empty(-(-len(x) // SUM_BLOCK), np.float64)
    _square_sums(like(x), address(x), address(sums), len(x), SUM_BLOCK)
    return sums


def global_norm(x: Array) -> float:
    """Return √Σx² of a flat x."""
    return math.sqrt(float(np.sum(square_sums(x))))


@jit(**MAP)
def _accumulate(like: Any, dst: int, src: int, n: int) -> None:
    a, b = pointer(dst, like), pointer(src, like)
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            a[i] += b[i]


def accumulate(dst: Array, src: Array) -> None:
    """Add ``src`` onto ``dst`` in place; the shapes must be equal."""
    if np.may_share_memory(src, dst):
        src = src.copy()
    src, target = contiguous(src), contiguous(dst)
    _accumulate(like(dst), address(target), address(src), dst.size)
    if target is not dst:
        np.copyto(dst, target)
