"""The demo, on a part of its corpus, and what the corpus is made of."""

import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from dist import cli, config, demo, monitor, sizing
from dist.corpus import Text, packages, standard_library
from dist.data import TrainingData, Windows
from dist.duplicates import hash_of, near_duplicates, shingles
from dist.model import load_model
from dist.shards import read_manifest
from dist.sizing import SIZES
from tokenizer import Tokenizer, train_from_iterator


@pytest.fixture(scope="module")
def library() -> list[Text]:
    return standard_library()


def test_the_corpus_is_the_standard_library_without_tests_and_tables(library: list[Text]) -> None:
    names = {t.name for t in library}
    assert {"argparse.py", "ast.py", "json/decoder.py", "topic yield"} <= names
    assert not any("test" in Path(n).parts[:-1] or "site-packages" in n for n in names)
    assert not {"encodings/cp437.py", "pydoc_data/topics.py"} & names
    assert sum(len(t.text) for t in library) > 5_000_000
    assert [t.name for t in standard_library()] == [t.name for t in library]


def test_the_packages_are_a_part_of_each_that_is_installed() -> None:
    found = packages(3_000_000)
    size = sum(len(t.text) for t in found)
    assert 3_000_000 <= size < 4_000_000 and packages(3_000_000) == found
    assert not any("tests" in Path(t.name).parts[:-1] for t in found)
    assert {"numpy", "numba"} <= {Path(t.name).parts[0] for t in found}


def test_near_duplicates_are_found_and_others_are_not(library: list[Text]) -> None:
    by_name = {t.name: t.text for t in library}
    words = by_name["argparse.py"].split()
    pasted = " ".join(by_name["argparse.py"].split()[:400] + by_name["ast.py"].split()[:400])
    changed = " ".join("x" if i % 60 == 0 else w for i, w in enumerate(words))
    others = [by_name["argparse.py"], by_name["ast.py"], "short"]
    candidates = [pasted, changed, by_name["tarfile.py"], "short", "another"]
    assert near_duplicates(candidates, others) == [True, True, False, True, False]
    assert near_duplicates(candidates, others, 0.9) == [True, False, False, True, False]
    assert near_duplicates(candidates, []) == [False] * 5 and near_duplicates([], others) == []


def test_shingles_are_runs_of_eight_words() -> None:
    text = " ".join(f"word{i}" for i in range(20))
    assert len(shingles(text)) == 13
    assert len(np.intersect1d(shingles(text), shingles(f"new {text} end"))) == 13
    assert len(np.intersect1d(shingles(text), shingles(text.replace("word9", "x")))) == 5
    assert hash_of("a") == 0xAF63DC4C8601EC8C  # FNV-1a's published value


def test_steps_are_planned_by_those_behind_a_slow_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = demo.PROBE_STEPS // 2
    records = [{"ms": 300.0}] + [{"ms": 60.0}] * (half - 1) + [{"ms": 40.0}] * half
    monkeypatch.setattr(sizing, "measured_speed", lambda compute: 1e9)
    monkeypatch.setattr(demo, "train", lambda run_file, ranks: 0)
    monkeypatch.setattr(monitor, "read_metrics", lambda folder: records)
    left = demo.TAIL_SECONDS + 100.5
    demo.choose_run(demo.Paths(tmp_path), time.monotonic() + left, 1, "float32")
    steps = config.load(tmp_path / "run.toml").train.steps
    assert "40 ms a step" in capsys.readouterr().out
    assert steps == pytest.approx(sizing.SHARE * 100 / 0.04, rel=0.01)


def test_a_demo_goes_on_in_the_mode_that_it_was_begun_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.load("demo", ["run.compute=float32"])
    (tmp_path / "run.toml").write_text(run.to_toml())
    assert cli.main(["demo", "--compute", "bf16", "--out", str(tmp_path), "--ranks", "1"]) == 1
    assert "was begun with --compute float32" in capsys.readouterr().err


def test_packages_are_mixed_in_where_the_library_would_be_read_more_than_twice(
    tmp_path: Path, library: list[Text]
) -> None:
    paths = demo.Paths(tmp_path)
    small = [t for t in library if t.name.startswith(("json/", "logging/", "topic "))]
    demo.write_texts(paths.other_texts, [t for t in library if t.name.startswith("email/")])
    demo.write_texts(paths.corpus, small)
    train_from_iterator([t.text for t in small], 400).save(paths.tokenizer)
    demo.pack_corpus(paths)
    folders = [paths.data / "train", paths.other_data / "train"]
    has, more = (read_manifest(folder).tokens for folder in folders)
    assert demo.mixture_of(paths, 2 * has) is None
    for times, share in ((3, 2 / 3), (1000, has / (has + more))):
        phase = demo.mixture_of(paths, times * has)
        assert phase is not None and phase.tokens == times * has
        assert [Path(source.path) for source in phase.sources] == folders
        weights = [source.weight for source in phase.sources]
        assert weights == pytest.approx([share, 1 - share], abs=1e-3)

    steps = 3 * has // 2048 + 1
    run = demo.settings_of(paths, 1, SIZES[2], steps, paths.run, "float32")
    assert run.steps == steps and len(run.data.phases) == 1 and not run.data.train
    assert config.load(_written(tmp_path / "run.toml", run)) == run
    data = TrainingData(run)
    found = {data.order[i].source for i in range(steps * run.train.global_batch)}
    assert found == {0, 1}
    alone = demo.settings_of(paths, 1, SIZES[2], 1, paths.run, "float32")
    assert alone.data.train == str(paths.data / "train") and alone.steps == 1
    shutil.rmtree(paths.other_data)  # an earlier version has packed no packages
    assert demo.mixture_of(paths, 1000 * has) is None


def _written(path: Path, run: config.RunFile) -> Path:
    path.write_text(run.to_toml(), encoding="utf-8")
    return path


@pytest.mark.parametrize("minutes", ["0", "nan", "inf"])
def test_minutes_without_an_end_are_wrong_usage(minutes: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--minutes", minutes])


def test_the_demo_goes_from_nothing_to_completions_and_goes_on_when_given_again(
    tmp_path: Path,
    library: list[Text],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    small = [t for t in library if t.name.startswith(("email/", "json/", "logging/", "topic "))]
    # a copy under another name must not end up on both sides
    monkeypatch.setattr(demo, "standard_library", lambda: small)
    monkeypatch.setattr(demo, "packages", lambda: small)  # copies of what is held out, too
    monkeypatch.setattr(demo, "LEAST_STEPS", 6)
    monkeypatch.setattr(demo, "PROBE_STEPS", 3)
    monkeypatch.setattr(demo, "NEW_TOKENS", 5)
    monkeypatch.chdir(tmp_path)  # into the folder `demo` beside us, whose name is a preset's too
    words = ["demo", "--minutes", "0.01"]
    assert cli.main(words) == 0
    said = capfd.readouterr().out
    for stage in ("corpus:", "tokenizer:", "packing:", "speed:", "training:", "held-out text,"):
        assert f"== {stage}" in said
    assert "2 ranks" in said and said.count("---- ") == 3 and "myllm pack MY_TEXTS" in said
    ours = said.split("---- ")[0].splitlines()
    assert [line for line in ours if len(line) > 80 and str(tmp_path) not in line] == []
    chosen = re.search(r"== compute: (float32|bf16) ", said)
    allowed = f"allowed {demo.GRADIENT_BARS[chosen[1]]:.0e}" if chosen else "a mode"
    assert allowed in " ".join(said.split())
    assert "zlib -9" in said
    size = SIZES[0]  # of a hundredth of a minute
    assert f"model: {size.d_model} wide, {size.n_layers} layers, for " in said
    chosen_run = (tmp_path / "demo" / "run.toml").read_bytes()
    model = config.load(tmp_path / "demo" / "run.toml").model
    assert (model.d_model, model.n_layers) == (size.d_model, size.n_layers)
    for name in ("loss.png", "loss.svg", "run.toml", "corpus.jsonl", "tokenizer.myllm"):
        assert (tmp_path / "demo" / name).stat().st_size > 0
    run = tmp_path / "demo" / "run"
    assert [r["step"] for r in monitor.read_metrics(run) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    held = [t.text for t in demo.read_corpus(demo.Paths(Path("demo")))[1]]
    assert read_manifest(tmp_path / "demo" / "data" / "heldout").documents == len(held) >= 1
    others = [
        json.loads(line)["text"] for line in Path("demo/packages.jsonl").read_text().splitlines()
    ]
    assert len(others) > len(small) / 4 and not set(others) & set(held)
    assert not any(near_duplicates(others, held))

    loaded = load_model(run, "cpu")
    windows = Windows(str(tmp_path / "demo" / "data" / "heldout"), config.load(run / "config.toml"))
    tokenizer = Tokenizer.load(tmp_path / "demo" / "tokenizer.myllm")
    worst, _ = demo.gradient_error(loaded.ops, loaded, windows)
    assert 0 < worst < 1e-4
    bits = demo.unigram_bits(demo.Paths(tmp_path / "demo"), windows, tokenizer)
    assert 1 < bits < 8

    # everything is there: it only shows again, and more time changes no choice that was made
    assert cli.main(["demo", "--minutes", "99"]) == 0
    assert (tmp_path / "demo" / "run.toml").read_bytes() == chosen_run
    again = capfd.readouterr().out
    assert "== corpus:" not in again and "== speed:" not in again
    assert "== demo/run.toml is there: going on with its run, for which --minutes was" in again
    assert "demo/run has taken all of its 6 steps" in again and again.count("---- ") == 3
