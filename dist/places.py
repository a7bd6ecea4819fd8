"""New files and folders under names that people choose: there whole, or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel.system import move, sync_folder


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


def _sync_file(path: Path) -> None:
    with path.open("r+b") as file:  # Windows asks for what may be written
        os.fsync(file.fileno())
