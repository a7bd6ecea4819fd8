"""Holds a file of functions to a reference of one's own, as ``myllm verify --like`` does."""

from pathlib import Path
from typing import Any

from accel.verify.apart import Source
from accel.verify.check import Options, check_subject
from accel.verify.report import Report


def checked(folder: Path, new: str, *functions: str, ref: str, **options: Any) -> Report:
    """Hold a file to a reference in this process, which costs less than another."""
    for name, text in (("ref.py", ref), ("new.py", new)):
        (folder / name).write_text(text, encoding="utf-8")
    source = Source(str(folder / "new.py"), like=str(folder / "ref.py"), functions=functions)
    given = {"shrink": False, "dtypes": ("float32",), "examples": 24, **options}
    return check_subject(source.load(), Options(**given))
