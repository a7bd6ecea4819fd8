"""The demo, on a part of its corpus, and what the corpus is made of."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dist import cli, config, demo, monitor, sizing
from dist.corpus import Text, packages, standard_library
from dist.data import TrainingData, Windows
from dist.duplicates import Apart, hash_of, near_duplicates, shingles
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


def test_packages_are_read_in_an_order_of_their_own_and_without_what_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{name}/m{i}.py": f"{name} = {i}\n" for name in ("a", "b", "c") for i in range(20)}
    files |= {"top.py": "x = 1\n", "a/tests/t.py": "x = 1\n", "a/made.py": "# do not edit\n"}
    files |= {"a/empty.py": " \n", "a/long.py": "x = 1\n" * 200_000, "a/b.txt": "x"}
    files |= {"a/rot.py": "# coding: rot13\n", "a/sixteen.py": "# coding: utf-16\nx\n"}
    files |= {"a/lone.py": "# coding: unicode_escape\nx = '\\ud800'\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "a" / "bytes.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "a" / "gone.py").symlink_to("nowhere")
    (tmp_path / "a" / "folder.py").mkdir()
    monkeypatch.setattr(
        "sysconfig.get_paths", lambda: dict.fromkeys(("purelib", "platlib"), tmp_path)
    )
    found = [t.name for t in packages()]
    assert sorted(found) == sorted(
        ["top.py", *(f"{name}/m{i}.py" for name in "abc" for i in range(20))]
    )
    assert {name[0] for name in found[:15]} >= {"a", "b", "c"}
    assert [t.name for t in packages()] == found and [t.text for t in packages()] == [
        files[name] for name in found
    ]


def test_what_holds_too_much_of_a_held_out_text_is_not_taken() -> None:
    words = [f"word{i}" for i in range(400)]
    held = [" ".join(words[:200]), " ".join(words[200:])]
    apart = Apart(held, 0.1)
    assert apart.takes("nothing of them") and apart.takes(" ".join(words[:17]))  # 10 of 193 runs
    assert not apart.takes(held[0]) and not apart.takes(" ".join(words[100:125]))
    assert apart.takes(" ".join(words[100:116]))  # 9 more: 19 of 193
    assert not apart.takes(" ".join(words[150:159])) and apart.takes(" ".join(words[:17]))
    assert apart.takes(" ".join(words[200:218]))  # of the other


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


def planned(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let steps take so long, but for the first of a run, on a machine for the smallest model.

    And let the clock stand still.
    """
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: 0.0))
    half = demo.PROBE_STEPS // 2
    slow = [{"ms": 300.0}] + [{"ms": 60.0}] * (half - 1)
    monkeypatch.setattr(sizing, "measured_speed", lambda compute: 1e9)
    monkeypatch.setattr(demo, "train", lambda run_file, ranks: 0)
    monkeypatch.setattr(monitor, "read_metrics", lambda _: slow + [{"ms": 1e3 * seconds}] * half)


def test_steps_are_planned_by_those_behind_a_slow_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, 0.04)
    monkeypatch.setattr(demo, "read_manifest", lambda folder: SimpleNamespace(tokens=10**9))
    left = demo.TAIL_SECONDS + 100.5
    demo.choose_run(demo.Paths(tmp_path), left, 1, "float32")
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
    tmp_path: Path,
    library: list[Text],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = demo.Paths(tmp_path)
    small = [t for t in library if t.name.startswith(("json/", "logging/", "topic "))]
    installed = [t for t in library if t.name.startswith(("email/", "topic "))]  # and copies
    monkeypatch.setattr(demo, "packages", lambda: iter(installed))
    demo.write_texts(paths.corpus, small)
    train_from_iterator([t.text for t in small], 400).save(paths.tokenizer)
    demo.packed(paths, paths.corpus, paths.data, demo.HELDOUT)
    folders = [paths.data / "train", paths.package_data / "train"]
    has = read_manifest(folders[0]).tokens
    assert demo.mixture_of(paths, 1000 * has) is None  # there is nothing yet to be mixed in

    planned(monkeypatch, 0.04)
    left = demo.TAIL_SECONDS + 0.04 * 2.6 * has / 512 / sizing.SHARE
    demo.choose_run(paths, left, 1, "float32")
    run = config.load(paths.run_file)
    assert run.tokens_per_step == 512 and run.steps == pytest.approx(2.6 * has / 512, abs=2)
    (phase,) = run.data.phases
    assert phase.tokens == 512 * run.steps and not run.data.train
    assert [Path(source.path) for source in phase.sources] == folders
    weights = [source.weight for source in phase.sources]
    share = demo.READINGS * has / phase.tokens
    assert weights == pytest.approx([share, 1 - share], abs=1e-3)
    assert f"{weights[0]:.0%} from {folders[0]}" in " ".join(capsys.readouterr().out.split())
    data = TrainingData(run)
    found = [data.order[i].source for i in range(1024)]
    assert found.count(0) == pytest.approx(1024 * share, abs=1)

    more = read_manifest(folders[1]).tokens
    assert 0.4 * has < more < 0.8 * has  # what is beyond two readings, and not all that there is
    held = [t.text for t in demo.read_corpus(paths)[1]]
    others = [json.loads(line)["text"] for line in paths.packages.read_text().splitlines()]
    assert held and len(others) > 5 and not set(others) & set(held)
    assert near_duplicates(held, others) == [False] * len(held)
    phase = demo.mixture_of(paths, 1000 * has)  # each is read as often as the other
    assert phase is not None
    assert phase.sources[0].weight == pytest.approx(has / (has + more), abs=1e-3)
    assert demo.mixture_of(paths, 2 * has) is None

    shutil.rmtree(paths.package_data)  # an interruption before they were packed
    demo.prepare_packages(paths, has)
    assert read_manifest(folders[1]).tokens == more
    demo.prepare_packages(paths, has)
    alone = demo.settings_of(paths, 1, SIZES[2], 1, paths.run, "float32")
    assert alone.data.train == str(folders[0]) and alone.steps == 1


def test_without_packages_the_library_is_all_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = demo.Paths(tmp_path)
    demo.write_texts(paths.corpus, [Text(f"{i}", f"{i} some text\n" * 99) for i in range(40)])
    train_from_iterator(["some text"], 300).save(paths.tokenizer)
    demo.packed(paths, paths.corpus, paths.data, demo.HELDOUT)
    monkeypatch.setattr(demo, "packages", lambda: iter(()))
    demo.prepare_packages(paths, 10**6)
    assert demo.mixture_of(paths, 10**9) is None


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
    monkeypatch.setattr(demo, "READINGS", 0)  # so that packages are mixed into any run
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
    sources = config.load("demo/run.toml").data.phases[0].sources
    assert [source.path for source in sources] == ["demo/data/train", "demo/packages/train"]

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
