"""Count the distinct words of a text in one pass over its bytes, without making a word an object.

Short words (up to 15 bytes) live in an open-addressed table whose keys are the words themselves;
longer ones in a second table of hashes that points into ``arena``, where each is stored once.
"""

import numpy as np

from accel.jit import jit
from tokenizer.arrays import Array, Int
from tokenizer.kernels.split import BLOCK, cut
from tokenizer.kernels.words import (
    HIGH,
    LENGTH,
    LOW,
    MAX_PACKED,
    hash_bytes,
    load64,
    same_bytes,
    slot_of,
)

DONE, GROW_SHORT, GROW_LONG, GROW_ARENA = 0, 1, 2, 3
# Where a call left off, and how full the tables are.
TEXT, AT, N_SHORT, N_LONG, ARENA_USED = 0, 1, 2, 3, 4


@jit(nogil=True, forceinline=True)
def _find_long(
    buf: Array, i: Int, size: Int, h: Int, hashes: Array, word_of: Array, offsets: Array,
    lengths: Array, arena: Array,
) -> tuple[Int, Int]:  # fmt: skip
    """Return the number of the long word at ``buf[i]``, -1 for a new one, and where its hash is."""
    mask = np.uint64(hashes.size - 1)
    at = h & mask
    while hashes[at] != 0:
        if hashes[at] == h:
            word = np.int64(word_of[at])
            if lengths[word] == size and same_bytes(arena, offsets[word], buf, i, size):
                return word, at
        at = (at + np.uint64(1)) & mask
    return np.int64(-1), at


@jit(nogil=True, forceinline=True)
def _keep_long(
    word: Int, at: Int, buf: Array, i: Int, size: Int, h: Int, hashes: Array, word_of: Array,
    offsets: Array, lengths: Array, arena: Array, used: Int,
) -> None:  # fmt: skip
    """Keep the new long word at ``buf[i]`` behind the ``used`` bytes of the arena."""
    hashes[at] = h
    word_of[at] = word
    offsets[word] = used
    lengths[word] = size
    for k in range(size):
        arena[used + k] = buf[i + k]


@jit(nogil=True)
def count_words(
    buf: Array,
    starts: Array,
    stops: Array,
    table: Array,
    ascii: Array,
    kind: Int,
    max_digits: Int,
    whole_tail: bool,
    keys: Array,
    counts: Array,
    shift: Int,
    hashes: Array,
    word_of: Array,
    offsets: Array,
    lengths: Array,
    long_counts: Array,
    arena: Array,
    state: Array,
) -> Int:
    """Count the words of the texts ``buf[starts[t]:stops[t]]``, each padded by zeros.

    Parameters
    ----------
    buf, starts, stops : Array
        (N,) uint8, (T,) int64 and (T,) int64: the texts.
    table, ascii, kind, max_digits, whole_tail
        The pattern, see ``tokenizer.kernels.split``.
    keys, counts, shift : Array
        (2·S,) uint64 and (S,) int64: packed short words and their counts; S = 2^(64 - shift).
    hashes, word_of : Array
        (H,) uint64 and (H,) int32: hashes of long words, and their numbers.
    offsets, lengths, long_counts, arena : Array
        (W,) int64: where word w lies in ``arena``, uint8; its bytes; its count.
    state : Array
        (5,) int64: where to go on, and what is used so far; updated.

    Returns
    -------
    status : int
        DONE, or what to grow before calling again with the same ``state``.
    """
    i = state[AT]
    n_short = state[N_SHORT]
    n_long = state[N_LONG]
    used = state[ARENA_USED]
    short_limit = counts.size // 2
    long_limit = min(offsets.size, hashes.size // 2)
    slot_mask = counts.size - 1
    status = DONE
    t = state[TEXT]
    ends = np.empty(BLOCK, np.int64)
    n_ends = 0
    piece = 0
    n = i  # end of the run of whole characters that i lies in
    while t < starts.size:
        if i < 0:
            i = starts[t]
            n = i
        stop = stops[t]
        while i < stop:
            if piece == n_ends:
                n_ends, n = cut(buf, i, n, stop, table, ascii, kind, max_digits, whole_tail, ends)
                piece = 0
            end = ends[piece]
            size = end - i
            if size <= MAX_PACKED:
                low = load64(buf, i) & LOW[size]
                high = load64(buf, i + 8) & HIGH[size] | LENGTH[size]
                slot = slot_of(low, high, shift)
                while keys[2 * slot] != low or keys[2 * slot + 1] != high:
                    if keys[2 * slot + 1] == 0:
                        if n_short >= short_limit:
                            status = GROW_SHORT
                        else:
                            keys[2 * slot] = low
                            keys[2 * slot + 1] = high
                            n_short += 1
                        break
                    slot = (slot + 1) & slot_mask
                if status != DONE:
                    break
                counts[slot] += 1
            else:
                h = hash_bytes(buf, i, end)
                word, at = _find_long(buf, i, size, h, hashes, word_of, offsets, lengths, arena)
                if word < 0:
                    if n_long >= long_limit:
                        status = GROW_LONG
                        break
                    if used + size + 8 > arena.size:
                        status = GROW_ARENA
                        break
                    word = n_long
                    n_long += 1
                    _keep_long(
                        word, at, buf, i, size, h, hashes, word_of, offsets, lengths, arena, used
                    )
                    used += size
                long_counts[word] += 1
            piece += 1
            i = end
        if status != DONE:
            break
        t += 1
        i = -1
    state[TEXT] = t
    state[AT] = i
    state[N_SHORT] = n_short
    state[N_LONG] = n_long
    state[ARENA_USED] = used
    return status


@jit(nogil=True)
def move_short(keys: Array, counts: Array, new_keys: Array, new_counts: Array, shift: Int) -> Int:
    """Add all entries of one table of short words to another; return how many were new to it."""
    mask = new_counts.size - 1
    fresh = 0
    for s in range(counts.size):
        low = keys[2 * s]
        high = keys[2 * s + 1]
        if high == 0:
            continue
        slot = slot_of(low, high, shift)
        while new_keys[2 * slot + 1] != 0:
            if new_keys[2 * slot] == low and new_keys[2 * slot + 1] == high:
                break
            slot = (slot + 1) & mask
        if new_keys[2 * slot + 1] == 0:
            new_keys[2 * slot] = low
            new_keys[2 * slot + 1] = high
            fresh += 1
        new_counts[slot] += counts[s]
    return fresh


@jit(nogil=True)
def rehash_long(hashes: Array, word_of: Array, new_hashes: Array, new_word_of: Array) -> None:
    """Move all entries of the table of long words into a larger, empty one."""
    mask = np.uint64(new_hashes.size - 1)
    for s in range(hashes.size):
        if hashes[s] != 0:
            at = hashes[s] & mask
            while new_hashes[at] != 0:
                at = (at + np.uint64(1)) & mask
            new_hashes[at] = hashes[s]
            new_word_of[at] = word_of[s]


@jit(nogil=True)
def unpack_short(keys: Array, counts: Array, flat: Array, offsets: Array, out_counts: Array) -> Int:
    """Write the short words one after the other, and where each ends; return how many."""
    w = 0
    at = 0
    for s in range(counts.size):
        high = keys[2 * s + 1]
        if high == 0:
            continue
        size = np.int64(high >> np.uint64(56))
        for k in range(size):
            part = keys[2 * s] if k < 8 else high
            flat[at + k] = np.uint8(part >> np.uint64(8 * (k & 7)) & np.uint64(255))
        at += size
        out_counts[w] = counts[s]
        w += 1
        offsets[w] = at
    return w


@jit(nogil=True)
def add_long(
    flat: Array,
    word_offsets: Array,
    word_lengths: Array,
    word_counts: Array,
    hashes: Array,
    word_of: Array,
    offsets: Array,
    lengths: Array,
    long_counts: Array,
    arena: Array,
    state: Array,
) -> None:
    """Add long words counted elsewhere to a table with room for them."""
    for k in range(word_offsets.size):
        i = word_offsets[k]
        size = word_lengths[k]
        h = hash_bytes(flat, i, i + size)
        word, at = _find_long(flat, i, size, h, hashes, word_of, offsets, lengths, arena)
        if word < 0:
            word = state[N_LONG]
            used = state[ARENA_USED]
            _keep_long(word, at, flat, i, size, h, hashes, word_of, offsets, lengths, arena, used)
            state[N_LONG] += 1
            state[ARENA_USED] += size
        long_counts[word] += word_counts[k]
