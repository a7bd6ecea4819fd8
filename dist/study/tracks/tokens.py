"""Tokenizer: byte-pair encoding learned and replayed, and the best way to cut a word."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dist.study.exercise import Exercise, Mistake, Options

WORDS = (b"aaa", b"abab", b"banana", b"hug", b"pug", b"hugs", b"bun", b"aaaa", b"ababab", b"x")

# Mistakes in learning that are made one with the other too.
GREATER = {
    "(-n, pair) for pair, n": "(-n, (-pair[0], -pair[1])) for pair, n",
    "negative, pair = heapq.heappop(heap)\n": "negative, pair = heapq.heappop(heap)"
    "\n        pair = (-pair[0], -pair[1])\n",
    "(heap, (-counts[pair], pair))": "(heap, (-counts[pair], (-pair[0], -pair[1])))",
    "(heap, (-counts[now], now))": "(heap, (-counts[now], (-now[0], -now[1])))",
}
ENDLESS = {" and sum(length[i - first_id] for i in now) <= max_length": ""}


def _merges(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    yield [1, 1], (1, 1), 9
    yield [1, 1, 1], (1, 1), 9
    yield [1, 1, 1, 1], (1, 1), 9
    yield [1, 2, 1, 2], (1, 2), 9
    yield [2, 1], (1, 2), 9
    yield [], (1, 2), 9
    for _ in range(20):
        symbols = rng.integers(0, 3, int(rng.integers(1, 9))).tolist()
        yield symbols, (int(rng.integers(0, 3)), int(rng.integers(0, 3))), 9


def _texts(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    yield {b"ab": 1, b"cd": 1}, 1
    yield {b"ab": 1, b"cd": 2}, 1
    yield {b"hug": 10, b"pug": 5, b"pun": 12, b"bun": 4, b"hugs": 5}, 5
    for _ in range(12):
        some = rng.choice(len(WORDS), int(rng.integers(1, 6)), replace=False)
        words = {WORDS[i]: int(rng.integers(1, 5)) for i in some}
        yield words, int(rng.integers(1, 8))
        yield words, 8, Options(first_id=300, n_symbols=400)
        yield words, 8, Options(min_count=3)
        yield words, 8, Options(max_length=3)


def _symbols(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    ranks = {(1, 2): (2, 10), (2, 3): (0, 11), (3, 1): (1, 12), (1, 11): (3, 13)}
    ranks |= {(1, 1): (4, 14), (14, 1): (5, 15), (12, 2): (6, 16)}
    yield [1, 2, 3], ranks
    yield [1], ranks
    yield [1, 1, 1], ranks
    for _ in range(30):
        yield rng.integers(1, 4, int(rng.integers(0, 14))).tolist(), ranks


def _pieces(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield what a model is made of and a word, for a method of it."""
    pieces = ["a", "b", "n", "ab", "ba", "na", "nan", "ban", "ana", "banana"]
    for word in ("a", "ab", "ana", "bana", "banana", "abab", "nanana", "x", "ax"):
        for _ in range(3):
            p = rng.dirichlet(np.ones(len(pieces)))
            log_p = {piece: math.log(x) for piece, x in zip(pieces, p, strict=True)}
            for without in (None, word, "na"):
                yield log_p, word, Options(without=without)


EXERCISES = (
    Exercise(
        "bpe_merge",
        "tokenizer.reference",
        """\
One merge replaces a pair of neighbours by a new symbol, everywhere in a word. Go from left to
right: in aaa the pair aa is found once, and its second a is used up. A new list is returned.""",
        (
            Mistake(
                "is a symbol used by two pairs? After a match go on behind both of its symbols.",
                {"(new)\n            i += 2": "(new)\n            i += 1"},
            ),
            Mistake(
                "is the pair found in either order? (1, 2) is not (2, 1).",
                {
                    "(symbols[i], symbols[i + 1]) == pair": "{symbols[i], symbols[i + 1]} == "
                    "set(pair)"
                },
            ),
            Mistake(
                "is only the first occurrence replaced? Every one is.",
                {"i += 2\n        else:": "return [*out, *symbols[i + 2 :]]\n        else:"},
            ),
        ),
        function="merge",
        cases=_merges,
    ),
    Exercise(
        "bpe_train",
        "tokenizer.reference",
        """\
Learning repeats one step: count the pairs of neighbours over all words, each as often as its word
occurs, and merge the most frequent pair everywhere. Among equal counts the smallest pair of ids
goes first. The k-th merge makes the id first_id + n_symbols + k, and counting anew after each
merge is right, if slow. A pair is left out that is rarer than min_count, or that stands for more
than max_length symbols of the first kind.""",
        (
            Mistake(
                "is every word counted once? It counts as often as it occurs.",
                {"weights = list(words.values())": "weights = [1] * len(ids)"},
            ),
            Mistake(
                "do equal counts go to the greater pair? Here the smallest goes first.",
                GREATER,
            ),
            Mistake(
                "may a pair stand for any number of symbols? max_length is the most.",
                ENDLESS,
            ),
            Mistake(
                "do equal counts go to the greater pair? Here the smallest goes first.",
                {**GREATER, **ENDLESS},
            ),
            Mistake(
                "do new symbols make no pairs? A merge may be part of a later one.",
                {"        for now in born:\n": "        for now in set[Pair]():\n"},
            ),
        ),
        function="train",
        given=("merge",),
        cases=_texts,
    ),
    Exercise(
        "bpe_encode",
        "tokenizer.reference",
        """\
Encoding replays the merges in the order in which they were learned: of all pairs that are present,
merge the one of lowest rank, the leftmost among equals. ranks says for a pair its rank and the id
that it becomes. Stop when no pair of neighbours has a rank.""",
        (
            Mistake(
                "is the leftmost pair merged first? The one learned earliest goes first.",
                {"rank, new, _ = min(present)": "rank, new, _ = present[0]"},
            ),
            Mistake(
                "is the longest way taken, the merge learned last? The earliest goes first.",
                {"rank, new, _ = min(present)": "rank, new, _ = max(present)"},
            ),
            Mistake(
                "does it stop after one merge? A merge makes new pairs.",
                {
                    "                symbols[i : i + 2] = [new]\n                break\n    return "
                    "symbols": "                symbols[i : i + 2] = [new]\n                return "
                    "symbols\n    return symbols"
                },
            ),
        ),
        function="encode_symbols",
        cases=_symbols,
    ),
    Exercise(
        "viterbi",
        "tokenizer.study.unigram",
        """\
A unigram model gives each piece a probability, and a way to cut a word the product of its pieces'.
best[j] is the best log-probability of a way to cut the first j characters, found from all pieces
that end at j; edges gives them by where they start. Remember each best last piece, and walk back
from the end; a word without a way gives [] and -inf.""",
        (
            Mistake(
                "does a piece's own probability decide? What led up to it counts as well.",
                {"score = best[i] + self.log_p[piece]": "score = self.log_p[piece]"},
            ),
            Mistake(
                "is the longest piece taken at each place? The whole way must be the best.",
                {"if score > best[j]:": "if len(piece) > len(last[j]):"},
            ),
            Mistake(
                "do the pieces come back from the last to the first?",
                {"return pieces[::-1], best[len(word)]": "return pieces, best[len(word)]"},
            ),
        ),
        function="Unigram.viterbi",
        cases=_pieces,
        arguments=2,
    ),
)
