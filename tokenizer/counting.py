"""From texts to words: the distinct pieces of a corpus and how often each occurs."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from accel.ahead import batches, in_order
from tokenizer import reference
from tokenizer.arrays import Array
from tokenizer.classes import UnicodeClasses
from tokenizer.kernels import count as kernels
from tokenizer.kernels.words import PADDING
from tokenizer.patterns import compiled, machine_of

BATCH_BYTES = 1 << 21  # of text handed to a kernel at once
_GAP = b"\0" * PADDING


class Words(NamedTuple):
    """Distinct words in no particular order; training does not depend on it."""

    flat: Array  # (N,) uint8: the words, one after the other
    offsets: Array  # (W + 1,) int64: word w is flat[offsets[w]:offsets[w + 1]]
    counts: Array  # (W,) int64: how often word w occurs

    @classmethod
    def of(cls, counts: dict[bytes, int]) -> "Words":
        """Lay out a mapping from word to count."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum([len(word) for word in counts], out=offsets[1:])
        flat = np.frombuffer(b"".join(counts), np.uint8)
        return cls(flat, offsets, np.fromiter(counts.values(), np.int64, len(counts)))


class _Long(NamedTuple):
    """Of each word that is too long for a number, where it lies and how often it occurs."""

    offsets: Array
    lengths: Array
    counts: Array


class WordCounter:
    """Counts the words of texts by a state machine, in tables that grow as needed.

    Parameters
    ----------
    pattern : str
        A pattern that has a state machine.
    classes : UnicodeClasses
        What a letter is.
    """

    def __init__(self, pattern: str, classes: UnicodeClasses):
        machine = machine_of(pattern)
        if machine is None:
            raise ValueError(f"pattern {pattern!r} has no state machine")
        self._machine = (classes.machine, classes.ascii, *machine)
        self._bits = 12
        self._keys = np.zeros(2 << self._bits, np.uint64)
        self._counts = np.zeros(1 << self._bits, np.int64)
        self._table = np.zeros(1 << 10, np.uint64), np.zeros(1 << 10, np.int32)  # hash, its word
        self._long = _Long(*(np.zeros(1 << 9, np.int64) for _ in range(3)))
        self._arena = np.zeros(1 << 16, np.uint8)
        self._state = np.zeros(5, np.int64)

    def add(self, texts: list[bytes]) -> None:
        """Count the words of some texts."""
        buf = np.frombuffer(_GAP.join([*texts, b""]), np.uint8)
        sizes = np.array([len(text) for text in texts], np.int64)
        starts = np.cumsum(sizes + PADDING) - (sizes + PADDING)
        self._state[[kernels.TEXT, kernels.AT]] = 0, -1
        while True:
            status = kernels.count_words(
                buf,
                starts,
                starts + sizes,
                *self._machine,
                self._keys,
                self._counts,
                np.uint64(64 - self._bits),
                *self._table,
                *self._long,
                self._arena,
                self._state,
            )
            if status == kernels.DONE:
                return
            if status == kernels.GROW_SHORT:
                self._grow_short(self._bits + 2)
            elif status == kernels.GROW_LONG:
                self._grow_long(4 * self._long.offsets.size)
            else:
                longest = int(sizes.max())
                self._arena = _grown(self._arena, 2 * self._arena.size + longest + PADDING)

    def update(self, other: "WordCounter") -> None:
        """Add what another counter has counted."""
        while 1 << self._bits < 2 * (self._state[kernels.N_SHORT] + other._state[kernels.N_SHORT]):
            self._grow_short(self._bits + 1)
        self._state[kernels.N_SHORT] += kernels.move_short(
            other._keys, other._counts, self._keys, self._counts, np.uint64(64 - self._bits)
        )
        n_long = int(other._state[kernels.N_LONG])
        need = int(self._state[kernels.N_LONG]) + n_long
        if need > self._long.offsets.size:
            self._grow_long(1 << need.bit_length())
        need = int(self._state[kernels.ARENA_USED] + other._state[kernels.ARENA_USED]) + PADDING
        if need > self._arena.size:
            self._arena = _grown(self._arena, need)
        kernels.add_long(
            other._arena,
            *_Long(*(array[:n_long] for array in other._long)),
            *self._table,
            *self._long,
            self._arena,
            self._state,
        )

    def words(self) -> Words:
        """Return all words counted so far."""
        n_short = int(self._state[kernels.N_SHORT])
        n_long = int(self._state[kernels.N_LONG])
        used = int(self._state[kernels.ARENA_USED])
        short_bytes = int((self._keys[1::2] >> np.uint64(56)).sum())
        flat = np.empty(short_bytes + used, np.uint8)
        offsets = np.zeros(n_short + n_long + 1, np.int64)
        counts = np.empty(n_short + n_long, np.int64)
        kernels.unpack_short(self._keys, self._counts, flat, offsets, counts)
        flat[short_bytes:] = self._arena[:used]
        offsets[n_short + 1 :] = short_bytes + np.cumsum(self._long.lengths[:n_long])
        counts[n_short:] = self._long.counts[:n_long]
        return Words(flat, offsets, counts)

    def _grow_short(self, bits: int) -> None:
        keys = np.zeros(2 << bits, np.uint64)
        counts = np.zeros(1 << bits, np.int64)
        kernels.move_short(self._keys, self._counts, keys, counts, np.uint64(64 - bits))
        self._bits, self._keys, self._counts = bits, keys, counts

    def _grow_long(self, size: int) -> None:
        table = np.zeros(2 * size, np.uint64), np.zeros(2 * size, np.int32)
        kernels.rehash_long(*self._table, *table)
        self._table = table
        self._long = _Long(*(_grown(array, size) for array in self._long))


def _grown(array: Array, size: int) -> Array:
    out = np.zeros(size, array.dtype)
    out[: array.size] = array
    return out


def count_words(
    texts: Iterable[str | bytes], pattern: str, classes: UnicodeClasses, n_threads: int
) -> Words:
    """Count the words of all texts; each text is cut on its own.

    Parameters
    ----------
    texts : iterable of str or bytes
        Read once, in batches; they are never all in memory.
    pattern : str
        The pattern that cuts a text into words. One without a state machine is matched by
        ``regex``, on one thread.
    classes : UnicodeClasses
        What a letter is.
    n_threads : int
        How many threads count; the result is the same for any number.
    """
    if isinstance(texts, str | bytes):
        raise ValueError(f"texts must be several texts, got one {type(texts).__name__}")
    if machine_of(pattern) is None:
        expression = compiled(pattern)
        counts: Counter[bytes] = Counter()
        for text in texts:
            counts.update(reference.split(_to_bytes(text), expression, classes))
        return Words.of(counts)

    taken = batches(map(_to_bytes, texts), len, BATCH_BYTES)
    if n_threads == 1:
        counter = WordCounter(pattern, classes)
        for batch in taken:
            counter.add(batch)
        return counter.words()

    idle = [WordCounter(pattern, classes) for _ in range(n_threads)]

    def work(batch: list[bytes]) -> None:
        counter = idle.pop()
        counter.add(batch)
        idle.append(counter)

    for _ in in_order(work, taken, n_threads):
        pass
    for counter in idle[1:]:
        idle[0].update(counter)
    return idle[0].words()


def _to_bytes(text: str | bytes) -> bytes:
    if isinstance(text, str):
        return reference.to_bytes(text)
    if not isinstance(text, bytes):
        raise ValueError(f"texts must be str or bytes, got {type(text).__name__}")
    return text
