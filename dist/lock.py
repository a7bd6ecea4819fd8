"""The lock file of a folder that only one process may write to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel import system
from tokenizer.files import remove_parts


@contextmanager
def locked(path: Path, who: str) -> Iterator[None]:
    """Hold the lock file of a folder, and remove what writers left there that were killed.

    Raises
    ------
    ValueError
        When another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = system.open_lock(path, 0o666)
    try:
        if not system.lock(descriptor, wait=False):
            raise ValueError(
                f"another {who} is writing to {path.parent}: wait for it, or choose another folder"
            )
        remove_parts(path.parent)
        yield
    finally:
        os.close(descriptor)
