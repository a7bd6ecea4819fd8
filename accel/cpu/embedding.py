"""The embedding: a row of the table for each id; the mathematics is in ``reference/embedding.py``.

Backward, several positions may add to one row of the table. Instead of atomics or a copy of the
table per thread, tasks own columns: each reads all ids in order and adds its own columns, so that
the order of every sum is the order of the ids.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange

from accel.cpu.kernels import MAP, ROW_PIECE, address, contiguous, delivered, like, receiver
from accel.cpu.memory import empty
from accel.cpu.simd import at, pointer
from accel.jit import jit
from reference.checks import check_float, check_ids

Array = npt.NDArray[Any]

COLUMNS = 64  # of the table that one task owns


class EmbeddingCache(NamedTuple):
    ids: Array  # (N,) int32
    table_shape: tuple[int, int]  # (V, D)


@jit(**MAP)
def _gather(like: Any, ids: int, table: int, out: int, n: int, width: int) -> None:
    index, rows, y = pointer(ids, np.int32(0)), pointer(table, like), pointer(out, like)
    for piece in prange((n + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(n, (piece + 1) * ROW_PIECE)):
            u, z = at(rows, np.int64(index[i]) * width), at(y, i * width)
            for j in range(width):
                z[j] = u[j]


@jit(**MAP)
def _scatter(
    like: Any, ids: int, dout: int, out: int, n: int, width: int, vocabulary: int, add: bool
) -> None:
    index, dy, table = pointer(ids, np.int32(0)), pointer(dout, like), pointer(out, like)
    for piece in prange((width + COLUMNS - 1) // COLUMNS):
        first = piece * COLUMNS
        count = min(COLUMNS, width - first)
        if not add:
            for v in range(vocabulary):
                z = at(table, v * width + first)
                for j in range(count):
                    z[j] = like
        for i in range(n):
            u, z = at(dy, i * width + first), at(table, np.int64(index[i]) * width + first)
            for j in range(count):
                z[j] += u[j]


def embedding_forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids], shape (..., D)."""
    check_float("embedding", table=table)
    if table.ndim != 2:
        raise ValueError(f"embedding: table must be (V, D), got shape {table.shape}")
    check_ids("embedding", "ids", ids, table.shape[0], "table")
    table = contiguous(table)
    flat = np.ascontiguousarray(ids, dtype=np.int32).reshape(-1)
    out = empty((*ids.shape, table.shape[1]), table.dtype)
    _gather(like(table), address(flat), address(table), address(out), flat.size, table.shape[1])
    return out, EmbeddingCache(flat, table.shape)


def embedding_backward(
    dout: Array, cache: EmbeddingCache, *, out: Array | None = None, accumulate: bool = False
) -> Array:
    """Return dtable (V, D); ``accumulate`` adds it onto ``out`` and returns the sum."""
    if accumulate and out is None:
        raise ValueError("embedding: accumulate=True adds onto out, so out must be given")
    vocabulary, width = cache.table_shape
    dout = contiguous(dout)
    dtable, elsewhere = receiver(out, cache.table_shape, dout.dtype)
    if accumulate and elsewhere is not None:
        np.copyto(dtable, elsewhere)
    _scatter(
        *(like(dout), address(cache.ids), address(dout), address(dtable), cache.ids.size),
        *(width, vocabulary, accumulate),
    )
    return delivered(dtable, elsewhere)
