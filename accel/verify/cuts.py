"""Smaller cases out of a failing one: fewer rows, tokens, heads or widths, the rest as it was."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import room
from accel.verify.travel import expanded
from reference.types import Array

TRIES = 80  # smaller cases of one that fails


def cut_while(
    case: Case,
    fails: Callable[[Case], bool],
    cuts: Callable[[Case], Iterator[Case]],
) -> Case:
    """Return the smallest case that cutting finds and that still fails.

    ``cuts`` yields smaller cases. ``fails`` is asked of at most ``TRIES`` of them, and says no to
    those that the reference refuses.
    """
    going, tries = True, TRIES
    while going:
        going = False
        for candidate in cuts(case):
            if tries == 0:
                return case
            tries -= 1
            if fails(candidate):
                case, going = candidate, True
                break
    return case


# The axes of what the contract knows as objects.
_OBJECTS = {"cache.k": "L B S Hkv d", "cache.v": "L B S Hkv d", "token": "B"}


def cuts(case: Case) -> Iterator[Case]:
    """Yield cases with one axis cut, the boldest cuts first.

    Axes with one letter are cut together. Each key/value head has its group G of query heads.
    """
    spec = case.spec
    shapes = {o.name: o.shape for o in spec.operands} | _OBJECTS | {"dout": spec.out}
    shapes |= dict.fromkeys(case.options, "B")  # start and position, row by row
    axes: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, value in _values(case).items():
        if isinstance(value, np.ndarray) and shapes.get(name):
            axes[name] = expanded(shapes[name], value.ndim)
            if value.ndim != len(axes[name]):
                return
            sizes |= dict(zip(axes[name], value.shape, strict=True))
    if "Hq" in sizes:
        sizes["G"] = sizes["Hq"] // sizes["Hkv"]
    for bold in (True, False):
        cut = room(case.op).CUTS.split()
        for letter in [n for n in sizes if n in cut or (n[:3] == "..." and "..." in cut)]:
            n = sizes.get(letter, 1)
            whole = np.arange(n)
            parts = [whole[:1], whole[-1:], whole[: n // 2], whole[n // 2 :]]
            for kept in parts if bold else [whole[1:], whole[:-1]]:
                if n > 1 and 0 < len(kept) < n:
                    yield _with(case, axes, _indices(letter, kept, sizes))


def _indices(letter: str, kept: Array, sizes: dict[str, int]) -> dict[str, Array]:
    """Return what stays of each axis: the query heads go with their group."""
    if letter not in ("Hkv", "G") or "Hq" not in sizes:
        return {letter: kept}
    heads = np.arange(sizes["Hq"]).reshape(sizes["Hkv"], sizes["G"])
    if letter == "Hkv":
        return {"Hkv": kept, "Hq": heads[kept].reshape(-1)}
    return {"Hq": heads[:, kept].reshape(-1)}


def _values(case: Case) -> dict[str, Any]:
    return {**case.arrays, **case.options, "dout": case.cotangent}


def _with(case: Case, axes: dict[str, list[str]], stays: dict[str, Array]) -> Case:
    values = _values(case)
    for name, letters in axes.items():
        for axis, letter in enumerate(letters):
            if letter in stays:
                values[name] = np.take(values[name], stays[letter], axis=axis)
    return dataclasses.replace(
        case,
        arrays={name: values[name] for name in case.arrays},
        options={name: values[name] for name in case.options},
        cotangent=values["dout"],
    )
