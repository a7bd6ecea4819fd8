"""The training of byte-pair encoding as an adapter: cases, what is right, what people get wrong."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex

from accel.verify.adapter_trials import Arrays, Case, Trial, written

END = "<|endoftext|>"
TEXT = f"""low low low low low lower lower widest widest widest newest newest newest newest
aaaa aaa aa abab baba 3.14 and 2026; it's we'll don't{END}Über den Wolken — naïve café 北京 🙂
the cat sat on the mat, the cat that the dog saw{END}  two spaces\n\n\ttabs and\nlines end.
"""
# spaces side by side, < and > outside of special tokens, \r\n
CODE = "if x <= y:\r\n    return x -> y  # a  b\r\n\r\n" * 3 + f"{END}<x>\r\n\r\n\r\ny -> z  <x>"
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _bpe_cases(rng: np.random.Generator) -> Iterator[Case]:
    yield "ab cd", 257, []
    yield "low low low lower", 262, []
    yield TEXT, 300, [END]
    yield TEXT, 256 + 1, [END]
    yield "a  b  b", 257, []
    yield "a -> b -> c", 258, [END]
    yield "a\r\n\r\nb\r\n\r\n", 257, []
    yield CODE, 280, [END]


def _bpe(
    text: str,
    vocab_size: int,
    special: list[str],
    *,
    greater: bool = True,
    words: bool = True,
    cut: bool = True,
    escaped: bool = True,
    pattern: str = PATTERN,
    extra: int = 0,
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Return (the merges; the tokens, sorted), counting anew before each merge.

    ``greater``: ties go to the lexicographically greater pair; ``words``: the text is cut into
    words first, by ``pattern``; ``cut``: special tokens are cut out before, ``escaped``: as they
    are written.
    """
    tokens = "|".join(map(regex.escape, special) if escaped else special)
    parts = regex.split(tokens, text) if cut and special else [text]
    pieces = [w for part in parts for w in (regex.findall(pattern, part) if words else [part])]
    counts = {tuple(bytes([b]) for b in piece.encode()): n for piece, n in Counter(pieces).items()}
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < vocab_size - 256 - len(special) + extra:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, n in counts.items():
            for pair in pairwise(word):
                pairs[pair] += n
        if not pairs:
            break
        top = max(pairs.values())
        best = (max if greater else min)(pair for pair, n in pairs.items() if n == top)
        merges.append(best)
        counts = {_merged(word, best): n for word, n in counts.items()}
    vocabulary = {bytes([b]) for b in range(256)} | {a + b for a, b in merges}
    return merges, sorted(vocabulary | {s.encode() for s in special})


def _merged(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    found: list[bytes] = []
    i = 0
    while i < len(word):
        both = word[i : i + 2] == pair
        found.append(word[i] + word[i + 1] if both else word[i])
        i += 2 if both else 1
    return tuple(found)


def _call_bpe(run: Any, arrays: Arrays, text: str, size: int, special: list[str]) -> Any:
    with tempfile.TemporaryDirectory(prefix="myllm-verify-") as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8", newline="")
        vocabulary, merges = run(str(path), size, special)
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError("two ids of the vocabulary have the same bytes")
    return [tuple(pair) for pair in merges], sorted(vocabulary.values())


BPE = Trial(
    "run_train_bpe",
    _bpe_cases,
    _call_bpe,
    lambda *case: [_bpe(*case)],
    (
        (
            "do equal counts go to the smaller pair? Here the lexicographically greater wins.",
            partial(_bpe, greater=False),
        ),
        (
            "is the text not cut into words first? Merges do not cross them.",
            partial(_bpe, words=False),
        ),
        (
            "are special tokens not cut out? No merge may touch or cross them.",
            partial(_bpe, cut=False),
        ),
        (
            "are special tokens not escaped in the pattern that cuts them out? | and others mean "
            "something there.",
            partial(_bpe, escaped=False),
        ),
        (
            r"is \s+(?!\S) missing in the pattern? The last of several spaces goes with the word.",
            partial(_bpe, pattern=PATTERN.replace(r"|\s+(?!\S)", "")),
        ),
        (
            r'has \r\n become \n when the file was read? open(path, newline="") leaves it.',
            lambda text, size, special: _bpe(text.replace("\r\n", "\n"), size, special),
        ),
        (
            "one merge too many? vocab_size counts the bytes and the special tokens.",
            partial(_bpe, extra=1),
        ),
        ("one merge too few?", partial(_bpe, extra=-1)),
    ),
    written("run_train_bpe", "text", "vocab_size", "special_tokens"),
)
