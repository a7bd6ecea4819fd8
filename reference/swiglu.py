"""SwiGLU: a gate decides how much of each coordinate passes.

Shazeer 2020, "GLU variants improve transformer", eq. 6: y = silu(g) ∘ u with silu(g) = g σ(g).
x = [g, u] holds the gate g, then the up u, which the gate lets pass. With σ(g) = 1/(1 + e^-g),
σ' = e^-g/(1 + e^-g)² = σ (1 - σ), so by the product rule silu'(g) = σ + g σ (1 - σ) and::

    dg = dy ∘ u ∘ σ ∘ (1 + g (1 - σ))          du = dy ∘ g ∘ σ
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array


class SwiGLUCache(NamedTuple):
    x: Array  # (..., 2F) gate, up


def forward(x: Array) -> tuple[Array, SwiGLUCache]:
    """Return silu(gate) · up, shape (..., F), of x (..., 2F) whose first half is the gate."""
    g, u = np.split(x, 2, axis=-1)
    return g * _sigmoid(g) * u, SwiGLUCache(x)


def backward(dy: Array, cache: SwiGLUCache) -> Array:
    """Return dx (..., 2F)."""
    g, u = np.split(cache.x, 2, axis=-1)
    sigma = _sigmoid(g)
    dg = dy * u * sigma * (1 + g * (1 - sigma))
    du = dy * g * sigma
    return np.concatenate([dg, du], axis=-1)


def _sigmoid(x: Array) -> Array:
    """Return 1/(1 + exp(-x)) with neither overflow nor cancellation: no exponent is positive."""
    return np.asarray(np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))))
