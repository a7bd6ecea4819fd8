"""The lock file of a folder that only one process may write to, and files that are taken away."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel import system
from tokenizer.files import LOCK, remove_parts


@contextmanager
def locked(folder: Path, who: str) -> Iterator[int]:
    """Hold the lock file of a folder, and remove what writers left there that were killed.

    Yields its descriptor.

    Raises
    ------
    ValueError
        When another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = system.open_lock(folder / LOCK, 0o666)
    try:
        if not system.lock(descriptor, wait=False):
            raise ValueError(
                f"another {who} is writing to {folder}: wait for it, or choose another folder"
            )
        remove_parts(folder)
        yield descriptor
    finally:
        os.close(descriptor)


def still_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one of that name: it may have been removed or moved."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
