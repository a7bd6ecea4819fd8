"""Writing files so that a power cut leaves the old one or the new one."""

import os
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
