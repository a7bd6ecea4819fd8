"""A disk that is full, fails or is cut off at any moment loses nothing."""

import errno
import io
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist import checkpoint, cli, pack, places
from dist.config import RunFile
from dist.weights import load_master
from tests.helpers.damage import contents, words
from tests.helpers.runs import (
    digest,
    prepare,
    save_run_file,
    train,
    with_run,
)

Said = pytest.CaptureFixture[str]


def fails_at(broken: int) -> Callable[[int], None]:
    """Return an fsync whose call of this number fails."""
    sync, calls = os.fsync, itertools.count()

    def fsync(descriptor: int) -> None:
        if next(calls) == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    return fsync


def test_a_copy_of_a_run_at_any_fsync_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash leaves: all that was fsynced is there, what follows may be."""
    config = prepare(tmp_path, run__checkpoint_every=2, run__eval_every=2, run__keep=1)
    out, copies = Path(config.run.out), tmp_path / "copies"
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if out.exists():
            shutil.copytree(out, copies / f"{len(list(copies.glob('*'))):03d}")
        sync(descriptor)

    copies.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    assert train(config) == 0
    monkeypatch.undo()
    whole, moments = digest(config), sorted(copies.iterdir())
    assert len(moments) > 20
    for copy in moments:
        resumed = with_run(config, out=str(copy))
        assert train(resumed) == 0
        assert digest(resumed) == whole, copy


def test_a_copy_of_a_packing_at_any_fsync_goes_on_to_the_same_bytes(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copies = tmp_path / "d", tmp_path / "copies"
    few = ["--processes", "1", "--shard-tokens", "20000"]
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        shutil.copytree(out, copies / f"{len(list(copies.glob('*'))):03d}")
        sync(descriptor)

    copies.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(pack, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 1000)
    assert cli.main([*words(texts, out), *few]) == 0
    monkeypatch.undo()
    moments = sorted(copies.iterdir())
    assert len(moments) > 10
    for copy in moments:
        assert cli.main([*words(texts, copy), *few]) == 0
        assert contents(copy) == contents(out)


def test_a_full_disk_is_one_sentence_and_a_run_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Callable[[int], Path], capsys: Said
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=1, run__keep=2)
    assert train(config) == 0
    whole = digest(config)
    for room in (4, 16, 28, 40, 64, 100):
        out = small_disk(room) / str(room)
        capsys.readouterr()
        full = with_run(config, out=str(out))
        (tmp_path / "run.toml").write_text(full.to_toml())
        status = cli.main(["train", str(tmp_path / "run.toml")])
        said = capsys.readouterr().err
        assert (status == 1 and said.count("\n") == 1 and "No space left" in said) or room == 100
        folder = out / "checkpoints"
        assert all(load_master(folder / checkpoint.folder_name(s)).size
                   for s in checkpoint.steps(folder))  # fmt: skip
        small_disk(1000)
        assert cli.main(["train", str(tmp_path / "run.toml")]) == 0
        assert digest(full) == whole
        shutil.rmtree(out)


def test_a_full_disk_ends_a_packing_that_goes_on_when_there_is_room(
    texts: Path, tmp_path: Path, small_disk: Callable[[int], Path], capsys: Said
) -> None:
    assert cli.main([*words(texts, tmp_path / "whole"), "--processes=1"]) == 0
    for room in (4, 20, 60, 100):
        out = small_disk(room) / "d"
        capsys.readouterr()
        assert cli.main([*words(texts, out), "--processes=1"]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "No space left" in said
        small_disk(1000)
        assert cli.main([*words(texts, out), "--processes=1"]) == 0
        assert contents(out) == contents(tmp_path / "whole")
        shutil.rmtree(out)


def test_a_disk_that_fails_at_any_write_of_a_packing_is_one_sentence_and_loses_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    few = ["--processes", "1", "--shard-tokens", "20000"]
    assert cli.main([*words(texts, tmp_path / "whole"), *few]) == 0
    monkeypatch.setattr(pack, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 1000)
    for broken in itertools.count():
        capsys.readouterr()
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", fails_at(broken))
            status = cli.main([*words(texts, tmp_path / str(broken)), *few])
        if status == 0:
            break  # it had fewer writes
        said = capsys.readouterr().err
        assert status == 1 and said.count("\n") == 1 and "Input/output error" in said
        assert cli.main([*words(texts, tmp_path / str(broken)), *few]) == 0
        assert contents(tmp_path / str(broken)) == contents(tmp_path / "whole")
    assert broken > 10


# every third of them by default, and all with -m slow
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_disk_that_fails_at_any_write_is_one_sentence_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said, first: int
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__eval_every=2)
    assert train(config) == 0
    whole, failed = digest(config), 0
    for broken in range(first, 24, 3):
        run = with_run(config, out=str(tmp_path / str(broken)))
        capsys.readouterr()
        monkeypatch.setattr(os, "fsync", fails_at(broken))
        status = train(run)
        monkeypatch.undo()
        said = capsys.readouterr().err
        assert status == 1 and said.count("\n") == 1 and "Input/output error" in said
        failed += 1
        assert train(run) == 0 and digest(run) == whole
    assert failed == 8


def test_a_disk_that_fails_while_it_is_read_is_one_sentence(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    class Broken(io.FileIO):
        def read(self, *size: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.name))

        readinto = read

    opened = Path.open
    for name in ("00000.bin", "00001.mask", "master.bin", "v.bin"):

        def fails(self: Path, mode: str = "r", *rest: Any, name: str = name, **more: Any) -> Any:
            raw = self.name == name and more.get("buffering") == 0
            return Broken(self, "rb") if raw else opened(self, mode, *rest, **more)

        monkeypatch.setattr(Path, "open", fails)
        status = train(run, "--set", "train.steps=8", "--changed")
        monkeypatch.undo()
        said = capsys.readouterr().err
        assert status == 1 and said.count("\n") == 1
        assert name in said and "Input/output error" in said


def test_a_disk_that_became_read_only_is_one_sentence(
    tmp_path: Path, small_disk: Callable[[int], Path], capsys: Said
) -> None:
    disk = small_disk(1000)
    config = prepare(tmp_path, run__checkpoint_every=3, run__out=str(disk / "run"))
    path = save_run_file(config, tmp_path / "run.toml")
    assert cli.main(["train", str(path)]) == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    capsys.readouterr()
    assert cli.main(["train", str(path), "--set", "train.steps=8", "--changed"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Read-only file system" in said
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert cli.main(["train", str(path), "--set", "train.steps=8", "--changed"]) == 0


@pytest.mark.parametrize("past", [True, False])
def test_a_disk_that_fails_while_a_file_is_written_is_heard_of(
    past: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync tells of a failure once: those that come later succeed."""
    if not past:
        monkeypatch.setattr(places, "past_memory", lambda file, *, on: False)
    monkeypatch.setattr(os, "fsync", fails_at(0))
    with (
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
        places.new_place(tmp_path / "new") as part,
        places.steadily(part) as file,
    ):
        file.write(bytes(3 * places.ROOM))
    assert not [*tmp_path.iterdir()]


def test_what_was_written_since_the_disk_was_last_waited_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "past_memory", lambda file, *, on: False)
    monkeypatch.setattr(places, "PAUSE", 1e9)  # once, after the first part
    monkeypatch.setattr(os, "fsync", fails_at(1))
    with (
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
        places.steadily(tmp_path / "new") as file,
    ):
        file.write(bytes(3 * places.ROOM))


def test_what_is_written_goes_to_the_disk_meanwhile_and_a_failure_beside_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, new = threading.Semaphore(0), tmp_path / "new"
    monkeypatch.setattr(places, "past_memory", lambda file, *, on: False)
    monkeypatch.setattr(places, "PAUSE", 0.0)
    # However long the disk takes, more than that has passed before it is written to again.
    clock = map(pow, itertools.repeat(3.0), itertools.count())
    monkeypatch.setattr("dist.places.time", SimpleNamespace(monotonic=clock.__next__))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.release())
    before = threading.active_count()
    with pytest.raises(ValueError, match="what the body says"), places.steadily(new) as file:
        for n in range(3):
            file.write(bytes(places.ROOM))
            assert synced.acquire(timeout=60)
            assert new.stat().st_size == (n + 1) * places.ROOM
        raise ValueError("what the body says")
    assert threading.active_count() == before  # nothing waits for what has ended
