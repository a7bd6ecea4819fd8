"""What is done with a trained model: generate and chat."""

import io
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli
from dist.convert import gguf
from dist.generate import Interrupts, Stops, Writer
from reference import ops
from reference.session import Session
from tests.helpers.runs import learned, reference
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned(tmp_path_factory.mktemp("run"))


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


def test_what_writes_is_compiled_before_a_prompt_is_shown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, shown = ops.decode_step, []

    def watched(*given: Any) -> Any:
        shown.append(capsys.readouterr().out)
        return step(*given)

    monkeypatch.setattr(ops, "decode_step", watched)
    assert cli.main(reference("generate", str(run), "--prompt", "the quick", "--tokens", "2")) == 0
    assert shown[0] == "" and shown[1].startswith("the quick")
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert cli.main(reference("chat", str(run))) == 0
    assert len(shown) == 3


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"while seven")))
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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the\nthe\nthe\n")))
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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the quick brown fox\n" * 5)))
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


@pytest.mark.parametrize("said", ["can't start new thread", "another thing"])
def test_that_no_thread_can_be_started_is_a_sentence(
    said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: list[str]) -> int:
        raise RuntimeError(said)

    monkeypatch.delenv("MYLLM_TRACEBACK", raising=False)
    monkeypatch.setattr(cli, "loaded", lambda name: command)
    if said == "another thing":  # of which only a traceback tells where it was
        with pytest.raises(RuntimeError):
            cli.main(["train"])
    else:
        assert cli.main(["train"]) == 1
        assert capsys.readouterr().err.startswith(f"myllm train: {said}: the system allows no more")
