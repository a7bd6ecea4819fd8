"""The trainer's benchmark runs, and holds what it finds against what is promised."""

import pytest

from dist import bench, cli
from tests.helpers import ROOT


def test_the_benchmark_runs_and_prints_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["bench", "train", "--rounds", "1", "--steps", "7", "--threads", "2"]) == 0
    out = capsys.readouterr().out
    assert "one rank" in out and "two ranks of 1" in out
    verdicts = [line for line in out.splitlines() if line.endswith(("met", "MISSED"))]
    assert len(verdicts) == len(bench.BARS)


def test_figures_are_medians_held_against_their_bars(capsys: pytest.CaptureFixture[str]) -> None:
    one = [bench.Run(first, 10.0, 0.001, 1000.0) for first in (2.0, 9.0, 2.5)]
    two = [
        bench.Run(5.0, 10.0, own, speed)
        for own, speed in ((0.03, 850.0), (0.03, 880.0), (0.0, 9e9))
    ]
    bench._print_table(one, two, 2)
    lines = capsys.readouterr().out.splitlines()
    verdicts = {line[:34].strip(): line.split()[-1] for line in lines[-3:]}
    assert verdicts == {
        "start to first step, one rank, s": "met",
        "trainer's own share of a step": "MISSED",
        "tokens/s, two ranks / one": "MISSED",
    }


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--steps", "5"], ["--threads", "1"]])
def test_wrong_usage_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "train", *words])
