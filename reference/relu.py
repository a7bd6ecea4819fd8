"""ReLU: y = max(x, 0), so dx = dy where x > 0, and 0 at the kink (Nair & Hinton 2010)."""

import numpy as np

from reference.types import Array


def forward(x: Array) -> tuple[Array, Array]:
    """Return y, of x's shape, and x."""
    return np.maximum(x, 0), x


def backward(dy: Array, x: Array) -> Array:
    """Return dx."""
    return np.where(x > 0, dy, 0)
