"""Muon: Newton-Schulz by cuBLAS, between passes over memory. Kernels: ``muon.cu``.

The mathematics is in ``reference/muon.py``. Of a matrix (I, O) with r the smaller and s the larger
side the products take 5 (4 r² s + 2 r³) floating-point operations in float32; each of the ten
passes between them moves 12 bytes an element, and the two before them 4 and 8. Nothing is read back
to the host.
"""

import math

from accel.cuda.arrays import contiguous, copy
from accel.cuda.device import F32, THREADS, ceil_div, empty, launch
from accel.cuda.linear import matmul
from accel.cuda.optimizer import square_sums
from accel.cuda.weights import written
from reference.muon import ITERATIONS, RMS, TINY, A, B, C
from reference.types import Array


def _each(array: Array) -> int:
    """Return the blocks that cover an array, a thread for each element."""
    return ceil_div(array.size, THREADS)


def orthogonalise(x: Array) -> Array:
    """Return a contiguous x (I, O) with its singular values near 1; x is used up."""
    sums = square_sums(x.reshape(-1))
    given = {"x": x, "sums": sums, "n": x.size, "n_sums": sums.size, "tiny": TINY}
    launch("muon", "normalise", _each(x), THREADS, 4, **given)
    wide, side = x.shape[0] <= x.shape[1], min(x.shape)
    gram, p, following = (empty(s, F32) for s in ((side, side), (side, side), x.shape))
    for _ in range(ITERATIONS):
        matmul(x, x, gram, transpose_a=not wide, transpose_b=wide)
        matmul(gram, gram, p)
        launch("muon", "combine", _each(p), y=p, x=gram, n=p.size, a=C, b=B)
        matmul(*((p, x) if wide else (x, p)), following)
        launch("muon", "combine", _each(x), y=following, x=x, n=x.size, a=1.0, b=A)
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
    """Take one step of Muon: master and m (I, O) are updated in place."""
    given = (master, m)
    theta, sums = states = [contiguous(array) for array in given]
    ahead = empty(master.shape, F32)
    numbers = {"n": master.size, "momentum": momentum, "grad_scale": grad_scale}
    launch("muon", "nesterov", _each(ahead), m=sums, grad=contiguous(grad), ahead=ahead, **numbers)
    (rows, columns), first = master.shape, 0
    for width in parts:
        x = empty((rows, width), F32)
        copy(x, ahead[:, first : first + width])
        x = orthogonalise(x)
        place = {"rows": rows, "width": width, "columns": columns, "first": first}
        rates = {"rate": lr * RMS * math.sqrt(max(rows, width)), "decay": lr * weight_decay}
        launch("muon", "descend", _each(x), master=theta, x=x, **place, **rates)
        first += width
    for array, state in zip(given, states, strict=True):
        if state is not array:
            copy(array, state)
    written(master)
