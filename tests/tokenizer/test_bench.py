"""The benchmark runs, checks what it times, and prints the promises beside what was reached."""

from pathlib import Path

import pytest

from dist import cli
from tests.helpers import ROOT
from tests.helpers.tokenizer_texts import corpus
from tokenizer import bench


def test_the_benchmark_prints_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("".join(corpus()[:10]))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)  # peers have their own tests
    argv = ["bench", "tokenizer", str(tmp_path / "a.txt"), "--encode-mb", "0.05", "--rounds", "1"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for line in ("ours", "encode ours, 1", "encode ours, 2", "decode ours, 1", "2 threads / 1"):
        assert line in out
    assert "100.00%" in out


def test_a_ratio_is_held_against_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def speed(mb_s: float) -> list[dict[str, float]]:
        return [{"mb_s": mb_s, "mb_s_array": mb_s / 2, "same": 1.0}]

    def training(seconds: float) -> list[dict[str, float]]:
        return [{"seconds": seconds, "size": 9.0, "peak_mb": 5.0}]

    bench._print_table(
        {
            "train ours, 1": training(3.0),
            "train rustbpe, 1": training(10.0),
            "train tokenizers, 1": training(20.0),
            "encode ours, 1": speed(40.0),
            "encode ours, 2": [{**speed(80.0)[0], "speedup": 1.9}],
            "encode tiktoken, 1": speed(10.0),
            "decode ours, 1": speed(39.0),
            "decode tiktoken, 1": speed(10.0),
        },
        1000,
    )
    lines = capsys.readouterr().out.splitlines()
    verdicts = {
        line[:34].strip(): line.split()[-1] for line in lines if line.endswith(("met", "MISSED"))
    }
    assert verdicts["train / rustbpe"] == "met" and verdicts["train / tokenizers"] == "MISSED"
    assert verdicts["encode / tiktoken"] == "met" and verdicts["decode / tiktoken"] == "MISSED"
    assert verdicts["encode, 2 threads / 1"] == "met"


def test_an_empty_corpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("")
    assert cli.main(["bench", "tokenizer", str(tmp_path / "a.txt")]) == 1
    assert "the corpus holds no text" in capsys.readouterr().err
