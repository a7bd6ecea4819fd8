"""Softmax: from scores to probabilities.

p_i = exp(z_i) / Σ_j exp(z_j). Adding a constant to every z changes nothing, so the maximum is
subtracted first: exp never overflows.

Backward. ∂p_i/∂z_j = p_i (δ_ij - p_j), so dz_j = p_j (dp_j - Σ_i dp_i p_i): whatever pushes all
probabilities up together cancels, because they sum to one.
"""

import numpy as np

from reference.checks import check_float, check_rows
from reference.types import Array


def softmax(x: Array) -> Array:
    """Return the softmax of x (..., n) over its last axis."""
    check_float("softmax", x=x)
    check_rows("softmax", x)
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return np.asarray(e / np.sum(e, axis=-1, keepdims=True))


def softmax_backward(dp: Array, p: Array) -> Array:
    """Return the gradient with respect to the scores, given the probabilities p (..., n)."""
    return np.asarray(p * (dp - np.sum(dp * p, axis=-1, keepdims=True)))
