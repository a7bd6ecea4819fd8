"""A real corpus that needs no download: what every Python installation brings along.

The standard library's sources, and the chapters of the language reference that ``help()`` shows
(``pydoc_data.topics``): Python and English, some 10 MB. Left out are tests, which are half of all
files, and files that a program wrote, such as tables of character codes.
"""

import re
import sysconfig
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reference.types import Array

TESTS = {"test", "tests", "idle_test"}
INSTALLED = {"site-packages", "dist-packages"}
GENERATED = re.compile(r"auto-?generated|generated (by|from|with)|do not edit", re.IGNORECASE)
GENERATED_WITHIN = 300  # characters from the start of a file
SHINGLE = 8  # words


class Text(NamedTuple):
    """One document."""

    name: str
    text: str


def standard_library() -> list[Text]:
    """Return the documents of this Python's own installation, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] in INSTALLED or TESTS & set(parts[:-1]):
            continue
        try:
            with tokenize.open(path) as file:  # as Python itself finds out the encoding
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # not a source that this Python could run
        if text.strip() and not GENERATED.search(text[:GENERATED_WITHIN]):
            texts.append(Text("/".join(parts), text))
    from pydoc_data.topics import topics

    texts += [Text(f"topic {name}", text.strip() + "\n") for name, text in sorted(topics.items())]
    return texts


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


def hash_of(word: str) -> int:
    """Return 64 bits of a word, the same in every process (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in word.encode("utf-8", "surrogatepass"):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def near_duplicates(candidates: Sequence[str], others: Sequence[str], share: float) -> list[bool]:
    """Tell of each candidate whether the others hold at least ``share`` of its shingles.

    Containment in all the others together is stricter than likeness to any one of them: a text
    pasted together from several is found too.
    """
    known = np.unique(np.concatenate([np.zeros(0, np.uint64), *(shingles(t) for t in others)]))
    found = []
    for text in candidates:
        mine = shingles(text)
        found.append(bool(np.isin(mine, known, assume_unique=True).mean() >= share))
    return found
