"""New files and folders under names that people choose: there whole, or not at all."""

import errno
import io
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np

from accel.system import forget, fresh_memory, move, past_memory, sync_folder
from reference.types import Array
from tokenizer.files import writing

ROOM = 4 << 20  # bytes that are gathered and written at once
PAUSE = 0.05  # seconds, at least, in which what is written gathers before the disk is waited for
Buffer: TypeAlias = bytes | memoryview


@contextmanager
def new_place(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path`` to write a file or a folder under, which then gets its own name.

    Raises
    ------
    ValueError, OSError
        When something is there already, or it cannot be written; what was begun is removed.
    """
    _check_free(path)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    part = path.absolute().parent / f".part-{secrets.token_hex(8)}"
    try:
        with writing(path):
            yield part
            for written in [*part.rglob("*")] if part.is_dir() else [part]:
                _sync_file(written)
            if part.is_dir():
                sync_folder(part)
            try:
                with suppress(FileNotFoundError):  # only Linux moves one onto an empty folder
                    path.rmdir()
                move(part, path)
            except OSError:
                _check_free(path)  # somebody else may have been quicker
                raise
    except BaseException:
        with suppress(OSError):  # of a disk that nothing can be written to: the first says it
            if part.is_dir():
                shutil.rmtree(part)
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.absolute().parent)


def _check_free(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise ValueError(f"{path} exists already: choose another name, or move it away")


@contextmanager
def steadily(path: Path) -> Iterator["Steady"]:
    """Yield a new file that is written from its first byte to its last; then it is on the disk.

    Raises
    ------
    OSError
        When the disk could not take it, which no later fsync may say again.
    """
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        steady = Steady(file, pool)
        yield steady
        steady.finish()


class Steady:
    """A file that takes what is written to the disk meanwhile, and not all of it at the end.

    On Linux it goes past the system's memory (O_DIRECT), which takes longer to find than the disk
    takes to write (``saving._settle``). Where there is no such way the memory is given back
    each time, so that a large file goes through the same memory again and again. Either way it
    is fsynced again and again, for no more than half of the time: a disk that is asked at the end
    alone takes a second or more for a gigabyte, when nothing is left to be done beside it.
    """

    def __init__(self, file: io.FileIO, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool = file, pool
        self._past = past_memory(file.fileno(), on=True)
        self._rooms = [np.frombuffer(fresh_memory(ROOM), np.uint8) for _ in range(2)]
        self._size = self._held = 0  # bytes: of all, and of those in the first room
        self._due = 0.0
        self._going: Future[None] | None = None

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._size

    def write(self, data: Buffer) -> None:
        """Write bytes, which may change afterwards."""
        left = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.zeros(0, np.uint8)
        self._size += left.size
        while left.size:
            n = left.size // mmap.PAGESIZE * mmap.PAGESIZE
            if n >= ROOM and not (left.ctypes.data | self._held) % mmap.PAGESIZE:
                self._send(self._rooms[0][: self._held])
                self._send(left[:n])  # as it lies
                self._wait()
            else:
                n = min(left.size, ROOM - self._held)
                self._rooms[0][self._held : self._held + n] = left[:n]
                self._held += n
                if self._held == ROOM:
                    self._send(self._rooms[0])
            left = left[n:]

    def finish(self) -> None:
        """Have all of it on the disk."""
        self._wait()
        self._past = past_memory(self._file.fileno(), on=False)  # the rest is no whole page
        self._send(self._rooms[0][: self._held])
        self._wait()
        os.fsync(self._file.fileno())

    def _send(self, part: Array) -> None:
        """Have bytes written, a room's say, and go on in the other one."""
        self._wait()
        self._going = self._pool.submit(self._put, part)
        self._rooms.reverse()
        self._held = 0

    def _wait(self) -> None:
        if self._going is not None:
            self._going.result()

    def _put(self, room: Array) -> None:
        while room.size:
            try:
                room = room[self._file.write(room.data) :]
            except OSError as error:
                if not self._past or error.errno != errno.EINVAL:
                    raise
                self._past = past_memory(self._file.fileno(), on=False)  # it said so, and cannot
        began = time.monotonic()
        if began > self._due:
            os.fsync(self._file.fileno())
            if not self._past:
                forget(self._file.fileno())
            ended = time.monotonic()
            self._due = ended + max(PAUSE, ended - began)


def _sync_file(path: Path) -> None:
    with path.open("r+b") as file:  # Windows asks for what may be written
        os.fsync(file.fileno())
