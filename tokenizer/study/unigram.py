r"""Unigram language model: start with too many pieces, keep those the text needs.

Kudo, "Subword Regularization" (2018), section 3.2. A segmentation x = x_1 ... x_m of a word has
the probability P(x) = \prod p(x_i), and a word the sum over its segmentations. Training:

1. Seed: all characters, and the substrings of words with the greatest count times length.
2. EM: expected counts of pieces over all segmentations (forward-backward), then new p.
3. Prune: drop the pieces whose loss would lower the likelihood least, a quarter at a time; again 2.

Where SentencePiece's trainer differs from the paper, this follows SentencePiece, and says so:

- The M-step takes ``exp(digamma(c))`` for the expected count c in place of c, a variational-Bayes
  estimate that starves rare pieces, and drops pieces with c < 0.5. ``sparse=False`` is plain EM.
- The paper's loss of a piece is the likelihood lost if it alone is taken away. SentencePiece
  replaces the piece by its own second-best segmentation wherever the best one of the text has it.
- Pruning stops at 1.1 times the size asked for; then the most probable pieces are kept.

``prune_by="probability"`` keeps the most probable pieces in step 3 instead, as some ports do.
Characters are never dropped, so every word over them has a segmentation.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

MAX_PIECE = 12  # characters
SHRINK = 0.75
_MIN_EXPECTED = 0.5  # SentencePiece's kExpectedFrequencyThreshold


class Unigram(NamedTuple):
    """Pieces and the logarithms of their probabilities."""

    log_p: dict[str, float]

    def edges(self, word: str, without: str | None = None) -> Iterator[tuple[int, int, str]]:
        """Yield (start, stop, piece) for every piece in a word, by start."""
        for i in range(len(word)):
            for j in range(i + 1, min(len(word), i + MAX_PIECE) + 1):
                piece = word[i:j]
                if piece in self.log_p and piece != without:
                    yield i, j, piece

    def viterbi(self, word: str, without: str | None = None) -> tuple[list[str], float]:
        """Return the most probable segmentation and its log-probability.

        Without one piece, if that is named. ``([], -inf)`` if there is no segmentation.
        """
        best = [0.0] + [-math.inf] * len(word)
        last = [""] * (len(word) + 1)
        for i, j, piece in self.edges(word, without):
            score = best[i] + self.log_p[piece]
            if score > best[j]:
                best[j], last[j] = score, piece
        pieces: list[str] = []
        end = len(word)
        if best[end] > -math.inf:
            while end > 0:
                pieces.append(last[end])
                end -= len(last[end])
        return pieces[::-1], best[len(word)]

    def forward(self, word: str, alpha: float = 1.0) -> list[float]:
        """Return, for each position, the log of the sum of P^alpha over all ways to it."""
        ways: list[list[float]] = [[0.0]] + [[] for _ in word]
        total = [0.0] * (len(word) + 1)
        edges = list(self.edges(word))
        k = 0
        for i in range(len(word) + 1):
            total[i] = _logsumexp(ways[i])
            while k < len(edges) and edges[k][0] == i:
                _, j, piece = edges[k]
                ways[j].append(total[i] + alpha * self.log_p[piece])
                k += 1
        return total

    def marginals(self, word: str) -> tuple[dict[str, float], float]:
        """Return the expected count of each piece in a word, and the word's log-probability."""
        before = self.forward(word)
        whole = before[-1]
        after = [-math.inf] * len(word) + [0.0]
        expected: defaultdict[str, float] = defaultdict(float)
        edges = list(self.edges(word))
        for i in range(len(word) - 1, -1, -1):
            ways = []
            while edges and edges[-1][0] == i:
                _, j, piece = edges.pop()
                ways.append(self.log_p[piece] + after[j])
                expected[piece] += math.exp(before[i] + ways[-1] - whole)
            after[i] = _logsumexp(ways)
        return dict(expected), whole

    def sample(self, word: str, rng: random.Random, alpha: float = 1.0) -> list[str]:
        """Draw a segmentation with probability proportional to P(x)^alpha (paper, section 3.3).

        By forward filtering and backward sampling, as the paper does for all segmentations (l = ∞).
        """
        before = self.forward(word, alpha)
        by_end: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        for i, j, piece in self.edges(word):
            by_end[j].append((i, piece))
        pieces = []
        end = len(word)
        while end > 0:
            scores = [
                before[i] + alpha * self.log_p[piece] - before[end] for i, piece in by_end[end]
            ]
            end, piece = rng.choices(by_end[end], [math.exp(score) for score in scores])[0]
            pieces.append(piece)
        return pieces[::-1]


def train(
    words: Mapping[str, int],
    vocab_size: int,
    *,
    sparse: bool = True,
    prune_by: Literal["loss", "probability"] = "loss",
    n_seeds: int = 50_000,
) -> Unigram:
    """Learn pieces from words and how often each occurs.

    Parameters
    ----------
    words : mapping
        Word -> count.
    vocab_size : int
        How many pieces to keep; never less than there are characters.
    sparse : bool
        SentencePiece's M-step; plain EM otherwise.
    prune_by : str
        ``"loss"`` of likelihood, or plain ``"probability"``.
    n_seeds : int
        How many substrings to begin with.
    """
    model = seed(words, n_seeds)
    characters = {character for word in words for character in word}
    target = max(int(1.1 * vocab_size), len(characters))
    while True:
        for _ in range(2):
            model, _ = em_step(model, words, characters, sparse)
        n = len(model.log_p)
        if n <= target:
            break
        keep = max(target, int(SHRINK * n)) - len(characters)
        value = losses(model, words) if prune_by == "loss" else model.log_p
        model = _keep(model, value, keep, characters)
    return _keep(model, model.log_p, max(vocab_size - len(characters), 0), characters)


def seed(words: Mapping[str, int], n_seeds: int) -> Unigram:
    """Return the characters and the ``n_seeds`` substrings of greatest count times length.

    Substrings that occur once are no candidates. SentencePiece finds them by a suffix array.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    for word, n in words.items():
        for i in range(len(word)):
            for j in range(i + 1, min(len(word), i + MAX_PIECE) + 1):
                counts[word[i:j]] += n
    longer = [piece for piece, n in counts.items() if len(piece) > 1 and n > 1]
    longer.sort(key=lambda piece: (-counts[piece] * len(piece), piece))
    pieces = [piece for piece in counts if len(piece) == 1] + longer[:n_seeds]
    total = sum(counts[piece] * len(piece) for piece in pieces)
    return Unigram({p: math.log(counts[p] * len(p)) - math.log(total) for p in pieces})


def em_step(
    model: Unigram, words: Mapping[str, int], characters: set[str], sparse: bool
) -> tuple[Unigram, float]:
    """Return the model after one E- and M-step, and the log-likelihood **before** it."""
    expected: defaultdict[str, float] = defaultdict(float)
    likelihood = 0.0
    for word, n in words.items():
        counts, log_p = model.marginals(word)
        likelihood += n * log_p
        for piece, count in counts.items():
            expected[piece] += n * count
    if sparse:
        for character in characters:
            expected[character] = max(expected[character], _MIN_EXPECTED)
        kept = {piece: count for piece, count in expected.items() if count >= _MIN_EXPECTED}
        base = digamma(sum(kept.values()))
        return Unigram({piece: digamma(count) - base for piece, count in kept.items()}), likelihood
    total = math.log(sum(expected.values()))
    # A count of zero is no piece; a character keeps a probability that any word can pay.
    floor = {character: 1e-300 for character in characters}
    positive = floor | {piece: count for piece, count in expected.items() if count > 1e-300}
    return Unigram(
        {piece: math.log(count) - total for piece, count in positive.items()}
    ), likelihood


def losses(model: Unigram, words: Mapping[str, int]) -> dict[str, float]:
    """Return the log-likelihood lost if a piece gives way to its second-best segmentation."""
    freq: defaultdict[str, float] = defaultdict(float)
    for word, n in words.items():
        for piece in model.viterbi(word)[0]:
            freq[piece] += n
    total = sum(freq.values())
    out = {}
    for piece in model.log_p:
        instead, _ = model.viterbi(piece, without=piece)
        if not instead:
            out[piece] = math.inf  # a character: nothing can replace it
        elif freq[piece] == 0:
            out[piece] = 0.0
        else:
            # Without the piece, its parts occur as often more, and there are more pieces in all.
            now = math.log(freq[piece]) - math.log(total)
            then_total = math.log(total + freq[piece] * (len(instead) - 1))
            then = sum(math.log(freq[part] + freq[piece]) - then_total for part in instead)
            out[piece] = freq[piece] * (now - then)
    return out


def digamma(x: float) -> float:
    """Return the derivative of log Gamma at x > 0: recurrence to 7, then the asymptotic series."""
    out = 0.0
    while x < 7:
        out -= 1 / x
        x += 1
    y = 1 / (x * x)
    return out + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y / 240)))


def _keep(model: Unigram, value: Mapping[str, float], n: int, characters: set[str]) -> Unigram:
    """Keep the characters and the ``n`` other pieces of greatest value; probabilities sum to 1."""
    others = [piece for piece in model.log_p if piece not in characters]
    others.sort(key=lambda piece: (-value[piece], piece))
    kept = [piece for piece in model.log_p if piece in characters] + others[:n]
    total = _logsumexp([model.log_p[piece] for piece in kept])
    return Unigram({piece: model.log_p[piece] - total for piece in kept})


def _logsumexp(values: list[float]) -> float:
    top = max(values, default=-math.inf)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(value - top) for value in values))
