"""``myllm score``: log-probabilities of tokens, and the chain rule."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli
from dist.model import load_model
from dist.score import ROWS, log_probabilities
from reference import ops
from reference.model import logits, loss_forward
from tests.helpers.runs import text
from tests.helpers.weights import GPT2, LLAMA, write_random
from tokenizer import Tokenizer, train_from_iterator

CONFIG = replace(LLAMA, vocab_size=330)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    tokenizer = train_from_iterator([text(i) for i in range(100)], 320)
    write_random(folder / "model", CONFIG, tokenizer)
    return folder / "model"


def score(model: Path, *words: str) -> int:
    return cli.main(["score", str(model), *words, "--backend", "reference"])


def test_the_sum_is_the_loss_and_each_term_the_softmax(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(model, "the quick brown fox", "Größe <|eos|>", "--json") == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loaded = load_model(model, "reference")
    assert loaded.tokenizer is not None
    tokenizer = Tokenizer.load(loaded.tokenizer)
    for found, given in zip(said, ("the quick brown fox", "Größe <|eos|>"), strict=True):
        ids = tokenizer.encode_ordinary(given)
        assert [token["id"] for token in found["tokens"]] == ids and found["text"] == given
        whole = np.array([[tokenizer.special_tokens["<|eos|>"], *ids]], np.int32)
        params = {n: p.astype(np.float64) for n, p in loaded.params.items()}
        loss, _ = loss_forward(
            ops, params, CONFIG, whole[:, :-1], whole[:, 1:], need_backward=False
        )
        assert found["log_probability"] == pytest.approx(-float(loss.total), rel=1e-5)
        z = logits(ops, params, CONFIG, whole[:, :-1])[0]
        p = np.exp(z - z.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        each = [token["log_probability"] for token in found["tokens"]]
        np.testing.assert_allclose(each, np.log(p[np.arange(len(ids)), ids]), rtol=1e-4)
        assert sum(each) == pytest.approx(found["log_probability"], rel=1e-12)
        perplexities = [token["perplexity"] for token in found["tokens"]]
        np.testing.assert_allclose(perplexities, np.exp(np.negative(each)), rtol=1e-12)
        assert found["perplexity"] == pytest.approx(math.exp(-sum(each) / len(each)))
        size = len(given.encode())
        assert found["bits_per_byte"] == pytest.approx(-sum(each) / math.log(2) / size)


def test_the_table_shows_each_token_and_their_sum(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert score(model, "the fox") == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [float(line.split()[0]) for line in lines[1:]]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=1e-3)
    assert "".join(eval(line.split(maxsplit=2)[2]) for line in lines[1:-1]) == "the fox"
    assert "tokens behind an end of text, perplexity" in lines[-1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the fox")))
    assert score(model, "-") == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("command", ["score", "inspect", "generate"])
def test_a_standard_input_that_is_no_text_is_said(
    command: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option = {"score": [], "inspect": ["--text"], "generate": ["--prompt"]}[command]
    words = [command, str(model), *option, "-"]
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(words) == 1
    assert "standard input is closed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \xff fox")))
    assert cli.main(words) == 1
    assert "standard input is not UTF-8 at its byte 4" in capsys.readouterr().err
    assert cli.main([*words[:-1], "the \udcff fox"]) == 1  # what Python makes of such an argument
    assert "'the \\udcff fox' is not UTF-8 at its character 4" in capsys.readouterr().err


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["rope", "learned"])
def test_longer_than_the_context_is_read_in_overlapping_windows(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random(tmp_path / "model", config)
    loaded = load_model(tmp_path / "model", "reference")
    ids = np.random.default_rng(0).integers(0, 61, 100).tolist()
    found = log_probabilities(loaded, ids)
    assert found.shape == (99,)

    def plain(context: list[int], token: int) -> float:
        z = logits(ops, loaded.params, config, np.array([context], np.int32))[0, -1].astype(float)
        return float(z[token] - z.max() - np.log(np.exp(z - z.max()).sum()))

    # the first window is 32 tokens; then each begins 16 before the first that is still to be scored
    for t in (1, 5, 32):
        assert found[t - 1] == pytest.approx(plain(ids[:t], ids[t]), abs=1e-4)
    for t in (33, 40, 49):
        assert found[t - 1] == pytest.approx(plain(ids[17:t], ids[t]), abs=1e-4)
    monkeypatch.setattr("dist.score.ROWS", 3 * 61)  # a few rows of logits at once
    np.testing.assert_allclose(log_probabilities(loaded, ids), found, rtol=1e-5)
    assert ROWS > 3 * 61


def test_what_cannot_be_scored_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(model, "") == 1
    assert "a text is empty" in capsys.readouterr().err
    write_random(tmp_path / "mute", LLAMA)
    assert score(tmp_path / "mute", "x") == 1
    assert "no tokenizer" in capsys.readouterr().err
