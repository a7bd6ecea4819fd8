"""Softmax: from scores to probabilities.

p_i = e^z_i / Σ_j e^z_j. Adding a constant to every z multiplies numerator and denominator by the
same factor and changes nothing, so the maximum is subtracted first: exp never overflows.

Backward. By the quotient rule, with Z = Σ_j e^z_j, ∂Z/∂z_j = e^z_j and δ_ij = 1 where i = j::

    ∂p_i/∂z_j = (δ_ij e^z_i Z - e^z_i e^z_j) / Z² = p_i (δ_ij - p_j)
    dz_j = Σ_i dp_i p_i (δ_ij - p_j) = p_j (dp_j - Σ_i dp_i p_i)

Whatever pushes all probabilities up together cancels, because they sum to one.
"""

import numpy as np

from reference.types import Array


def softmax(z: Array) -> Array:
    """Return p, the softmax of z (..., n) over its last axis."""
    e = np.exp(z - np.max(z, axis=-1, keepdims=True))
    return np.asarray(e / np.sum(e, axis=-1, keepdims=True))


def softmax_backward(dp: Array, p: Array) -> Array:
    """Return dz, given the probabilities p (..., n)."""
    return np.asarray(p * (dp - np.sum(dp * p, axis=-1, keepdims=True)))
