"""Dropout: while training, zero each element with probability p and scale the rest by 1/(1 - p).

Srivastava et al. 2014, in the inverted form that leaves inference untouched: the expectation of the
output is the input. y = x ∘ k / (1 - p) with k ∈ {0, 1} drawn by ``philox.keep_mask``, so
dx = dy ∘ k / (1 - p), with the same k.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reference.checks import check_float, check_rows, check_shape
from reference.philox import keep_mask
from reference.types import Array, DropoutKey


class DropoutCache(NamedTuple):
    keep: npt.NDArray[np.bool_] | None  # of x's shape; None when p is 0
    p: float


def check_dropout(p: float, key: DropoutKey | None) -> None:
    """Raise unless p is a probability below 1 with, if positive, a key to draw by."""
    if np.ndim(p) != 0 or not 0 <= p < 1:
        raise ValueError(f"dropout: p must lie in [0, 1), got {p}")
    if p > 0 and key is None:
        raise ValueError(f"dropout: p = {p} needs a key (seed, step, sample, site) to draw bits by")


def dropout_forward(
    x: Array, *, p: float, key: DropoutKey | None = None
) -> tuple[Array, DropoutCache]:
    """Return x with elements dropped, shape (B, ...); p = 0 is the identity.

    Raises
    ------
    ValueError
        When p is not in [0, 1) or a positive p comes without a key.
    """
    check_float("dropout", x=x)
    check_rows("dropout", x)
    check_dropout(p, key)
    if p == 0 or key is None:
        return x, DropoutCache(None, 0.0)
    keep = keep_mask(x.shape, p, key)
    return np.where(keep, x / (1 - float(p)), 0), DropoutCache(keep, float(p))


def dropout_backward(dout: Array, cache: DropoutCache) -> Array:
    """Return dx."""
    if cache.keep is None:
        return dout
    check_shape("dropout_backward", "dout", dout, cache.keep.shape, "the output")
    check_float("dropout_backward", dout=dout)
    return np.where(cache.keep, dout / (1 - cache.p), 0)
