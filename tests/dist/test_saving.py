"""Checkpoints that are written, and removed, while training goes on."""

import mmap
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dist import checkpoint, monitor, saving
from dist.step import Stepper
from dist.weights import load_master
from reference.params import decoder_layout
from tests.helpers.processes import wait_for
from tests.helpers.runs import (
    digest,
    losses,
    prepare,
    train,
    with_run,
)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=1, run__keep=9)
    assert train(config) == 0
    whole = digest(config)
    update, write = Stepper.update, saving._write_slices
    updates, waited = threading.Semaphore(0), []

    def updated(self: Stepper, *arguments: Any) -> None:
        update(self, *arguments)
        updates.release()
        if self.updates in (4, 5):
            time.sleep(0.5)  # so that writing takes as long

    def slow(path: Path, *what: Any) -> dict[int, int]:
        # after the step that is saved two more are taken while its weights are written
        if path.name == "master.bin" and "00000003" in str(path):
            waited.append([updates.acquire(timeout=60) for _ in range(5)])
        return write(path, *what)

    monkeypatch.setattr(Stepper, "update", updated)
    monkeypatch.setattr(saving, "_write_slices", slow)
    meanwhile = with_run(config, out=str(tmp_path / "meanwhile"), checkpoint_every=3)
    assert train(meanwhile) == 0
    assert waited == [[True] * 5] and digest(meanwhile) == whole
    for step in (3, 6):
        name = f"checkpoints/{checkpoint.folder_name(step)}"
        one, other = (load_master(Path(c.run.out) / name) for c in (config, meanwhile))
        np.testing.assert_array_equal(one, other)
    saves = [r for r in monitor.read_metrics(Path(meanwhile.run.out)) if "save_ms" in r]
    # written beside two steps that sleep for a second together, which the loop did not wait for
    assert [r["step"] for r in saves] == [3, 6] and saves[0]["save_ms"] < saves[0]["write_ms"]


def test_training_goes_on_while_a_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__keep=1)
    update, rmtree = Stepper.update, shutil.rmtree
    updates, removed = threading.Semaphore(0), []

    def updated(self: Stepper, *arguments: Any) -> None:
        update(self, *arguments)
        updates.release()

    def slow(path: Path) -> None:  # that of step 2, when that of step 4 is whole, after step 5
        if not removed:
            removed.append((path.name, [updates.acquire(timeout=60) for _ in range(6)]))
        rmtree(path)

    whole = property(lambda saving: saving._thread.join() or True)
    monkeypatch.setattr(saving.Saving, "written", whole)  # after one step, always
    monkeypatch.setattr(Stepper, "update", updated)
    monkeypatch.setattr(shutil, "rmtree", slow)
    assert train(config) == 0
    folder = Path(config.run.out) / "checkpoints"
    assert removed == [("step-00000002.old", [True] * 6)]
    assert [path.name for path in folder.glob("step-*")] == ["step-00000006"]

    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", broken)
    assert train(with_run(config, out=str(tmp_path / "broken"))) == 1
    assert capsys.readouterr().err.count("step-00000002.old: Input/output error") == 1


def test_without_memory_for_a_copy_a_checkpoint_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2)
    monkeypatch.setattr(saving.psutil, "virtual_memory", lambda: SimpleNamespace(available=999))
    threads, finish = [], saving.Saving.finish
    monkeypatch.setattr(
        saving.Saving, "finish", lambda self: (threads.append(self._thread), finish(self))[1]
    )
    assert train(config) == 0 and threads == [None] * 3
    assert checkpoint.steps(Path(config.run.out) / "checkpoints") == [4, 6]


def test_memory_for_copies_is_found_before_a_checkpoint_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def marked(n: int, dtype: str) -> Any:
        made.append(np.full(n, 7, dtype))
        return made[-1]

    stepper = SimpleNamespace(held=lambda name: [(0, 1 << 20), (3 << 20, 4 << 20)])
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", marked)
        held = saving.Copies(stepper)  # type: ignore[arg-type]
    # every page is written to, before anybody takes a copy
    wait_for(lambda: all((part[:: mmap.PAGESIZE // 4] == 0).all() for part in made))
    arrays = [[np.full(1 << 20, value + i, "<f4") for i in (0, 10)] for value in (1, 2, 3)]
    np.testing.assert_array_equal(held.take(arrays), arrays)
    assert len(made) == 6


def test_what_is_written_is_on_the_disk_piece_by_piece_and_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path)
    assert train(config) == 0
    given_back, advise = [], os.posix_fadvise

    def advised(file: int, *what: int) -> None:
        given_back.append((os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size, *what))
        advise(file, *what)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(saving, "PIECE", 10_000)
    pieces = with_run(config, out=str(tmp_path / "pieces"))
    assert train(pieces) == 0 and digest(pieces) == digest(config)
    master = [what for path, *what in given_back if path.endswith("master.bin")]
    size = 4 * decoder_layout(config.model).size
    assert master == [
        [min(end, size), 0, 0, os.POSIX_FADV_DONTNEED]
        for end in range(10_000, size + 10_000, 10_000)
    ]


def test_a_write_that_fails_meanwhile_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2)
    write = saving._write_slices

    def full(path: Path, *what: Any) -> dict[int, int]:
        if "00000004" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, *what)

    monkeypatch.setattr(saving, "_write_slices", full)
    assert train(config) == 1
    said = capsys.readouterr().err
    assert "step-00000004 could not be written (No space left on device)" in said
    monkeypatch.undo()
    assert checkpoint.steps(Path(config.run.out) / "checkpoints") == [2]
    assert train(config) == 0 and len(losses(config)) == 6
