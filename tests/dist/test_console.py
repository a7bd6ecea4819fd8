"""What a run says: a bar on a terminal, and elsewhere a short line now and then."""

import contextlib
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel import launcher
from dist import mode, monitor
from dist.train import Trainer
from dist.watchdog import Watch
from tests.helpers import ROOT
from tests.helpers.runs import VOCAB, prepare, save_run_file, train


def record(step: int, **more: Any) -> dict[str, Any]:
    speed = {"tokens_per_s": 123_456.7, "utilisation": 0.61, "ms": 18.0}
    return {"step": step, "loss": 2.34567, "norm": 0.512, **speed, **more}


def said_by(console: monitor.Console, steps: int) -> None:
    console.say("hello")
    for step in range(1, steps + 1):
        console.step(record(step, z=7.5 if step == 13 else 0.1), eta=3599.0)
    console.close()


def test_lines_are_short_and_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    said_by(monitor.Console(True, 25, Watch(0, 1), every=10), 25)
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split("/")[0] for line in lines if line.startswith("step") and "/25" in line]
    assert steps == ["step  1", "step 10", "step 20", "step 25"]
    assert "step 13: the loss is a spike, 7.5 deviations above its mean" in lines


@pytest.mark.parametrize("loss, norm", [(11.0904, 12.345), (math.nan, math.inf), (1e30, 1e30)])
@pytest.mark.parametrize("speed", [407_232.0, 12_345_678.0])
def test_no_line_of_a_step_is_wider_than_a_terminal(loss: float, norm: float, speed: float) -> None:
    """MyLLM-1B's first step is one of them."""
    wide = record(99_999, loss=loss, norm=norm, tokens_per_s=speed, utilisation=1.0)
    line = monitor.step_line(wide, 105_058, 3599.0)
    assert len(line) <= 80 and f"{speed:,.0f} tok/s" in line and line.endswith("ETA 59m59s")


def test_a_narrow_terminal_keeps_the_loss_and_what_is_left() -> None:
    usual = record(100, loss=3.21, norm=1.5, tokens_per_s=12_345.0, utilisation=0.5)
    begin, end = "step  100/3700  loss 3.2100", "ETA 4m59s"
    middles = ["norm 1.500", "12,345 tok/s", "50% peak"]
    for kept in (3, 2, 1, 0):
        whole = "  ".join([begin, *middles[:kept], end])
        assert monitor.step_line(usual, 3_700, 299.0, len(whole)) == whole
    assert monitor.step_line(usual, 3_700, 299.0, 10) == whole


def test_no_line_of_a_run_is_wider_than_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mode, "SECONDS", 0.01)
    more = {"run__compute": "auto", "run__eval_every": 2, "train__steps": 40}
    more["run__eval_windows"] = 3
    assert train(prepare(Path(), run__backend="cpu", **more)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert "all settings are in run/config.toml" in lines and len(lines) > 20
    assert "  the first 3 are looked at (run.eval_windows)" in lines


def test_ids_that_no_text_has_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rows, told in ((VOCAB, False), (5 * VOCAB // 4, False), (5 * VOCAB // 4 + 1, True)):
        config = prepare(tmp_path, model__vocab_size=rows, run__out=str(tmp_path / f"run{rows}"))
        assert train(config) == 0
        said = f"model.vocab_size is {rows:,}, where the tokenizer has {VOCAB:,} ids"
        assert (said in capsys.readouterr().out) == told


def test_held_out_text_that_is_trained_on_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name in ("heldout", "train"):
        (tmp_path / name).mkdir()
        config = prepare(tmp_path / name, run__out=str(tmp_path / name / "run"))
        data = dataclasses.replace(config.data, train=str(tmp_path / name / name))
        assert train(dataclasses.replace(config, data=data)) == 0
        said.append("heldout is held out and trained on: it says" in capsys.readouterr().out)
    assert said == [True, False]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such terminal")
def test_a_rank_that_is_told_the_terminal_s_name_moves_its_line_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Open MPI passes on whole lines alone."""
    import pty

    reads, screen = pty.openpty()
    os.set_blocking(reads, False)
    monkeypatch.setattr(launcher, "size", lambda: 2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("MYLLM_TERMINAL", f"80:{os.ttyname(screen)}")
    monkeypatch.setenv("TERM", "xterm")
    said_by(monitor.Console(True, 3, Watch(0, 2), every=1), 3)
    assert monitor.terminal_columns(monitor.Output(sys.stdout)) == 0  # by way of mpirun
    said, until = "", time.monotonic() + 10
    while not ("step 3/3" in said and "\x1b[2K" in said) and time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):  # a terminal hands on what there is
            said += os.read(reads, 1 << 16).decode()
    assert "hello" in said and "step 3/3" in said and "\x1b[2K" in said
    assert capsys.readouterr().out == ""
    os.close(reads)
    os.close(screen)
    said_by(monitor.Console(True, 3, Watch(0, 2), every=1), 3)  # it has gone
    assert "step 3/3" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such terminal")
def test_the_first_step_says_nothing_of_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compiles kernels; each of the others takes 7 s here."""
    seconds, step = [0.0], Trainer._one_step

    def slow(self: Trainer) -> dict[str, Any]:
        seconds[0] += 7.0 if self.step % 3 else 1000.0
        return step(self)

    def clock() -> float:
        seconds[0] += 1e-6
        return seconds[0]

    monkeypatch.setattr(Trainer, "_one_step", slow)
    monkeypatch.setattr("dist.train.time", SimpleNamespace(perf_counter=clock))
    config = prepare(tmp_path, train__steps=3)
    assert train(config) == 0
    assert train(config, "--set", "train.steps=6", "--changed") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    found = [line.partition("  ETA ")[2] for line in lines if "/" in line.split("  ")[0]]
    assert found == ["", "7s", "0s"] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_line_is_as_wide_as_the_terminal_is_now(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer line would leave a part of itself at every step."""
    import pty
    import termios

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    reads, screen = pty.openpty()
    said = Terminal()
    monkeypatch.setattr("sys.stdout", said)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.get_terminal_size(screen))
    monkeypatch.setattr(launcher, "size", lambda: ranks)
    monkeypatch.setenv("MYLLM_TERMINAL", f"100:{os.ttyname(screen)}")
    monkeypatch.setenv("TERM", "xterm")
    termios.tcsetwinsize(screen, (25, 100))
    console = monitor.Console(True, 3, Watch(0, ranks), every=1)
    widths = []
    for step, columns in enumerate((100, 60, 90), 1):
        termios.tcsetwinsize(screen, (25, columns))
        begun = len(said.getvalue())
        console.step(record(step), 1.0)
        console._progress.refresh()
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.getvalue()[begun:])
        widths.append(max(map(len, re.split(r"[\r\n]", plain))))
    console.close()
    os.close(reads)
    os.close(screen)
    assert widths[0] > 90 and 50 < widths[1] <= 60 and 80 < widths[2] <= 90


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such terminal")
def test_a_terminal_that_cannot_move_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pty

    reads, screen = pty.openpty()
    monkeypatch.setattr(launcher, "size", lambda: 2)
    monkeypatch.setenv("MYLLM_TERMINAL", f"80:{os.ttyname(screen)}")
    monkeypatch.setenv("TERM", "dumb")
    said_by(monitor.Console(True, 3, Watch(0, 2), every=1), 3)
    os.close(reads)
    os.close(screen)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line[:8] for line in lines if "ETA" in line] == ["step 1/3", "step 2/3", "step 3/3"]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    said_by(monitor.Console(False, 25, Watch(1, 2), every=1), 25)
    assert capsys.readouterr().out == ""


def test_a_terminal_has_one_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    said_by(monitor.Console(True, 25, Watch(0, 1), every=1), 25)
    lines = screen.getvalue().split("\n")
    # what was said stays above; of the steps only the last one does
    kept = [line for line in lines if "step 24/25" in line or "hello" in line or "spike" in line]
    assert "hello" in kept[0] and "spike" in kept[1] and len(kept) <= 3
    assert "step 25/25" in screen.getvalue() and "61% peak" in screen.getvalue()


def test_what_a_terminal_is_told_is_what_it_shows_and_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No letters between colons become pictures; while a reader pauses, the rank does not hang."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if threading.current_thread() is threading.main_thread():
                spoke.append(watch._speaking)
            return super().write(text)

    spoke: list[bool] = []
    watch, screen = Watch(0, 1), Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    console = monitor.Console(True, 3, watch, every=1)
    console.step(record(1), 1.0)
    console.say("saved runs/:rocket:/step-1")
    assert spoke and all(spoke) and ":rocket:" in screen.getvalue()
    console.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_an_encoding_lacks_end_no_run(tmp_path: Path, encoding: str) -> None:
    path = save_run_file(prepare(tmp_path), tmp_path / "run.toml")
    given = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [
        sys.executable,
        "-m",
        "dist",
        "train",
        str(path),
        "--set",
        f"run.out={tmp_path}/Zürich—",
    ]
    done = subprocess.run(words, env=given, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\u2014/config.toml" in done.stdout and b"step 6/6" in done.stdout


@pytest.mark.parametrize(("said", "columns"), [("120", 120), ("", 0), ("wide", 0), ("70:tty", 70)])
def test_ranks_believe_the_launcher_and_not_what_mpirun_gives_them(
    said: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(launcher, "size", lambda: 2)
    monkeypatch.setenv("MYLLM_TERMINAL", said)
    monkeypatch.setenv("TERM", "xterm")
    assert monitor.terminal_columns(monitor.Output(Terminal())) == columns
