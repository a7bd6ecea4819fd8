"""The loss of a language model: minus the log-probability of each next token, summed.

For logits z and target y: ℓ = -log softmax(z)_y = log Σ_j exp(z_j) - z_y, computed as lse(z) - z_y
with the maximum taken out of the log-sum-exp. Its gradient is the whole reason why softmax and
cross-entropy belong together::

    ∂ℓ/∂z_j = exp(z_j)/Σ exp(z) - [j = y] = p_j - onehot(y)_j

Its Hessian, diag(p) - ppᵀ, is positive semidefinite: the loss is convex in the logits.

The loss is a sum, not a mean: micro-batches and ranks hold different numbers of valid targets, and
only a division by the global number, once, gives every token the same weight.

This op takes logits and is for study; the models use ``linear_cross_entropy.py``.
"""

import math
from typing import NamedTuple

import numpy as np

from reference.checks import check_float, check_ids, check_mask, check_shape
from reference.softmax import softmax
from reference.types import Array, Loss


class CrossEntropyCache(NamedTuple):
    logits: Array  # (..., V)
    targets: Array  # (...)
    mask: Array  # (...) bool


def cross_entropy_forward(
    logits: Array, targets: Array, mask: Array | None = None
) -> tuple[Loss, CrossEntropyCache]:
    """Return the summed loss of logits (..., V) and targets (...), where ``mask`` is True."""
    check_float("cross_entropy", logits=logits)
    mask = check_targets("cross_entropy", targets, mask, logits.shape[:-1], logits.shape[-1])
    losses = nll(logits, np.where(mask, targets, 0))
    total = float(np.sum(losses, where=mask, dtype=np.float64))
    return Loss(total, int(np.sum(mask))), CrossEntropyCache(logits, targets, mask)


def cross_entropy_backward(dloss: float, cache: CrossEntropyCache) -> Array:
    """Return dlogits (..., V) of dloss · total."""
    logits, targets, mask = cache
    return dlogits(logits, targets, mask) * float(dloss)


def perplexity(loss: Loss) -> float:
    """Return exp(mean negative log-likelihood): the size of an equally likely choice.

    Raises
    ------
    ValueError
        When there are no valid targets.
    """
    if loss.n_valid < 1:
        raise ValueError("perplexity: there are no valid targets to take the mean over")
    mean = loss.total / loss.n_valid
    return math.exp(mean) if mean < 709 else math.inf  # exp(709.8) is beyond float64


def nll(logits: Array, targets: Array) -> Array:
    """Return lse(z) - z_y for each row of logits (..., V), shape (...)."""
    top = np.max(logits, axis=-1, keepdims=True)
    lse = top[..., 0] + np.log(np.sum(np.exp(logits - top), axis=-1))
    return np.asarray(lse - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])


def dlogits(logits: Array, targets: Array, mask: Array) -> Array:
    """Return (softmax(z) - onehot(y)), zero where masked, shape (..., V)."""
    p = softmax(logits)
    at_target = np.where(mask, targets, 0)[..., None]
    np.put_along_axis(p, at_target, np.take_along_axis(p, at_target, axis=-1) - 1, axis=-1)
    return np.where(mask[..., None], p, 0)


def check_targets(
    op: str, targets: Array, mask: Array | None, shape: tuple[int, ...], vocab_size: int
) -> Array:
    """Check targets and mask, and return the mask, all True when None was given."""
    check_shape(op, "targets", targets, shape, "the rows it scores")
    if mask is None:
        mask = np.ones(shape, dtype=np.bool_)
    check_mask(op, "mask", mask, shape, "targets")
    check_ids(op, "targets", np.where(mask, targets, 0), vocab_size)
    return mask
