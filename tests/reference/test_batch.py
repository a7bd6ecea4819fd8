"""What is written of a text does not depend on those that are written beside it."""

from typing import Any

import numpy as np
import pytest

from accel import load
from reference import batch as batch_module
from reference import ops
from reference.batch import Batch, Row
from reference.generate import generate
from reference.ops import Ops
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from reference.session import Session
from tests.helpers.models import MODELS, toy


def parameters(backend: Ops, name: str, dtype: Any) -> dict[str, Any]:
    layout = decoder_layout(MODELS[name])
    flat = layout.init(1, np.float64)
    flat += 0.2 * np.random.default_rng(1).standard_normal(layout.size)
    return backend.parameters(layout.views(backend.from_numpy(flat.astype(dtype))))


class Text(Row):
    """A row that takes the likeliest token, and keeps the logits that it was given."""

    def __init__(self, ids: list[int], n: int) -> None:
        super().__init__(ids)
        self.prompt, self.n, self.seen = len(ids), n, list[Any]()

    @property
    def written(self) -> list[int]:
        return self.ids[self.prompt :]

    def take(self, scores: Any) -> bool:
        self.seen.append(np.array(scores))
        self.ids.append(int(np.argmax(scores)))
        return len(self.written) == self.n


def drive(batch: Batch, arrivals: dict[int, list[Text]], quits: dict[int, Text]) -> None:
    """Step until all is written; texts join, and some leave unfinished, before a step."""
    for step in range(99):
        for text in arrivals.get(step, []):
            batch.join(text)
        if step in quits:
            batch.leave(quits[step])
        for row, scores in batch.step():
            assert isinstance(row, Text)
            if row.take(scores):
                batch.leave(row)
        if not len(batch) and step > max(arrivals):
            return
    raise AssertionError("the batch never came to its end")


def scene(context: int) -> tuple[list[Text], dict[int, list[Text]], dict[int, Text]]:
    """Eight texts of unlike lengths for three places; one is as long as the context allows."""
    rng = np.random.default_rng(3)
    sizes = [(3, 5), (1, 2), (context - 3, 4), (5, 1), (2, 9), (4, 3), (1, 1), (7, 2)]
    texts = [Text([int(i) for i in rng.integers(0, 9, n)], more) for n, more in sizes]
    arrivals = {0: texts[:2], 1: texts[2:4], 4: texts[4:7], 11: texts[7:]}
    return texts, arrivals, {3: texts[0], 5: texts[5]}  # one in the first place, one that waits


@pytest.mark.parametrize("name", MODELS)
def test_texts_that_come_and_go_are_written_as_if_each_were_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "PIECE", 2)
    config, params = MODELS[name], parameters(ops, name, np.float64)
    texts, arrivals, quits = scene(config.context_length)
    drive(Batch(ops, params, config, 3), arrivals, quits)
    for text in texts:
        prompt = text.ids[: text.prompt]
        session = Session(ops, params, config)
        session.read(prompt)
        alone = list(session.write(text.n, rng=np.random.default_rng(0), temperature=0))
        gone = any(text is quitter for quitter in quits.values())
        assert text.written == alone[: len(text.written)]
        assert gone == (len(text.written) < text.n)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["myllm", "gpt2", "qk_norm_windows"])
def test_the_bits_of_a_text_on_the_cpu_do_not_depend_on_the_others(
    name: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "PIECE", 2)
    backend, config = load("cpu", compute=compute), MODELS[name]
    params = parameters(backend, name, np.float32)
    texts, arrivals, quits = scene(config.context_length)
    drive(Batch(backend, params, config, 3), arrivals, quits)
    for text in texts:
        alone = Text(text.ids[: text.prompt], text.n)
        drive(Batch(backend, params, config, 1), {0: [alone]}, {})
        for here, there in zip(text.seen, alone.seen, strict=False):
            assert here.tobytes() == there.tobytes()


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_nor_where_products_and_keys_are_cut_into_tasks(compute: str) -> None:
    config = toy(MYLLM_1B, d_model=192, d_ff=512, d_head=32, context_length=640)
    layout, backend = decoder_layout(config), load("cpu", compute=compute)
    params = backend.parameters(layout.views(layout.init(1)))
    ids = [int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, 600)]
    texts = [Text(ids[:3], 20), Text(ids, 9), Text(ids[3:7], 15)]
    drive(Batch(backend, params, config, 3), {0: texts}, {})
    for text in texts:
        alone = Text(text.ids[: text.prompt], text.n)
        drive(Batch(backend, params, config, 1), {0: [alone]}, {})
        assert np.array(text.seen).tobytes() == np.array(alone.seen).tobytes()


def test_a_prompt_read_in_one_piece_is_written_on_as_generate_does() -> None:
    config, params = MODELS["myllm"], parameters(ops, "myllm", np.float32)
    texts = [Text([1, 2, 3], 5), Text([4], 5)]
    drive(Batch(ops, params, config, 2), {0: texts}, {})
    for text in texts:
        prompt = text.ids[: text.prompt]
        assert generate(ops, params, config, [prompt], max_new_tokens=5, temperature=0) == [
            text.written
        ]


def test_a_long_prompt_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "PIECE", 2)
    config = MODELS["myllm"]
    batch = Batch(ops, parameters(ops, "myllm", np.float64), config, 2)
    short, long = Text([1], 99), Text([2] * 8, 1)
    for text in (short, long):
        batch.join(text)
    while not long.seen:
        for row, scores in batch.step():
            assert isinstance(row, Text)
            row.take(scores)
    assert len(short.written) == 4  # one beside each of four pieces


def test_what_cannot_be_done_is_said() -> None:
    config, params = MODELS["myllm"], parameters(ops, "myllm", np.float64)
    with pytest.raises(ValueError, match="one place at least"):
        Batch(ops, params, config, 0)
    batch = Batch(ops, params, config, 1)
    with pytest.raises(ValueError, match="from 1 to 12 tokens"):
        batch.join(Row([]))
    with pytest.raises(ValueError, match="from 1 to 12 tokens"):
        batch.join(Row([1] * 13))
    with pytest.raises(ValueError, match="ids must lie in 0"):
        batch.join(Row([config.vocab_size]))
    batch.join(Row([1]))
    batch.step()
    with pytest.raises(ValueError, match="given one token after each step"):
        batch.step()
