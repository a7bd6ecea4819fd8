"""``myllm bench cpu`` runs, and its table says what it measured."""

import dataclasses
from pathlib import Path

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
    assert len(shares) == 3 and all(0 < float(line.split("|")[4]) < 1 for line in shares)
    assert text.count("decode a token, float32") == 2
    assert chart.read_text().count("<svg") == 1


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--parts", "step,steps"]) == 2
    assert "no part 'steps'" in capsys.readouterr().err


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
