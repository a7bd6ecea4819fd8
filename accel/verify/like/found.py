"""Shapes that nobody declared, found by varying those of an example.

Axes of one size may belong together: those of which one alone can take another size, as the
reference itself accepts or refuses, get a letter of their own; of the others those that can be
changed in pairs share one; what is left of a size goes together. An integer among the arguments
counts as an axis, if it changes with one. Then each letter is tried at the usual sizes, and keeps
those that are accepted.
"""

import dataclasses
import itertools
import string
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from accel.verify.draw import MAX_ELEMENTS, USUAL
from accel.verify.like.declared import ArrayOf, DeclarationError, Declared, refuse_cotangents
from accel.verify.like.frameworks import Framework, named_parts
from accel.verify.like.reference import Reference, parameters_of
from reference.types import Array

SMALL = (16, 8, 4, 2)  # sizes above this are halved while others are tried; less where it must be
Variables = dict[Hashable, int]  # an axis or an integer, and its size in the example
Accepts = Callable[[Mapping[Any, int]], bool]


def together(sizes: Variables, accepts: Accepts) -> list[list[Hashable]]:
    """Return which variables change together; those that never can are in none."""

    def can(group: list[Hashable]) -> bool:
        n = sizes[group[0]]
        return any(accepts({**sizes, **dict.fromkeys(group, m)}) for m in (n + 1, 2 * n, n + 2))

    groups: list[list[Hashable]] = []
    for n in dict.fromkeys(sizes.values()):
        alike = [key for key, size in sizes.items() if size == n]
        alone = [key for key in alike if can([key])]
        groups += [[key] for key in alone]
        rest = [key for key in alike if key not in alone]
        for pair in itertools.combinations(rest, 2):
            if all(key in rest for key in pair) and can(list(pair)):
                groups.append(list(pair))
                rest = [key for key in rest if key not in pair]
        joined = False
        for group in groups:  # a third that goes with a pair
            for key in list(rest):
                if sizes[group[0]] == n and len(group) > 1 and can([*group, key]):
                    group.append(key)
                    rest.remove(key)
                    joined = True
        if rest and not joined and len(rest) > 1 and can(rest):
            groups.append(rest)
    return groups


def reduced(base: dict[str, int], accepts: Accepts, fits: Accepts) -> dict[str, int]:
    """Return sizes that are accepted, each halved as long as it goes, until there are few elements.

    ``fits`` says whether they are few.
    """
    for least in SMALL:
        base = _halved(base, accepts, least)
        if fits(base):
            break
    return base


def _halved(base: dict[str, int], accepts: Accepts, least: int) -> dict[str, int]:
    base, stuck = dict(base), set[str]()
    while True:
        large = [name for name, n in base.items() if n > least and name not in stuck]
        if not large:
            return base
        name = max(large, key=lambda name: base[name])
        smaller = {**base, name: base[name] // 2}
        if accepts(smaller):
            base = smaller
        else:
            stuck.add(name)


def sizes_taken(
    base: dict[str, int], accepts: Callable[[Mapping[str, int]], bool]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return which of the usual sizes each letter can have."""
    return tuple(
        (name, tuple(m for m in sorted({*USUAL, n}) if m == n or accepts({**base, name: m})))
        for name, n in base.items()
    )


def arguments_of(function: Any, example: Any) -> dict[str, Any]:
    """Return the arguments of an example by name.

    Raises
    ------
    DeclarationError
        When there are more than the function takes.
    """
    if isinstance(example, Mapping):
        return dict(example)
    given = list(example) if isinstance(example, (tuple, list)) else [example]
    parameters = parameters_of(function)
    names = [f"x{i}" for i in range(len(given))]
    if parameters is not None and all(p.kind is not p.VAR_POSITIONAL for p in parameters.values()):
        names = list(parameters)
    if len(names) < len(given):
        raise DeclarationError(f"the example has {len(given)} arguments, more than there are")
    return dict(zip(names, given, strict=False))


def declared_by(name: str, function: Any, framework: Framework, example: Any) -> Reference:
    """Return a reference of which there is an example.

    Raises
    ------
    DeclarationError
        When the reference refuses its example, or no size of it can change.
    """
    given = arguments_of(function, example)
    arrays: dict[str, Array] = {}
    options: dict[str, Any] = {}
    for key, value in given.items():
        if named_parts(value).keys() == {"out"} and not isinstance(value, (bool, int, float)):
            arrays[key] = np.array(framework.take(value))
        else:
            options[key] = value
    refuse_cotangents(arrays)
    fixed = Declared({}, {n: (v,) for n, v in options.items()}, tuple(given))
    probe = Reference(name, function, framework, fixed)

    def gives(values: Mapping[str, Array], chosen: Mapping[str, Any]) -> bool:
        try:
            results, _ = probe.results(values, chosen, (), "float64")
        except ValueError:
            return False
        return all(np.isfinite(r).all() for r in results.values() if r.dtype.kind == "f")

    probe.results(arrays, options, (), "float64")  # says what is wrong with the example
    sizes: Variables = {
        (key, axis): n for key, a in arrays.items() for axis, n in enumerate(a.shape) if n > 1
    }
    sizes |= {(key, -1): n for key, n in options.items() if type(n) is int and n > 1}

    def with_sizes(wanted: Mapping[Hashable, int]) -> tuple[dict[str, Array], dict[str, Any]]:
        rng = np.random.default_rng(0)
        made: dict[str, Array] = {}
        for key, a in arrays.items():
            shape = tuple(wanted.get((key, axis), n) for axis, n in enumerate(a.shape))
            values = 0.5 + rng.random(shape) if a.dtype.kind == "f" else np.zeros(shape)
            made[key] = values.astype(a.dtype)
        return made, {key: wanted.get((key, -1), v) for key, v in options.items()}

    def accepts(wanted: Mapping[Hashable, int]) -> bool:
        return gives(*with_sizes(wanted))

    # an integer that goes with no axis stays what it is
    integers = {(key, -1) for key in options}
    groups = [group for group in together(sizes, accepts) if not integers.issuperset(group)]
    letters = {letter: group for letter, group in zip(string.ascii_uppercase, groups, strict=False)}
    of = {key: letter for letter, group in letters.items() for key in group}

    def full(wanted: Mapping[str, int]) -> Variables:
        return {key: wanted[letter] for key, letter in of.items()}

    def few(wanted: Mapping[str, int]) -> bool:
        given = full(wanted)
        elements = [
            int(np.prod([given.get((key, axis), n) for axis, n in enumerate(a.shape)]))
            for key, a in arrays.items()
        ]
        return max(elements, default=0) <= MAX_ELEMENTS

    def accepts_letters(wanted: Mapping[str, int]) -> bool:
        return few(wanted) and accepts(full(wanted))

    base = {letter: sizes[group[0]] for letter, group in letters.items()}
    if not base:
        raise DeclarationError("no size of its example can be changed; declare SHAPES")
    small = reduced(base, lambda wanted: accepts(full(wanted)), few)
    known = sizes_taken(small, accepts_letters)
    made: dict[str, ArrayOf] = {}
    for key, a in arrays.items():
        axes = tuple(of.get((key, axis), str(n)) for axis, n in enumerate(a.shape))
        bounds: tuple[tuple[str, str], ...] = ()
        if a.dtype.kind in "iu":
            bounds = _bounds(key, arrays, options, base, gives)
        elif a.dtype.kind == "f" and a.size and a.min() >= 0:
            signed = {**arrays, key: a * np.where(np.arange(a.size).reshape(a.shape) % 2, 1, -1)}
            bounds = () if gives(signed, options) else ((">", "0"),)
        kind = {"i": "int", "u": "int", "b": "bool"}.get(a.dtype.kind, "float")
        made[key] = ArrayOf(axes, kind, bounds)
    chosen = {key: (of.get((key, -1), value),) for key, value in options.items()}
    declared = Declared(made, chosen, tuple(given), known=known, small=dict(small))
    return dataclasses.replace(probe, declared=declared)


def _bounds(
    key: str,
    arrays: Mapping[str, Array],
    options: Mapping[str, Any],
    base: Mapping[str, int],
    gives: Callable[[Mapping[str, Array], Mapping[str, Any]], bool],
) -> tuple[tuple[str, str], ...]:
    """Return the range of an array of integers: a letter that bounds it, or that of the example."""
    a = arrays[key]
    for letter, n in base.items():
        last, beyond = (np.full_like(a, value) for value in (n - 1, n))
        if gives({**arrays, key: last}, options) and not gives({**arrays, key: beyond}, options):
            return (("<", letter),)
    return ((">=", str(int(a.min(initial=0)))), ("<=", str(int(a.max(initial=0)))))
