"""Decode ids: the bytes of tokens, one after the other, written 8 at a time."""

import numpy as np

from accel.jit import jit
from tokenizer.arrays import Array, Int
from tokenizer.kernels.words import load64, store64

_32 = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


@jit(nogil=True)
def decoded_size(ids: Array, table: Array) -> Int:
    """Return the bytes that ids stand for; ``-1 - i`` if the i-th id names no token.

    ``table`` (2·N,) uint64 holds, for each id, its first 8 bytes, and start << 32 | size in the
    array of all bytes: half a cache line, where most tokens need nothing else. Size 0: no token.
    """
    total = 0
    for i in range(ids.size):
        t = np.int64(ids[i])
        if t < 0 or 2 * t >= table.size or table[2 * t + 1] & _LOW_HALF == 0:
            return -1 - i
        total += np.int64(table[2 * t + 1] & _LOW_HALF)
    return total


@jit(nogil=True)
def decode_ids(ids: Array, table: Array, token_bytes: Array, out: Array) -> None:
    """Write the bytes of ids into ``out``, which ends in PADDING bytes of room."""
    at = 0
    for i in range(ids.size):
        t = np.int64(ids[i])
        place = table[2 * t + 1]
        size = np.int64(place & _LOW_HALF)
        store64(out, at, table[2 * t])
        if size > 8:
            start = np.int64(place >> _32)
            for k in range(8, size, 8):
                store64(out, at + k, load64(token_bytes, start + k))
        at += size
