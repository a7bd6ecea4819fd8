"""New files and folders under names that people choose: there whole, or not at all."""

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from accel.system import forget, move, sync_folder

PAUSE = 0.05  # seconds in which what is written gathers


@contextmanager
def new_place(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path`` to write a file or a folder under, which then gets its own name.

    Raises
    ------
    ValueError, OSError
        When something is there already, or it cannot be written; what was begun is removed.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise ValueError(f"{path} exists already: choose another name, or move it away")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    part = path.absolute().parent / f".part-{secrets.token_hex(8)}"
    try:
        yield part
        for written in [*part.rglob("*")] if part.is_dir() else [part]:
            _sync_file(written)
        if part.is_dir():
            sync_folder(part)
        if path.is_dir():  # empty; only Linux would put a folder in its place
            path.rmdir()
        move(part, path)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.absolute().parent)


@contextmanager
def steadily(file: IO[bytes]) -> Iterator[None]:
    """Have what is written to a file go to the disk meanwhile, and not all of it at the end.

    The memory that held it is given back each time, so that a large file goes through the same
    memory again and again: finding more can cost more than all else (``checkpoint._settle``).

    Raises
    ------
    OSError
        When the disk could not take it, which no later fsync may say again.
    """
    ended = threading.Event()

    def sync() -> None:
        while not ended.wait(PAUSE):
            os.fsync(file.fileno())
            forget(file.fileno())

    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(sync)
        try:
            yield
        finally:
            ended.set()
            synced.result()


def _sync_file(path: Path) -> None:
    with path.open("r+b") as file:  # Windows asks for what may be written
        os.fsync(file.fileno())
