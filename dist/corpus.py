"""A real corpus that needs no download: what every Python installation brings along.

The standard library's sources, and the chapters of the language reference that ``help()`` shows
(``pydoc_data.topics``): Python and English, some 10 MB. Left out are tests, which are half of all
files, and files that a program wrote, such as tables of character codes.
"""

import re
import sysconfig
import tokenize
from pathlib import Path
from typing import NamedTuple

TESTS = {"test", "tests", "idle_test"}
INSTALLED = {"site-packages", "dist-packages"}
GENERATED = re.compile(r"auto-?generated|generated (by|from|with)|do not edit", re.IGNORECASE)
GENERATED_WITHIN = 300  # characters from the start of a file


class Text(NamedTuple):
    """One document."""

    name: str
    text: str


def standard_library() -> list[Text]:
    """Return the documents of this Python's own installation, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] in INSTALLED or TESTS & set(parts[:-1]):
            continue
        try:
            with tokenize.open(path) as file:  # as Python itself finds out the encoding
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # not a source that this Python could run
        if text.strip() and not GENERATED.search(text[:GENERATED_WITHIN]):
            texts.append(Text("/".join(parts), text))
    from pydoc_data.topics import topics

    texts += [Text(f"topic {name}", text.strip() + "\n") for name, text in sorted(topics.items())]
    return texts
