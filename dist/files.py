"""Writing files so that a power cut leaves the old one or the new one."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and have it on the disk before returning."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk before returning."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, data: bytes) -> None:
    """Put new content under a name in one step that cannot be half done."""
    part = path.with_name(path.name + ".tmp")
    write_durably(part, data)
    part.replace(path)
    sync_folder(path.parent)


@contextmanager
def locked(path: Path, who: str) -> Iterator[None]:
    """Hold the lock file of a folder that only one process may write to.

    Raises
    ------
    ValueError
        When another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another {who} is writing to {path.parent}: wait for it, or choose another folder"
            ) from error
        yield
    finally:
        os.close(descriptor)
