"""The text of the kernels, as a compiler is given it."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent

# Every kernel file, and what is put before it.
SOURCES: dict[str, tuple[str, ...]] = {
    "attention": ("device.cuh", "attention.cuh"),
    "attention_mma": ("device.cuh", "attention.cuh"),
    "elementwise": ("device.cuh",),
    "embedding": ("device.cuh",),
    "layout": ("device.cuh",),
    "loss": ("device.cuh",),
    "norm": ("device.cuh",),
    "optimizer": ("device.cuh",),
    "reduce": ("device.cuh",),
    "rope": ("device.cuh",),
}


def parts(source: str) -> dict[str, str]:
    """Return file name -> text of all that makes up a kernel file, in order."""
    names = (*SOURCES[source], f"{source}.cu")
    return {name: text_of(name) for name in names}


def text_of(name: str) -> str:
    """Return the text of one file."""
    return (FOLDER / name).read_text(encoding="utf-8")


def kernels(text: str) -> list[str]:
    """Return the names of the kernels that a file defines."""
    return re.findall(r"^KERNEL\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", text, re.MULTILINE)


def join(texts: dict[str, str]) -> str:
    """Return the files as one text in which a compiler names lines by file."""
    return "\n".join(f'#line 1 "{name}"\n{text}' for name, text in texts.items())
