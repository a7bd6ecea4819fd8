"""The trainer's benchmark runs, and holds what it finds against what is promised."""

from pathlib import Path

import pytest

from dist import cli
from dist.bench import convert
from dist.bench.train import Run, summary
from dist.launch import find_mpirun
from tests.helpers import ROOT


@pytest.fixture
def mpirun() -> None:
    """Skip where there is none."""
    try:
        find_mpirun()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("mpirun")
def test_the_benchmark_runs_and_prints_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["bench", "train", "--rounds", "1", "--steps", "7", "--threads", "2"]) == 0
    out = capsys.readouterr().out
    assert "one rank" in out and "two ranks of 1" in out
    assert sum("round 1" in line for line in out.splitlines()) == 2
    verdicts = [line for line in out.splitlines() if " met |" in line or " MISSED |" in line]
    assert len(verdicts) == 3


def test_figures_are_medians_held_against_their_bars() -> None:
    one = [Run(first, 10.0, 0.001, 1000.0) for first in (2.0, 9.0, 2.5)]
    two = [Run(5.0, 10.0, own, speed) for own, speed in ((0.03, 850.0), (0.03, 880.0), (0.0, 9e9))]
    verdicts = [row for row in summary({"one": one, "two": two}) if row.bar is not None]
    assert [(row.what, row.met) for row in verdicts] == [
        ("start to first step, one rank", True),
        ("trainer's own share of a step", False),
        ("tokens of two ranks / of one", False),
    ]
    assert verdicts[0].ours == 2.5 and verdicts[1].ours == 0.03 and verdicts[2].ratio == 0.88


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--steps", "5"], ["--threads", "1"]])
def test_wrong_usage_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "train", *words])


@pytest.mark.slow
def test_serving_is_measured_one_by_one_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "demo", "--rounds", "1", "--tokens", "3"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "| demo, " in line]
    assert ["one answer at a time" in row for row in rows] == [True, False, False]
    assert all("tokens/s" in row for row in rows)


def test_a_measurement_of_nothing_is_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "serve", "--tokens", "0"])


def test_writing_and_reading_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "demo", "--rounds", "1", "--tokens", "4", "--modes", "q8_0"]
    assert cli.main(["bench", *words]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "| demo, q8_0: " in line]
    assert ["write a token" in row for row in rows] == [True, False]
    assert "read 252 tokens" in rows[1] and all(" ms |" in row for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--modes", "int4"], "no mode 'int4'; known: float32, bf16, q8_0"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "generate", *words])
    assert said in capsys.readouterr().err


def test_conversions_are_timed_beside_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SETTLING", 0.0)
    words = [
        "convert",
        "demo",
        "--rounds",
        "1",
        "--formats",
        "gguf-q8_0",
        "--folder",
        str(tmp_path),
    ]
    assert cli.main(["bench", *words]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "| gguf-q8_0: " in line]
    assert [row.split("|")[1].split(": ")[1].strip() for row in rows] == [
        f"{what}{rest}"
        for what in ("export", "import")
        for rest in (" / copying", " / copying as many bytes", ", memory")
    ]
    assert all(" ms |" in row for i, row in enumerate(rows) if i % 3 < 2)
    assert all("≤ 2.00" in row for row in rows[::3]) and all("met" in row for row in rows[2::3])
    ratios = [float(row.split("|")[4]) for row in rows[:2]]
    # 34 bytes for 32 numbers and the file's head, beside 4 for each
    assert ratios[0] / ratios[1] == pytest.approx((34 / 32 + 4) / (2 * 34 / 32), rel=0.1)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--formats", "onnx"], "no format 'onnx'; known: safetensors, "),
    ],
)
def test_a_conversion_that_cannot_be_timed_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "convert", *words])
    assert said in capsys.readouterr().err
