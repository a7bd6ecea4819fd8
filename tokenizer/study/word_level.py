"""Word level: the most frequent words have ids, every other word is the same unknown.

The oldest way, and the reason for the others: the vocabulary grows with the text for as long as
there are names, and what is left out is lost.
"""

from collections.abc import Mapping
from typing import NamedTuple

import regex

UNKNOWN = "<unk>"
_WORDS = regex.compile(r"\w+|[^\w\s]")


def split(text: str) -> list[str]:
    """Cut a text into words and signs; white space is dropped."""
    return [match.group() for match in _WORDS.finditer(text)]


class WordLevel(NamedTuple):
    """Words by id; id 0 is the unknown."""

    words: list[str]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's words; 0 for each that is not known."""
        ids = {word: i for i, word in enumerate(self.words)}
        return [ids.get(word, 0) for word in split(text)]

    def decode(self, ids: list[int]) -> str:
        """Return the words of ids with a space between any two."""
        return " ".join(self.words[i] for i in ids)


def train(counts: Mapping[str, int], vocab_size: int) -> WordLevel:
    """Keep the ``vocab_size - 1`` most frequent words; ties go to the first by code point."""
    by_count = sorted(counts, key=lambda word: (-counts[word], word))
    return WordLevel([UNKNOWN, *by_count[: vocab_size - 1]])
