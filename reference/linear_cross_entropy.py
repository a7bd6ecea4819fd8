"""Head and loss together, so that the logits of a batch never exist at once.

The logits of all B·T tokens would be the largest array of a training step (2 GiB for 8,192 tokens
and 65,536 entries in float32, as much again for the probabilities), so rows are taken in chunks and
neither logits nor probabilities outlive theirs. With the head E (V, D), z = x Eᵀ + b and
dz = softmax(z) - onehot(y) from ``cross_entropy.py``, times the scalar that multiplies the loss;
the rest is the linear layer's backward::

    dx = dz E          dE = dzᵀ x          db = Σ_rows dz
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reference.cross_entropy import dlogits, nll
from reference.logits import logits
from reference.types import Array, Loss

CHUNK_ROWS = 256


class LinearCrossEntropyCache(NamedTuple):
    x: Array  # (N, D)
    E: Array  # (V, D)
    y: Array  # (N,) targets
    mask: Array  # (N,) bool
    b: Array | None  # (V,)
    x_shape: tuple[int, ...]


def forward(
    x: Array, E: Array, y: Array, mask: Array | None = None, b: Array | None = None
) -> tuple[Loss, LinearCrossEntropyCache]:
    """Return the summed loss of the logits x Eᵀ + b, and the number of valid targets.

    Parameters
    ----------
    x : (..., D)
    E : (V, D)
    y : (...) int32, in 0 .. V - 1 where valid
    mask : (...) bool, optional
        Which targets count; all, when None. It is indexed like the targets.
    b : (V,), optional
    """
    mask = np.ones(y.shape, np.bool_) if mask is None else mask
    cache = LinearCrossEntropyCache(
        x.reshape(y.size, x.shape[-1]), E, y.reshape(-1), mask.reshape(-1), b, x.shape
    )
    total = 0.0
    for rows in _chunks(len(cache.x)):
        z = logits(cache.x[rows], E, b)
        losses = nll(z, np.where(cache.mask[rows], cache.y[rows], 0))
        total += float(np.sum(losses, where=cache.mask[rows], dtype=np.float64))
    return Loss(total, int(np.sum(mask))), cache


def backward(dloss: float, cache: LinearCrossEntropyCache) -> tuple[Array, Array, Array | None]:
    """Return (dx, dE, db) of dloss · total; db is None when there was no bias."""
    x, E, y, mask, b, x_shape = cache
    dx = np.empty_like(x)
    dE = np.zeros_like(E)
    db = None if b is None else np.zeros_like(b)
    for rows in _chunks(len(x)):
        z = logits(x[rows], E, b)
        dz = dlogits(z, y[rows], mask[rows]) * float(dloss)
        dx[rows] = dz @ E
        dE += dz.T @ x[rows]
        if db is not None:
            db += np.sum(dz, axis=0)
    return dx.reshape(x_shape), dE, db


def _chunks(n_rows: int) -> Iterator[slice]:
    return (slice(i, i + CHUNK_ROWS) for i in range(0, n_rows, CHUNK_ROWS))
