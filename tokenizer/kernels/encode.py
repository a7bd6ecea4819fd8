"""Encode pieces: look a piece up if it is known, merge its bytes if it is not, and remember it.

Two kinds of tables. The **vocabulary** is shared by all threads and never changes: open-addressed
slots of half a cache line, found by the packed bytes of a token, or by hash and comparison where it
has more than 15. The **cache** belongs to one thread at a time and holds what merging gave for
pieces that are no token: one slot per address, the newest piece wins, ids inside the slot. So
nothing fills up, nothing has to be cleared, and text made to collide costs no more than new text.
"""

from typing import Any, NamedTuple

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

MAX_SCAN = 96  # bytes of a piece that is merged by scanning; longer ones use a heap

SLOT = 4  # uint64 of a vocabulary slot: (low, high, id) or (hash, start, size, id)
# uint64 of a slot of the cache. Short: low, high, and 12 times 32 bits, the number of ids and then
# 11 of them at most. Long: hash, number of ids << 32 | size, 48 bytes, 16 ids at most.
SHORT_SLOT = 8
LONG_SLOT = 16
MAX_SHORT_IDS = 11
MAX_LONG_BYTES = 48
MAX_LONG_IDS = 16

_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


class Tables(NamedTuple):
    """What an encoder knows; tables have 2^(64 - shift) slots.

    Kernels take it from Python as a plain tuple, whose type Numba recognises faster.
    """

    byte_ids: Array  # (256,) int32: the id of every byte; -1: it has none, and is left out
    pairs: Array  # (2·P,) uint64: pair of ids + 1, and rank << 32 | new id
    pair_shift: Int
    slots: Array  # (SLOT·S,) uint64: tokens of up to 15 bytes
    shift: Int
    long_slots: Array  # (SLOT·L,) uint64: longer tokens
    long_shift: Int
    token_bytes: Array  # uint8: where longer tokens lie
    cache: Array  # (SHORT_SLOT·C,) uint64: pieces of up to 15 bytes that are no token
    cache_shift: Int
    long_cache: Array  # (LONG_SLOT·D,) uint64: longer ones
    long_cache_shift: Int


@jit(nogil=True, forceinline=True)
def rank_of(pairs: Array, shift: Int, left: Int, right: Int) -> Int:
    """Return ``rank << 32 | new id`` of a pair; all ones if it is never merged."""
    key = (np.uint64(left) << _32 | np.uint64(right)) + _ONE
    mask = pairs.size // 2 - 1
    slot = np.int64((key * _MIX) >> shift)
    while True:
        found = pairs[2 * slot]
        if found == key:
            return pairs[2 * slot + 1]
        if found == 0:
            return _NONE
        slot = (slot + 1) & mask


@jit(nogil=True)
def fill_pairs(
    pairs: Array, shift: Int, left: Array, right: Array, rank: Array, new: Array
) -> None:
    """Enter all merges; of a pair listed twice, the first counts."""
    mask = pairs.size // 2 - 1
    for k in range(left.size):
        key = (np.uint64(left[k]) << _32 | np.uint64(right[k])) + _ONE
        slot = np.int64((key * _MIX) >> shift)
        while pairs[2 * slot] != 0 and pairs[2 * slot] != key:
            slot = (slot + 1) & mask
        if pairs[2 * slot] == 0:
            pairs[2 * slot] = key
            pairs[2 * slot + 1] = np.uint64(rank[k]) << _32 | np.uint64(new[k])


@jit(nogil=True)
def merge_scan(
    buf: Array, start: Int, stop: Int, tables: Tables, symbols: Array, ranks: Array
) -> Int:
    """Merge a short piece: find the lowest rank, merge it, look its neighbours up again.

    ``symbols`` (MAX_SCAN,) int32 receives the ids, ``ranks`` (MAX_SCAN,) uint64 is scratch; returns
    how many ids there are.
    """
    pairs = tables.pairs
    shift = tables.pair_shift
    n = np.int64(0)
    for k in range(start, stop):
        symbols[n] = tables.byte_ids[buf[k]]
        n += symbols[n] >= 0
    for k in range(n - 1):
        ranks[k] = rank_of(pairs, shift, symbols[k], symbols[k + 1])
    while n > 1:
        best = 0
        for k in range(1, n - 1):
            if ranks[k] >> _32 < ranks[best] >> _32:
                best = k
        if ranks[best] == _NONE:
            break
        symbols[best] = np.int32(ranks[best] & _LOW_HALF)
        n -= 1
        for k in range(best + 1, n):
            symbols[k] = symbols[k + 1]
        for k in range(best + 1, n - 1):
            ranks[k] = ranks[k + 1]
        if best > 0:
            ranks[best - 1] = rank_of(pairs, shift, symbols[best - 1], symbols[best])
        if best < n - 1:
            ranks[best] = rank_of(pairs, shift, symbols[best], symbols[best + 1])
    return n


@jit(nogil=True)
def merge_heap(buf: Array, start: Int, stop: Int, tables: Tables) -> Array:
    """Merge a long piece in O(n log n): linked symbols, and a heap of ``rank << 32 | position``."""
    pairs = tables.pairs
    shift = tables.pair_shift
    n = np.int64(0)
    symbols = np.empty(stop - start + 1, np.int32)
    for k in range(start, stop):
        symbols[n] = tables.byte_ids[buf[k]]
        n += symbols[n] >= 0
    before = np.empty(n, np.int32)
    after = np.empty(n, np.int32)
    merges = np.empty(n, np.uint64)  # rank and new id of the pair that begins here, as it is now
    heap = np.empty(3 * n + 1, np.uint64)
    size = np.int64(0)
    for k in range(n):
        before[k] = k - 1
        after[k] = k + 1
    for k in range(n):
        merges[k] = _NONE
        if k + 1 < n:
            merges[k] = rank_of(pairs, shift, symbols[k], symbols[k + 1])
        if merges[k] != _NONE:
            size = heap_push(heap, size, merges[k] & ~_LOW_HALF | np.uint64(k))
    while size > 0:
        key = heap[0]
        size = heap_pop(heap, size)
        i = np.int64(key & _LOW_HALF)
        if merges[i] == _NONE or merges[i] >> _32 != key >> _32:
            continue  # that pair is gone
        j = after[i]
        symbols[i] = np.int32(merges[i] & _LOW_HALF)
        merges[j] = _NONE
        after[i] = after[j]
        merges[i] = _NONE
        if after[i] < n:
            before[after[i]] = i
            merges[i] = rank_of(pairs, shift, symbols[i], symbols[after[i]])
            if merges[i] != _NONE:
                size = heap_push(heap, size, merges[i] & ~_LOW_HALF | np.uint64(i))
        h = before[i]
        if h >= 0:
            merges[h] = rank_of(pairs, shift, symbols[h], symbols[i])
            if merges[h] != _NONE:
                size = heap_push(heap, size, merges[h] & ~_LOW_HALF | np.uint64(h))
    m = 0
    i = 0
    while i < n:
        symbols[m] = symbols[i]
        m += 1
        i = after[i]
    return symbols[:m]


@jit(nogil=True)
def heap_push(heap: Array, size: Int, key: Int) -> Int:
    """Push onto a min-heap; return its new size."""
    i = size
    while i > 0 and heap[(i - 1) >> 1] > key:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = key
    return size + 1


@jit(nogil=True)
def heap_pop(heap: Array, size: Int) -> Int:
    """Drop the least key of a min-heap; return its new size."""
    size -= 1
    key = heap[size]
    i = 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = key
    return size


@jit(nogil=True, forceinline=True)
def find_token(slots: Array, shift: Int, low: Int, high: Int) -> Int:
    """Return the id of the token with these packed bytes; -1 if there is none."""
    mask = slots.size // SLOT - 1
    slot = slot_of(low, high, shift)
    while True:
        found = slots[SLOT * slot + 1]
        if found == high and slots[SLOT * slot] == low:
            return np.int64(slots[SLOT * slot + 2])
        if found == 0:
            return np.int64(-1)
        slot = (slot + 1) & mask


@jit(nogil=True)
def find_long_token(buf: Array, start: Int, size: Int, h: Int, tables: Tables) -> Int:
    """Return the id of a token of more than 15 bytes, whose hash is ``h``; -1 if there is none."""
    slots = tables.long_slots
    mask = slots.size // SLOT - 1
    slot = np.int64(h >> tables.long_shift)
    while slots[SLOT * slot] != 0:
        if slots[SLOT * slot] == h and slots[SLOT * slot + 2] == size:
            if same_bytes(tables.token_bytes, np.int64(slots[SLOT * slot + 1]), buf, start, size):
                return np.int64(slots[SLOT * slot + 3])
        slot = (slot + 1) & mask
    return np.int64(-1)


@jit(nogil=True)
def encode_long(
    buf: Array,
    start: Int,
    stop: Int,
    tables: Tables,
    symbols: Array,
    ranks: Array,
    out: Array,
    k: Int,
) -> Int:
    """Encode a piece of 16 to MAX_SCAN bytes into ``out`` from ``k`` on; return where it ends."""
    size = stop - start
    h = hash_bytes(buf, start, stop)
    token = find_long_token(buf, start, size, h, tables)
    if token >= 0:
        out[k] = token
        return k + 1
    cache = tables.long_cache
    at = LONG_SLOT * np.int64(h >> tables.long_cache_shift)
    ids = at + 2 + MAX_LONG_BYTES // 8
    if size <= MAX_LONG_BYTES and cache[at] == h and cache[at + 1] & _LOW_HALF == size:
        same = True
        for word in range((size + 7) // 8):
            same = (
                same
                and cache[at + 2 + word]
                == load64(buf, start + 8 * word) & LOW[min(size - 8 * word, 8)]
            )
        if same:
            n = np.int64(cache[at + 1] >> _32)
            for j in range(n):
                out[k + j] = np.int32(cache[ids + (j >> 1)] >> np.uint64(32 * (j & 1)) & _LOW_HALF)
            return k + n
    n = merge_scan(buf, start, stop, tables, symbols, ranks)
    for j in range(n):
        out[k + j] = symbols[j]
    if size <= MAX_LONG_BYTES and n <= MAX_LONG_IDS:
        cache[at] = h
        cache[at + 1] = np.uint64(n) << _32 | np.uint64(size)
        for word in range((size + 7) // 8):
            cache[at + 2 + word] = load64(buf, start + 8 * word) & LOW[min(size - 8 * word, 8)]
        symbols[n] = 0
        for j in range(0, n, 2):
            cache[ids + (j >> 1)] = np.uint64(symbols[j]) | np.uint64(symbols[j + 1]) << _32
    return k + n


@jit(nogil=True)
def fill_vocabulary(
    offsets: Array,
    ids: Array,
    whole: bool,
    known: tuple[Any, ...],
) -> None:
    """Enter the tokens that a piece of their bytes becomes: all if ``whole``, else by merging.

    Token t is ``token_bytes[offsets[t]:offsets[t + 1]]`` and has the id ``ids[t]``; ``known`` has
    the fields of ``Tables``.
    """
    tables = Tables(*known)
    slots, shift, token_bytes = tables.slots, tables.shift, tables.token_bytes
    long_slots, long_shift = tables.long_slots, tables.long_shift
    symbols = np.empty(MAX_SCAN + 1, np.int32)
    ranks = np.empty(MAX_SCAN, np.uint64)
    for t in range(ids.size):
        start = offsets[t]
        stop = offsets[t + 1]
        size = stop - start
        if not whole:
            if size > MAX_SCAN:
                many = merge_heap(token_bytes, start, stop, tables)
                if many.size != 1 or many[0] != ids[t]:
                    continue
            elif (
                merge_scan(token_bytes, start, stop, tables, symbols, ranks) != 1
                or symbols[0] != ids[t]
            ):
                continue
        if size <= MAX_PACKED:
            low = load64(token_bytes, start) & LOW[size]
            high = load64(token_bytes, start + 8) & HIGH[size] | LENGTH[size]
            slot = slot_of(low, high, shift)
            while slots[SLOT * slot + 1] != 0:
                slot = (slot + 1) & (slots.size // SLOT - 1)
            slots[SLOT * slot] = low
            slots[SLOT * slot + 1] = high
            slots[SLOT * slot + 2] = ids[t]
        else:
            h = hash_bytes(token_bytes, start, stop)
            slot = np.int64(h >> long_shift)
            while long_slots[SLOT * slot] != 0:
                slot = (slot + 1) & (long_slots.size // SLOT - 1)
            long_slots[SLOT * slot] = h
            long_slots[SLOT * slot + 1] = start
            long_slots[SLOT * slot + 2] = size
            long_slots[SLOT * slot + 3] = ids[t]


@jit(nogil=True)
def encode_texts(
    buf: Array,
    starts: Array,
    stops: Array,
    checked: bool,
    given: Array,
    out: Array,
    out_stops: Array,
    table: Array,
    ascii: Array,
    kind: Int,
    max_digits: Int,
    whole_tail: bool,
    known: tuple[Any, ...],
) -> None:
    """Encode the texts ``buf[starts[t]:stops[t]]``, each followed by ``PADDING`` zeros.

    Parameters
    ----------
    buf, starts, stops : Array
        (N,) uint8, (T,) int64 and (T,) int64: the texts.
    checked : bool
        All texts are whole characters; else bytes of no character become pieces of their own.
    given : Array
        int64: the ends of all pieces if no state machine knows them (``kind`` 0), else empty.
    out : Array
        int32, with room for one id per byte and two more: the ids of all texts.
    out_stops : Array
        (T,) int64: where the ids of each text end.
    table, ascii, kind, max_digits, whole_tail
        The pattern, see ``tokenizer.kernels.split``.
    known
        The fields of ``Tables``; those of the cache are updated.
    """
    tables = Tables(*known)
    slots, shift, cache, cache_shift = tables.slots, tables.shift, tables.cache, tables.cache_shift
    symbols = np.empty(MAX_SCAN + 1, np.int32)
    ranks = np.empty(MAX_SCAN, np.uint64)
    ends = given if kind == 0 else np.empty(BLOCK, np.int64)
    n_ends = given.size
    k = np.int64(0)
    piece = 0
    for t in range(starts.size):
        i = starts[t]
        stop = stops[t]
        n = stop if checked else i  # end of the run of whole characters that i lies in
        while i < stop:
            if piece == n_ends:
                n_ends, n = cut(buf, i, n, stop, table, ascii, kind, max_digits, whole_tail, ends)
                piece = 0
            end = ends[piece]
            piece += 1
            size = end - i
            if size <= MAX_PACKED:
                low = load64(buf, i) & LOW[size]
                high = load64(buf, i + 8) & HIGH[size] | LENGTH[size]
                token = find_token(slots, shift, low, high)
                if token >= 0:
                    out[k] = token
                    k += 1
                    i = end
                    continue
                at = SHORT_SLOT * slot_of(low, high, cache_shift)
                if cache[at] == low and cache[at + 1] == high:
                    first = cache[at + 2]
                    m = np.int64(first & _LOW_HALF)
                    out[k] = np.int32(first >> _32)
                    out[k + 1] = np.int32(cache[at + 3] & _LOW_HALF)
                    for j in range(2, m):
                        out[k + j] = np.int32(
                            cache[at + 2 + ((j + 1) >> 1)] >> np.uint64(32 * ((j + 1) & 1))
                            & _LOW_HALF
                        )
                    k += m
                else:
                    m = merge_scan(buf, i, end, tables, symbols, ranks)
                    for j in range(m):
                        out[k + j] = symbols[j]
                    k += m
                    if m <= MAX_SHORT_IDS:
                        cache[at] = low
                        cache[at + 1] = high
                        cache[at + 2] = np.uint64(m) | np.uint64(symbols[0]) << _32
                        symbols[m] = 0
                        for j in range(1, m, 2):
                            cache[at + 2 + ((j + 1) >> 1)] = (
                                np.uint64(symbols[j]) | np.uint64(symbols[j + 1]) << _32
                            )
            elif size <= MAX_SCAN:
                k = encode_long(buf, i, end, tables, symbols, ranks, out, k)
            else:
                token = find_long_token(buf, i, size, hash_bytes(buf, i, end), tables)
                if token >= 0:
                    out[k] = token
                    k += 1
                else:
                    many = merge_heap(buf, i, end, tables)
                    for id in many:
                        out[k] = id
                        k += 1
            i = end
        out_stops[t] = k
