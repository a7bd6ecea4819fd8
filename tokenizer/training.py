"""Train a byte-level vocabulary: count words, learn merges, lay out ids."""

from collections.abc import Iterable

from accel.threads import asked_for
from tokenizer.classes import UnicodeClasses, installed_classes
from tokenizer.counting import Words, count_words
from tokenizer.kernels.train import learn_merges
from tokenizer.patterns import NAMED, ODD, check_dialect, compiled
from tokenizer.reference import MAX_TOKEN_BYTES
from tokenizer.tokenizer import Tokenizer
from tokenizer.vocabulary import FIRST_BYTE, MAX_VOCAB, MIN_VOCAB, Vocabulary


def train_from_iterator(
    texts: Iterable[str | bytes],
    vocab_size: int,
    *,
    pattern: str = "gpt4",
    min_count: int = 2,
    num_threads: int | None = None,
) -> Tokenizer:
    """Learn a vocabulary from texts.

    Merges follow from how often each word occurs and from nothing else: not from the order of the
    texts, nor from the number of threads. Among pairs that occur equally often, the smallest pair
    of ids is merged first.

    Parameters
    ----------
    texts : iterable of str or bytes
        Each is cut into words on its own. They are read once and not kept.
    vocab_size : int
        Ids in all, 276 to 65,536: 4 special ids, 256 bytes, the merges, 16 control ids. Where the
        texts hold fewer pairs worth merging, the vocabulary is smaller; ask its ``n_vocab``.
    pattern : str
        ``"gpt4"``, ``"gpt2"`` or a regular expression that other tokenizers read as well: what a
        word is.
    min_count : int
        How often a pair must occur to be merged. What occurs once is no regularity.
    num_threads : int, optional
        Threads that count words; ``accel.threads.threads()`` if not given.

    Raises
    ------
    ValueError
        If a parameter is out of range, or the texts are more than the trainer can count.
    """
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size must be {MIN_VOCAB} to {MAX_VOCAB}, got {vocab_size}")
    if not 1 <= min_count < 1 << 32:
        raise ValueError(f"min_count must be 1 to 2^32 - 1, got {min_count}")
    n_threads = asked_for(num_threads)
    pattern = NAMED.get(pattern, pattern)
    compiled(pattern)
    check_dialect(pattern, ODD, "to other tokenizers")
    classes = installed_classes()
    words = count_words(texts, pattern, classes, n_threads)
    return Tokenizer(_learn(words, vocab_size - MIN_VOCAB, min_count, pattern, classes))


def _learn(
    words: Words, n_merges: int, min_count: int, pattern: str, classes: UnicodeClasses
) -> Vocabulary:
    if words.flat.size >= 1 << 31:
        raise ValueError(
            f"the distinct words hold {words.flat.size:,} bytes, more than the 2^31 - 1 that can "
            "be numbered: train on a part of the texts"
        )
    left, right, most = learn_merges(*words, FIRST_BYTE, n_merges, min_count, MAX_TOKEN_BYTES)
    if most >= 1 << 32:
        raise ValueError(
            f"a pair of bytes occurs {most:,} times, more than the 2^32 - 1 that can be counted: "
            "train on a part of the texts"
        )
    return Vocabulary.learned(left, right, pattern, classes)
