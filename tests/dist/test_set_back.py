"""A run that is set back to an older checkpoint, and what is named, kept and told meanwhile."""

import contextlib
import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dist import checkpoint, monitor, saving
from dist.comm import AllRanksError, Solo
from dist.differences import the_same
from dist.stopping import StopRequest
from dist.train import Trainer
from tests.helpers.runs import digest, losses, prepare, train


def test_a_best_of_what_was_learned_otherwise_is_not_kept(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__eval_every=2, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.pointed(folder, "best") == folder / "step-00000006"
    worse = ("--set", "train.lr=3.0", "--set", "train.steps=4", "--changed")
    assert train(config, "--from", "step-2", *worse) == 0
    records = monitor.read_metrics(tmp_path / "run")
    losses = [r["heldout_loss"] for r in records if "heldout_loss" in r]
    assert losses[0] < losses[1]  # worse than what the run had learned before
    best = checkpoint.pointed(folder, "best")
    assert best == folder / "step-00000004"
    assert checkpoint.read_manifest(best).monitor.best == losses[1]


def test_the_best_is_pointed_at_before_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who goes on from before both comes to the best again."""
    config = prepare(tmp_path, run__eval_every=2)
    point, pointed = saving.point, []

    def noted(folder: Path, pointer: str, name: str) -> None:
        pointed.append((pointer, name))
        point(folder, pointer, name)

    monkeypatch.setattr(saving, "point", noted)
    assert train(config) == 0
    assert pointed[-2:] == [("best", "step-00000006"), ("latest", "step-00000006")]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("kind", "moved"),
    [(Killed, "step-00000006.tmp"), (OSError, "step-00000006.tmp"), (OSError, "step-00000006")],
)
def test_a_checkpoint_that_comes_again_is_there_once_or_twice_and_never_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], moved: str
) -> None:
    """The run is killed between the two names, or one of them cannot be given."""
    config = prepare(tmp_path, run__eval_every=2, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    whole = digest(config)
    folder = tmp_path / "run" / "checkpoints"
    move = saving.move

    def fails(source: Path, target: Path) -> None:
        if source.name == moved:
            raise kind(28, "No space left on device")
        move(source, target)

    monkeypatch.setattr(saving, "move", fails)
    if kind is Killed:
        with pytest.raises(Killed):
            train(config, "--from", "step-4")
    else:
        assert train(config, "--from", "step-4") == 1
        assert checkpoint.pointed(folder) == folder / "step-00000004"  # where it went on from
        assert checkpoint.pointed(folder, "best") == folder / "step-00000006"
    monkeypatch.undo()
    newest, best = checkpoint.to_resume(folder), checkpoint.find(folder)
    assert newest is not None
    assert checkpoint.read_manifest(newest).step == 4
    assert checkpoint.read_manifest(best)
    assert train(config) == 0 and digest(config) == whole
    assert checkpoint.pointed(folder, "best") == folder / "step-00000006"
    assert sorted(p.name for p in folder.glob("step-*"))[-1] == "step-00000006"


def test_of_a_checkpoint_that_is_gone_it_is_said_how_to_take_an_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    whole = digest(config)
    gone = tmp_path / "run" / "checkpoints" / "step-00000006"
    shutil.rmtree(gone)
    capsys.readouterr()
    assert train(config) == 1
    said = capsys.readouterr().err
    assert f"{gone} is no whole checkpoint" in said and "train has --from step-N" in said
    assert train(config, "--from", "step-4") == 0 and digest(config) == whole


def test_a_run_that_is_set_back_keeps_its_figures_until_it_has_others(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    file = tmp_path / "run" / "metrics.jsonl"
    before = file.read_bytes()
    metrics = monitor.Metrics(tmp_path / "run", 2)
    metrics.flush()
    metrics.close()
    assert file.read_bytes() == before
    metrics = monitor.Metrics(tmp_path / "run", 2)
    metrics.write({"step": 3, "loss": 1.0})
    metrics.close()
    steps = [r["step"] for r in monitor.read_metrics(tmp_path / "run") if "loss" in r]
    assert steps == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changed", [True, False])
def test_a_run_that_is_set_back_and_saves_nothing_begins_there_again(
    tmp_path: Path,
    changed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    whole, steps = digest(config), losses(config)
    folder = tmp_path / "run" / "checkpoints"
    if changed:
        worse = ("--set", "train.lr=1e25", "--set", "optim.clip=0", "--set", "run.patience=1")
        assert train(config, "--from", "step-2", "--changed", *worse) == 1
        assert "the last good checkpoint is" in (said := capsys.readouterr().err)
        assert "step-00000002" in said
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_save", lambda self, best=False: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train(config, "--from", "step-2")
    assert len(losses(config)) < 6
    assert checkpoint.pointed(folder) == folder / "step-00000002"
    assert train(config) == 0
    assert digest(config) == whole and losses(config) == steps


def test_checkpoints_of_what_was_learned_before_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0 and "learned before" not in capsys.readouterr().out
    for begin, said in (("2", "step-00000004 to step-00000006 are"), ("4", "step-00000006 is")):
        assert train(config, "--from", begin) == 0
        assert f"{said} of what was learned before,\n" in capsys.readouterr().out
    assert train(config, "--from", "6") == 0 and "learned before" not in capsys.readouterr().out


def test_a_mistyped_start_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a step is taken: the newest stays the newest."""
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    assert train(config) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config, "--from", "step-2")
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.pointed(folder) == folder / "step-00000006" and len(losses(config)) == 6


def test_after_from_the_same_command_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=9)
    for begin, said in ((None, "the same command goes on"), ("step-1", "without --from goes on")):
        stop = StopRequest()
        stop.signal = signal.SIGTERM
        assert Trainer(config, Solo(), begin=begin).run(stop) == signal.SIGTERM
        assert said in capsys.readouterr().out

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "_write_slices", full)
    assert train(config, "--from", "step-2") == 1
    assert "then the same command without --from goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "words"), [(0, ()), (2, ()), (2, ("--from", "step-2"))], ids=["new", "old", "from"]
)
def test_a_run_that_went_on_meanwhile_is_not_set_back(
    tmp_path: Path,
    before: int,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second start reads which checkpoint is the newest; the first one saves another and ends."""
    config = prepare(tmp_path, run__checkpoint_every=3, run__keep=9)
    for _ in range(before):
        stop = StopRequest()
        stop.signal = signal.SIGTERM
        assert Trainer(config, Solo()).run(stop) == signal.SIGTERM
    opened = Trainer._open

    def slowly(self: Trainer, *, fresh: bool) -> Any:
        monkeypatch.setattr(Trainer, "_open", opened)
        assert train(config) == 0
        return opened(self, fresh=fresh)

    monkeypatch.setattr(Trainer, "_open", slowly)
    assert train(config, *words) == 1
    assert "another run has gone on in" in capsys.readouterr().err
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.pointed(folder) == folder / "step-00000006" and len(losses(config)) == 6


def test_what_a_record_tells_of_is_not_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2)
    fsync, synced = os.fsync, []

    def noted(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert train(config) == 0
    assert 0 <= synced.index("metrics.jsonl") < synced.index("master.bin")


@pytest.mark.parametrize("gone", ["metrics.jsonl", "lock", "."])
def test_files_that_are_taken_away_meanwhile_are_missed(
    tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2)
    step, out = Trainer._one_step, tmp_path / "run"

    def taken_away(self: Trainer) -> Any:
        if self.step == 2:
            self._finish_saving()
            (out / gone).rename(tmp_path / "elsewhere")
        return step(self)

    monkeypatch.setattr(Trainer, "_one_step", taken_away)
    assert train(config) == 0
    said = capsys.readouterr().err.splitlines()
    names = ["lock", "metrics.jsonl"] if gone == "." else [gone]
    assert [line.split(" was removed or moved: ")[0] for line in said] == [
        f"myllm train: {out / name}" for name in names
    ]
    steps = [r["step"] for r in monitor.read_metrics(out) if "loss" in r]
    assert steps == ([1, 2, 3, 4, 5, 6] if gone == "lock" else [5, 6])
    assert checkpoint.pointed(out / "checkpoints") is not None


def test_figures_that_cannot_be_kept_end_the_run_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2)
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "metrics.jsonl":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    assert train(config) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path}/run/metrics.jsonl: Input/output error" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOTEMPTY, 0), (errno.EBUSY, 0), (errno.EIO, 1)]
)
def test_a_checkpoint_that_somebody_reads_may_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=1, run__keep=1)
    rmtree, refused = shutil.rmtree, []

    def read_elsewhere(path: Path, *more: Any, **how: Any) -> None:
        if path.name == "step-00000002.old" and not refused:
            refused.append(path)
            raise OSError(number, os.strerror(number), str(path))
        rmtree(path, *more, **how)

    monkeypatch.setattr("dist.train.shutil.rmtree", read_elsewhere)
    assert train(config) == status
    assert refused
    if status == 0:  # the next time, then
        names = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
        assert names == {"step-00000006"}


@pytest.mark.parametrize(("batch", "said"), [(4, "windows come again"), (16, "are passed over")])
def test_another_batch_says_where_the_data_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: int, said: str
) -> None:
    config = prepare(tmp_path)
    assert train(config) == 0
    more = ("--set", "train.steps=7", "--set", f"train.global_batch={batch}", "--changed")
    assert train(config, *more) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"has taken 48 windows; by train.global_batch ({batch})" in out
    assert f"behind {6 * batch}: {abs(6 * batch - 48)} windows" in out and said in out


def test_ranks_that_read_other_texts_end_together() -> None:
    opened = [{"data/a": "70 abc", "data/b": "9 "}] * 3
    the_same(opened)
    opened.append({"data/a": "70 abc", "data/b": "8 "})
    with pytest.raises(AllRanksError, match="rank 3 reads another data/b than rank 0"):
        the_same(opened)
