"""The folder of a run: what is damaged, missing or swapped in it, and what is not ours."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dist import checkpoint
from dist.comm import Solo
from dist.config import RunFile
from dist.stopping import StopRequest
from dist.train import Trainer
from dist.weights import load_master
from tests.helpers.damage import flip
from tests.helpers.runs import (
    digest,
    train,
    with_run,
)

Said = pytest.CaptureFixture[str]


def test_a_missing_latest_does_not_begin_anew_over_checkpoints(run: RunFile, capsys: Said) -> None:
    folder = Path(run.run.out) / "checkpoints"
    before = digest(run)
    (folder / "latest").unlink()
    assert train(run) == 0
    assert "run has taken all of its 6 steps" in capsys.readouterr().out
    assert digest(run) == before
    assert train(run, "--from", "step-3") == 0
    assert "going on after step 3" in capsys.readouterr().out
    assert digest(run) == before  # it took the same way again
    assert train(run, "--from", "step-5") == 1
    assert "has no checkpoint 'step-5'; there are: step-00000003" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["../../elsewhere", "step-00000003-mine", "", "/tmp", "step-3"])
@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_a_pointer_names_a_checkpoint_of_its_own_folder(
    run: RunFile, pointer: str, content: str, capsys: Said
) -> None:
    """Also the one that a run reads when it removes old checkpoints, hours later."""
    folder = Path(run.run.out) / "checkpoints"
    (folder / pointer).write_text(content)
    assert train(run, "--set", "train.steps=9", "--changed") == 1
    said = capsys.readouterr().err
    assert f"{pointer} does not name a checkpoint" in said and said.count("\n") == 1
    last = sorted(path.name for path in folder.glob("step-*"))[-1]
    assert f"write the name of one there, such as {last}" in said
    assert not (folder / "step-00000009").exists()


def test_a_run_that_took_more_steps_than_it_is_asked_for_says_so(
    run: RunFile, capsys: Said
) -> None:
    before = digest(run)
    assert train(run, "--set", "train.steps=4", "--changed") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "has taken 6 steps, more than the 4 asked for: give train.steps a larger number" in said
    assert digest(run) == before


@pytest.mark.parametrize("changed", [(), ("--changed",)])
def test_a_run_of_another_shape_is_not_told_to_change(
    run: RunFile, changed: tuple[str, ...], capsys: Said
) -> None:
    more = run.model.n_layers + 1
    assert train(run, "--set", f"model.n_layers={more}", *changed) == 1
    said = capsys.readouterr().err
    assert f"is of another model (model.n_layers: {more - 1} -> {more}), of " in said
    assert "choose another run.out" in said and "--changed" not in said and said.count("\n") == 1


def test_a_latest_that_is_a_folder_is_one_sentence(run: RunFile, capsys: Said) -> None:
    latest = Path(run.run.out) / "checkpoints" / "latest"
    latest.unlink()
    latest.mkdir()
    assert train(run) == 1
    said = capsys.readouterr().err
    assert "latest: Is a directory" in said and said.count("\n") == 1


def test_a_damaged_newest_checkpoint_leaves_the_older_to_choose(run: RunFile, capsys: Said) -> None:
    before = digest(run)
    flip(Path(run.run.out) / "checkpoints" / "step-00000006" / "v.bin", 99)
    assert train(run) == 1
    said = capsys.readouterr().err
    assert "v.bin is damaged: elements 0 to" in said and "--from step-N" in said
    assert train(run, "--from", "step-00000003") == 0
    assert digest(run) == before


def test_a_renamed_checkpoint_is_refused(run: RunFile, capsys: Said) -> None:
    folder = Path(run.run.out) / "checkpoints"
    shutil.rmtree(folder / "step-00000003")
    (folder / "step-00000006").rename(folder / "step-00000003")
    assert train(run, "--from", "step-3") == 1
    assert "holds the checkpoint of step 6" in capsys.readouterr().err


def test_only_our_own_checkpoints_are_removed(run: RunFile, tmp_path: Path) -> None:
    folder = Path(run.run.out) / "checkpoints"
    kept = tmp_path / "elsewhere"
    (folder / "step-00000003").rename(kept)
    (folder / "step-00000003").symlink_to(kept)
    mine = ["step-00000003-mybackup", "step-00000001", "step-2", "step-00000002.tmp.mine"]
    for name in mine:
        (folder / name).mkdir()
        (folder / name / "notes").write_text("mine")
    (folder / "step-00000001.tmp").symlink_to(kept)
    (folder / "step-00000002.old").mkdir()
    config = with_run(run, keep=1, checkpoint_every=1)
    stop = StopRequest()
    trainer = Trainer(config, Solo(), begin="step-3")
    assert trainer.run(stop) is None
    assert all((folder / name / "notes").read_text() == "mine" for name in mine)
    assert (kept / "manifest.json").exists() and (folder / "step-00000001.tmp").is_symlink()
    assert not (folder / "step-00000002.old").exists()
    assert checkpoint.steps(folder) == [3, 6]  # what the link leads to, and the newest


def test_a_folder_in_the_way_of_a_checkpoint_is_not_removed(run: RunFile, capsys: Said) -> None:
    folder = Path(run.run.out) / "checkpoints"
    shutil.rmtree(folder / "step-00000006")
    (folder / "step-00000006").mkdir()
    (folder / "step-00000006" / "notes").write_text("mine")
    assert train(run, "--from", "step-3") == 1
    assert "is in the way and is no checkpoint" in capsys.readouterr().err
    assert (folder / "step-00000006" / "notes").read_text() == "mine"
    assert checkpoint.pointed(folder) == folder / "step-00000003"  # where it went on from


def damages(path: Path, other: Path) -> dict[str, Callable[[], None]]:
    """Return what may become of a file: another of its kind lies at ``other``."""
    raw = path.read_bytes()
    middle = len(raw) // 2
    return {
        "flipped": lambda: flip(path, middle),
        "cut": lambda: path.write_bytes(raw[:middle]),
        "empty": lambda: path.write_bytes(b""),
        "longer": lambda: path.write_bytes(raw + b"\0\0"),
        "gone": path.unlink,
        "another's": lambda: path.write_bytes(other.read_bytes()),
    }


def test_no_damage_to_a_file_is_accepted_in_silence(run: RunFile, capsys: Said) -> None:
    """It is refused and named, or it changes nothing of what the run learns."""
    base = Path(run.run.out)
    longer = with_run(run, out=str(base))
    command = ["--set", "train.steps=7", "--changed"]
    for place in ("train", "heldout"):  # this run's own copies
        command += ["--set", f"data.{place}={base.parent / place}"]
    pristine = base.parent.parent / "pristine"
    shutil.copytree(base.parent, pristine)
    assert train(longer, *command) == 0
    whole = load_master(checkpoint.find(base / "checkpoints/step-00000007"))
    harmless = set()
    files = sorted(p.relative_to(pristine) for p in pristine.rglob("*") if p.is_file())
    passed = ("step-00000003", "lock")  # an older checkpoint, and a file without content
    newest = [p for p in files if not set(passed) & set(p.parts) and p.suffix != ".toml"]
    assert len(newest) > 14
    for name in newest:
        alike = [p for p in files if p.suffix == name.suffix and p != name]
        other = (alike or files)[0]
        for what in damages(pristine / name, pristine / other):
            shutil.rmtree(base.parent)
            shutil.copytree(pristine, base.parent)
            damages(base.parent / name, pristine / other)[what]()
            capsys.readouterr()
            status = train(longer, *command)
            said = capsys.readouterr().err
            if status == 0:
                harmless.add((str(name), what))
                got = load_master(base / "checkpoints/step-00000007")
                np.testing.assert_array_equal(got, whole)
            else:
                # it is named, or what is beside it and does not fit
                named = str((base.parent / name).parent) in said
                assert status == 1 and said.count("\n") == 1 and named, (name, what, said)
                if what == "flipped" and name.suffix in (".bin", ".mask"):
                    place = r"(at byte|bytes from|elements) [\d,]+"
                    assert str(base.parent / name) in said and re.search(place, said), said
    # a lock has no content; the newest checkpoint is found without latest; what a metrics file lost
    # is not needed; a shard's damage in a block that the run did not read is not seen
    loose = {name for name, _ in harmless}
    assert not {n for n in loose if n.endswith(("master.bin", "m.bin", "v.bin", "manifest.json"))}
    assert not {n for n in loose if n.endswith((".bin", ".mask")) and "heldout" not in n}
