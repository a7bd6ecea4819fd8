"""Files: written so that a power cut leaves the old one or the new one; JSON of a declared form."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from accel.system import move, sync_folder

T = TypeVar("T")
LOCK = "lock"  # the file of a folder that is MyLLM's own, held while one writes to it


def check_folder(path: Path) -> None:
    """Raise a ``ValueError`` unless a path is a folder, or one can be made there."""
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{place} is a file: name another folder")


def make_room(path: str | Path, head: bytes) -> None:
    """Make the folder of a file to be written, and find out before long work that it can be.

    A file takes the place of an older one that begins as it will itself, by ``head``, and of no
    other: a ``ValueError`` says so.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: -o names the file to write")
    if Path(path).is_file():
        with open(path, "rb") as file:
            begins = file.read(len(head))
        if begins and begins != head:
            raise ValueError(
                f"{path} is a file of another kind, and would be lost: name another by -o"
            )
    folder = Path(path).parent
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let what the system says of a file that cannot be written name it, as the user knows it."""
    try:
        yield
    except OSError as error:
        if error.strerror and ".part-" in str(error.filename or ".part-"):
            error.filename = str(path)
        raise


def replace_durably(path: Path, data: bytes) -> None:
    """Put content under a name in one step that cannot be half done, and is not undone.

    It is written beside its place first, under a name that nobody can foresee and lay a link at.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    part = path.with_name(f".part-{secrets.token_hex(8)}")
    with writing(path):
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            move(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def remove_parts(folder: Path) -> None:
    """Remove what ``replace_durably`` left below a folder where it was killed half-way."""
    for part in folder.rglob(".part-*"):
        if re.fullmatch(r"\.part-[0-9a-f]{16}", part.name) and part.is_file():
            part.unlink()


def read_json(data: bytes, form: type[T]) -> T:
    """Return the value of a JSON text that has a declared form.

    Raises
    ------
    ValueError
        If it is no JSON, or has another form; the message says where.
    """
    try:
        return msgspec.json.decode(data, type=form)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
