"""Held-out texts that training has seen, nearly: how many of their runs of words occur there."""

import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from reference.types import Array

SHINGLE = 8  # words
SHARED = 0.3  # of a text's runs of words in training text: from here on it counts as seen


def shingles(text: str) -> Array:
    """Return a hash of every run of eight words, sorted and once each: (n,) uint64.

    Of a text shorter than that, of all its words.
    """
    words = re.findall(r"\w+", text)
    codes = np.array([hash_of(word) for word in words], np.uint64)
    n = max(1, len(codes) - SHINGLE + 1)
    total = np.zeros(n, np.uint64)
    for i in range(min(SHINGLE, len(codes))):
        total = total * np.uint64(0x9E3779B97F4A7C15) + codes[i : i + n]
    return np.unique(total)


@functools.lru_cache(1 << 18)  # a text repeats its words
def hash_of(word: str) -> int:
    """Return 64 bits of a word, the same in every process (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in word.encode("utf-8", "surrogatepass"):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _known(texts: Sequence[str]) -> tuple[Array, Array, list[Array]]:
    """Return the shingles of texts, in how many of them each is, and which of them each has."""
    each = [shingles(text) for text in texts]
    known, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *each]), return_counts=True)
    return known, counts, [np.searchsorted(known, mine) for mine in each]


def _held_by(text: str, known: Array) -> Array:
    """Return which of the shingles, of which there are some, a text holds."""
    theirs = shingles(text)
    places = np.minimum(np.searchsorted(known, theirs), len(known) - 1)
    return places[known[places] == theirs]


def repeated(texts: Sequence[str]) -> Array:
    """Return which share of each text's shingles another of the texts holds: (n,) float64."""
    _, counts, places = _known(texts)
    return np.array([(counts[mine] > 1).mean() for mine in places])


def near_duplicates(
    candidates: Sequence[str], others: Iterable[str], share: float = SHARED
) -> list[bool]:
    """Tell of each candidate whether the others hold at least ``share`` of its shingles.

    Containment in all the others together is stricter than likeness to any one of them: a text
    pasted together from several is found too. Only the candidates' shingles are kept; the others
    are read once, one after the other.
    """
    known, _, places = _known(candidates)
    seen = np.zeros(len(known), np.bool_)
    for text in others if len(known) else ():
        seen[_held_by(text, known)] = True
    return [bool(seen[mine].mean() >= share) for mine in places]


class Apart:
    """What may be trained on beside held-out texts: of each, others hold only so many shingles."""

    def __init__(self, held: Sequence[str], most: float):
        self._known, _, self._places = _known(held)
        self._seen = np.zeros(len(self._known), np.bool_)
        self._most = most  # share of the shingles of a held-out text

    def takes(self, text: str) -> bool:
        """Take a text beside those before it, if no share becomes too large."""
        if not len(self._known):
            return True
        seen = self._seen.copy()
        seen[_held_by(text, self._known)] = True
        if any(seen[mine].mean() > self._most for mine in self._places):
            return False
        self._seen = seen
        return True
