"""AdamW, the gradient's norm and accumulation on flat float32 buffers. Kernels: ``optimizer.cu``.

AdamW reads 16 bytes a parameter and writes 12, and 2 for the bf16 copy of a weight, where there is
one (``weights.py``). For MyLLM-1B that is 31.7 GB, 7.9 ms at 4.0 TB/s. The norm reads 4 bytes a
parameter, accumulation moves 12.
"""

import math

import numpy as np

from accel.cuda.arrays import contiguous, copy, fours
from accel.cuda.device import THREADS, ceil_div, current, empty, launch
from accel.cuda.weights import copy_of, written
from reference.global_norm import SUM_BLOCK
from reference.types import Array


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
    """Take one step of AdamW: master, m and v (n,) are updated in place."""
    flat = [contiguous(array) for array in (master, m, v, grad)]
    bf16 = copy_of(master) if flat[0] is master and master.size else None
    launch(
        "optimizer",
        "adamw",
        fours(master),
        **dict(zip(("master", "m", "v", "grad"), flat, strict=True)),
        **{"n": master.size, "n_decayed": n_decayed, "eps": eps, "weight_decay": weight_decay},
        **{"lr": lr, "beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2},
        **{"correct1": 1 / (1 - beta1**step), "correct2": 1 / (1 - beta2**step)},
        **{"grad_scale": grad_scale, "copy": bf16, "n_copied": 0 if bf16 is None else bf16.size},
    )
    for array, updated in zip((master, m, v), flat, strict=False):
        if updated is not array:
            copy(array, updated)
            written(array)


def accumulate(dst: Array, src: Array) -> None:
    """Add ``src`` onto ``dst`` in place."""
    total = contiguous(dst)
    launch("optimizer", "accumulate", fours(dst), dst=total, src=contiguous(src), n=dst.size)
    if total is not dst:
        copy(dst, total)
    written(dst)


def square_sums(x: Array) -> Array:
    """Return Σx² of each block of 65,536 elements of x (n,), in float64."""
    x = contiguous(x)
    sums = empty((ceil_div(x.size, SUM_BLOCK),), np.float64)
    given = {"x": x, "sums": sums, "n": x.size, "each": SUM_BLOCK}
    launch("optimizer", "square_sums", sums.size, THREADS, 8 * THREADS, **given)
    return sums


def global_norm(x: Array) -> float:
    """Return √Σx² of a flat x."""
    return math.sqrt(float(np.sum(current().download(square_sums(x)))))
