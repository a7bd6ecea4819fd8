"""A real corpus that needs no download: what every Python installation brings along.

The standard library's sources, and the chapters of the language reference that ``help()`` shows
(``pydoc_data.topics``): Python and English, some 10 MB; and sources of the packages that are
installed beside it. Left out are tests, which are half of all files, and files that a program
wrote, such as tables of character codes.
"""

import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dist.heldout import place

TESTS = {"test", "tests", "idle_test"}
INSTALLED = {("site-packages",), ("dist-packages",)}
LARGEST = 1 << 20  # bytes of a file; what is longer is data
GENERATED = re.compile(r"auto-?generated|generated (by|from|with)|do not edit", re.IGNORECASE)
GENERATED_WITHIN = 300  # characters from the start of a file


class Text(NamedTuple):
    """One document."""

    name: str
    text: str


def standard_library() -> list[Text]:
    """Return the documents of this Python's own installation, in a fixed order."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    found = (_text(root, path) for path in sorted(_sources(root)))
    chapters = (Text(f"topic {name}", text.strip() + "\n") for name, text in topics.items())
    return [*filter(None, found), *sorted(chapters)]


def packages() -> Iterator[Text]:
    """Yield the sources of the packages that are installed, in the order of their names' hashes.

    The first of them are a part of each, in the same order wherever they are installed.
    """
    roots = {Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")}
    found = {os.fsencode(path.relative_to(root)): root for root in roots for path in _sources(root)}
    for name in sorted(found, key=place):
        text = _text(found[name], found[name] / os.fsdecode(name))
        if text is not None:
            yield text


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if not TESTS & set(folders) and folders[:1] not in INSTALLED:
            yield path


def _text(root: Path, path: Path) -> Text | None:
    try:
        if path.stat().st_size > LARGEST:
            return None
        with tokenize.open(path) as file:  # as Python itself finds out the encoding
            text = file.read()
        text.encode()
    except (OSError, SyntaxError, UnicodeError, LookupError):
        return None  # no source that this Python could run
    if not text.strip() or GENERATED.search(text[:GENERATED_WITHIN]):
        return None
    return Text(path.relative_to(root).as_posix(), text)
