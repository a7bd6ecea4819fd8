"""Embedding: a row of a table for each token id.

For the n-th token y[n] = table[id_n]. As a matrix product y = onehot(ids) · table, with a row of
zeros and a one at the id for each token, so dtable = onehot(ids)ᵀ dy: the gradient of a row is the
sum of dy over every position that looked it up. Rows nobody looked up get zero.
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array


class EmbeddingCache(NamedTuple):
    ids: Array  # (...) integer
    table_shape: tuple[int, ...]  # (V, D)


def forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids], shape (..., D)."""
    return table[ids], EmbeddingCache(ids, table.shape)


def backward(dy: Array, cache: EmbeddingCache) -> Array:
    """Return dtable (V, D)."""
    dtable = np.zeros(cache.table_shape, dy.dtype)
    rows = dy.reshape(cache.ids.size, cache.table_shape[1])
    # add.at, unlike dtable[ids] += dy, counts an id that occurs twice twice
    np.add.at(dtable, cache.ids.reshape(-1), rows)
    return dtable
