"""Smaller cases out of a failing one: fewer rows, tokens, heads or widths, the rest as it was."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import room
from reference.types import Array


def cut_while(case: Case, fails: Callable[[Case], bool], tries: int = 80) -> Case:
    """Return the smallest case that cutting finds and that still fails.

    ``fails`` is asked of at most ``tries`` cases, and says no to those that the reference refuses.
    """
    going = True
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


def cuts(case: Case) -> Iterator[Case]:
    """Yield cases with one axis cut, the boldest cuts first.

    Axes with one letter are cut together. Of query heads H each key/value head K has its group G.
    """
    axes, may_go = room(case.op).CUTS
    sizes: dict[str, int] = {}
    for name, letters in axes.items():
        value = _value(case, name)
        if isinstance(value, np.ndarray):
            if value.ndim != len(letters):
                return
            sizes |= dict(zip(letters, value.shape, strict=True))
    if "K" in sizes:
        sizes["G"] = sizes["H"] // sizes["K"]
    for bold in (True, False):
        for letter in may_go:
            n = sizes.get(letter, 1)
            whole = np.arange(n)
            parts = [whole[:1], whole[-1:], whole[: n // 2], whole[n // 2 :]]
            for kept in parts if bold else [whole[1:], whole[:-1]]:
                if n > 1 and 0 < len(kept) < n:
                    yield _with(case, axes, _indices(letter, kept, sizes))


def _indices(letter: str, kept: Array, sizes: dict[str, int]) -> dict[str, Array]:
    """Return what stays of each axis: the query heads go with their group."""
    if letter not in "KG":
        return {letter: kept}
    heads = np.arange(sizes["H"]).reshape(sizes["K"], sizes["G"])
    if letter == "K":
        return {"K": kept, "H": heads[kept].reshape(-1)}
    return {"H": heads[:, kept].reshape(-1)}


def _value(case: Case, name: str) -> Any:
    if name == "dout":
        return case.cotangent
    return case.arrays.get(name, case.options.get(name))


def _with(case: Case, axes: Mapping[str, str], stays: dict[str, Array]) -> Case:
    arrays, options, cotangent = dict(case.arrays), dict(case.options), case.cotangent
    for name, letters in axes.items():
        value = _value(case, name)
        if not isinstance(value, np.ndarray):
            continue
        for axis, letter in enumerate(letters):
            if letter in stays:
                value = np.take(value, stays[letter], axis=axis)
        if name == "dout":
            cotangent = value
        elif name in arrays:
            arrays[name] = value
        else:
            options[name] = value
    return dataclasses.replace(case, arrays=arrays, options=options, cotangent=cotangent)
