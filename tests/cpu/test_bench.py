"""``myllm bench cpu`` runs, and its table says what it measured."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel import bench, bench_report, bench_timing


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "quick", False)


def test_it_measures_and_writes_a_table_and_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("SMALL", "LARGE"):
        monkeypatch.setattr(bench, size, dataclasses.replace(bench.SMALL, n_layers=1))
    monkeypatch.setattr(bench, "peers", lambda: None)
    table, chart = tmp_path / "table.md", tmp_path / "chart.svg"
    command = ["--quick", "--parts", "share,decode", "--table", str(table), "--chart", str(chart)]
    assert bench.main(command) == 0
    text = table.read_text()
    assert text.strip().endswith("|") and text.strip() in capsys.readouterr().out
    shares = [line for line in text.splitlines() if "12.6 M" in line or "35 M" in line]
    ratios = [float(line.split("|")[4]) for line in shares]
    assert len(ratios) == 3 and all(0 < ratio < math.inf for ratio in ratios)
    assert text.count("decode a token, float32") == 2
    assert chart.read_text().count("<svg") == 1


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
    assert bench.main(["--quick", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_result_that_is_wrong_ends_its_part_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> list[bench_report.Row]:
        bench_timing.check("an op", float("nan"), 1.0)
        return []

    row = bench_report.Row("decode", "a token", None, 0.001, None)
    monkeypatch.setattr(bench, "op_rows", wrong)
    monkeypatch.setattr(bench, "decode_rows", lambda modes: [row])
    assert bench.main(["--quick", "--parts", "ops,decode"]) == 1
    said = capsys.readouterr()
    assert "an op differs" in said.err and "a token" in said.out


def test_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=take)
    monkeypatch.setattr(bench_timing, "time", clock)
    functions = {"a": lambda: take(0.002), "b": lambda: take(0.5)}
    times = bench_timing.alternate(functions, sample=0.02, want=3, budget=0)
    assert times == pytest.approx({"a": 0.002, "b": 0.5})


def test_the_chart_names_every_row_with_a_ratio(tmp_path: Path) -> None:
    rows = [
        bench_report.Row("ops", "one", 0.35, 1.0, 4.0),
        bench_report.Row("ops", "another", None, 1.0, None),
    ]
    bench_report.chart(rows, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert "<!-- one -->" in text and "<!-- another -->" not in text


def test_samples_that_waited_for_a_core_are_left_out() -> None:
    clean = [(1.0, 0.0), (2.0, 0.01), (3.0, 0.02)]
    assert bench_timing._median([*clean, (9.0, 0.5), (9.0, 0.5)]) == 2.0
    assert bench_timing._median([(9.0, 0.9), (1.0, 0.1), (2.0, 0.2), (3.0, 0.3)]) == 2.0


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [("memory", 638 * 2**20, "638 MiB"), ("ops", 7.5e-5, "0.075 ms"), ("step", 1.0265, "1026 ms")],
)
def test_quantities_have_three_digits(part: str, value: float, text: str) -> None:
    assert bench_report._quantity(part, value) == text
