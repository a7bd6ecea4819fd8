"""The embedding: a row of the table for each id; the mathematics is in ``reference/embedding.py``.

Backward, several positions may add to one row of the table. The positions are first sorted by id,
those of one id staying in their order (counting sort; Knuth, The Art of Computer Programming 3,
algorithm 5.2D); then each row is cleared and summed up in that order while it lies in the nearest
cache. Neither atomics nor a copy of the table for each thread are needed.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from accel.cpu.kernels import (
    MAP,
    ROW_PIECE,
    SERIAL,
    address,
    contiguous,
    delivered,
    like,
    receiver,
)
from accel.cpu.memory import empty
from accel.cpu.packing import ROOM, prefetch
from accel.cpu.simd import at, pointer, vector_columns
from accel.cpu.streaming import ask, is_far, landing, leave, settle
from accel.jit import jit
from reference.types import Array

# A task makes some rows and some columns. Rows are cut so that rows and positions together are
# divided evenly; columns, so that one id at most positions still leaves work for several threads.
PIECES = 64
COLUMNS = ROOM


class EmbeddingCache(NamedTuple):
    ids: Array  # (N,) int32
    ids_shape: tuple[int, ...]
    table_shape: tuple[int, int]  # (V, D)


@jit(**MAP)
def _gather(like: Any, ids: int, table: int, out: int, n: int, width: int, far: Any) -> None:
    index, rows, y = pointer(ids, np.int32(0)), pointer(table, like), pointer(out, like)
    line = vector_columns(rows)  # elements of a vector, which is a cache line or a part of one
    for piece in prange((n + ROW_PIECE - 1) // ROW_PIECE):
        for i in range(piece * ROW_PIECE, min(n, (piece + 1) * ROW_PIECE)):
            if i + 1 < n:  # rows lie anywhere: the processor does not see the next one coming
                prefetch(at(rows, np.int64(index[i + 1]) * width), 0, width, line)
            u, z = at(rows, np.int64(index[i]) * width), at(y, i * width)
            if far is None:
                for j in range(width):
                    z[j] = u[j]
            leave(u, z, width, far)
        settle(far)


@jit(**SERIAL)
def _sort(ids: int, order: int, ends: int, n: int, vocabulary: int) -> None:
    """Write the positions sorted by id, and where those of each id end."""
    index, position = pointer(ids, np.int32(0)), pointer(order, np.int64(0))
    end = pointer(ends, np.int64(0))
    for v in range(vocabulary):
        end[v] = 0
    for i in range(n):
        end[index[i]] += 1
    begin = 0
    for v in range(vocabulary):
        begin, end[v] = begin + end[v], begin
    for i in range(n):
        v = index[i]
        position[end[v]] = i
        end[v] += 1


@jit(**SERIAL)
def _first_row(end: Any, work: int, vocabulary: int) -> int:
    """Return the first row before which there are at least ``work`` rows and positions."""
    low, high = 0, vocabulary
    while low < high:
        v = (low + high) // 2
        if v + (end[v - 1] if v > 0 else 0) < work:
            low = v + 1
        else:
            high = v
    return low


@jit(**MAP)
def _scatter(
    like: Any,
    order: int,
    ends: int,
    dout: int,
    out: int,
    n: int,
    width: int,
    vocabulary: int,
    add: bool,
    far: Any,
) -> None:
    position, end = pointer(order, np.int64(0)), pointer(ends, np.int64(0))
    dy, table = pointer(dout, like), pointer(out, like)
    columns = (width + COLUMNS - 1) // COLUMNS
    for task in prange(PIECES * columns):
        piece, first = task // columns, task % columns * COLUMNS
        count = min(COLUMNS, width - first)
        low = _first_row(end, (vocabulary + n) * piece // PIECES, vocabulary)
        high = _first_row(end, (vocabulary + n) * (piece + 1) // PIECES, vocabulary)
        i = end[low - 1] if low > 0 else 0
        for v in range(low, high):
            z = at(table, v * width + first)
            w = landing(z, far)
            if not add:
                for j in range(count):
                    w[j] = like
            while i < end[v]:
                u = at(dy, position[i] * width + first)
                i += 1
                if i < n:  # the next one lies anywhere
                    ask(at(dy, position[i] * width + first), count, True)
                for j in range(count):
                    w[j] += u[j]
            leave(w, z, count, far)
        settle(far)


def embedding_forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids], shape (..., D)."""
    table = contiguous(table)
    flat = np.ascontiguousarray(ids, dtype=np.int32).reshape(-1)
    out = empty((*ids.shape, table.shape[1]), table.dtype)
    _gather(
        *(like(table), address(flat), address(table), address(out), *(flat.size, table.shape[1])),
        is_far(out),
    )
    return out, EmbeddingCache(flat, ids.shape, table.shape)


def embedding_backward(
    dout: Array, cache: EmbeddingCache, *, out: tuple[Array | None], accumulate: bool
) -> Array:
    """Return dtable (V, D); ``accumulate`` adds it onto ``out`` and returns the sum."""
    vocabulary, width = cache.table_shape
    dout = contiguous(dout)
    dtable, elsewhere = receiver(out[0], cache.table_shape, dout.dtype)
    if accumulate and elsewhere is not None:
        np.copyto(dtable, elsewhere)
    n = cache.ids.size
    order, ends = empty(n, np.int64), empty(vocabulary, np.int64)
    _sort(address(cache.ids), address(order), address(ends), n, vocabulary)
    _scatter(
        *(like(dout), address(order), address(ends), address(dout), address(dtable)),
        *(n, width, vocabulary, accumulate, None if accumulate else is_far(dtable)),
    )
    return delivered(dtable, elsewhere)
