"""ReLU: y = max(x, 0), so dx = dy where x > 0, and 0 at the kink (Nair & Hinton 2010)."""

from typing import NamedTuple

import numpy as np

from reference.checks import check_dout, check_float
from reference.types import Array


class ReLUCache(NamedTuple):
    x: Array  # (...)


def relu_forward(x: Array) -> tuple[Array, ReLUCache]:
    """Return max(x, 0), of x's shape."""
    check_float("relu", x=x)
    return np.maximum(x, 0), ReLUCache(x)


def relu_backward(dout: Array, cache: ReLUCache) -> Array:
    """Return dx."""
    check_dout("relu", dout, cache.x.shape, cache.x)
    return np.where(cache.x > 0, dout, 0)
