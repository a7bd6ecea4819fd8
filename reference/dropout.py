"""Dropout: while training, zero each element with probability p and scale the rest by 1/(1 - p).

Srivastava et al. 2014, in the inverted form that leaves inference untouched: the expectation of the
output is the input. y = x ∘ k / (1 - p) with k ∈ {0, 1} drawn by ``philox.keep_mask``, so
dx = dy ∘ k / (1 - p), with the same k.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reference.philox import keep_mask
from reference.types import Array, Dropout


class DropoutCache(NamedTuple):
    k: npt.NDArray[np.bool_] | None  # of x's shape; None when nothing is dropped
    p: float


def forward(x: Array, dropout: Dropout | None) -> tuple[Array, DropoutCache]:
    """Return y (B, ...); None is the identity."""
    if dropout is None:
        return x, DropoutCache(None, 0.0)
    k = keep_mask(x.shape, *dropout)
    return np.where(k, x / (1 - dropout.p), 0), DropoutCache(k, dropout.p)


def backward(dy: Array, cache: DropoutCache) -> Array:
    """Return dx."""
    k, p = cache
    return dy if k is None else np.where(k, dy / (1 - p), 0)
