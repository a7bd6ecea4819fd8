"""``run.compute = "auto"``: the faster mode is taken, said, written down and kept."""

import itertools
from pathlib import Path
from typing import Any

import pytest

import accel
from dist import config, mode, warm
from tests.helpers.runs import prepare, train, with_run

AUTO = config.load("demo", ["run.compute=auto"])


def measured(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Let the modes take these seconds; others are not to be had here."""

    def load(backend: str, compute: str) -> Any:
        if compute not in seconds:
            raise ImportError(f"no {compute} here")
        return compute

    monkeypatch.setattr(warm, "compile_kernels", lambda run: None)
    monkeypatch.setattr("accel.load", load)
    monkeypatch.setattr(mode, "_product", lambda ops, run: lambda: seconds[ops])
    monkeypatch.setattr(mode, "SECONDS", 0.0)


@pytest.mark.parametrize(("bf16", "best"), [(0.5, "bf16"), (1.5, "float32")])
def test_the_faster_mode_is_taken_and_said(
    bf16: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, float32=1.0, bf16=bf16)
    run, said = mode.settled(AUTO, None)
    assert run.run.compute == best
    assert said.startswith(f"compute: {best} (") and f"bf16 {1e3 * bf16:.1f} ms" in said


def test_modes_take_turns_so_that_other_work_meets_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is ever more taken by others does not speak for the mode timed first."""
    measured(monkeypatch, float32=1.0, bf16=0.5)
    calls = itertools.count(1)
    product = {"float32": lambda: 1.0 * next(calls), "bf16": lambda: 0.5 * next(calls)}
    monkeypatch.setattr(mode, "_product", lambda ops, run: product[ops])
    found = mode.measure(AUTO)
    assert found["bf16"] < 0.7 * found["float32"]


def test_the_only_mode_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, float32=1.0)
    run, said = mode.settled(AUTO, None)
    assert run.run.compute == "float32" and "the only one here" in said


def test_a_mode_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, float32=1.0, bf16=0.5)
    run = config.load("demo", ["run.compute=float32"])
    assert mode.settled(run, None) == (run, "")


def test_a_run_writes_its_mode_down_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mode, "SECONDS", 0.01)
    run = prepare(tmp_path, train__steps=4, run__compute="auto", run__backend="cpu")
    assert train(run) == 0
    said = capsys.readouterr().out
    out = Path(run.run.out)
    chosen = config.load(out / "config.toml").run.compute
    assert chosen in accel.COMPUTE and f"compute: {chosen}" in said
    measured(monkeypatch)  # nothing can be measured any more, nor need it
    assert train(with_run(run, keep=3)) == 0
    assert f"compute: {chosen}, as before" in capsys.readouterr().out
