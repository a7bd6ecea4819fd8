"""Smaller cases out of a failing one: fewer rows, tokens, heads or widths, the rest as it was."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accel.verify.contract import Case
from reference.types import Array

_HEADS, _CACHE = "BTHd", "LBSHd"
# The axes of what may be cut, arrays and options alike. Of attention's query heads H each key/value
# head K has its group.
_AXES: dict[str, dict[str, str]] = {
    "attention": {
        "q": "BTHd",
        "k": "BSKd",
        "v": "BSKe",
        "alibi": "H",
        "key_mask": "BS",
        "documents": "BS",
        "dout": "BTHe",
    },
    "rope": {"x": _HEADS, "start": "B", "dout": _HEADS},
    "write_kv": {"cache.k": _CACHE, "cache.v": _CACHE, "k": _HEADS, "v": _HEADS, "position": "B"},
    "decode_step": {"token": "B", "cache.k": "LBSHd", "cache.v": "LBSHd", "position": "B"},
    "merge_heads": {"x": _HEADS},
    "linear_cross_entropy": {"x": "ND", "head": "VD", "targets": "N", "mask": "N", "bias": "V"},
}
_MAY_GO = {
    "attention": "BTSKGde",
    "rope": "BTH",
    "write_kv": "LBSTHd",
    "decode_step": "BS",
    "merge_heads": "BTHd",
    "linear_cross_entropy": "NDV",
}


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
    """Yield cases with one axis cut, the boldest cuts first."""
    axes = _AXES.get(case.op, {})
    if case.op == "linear_cross_entropy" and np.ndim(case.arrays["x"]) != 2:
        axes = {}
    sizes: dict[str, int] = {}
    for name, letters in axes.items():
        value = _value(case, name)
        if isinstance(value, np.ndarray) and value.ndim == len(letters):
            sizes |= dict(zip(letters, value.shape, strict=True))
    if case.op == "attention":
        sizes["G"] = sizes["H"] // sizes["K"]
    for bold in (True, False):
        for letter in _MAY_GO.get(case.op, ""):
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


def _with(case: Case, axes: dict[str, str], stays: dict[str, Array]) -> Case:
    arrays, options, cotangent = dict(case.arrays), dict(case.options), case.cotangent
    for name, letters in axes.items():
        value = _value(case, name)
        if not isinstance(value, np.ndarray) or value.ndim != len(letters):
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
