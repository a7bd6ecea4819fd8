"""The norm of the whole gradient, and clipping by it."""

import math

import numpy as np

from reference.types import Array

# Elements of one block in square_sums: fixed, so that the order of summation depends on nothing
# else. Optimizer shards are whole blocks.
SUM_BLOCK = 65_536


def square_sums(x: Array) -> Array:
    """Return Σx² of each block of 65,536 elements of x (n,), in float64.

    The blocks are fixed, so ranks that each hold a slice of whole blocks, and any number of
    threads, add up the same numbers in the same order.
    """
    squares = x.astype(np.float64) ** 2
    return np.array([np.sum(squares[i : i + SUM_BLOCK]) for i in range(0, len(x), SUM_BLOCK)])


def global_norm(x: Array) -> float:
    """Return √Σx² of a flat x: the norm that clipping looks at."""
    return math.sqrt(float(np.sum(square_sums(x))))


def clip_scale(norm: float, max_norm: float) -> float:
    """Return what to multiply a gradient of this norm by so that it has at most ``max_norm``.

    Pascanu, Mikolov & Bengio 2013, algorithm 1. PyTorch divides by norm + 1e-6; we do not.

    Raises
    ------
    ValueError
        When max_norm is not positive or the norm is not finite: such a step must not be taken.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_scale: max_norm must be positive, got {max_norm}")
    if not math.isfinite(norm):
        raise ValueError(f"clip_scale: the gradient norm is {norm}; skip this step")
    return min(1.0, max_norm / norm) if norm > 0 else 1.0
