"""The text of the kernels, as a compiler is given it."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent

# Every kernel file, and what is put before it.
SOURCES: dict[str, tuple[str, ...]] = {
    "attention": ("device.cuh", "attention.cuh"),
    "attention_mma": ("device.cuh", "attention.cuh", "attention_tiles.cuh"),
    "attention_wgmma": ("device.cuh", "warpgroup.cuh", "attention.cuh", "attention_tiles.cuh"),
    "decode": ("device.cuh",),
    "elementwise": ("device.cuh",),
    "embedding": ("device.cuh",),
    "layout": ("device.cuh",),
    "loss": ("device.cuh",),
    "muon": ("device.cuh",),
    "norm": ("device.cuh",),
    "optimizer": ("device.cuh",),
    "reduce": ("device.cuh",),
    "rope": ("device.cuh",),
}

C_TYPES: dict[str, Callable[[Any], Any]] = {
    "int": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "float": np.float32,
}


def parts(source: str) -> dict[str, str]:
    """Return file name -> text of all that makes up a kernel file, in order."""
    names = (*SOURCES[source], f"{source}.cu")
    return {name: text_of(name) for name in names}


def text_of(name: str) -> str:
    """Return the text of one file."""
    return (FOLDER / name).read_text(encoding="utf-8")


def kernels(text: str) -> dict[str, str]:
    """Return the kernels that a file defines: name -> the text of the parameters."""
    pattern = r"^KERNEL\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(([^)]*)\)"
    return dict(re.findall(pattern, text, re.MULTILINE))


class Signature(NamedTuple):
    """What a kernel is to be given, by name."""

    # in order, each with what makes its C type of a number; None for a pointer
    parameters: tuple[tuple[str, Callable[[Any], Any] | None], ...]
    elem: str | None  # the first array of activations, whose dtype decides the macro BF16
    macros: tuple[str, ...]  # that the source may be compiled with


@functools.cache
def signature(source: str, kernel: str) -> Signature:
    """Read the signature of a kernel of ``source``.cu from its text."""
    text = re.sub(r"//.*", "", "".join(parts(source).values())).replace("\\\n", " ")
    meanings = dict(re.findall(r"^#define (\w+) (.*)", text, re.MULTILINE))
    declared = re.sub(r"\w+", lambda word: meanings.get(word[0], word[0]), kernels(text)[kernel])
    pieces = re.findall(r"(\w+) ?(\*?) ?(\w+) *(?:,|$)", declared)
    return Signature(
        tuple((name, None if star else C_TYPES[kind]) for kind, star, name in pieces),
        next((name for kind, _, name in pieces if kind == "elem"), None),
        tuple(re.findall(r"^#ifndef (\w+)", text, re.MULTILINE)),
    )


def join(texts: dict[str, str]) -> str:
    """Return the files as one text in which a compiler names lines by file."""
    return "\n".join(f'#line 1 "{name}"\n{text}' for name, text in texts.items())
