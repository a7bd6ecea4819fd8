"""Head and loss together, so that the logits of a batch never exist at once.

The logits of all B·T tokens would be the largest array of a training step (2 GiB for 8,192 tokens
and 65,536 entries in float32, as much again for the probabilities), so rows are taken in chunks and
neither logits nor probabilities outlive theirs. With the head E (V, D), z = x Eᵀ + b and
dz = softmax(z) - onehot(y) from ``cross_entropy.py``, times the scalar that multiplies the loss::

    dx = dz E          dE = dzᵀ x          db = Σ_rows dz
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reference.checks import check_float, check_scalar, write_out
from reference.cross_entropy import check_targets, dlogits, nll
from reference.linear import check_head, logits
from reference.types import Array, Loss

CHUNK_ROWS = 256


class LinearCrossEntropyCache(NamedTuple):
    x: Array  # (N, D)
    head: Array  # (V, D)
    targets: Array  # (N,)
    mask: Array  # (N,) bool
    bias: Array | None  # (V,)
    x_shape: tuple[int, ...]


def linear_cross_entropy_forward(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    need_backward: bool = True,
) -> tuple[Loss, LinearCrossEntropyCache]:
    """Return the summed loss of the logits x headᵀ + bias, and the number of valid targets.

    Parameters
    ----------
    x : (..., D)
    head : (V, D)
    targets : (...) int32, in 0 .. V - 1 where valid
    mask : (...) bool, optional
        Which targets count; all, when None. It is indexed like the targets.
    bias : (V,), optional
    need_backward : bool
        False promises that no backward follows. It saves nothing here; a fast backend that makes
        gradients while it has the logits at hand then leaves them out.

    Raises
    ------
    ValueError
        When shapes or dtypes do not fit or a valid target lies outside the vocabulary.
    """
    del need_backward
    check_float("linear_cross_entropy", x=x, head=head, bias=bias)
    check_head("linear_cross_entropy", x, head, bias)
    mask = check_targets("linear_cross_entropy", targets, mask, x.shape[:-1], head.shape[0])
    cache = LinearCrossEntropyCache(
        x.reshape(-1, x.shape[-1]), head, targets.reshape(-1), mask.reshape(-1), bias, x.shape
    )
    total = 0.0
    for rows in _chunks(len(cache.x)):
        z = logits(cache.x[rows], head, bias)
        losses = nll(z, np.where(cache.mask[rows], cache.targets[rows], 0))
        total += float(np.sum(losses, where=cache.mask[rows], dtype=np.float64))
    return Loss(total, int(np.sum(mask))), cache


def linear_cross_entropy_backward(
    dloss: float,
    cache: LinearCrossEntropyCache,
    *,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dhead, dbias) of dloss · total; dbias is None when there was no bias."""
    check_scalar("linear_cross_entropy_backward", "dloss", dloss)
    x, head, targets, mask, bias, x_shape = cache
    dx = np.empty_like(x)
    dhead = np.zeros_like(head)
    dbias = None if bias is None else np.zeros_like(bias)
    for rows in _chunks(len(x)):
        z = logits(x[rows], head, bias)
        dz = dlogits(z, targets[rows], mask[rows]) * float(dloss)
        dx[rows] = dz @ head
        dhead += dz.T @ x[rows]
        if dbias is not None:
            dbias += np.sum(dz, axis=0)
    if out is not None:
        write_out(out[0], dhead)
        if dbias is not None:
            write_out(out[1], dbias)
    return dx.reshape(x_shape), dhead, dbias


def _chunks(n_rows: int) -> Iterator[slice]:
    return (slice(i, i + CHUNK_ROWS) for i in range(0, n_rows, CHUNK_ROWS))
