"""What a run says: a bar on a terminal, and elsewhere a short line now and then."""

import io
from typing import Any

import pytest

from accel import launcher
from dist import monitor
from dist.watchdog import Watch


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
    assert len(monitor.step_line(record(99_999), 99_999, 3599.0)) <= 80


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


@pytest.mark.parametrize(("said", "columns"), [("120", 120), ("", 0), ("wide", 0)])
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
