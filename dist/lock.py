"""The lock file of a folder that only one process may write to."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another {who} is writing to {path.parent}: wait for it, or choose another folder"
            ) from error
        remove_parts(path.parent)
        yield
    finally:
        os.close(descriptor)
