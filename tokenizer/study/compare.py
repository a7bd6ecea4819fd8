"""One small table: four ways to cut text into tokens, on the same text.

Byte-level BPE keeps the text whole. The others work on words between white space, whose width they
lose; they are measured in the same unit, bytes of the text per token. Times are of readable Python
for the three, of kernels for byte-level BPE. Words of more than 1,000 characters are left out for
all four, and counted below the table: character BPE takes time quadratic in the length of a word.
"""

import re
import time
from collections import Counter
from collections.abc import Callable

from tokenizer.study import character_bpe, unigram, word_level
from tokenizer.training import train_from_iterator

MAX_WORD = 1000  # characters
_MARK = "▁"  # begins a word, as in SentencePiece
_LONG = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def table(text: str, vocab_size: int) -> str:
    """Train four tokenizers of about ``vocab_size`` on a text and return a table of what they do.

    Raises
    ------
    ValueError
        If the text holds no word, or only words of more than 1,000 characters.
    """
    text, n_long = _LONG.subn("", text)
    train_from_iterator(["a b"], 276).encode_ordinary("a b")  # compiles what is to be timed
    words = Counter(text.split())
    if not words:
        too_long = f" of up to {MAX_WORD:,} characters" if n_long else ""
        raise ValueError(f"the text holds no word to compare tokenizers on{too_long}")
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    rows = [("", "vocabulary", "bytes/token", "unknown", "train s", "encode s")]

    def add(name: str, train: Callable[[], tuple[int, Callable[[], tuple[int, int]]]]) -> None:
        start = time.perf_counter()
        size, encode = train()
        trained = time.perf_counter()
        n_tokens, n_unknown = encode()
        rows.append(
            (
                name,
                f"{size:,}",
                f"{n_bytes / n_tokens:.2f}",
                f"{n_unknown / n_tokens:.1%}",
                f"{trained - start:.2f}",
                f"{time.perf_counter() - trained:.2f}",
            )
        )

    def byte_level() -> tuple[int, Callable[[], tuple[int, int]]]:
        model = train_from_iterator([text], vocab_size)
        return model.n_vocab, lambda: (len(model.encode_ordinary(text)), 0)

    def characters() -> tuple[int, Callable[[], tuple[int, int]]]:
        n_first = len({character for word in words for character in word}) + 1
        model = character_bpe.train(words, max(vocab_size - n_first, 0))
        return len(model.symbols), lambda: (
            sum(n * len(model.encode(word)) for word, n in words.items()),
            0,
        )

    def unigrams() -> tuple[int, Callable[[], tuple[int, int]]]:
        marked = {_MARK + word: n for word, n in words.items()}
        model = unigram.train(marked, vocab_size)
        return len(model.log_p), lambda: (
            sum(n * len(model.viterbi(word)[0]) for word, n in marked.items()),
            0,
        )

    def whole_words() -> tuple[int, Callable[[], tuple[int, int]]]:
        model = word_level.train(Counter(word_level.split(text)), vocab_size)

        def encode() -> tuple[int, int]:
            ids = model.encode(text)
            return len(ids), ids.count(0)

        return len(model.words), encode

    add("byte-level BPE", byte_level)
    add("character BPE", characters)
    add("unigram LM", unigrams)
    add("word level", whole_words)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *right]))
    if n_long:
        lines.append(f"left out: {n_long:,} words of more than {MAX_WORD:,} characters")
    return "\n".join(lines)
