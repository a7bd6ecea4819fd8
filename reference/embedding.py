"""Embedding: a row of a table for each token id.

y[n] = table[id_n]. As a matrix product y = onehot(ids) · table, so dtable = onehot(ids)ᵀ dy: the
gradient of a row is the sum of dy over every position that looked it up. Rows nobody looked up
get zero.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import check_float, check_ids, check_shape, write_out
from reference.types import Array


class EmbeddingCache(NamedTuple):
    ids: Array  # (...) integer
    table_shape: tuple[int, int]  # (V, D)


def embedding_forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids], shape (..., D).

    Parameters
    ----------
    ids : (...) int32, each in 0 .. V - 1
    table : (V, D)

    Raises
    ------
    ValueError
        When an id lies outside the table; the first one is named.
    """
    check_float("embedding", table=table)
    if table.ndim != 2:
        raise ValueError(f"embedding: table must be (V, D), got shape {table.shape}")
    check_ids("embedding", "ids", ids, table.shape[0], "table")
    return table[ids], EmbeddingCache(ids, table.shape)


def embedding_backward(
    dout: Array, cache: EmbeddingCache, *, out: Array | None = None, accumulate: bool = False
) -> Array:
    """Return dtable (V, D).

    A tied table has two gradients, from the lookup and from the head, that add up: ``accumulate``
    adds this one onto ``out`` instead of overwriting it, and returns the sum.
    """
    if accumulate and out is None:
        raise ValueError("embedding: accumulate=True adds onto out, so out must be given")
    shape = (*cache.ids.shape, cache.table_shape[1])
    check_shape("embedding_backward", "dout", dout, shape, "the output")
    check_float("embedding_backward", dout=dout)
    dtable = np.zeros(cache.table_shape, dout.dtype)
    # add.at, unlike dtable[ids] += dout, counts an id that occurs twice twice
    np.add.at(dtable, cache.ids.reshape(-1), dout.reshape(-1, cache.table_shape[1]))
    if accumulate and out is not None:
        dtable += out
    write_out(out, dtable)
    return dtable
