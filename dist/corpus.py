"""A real corpus that needs no download: what every Python installation brings along.

The standard library's sources, and the chapters of the language reference that ``help()`` shows
(``pydoc_data.topics``): Python and English, some 10 MB; and sources of the packages that are
installed beside it. Left out are tests, which are half of all files, and files that a program
wrote, such as tables of character codes.
"""

import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dist.heldout import place

TESTS = {"test", "tests", "idle_test"}
INSTALLED = {("site-packages",), ("dist-packages",)}
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
    texts = _read(root, (path for path in sorted(root.rglob("*.py")) if _is_source(root, path)))
    chapters = (Text(f"topic {name}", text.strip() + "\n") for name, text in topics.items())
    return [*texts, *sorted(chapters)]


def packages(most: int = 32_000_000) -> list[Text]:
    """Return sources of the installed packages, of about so many characters at most.

    Which they are depends on what is installed; of much it is a part of each, by a hash of the
    files' names.
    """
    root, left, texts = Path(sysconfig.get_paths()["purelib"]), most, []
    found = [path for path in root.rglob("*.py") if _is_source(root, path)]
    by_hash = sorted(found, key=lambda path: place(path.relative_to(root).as_posix().encode()))
    for text in _read(root, by_hash):
        texts.append(text)
        left -= len(text.text)
        if left <= 0:
            break
    return texts


def _is_source(root: Path, path: Path) -> bool:
    folders = path.relative_to(root).parts[:-1]
    return not TESTS & set(folders) and folders[:1] not in INSTALLED


def _read(root: Path, paths: Iterable[Path]) -> Iterator[Text]:
    for path in paths:
        try:
            with tokenize.open(path) as file:  # as Python itself finds out the encoding
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # not a source that this Python could run
        if text.strip() and not GENERATED.search(text[:GENERATED_WITHIN]):
            yield Text(path.relative_to(root).as_posix(), text)
