"""The linear layer: y = x W + b, rows of x in, rows of y out.

With n a row, i a coordinate in and o one out, y_no = Σ_i x_ni W_io + b_o. With dy the gradient of
the loss with respect to y::

    dx_ni = Σ_o dy_no ∂y_no/∂x_ni = Σ_o dy_no W_io      dx = dy Wᵀ
    dW_io = Σ_n dy_no x_ni                              dW = xᵀ dy
    db_o  = Σ_n dy_no                                   db = Σ_n dy_n
"""

import math
from typing import NamedTuple

import numpy as np

from reference.types import Array


class LinearCache(NamedTuple):
    x: Array  # (..., I)
    W: Array  # (I, O)
    b: Array | None  # (O,)


def forward(x: Array, W: Array, b: Array | None = None) -> tuple[Array, LinearCache]:
    """Return y (..., O)."""
    y = x @ W
    if b is not None:
        y = y + b
    return y, LinearCache(x, W, b)


def backward(dy: Array, cache: LinearCache) -> tuple[Array, Array, Array | None]:
    """Return (dx, dW, db); db is None when the forward had no bias."""
    x, W, b = cache
    n = math.prod(dy.shape[:-1])
    rows = dy.reshape(n, W.shape[1])
    dx = dy @ W.T
    dW = x.reshape(n, W.shape[0]).T @ rows
    db = None if b is None else np.sum(rows, axis=0)
    return dx, dW, db
