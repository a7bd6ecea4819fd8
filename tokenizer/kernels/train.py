"""Learn merges: byte-pair encoding without a hash table in the loop.

The words lie one after the other as linked symbols: position i of the text holds a symbol, the
positions of its neighbours, and the number of the pair that begins there. Each pair owns a segment
of ``arena`` that lists the positions where it was seen. To merge a pair is to walk its segment,
skip the positions it has lost since, and relink its neighbours.

What makes this fast: **every pair born in a merge contains the new symbol**, on its left or on its
right. So the number of a newborn pair is found in two arrays indexed by the other symbol, and no
dictionary from pair to number exists at all. Positions of newborn pairs are gathered first and laid
out afterwards, when the length of every segment is known.

The next pair comes from a heap of keys ``count << 32 | ~(left << 16 | right)``: the highest count,
then the smallest pair. An entry may be out of date, since counts only fall once a pair's birth is
over; it is then pushed back with the count of now. Pairs below a threshold wait outside the heap;
when it runs empty the threshold falls to a quarter. Most pairs never enter.
"""

import numpy as np

from accel.jit import jit
from tokenizer.arrays import Array, Int

_32 = np.uint64(32)
_ONES = np.int64(0xFFFFFFFF)


@jit(nogil=True, forceinline=True)
def heap_key(count: Int, left: Int, right: Int) -> Int:
    """Return the key of a pair: the greatest one is merged next."""
    return np.uint64(count) << _32 | np.uint64(_ONES - (np.int64(left) << 16 | np.int64(right)))


@jit(nogil=True)
def grown(array: Array, size: Int) -> Array:
    """Return a copy of an array with room for ``size`` elements."""
    out = np.empty(size, array.dtype)
    for i in range(array.size):
        out[i] = array[i]
    return out


@jit(nogil=True)
def sift_up(keys: Array, pairs: Array, i: Int) -> None:
    """Move the entry at ``i`` of a max-heap towards the root until its parent is greater."""
    key = keys[i]
    pair = pairs[i]
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] >= key:
            break
        keys[i] = keys[parent]
        pairs[i] = pairs[parent]
        i = parent
    keys[i] = key
    pairs[i] = pair


@jit(nogil=True)
def sift_down(keys: Array, pairs: Array, n: Int) -> None:
    """Move the root of a max-heap of ``n`` entries down until its children are smaller."""
    key = keys[0]
    pair = pairs[0]
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and keys[child + 1] > keys[child]:
            child += 1
        if keys[child] <= key:
            break
        keys[i] = keys[child]
        pairs[i] = pairs[child]
        i = child
    keys[i] = key
    pairs[i] = pair


@jit(nogil=True)
def push(
    keys: Array, pairs: Array, n: Int, p: Int, count: Int, left: Int, right: Int
) -> tuple[Array, Array]:
    """Return a max-heap of ``n`` entries with one more, pair p."""
    if n == keys.size:
        keys = grown(keys, 2 * n)
        pairs = grown(pairs, 2 * n)
    keys[n] = heap_key(count, left, right)
    pairs[n] = p
    sift_up(keys, pairs, n)
    return keys, pairs


@jit(nogil=True)
def learn_merges(
    flat: Array,
    offsets: Array,
    counts: Array,
    first_id: Int,
    n_merges: Int,
    min_count: Int,
    max_bytes: Int,
) -> tuple[Array, Array, Int]:
    """Learn merges from distinct words.

    Parameters
    ----------
    flat : Array
        (N,) uint8, N < 2^31: the words, one after the other.
    offsets : Array
        (W + 1,) int64: word w is ``flat[offsets[w]:offsets[w + 1]]``.
    counts : Array
        (W,) int64: how often each word occurs.
    first_id : int
        Id of byte 0; ids must stay below 2^16.
    n_merges : int
        How many merges to learn, at most.
    min_count : int
        The least count of a pair that is merged; at least 1.
    max_bytes : int
        The most bytes that a merge may make; at least 2.

    Returns
    -------
    left, right : Array
        (M,) int32: merge k makes ``first_id + 256 + k`` of these two ids.
    most : int
        The count of the most frequent pair. Counts must fit 32 bits: if this one does not, M = 0.
    """
    n = flat.size
    # -- linked symbols, and the pairs of bytes
    symbol = np.empty(n, np.int32)
    before = np.empty(n, np.int32)
    after = np.empty(n, np.int32)
    pair_at = np.full(n, -1, np.int32)
    weight = np.empty(n, np.uint32)
    byte_counts = np.zeros(65536, np.int64)
    byte_seen = np.zeros(65536, np.int64)
    for w in range(offsets.size - 1):
        start = offsets[w]
        stop = offsets[w + 1]
        for i in range(start, stop):
            symbol[i] = first_id + flat[i]
            before[i] = i - 1 if i > start else -1
            after[i] = i + 1 if i + 1 < stop else -1
            weight[i] = np.uint32(counts[w])
            if i + 1 < stop:
                both = np.int64(flat[i]) << 8 | np.int64(flat[i + 1])
                byte_counts[both] += counts[w]
                byte_seen[both] += 1

    merged_left = np.empty(n_merges, np.int32)
    merged_right = np.empty(n_merges, np.int32)
    most = np.int64(0)
    for seen in byte_counts:
        most = max(most, seen)
    if most > _ONES:
        return merged_left[:0], merged_right[:0], most

    capacity = 1 << 17
    left = np.empty(capacity, np.int32)
    right = np.empty(capacity, np.int32)
    count = np.empty(capacity, np.int64)
    segment = np.empty(
        capacity, np.int64
    )  # where the pair's positions begin in arena; -1: none kept
    length = np.empty(capacity, np.int32)
    number = np.full(65536, -1, np.int32)
    arena = np.empty(n + n // 2 + 1024, np.int32)
    n_pairs = 0
    used = np.int64(0)
    for both in range(65536):
        if byte_seen[both] > 0:
            number[both] = n_pairs
            left[n_pairs] = first_id + (both >> 8)
            right[n_pairs] = first_id + (both & 255)
            count[n_pairs] = byte_counts[both]
            segment[n_pairs] = used
            length[n_pairs] = 0
            used += byte_seen[both]
            n_pairs += 1
    for i in range(n):
        if after[i] >= 0:
            p = number[np.int64(flat[i]) << 8 | np.int64(flat[i + 1])]
            pair_at[i] = p
            arena[segment[p] + length[p]] = i
            length[p] += 1

    # -- the heap
    keys = np.empty(1 << 16, np.uint64)
    heap = np.empty(1 << 16, np.int32)
    n_heap = np.int64(0)
    threshold = max(np.int64(min_count), most // 64) * 4

    # -- the loop
    n_ids = first_id + 256 + n_merges
    born_left = np.full(n_ids, -1, np.int32)  # symbol x -> number of the newborn pair (x, new)
    born_right = np.full(n_ids, -1, np.int32)  # symbol y -> number of the newborn pair (new, y)
    n_bytes = np.ones(n_ids, np.int64)  # of every symbol
    seen_pair = np.empty(1 << 12, np.int32)
    seen_at = np.empty(1 << 12, np.int32)
    done = 0
    while done < n_merges:
        if n_heap == 0:
            if threshold <= min_count:
                break
            threshold = max(np.int64(min_count), threshold // 4)
            for p in range(n_pairs):
                if count[p] >= threshold:
                    keys, heap = push(keys, heap, n_heap, p, count[p], left[p], right[p])
                    n_heap += 1
            continue
        best = heap[0]
        current = count[best]
        stale = np.int64(keys[0] >> _32) != current
        if stale and current >= threshold:
            keys[0] = heap_key(current, left[best], right[best])
            sift_down(keys, heap, n_heap)
            continue
        n_heap -= 1
        keys[0] = keys[n_heap]
        heap[0] = heap[n_heap]
        sift_down(keys, heap, n_heap)
        if stale:
            continue

        new = np.int32(first_id + 256 + done)
        merged_left[done] = left[best]
        merged_right[done] = right[best]
        n_bytes[new] = n_bytes[left[best]] + n_bytes[right[best]]
        done += 1
        n_seen = 0
        first_born = n_pairs
        room = 2 * np.int64(length[best]) + 2
        if room > seen_pair.size:
            seen_pair = np.empty(2 * room, np.int32)
            seen_at = np.empty(2 * room, np.int32)
        if n_pairs + room > left.size:
            size = 2 * (n_pairs + room)
            left = grown(left, size)
            right = grown(right, size)
            count = grown(count, size)
            segment = grown(segment, size)
            length = grown(length, size)
        for k in range(segment[best], segment[best] + length[best]):
            i = arena[k]
            if pair_at[i] != best:
                continue
            j = after[i]
            h = before[i]
            m = after[j]
            w = np.int64(weight[i])
            pair_at[i] = -1
            for side in range(2):  # the pairs that the new symbol makes with its neighbours
                beside = m if side else h
                if beside < 0:
                    continue
                y = symbol[beside]
                born = born_right if side else born_left
                count[pair_at[j if side else h]] -= w
                p = born[y]
                if p < 0:
                    p = np.int32(n_pairs)
                    n_pairs += 1
                    born[y] = p
                    left[p] = new if side else y
                    right[p] = y if side else new
                    count[p] = 0
                    length[p] = 0
                count[p] += w
                length[p] += 1
                at = i if side else h
                pair_at[at] = p
                seen_pair[n_seen] = p
                seen_at[n_seen] = at
                n_seen += 1
            if m >= 0:
                before[m] = i
            pair_at[j] = -1
            symbol[i] = new
            after[i] = m
        count[best] = 0

        # -- lay out the positions of the newborn pairs
        for p in range(first_born, n_pairs):
            born_left[left[p]] = -1
            born_right[right[p]] = -1
            if n_bytes[left[p]] + n_bytes[right[p]] > max_bytes:
                count[p] = 0
            if count[p] >= min_count:
                segment[p] = used
                used += length[p]
                length[p] = 0
                if count[p] >= threshold:
                    keys, heap = push(keys, heap, n_heap, p, count[p], left[p], right[p])
                    n_heap += 1
            else:
                segment[p] = -1  # too rare or too long, and counts only fall: never merged
        if used > arena.size:
            arena = grown(arena, used + used // 2)
        for k in range(n_seen):
            p = seen_pair[k]
            if segment[p] >= 0:
                arena[segment[p] + length[p]] = seen_at[k]
                length[p] += 1
    return merged_left[:done], merged_right[:done], most
