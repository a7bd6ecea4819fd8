"""Multiplication by a constant: y = c x, so dx = c dy."""

from typing import NamedTuple

from reference.checks import check_float
from reference.types import Array


class ScaleCache(NamedTuple):
    factor: float


def scale_forward(x: Array, *, factor: float) -> tuple[Array, ScaleCache]:
    """Return factor · x, of x's shape and dtype."""
    check_float("scale", x=x)
    # float(): a NumPy float64 scalar would promote a float32 array, a Python float does not
    return x * float(factor), ScaleCache(float(factor))


def scale_backward(dout: Array, cache: ScaleCache) -> Array:
    """Return dx."""
    return dout * cache.factor
