"""Training from the command, on one rank: resuming, guards, signals, what it says and writes."""

import dataclasses
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel import launcher
from dist import checkpoint, cli, monitor
from dist.comm import AllRanksError, Solo, start
from dist.config import RunFile, from_tables
from dist.data import Windows
from dist.differences import same_learning
from dist.step import Stepper
from dist.stopping import StopRequest
from dist.train import Trainer
from reference.params import decoder_layout
from tests.helpers.runs import (
    digest,
    losses,
    prepare,
    random_walk,
    save_run_file,
    tables,
    train,
    with_run,
    write_dataset,
)


def test_a_run_learns_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"run__eval_every": 20, "run__log_every": 10, "model__dropout_residual": 0.1}
    config = prepare(tmp_path, train__steps=40, **changes)
    assert train(config) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("step") and "/40" in line]
    assert [line.split("/")[0] for line in lines] == [f"step {n:>2}" for n in (1, 10, 20, 30, 40)]
    for part in ("loss 2.", "norm", "tok/s", "% peak", "ETA 0s"):
        assert part in lines[-1]
    assert max(map(len, lines)) <= 80
    assert "step 20: held-out loss" in said
    records = monitor.read_metrics(Path(config.run.out))
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 41))
    assert steps[-1]["loss"] < 2.6 < 3.4 < steps[0]["loss"]
    evals = [r for r in records if "heldout_loss" in r]
    assert [r["step"] for r in evals] == [20, 40]
    assert evals[1]["perplexity"] == pytest.approx(np.exp(evals[1]["heldout_loss"]))
    resolved = from_tables_file(Path(config.run.out) / "config.toml")
    assert resolved == config


@pytest.mark.parametrize(
    ("window", "unused"),
    [
        (12, "\n  the last 4 tokens are not used: less than a window\n"),
        (9, "\n  the last token is not used: less than a window\n"),
        (10, ""),
    ],
)
def test_tokens_that_fill_no_window_are_told_where_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], window: int, unused: str
) -> None:
    config = prepare(tmp_path, train__steps=1, model__context_length=window)
    assert train(config) == 0
    said = capsys.readouterr().out
    assert f"1,900 tokens, {1900 // window} windows{';' if unused else ''}\n" in said
    assert unused in said and ("not used" in said) == bool(unused)


def test_tensorboard_gets_the_numbers_and_forgets_what_a_resumed_run_does_again(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = prepare(tmp_path, run__tensorboard=True, run__checkpoint_every=2)
    assert train(config) == 0
    (Path(config.run.out) / "checkpoints" / "latest").write_text("step-00000004\n")
    assert train(config) == 0
    events = EventAccumulator(str(Path(config.run.out) / "tensorboard"))
    events.Reload()
    seen = events.Scalars("loss")
    assert [event.step for event in seen] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in seen] == pytest.approx(losses(config))
    assert [event.step for event in events.Scalars("heldout_loss")] == [6]


def test_tensorboard_is_asked_for_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert train(prepare(tmp_path, run__tensorboard=True)) == 1
    assert "pip install 'myllm[tensorboard]'" in capsys.readouterr().err


def from_tables_file(path: Path) -> RunFile:
    import tomllib

    return from_tables(tomllib.loads(path.read_text(encoding="utf-8")))


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    config = prepare(tmp_path, model__dropout_residual=0.2, run__eval_every=2, run__keep=9)
    whole = with_run(config, out=str(tmp_path / "whole"))
    assert train(whole) == 0
    assert len(losses(whole)) == 6
    # a run that a signal stops after each step
    parts = with_run(config, out=str(tmp_path / "parts"))
    for _ in range(6):
        stop = StopRequest()
        stop.signal = signal.SIGTERM
        ended = Trainer(parts, Solo()).run(stop)
        assert ended == signal.SIGTERM
    # what was held out is measured before a run goes on, and at last
    assert train(parts) == 0 and digest(parts) == digest(whole)
    records = monitor.read_metrics(tmp_path / "parts")
    assert [r["step"] for r in records if "heldout_loss" in r] == [2, 4, 6]
    assert [r["heldout_loss"] for r in records if "heldout_loss" in r] == heldout_losses(whole)
    assert losses(parts) == losses(whole)
    assert train(parts) == 0 and monitor.read_metrics(tmp_path / "parts") == records  # finished
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, heldout=""))
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    only = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1))
    assert Trainer(only, Solo()).run(stop) is None  # of one step, and nothing to measure


def heldout_losses(config: RunFile) -> list[float]:
    records = monitor.read_metrics(Path(config.run.out))
    return [r["heldout_loss"] for r in records if "heldout_loss" in r]


@pytest.mark.parametrize("step", [2, 6])
def test_a_signal_in_an_evaluation_leaves_it_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    config = prepare(tmp_path, run__eval_every=2, run__checkpoint_every=0, run__keep=9)
    whole = with_run(config, out=str(tmp_path / "whole"))
    assert train(whole) == 0
    stop, batch = StopRequest(), Windows.batch
    trainer = Trainer(config, Solo())

    def asked(self: Windows, start: int, end: int) -> Any:
        if trainer.step == step and start == 3:
            stop.signal = signal.SIGTERM
        assert trainer.step < step or start <= 3, "it went on"
        return batch(self, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch", asked)
        assert trainer.run(stop) == signal.SIGTERM
    assert len(losses(config)) == step and len(heldout_losses(config)) == step / 2 - 1
    assert train(config) == 0
    assert heldout_losses(config) == heldout_losses(whole) and digest(config) == digest(whole)
    folders = [Path(c.run.out) / "checkpoints" for c in (config, whole)]
    best, other = (checkpoint.pointed(folder, "best") for folder in folders)
    assert best is not None and other is not None and best.name == other.name


def test_a_run_begun_before_a_setting_was_there_goes_on(tmp_path: Path) -> None:
    """Its checkpoint says nothing of the setting, which has its default then."""
    config = prepare(tmp_path)
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    assert Trainer(config, Solo()).run(stop) == signal.SIGTERM
    (path,) = (Path(config.run.out) / "checkpoints").glob("step-*/manifest.json")
    manifest = json.loads(path.read_text())
    for name in ("window", "qk_norm"):
        del manifest["config"]["model"][name]
    del manifest["checksum"]
    path.write_text(json.dumps({**manifest, "format_version": 1}))
    assert train(config) == 0 and len(losses(config)) == 6
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, window=3))
    assert same_learning(manifest["config"], wider) == ["model.window: 0 -> 3"]


def test_packed_texts_may_lie_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = prepare(tmp_path, run__eval_every=3, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    learned = losses(config)
    (tmp_path / "scratch").mkdir()
    moved = []
    for name in ("train", "heldout"):
        (tmp_path / name).rename(tmp_path / "scratch" / name)
        moved += ["--set", f"data.{name}={tmp_path / 'scratch' / name}/"]
    assert train(config, "--from", "step-2", *moved) == 0 and losses(config) == learned
    write_dataset(tmp_path / "train", random_walk(1900, seed=9))
    assert train(config, "--from", "step-2", *moved[2:]) == 1
    said = capsys.readouterr().err
    assert "train was packed anew" in said and "data." not in said


def test_a_second_copy_of_packed_texts_is_another_source(tmp_path: Path) -> None:
    """Its windows come from the first on, where those of one go on behind the last that came."""
    config = prepare(tmp_path)
    one, two, new = (str(tmp_path / name) for name in ("one", "two", "new"))

    def of(*paths: str) -> RunFile:
        phases = [{"tokens": 96, "sources": [{"path": path}]} for path in paths]
        data = {"phases": phases}
        run = config.to_dict()
        return from_tables({**run, "data": data, "train": {**run["train"], "steps": 0}})

    same = {path: "checksum" for path in (one, two, new)}

    def differences(old: tuple[str, ...], new: tuple[str, ...]) -> int:
        then, now = ({path: same[path] for path in paths} for paths in (old, new))
        return len(same_learning(of(*old).to_dict(), of(*new), then, now))

    assert differences((one, one), (new, new)) == 0
    assert differences((one, one), (one, two)) == differences((one, two), (one, one)) == 1


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_texts_that_were_packed_anew_are_not_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = prepare(tmp_path, run__eval_every=3)
    assert train(config) == 0
    saved = checkpoint.read_resumable(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert saved.monitor.best is not None and set(saved.data) == {
        str(tmp_path / "train"),
        str(tmp_path / "heldout"),
    }
    shutil.rmtree(tmp_path / name)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=7))
    write_dataset(tmp_path / name, random_walk(1900, seed=9))
    assert train(longer) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / name} was packed anew, and differs" in said and "--changed" in said
    trainer = Trainer(longer, Solo(), changed=True)
    # a loss on other texts is not to be compared with
    assert trainer.best == (saved.monitor.best if name == "train" else None)
    assert trainer.run(StopRequest()) is None
    after = checkpoint.read_resumable(tmp_path / "run" / "checkpoints" / "step-00000007")
    assert after.data[str(tmp_path / name)] != saved.data[str(tmp_path / name)]


def test_best_is_kept_while_the_same_text_is_measured(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__eval_every=3)
    assert train(config) == 0
    best = checkpoint.read_resumable(
        tmp_path / "run" / "checkpoints" / "step-00000006"
    ).monitor.best
    spelt = dataclasses.replace(config.data, heldout=f"{tmp_path}/heldout/")
    assert spelt != config.data and best is not None
    shutil.copytree(tmp_path / "heldout", tmp_path / "moved")
    moved = dataclasses.replace(config.data, heldout=str(tmp_path / "moved"))
    few = with_run(config, eval_windows=config.run.eval_windows - 1)
    for other, expected in (
        (dataclasses.replace(config, data=spelt), best),
        (dataclasses.replace(config, data=moved), best),
        (few, None),
    ):
        trainer = Trainer(other, Solo(), changed=True)
        assert trainer.best == expected
        trainer._held.close()


def test_a_run_that_lost_its_pointers_has_its_newest_checkpoint(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    folder = tmp_path / "run" / "checkpoints"
    for name in ("best", "latest"):
        (folder / name).unlink(missing_ok=True)
    assert checkpoint.find(tmp_path / "run") == folder / "step-00000006"
    assert checkpoint.find(folder) == folder / "step-00000006"


def test_texts_that_were_packed_again_alike_are_those_of_the_run(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    assert Trainer(config, Solo()).run(stop) == signal.SIGTERM
    shutil.rmtree(tmp_path / "heldout")
    write_dataset(tmp_path / "heldout", random_walk(200, seed=5))
    assert train(config) == 0 and len(losses(config)) == 6


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_run_that_keeps_less_learns_the_same_bits(tmp_path: Path, backend: str) -> None:
    config = prepare(tmp_path, model__dropout_residual=0.2, model__n_layers=2, run__backend=backend)
    digests = set()
    for level in ("none", "norms", "block"):
        out = str(tmp_path / level)
        assert train(with_run(config, out=out), "--set", f"run.recompute={level}") == 0
        digests.add(digest(with_run(config, out=out)))
    assert len(digests) == 1


def test_a_run_set_back_to_an_older_checkpoint_takes_the_same_way_again(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    first = digest(config)
    folder = Path(config.run.out) / "checkpoints"
    (folder / "latest").write_text("step-00000002\n")
    assert train(config) == 0
    assert digest(config) == first
    assert [r["step"] for r in monitor.read_metrics(Path(config.run.out)) if "loss" in r] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__eval_every=1, run__keep=1, train__lr=0.3, train__steps=4)
    assert train(config) == 0
    folder = Path(config.run.out) / "checkpoints"
    evals = [r for r in monitor.read_metrics(Path(config.run.out)) if "heldout_loss" in r]
    best = min(evals, key=lambda r: r["heldout_loss"])["step"]
    assert checkpoint.pointed(folder, "best") == folder / checkpoint.folder_name(best)
    assert {p.name for p in folder.glob("step-*")} == {
        checkpoint.folder_name(best), checkpoint.folder_name(4),
    }  # fmt: skip


def test_other_settings_are_refused_unless_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path)
    assert train(config) == 0
    assert train(config, "--set", "train.lr=0.5", "--set", "train.steps=8") == 1
    said = capsys.readouterr().err
    assert "train.steps: 6 -> 8; train.lr: 0.01 -> 0.5" in said and "--changed" in said
    assert train(config, "--set", "run.eval_windows=3") == 0  # decides nothing that is learned
    assert train(config, "--set", "train.steps=8", "--changed") == 0
    assert len(losses(config)) == 8


def test_a_step_that_is_not_finite_is_not_taken_and_many_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__patience=2, run__checkpoint_every=2, train__steps=9)
    bad = {3, 5, 6}
    masters: dict[int, bytes] = {}
    original = Stepper.gradient

    def gradient(self: Stepper, batches: object, step: int, first_sample: int) -> object:
        result = original(self, batches, step, first_sample)  # type: ignore[arg-type]
        masters[step] = self.master.tobytes()
        return result._replace(norm=np.inf) if step in bad else result

    monkeypatch.setattr(Stepper, "gradient", gradient)
    assert train(config) == 1
    said = capsys.readouterr()
    assert masters[3] == masters[4] != masters[5] == masters[6]
    assert 7 not in masters
    assert "in 2 steps in a row, the last of them step 6" in said.err
    assert f"the last good checkpoint is {checkpoint.pointed(tmp_path / 'run/checkpoints')}" in (
        said.err
    )
    assert said.out.count("SKIPPED") == 3
    state = checkpoint.read_manifest(checkpoint.find(tmp_path / "run/checkpoints/step-00000004"))
    assert (state.step, state.updates, state.position) == (4, 3, 32)


def test_a_step_of_which_nothing_is_to_be_predicted_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, train__global_batch=1, train__steps=40)  # a fifth has no target
    assert train(config) == 0
    records = [r for r in monitor.read_metrics(tmp_path / "run") if "n_valid" in r]
    silent = [r["step"] for r in records if r["skipped"]]
    assert silent and silent == [r["step"] for r in records if not r["n_valid"]]
    said = [line for line in capsys.readouterr().out.splitlines() if "SKIPPED" in line]
    assert said == [
        f"step {step}: SKIPPED, none of its tokens is to be predicted" for step in silent
    ]
    state = checkpoint.read_manifest(checkpoint.pointed(tmp_path / "run/checkpoints"))
    assert (state.step, state.updates) == (40, 40 - len(silent))


def test_answers_that_are_few_and_far_between_do_not_end_a_run(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__patience=2, train__global_batch=1, train__steps=60)
    ids, predict = random_walk(600), np.zeros(600, np.bool_)
    predict[::40] = True
    write_dataset(tmp_path / "rare", ids, predict)
    data = dataclasses.replace(config.data, train=str(tmp_path / "rare"))
    config = dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, seed=8))
    assert train(config) == 0
    records = [r for r in monitor.read_metrics(tmp_path / "run") if "n_valid" in r]
    silent = [r["skipped"] for r in records]
    assert not silent[0] and any(all(silent[i : i + 3]) for i in range(50)) and len(records) == 60


def test_no_step_is_faster_than_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "measure_peak", lambda *_: 1.0)  # in a busy moment
    assert train(prepare(tmp_path)) == 0
    records = [r for r in monitor.read_metrics(tmp_path / "run") if "n_valid" in r]
    assert all(0 < r["utilisation"] <= 1 for r in records) and records[0]["utilisation"] == 1


def test_texts_of_which_nothing_is_to_be_predicted_end_a_run_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__patience=3)
    ids = random_walk(600)
    for folder, says in (
        ("train", "no token was to be predicted in 3 steps in a row, the last of them step 3"),
        ("heldout", "no token of the first 7 windows of"),
    ):
        write_dataset(tmp_path / f"silent-{folder}", ids, np.zeros(len(ids), np.bool_))
        data = {folder: str(tmp_path / f"silent-{folder}")}
        other = dataclasses.replace(config, data=dataclasses.replace(config.data, **data))
        assert train(other) == 1
        assert says in capsys.readouterr().err


def test_a_run_of_nothing_but_skipped_steps_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__patience=3, train__steps=2)
    ids = random_walk(600)
    write_dataset(tmp_path / "silent", ids, np.zeros(len(ids), np.bool_))
    data = dataclasses.replace(config.data, train=str(tmp_path / "silent"))
    assert train(dataclasses.replace(config, data=data)) == 1
    assert "in 2 steps in a row, the last of them step 2" in capsys.readouterr().err


def test_no_checkpoint_of_a_bad_streak_takes_the_place_of_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__patience=3, run__checkpoint_every=1, run__keep=1)
    original = Stepper.gradient

    def gradient(self: Stepper, batches: object, step: int, first_sample: int) -> object:
        result = original(self, batches, step, first_sample)  # type: ignore[arg-type]
        return result._replace(norm=np.inf) if step > 2 else result

    monkeypatch.setattr(Stepper, "gradient", gradient)
    assert train(config) == 1
    assert "the last good checkpoint is" in (said := capsys.readouterr().err)
    assert "step-00000002" in said
    assert checkpoint.read_manifest(tmp_path / "run/checkpoints/step-00000002").step == 2


def test_a_record_that_could_not_be_written_is_told_though_a_signal_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: monitor.Metrics, record: object) -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(monitor.Metrics, "write", write)
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    with pytest.raises(AllRanksError, match="No space left on device"):
        Trainer(prepare(tmp_path), Solo()).run(stop)


def test_a_prompt_for_samples_that_fills_the_context_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizer import train_from_iterator

    small = train_from_iterator(["some words"] * 3, 300)
    config = prepare(tmp_path, run__sample_every=2, run__sample_prompt="x " * 40)
    for name in ("train", "heldout"):
        write_dataset(tmp_path / name, random_walk(200), tokenizer_sha256=small.sha256)
        small.save(tmp_path / name / "tokenizer.myllm")
    assert train(config) == 1
    assert "leaves no room to write in a context of 12" in capsys.readouterr().err


def test_two_runs_cannot_write_to_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path)
    first = Trainer(config, Solo())
    assert train(config) == 1
    assert "another run is writing to" in capsys.readouterr().err
    assert first.run(StopRequest()) is None
    assert train(config) == 0


def test_a_signal_is_noted_and_a_second_interrupt_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening() as stop:
        assert stop.signal is None
        stop.learned = True
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_bad_input_is_one_sentence_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path)
    path = save_run_file(config, tmp_path / "c.toml")
    wrong = {
        "data.train=nowhere": "there is no dataset 'nowhere'",
        "run.backend=tpu": "run.backend must be one of reference, cpu, cuda, got 'tpu'",
        "model.context_length=5000": "less than one window of 5000",
        "model.vocab_size=10": "set it to 40 or more",
        "run.sample_every=1": "none beside it",
        "trian.lr=1": "unknown table [trian]",
        f"run.out={path}": "c.toml is a file: name another folder",
        f"run.out={path}/run": "c.toml is a file: name another folder",
    }
    for override, message in wrong.items():
        assert cli.main(["train", str(path), "--set", override]) == 1
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1 and said.startswith("myllm train: ")
    with pytest.raises(SystemExit) as usage:
        cli.main(["train"])
    assert usage.value.code == 2


def test_durations_and_sizes_read_well() -> None:
    said = [monitor.duration(s) for s in (0.4, 59, 61, 3_720, 190_000)]
    assert said == ["0s", "59s", "1m01s", "1h02m", "2d04h"]
    assert [monitor.bytes_text(n) for n in (12, 2_048, 3 * 2**30)] == ["12 B", "2.0 KiB", "3.0 GiB"]


def test_one_rank_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher.SIZE:
        monkeypatch.delenv(name, raising=False)
    assert isinstance(start(), Solo)


def test_the_checkpoint_is_json_and_flat_float32(tmp_path: Path) -> None:
    config = from_tables({**tables(tmp_path), **prepare(tmp_path).to_dict()})
    assert train(config) == 0
    path = checkpoint.find(tmp_path / "run")
    manifest = json.loads((path / "manifest.json").read_text())
    size = decoder_layout(config.model).size
    assert manifest["parameters"] == size and manifest["position"] == 48
    assert np.fromfile(path / "master.bin", "<f4").shape == (size,)
