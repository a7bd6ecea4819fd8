"""Training: kernels against the readable trainer, and that against one that recounts everything."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tokenizer_texts import corpus, data, words
from tokenizer import GPT2, GPT4, reference, train_from_iterator
from tokenizer.classes import installed_classes
from tokenizer.counting import WordCounter, Words, count_words
from tokenizer.kernels.train import learn_merges
from tokenizer.patterns import compiled
from tokenizer.reference import MAX_TOKEN_BYTES


def by_word(found: Words) -> dict[bytes, int]:
    flat, ends = found.flat.tobytes(), pairwise(found.offsets.tolist())
    return {flat[a:b]: n for (a, b), n in zip(ends, found.counts.tolist(), strict=True)}


def naive(
    counts: dict[bytes, int], n_merges: int, min_count: int, max_bytes: int
) -> list[tuple[int, int]]:
    """Recount all pairs before every merge."""
    size = [1] * 256
    ids = [(list(word), n) for word, n in counts.items()]
    merges: list[tuple[int, int]] = []
    for new in range(256, 256 + n_merges):
        pairs: Counter[tuple[int, int]] = Counter()
        for symbols, n in ids:
            for a, b in pairwise(symbols):
                if size[a] + size[b] <= max_bytes:
                    pairs[a, b] += n
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < min_count:
            break
        merges.append(best)
        size.append(size[best[0]] + size[best[1]])
        ids = [(reference.merge(symbols, best, new), n) for symbols, n in ids]
    return merges


def fast(
    counts: dict[bytes, int], n_merges: int, min_count: int, max_bytes: int = 4096
) -> list[tuple[int, int]]:
    left, right, _ = learn_merges(*Words.of(counts), 0, n_merges, min_count, max_bytes)
    return list(zip(left.tolist(), right.tolist(), strict=True))


@given(words, st.integers(0, 40), st.integers(1, 3), st.sampled_from([2, 3, 5, 8, 4096]))
def test_both_trainers_learn_what_recounting_learns(
    counts: dict[bytes, int], n_merges: int, min_count: int, max_bytes: int
) -> None:
    expected = naive(counts, n_merges, min_count, max_bytes)
    learned = reference.train(counts, n_merges, min_count=min_count, max_length=max_bytes)
    assert learned == expected
    assert fast(counts, n_merges, min_count, max_bytes) == expected


def test_no_token_grows_beyond_what_a_file_may_hold() -> None:
    tokenizer = train_from_iterator(["ab" * 20_000] * 2, 400)
    longest = max(map(len, tokenizer.vocabulary.tokens.values()))
    assert MAX_TOKEN_BYTES // 2 < longest <= MAX_TOKEN_BYTES


@given(words, st.randoms(use_true_random=False))
def test_merges_do_not_depend_on_the_order_of_words(
    counts: dict[bytes, int], rng: random.Random
) -> None:
    shuffled = list(counts.items())
    rng.shuffle(shuffled)
    assert fast(dict(shuffled), 30, 1) == fast(counts, 30, 1)


@given(words, st.randoms(use_true_random=False))
def test_merges_do_not_depend_on_how_counts_are_split(
    counts: dict[bytes, int], rng: random.Random
) -> None:
    pieces = []
    for word, n in counts.items():
        first = rng.randint(0, n)
        pieces += [(word, part) for part in (first, n - first) if part]
    rng.shuffle(pieces)
    ends = np.cumsum([0, *(len(word) for word, _ in pieces)])
    flat = np.frombuffer(b"".join(word for word, _ in pieces), np.uint8)
    left, right, _ = learn_merges(flat, ends, np.array([n for _, n in pieces]), 0, 30, 1, 4096)
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == fast(counts, 30, 1)


def test_both_trainers_agree_on_real_text() -> None:
    counts = by_word(count_words(corpus()[::4], GPT4, installed_classes(), 1))
    expected = reference.train(counts, 2000, first_id=4, min_count=2)
    left, right, _ = learn_merges(*Words.of(counts), 4, 2000, 2, 4096)
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == expected


@pytest.mark.parametrize("pattern", [GPT4, GPT2, r"\w+|\W"])
@given(st.lists(data, max_size=6))
def test_words_are_counted_as_the_reference_counts_them(pattern: str, texts: list[bytes]) -> None:
    expected: Counter[bytes] = Counter()
    for text in texts:
        expected.update(reference.split(text, compiled(pattern), installed_classes()))
    for n_threads in (1, 2):
        found = count_words(texts, pattern, installed_classes(), n_threads)
        assert by_word(found) == dict(expected)


def test_word_tables_grow_and_add_up() -> None:
    """Many more distinct words, short and long, than the tables begin with."""
    rng = random.Random(0)
    many = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 60))) for _ in range(30_000)]
    text = " ".join(many + many[:5000])
    expected = Counter(reference.split(text.encode(), compiled(GPT4), installed_classes()))
    one = WordCounter(GPT4, installed_classes())
    one.add([text.encode()])
    assert by_word(one.words()) == expected
    halves = [WordCounter(GPT4, installed_classes()) for _ in range(2)]
    for half, part in zip(halves, (text[:100_000], text[100_000:]), strict=True):
        half.add([part.encode()])
    halves[0].update(halves[1])
    both = Counter(reference.split(text[:100_000].encode(), compiled(GPT4), installed_classes()))
    both.update(reference.split(text[100_000:].encode(), compiled(GPT4), installed_classes()))
    assert by_word(halves[0].words()) == both


@pytest.mark.parametrize("n_threads", [2, 3])
def test_threads_change_nothing(n_threads: int) -> None:
    texts = corpus()
    one = train_from_iterator(texts, 2000, num_threads=1)
    more = train_from_iterator(reversed(texts), 2000, num_threads=n_threads)
    assert one.sha256 == more.sha256


def test_ids_are_laid_out_as_promised() -> None:
    tokenizer = train_from_iterator(corpus(), 1000)
    assert tokenizer.n_vocab == 1000
    assert {tokenizer.special_tokens[f"<|{n}|>"] for n in ("pad", "bos", "eos", "unk")} == {
        *range(4)
    }
    controls = [
        tokenizer.special_tokens[f"<|{n}|>"] for n in ("system", "user", "assistant", "end")
    ]
    assert controls == [984, 985, 986, 987]
    assert sorted(tokenizer.special_tokens.values()) == [*range(4), *range(984, 1000)]
    assert all(tokenizer.token_bytes(4 + byte) == bytes([byte]) for byte in range(256))
    assert tokenizer.encode("<|user|>", allowed_special="all") == [985]


def test_a_full_vocabulary_has_the_promised_control_ids() -> None:
    rng = random.Random(1)
    text = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(60_000))
    tokenizer = train_from_iterator([text], 65_536, min_count=1)
    assert tokenizer.n_vocab == 65_536 and tokenizer.dtype == np.uint16
    assert tokenizer.special_tokens["<|system|>"] == 65_520
    assert tokenizer.special_tokens["<|end|>"] == 65_523
    assert max(tokenizer.encode_ordinary(text)) < 65_520


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    tokenizer = train_from_iterator(["abab"], 1000)
    assert tokenizer.n_vocab == 277 and tokenizer.encode_ordinary("abab") == [260, 260]
    assert train_from_iterator([], 1000).n_vocab == 276


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"vocab_size": 275}, "vocab_size must be 276 to 65536, got 275"),
        ({"vocab_size": 65537}, "vocab_size must be 276 to 65536, got 65537"),
        ({"vocab_size": 300, "min_count": 0}, "min_count must be 1 to"),
        ({"vocab_size": 300, "min_count": 1 << 32}, "min_count must be 1 to"),
        ({"vocab_size": 300, "num_threads": 0}, "number of threads must be 1 to"),
        ({"vocab_size": 300, "num_threads": 10**6}, "number of threads must be 1 to"),
        ({"vocab_size": 300, "pattern": "["}, "not a regular expression"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_from_iterator(["text"], **arguments)  # type: ignore[arg-type]


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="texts must be str or bytes, got int"):
        train_from_iterator([1], 300)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="several texts, got one str"):
        train_from_iterator("text", 300)


def test_counts_beyond_32_bits_are_refused_not_wrapped() -> None:
    flat, offsets, counts = Words.of({b"ab": 1 << 32})
    left, _, most = learn_merges(flat, offsets, counts, 4, 10, 2, 4096)
    assert left.size == 0 and most == 1 << 32
    left, _, _ = learn_merges(flat, offsets, counts - 1, 4, 10, 2, 4096)
    assert left.size == 1
