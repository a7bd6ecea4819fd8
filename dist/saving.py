"""Writing a checkpoint: of all ranks, beside training, whole or not at all; and removing old ones.

The format, and how it is read, is in ``checkpoint.py``.
"""

import contextlib
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import msgspec
import numpy as np
import psutil

from accel.system import IN_USE, forget, move, sync_folder
from dist import manifest
from dist.checkpoint import MANIFEST, Manifest, State, folder_name, pointed, step_of, steps
from dist.comm import AllRanksError, Comm, together
from dist.manifest import crc32
from dist.shards import TOKENIZER
from dist.slices import ARRAYS, Cutting, Range
from dist.step import Stepper
from reference.global_norm import SUM_BLOCK
from reference.types import Array
from tokenizer.files import replace_durably

PIECE = 32 << 20  # bytes that are written before the disk is waited for


class Copies:
    """What a rank copies its slices of ``ARRAYS`` to, for as long as a run lasts.

    The system takes longer to find new memory than to copy to what is there, so a thread asks for
    it, page by page, while training goes on.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._arrays = [
            [np.empty(high - low, "<f4") for low, high in stepper.held(name)] for name in ARRAYS
        ]
        self._finding = threading.Thread(target=self._find, daemon=True)
        self._finding.start()

    def _find(self) -> None:
        for parts in self._arrays:
            for part in parts:
                part[:: mmap.PAGESIZE // part.itemsize] = 0

    def take(self, arrays: Iterable[list[Array]]) -> list[list[Array]]:
        """Copy the slices of each of ``ARRAYS`` and return the copies."""
        self._finding.join()
        for copies, parts in zip(self._arrays, arrays, strict=True):
            for copy, part in zip(copies, parts, strict=True):
                np.copyto(copy, part)
        return self._arrays


class Saving:
    """A checkpoint of all ranks that is being written.

    With ``aside`` each rank copies its slices there, and a thread writes the copies while training
    goes on; without, they are written at once. ``finish`` waits for the threads of all ranks, makes
    the checkpoint whole and points ``latest`` at it, before that ``best`` where it is that. Every
    rank makes one, and calls ``finish``. ``again`` is which command goes on where writing fails.

    Raises
    ------
    AllRanksError
        When any rank could not write: the disk is full, say. What was there before stays as it was.
    """

    def __init__(
        self,
        folder: Path,
        stepper: Stepper,
        state: State,
        comm: Comm,
        tokenizer: Path | None,
        best: bool = False,
        *,
        aside: Copies | None = None,
        again: str = "the same command",
    ) -> None:
        self.folder, self.state, self.comm, self.best = folder, state, comm, best
        self._again = again
        self.path = folder / folder_name(state.step)
        self._part = folder / f"{self.path.name}.tmp"
        self._cutting, self._slices = stepper.cutting, stepper.slices
        self._crcs: dict[str, dict[int, int]] = {}
        self._failure: Exception | None = None
        self.seconds = 0.0  # that writing took

        def prepare() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
            if self._part.exists():
                shutil.rmtree(self._part)
            self._part.mkdir()
            for array in ARRAYS:
                (self._part / f"{array}.bin").touch()
            if tokenizer is not None:
                replace_durably(self._part / TOKENIZER, tokenizer.read_bytes())

        self._together(prepare, only=0)
        master = [stepper.master[low:high] for low, high in stepper.slices]
        on_host = (
            [np.ascontiguousarray(stepper.ops.to_numpy(part), "<f4") for part in parts]
            for parts in (master, stepper.by_slice("m"), stepper.by_slice("v"))
        )
        self._thread: threading.Thread | None = None
        if aside is not None:
            copied = aside.take(on_host)
            self._thread = threading.Thread(target=self._write, args=(copied,), daemon=True)
            self._thread.start()
        else:
            self._write(on_host)

    def _write(self, arrays: Iterable[list[Array]]) -> None:
        began = time.perf_counter()
        try:
            for name, parts in zip(ARRAYS, arrays, strict=True):
                path = self._part / f"{name}.bin"
                self._crcs[name] = _write_slices(path, name, self._cutting, self._slices, parts)
        except Exception as error:  # raised where it is waited for, whatever it is
            self._failure = error
        self.seconds = time.perf_counter() - began

    @property
    def written(self) -> bool:
        """Whether this rank's slices are on the disk, or cannot be."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Path:
        """Return the path of the checkpoint, whole."""
        if self._thread is not None:
            self._thread.join()

        def own() -> dict[str, dict[int, int]]:
            if self._failure is not None:
                raise self._failure
            return self._crcs

        ranks = self._together(own)
        crcs = {name: {k: crc for r in ranks for k, crc in r[name].items()} for name in ARRAYS}
        described = Manifest(
            **msgspec.structs.asdict(self.state),
            parameters=self._cutting.size,
            block=SUM_BLOCK,
            crc32={name: tuple(crc for _, crc in sorted(crcs[name].items())) for name in ARRAYS},
        )

        def make_whole() -> None:
            if self.path.exists() and step_of(self.path) is None:
                raise ValueError(f"{self.path} is in the way and is no checkpoint: move it")
            manifest.write(self._part / MANIFEST, described)
            if self.path.is_symlink():
                self.path.unlink()  # what it leads to is somebody else's
            if self.path.exists():  # of a run that went this far, was set back, and came again
                _replace(self.path, self._part)
            else:
                move(self._part, self.path)
            sync_folder(self.folder)
            # in this order: who goes on from before comes to the best again, and points at it
            for pointer in ("best", "latest") if self.best else ("latest",):
                point(self.folder, pointer, self.path.name)

        self._together(make_whole, only=0)
        return self.path

    def _together(self, work: Callable[[], Any], only: int | None = None) -> list[Any]:
        try:
            return together(self.comm, work, only)
        except AllRanksError as error:
            if self.comm.rank == 0:
                shutil.rmtree(self._part, ignore_errors=True)
            raise AllRanksError(
                f"the checkpoint {self.path} could not be written ({error}); what was saved before "
                f"is untouched: see to it (is the disk full?), then {self._again} goes on"
            ) from error


def room_for_copies(stepper: Stepper, comm: Comm) -> bool:
    """Tell whether all ranks of each machine have memory for a copy of what they save."""
    needed = 4 * sum(stepper.owned(name) for name in ARRAYS)
    everyone = comm.all_gather((gethostname(), needed, psutil.virtual_memory().available))
    return all(
        sum(n for other, n, _ in everyone if other == host) < free / 2 for host, _, free in everyone
    )


def _write_slices(
    path: Path, name: str, cutting: Cutting, slices: Sequence[Range], parts: list[Array]
) -> dict[int, int]:
    """Write slices of an array where they belong, durably; return the CRC of each block.

    Blocks are named by their first elements.
    """
    crcs = {}
    with path.open("r+b", buffering=0) as file:
        for (low, high), data in zip(cutting.held(name, slices), parts, strict=True):
            file.seek(4 * cutting.offset(name, low))
            left = data.view(np.uint8).data
            while left:
                left = left[file.write(left[:PIECE]) :]
                _settle(file.fileno())
            for start, end in cutting.blocks(low, high):
                crcs[start] = crc32(data[start - low : end - low].data)
    return crcs


def _settle(file: int) -> None:
    """Wait for the disk, and give back the memory that held what is there now.

    A checkpoint is seldom read soon. Piece after piece then goes through the same memory: finding
    more costs a virtual machine ten times as much of a processor as writing, and the training data
    is not pushed out of it.
    """
    os.fsync(file)
    forget(file)


def point(folder: Path, pointer: str, name: str) -> None:
    """Make ``latest`` or ``best`` name a checkpoint, in one step that cannot be half done."""
    replace_durably(folder / pointer, f"{name}\n".encode())


def _replace(path: Path, part: Path) -> None:
    """Put a checkpoint in the place of another, which is named by nothing meanwhile.

    ``latest`` names the one before it then, ``best`` none.
    """
    folder, former = path.parent, None
    named = [pointer for pointer in ("latest", "best") if pointed(folder, pointer) == path]
    before = [step for step in steps(folder) if folder_name(step) < path.name]
    try:
        for pointer in named:
            if pointer == "latest" and before:
                point(folder, pointer, folder_name(before[-1]))
            else:
                (folder / pointer).unlink()
        sync_folder(folder)
        former = _set_aside(path)
        move(part, path)
    except OSError:
        if former is not None:
            move(former, path)
        for pointer in named:
            point(folder, pointer, path.name)
        raise


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint that is to be removed: it stops being one before its first file goes."""
    doomed = path.with_name(path.name + ".old")
    if doomed.exists():
        shutil.rmtree(doomed)
    move(path, doomed)
    return doomed


def prune(folder: Path, keep: int) -> list[Path]:
    """Return the folders that are no longer needed, none of them a checkpoint any more.

    Of the checkpoints up to ``latest`` the ``keep`` newest stay and the best; later ones are of a
    run that was set back, and stay until it comes again. What was half written or half removed
    goes. Nothing else is touched: no link, no folder with another name or without our manifest.
    """
    latest, best = pointed(folder, "latest"), pointed(folder, "best")
    old = [s for s in steps(folder) if latest is None or folder_name(s) <= latest.name][:-keep]
    for path in [folder / folder_name(step) for step in old]:
        if path not in (latest, best) and not path.is_symlink():
            with contextlib.suppress(*IN_USE):  # somebody reads it: the next time, then
                _set_aside(path)
    halves = [
        path
        for path in folder.glob("step-*")
        if re.fullmatch(r"step-[0-9]{8,}\.(tmp|old)", path.name)
    ]
    return [path for path in halves if path.is_dir() and not path.is_symlink()]
