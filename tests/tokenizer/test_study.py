"""The study variants: what their papers say of them."""

import itertools
import math
import random
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tokenizer_texts import corpus
from tokenizer import reference
from tokenizer.study import character_bpe, unigram, word_level
from tokenizer.study.compare import table

short_words = st.dictionaries(
    st.text("abc", min_size=1, max_size=8), st.integers(1, 9), min_size=1, max_size=8
)


def book() -> Counter[str]:
    return Counter(" ".join(corpus()[:6]).split())


# --- character BPE


@given(short_words, st.integers(0, 12))
def test_k_merges_add_k_symbols(words: dict[str, int], k: int) -> None:
    none = character_bpe.train(words, 0)
    assert len(none.symbols) == len(set("".join(words))) + 1
    some = character_bpe.train(words, k)
    possible = len(character_bpe.train(words, 1000).symbols) - len(none.symbols)
    assert len(some.symbols) == len(none.symbols) + min(k, possible)
    for word in words:
        assert some.decode(some.encode(word)) == word


def test_the_marker_tells_the_end_of_a_word_from_its_middle() -> None:
    """The paper's example words; `est` ends lowest and newest."""
    model = character_bpe.train({"low": 5, "lower": 2, "newest": 6, "widest": 3}, 10)
    assert "est</w>" in model.symbols and "low" in model.symbols
    assert [model.symbols[i or 0] for i in model.encode("lowest")] == ["low", "est</w>"]
    ids = [i for word in ("low", "newest") for i in model.encode(word)]
    assert model.decode(ids) == "low newest"


def test_unknown_characters_are_unknown_and_their_neighbours_are_not() -> None:
    model = character_bpe.train({"low": 5}, 3)
    ids = model.encode("lo中w")
    assert ids.count(None) == 1 and model.decode(ids) == "lo\ufffdw"


# --- unigram


def segmentations(model: unigram.Unigram, word: str) -> dict[tuple[str, ...], float]:
    """Return every segmentation and its log-probability, by brute force."""
    out = {}
    for cuts in itertools.product([False, True], repeat=len(word) - 1):
        pieces, start = [], 0
        for end in [i + 1 for i, cut in enumerate(cuts) if cut] + [len(word)]:
            pieces.append(word[start:end])
            start = end
        if all(piece in model.log_p for piece in pieces):
            out[tuple(pieces)] = sum(model.log_p[piece] for piece in pieces)
    return out


def trained(words: dict[str, int], steps: int = 1) -> unigram.Unigram:
    model = unigram.seed(words, 100)
    for _ in range(steps):
        model, _ = unigram.em_step(model, words, set("".join(words)), sparse=False)
    return model


@given(short_words, st.integers(0, 2))
def test_marginals_are_those_of_brute_force(words: dict[str, int], steps: int) -> None:
    model = trained(words, steps)
    for word in words:
        every = segmentations(model, word)
        whole = sum(math.exp(log_p) for log_p in every.values())
        expected: Counter[str] = Counter()
        for pieces, log_p in every.items():
            for piece in pieces:
                expected[piece] += math.exp(log_p) / whole  # type: ignore[assignment]
        found, log_p = model.marginals(word)
        assert log_p == pytest.approx(math.log(whole), abs=1e-9)
        assert model.forward(word)[-1] == pytest.approx(log_p, abs=1e-9)
        for piece in expected | found:
            assert found.get(piece, 0) == pytest.approx(expected[piece], abs=1e-9)


@given(short_words, st.integers(0, 2))
def test_viterbi_beats_every_segmentation(words: dict[str, int], steps: int) -> None:
    model = trained(words, steps)
    for word in words:
        pieces, log_p = model.viterbi(word)
        every = segmentations(model, word)
        assert "".join(pieces) == word and log_p == pytest.approx(every[tuple(pieces)], abs=1e-9)
        assert log_p >= max(every.values()) - 1e-9
        forbidden = pieces[0]
        second, log_p = model.viterbi(word, without=forbidden)
        rest = [score for way, score in every.items() if forbidden not in way]
        assert forbidden not in second
        assert log_p == (pytest.approx(max(rest), abs=1e-9) if rest else -math.inf)


@given(short_words)
def test_plain_em_never_lowers_the_likelihood(words: dict[str, int]) -> None:
    model = unigram.seed(words, 100)
    before = -math.inf
    for _ in range(6):
        model, likelihood = unigram.em_step(model, words, set("".join(words)), sparse=False)
        assert likelihood >= before - 1e-9 * abs(likelihood)
        assert sum(map(math.exp, model.log_p.values())) == pytest.approx(1)
        before = likelihood


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_samples_come_with_their_probability(alpha: float) -> None:
    words = {"abab": 3, "ab": 5, "abc": 2, "aab": 1}
    model, rng = trained(words), random.Random(0)
    every = segmentations(model, "abab")
    whole = sum(math.exp(alpha * log_p) for log_p in every.values())
    n = 4000
    seen = Counter(tuple(model.sample("abab", rng, alpha)) for _ in range(n))
    assert set(seen) <= set(every)
    for pieces, log_p in every.items():
        p = math.exp(alpha * log_p) / whole
        assert abs(seen[pieces] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1


@pytest.mark.parametrize("options", [{}, {"sparse": False}, {"prune_by": "probability"}])
def test_training_reaches_the_size_and_keeps_every_character(options: dict[str, object]) -> None:
    words = book()
    characters = {character for word in words for character in word}
    model = unigram.train(words, 400, n_seeds=2000, **options)  # type: ignore[arg-type]
    assert len(model.log_p) == 400 and characters <= set(model.log_p)
    assert sum(map(math.exp, model.log_p.values())) == pytest.approx(1)
    for word in words:
        assert "".join(model.viterbi(word)[0]) == word


def test_pruning_by_loss_keeps_more_likelihood_than_dropping_at_random() -> None:
    words = book()
    characters = {character for word in words for character in word}

    def likelihood(model: unigram.Unigram) -> float:
        return unigram.em_step(model, words, characters, sparse=False)[1]

    model = unigram.train(words, 400, n_seeds=2000)
    start = unigram.seed(words, 2000)
    value = dict(
        zip(start.log_p, random.Random(0).sample(range(10**6), len(start.log_p)), strict=True)
    )
    blind = unigram._keep(start, value, 400 - len(characters), characters)
    for _ in range(4):
        blind, _ = unigram.em_step(blind, words, characters, sparse=True)
    assert likelihood(model) > likelihood(blind)


def test_digamma_has_known_values() -> None:
    gamma = 0.5772156649015329
    assert unigram.digamma(1.0) == pytest.approx(-gamma, abs=1e-10)
    assert unigram.digamma(0.5) == pytest.approx(-gamma - 2 * math.log(2), abs=1e-10)
    assert unigram.digamma(10.0) == pytest.approx(
        -gamma + sum(1 / k for k in range(1, 10)), abs=1e-10
    )


# --- word level, and the table


def test_words_beyond_the_vocabulary_are_unknown() -> None:
    model = word_level.train({"the": 9, "cat": 4, "sat": 4, "mat": 1}, 3)
    assert model.words == ["<unk>", "the", "cat"]
    assert model.encode("the cat sat.") == [1, 2, 0, 0]
    assert model.decode([1, 2, 0]) == "the cat <unk>"


def test_the_table_compares_four_tokenizers() -> None:
    lines = table(" ".join(corpus()[:2])[:20_000], 400).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "byte-level BPE",
        "character BPE",
        "unigram LM",
        "word level",
    ]
    assert all(float(line.split()[-4]) > 1 for line in lines[1:])
    text = " ".join(corpus()[:2])[:5000]
    long = "ab" * 100_000
    assert "left out" not in table(text + " " + "c" * 1000, 400)
    # sizes and bytes per token: as without that word
    found, expected = (table(t, 400).splitlines() for t in (f"{text} {long} {long}", f"{text}  "))
    assert found[-1] == "left out: 2 words of more than 1,000 characters"
    assert [line.split()[-5:-2] for line in found[:-1]] == [x.split()[-5:-2] for x in expected]
    with pytest.raises(ValueError, match="holds no word"):
        table(long, 400)
    with pytest.raises(ValueError, match="holds no word"):
        table(" \n", 400)


# --- the merges of a poem, one by one ------------------------------------------------------------


def test_what_is_printed_of_ten_merges_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    reference.main()
    said = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +'(.*)' \+ '(.*?)' +(\d+) +(\d+) +(\d+)$", said, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    # the poem again, as strings, each merge by replacing text between marks
    poem = said[: said.index("\n\n")] + "\n"
    words = [f"·{'·'.join(word)}·" for word in re.findall(r" ?\w+|\n|,", poem)]
    assert "".join(words).replace("·", "") == poem
    for _, left, right, times, _, n_tokens in rows:
        pairs: Counter[tuple[str, str]] = Counter()
        for word in words:
            pairs.update(pairwise(word.strip("·").split("·")))
        assert pairs[left, right] == int(times) == max(pairs.values())
        words = [word.replace(f"·{left}·{right}·", f"·{left}{right}·") for word in words]
        assert sum(word.count("·") - 1 for word in words) == int(n_tokens)
    assert "after 10 merges   ␣ · s · low · e · s · t" in said
