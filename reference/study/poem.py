"""The poem that the study models learn: short, and full of words that come back.

"the" is followed by five different words, so one word of context does not tell what comes next; all
the words before it do. The end of a line is a word too.
"""

import numpy as np

from reference.types import Array, Ids

POEM = """\
the tide comes in the tide goes out
the moon looks down upon the sea
the boat goes out the boat comes in
the sea looks up at you and me
the sun comes up the sun goes down
the moon looks out at land and sea
the tide goes out the tide comes in
and you look up and so do we
"""


def encode(text: str = POEM) -> tuple[Ids, list[str]]:
    """Return the ids of the words (N,), and the vocabulary in order of first appearance."""
    words = [word for line in text.splitlines() for word in [*line.split(), "\n"]]
    vocabulary = list(dict.fromkeys(words))
    number = {word: i for i, word in enumerate(vocabulary)}
    return np.array([number[word] for word in words], dtype=np.int32), vocabulary


def between_marks(text: str) -> tuple[Ids, list[str]]:
    """Return the ids of <start>, the words and <end>, and the vocabulary."""
    ids, words = encode(text)
    return np.concatenate([[len(words)], ids, [len(words) + 1]]), [*words, "<start>", "<end>"]


def decode(ids: Ids, vocabulary: list[str]) -> str:
    """Return the text of ids (N,): words with a space between, except around ends of lines."""
    text = " ".join(vocabulary[i] for i in ids)
    return text.replace(" \n", "\n").replace("\n ", "\n")


def bigram_counts(ids: Ids, vocab_size: int) -> Array:
    """Return how often word y follows word x, as (V, V) indexed [x, y]."""
    counts = np.zeros((vocab_size, vocab_size))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    return counts


def bigram_entropy(counts: Array) -> float:
    """Return the entropy, in nats, of the next word given one word: Σ_xy q(x, y) (-log q(y | x)).

    A model that sees one word predicts some p(y | x). Its mean loss on the text is
    Σ_xy q(x, y) (-log p(y | x)), which exceeds this entropy by Σ_x q(x) KL(q(·|x) ‖ p(·|x)) ≥ 0.
    """
    joint = counts / counts.sum()
    conditional = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    seen = counts > 0
    return float(np.sum(joint[seen] * -np.log(conditional[seen]))) + 0.0
