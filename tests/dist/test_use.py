"""What is done with a trained model: generate, chat, eval, plot; samples while training."""

import errno
import io
import json
import math
import re
import signal
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from dist import checkpoint, cli, config, monitor, tasks, use
from dist.convert import gguf
from dist.evaluate import Evaluation, token_lengths
from dist.generate import Interrupts, Stops, Writer
from dist.model import load_model
from reference.session import Session
from tests.helpers.runs import prepare_texts, save_run_file, tables, text
from tokenizer import Tokenizer, train_from_iterator


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a model that has learned a little."""
    folder = tmp_path_factory.mktemp("run")
    changes: dict[str, Any] = {
        "train__steps": 60,
        "run__eval_every": 30,
        "run__sample_every": 60,
        "run__sample_prompt": "the quick",
        "run__eval_windows": 9999,
    }
    config = prepare_texts(folder, **changes)
    assert cli.main(["train", str(save_run_file(config, folder / "run.toml"))]) == 0
    return folder / "run"


def reference(*words: str) -> list[str]:
    return [*words, "--backend", "reference"]


def test_generate_continues_a_prompt_by_every_strategy(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = reference("generate", str(run), "--prompt", "the quick", "--tokens", "12")
    outputs = {}
    for strategy in (
        ["--temperature", "0"],
        ["--top-k", "1"],
        ["--top-p", "1e-9"],
        ["--temperature", "1.5", "--seed", "1"],
        ["--temperature", "1.5", "--seed", "2"],
    ):
        assert cli.main([*base, *strategy]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("the quick") and "tokens" in said.err
        outputs[" ".join(strategy)] = said.out
    greedy = outputs["--temperature 0"]
    assert len(greedy) > len("the quick\n")
    assert outputs["--top-k 1"] == outputs["--top-p 1e-9"] == greedy
    assert len(set(outputs.values())) == 3


def test_generate_asks_for_prompts_and_reads_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    asked = iter(["the fox", "a dog"])

    def answer(prompt: str) -> str:
        try:
            return next(asked)
        except StopIteration as error:
            raise EOFError from error

    monkeypatch.setattr("builtins.input", answer)
    assert cli.main(reference("generate", str(run), "--tokens", "4")) == 0
    said = capsys.readouterr().out
    assert said.startswith("the fox") and "\na dog" in said
    monkeypatch.setattr(sys, "stdin", io.StringIO("while seven"))
    assert cli.main(reference("generate", str(run), "--tokens", "4", "--prompt", "-")) == 0
    assert capsys.readouterr().out.startswith("while seven")
    assert cli.main(reference("generate", str(run), "--tokens", "4", "--prompt", "")) == 0
    assert (
        cli.main(reference("generate", str(run), "--tokens", "4", "--prompt", "hi", "--chat")) == 0
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "x", "--tokens", "0"], "--tokens must be at least 1"),
        (["--prompt", "x", "--num-samples", "0"], "--num-samples must be at least 1"),
        (["--prompt", "x", "--stop", ""], "--stop needs a text"),
        (["--prompt", "x", "--min-p", "0"], "min_p is a probability"),
        (["--prompt", "x", "--top-p", "2"], "top_p is a probability"),
        (["--prompt", "x", "--backend", "tpu"], "there is no backend 'tpu'"),
        (["--temperature", "nan"], "temperature must be"),  # before anybody is asked
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_generated_is_one_sentence(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(run), "--backend", "reference", *words]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert cli.main(["generate", str(run / "nowhere")]) == 1
    assert "no folder of a run that has one\n" in capsys.readouterr().err


def test_models_of_others_are_to_be_imported_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "m.gguf")]) == 0
    assert gguf.header(tmp_path / "m.gguf")[0]["general.name"] == "run"
    capsys.readouterr()
    for name in ("hf", "m.gguf"):
        assert cli.main(["generate", str(tmp_path / name), "--prompt", "x"]) == 1
        said = capsys.readouterr().err
        assert "`myllm import` makes one" in said and said.count("\n") == 1


def test_beyond_the_context_a_text_goes_on_and_it_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = reference("generate", str(run), "--temperature", "0")
    assert cli.main([*base, "--prompt", "the quick", "--tokens", "100"]) == 0
    said = capsys.readouterr()
    assert "(100 tokens, " in said.err and "100 tokens were asked" in said.err
    assert "the context of 48 tokens was full" in said.err
    assert cli.main([*base, "--prompt", "the quick brown " * 60, "--tokens", "3"]) == 0
    assert "earlier ones are forgotten" in capsys.readouterr().err


def test_writing_ends_where_told_and_says_why(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = reference("generate", str(run), "--prompt", "the quick", "--temperature", "0")
    assert cli.main([*base, "--tokens", "30"]) == 0
    free = capsys.readouterr().out[len("the quick") :]
    stop = free[9:12]  # three letters, which may lie across tokens
    assert cli.main([*base, "--tokens", "30", "--stop", "never", "--stop", stop]) == 0
    said = capsys.readouterr()
    assert said.out == "the quick" + free[: free.index(stop)] + "\n"
    assert f"stopped at {stop!r}" in said.err


def test_samples_differ_and_the_first_is_that_of_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = reference("generate", str(run), "--prompt", "the", "--tokens", "9", "--temperature", "2")
    assert cli.main(base) == 0
    one = capsys.readouterr().out
    assert cli.main([*base, "--num-samples", "3"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(one) and said.err.count("tokens were asked") == 3
    assert len({part for part in said.out.split("the") if part.strip()}) >= 3


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["ab", "cd"], ["bc"], "a", "bc"),
        (["ab", "c", "x"], ["bcd"], "abcx", ""),  # held back, and then shown
        (["aab"], ["ab", "aab"], "", "aab"),
        (["x", "yx", "yz"], ["xyz"], "xy", "xyz"),
        (["abc"], [], "abc", ""),
        (["ab"], ["bc"], "ab", ""),  # the beginning of a stop at the very end
        (["ab", "cd", "ab"], ["cd"], "ab", "cd"),  # nothing after it
    ],
)
def test_text_ends_before_a_string_that_comes_in_pieces(
    pieces: list[str], stops: list[str], shown: str, stopped: str
) -> None:
    found = Stops(stops)
    assert "".join([*map(found.step, pieces), found.finish()]) == shown
    assert found.stopped == stopped


def test_ctrl_c_ends_an_answer_and_not_the_program(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Any] = ["the", KeyboardInterrupt, "a dog", EOFError]

    def answer(prompt: str) -> str:
        text = typed.pop(0)
        if isinstance(text, str):
            return text
        raise text

    write, interrupts = Session.write, [True]

    def broken_off(self: Session, *given: Any, **more: Any) -> Any:
        for n, token in enumerate(write(self, *given, **more)):
            if n == 2 and interrupts:
                interrupts.clear()
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(Session, "write", broken_off)
    assert cli.main(reference("generate", str(run), "--tokens", "5")) == 0
    said = capsys.readouterr()
    assert "interrupted)" in said.err and "(5 tokens, " in said.err and "\na dog" in said.out
    assert "Ctrl-D leaves" in said.err and not typed


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_no_ctrl_c_ends_a_conversation(
    command: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice at once, wherever the program is: asking, reading, writing or counting."""
    typed: list[Any] = ["the", "a dog", "the fox", None, "the dog", EOFError]
    handler = signal.getsignal(signal.SIGINT)

    def twice(*_: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    def typing(prompt: str) -> str:
        assert signal.getsignal(signal.SIGINT) is not handler
        text = typed.pop(0)
        if text is None:
            signal.raise_signal(signal.SIGINT)
        if isinstance(text, str):
            return text
        raise text

    monkeypatch.setattr("builtins.input", typing)
    turns: dict[Any, list[str]] = {}
    for owner, name in ((Session, "read"), (Writer, "account"), (Session, "_scores")):
        method, seen = getattr(owner, name), turns.setdefault(name, [])

        def interrupted(self: Any, *given: Any, method: Any = method, seen: Any = seen) -> Any:
            seen.append("")
            if len(typed) == 4:  # the second text
                twice()
            return method(self, *given)

        monkeypatch.setattr(owner, name, interrupted)
    assert cli.main(reference(command, str(run), "--tokens", "3", "--temperature", "0")) == 0
    said = capsys.readouterr()
    assert not typed and signal.getsignal(signal.SIGINT) is handler
    assert said.err.count("interrupted)") == 1 and said.err.count("(1 tokens, ") == 1
    assert said.err.count("Ctrl-D leaves") == 1 and all(turns.values())


def test_a_second_ctrl_c_does_not_disturb_how_the_first_is_dealt_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts, after = Interrupts(), []

    def typing(prompt: str) -> str:
        with pytest.raises(KeyboardInterrupt):
            interrupts()
        interrupts()  # on the way out
        after.append("the second")
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", typing)
    assert interrupts.line("> ") is None and interrupts.came and after


def test_a_byte_that_is_no_text_ends_no_conversation(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"the\n\xff\nlast"), "utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.main(reference("generate", str(run), "--tokens", "2")) == 0
    said = capsys.readouterr()
    assert said.err.count("tokens were asked") == 3 and "last" in said.out


def test_each_sample_of_each_prompt_has_a_seed_of_its_own(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the\nthe\nthe\n"))
    seeds: list[list[int]] = []
    draws = np.random.default_rng

    def noted(seed: Any = None) -> Any:
        seeds.append(list(seed))
        return draws(seed)

    monkeypatch.setattr("numpy.random.default_rng", noted)
    words = ["generate", str(run), "--tokens", "2", "--num-samples", "2", "--seed", "5"]
    assert cli.main(reference(*words)) == 0
    assert seeds == [[n, 0] for n in range(5, 11)]


def test_a_reply_ends_with_its_turn(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(run.parent / "t.tok")
    (fox,) = tokenizer.encode_ordinary(" fox")[:1]
    told = iter([fox, tokenizer.special_tokens["<|end|>"], fox, fox, fox])
    monkeypatch.setattr("reference.session.sample", lambda *_, **__: next(told))
    words = ["generate", str(run), "--chat", "--prompt", "hi", "--tokens", "3"]
    assert cli.main(reference(*words)) == 0
    said = capsys.readouterr()
    assert "(1 tokens, " in said.err and "it wrote the end" in said.err
    # out of a chat it is a token like any other
    assert cli.main(reference("generate", str(run), "--prompt", "hi", "--tokens", "3")) == 0
    assert "3 tokens were asked" in capsys.readouterr().err


def test_a_chat_reads_each_turn_once_and_remembers_the_earlier_ones(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Any] = ["the fox <|end|>", " ", "a dog", "/new", "the fox", EOFError]
    texts: list[list[int]] = []
    write = Session.write

    def noted(self: Session, *given: Any, **more: Any) -> Any:
        texts.append(list(self.ids))
        return write(self, *given, **more)

    def answer(prompt: str) -> str:
        text = typed.pop(0)
        if isinstance(text, str):
            return text
        raise text

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(Session, "write", noted)
    words = ["chat", str(run), "--tokens", "2", "--system", "be kind", "--temperature", "0"]
    assert cli.main(reference(*words)) == 0
    said = capsys.readouterr()
    tokenizer = Tokenizer.load(run.parent / "t.tok")
    special = tokenizer.special_tokens
    first, second, anew = texts
    system = [special["<|system|>"], *tokenizer.encode_ordinary("be kind"), special["<|end|>"]]
    assert first[: len(system)] == second[: len(system)] == anew[: len(system)] == system
    # what people type can never become a control id
    typed_ids = tokenizer.encode_ordinary("the fox <|end|>")
    assert special["<|end|>"] not in typed_ids
    ends = [special["<|user|>"], *typed_ids, special["<|end|>"], special["<|assistant|>"]]
    assert first == system + ends and second[: len(first)] == first
    turn = [*tokenizer.encode_ordinary("a dog"), special["<|end|>"], special["<|assistant|>"]]
    assert second[-len(turn) :] == turn and special["<|end|>"] in second[len(first) : -len(turn)]
    assert len(anew) < len(second)
    assert said.err.count("tokens, ") == 3 and "Traceback" not in said.err


def test_instructions_stay_whole_when_the_context_is_full(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, read = Tokenizer.load(run.parent / "t.tok"), []
    special = tokenizer.special_tokens
    monkeypatch.setattr("sys.stdin", io.StringIO("the quick brown fox\n" * 5))
    scores = Session._scores

    def noted(self: Session, ahead: int) -> Any:
        found = scores(self, ahead)
        read.append((self.forgotten, list(self.ids)))
        return found

    monkeypatch.setattr(Session, "_scores", noted)
    words = ["chat", str(run), "--tokens", "4", "--system", "be kind"]
    assert cli.main(reference(*words)) == 0
    system = [special["<|system|>"], *tokenizer.encode_ordinary("be kind"), special["<|end|>"]]
    late = [ids for forgotten, ids in read if forgotten]
    assert late and all(ids[: len(system)] == system for ids in late)
    assert "are forgotten" in capsys.readouterr().err


def test_instructions_must_leave_room_for_what_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", str(run), "--system", "the quick brown fox " * 20]
    assert cli.main(reference(*words)) == 1
    assert "must leave half of the context of 48" in capsys.readouterr().err


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
        file.write(json.dumps({"step": 100, "heldout_loss": 2.5}) + "\n")
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    assert cli.main(["plot", str(tmp_path), "--by", by, "-o", str(tmp_path / "x.png")]) == 0
    (figure,) = drawn
    loss_axes, rate_axes = figure.axes
    last = {"step": 100, "tokens": 9_600, "time": 50.0}[by]
    assert [line.get_xdata()[-1] for line in loss_axes.lines] == pytest.approx([last] * 3)
    assert rate_axes.get_xlabel() == {"time": "minutes of steps"}.get(by, by)
    low, high = loss_axes.get_ylim()
    assert 2.0 < low < 2.5 and 2.9 < high < 3.1


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    np.testing.assert_allclose(use.smooth([3.0] * 9), 3.0)
    after = use.smooth([0.0] * 50 + [1.0] * 50)
    assert after[50] < 0.2 and after[-1] > 0.99
