"""Multiplication by a constant: y = c x, so dx = c dy."""

from typing import NamedTuple

import numpy as np

from reference.checks import (
    check_float,
    check_number,
    check_receiver,
    check_shape,
    check_writable,
)
from reference.types import Array


class ScaleCache(NamedTuple):
    factor: float
    shape: tuple[int, ...]


def scale_forward(x: Array, *, factor: float, out: Array | None = None) -> tuple[Array, ScaleCache]:
    """Return factor · x, of x's shape and dtype; written into ``out``, which may be x, when given.

    Raises
    ------
    ValueError
        When ``out`` has another shape or dtype, or is not contiguous.
    """
    check_float("scale", x=x)
    check_number("scale", "factor", factor)
    # float(): a NumPy float64 scalar would promote a float32 array, a Python float does not
    check_receiver("scale", out, x)
    if out is not None:
        check_writable("scale", out=out)
    return np.multiply(x, float(factor), out=out), ScaleCache(float(factor), x.shape)


def scale_backward(dout: Array, cache: ScaleCache) -> Array:
    """Return dx."""
    check_shape("scale_backward", "dout", dout, cache.shape, "the output")
    check_float("scale_backward", dout=dout)
    return dout * cache.factor
