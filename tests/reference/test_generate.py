"""Generation: the cache changes nothing, and every way to choose does what it says."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import model, ops
from reference.generate import filter_logits, generate, sample, stream
from reference.params import decoder_layout
from reference.softmax import softmax
from tests.helpers.models import MODELS

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]


def parameters(name: str) -> dict[str, Any]:
    layout = decoder_layout(MODELS[name])
    flat = layout.init(1, np.float64)
    return layout.views(flat + 0.2 * np.random.default_rng(1).standard_normal(layout.size))


@pytest.mark.parametrize("name", MODELS)
def test_cached_and_uncached_logits_agree(name: str) -> None:
    """Prompts of unequal length, then five tokens more, against the whole text read at once."""
    config, params = MODELS[name], parameters(name)
    rng = np.random.default_rng(0)
    texts = [[*prompt, *rng.integers(0, config.vocab_size, 5)] for prompt in PROMPTS]
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    ids = np.full((3, lengths.max()), 7, np.int32)  # 7 is padding, which must not matter
    for row, prompt in zip(ids, PROMPTS, strict=True):
        row[: len(prompt)] = prompt

    cache = ops.kv_cache(params, config, 3, 10)
    scores = model.prefill(ops, params, config, ids, lengths, cache)
    for n in range(6):
        for b, text in enumerate(texts):
            read = np.array([text[: lengths[b] + n]], np.int32)
            expected = model.logits(ops, params, config, read)[0, -1]
            np.testing.assert_allclose(scores[b], expected, rtol=1e-9, atol=1e-11)
        if n < 5:
            token = np.array([text[lengths[b] + n] for b, text in enumerate(texts)], np.int32)
            scores = ops.decode_step(params, config, token, cache, lengths + n)


def test_decode_step_takes_one_position_for_all_rows() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    both = []
    for position in (0, np.array([0, 0])):
        cache = ops.kv_cache(params, config, 2, 4)
        both.append(ops.decode_step(params, config, np.array([5, 6], np.int32), cache, position))
    np.testing.assert_array_equal(both[0], both[1])
    with pytest.raises(ValueError, match=r"position must lie in 0\.\.3"):
        ops.decode_step(params, config, np.array([5, 6], np.int32), cache, 4)


def test_greedy_generation_follows_the_uncached_model() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    rows = generate(ops, params, config, PROMPTS, max_new_tokens=4, temperature=0)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        text = list(prompt)
        for token in row:
            assert token == np.argmax(model.logits(ops, params, config, np.array([text]))[0, -1])
            text.append(token)
        assert len(row) == 4


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-8])
def test_a_temperature_near_zero_takes_the_most_likely(temperature: float) -> None:
    logits = np.array([-700.0, 3.0, 2.0, -1e300, 80.0, 79.999])
    for top_k, top_p in ((None, None), (3, None), (None, 0.9), (4, 1.0)):
        rng = np.random.default_rng(0)
        drawn = sample(logits, rng, temperature=temperature, top_k=top_k, top_p=top_p)
        assert drawn == 4


def test_an_infinite_temperature_draws_all_alike() -> None:
    rng = np.random.default_rng(0)
    logits = np.array([-700.0, 3.0, 80.0])
    assert {sample(logits, rng, temperature=np.inf) for _ in range(100)} == {0, 1, 2}


def test_a_row_s_draws_do_not_depend_on_the_batch() -> None:
    config, params = MODELS["gpt2"], parameters("gpt2")
    options: dict[str, Any] = {"max_new_tokens": 6, "seed": 5, "top_k": 20, "top_p": 0.95}
    together = generate(ops, params, config, PROMPTS, **options)
    assert together == generate(ops, params, config, PROMPTS, **options)
    assert together[0] == generate(ops, params, config, PROMPTS[:1], **options)[0]
    assert together != generate(ops, params, config, PROMPTS, **{**options, "seed": 6})


def test_rows_with_one_prompt_draw_apart() -> None:
    config, params = MODELS["gpt2"], parameters("gpt2")
    a, b = generate(ops, params, config, PROMPTS[:1] * 2, max_new_tokens=6, temperature=3.0)
    assert a != b


def test_generation_stops_at_a_stop_token_and_at_the_end_of_the_context() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    free = generate(ops, params, config, PROMPTS, max_new_tokens=99, temperature=0)
    # the context holds 12; the prediction from the last place is given, but cannot be read
    assert [len(row) for row in free] == [12 - len(prompt) + 1 for prompt in PROMPTS]
    stopped = generate(
        ops, params, config, PROMPTS, max_new_tokens=99, temperature=0, stop={free[0][2]}
    )
    assert stopped[0] == free[0][: free[0].index(free[0][2])]
    first = [row[0] for row in free]  # each of several tokens stops
    assert generate(ops, params, config, PROMPTS, max_new_tokens=9, temperature=0, stop=first) == [
        [] for _ in PROMPTS
    ]
    steps = list(stream(ops, params, config, PROMPTS, max_new_tokens=3, temperature=0))
    assert [[step[b] for step in steps] for b in range(3)] == [row[:3] for row in free]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[1], []], {}, "at least one token"),
        ([[1] * 13], {}, "13 tokens is longer than the model's context of 12"),
        ([[1], [2, 99]], {}, r"prompts\[1\]\[1\] is 99"),
        ([[2**40]], {}, r"prompts\[0\]\[0\] is 1099511627776"),
        ([[1.7]], {}, r"prompts\[0\] must be integers \(int32\), got float64"),
        ([[[1, 2]]], {}, r"prompts\[0\] must be one row of ids, got shape \(1, 2\)"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([[1]], {"temperature": -1.0}, "temperature must be >= 0"),
        ([[1]], {"temperature": float("nan")}, "temperature must be >= 0"),
        ([[1]], {"top_k": 0}, "top_k must be >= 1, got 0"),
        ([[1]], {"top_p": 0.0}, r"top_p is a probability in \(0, 1\]"),
        ([[1]], {"min_p": 1.5}, r"min_p is a probability in \(0, 1\]"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty must be 1e-9"),
    ],
)
def test_bad_requests_are_refused(
    prompts: list[list[int]], options: dict[str, Any], message: str
) -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    with pytest.raises(ValueError, match=message):
        generate(ops, params, config, prompts, **{"max_new_tokens": 2, **options})


# ---- choosing ------------------------------------------------------------------------------------

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))


def kept(**options: Any) -> set[int]:
    return set(np.flatnonzero(np.isfinite(filter_logits(LOGITS, **options))).tolist())


def test_top_k_and_top_p_keep_the_best() -> None:
    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=2) == {1, 3}
    assert kept(top_k=99) == {0, 1, 2, 3, 4}
    assert kept(top_p=0.39) == {1}  # never fewer than one
    assert kept(top_p=0.41) == {1, 3}
    assert kept(top_p=0.8) == {1, 3, 4}
    assert kept(top_p=1.0) == {0, 1, 2, 3, 4}
    # in combination the nucleus is of what top-k left: 0.4/0.7 = 0.57
    assert kept(top_k=2, top_p=0.5) == {1}
    assert set(np.flatnonzero(np.isfinite(filter_logits(np.zeros(4), top_k=2)))) == {0, 1}
    some = filter_logits(np.array([3.0, 1.0, 1.0, 1.0]), top_k=2)
    assert np.isfinite(some).tolist() == [True, True, False, False]
    # two of four hold one half exactly, and that is enough
    assert set(np.flatnonzero(np.isfinite(filter_logits(np.zeros(4), top_p=0.5)))) == {0, 1}


@given(
    st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 0.5000001, 3.0]), min_size=1, max_size=40),
    st.integers(1, 45) | st.none(),
    st.sampled_from([1e-9, 0.3, 0.5, 0.999, 1.0, None]),
    st.sampled_from([1e-9, 0.3, 1.0, None]),
)
def test_what_is_kept_is_the_beginning_of_a_stable_sort(
    values: list[float], top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    logits = np.array([1.0, *values])
    order = np.argsort(-logits, kind="stable")[:top_k]
    if top_p is not None:
        p = softmax(logits[order])
        order = [i for n, i in enumerate(order) if n == 0 or np.cumsum(p)[n - 1] < top_p]
    if min_p is not None:
        order = [i for i in order if logits[i] >= logits[order[0]] + np.log(min_p)]
    expected = np.full_like(logits, -np.inf)
    expected[order] = logits[order]
    np.testing.assert_array_equal(filter_logits(logits, top_k, top_p, min_p), expected)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 1.0, 2.0]))
def test_samples_follow_the_distribution(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    n = 2_000
    drawn = [sample(LOGITS, rng, temperature=temperature, top_k=4) for _ in range(n)]
    p = softmax(filter_logits(LOGITS / temperature, top_k=4))
    share = np.bincount(drawn, minlength=5) / n
    assert share[2] == 0
    # six standard deviations
    assert (np.abs(share - p) <= 6 * np.sqrt(p * (1 - p) / n)).all()


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        sample(np.array([0.0, np.nan]), np.random.default_rng(0))


def test_min_p_keeps_what_is_not_much_less_likely_than_the_best() -> None:
    kept = np.isfinite(filter_logits(LOGITS, min_p=0.3))
    assert kept.tolist() == [False, True, False, True, True]  # 0.4, 0.3, 0.15 >= 0.12
    assert np.isfinite(filter_logits(LOGITS, min_p=1.0)).sum() == 1
    rng = np.random.default_rng(0)
    assert {sample(LOGITS, rng, min_p=0.3) for _ in range(200)} == {1, 3, 4}


def test_what_was_said_becomes_less_likely_whatever_its_sign() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1])
    rng = np.random.default_rng(0)
    assert sample(logits, rng, temperature=0, repetition_penalty=1.2) == 0
    assert sample(logits, rng, said=[0, 0], temperature=0, repetition_penalty=1.2) == 1
    assert sample(logits, rng, said=[0, 1], temperature=0, repetition_penalty=1e9) == 0
    below = np.array([-1.0, -1.1])
    assert sample(below, rng, said=[0], temperature=0, repetition_penalty=1.2) == 1
    assert logits.tolist() == [2.0, 1.9, -1.0, -1.1]  # not written into
    # half of what is small is small, too
    assert sample(np.array([0.5, 0.3]), rng, said=[0], temperature=0, repetition_penalty=2.0) == 1


class Drawn:
    """Stands in for a generator: what it draws is known."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def test_the_ends_of_the_distribution_are_kept_tokens() -> None:
    rngs: list[Any] = [Drawn(0.0), Drawn(1.0)]
    # neither the first nor the last is kept
    assert [sample(np.array([0.0, 5.0, 5.0, 0.0]), rng, top_k=2) for rng in rngs] == [1, 2]


def test_a_row_s_own_tokens_are_what_was_said() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    how = {"max_new_tokens": 8, "temperature": 0, "repetition_penalty": 1e9}
    for row in generate(ops, params, config, [[1, 2], [3]], **how):
        assert len(set(row)) == len(row) == 8
