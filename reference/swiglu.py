"""SwiGLU: a gate decides how much of each coordinate passes.

Shazeer 2020, "GLU variants improve transformer", eq. 6: y = silu(g) ∘ u with silu(g) = g σ(g) and
x = [g, u], the gate first. σ' = σ (1 - σ), so silu'(g) = σ(g) (1 + g (1 - σ(g))) and::

    dg = dy ∘ u ∘ silu'(g)          du = dy ∘ silu(g)
"""

from typing import NamedTuple

import numpy as np

from reference.checks import check_dout, check_float, check_rows
from reference.types import Array


class SwiGLUCache(NamedTuple):
    x: Array  # (..., 2F) gate, up


def swiglu_forward(x: Array) -> tuple[Array, SwiGLUCache]:
    """Return silu(gate) · up, shape (..., F), of x (..., 2F) whose first half is the gate.

    Raises
    ------
    ValueError
        When the last axis is odd.
    """
    check_float("swiglu", x=x)
    check_rows("swiglu", x)
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu: the last axis holds gate and up, so must be even, got {x.shape}")
    gate, up = np.split(x, 2, axis=-1)
    return gate * _sigmoid(gate) * up, SwiGLUCache(x)


def swiglu_backward(dout: Array, cache: SwiGLUCache) -> Array:
    """Return dx (..., 2F)."""
    gate, up = np.split(cache.x, 2, axis=-1)
    check_dout("swiglu", dout, gate.shape, gate)
    sigma = _sigmoid(gate)
    dgate = dout * up * sigma * (1 + gate * (1 - sigma))
    dup = dout * gate * sigma
    return np.concatenate([dgate, dup], axis=-1)


def _sigmoid(x: Array) -> Array:
    """Return 1/(1 + exp(-x)) with neither overflow nor cancellation: no exponent is positive."""
    return np.asarray(np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))))
