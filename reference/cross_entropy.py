"""The loss of a language model: minus the log-probability of each next token, summed.

For logits z and target y: ℓ = -log softmax(z)_y = log Σ_j exp(z_j) - z_y = lse(z) - z_y. (lse: the
log of a sum of exponentials.) With m the maximum of z, lse(z) = m + log Σ_j exp(z_j - m), which
does not overflow. The gradient is the whole reason why softmax and cross-entropy belong together::

    ∂ℓ/∂z_j = exp(z_j)/Σ exp(z) - [j = y] = p_j - onehot(y)_j

Its Hessian is softmax's Jacobian, diag(p) - ppᵀ (``softmax.py``). For any a, aᵀ(diag(p) - ppᵀ)a is
the variance of a under p and so not negative: the loss is convex in the logits.

The loss is a sum, not a mean: micro-batches and ranks hold different numbers of valid targets, and
only a division by the global number, once, gives every token the same weight.

This op takes logits and is for study; the models use ``linear_cross_entropy.py``.
"""

from typing import NamedTuple

import numpy as np

from reference.softmax import softmax
from reference.types import Array, Loss


class CrossEntropyCache(NamedTuple):
    z: Array  # (..., V) logits
    targets: Array  # (...)
    mask: Array  # (...) bool


def forward(z: Array, targets: Array, mask: Array | None = None) -> tuple[Loss, CrossEntropyCache]:
    """Return the summed loss of logits z (..., V) and targets (...), where ``mask`` is True."""
    valid = np.ones(targets.shape, np.bool_) if mask is None else mask
    losses = nll(z, np.where(valid, targets, 0))
    total = float(np.sum(losses, where=valid, dtype=np.float64))
    return Loss(total, int(np.sum(valid))), CrossEntropyCache(z, targets, valid)


def backward(dloss: float, cache: CrossEntropyCache) -> Array:
    """Return dz (..., V) of dloss · total."""
    return dlogits(*cache) * float(dloss)


def nll(z: Array, targets: Array) -> Array:
    """Return lse(z) - z_y for each row of logits z (..., V), shape (...)."""
    m = np.max(z, axis=-1, keepdims=True)
    lse = m[..., 0] + np.log(np.sum(np.exp(z - m), axis=-1))
    return np.asarray(lse - np.take_along_axis(z, targets[..., None], axis=-1)[..., 0])


def dlogits(z: Array, targets: Array, mask: Array) -> Array:
    """Return (softmax(z) - onehot(y)), zero where masked, shape (..., V)."""
    p = softmax(z)
    at_target = np.where(mask, targets, 0)[..., None]
    np.put_along_axis(p, at_target, np.take_along_axis(p, at_target, axis=-1) - 1, axis=-1)
    return np.where(mask[..., None], p, 0)
