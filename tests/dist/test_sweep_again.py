"""A sweep in a folder that has runs: which of them it takes for its own, and what it shows."""

import re
import shutil
from pathlib import Path

import pytest

from dist import cli
from dist.sweep import results
from dist.sweep.trials import Budget, parse_axis, trials_of
from tests.helpers.runs import (
    prepare,
    random_walk,
    save_run_file,
    write_dataset,
)
from tests.helpers.sweeps import run_of, sweep
from tests.helpers.weights import write_random


def test_more_values_add_to_what_is_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ["--steps", "2", "--seeds", "2"]
    sweep(folder, tmp_path, *two, "--grid", "train.lr=1e-3,3e-3")
    for grid in ("train.lr=2e-3", "train.lr=3e-3"):  # a new value, and again a part of the old ones
        capsys.readouterr()
        status, report = sweep(folder, tmp_path, *two, "--grid", grid)
        assert status == 0 and len({r["folder"] for r in report["runs"]}) == 6
        found = {cell["settings"]["train.lr"]: cell["runs"] for cell in report["settings"]}
        assert found == {1e-3: 2, 2e-3: 2, 3e-3: 2} and report["others"] == []
        said = capsys.readouterr().out
        assert re.findall(r"│ +(0\.00\d) │", said) == [
            str(cell["settings"]["train.lr"]) for cell in report["settings"]
        ]
        assert "2 of 2 runs finished, beside 4 earlier ones: " in said and "not in the" not in said
    assert len([*(tmp_path / "runs").iterdir()]) == 6


def test_keys_may_be_given_in_another_order(folder: Path, tmp_path: Path) -> None:
    words = ["--steps", "2", "--grid", "train.lr=1e-3,3e-3", "--grid", "optim.clip=1.0", "--seeds"]
    sweep(folder, tmp_path, *words, "2")
    words[3], words[5] = words[5], "train.lr=1e-3"
    report = sweep(folder, tmp_path, *words, "1")[1]
    assert [cell["runs"] for cell in report["settings"]] == [2, 2]
    assert {tuple(r["settings"]) for r in report["runs"]} == {("optim.clip", "train.lr")}


def test_what_differs_from_earlier_runs_alone_is_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pair in (["train.lr=1e-3", "optim.clip=1.0"], ["train.lr=2e-3", "optim.clip=2.0"]):
        capsys.readouterr()
        sweep(folder, tmp_path, "--steps", "2", "--grid", *pair)
    said = capsys.readouterr().out
    assert all(re.search(rf"│ +0.00{n} │ +{n}.0 │", said) for n in (1, 2))


def test_minutes_of_a_setting_begun_earlier_are_those_of_new_seeds(
    folder: Path, tmp_path: Path
) -> None:
    words = ["--minutes", "0.002", "--grid"]
    (first,) = sweep(folder, tmp_path, *words, "train.lr=1e-3")[1]["runs"]
    shutil.rmtree(tmp_path / "probes")
    other_seed = [*words, "train.lr=1e-3", "--set", "train.seed=5"]
    second, same = sweep(folder, tmp_path, *other_seed)[1]["runs"]
    assert same == first and (second["seed"], second["steps"]) == (5, first["steps"])
    assert not (tmp_path / "probes").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "3", "--grid", "train.lr=1e-3,2e-3"],
        ["--steps", "2", "--grid", "train.lr=1e-3,2e-3", "--set", "optim.clip=2.0"],
        ["--steps", "2", "--grid", "train.lr=1e-3,2e-3", "--set", "run.eval_windows=3"],
        ["--steps", "2", "--grid", "train.lr=1e-3,2e-3", "--grid", "optim.beta2=0.9,0.99"],
        ["--steps", "2", "--grid", "optim.beta2=0.9,0.99"],
    ],
)
def test_runs_that_cannot_be_compared_are_kept_apart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    before = ["--steps", "2", "--grid", "train.lr=1e-3,3e-3"]
    first = sweep(folder, tmp_path, *before)[1]["runs"]
    capsys.readouterr()
    status, report = sweep(folder, tmp_path, *words)
    new = report["runs"]
    assert status == 0 and report["others"] == first and len(report["settings"]) == len(new)
    said = " ".join(capsys.readouterr().out.split())
    assert "not in the table: 2 of the earlier runs, with other keys, budget, texts, first" in said
    assert sweep(folder, tmp_path, *words)[1] == report
    report = sweep(folder, tmp_path, *before)[1]  # it goes both ways
    assert report["runs"] == first and report["others"] == new


def test_runs_on_texts_that_were_packed_anew_are_others(tmp_path: Path) -> None:
    folder, words = tmp_path / "f", ["--steps", "2", "--grid", "train.lr=1e-3"]
    folder.mkdir()
    save_run_file(prepare(folder, train__warmup_steps=1), folder / "run.toml")
    first = sweep(folder, tmp_path / "out", *words)[1]["runs"]
    for name in ("train", "heldout"):
        shutil.rmtree(folder / name)
        write_dataset(folder / name, random_walk(900, seed=8))
        status, report = sweep(folder, tmp_path / "out", *words)
        assert status == 0 and len(report["runs"]) == 1
        assert report["others"] == first, name
        first = [*report["runs"], *first]


def test_runs_begun_with_other_weights_are_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, base = tmp_path / "f", tmp_path / "out", tmp_path / "base"
    folder.mkdir()
    config = prepare(folder, train__warmup_steps=1, train__init=str(base))
    save_run_file(config, folder / "run.toml")
    words = ["--steps", "2", "--grid", "train.lr=1e-3"]
    write_random(base, config.model)
    first = sweep(folder, out, *words)[1]["runs"]
    assert sweep(folder, out, *words)[1]["runs"] == first
    shutil.rmtree(base)
    write_random(base, config.model, seed=8)
    status, report = sweep(folder, out, *words)
    assert status == 0 and len(report["runs"]) == 1 and report["others"] == first
    assert report["runs"][0]["loss"] != first[0]["loss"]

    words[-1] = f"train.init={base}"
    write_random(tmp_path / "gone", config.model)
    sweep(folder, out, *words[:-1], f"{words[-1]},{tmp_path / 'gone'}")
    shutil.rmtree(tmp_path / "gone")
    status, report = sweep(folder, out, *words)
    assert status == 0 and len(report["others"]) == 3  # of what is gone nobody knows what it was
    shutil.rmtree(base)
    capsys.readouterr()
    assert cli.main(["sweep", str(folder / "run.toml"), "-o", str(out), *words]) == 1
    assert f"{base} is no checkpoint and no folder of a run" in capsys.readouterr().err


def test_a_folder_may_be_moved_and_a_run_taken_from_it(folder: Path, tmp_path: Path) -> None:
    words, out = ["--steps", "2", "--grid"], tmp_path / "moved"
    sweep(folder, tmp_path / "out", *words, "train.lr=1e-3,3e-3")
    shutil.move(tmp_path / "out", out)
    (gone,) = (out / "runs").glob("lr_0.001*")
    shutil.rmtree(gone)
    report = sweep(folder, out, *words, "train.lr=2e-3")[1]
    assert [r["settings"]["train.lr"] for r in report["runs"]] == [2e-3, 3e-3]
    assert all(run_of(r).parent == out / "runs" and run_of(r).exists() for r in report["runs"])


def test_runs_of_a_sweep_that_was_killed_are_not_forgotten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--steps", "2", "--jobs", "1", "--grid"]
    with monkeypatch.context() as patch:
        patch.setattr(results, "figures", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sweep(folder, tmp_path, *words, "train.lr=1e-3,3e-3")
    report = sweep(folder, tmp_path, *words, "train.lr=2e-3")[1]
    assert [(r["settings"]["train.lr"], r["status"]) for r in report["runs"]] == [
        (2e-3, "finished"),
        (1e-3, "finished"),
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [{"seed": 1}]}', '{"runs": 3}'])
def test_results_that_cannot_be_read_are_not_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    kept = tmp_path / "results.json"
    kept.write_text(text)
    assert cli.main(["sweep", str(folder / "run.toml"), "-o", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err == f"myllm sweep: {kept} is not what a sweep writes: move it away\n"
    assert kept.read_text() == text and not (tmp_path / "runs").exists()


def test_a_run_keeps_its_folder_whatever_it_is_compared_with(folder: Path, tmp_path: Path) -> None:
    """The readable part of a folder's name is of the keys that differ among those of a start."""

    def name(*words: str) -> str:
        axes = [parse_axis(words)]
        return trials_of(str(folder / "run.toml"), [], axes, 1, Budget(), tmp_path)[0].name

    first = name("train.lr=1e-3,2e-3", "optim.clip=1.0,1.0")
    (tmp_path / "runs" / first).mkdir(parents=True)
    assert name("train.lr=1e-3,1e-3", "optim.clip=1.0,2.0") == first
    assert name("train.lr=1e-3,1e-3", "optim.clip=3.0,2.0") != first
