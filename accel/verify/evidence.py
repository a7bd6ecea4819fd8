"""What many cases say together: the failing ones that hints are tried on, and when an op fails."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel.verify.calling import Judged
from accel.verify.contract import Case
from accel.verify.travel import special_at
from reference.config import Config
from reference.contract import Pattern

TELLING = 5_000  # elements of a case that hints are tried on
RIGHT = 20  # right cases
KEPT = 5  # failing cases of each result with few features, and as many with many
TILES = (2, 4, 8, 16, 32, 64, 128, 256)
BOUNDS = (2**16, 2**15, *TILES)  # beyond 16 bits, else the least that fits
FEWEST = 4  # failing cases, below which a condition says nothing
CHANCE = 1e-3  # of a condition that only seems to be one
WORTH = 0.05  # the same of a second condition beside the first
BETWEEN = "another forward in between"

Key = tuple[str, str]  # a result, and the kind of its failure
Features = dict[str, Any]  # sizes by their letters, options, and the manner of the call


class Wrong(NamedTuple):
    """A case with a wrong result."""

    case: Case
    judged: Judged  # that result
    every: Sequence[Judged] = ()  # all results of the case


class Seen(NamedTuple):
    """A case without a wrong result."""

    case: Case
    judged: Sequence[Judged]


class Evidence:
    """Collects the cases of an op in one precision."""

    def __init__(self) -> None:
        self.right: list[Seen] = []  # the largest that hints are tried on
        self.plain: dict[Key, list[Wrong]] = {}
        self.varied: dict[Key, list[Wrong]] = {}
        self.given: dict[Key, dict[str, Wrong]] = {}  # of each optional array, where it matters
        self.seen: list[tuple[Features, set[Key]]] = []

    def add(self, case: Case, judged: list[Judged]) -> None:
        """Take in one case and what was found."""
        failed: dict[Key, Judged] = {}
        for result in judged:
            if not result.ok:
                failed.setdefault((result.name, result.kind), result)
        self.seen.append((features(case), set(failed)))
        if not failed and case.size[0] <= TELLING and special_at(case) is None:
            self.right.append(Seen(case, judged))
            self.right.sort(key=lambda s: -s.case.size[0])
            del self.right[RIGHT:]
        for key, result in failed.items() if special_at(case) is None else ():
            for lists, sign in ((self.plain, 1), (self.varied, -1)):
                kept = lists.setdefault(key, [])
                kept.append(Wrong(case, result, judged))
                kept.sort(key=lambda w, sign=sign: _tells(w.case, sign))  # type: ignore[misc]
                del kept[KEPT:]
            with_each = self.given.setdefault(key, {})
            for name in _that_matter(case):
                least = with_each.setdefault(name, Wrong(case, result, judged))
                if _tells(case, -1) < _tells(least.case, -1):
                    with_each[name] = Wrong(case, result, judged)

    def telling(self, key: Key) -> list[Wrong]:
        """Return failing cases to try a hint on: plain ones, which have one mistake at a time, and
        varied ones, in which mistakes that look alike do not.
        """
        given = self.given.get(key, {}).values()
        every = [*self.plain.get(key, []), *self.varied.get(key, []), *given]
        return list({id(wrong.case): wrong for wrong in every}.values())

    def conditions(self, key: Key) -> Iterator[str]:
        """Say when a result is wrong, if one or two features of a case tell."""
        seen = self.seen
        if not any(key in failed and f[BETWEEN] for f, failed in seen):
            # as what only a second call shows, which is not made then
            seen = [(f, failed) for f, failed in seen if not f[BETWEEN]]
        # no gradient is owed to what is not given
        seen = [(f, failed) for f, failed in seen if f.get(f"{key[0][1:]} given", True)]
        fails = np.array([key in failed for _, failed in seen])
        otherwise = np.array(
            [any(name == key[0] for name, _ in failed - {key}) for _, failed in seen]
        )
        total, wrong = len(fails), int(fails.sum())
        if wrong < FEWEST or wrong == total:
            return
        tried = dict(_conditions([f for f, _ in seen]))
        needed = {}
        for text, holds in tried.items():
            mask = np.array([holds(f) for f, _ in seen])
            if mask[fails].all() and not mask.all():
                needed[text] = mask

        def luck(part: int, whole: int) -> float:
            return math.comb(part, wrong) / math.comb(whole, wrong) * len(tried)

        for a, b in itertools.combinations(list(needed), 2):
            both = needed[a] & needed[b]
            if luck(int(both.sum()), min(int(needed[c].sum()) for c in (a, b))) < WORTH:
                needed[f"{a} and {b}"] = both
        if not needed:
            return

        def strength(text: str) -> tuple[float, int, float]:
            # a condition of two parts must be worth it
            share = wrong / needed[text].sum()
            return round(share, 1), -text.count(" and "), share

        best = max(needed, key=strength)
        if (otherwise & ~needed[best]).any():
            return  # it is wrong there, too
        where = int(needed[best].sum())
        if luck(where, total) < CHANCE and wrong >= 0.6 * where and where <= 0.8 * total:
            yield (
                f"it is wrong in {wrong} of the {where} cases with {best}, and in none of the "
                f"other {total - where}"
            )


def _tells(case: Case, sign: int) -> tuple[bool, int, int]:
    """Order cases by how much a hint says that explains them: by features, then by numbers."""
    elements, given = case.size
    return elements > TELLING, sign * given, -elements


def _that_matter(case: Case) -> Iterator[str]:
    """Yield the optional arrays that are given and not all one number, as a mask without holes."""
    for operand in case.spec.operands:
        a = case.arrays.get(operand.name) if operand.optional else None
        if isinstance(a, np.ndarray) and a.size and (a != a.reshape(-1)[0]).any():
            yield operand.name


def features(case: Case) -> Features:
    """Return what may decide whether a case fails."""
    found: Features = {}
    own: dict[str, Any] = getattr(case, "sizes", {})  # of a reference of one's own
    dims = dict(own)
    for operand in case.spec.operands:
        a = case.arrays.get(operand.name)
        if operand.optional:
            found[f"{operand.name} given"] = a is not None
        if a is not None and operand.shape:
            Pattern(operand.shape).fits(np.shape(a), dims)
    letters = [letter for letter, n in dims.items() if isinstance(n, int)] if own else []
    found |= {f"{a} = {b}": dims[a] == dims[b] for a, b in itertools.combinations(letters, 2)}
    lead = dims.pop("...", None)
    found |= dims
    if lead is not None and dims:
        found |= {"rows": math.prod(lead), "axes": len(lead) + 1}
    elif lead:
        found |= {"elements": math.prod(lead), "last axis": lead[-1], "axes": len(lead)}
    for name, value in case.options.items():
        if isinstance(value, Config):
            for field in dataclasses.fields(value):
                found[field.name] = getattr(value, field.name)
        elif isinstance(value, np.ndarray):
            found[f"{name} for each row"] = True
        else:
            found[name] = value
    for parameter in case.layouts:
        found[f"{parameter} not contiguous"] = True
        found[f"{parameter} {case.layouts[parameter]}"] = True
    found["out= given"] = bool(case.out)
    found["accumulate=True"] = case.out == "accumulate"
    found[BETWEEN] = case.interleaved
    return found


Holds = Callable[[Features], bool]


def _conditions(cases: list[Features]) -> Iterator[tuple[str, Holds]]:
    """Yield conditions on the features of these cases, the plainest first."""
    values: dict[str, list[Any]] = {}
    for found in cases:
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    for name, every in values.items():
        kinds = set(map(type, every))
        if kinds <= {bool}:
            yield name, lambda f, n=name: bool(f.get(n))  # type: ignore[misc]
            neither = name.replace(" = ", " ≠ ") if " = " in name else f"no {name}"
            yield neither, lambda f, n=name: not f.get(n)  # type: ignore[misc]
        elif kinds <= {str}:
            for value in sorted(set(every)):
                yield f"{name} = {value}", lambda f, n=name, v=value: f.get(n) == v  # type: ignore[misc]
        elif kinds <= {int, float, type(None)}:
            yield from _of_numbers(name, [v for v in every if v is not None], len(cases))
    for a, b in (("T", "S"), ("Hq", "Hkv"), ("d", "dv")):
        if a in values and b in values:
            yield f"{a} ≠ {b}", lambda f, a=a, b=b: f[a] != f[b]  # type: ignore[misc]
            yield f"{a} = {b}", lambda f, a=a, b=b: f[a] == f[b]  # type: ignore[misc]
            yield f"{a} > {b}", lambda f, a=a, b=b: f[a] > f[b]  # type: ignore[misc]
            yield f"{a} < {b}", lambda f, a=a, b=b: f[a] < f[b]  # type: ignore[misc]


def _of_numbers(name: str, every: list[Any], cases: int) -> Iterator[tuple[str, Holds]]:
    def at(f: Features) -> float:
        value = f.get(name)
        return math.nan if value is None else value

    if len(every) < cases:
        yield f"{name} given", lambda f: f.get(name) is not None
        yield f"no {name}", lambda f: f.get(name) is None
    levels = sorted(set(every))
    for low, high in itertools.pairwise(levels):
        # the round number that lies between, as people choose tiles
        tile = next((t for t in BOUNDS if low <= t < high), low)
        yield f"{name} > {tile:g}", lambda f, t=tile: at(f) > t  # type: ignore[misc]
    for level in levels[1:]:
        yield f"{name} < {level:g}", lambda f, v=level: at(f) < v  # type: ignore[misc]
    if len(levels) > 1:
        for level in levels:
            yield f"{name} = {level:g}", lambda f, v=level: at(f) == v  # type: ignore[misc]
            yield f"{name} ≠ {level:g}", lambda f, v=level: at(f) != v  # type: ignore[misc]
    if all(isinstance(v, int) for v in every) and levels and levels[-1] > 2:
        for tile in TILES:
            text = f"odd {name}" if tile == 2 else f"{name} no multiple of {tile}"
            yield text, lambda f, t=tile: at(f) % t != 0  # type: ignore[misc]
            text = f"even {name}" if tile == 2 else f"{name} a multiple of {tile}"
            yield text, lambda f, t=tile: at(f) % t == 0  # type: ignore[misc]
