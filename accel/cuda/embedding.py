"""Embedding, and the check of token ids. Kernels: ``embedding.cu``.

Forward moves 2·N·D·e bytes. Backward reads dout once and writes the V·D float32 of the gradient
once (twice where it accumulates); each of its V/64 · D/256 blocks also reads all N ids, from L2.
On 65,536 tokens of MyLLM-1B: 0.23 GB of dout, 0.94 GB of the table, 1.9 GB of L2 reads.
"""

from typing import NamedTuple

import numpy as np

from accel.cuda.arrays import check_out, contiguous, packs
from accel.cuda.device import MAX_GRID_Y, THREADS, ceil_div, current, empty, launch
from reference.types import Array

ROWS, LOOKS = 64, 8  # of a block of the backward, and a thread's ids a round, as in embedding.cu


class EmbeddingCache(NamedTuple):
    ids: Array  # (N,) int32
    table_shape: tuple[int, int]  # (V, D)


def embedding_forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids], shape (..., D). Waits for the device, to see whether all ids exist."""
    count_ids("embedding", "ids", ids, None, table.shape[0], "table")
    ids = contiguous(ids)
    return lookup(ids, table), EmbeddingCache(ids.reshape(-1), table.shape)


def lookup(ids: Array, table: Array) -> Array:
    """Return table[ids], shape (..., D); zeros for ids that the table does not have."""
    V, D = table.shape
    ids, table = contiguous(ids), contiguous(table)
    out = empty((*ids.shape, D), table.dtype)
    grid = (packs(table, D), min(ids.size, MAX_GRID_Y))
    given = {"ids": ids, "table": table, "out": out, "N": ids.size, "V": V, "D": D}
    launch("embedding", "embedding_forward", grid, **given)
    return out


def embedding_backward(
    dout: Array, cache: EmbeddingCache, *, out: tuple[Array | None], accumulate: bool
) -> Array:
    """Return dtable (V, D) float32; ``accumulate`` adds it onto ``out``."""
    V, D = cache.table_shape
    dtable = check_out(out[0], (V, D))
    width = min(256, 32 * ceil_div(D, 32))
    given = {"ids": cache.ids, "dout": contiguous(dout), "dtable": dtable, "N": cache.ids.size}
    sizes = {"V": V, "D": D, "accumulate": accumulate}
    grid, shared = (ceil_div(V, ROWS), ceil_div(D, width)), 4 * ((ROWS + LOOKS) * width + 32)
    launch("embedding", "embedding_backward", grid, width, shared, **given, **sizes)
    return dtable


def count_ids(
    op: str, name: str, ids: Array, mask: Array | None, limit: int, what: str = "vocabulary"
) -> int:
    """Return how many ids take part, after checking that those lie in 0 .. limit - 1.

    Parameters
    ----------
    ids : (...) int32
    mask : (...) bool, optional
        Ids that take part; all, when None.

    Raises
    ------
    ValueError
        When one lies outside; the first offender is named.
    """
    return verdict(op, name, ids, check(ids, mask, limit), limit, what) if ids.size else 0


def check(ids: Array, mask: Array | None, limit: int) -> Array:
    """Return (2,) int32: the first id that takes part and lies outside 0 .. limit - 1, and a count.

    The first is the number of an element, or how many there are; counted are those that take part.
    """
    flat = contiguous(ids).reshape(-1)
    result = empty((2,), np.int32)
    mask = None if mask is None else contiguous(mask).reshape(-1)
    given = {"ids": flat, "mask": mask, "N": flat.size, "limit": limit, "result": result}
    threads = min(THREADS, 32 * ceil_div(flat.size, 32))
    launch("embedding", "check_ids", 1, threads, 2 * 4 * threads, **given)
    return result


def verdict(
    op: str, name: str, ids: Array, result: Array, limit: int, what: str = "vocabulary"
) -> int:
    """Wait for what ``check`` has found, and return or raise as ``count_ids``."""
    first, count = (int(n) for n in current().download(result))
    if first < ids.size:
        where = ", ".join(str(int(i)) for i in np.unravel_index(first, ids.shape))
        value = int(current().download(contiguous(ids).reshape(-1)[first : first + 1])[0])
        raise ValueError(
            f"{op}: {name} must lie in 0..{limit - 1} (the {what} has {limit} entries), "
            f"but {name}[{where}] is {value}"
        )
    return count
