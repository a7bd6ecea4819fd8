"""The benchmark runs, checks what it times, and prints the promises beside what was reached."""

from pathlib import Path

import pytest

from dist import cli
from dist.bench import tokenizer as bench
from tests.helpers import ROOT
from tests.helpers.tokenizer_texts import corpus


def test_the_benchmark_prints_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("".join(corpus()[:10]))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)  # peers have their own tests
    argv = ["bench", "tokenizer", str(tmp_path / "a.txt"), "--encode-mb", "0.05", "--rounds", "1"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for line in ("train, one thread", "| encode ", "encode on 2", "| decode ", "2 threads / 1"):
        assert line in out
    assert "100.00%" in out


def test_a_ratio_is_held_against_its_bar() -> None:
    def speed(mb_s: float) -> dict[str, float]:
        return {"mb_s": mb_s, "mb_s_array": mb_s / 2, "mb_s_one": mb_s / 2 / 1.9, "same": 1.0}

    def training(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "size": 9.0, "peak_mb": 5.0}

    rows = [
        *bench.training(
            {"ours": training(3.0), "rustbpe": training(10.0), "tokenizers": training(20.0)}
        ),
        *bench.encoding({"ours": speed(40.0), "tiktoken": speed(10.0)}),
        *bench.two_threads({"ours": speed(80.0)}),
        *bench.decoding({"ours": speed(39.0), "tiktoken": speed(10.0)}),
        *bench.large({"ours": training(5.0)}),
    ]
    assert {row.what: row.met for row in rows if row.bar} == {
        "train / rustbpe": True,
        "train / tokenizers": False,
        "encode / tiktoken": True,
        "encode, 2 threads / 1": True,
        "decode / tiktoken": False,
        "train on 500 M characters, peak": True,
    }


def test_an_empty_corpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("")
    assert cli.main(["bench", "tokenizer", str(tmp_path / "a.txt")]) == 1
    assert "the corpus holds no text" in capsys.readouterr().err
