"""How good a trained model is: eval, questions, plot, and what is said meanwhile."""

import errno
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from dist import checkpoint, cli, config, monitor, tasks, use
from dist.evaluate import Evaluation, token_lengths
from dist.model import load_model
from tests.helpers.runs import learned, prepare_texts, reference, save_run_file, tables, text
from tokenizer import Tokenizer, train_from_iterator


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned(tmp_path_factory.mktemp("run"))


def test_eval_repeats_what_training_said_in_bits_per_byte(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(reference("eval", str(run))) == 0
    said = capsys.readouterr().out
    last = [r for r in monitor.read_metrics(run) if "heldout_loss" in r][-1]
    assert f"loss {last['heldout_loss']:.4f}" in said
    bits = float(re.findall(r"([0-9.]+) bits per byte", said)[0])
    assert bits == pytest.approx(last["bits_per_byte"], abs=6e-4)
    # a model that has learned the words beats one that knows nothing, log2(320) bits a token
    held = zlib.compress(b"".join(text(i).encode() for i in range(400)))
    assert 0.5 < bits < 8 and len(held) > 0
    assert cli.main(reference("eval", str(run), str(run.parent / "train"), "--windows", "3")) == 0
    assert "(141 tokens in" in capsys.readouterr().out  # 3 windows of 47 targets
    sets = [str(run.parent / name) for name in ("heldout", "train")]
    assert cli.main(reference("eval", str(run), *sets, "--windows", "3", "--json")) == 0
    first, second, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["data"], second["data"], whole["data"]) == (sets[:1], sets[1:], sets)
    assert whole["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    assert whole["tokens"] == 282 and whole["perplexity"] == math.exp(whole["loss"])
    assert whole["bits_per_byte"] > 0 and whole["checkpoint"] == str(checkpoint.find(run))


QUESTIONS = [
    {"context": "the quick", "choices": [" zzqy", " brown fox"], "answer": 1},
    {"ctx": "the quick", "endings": ["brown fox", "zzqy", "xq vk"], "label": "0"},
    {
        "question": "the quick",
        "choices": {"text": ["zzqy", "brown"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    {
        "question": {"stem": "q", "choices": [{"text": "brown", "label": "1"}]},
        "answerKey": "1",
    },
    {"goal": "the quick", "sol1": "zzqyzzqyx", "sol2": "brown fox", "label": 0},
]


def test_questions_are_answered_by_what_is_most_likely(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n", encoding="utf-8")
    assert cli.main(reference("eval", str(run), "--tasks", str(path))) == 0
    # the last one's answer is the unlikely one
    chance = (1 / 2 + 1 / 3 + 1 / 2 + 1 + 1 / 2) / 5
    assert (
        f"accuracy 0.800 ± 0.179, per byte 0.800 ± 0.179, by chance {chance:.3f} (5 questions)"
        in capsys.readouterr().out
    )
    assert cli.main(reference("eval", str(run), "--tasks", str(path), "--limit", "4")) == 0
    assert "accuracy 1.000" in capsys.readouterr().out
    assert cli.main(reference("eval", str(run), "--tasks", str(path), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["accuracy"], found["per_byte"], found["questions"]) == (0.8, 0.8, 5)
    assert found["chance"] == pytest.approx(chance) and found["file"] == str(path)
    assert found["accuracy_error"] == pytest.approx(math.sqrt(0.8 * 0.2 / 5))


def test_piqa_s_answers_are_found_beside_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"goal": "the quick", "sol1": "zzqyzzqyx", "sol2": "brown fox"}
    path = tmp_path / "valid.jsonl"
    path.write_text("\n".join(map(json.dumps, [row] * 3)), encoding="utf-8")
    (tmp_path / "valid-labels.lst").write_text("1\n0\n1\n", encoding="utf-8")
    assert cli.main(reference("eval", str(run), "--tasks", str(path))) == 0
    assert "accuracy 0.667 " in capsys.readouterr().out
    (tmp_path / "valid-labels.lst").write_text("1\n0\n", encoding="utf-8")
    assert cli.main(reference("eval", str(run), "--tasks", str(path))) == 1
    assert "line 3 is no question: it has no field 'label'" in capsys.readouterr().err


def test_long_choices_are_held_to_their_bytes(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    """Of -6 nats over 11 bytes and -5 over 5, the first is likelier a byte, though not a letter."""
    model = load_model(run, "reference")
    tokenizer = Tokenizer.load(run.parent / "t.tok")
    short, long = " aaaa", " ééééé"
    sums = {tuple(tokenizer.encode_ordinary(text)): s for text, s in ((short, -5), (long, -6))}

    def given(model: Any, ids: list[int]) -> Any:
        own = next(key for key in sums if tuple(ids[-len(key) :]) == key)
        return np.array([-100.0, *[sums[own] / len(own)] * len(own)])

    monkeypatch.setattr(tasks, "log_probabilities", given)
    path = run.parent / "long.jsonl"
    path.write_text(json.dumps({"context": "x", "choices": [short, long], "answer": 1}))
    found = tasks.answer(model, tokenizer, path)
    assert (found.n, found.right, found.right_per_byte) == (1, 0, 1)


def test_a_choice_that_has_no_token_is_not_certain(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """Of bytes that a vocabulary lacks; and half a surrogate pair, which JSON can hold, is text."""
    encode = Tokenizer.encode_ordinary
    lacking = lambda self, text: [] if text == "\x04" else encode(self, text)  # noqa: E731
    monkeypatch.setattr(Tokenizer, "encode_ordinary", lacking)
    path = run.parent / "lacking.jsonl"
    path.write_text(json.dumps({"context": "x", "choices": ["\x04", "\ud800"], "answer": 1}))
    tokenizer = Tokenizer.load(run.parent / "t.tok")
    found = tasks.answer(load_model(run, "reference"), tokenizer, path)
    assert (found.n, found.right, found.right_per_byte) == (1, 1, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is no question: Expecting value"),
        ('{"text": "x"}', "it has none of the fields endings, answerKey, sol1, context"),
        ('{"context": "x", "choices": ["a"], "answer": 1}', "there is no choice 1"),
        ('{"context": "x", "choices": ["a", ""], "answer": 0}', "a choice is empty"),
        ('{"context": "x", "choices": "ab", "answer": 0}', "choices must be a list of texts"),
        ('{"context": "x", "choices": [1, 2], "answer": 0}', "choices must be a list of texts"),
        ('{"ctx": "x", "endings": "ab", "label": 0}', "endings must be a list of texts"),
        ('{"context": 5, "choices": ["a"], "answer": 0}', "its context must be a text"),
        (
            '{"question": "q", "choices": {"text": "ab", "label": ["A", "B"]}, "answerKey": "A"}',
            "text must be a list of texts",
        ),
        ('{"context": "x", "answer": 0}', "it has no field 'choices'"),
        ("[1]", "it is no JSON object"),
        ("3", "it is no JSON object"),
        ('{"context": "x", "choices": ["a", "b"], "answer": 1.7}', "whole number, got 1.7"),
        ('{"context": "x", "choices": ["a", "b"], "answer": true}', "whole number, got True"),
        ('{"ctx": "x", "endings": ["a"], "label": ""}', "its label must be a whole number, got ''"),
        ('{"goal": "x", "sol1": "a", "sol2": "b"}', "it has no field 'label'"),
        ('{"goal": "x", "sol1": null, "sol2": "b", "label": 0}', "its sol1 must be a text, got No"),
        ('{"goal": 5, "sol1": "a", "sol2": "b", "label": 0}', "its goal must be a text, got 5"),
        (
            '{"question": null, "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}',
            "its question must be a text, got None",
        ),
        (
            '{"question": "x", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "2"}',
            "its answerKey '2' is none of the labels",
        ),
    ],
)
def test_a_line_that_is_no_question_is_named(
    line: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + f"\n{line}\n", encoding="utf-8")
    assert cli.main(reference("eval", str(run), "--tasks", str(path))) == 1
    said = capsys.readouterr().err
    assert message in said and "line 2" in said and "Traceback" not in said
    path.write_text("")
    assert cli.main(reference("eval", str(run), "--tasks", str(path))) == 1
    assert "has no question" in capsys.readouterr().err


def test_bits_per_byte_count_the_bytes_of_the_targets() -> None:
    result = Evaluation(loss=2.0, n_targets=30, n_bytes=100)
    assert result.bits_per_byte == pytest.approx(2 * 30 / math.log(2) / 100)
    assert Evaluation(2.0, 30, None).bits_per_byte is None
    assert Evaluation(math.log(13), 1, None).perplexity == pytest.approx(13)
    assert Evaluation(1000.0, 1, None).perplexity == math.inf


def test_special_tokens_stand_for_no_bytes(run: Path) -> None:
    tokenizer = Tokenizer.load(run.parent / "t.tok")
    lengths = token_lengths(tokenizer, 330)
    assert lengths.shape == (330,) and lengths[tokenizer.special_tokens["<|eos|>"]] == 0
    ids = tokenizer.encode_ordinary("the quick brown")
    assert int(lengths[ids].sum()) == len("the quick brown")


def test_eval_refuses_data_of_another_tokenizer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_from_iterator([text(i) for i in range(9)], 300).save(tmp_path / "o.tok")
    (tmp_path / "a.txt").write_text(text(1) * 20)
    words = [str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "o.tok"), "--heldout", "0"]
    assert cli.main(["pack", *words, "-o", str(tmp_path / "d"), "--processes", "1"]) == 0
    assert cli.main(reference("eval", str(run), str(tmp_path / "d" / "train"))) == 1
    assert "another tokenizer" in capsys.readouterr().err
    # a model that has none, as one of llm.c's files, takes the data's word for it
    bare = tmp_path / "bare"
    assert cli.main(["export", str(run), str(bare), "--dtype", "float32"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (bare / name).unlink(missing_ok=True)
    assert cli.main(["import", str(bare), "-o", str(tmp_path / "imported")]) == 0
    capsys.readouterr()
    assert cli.main(reference("eval", str(tmp_path / "imported"), str(run.parent / "heldout"))) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_checkpoint_folder_is_enough(run: Path) -> None:
    """Weights, config and tokenizer travel in one folder."""
    path = checkpoint.find(run)
    model = load_model(path, "reference")
    assert model.path == path and model.config.vocab_size == 330
    assert model.tokenizer == path / "tokenizer.myllm" and model.tokenizer.is_file()


def test_what_a_model_writes_meanwhile_fits_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"run__sample_every": 1, "run__sample_prompt": "the quick"}
    config = prepare_texts(tmp_path, train__steps=2, **changes)
    assert cli.main(["train", str(save_run_file(config, tmp_path / "run.toml"))]) == 0
    said = capsys.readouterr().out
    written = re.search(r"^step 2 writes: (.*\n(  .*\n)+)", said, re.MULTILINE)
    assert written is not None and max(map(len, written[0].splitlines())) <= 80


def test_plot_draws_and_compares_runs(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli.main(["plot", str(run)]) == 0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (run / "loss.svg").read_text()
    assert cli.main(["plot", str(run), str(run), "-o", str(tmp_path / "x" / "both.svg")]) == 0
    assert (tmp_path / "x" / "both.svg").stat().st_size > 1000
    capsys.readouterr()
    assert cli.main(["plot", str(tmp_path)]) == 1
    assert "is it a run folder?" in capsys.readouterr().err

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tokenizer.files.os.fsync", full)
    for name in ("x/both.svg", "x/new.png"):
        assert cli.main(["plot", str(run), "-o", str(tmp_path / name)]) == 1
        assert f"{tmp_path / name}: No space left on" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["both.svg"]


@pytest.mark.parametrize("by", ["step", "tokens", "time"])
def test_plot_goes_by_step_tokens_or_time_and_leaves_the_first_spike_out(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that falls from 900 to below 3 in its first steps, 30 s a step, of 96 tokens each."""
    save_run_file(config.from_tables(tables(tmp_path)), tmp_path / "config.toml")
    losses = [900.0, 300.0, 50.0, *(3 - i / 100 for i in range(97))]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            file.write(json.dumps({"step": step, "loss": loss, "lr": 1.0, "ms": 3e4}) + "\n")
            if step == 51:  # of 50, known when the next has been taken
                file.write(json.dumps({"step": 50, "save_ms": 9.0}) + "\n")
        file.write(json.dumps({"step": 100, "heldout_loss": 2.5}) + "\n")
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    assert cli.main(["plot", str(tmp_path), "--by", by, "-o", str(tmp_path / "x.png")]) == 0
    (figure,) = drawn
    loss_axes, rate_axes = figure.axes
    last = {"step": 100, "tokens": 9_600, "time": 50.0}[by]
    assert [line.get_xdata()[-1] for line in loss_axes.lines] == pytest.approx([last] * 3)
    places = [last * step / 100 for step in range(1, 101)]
    assert list(rate_axes.lines[0].get_xdata()) == pytest.approx(places)
    assert rate_axes.get_xlabel() == {"time": "minutes of steps"}.get(by, by)
    low, high = loss_axes.get_ylim()
    assert 2.0 < low < 2.5 and 2.9 < high < 3.1


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    np.testing.assert_allclose(use.smooth([3.0] * 9), 3.0)
    after = use.smooth([0.0] * 50 + [1.0] * 50)
    assert after[50] < 0.2 and after[-1] > 0.99
