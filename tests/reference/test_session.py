"""A text that grows in turns is read as the whole of it would be."""

from typing import Any

import numpy as np
import pytest

from reference import model, ops
from reference.generate import stream
from reference.params import decoder_layout
from reference.session import Session
from tests.helpers.models import MODELS


def parameters(name: str) -> dict[str, Any]:
    layout = decoder_layout(MODELS[name])
    flat = layout.init(1, np.float64)
    return layout.views(flat + 0.2 * np.random.default_rng(1).standard_normal(layout.size))


def greedy(session: Session, n: int, **more: Any) -> list[int]:
    return list(session.write(n, rng=np.random.default_rng(0), temperature=0, **more))


def follow(name: str, session: Session, ids: list[int], n: int) -> list[int]:
    """Return n tokens chosen by reading the whole text each time."""
    config, params, found = MODELS[name], session.params, []
    for _ in range(n):
        read = np.array([[*ids, *found]], np.int32)
        found.append(int(np.argmax(model.logits(ops, params, config, read)[0, -1])))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_each_turn_is_written_as_if_the_whole_text_were_read(name: str) -> None:
    config = MODELS[name]
    session = Session(ops, parameters(name), config)
    prompt = [3, 1, 4, 1, 5]  # longer than a window
    session.read(prompt)
    first = greedy(session, 1)
    assert first == follow(name, session, prompt, 1)
    session.read([9, 2])  # and the last token written, which nobody has read yet
    whole = [*prompt, *first, 9, 2]
    assert session.ids == whole and greedy(session, 2) == follow(name, session, whole, 2)
    assert session.forgotten == 0 and session.why == "length"


@pytest.mark.parametrize("name", [n for n in MODELS if n != "qk_norm_windows"])  # lets go of some
def test_what_is_read_onto_a_cache_gives_the_logits_of_the_whole_text(name: str) -> None:
    config, params = MODELS[name], parameters(name)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, (2, 10)).astype(np.int32)
    cache = ops.kv_cache(params, config, 2, 10)
    model.prefill(ops, params, config, ids[:, :4], np.array([4, 4]), cache)
    lengths = np.array([6, 3])  # the second row is padded
    got = model.prefill(ops, params, config, ids[:, 4:], lengths, cache, start=4)
    for row, length in enumerate(lengths):
        expected = model.logits(ops, params, config, ids[row : row + 1, : 4 + length])[0, -1]
        np.testing.assert_allclose(got[row], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["myllm", "gpt2"])
def test_beyond_the_context_the_last_half_is_read_anew(name: str) -> None:
    config = MODELS[name]
    context = config.context_length
    session = Session(ops, parameters(name), config, keep=2)
    text = [int(i) for i in np.random.default_rng(4).integers(0, config.vocab_size, context)]
    session.read(text)
    (first,) = greedy(session, 1)
    assert session.forgotten == 0 and len(session.ids) == context + 1
    tail = (context - 2) // 2
    sight = text[:2] + [*text, first][-tail:]
    assert greedy(session, 3) == follow(name, session, sight, 3)
    assert session.forgotten == context + 1 - 2 - tail
    assert len(greedy(session, 3 * context)) == 3 * context  # and again, and again


def test_a_prompt_longer_than_the_context_keeps_its_end() -> None:
    config = MODELS["myllm"]
    session = Session(ops, parameters("myllm"), config)
    text = [i % config.vocab_size for i in range(5 * config.context_length)]
    session.read(text)
    kept = text[-(config.context_length // 2) :]
    assert greedy(session, 2) == follow("myllm", session, kept, 2)


def test_it_writes_what_generate_does_and_stops_where_told() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    how = {"temperature": 1.5, "top_k": 7, "top_p": 0.9}
    (expected,) = zip(
        *stream(ops, params, config, [[5, 6]], max_new_tokens=6, seed=8, **how), strict=True
    )
    session = Session(ops, params, config)
    session.read([5, 6])
    rng = np.random.default_rng([8, 0])
    assert list(session.write(6, rng=rng, **how)) == list(expected)

    again = Session(ops, params, config)
    again.read([5, 6])
    stop = int(expected[3] or 0)
    written = list(again.write(6, rng=np.random.default_rng([8, 0]), stop={stop}, **how))
    assert written == list(expected[: expected.index(stop)]) and again.why == "stop"
    assert again.ids[-1] == stop  # it ends the turn, and the next one reads it


def test_a_turn_that_is_broken_off_is_read_as_far_as_it_went() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    session = Session(ops, params, config)
    session.read([1, 2])
    token = next(session.write(9, rng=np.random.default_rng(0), temperature=0))
    session.read([3])
    assert greedy(session, 2) == follow("myllm", session, [1, 2, token, 3], 2)


def test_what_cannot_be_written_is_said() -> None:
    config, params = MODELS["myllm"], parameters("myllm")
    session = Session(ops, params, config)
    with pytest.raises(ValueError, match="needs a text of at least one token"):
        greedy(session, 1)
    with pytest.raises(ValueError, match="ids must lie in 0"):
        session.read([config.vocab_size])
    session.read([1])
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        greedy(session, 0)
    with pytest.raises(ValueError, match="min_p is a probability"):
        list(session.write(1, rng=np.random.default_rng(0), min_p=2.0))
    cache = ops.kv_cache(params, config, 1, 4)
    ids = np.array([[1, 2]], np.int32)
    with pytest.raises(ValueError, match="the prompts have 3 before them and 2"):
        model.prefill(ops, params, config, ids, np.array([2]), cache, start=3)
