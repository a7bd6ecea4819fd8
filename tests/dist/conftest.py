"""Texts, a finished run and a small disk, for what may befall them."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist.config import RunFile
from tests.helpers.runs import prepare, save_run_file, text, train, with_run
from tokenizer import train_from_iterator


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 320 ids."""
    path = tmp_path_factory.mktemp("tokenizer") / "t.tok"
    train_from_iterator([text(i) for i in range(100)], 320).save(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, another one of the same size, and two corpora."""
    folder = tmp_path_factory.mktemp("texts")
    for name, first in (("one", 0), ("two", 5000)):
        train_from_iterator([text(first + i) for i in range(99)], 320).save(folder / f"{name}.tok")
        lines = [json.dumps({"text": text(first + i)}) for i in range(3000)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    config = prepare(folder, run__checkpoint_every=3, run__keep=9)
    assert train(config) == 0
    return config


@pytest.fixture
def run(trained: RunFile, tmp_path: Path) -> RunFile:
    """A copy of it that can be damaged."""
    shutil.copytree(Path(trained.run.out).parent, tmp_path / "copy")
    out = tmp_path / "copy" / "run"
    return with_run(trained, out=str(out))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a disk with room for so many KiB, or gives it other room."""
    path = tmp_path / "disk"
    path.mkdir()

    def make(size: int) -> Path:
        remount = ",remount" if os.path.ismount(path) else ""
        options = f"size={size}k{remount}"
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        may = shutil.which("mount") is not None
        if not may or subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("needs mount, and the right to mount a disk")
        return path

    yield make
    if os.path.ismount(path):
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run file, for sweeps."""
    folder = tmp_path_factory.mktemp("sweep")
    config = prepare(folder, train__warmup_steps=2, train__steps=8)
    save_run_file(config, folder / "run.toml")
    return folder
