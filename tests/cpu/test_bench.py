"""``myllm bench cpu`` runs, and its table says what it measured."""

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.bench import cpu, report, timing
from accel.bench.report import Row


def test_it_measures_and_writes_a_table_and_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shallow = dataclasses.replace(cpu.SMALL, n_layers=1)
    monkeypatch.setattr(cpu, "SMALL", shallow)
    monkeypatch.setattr(cpu, "STEPS", [cpu.STEPS[0]._replace(config=shallow)])
    monkeypatch.setattr(cpu, "peers", lambda: None)
    table, chart = tmp_path / "table.md", tmp_path / "chart.svg"
    parts = ["--parts", "share,few,decode"]
    command = ["--quick", *parts, "--table", str(table), "--chart", str(chart)]
    assert cpu.main(command) == 0
    text = table.read_text()
    assert text.strip().endswith("|") and text.strip() in capsys.readouterr().out
    [share] = [line for line in text.splitlines() if "outside products" in line]
    assert 0 < float(share.split("|")[4]) < math.inf
    assert text.count("decode a token, float32") == 2 and text.count("set to one thread") == 11
    assert chart.read_text().count("<svg") == 1


def test_the_time_within_functions_is_theirs_and_what_they_call() -> None:
    def inner() -> None:
        time.sleep(0.03)

    def outer() -> None:
        inner()
        time.sleep(0.02)
        inner()

    inside, whole = timing.within(outer, inner)
    assert 0.06 <= inside and inside + 0.02 <= whole
    assert timing.within(outer, outer)[0] >= 0.08
    with pytest.raises(ValueError, match="never was not called"):
        timing.within(outer, inner, never)


def never() -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--parts", "step,steps"], "no part 'steps'"),
        (["--table", "nowhere/x.md"], "no folder nowhere"),
        (["--chart", "x.gif"], "a .png or .svg file"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cpu.main(["--quick", *arguments])
    assert why in capsys.readouterr().err


def test_a_result_that_is_wrong_ends_its_part_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(bench: cpu.Bench) -> list[Row]:
        timing.check("an op", float("nan"), 1.0)
        return []

    monkeypatch.setitem(cpu.PARTS, "ops", wrong)
    monkeypatch.setitem(cpu.PARTS, "decode", lambda bench: [Row("a token", 0.001)])
    assert cpu.main(["--quick", "--parts", "ops,decode"]) == 1
    said = capsys.readouterr()
    assert "an op differs" in said.err and "a token" in said.out


def arguments(table: Path) -> argparse.Namespace:
    return report.parse(report.parser("x", "", "x"), ["--table", str(table)])


def test_a_row_is_in_the_table_before_the_next_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"

    def measure() -> Iterator[Row]:
        for what in ("one", "two"):
            yield Row(what, 1.0)
            assert f"| {what} " in table.read_text() and f"| {what} " in capsys.readouterr().out

    parser = report.parser("x", "", "x")
    assert report.run(parser, arguments(table), "here", {"part": measure}) == 0


def test_an_interruption_keeps_what_was_measured_and_says_so_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"

    def measure() -> Iterator[Row]:
        yield Row("one", 1.0)
        raise KeyboardInterrupt

    parts = {"first": measure, "second": lambda: pytest.fail("it went on")}
    assert report.run(report.parser("x", "", "x"), arguments(table), "here", parts) == 130
    assert table.read_text().splitlines()[-1].startswith("| one ")
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"myllm bench x: interrupted after 1 row, which {table} keeps"


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("time", 1.0, 2.0, 0.5), "≤ 0.50 met"),
        (Row("time", 1.1, 2.0, 0.5), "≤ 0.50 MISSED"),
        (Row("speed", 6.9, 2.0, 3.5, "MB/s"), "≥ 3.50 MISSED"),
        (Row("speed", 7.0, 2.0, 3.5, "MB/s"), "≥ 3.50 met"),
        (Row("start", 2.9, bar=3.0), "≤ 3,000 ms met"),
        (Row("share", 0.021, bar=0.02, unit="%"), "≤ 2.00 % MISSED"),
    ],
)
def test_a_promise_is_kept_or_missed(row: Row, verdict: str) -> None:
    assert verdict in str(row)


def test_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=take)
    monkeypatch.setattr(timing, "time", clock)
    functions = {"a": lambda: take(0.002), "b": lambda: take(0.5)}
    times = timing.alternate(functions, sample=0.02, want=3, budget=0)
    assert times == pytest.approx({"a": 0.002, "b": 0.5})


def test_the_chart_names_every_row_with_a_ratio(tmp_path: Path) -> None:
    report.chart([Row("one", 1.0, 4.0, 0.35), Row("another", 1.0)], tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert "<!-- one -->" in text and "<!-- another -->" not in text


def test_samples_that_waited_for_a_core_are_left_out() -> None:
    clean = [(1.0, 0.0), (2.0, 0.01), (3.0, 0.02)]
    assert timing._median([*clean, (9.0, 0.5), (9.0, 0.5)]) == 2.0
    assert timing._median([(9.0, 0.9), (1.0, 0.1), (2.0, 0.2), (3.0, 0.3)]) == 2.0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (638 * 2**20, "B", "638 MiB"),
        (7.5e-5, "s", "0.075 ms"),
        (1.0265, "s", "1,026 ms"),
        (18.74, "s", "18.7 s"),
        (0.0117, "%", "1.17 %"),
        (155.2, "MB/s", "155 MB/s"),
    ],
)
def test_quantities_have_three_digits(value: float, unit: str, text: str) -> None:
    assert report._quantity(value, unit) == text
