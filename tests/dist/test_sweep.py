"""A sweep runs what its grid says, once, goes on when stopped, and reports what came of it."""

import contextlib
import json
import os
import shutil
import signal
import statistics
import threading
from pathlib import Path

import psutil
import pytest

from dist import cli, mode, monitor
from dist.config import RunFile
from dist.sizing import SHARE
from dist.sweep.cli import PROBE_STEPS
from dist.sweep.pool import finished, progress
from dist.sweep.trials import Budget, parse_axis, trials_of, varied
from reference.flops import training_flops
from tests.helpers.processes import wait_for
from tests.helpers.runs import (
    losses,
    prepare,
    save_run_file,
    tables,
    train,
    with_run,
)
from tests.helpers.sweeps import run_of, sweep

# ---- the grid ------------------------------------------------------------------------------------


def test_an_axis_has_keys_that_go_together_and_values_may_be_lists() -> None:
    axis = parse_axis(["model.window=[4, 0],[0,4],0", "train.schedule=cosine, wsd,linear"])
    assert axis.keys == ("model.window", "train.schedule")
    assert axis.values == (("[4, 0]", "cosine"), ("[0,4]", "wsd"), ("0", "linear"))
    assert varied([{"a.b": 1, "a.c": "x"}, {"a.b": 1, "a.c": "y"}]) == ("a.c",)
    assert varied([{"a.b": 1, "a.c": "x"}]) == ("a.b",) and varied([{}]) == varied([]) == ()


def test_axes_multiply_and_every_setting_gets_every_seed(folder: Path, tmp_path: Path) -> None:
    axes = [
        parse_axis(["train.lr=1e-3,3e-3,9e-3"]),
        parse_axis(["model.d_model=8,16", "model.d_ff=24,48"]),
    ]
    trials = trials_of(str(folder / "run.toml"), [], axes, 2, Budget(), tmp_path)
    found = [(t.run.train.lr, t.run.model.d_model, t.run.model.d_ff, t.seed) for t in trials]
    shapes = [(8, 24), (16, 48)]
    assert found == [(lr, *s, seed) for lr in (1e-3, 3e-3, 9e-3) for s in shapes for seed in (0, 1)]
    assert all(t.run.train.seed == t.seed and t.run.train.steps == 8 for t in trials)
    assert len({t.run.run.out for t in trials}) == 12
    assert trials[0].label == "lr 0.001, d_model 8, d_ff 24, seed 0"
    assert trials[0].settings == {"train.lr": 1e-3, "model.d_model": 8, "model.d_ff": 24}


def test_what_a_run_learns_decides_its_folder(folder: Path, tmp_path: Path) -> None:
    def names(budget: Budget, *overrides: str) -> set[str]:
        axes = [parse_axis(["train.lr=1e-3,3e-3"])]
        return {
            t.name
            for t in trials_of(str(folder / "run.toml"), overrides, axes, 1, budget, tmp_path)
        }

    assert names(Budget()) == names(Budget(), "run.log_every=3")
    # and by what it is judged, so that seeds of two starts are never averaged over two measures
    for other in ("run.eval_windows=3", "run.backend=cpu"):
        assert not names(Budget()) & names(Budget(), other)
    assert not names(Budget()) & names(Budget(), "optim.clip=2.0")
    assert not names(Budget()) & names(Budget("steps", 9))


@pytest.mark.parametrize(("kind", "amount"), [("steps", 40), ("tokens", 40 * 8 * 12 + 3)])
def test_a_budget_sets_the_steps_and_the_schedule_keeps_its_shares(
    folder: Path, tmp_path: Path, kind: str, amount: float
) -> None:
    words = ["train.schedule=wsd", "train.decay_steps=4"]
    (trial,) = trials_of(str(folder / "run.toml"), words, [], 1, Budget(kind, amount), tmp_path)
    t = trial.run.train
    assert (t.steps, t.warmup_steps, t.decay_steps) == (40, 10, 20)


def test_operations_are_shared_fairly_between_models(folder: Path, tmp_path: Path) -> None:
    axes = [parse_axis(["model.d_ff=8,800"])]
    path, budget = str(folder / "run.toml"), Budget("flops", 1e9)
    for trial in trials_of(path, [], axes, 1, budget, tmp_path):
        run = trial.run
        step = training_flops(run.model, run.window, causal=False) * run.tokens_per_step
        assert abs(run.steps * step - 1e9) <= step / 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "train.lrr=1,2"], "unknown key train.lrr"),
        (["--grid", "optm.lr=1,2"], "unknown table [optm]"),
        (["--grid", "train.lr=1e-3,fast"], "--grid train.lr=fast: train.lr must be a positive"),
        (["--set", "train.lr=fast"], "--set train.lr=fast: train.lr must be a positive number"),
        (["--grid", "model.n_kv_heads=1,3"], "n_heads (2) must be a multiple of n_kv_heads (3)"),
        (["--grid", "train.lr"], "--grid takes table.key=value,value"),
        (["--grid", "train.lr=1,"], "--grid takes table.key=value,value"),
        (["--grid", "train.lr=1,2", "optim.clip=1.0"], "train.lr: 2, optim.clip: 1"),
        (["--grid", "train.lr=1,2", "--grid", "train.lr=3"], "--grid has train.lr twice"),
        (["--grid", "train.lr=1,1.0"], "asks for the same run twice: lr 1.0, seed 0"),
        (["--grid", "train.steps=3,4", "--tokens", "900"], "both say how long a run is"),
        (["--grid", "train.seed=3,4", "--seeds", "2"], "both say which seeds"),
        (["--grid", "run.out=a,b"], "cannot change run.out"),
        (["--grid", "model.vocab_size=40,30"], "packed with 40 token ids"),
        (["--grid", "data.train=nowhere"], "nowhere"),
        (["--grid", "run.backend=abacus"], "abacus"),
        (["--grid", "run.compute=auto,float32"], "give that by --set run.compute=auto"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    out = tmp_path / "out"
    assert cli.main(["sweep", str(folder / "run.toml"), "-o", str(out), *words]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_a_file_in_place_of_the_folder_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], compute: str
) -> None:
    path = str(folder / "run.toml")
    assert cli.main(["sweep", path, "-o", path, "--set", f"run.compute={compute}"]) == 1
    assert capsys.readouterr().err == f"myllm sweep: {path} is a file: name another folder\n"


@pytest.mark.parametrize(
    "word", ["--steps=2.5", "--tokens=0", "--minutes=nan", "--minutes=1e308", "--seeds=0"]
)
def test_a_wrong_number_is_wrong_usage(folder: Path, tmp_path: Path, word: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["sweep", str(folder / "run.toml"), "-o", str(tmp_path / "out"), word])


def test_a_run_whose_last_line_was_lost_is_finished(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    assert not finished(config)
    assert train(config) == 0 and finished(config)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "save_ms" not in line))
    assert finished(config)
    (tmp_path / "run" / "checkpoints" / "latest").unlink()
    assert not finished(config)


def test_the_progress_of_a_run_is_its_newest_step(folder: Path, tmp_path: Path) -> None:
    (trial,) = trials_of(str(folder / "run.toml"), [], [], 1, Budget(), tmp_path)
    assert progress(trial.run) == 0
    path = Path(trial.run.run.out) / monitor.METRICS
    path.parent.mkdir(parents=True)
    filler = f'{{"step": 4, "loss": {"1" * 4090}}}\n'  # cut where the end is read
    lines = ['{"step": 5, "lr": 1}', '{"step": 6, "lr": 1}', '{"step": 5, "save_ms": 1}', '{"st']
    path.write_text(filler + "\n".join(lines))
    assert progress(trial.run) == 6  # a checkpoint is known later than the next step


# ---- the runs ------------------------------------------------------------------------------------


def test_runs_are_those_of_train_and_are_not_repeated(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two settings diverges; the other's runs are what ``myllm train`` makes of them."""
    out, words = tmp_path / "out", ["--grid", "train.lr=1e-2,1e30", "--steps", "12"]
    status, report = sweep(folder, out, *words)
    said = capsys.readouterr().out
    assert status == 1 and "1 of 2 runs finished" in said and "not finite in 5 steps" in said
    good, bad = report["runs"]
    assert (good["status"], bad["status"]) == ("finished", "begun")
    assert good["settings"] == {"train.lr": 0.01} and good["steps"] == 12
    assert good["tokens"] == 12 * 8 * 12 and len(good["heldout"]) == 1

    direct = prepare(tmp_path, train__warmup_steps=3, train__steps=12)
    assert train(direct) == 0
    records = monitor.read_metrics(Path(direct.run.out))
    held = next(r["heldout_loss"] for r in records if "heldout_loss" in r)
    assert good["heldout_loss"] == held == report["settings"][0]["mean"]
    assert report["score"] == "heldout_loss" and report["settings"][0]["spread"] is None
    mine = [r["loss"] for r in monitor.read_metrics(run_of(good)) if "lr" in r]
    assert mine == losses(direct)

    before = (run_of(good) / "metrics.jsonl").stat().st_mtime_ns
    status, report = sweep(folder, out, "--grid", "train.lr=1e-2", "--steps", "12", "--seeds", "2")
    assert status == 0 and (run_of(good) / "metrics.jsonl").stat().st_mtime_ns == before
    (cell,) = report["settings"]
    assert report["runs"][2]["status"] == "begun"  # the other setting's, of the first start
    values = [r["heldout_loss"] for r in report["runs"][:2]]
    assert values[0] == held != values[1] and [r["seed"] for r in report["runs"][:2]] == [0, 1]
    assert cell["mean"] == statistics.fmean(values) and cell["spread"] == statistics.stdev(values)
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of them finished before" in said and f"{cell['mean']:.4f}" in said
    assert f"{cell['spread']:.4f}" in said
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_sweep_goes_on_where_it_was(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "out", ["--steps", "120", "--jobs", "1", "--seeds", "2"]
    (first, second) = trials_of(str(folder / "run.toml"), [], [], 2, Budget("steps", 120), out)

    def stop() -> None:
        wait_for(lambda: len(monitor.read_metrics(Path(first.run.run.out))) > 3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    status, report = sweep(folder, out, *words)
    thread.join()
    assert status == 128 + signal.SIGTERM
    assert [r["status"] for r in report["runs"]] == ["begun", "not begun"]
    assert not finished(first.run) and not Path(second.run.run.out).exists()
    lines = capsys.readouterr().out.splitlines()
    assert "the same command goes on" in lines[-1]
    told = [line for line in lines if str(tmp_path) not in line]  # of such lines one word is longer
    assert any("seed 0: NOT finished: stopped" in line for line in told)
    assert max(map(len, told)) <= 80

    status, report = sweep(folder, out, *words)
    assert status == 0 and [r["status"] for r in report["runs"]] == ["finished"] * 2
    log = (Path(first.run.run.out) / "log.txt").read_text()
    assert log.count("going on after step") == 1
    direct = with_run(first.run, out=str(tmp_path / "direct"))
    assert train(direct) == 0
    mine = [r["loss"] for r in monitor.read_metrics(run_of(report["runs"][0])) if "lr" in r]
    assert mine == losses(direct)


def test_minutes_become_steps_by_the_speed_of_a_few(folder: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out", ["--minutes", "0.002"]
    status, report = sweep(folder, out, *words)
    (run,) = report["runs"]
    (probe,) = (out / "probes").iterdir()
    ms = [r["ms"] for r in monitor.read_metrics(probe) if "ms" in r]
    assert len(ms) == PROBE_STEPS
    assert run["steps"] == max(1, int(SHARE * 60e3 * 0.002 / statistics.median(ms[2:])))
    assert status == 0 and sweep(folder, out, *words)[1]["runs"] == [run]  # the speed is kept


def test_settings_that_cost_the_same_get_as_many_steps(folder: Path, tmp_path: Path) -> None:
    words = ["--minutes", "0.002", "--grid"]
    grid = ["train.lr=1e-3,2e-3,1e-2", "--grid", "model.d_ff=24,96"]
    status, report = sweep(folder, tmp_path, *words, *grid)
    by_width: dict[int, set[int]] = {24: set(), 96: set()}
    for run in report["runs"]:
        by_width[run["settings"]["model.d_ff"]].add(run["steps"])
    assert status == 0 and [len(steps) for steps in by_width.values()] == [1, 1]
    took: dict[int, list[float]] = {24: [], 96: []}
    for probe in (tmp_path / "probes").iterdir():
        ms = [r["ms"] for r in monitor.read_metrics(probe) if "ms" in r]
        took[96 if "d_ff_96" in probe.name else 24] += ms[2:]
    for width, steps in by_width.items():
        assert steps == {max(1, int(SHARE * 60e3 * 0.002 / statistics.median(took[width])))}
    shutil.rmtree(tmp_path / "probes")
    grid[0] = "train.lr=1e-3,5e-3"  # one more joins them
    report = sweep(folder, tmp_path, *words, *grid)[1]
    assert {run["steps"] for run in report["runs"]} == by_width[24] | by_width[96]
    assert not (tmp_path / "probes").exists()


def test_runs_keep_their_steps_when_the_probes_are_gone(folder: Path, tmp_path: Path) -> None:
    """What begun is not measured again: another speed would make other runs of the same ones."""
    words = ["--minutes", "0.002", "--grid", "train.lr=1e-3,1e-2"]
    status, report = sweep(folder, tmp_path, *words)
    runs = report["runs"]
    assert status == 0
    shutil.rmtree(tmp_path / "probes")
    assert sweep(folder, tmp_path, *words)[1]["runs"] == runs
    assert not (tmp_path / "probes").exists()
    # and those that join them take as many
    status, report = sweep(folder, tmp_path, *words, "--seeds", "2")
    steps = {json.dumps(run["settings"]): run["steps"] for run in runs}
    assert status == 0 and len(report["runs"]) == 4
    assert all(run["steps"] == steps[json.dumps(run["settings"])] for run in report["runs"])


def test_the_mode_of_the_first_start_is_that_of_all(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeds of one setting are compared: they must not differ by what the clock said that day."""
    asked: list[str] = []

    def settled(run: RunFile, newest: Path | None) -> tuple[RunFile, str]:
        asked.append(run.run.compute)
        return mode.in_mode(run, "float32"), "compute: float32 (chosen)"

    monkeypatch.setattr(mode, "settled", settled)
    words = ["--set", "run.compute=auto", "--steps", "2", "--jobs", "1"]
    status, found = sweep(folder, tmp_path, *words)
    assert status == 0 and asked == ["auto"]
    assert [r["compute"] for r in found["runs"]] == ["float32"]
    capsys.readouterr()
    status, found = sweep(folder, tmp_path, *words, "--seeds", "2")
    assert status == 0 and asked == ["auto"] and len(found["runs"]) == 2
    assert "compute: float32, as before" in capsys.readouterr().out
    (tmp_path / "compute").write_text("fast")
    assert cli.main(["sweep", str(folder / "run.toml"), "-o", str(tmp_path), *words]) == 1
    assert "compute must hold one of float32, bf16, got 'fast'" in capsys.readouterr().err


def test_two_sweeps_do_not_write_to_one_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dist.lock import locked

    with locked(tmp_path, "sweep"):
        assert cli.main(["sweep", str(folder / "run.toml"), "-o", str(tmp_path)]) == 1
    assert "another sweep is writing" in capsys.readouterr().err


def test_phases_say_how_long_a_run_is(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tables(folder, train__steps=0)
    del given["data"]["train"]
    phase = {"tokens": 200, "sources": ({"path": str(folder / "train"), "weight": 1.0},)}
    given["data"]["phases"] = (phase,)
    from dist.config import from_tables

    config: RunFile = from_tables(given)
    path = str(save_run_file(config, tmp_path / "run.toml"))
    assert cli.main(["sweep", path, "--steps", "3", "-o", str(tmp_path / "o")]) == 1
    assert "data.phases say how long a run is: leave --steps out" in capsys.readouterr().err
    (trial,) = trials_of(path, [], [], 1, Budget(), tmp_path)
    assert trial.run.steps == 3


def test_settings_with_other_held_out_texts_are_told_apart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(folder / "heldout", tmp_path / "other")
    both = [f"data.train={','.join([str(folder / 'train')] * 2)}"]
    both += [f"data.heldout={folder / 'heldout'},{other}"]
    sentence = "data.heldout differs: only what was measured on the same text can be compared"
    status, _ = sweep(folder, tmp_path / "out", "--grid", *both, "--steps", "2")
    said = capsys.readouterr().out
    (header,) = (line for line in said.splitlines() if "┃" in line)
    assert status == 0 and header.split("┃")[1].strip() == "heldout" and sentence in said
    assert "in all rows: train " in said
    sweep(folder, tmp_path / "out", "--grid", "train.lr=1e-3,2e-3", "--steps", "2")
    assert sentence not in capsys.readouterr().out


# ---- what goes wrong with some -------------------------------------------------------------------


def test_a_run_that_ends_without_a_number_has_diverged_and_the_others_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer bad steps than end a run: it takes all of them."""
    words = ["--grid", "train.lr=1e30,1e-2", "--steps", "4", "--jobs", "1"]
    for _ in range(2):  # given again, it is still not one of those that came well
        status, report = sweep(folder, tmp_path, *words)
        assert [r["status"] for r in report["runs"]] == ["diverged", "finished"]
        good, bad = report["settings"]
        assert good["mean"] is not None and good["settings"] == {"train.lr": 0.01}
        assert bad["mean"] is None and status == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "1 of 2 runs finished" in said and "diverged" in said
    assert "2 of them finished before" in said


def test_a_setting_whose_first_steps_fail_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--grid", "train.lr=1e30,1e-2", "--minutes", "0.002"]
    status, report = sweep(folder, tmp_path, *words)
    bad, good = report["runs"]
    assert status == 1 and (bad["status"], good["status"]) == ("not begun", "finished")
    assert "not finite in 5 steps" in bad["said"] and not run_of(bad).exists()
    said = capsys.readouterr().out
    assert "lr 1e+30, seed 0: NOT begun, as its first steps failed: " in said


def test_a_run_that_is_killed_says_by_what(folder: Path, tmp_path: Path) -> None:
    (trial,) = trials_of(str(folder / "run.toml"), [], [], 1, Budget("steps", 4000), tmp_path)

    def kill() -> None:
        wait_for(lambda: len(monitor.read_metrics(Path(trial.run.run.out))) > 3)
        mine = str(Path(trial.run.run.out) / "run.toml")
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.ZombieProcess):  # of what has ended
                if mine in process.cmdline():
                    process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    status, report = sweep(folder, tmp_path, "--steps", "4000", "--jobs", "1")
    thread.join()
    (run,) = report["runs"]
    assert status == 1 and run["said"].startswith("ended by signal 9 (Killed")


def test_runs_without_held_out_text_are_compared_by_what_all_have(
    folder: Path, tmp_path: Path
) -> None:
    held = json.dumps(str(folder / "heldout"))
    status, report = sweep(folder, tmp_path, "--grid", f'data.heldout={held},""', "--steps", "3")
    assert status == 0 and report["score"] == "loss"
    assert all(cell["mean"] is not None for cell in report["settings"])
