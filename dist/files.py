"""Writing files so that a power cut leaves the old one or the new one."""

import os
from pathlib import Path

from tokenizer.files import replace_durably, sync_folder

__all__ = ["replace_durably", "sync_folder", "write_durably"]


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and have it on the disk before returning."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
