"""Observations: what is plain to see of a wrong result, in every case that was looked at."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from accel.verify.calling import Judged
from accel.verify.contract import Case
from accel.verify.evidence import Wrong, features
from accel.verify.guesses import explains, narrower, noise_of
from accel.verify.ops import room
from reference.types import Array

SMALL = {"float64": 1e-9, "float32": 1e-4}  # of a result, below which a difference is none
SMALL_ELSE = 2e-2
TILES = (128, 64, 32, 16, 8)
BOUNDS = [2**n for n in range(14, 2, -1)]
COUNTED = {"uint16": 2**16, "int16": 2**15}  # the first index that is none of a type


def slack_of(case: Case) -> float:
    """Return of a case what part of a result is no difference."""
    return SMALL.get(case.dtype, SMALL_ELSE)


def same(a: Any, b: Any, slack: float) -> bool:
    """Say whether all numbers are finite, and off by no more than a part of what is due."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return False
    return float(np.linalg.norm(a - b)) <= slack * max(float(np.linalg.norm(b)), 1e-30)


def _finite(judged: Judged) -> tuple[Array, Array] | None:
    """Return got and exact, if they can be compared element by element."""
    if judged.got is None or judged.exact is None or np.shape(judged.got) != np.shape(judged.exact):
        return None
    got, exact = np.asarray(judged.got, np.float64), np.asarray(judged.exact, np.float64)
    return (got, exact) if np.all(np.isfinite(got)) else None


def of_parts(both: Sequence[Wrong]) -> Iterator[str]:
    """Say what a part of a result stands for when that part alone is wrong."""
    case, judged, _ = both[0]
    for text, name, _ in room(case.op).only(case):
        if name == judged.name and all(text in _parts(w.case, w.judged) for w in both):
            yield text


def _parts(case: Case, judged: Judged) -> list[str]:
    found = []
    got, exact = judged.got, judged.exact
    for text, name, part in room(case.op).only(case):
        if name != judged.name or got is None or exact is None or got.shape != exact.shape:
            continue
        rest = same(got[~part], exact[~part], slack_of(case))
        if part.any() and rest and np.any(got[part] != exact[part]):
            found.append(text)
    return found


def unwritten(both: Sequence[Wrong]) -> Iterator[str]:
    """Say that an argument which is to be written holds in every case what it held before."""
    name = both[0].judged.name
    kept = [np.array_equal(w.judged.got, w.case.arrays.get(name)) for w in both]  # type: ignore[arg-type]
    if name in both[0].case.written and len(both) > 1 and all(kept):
        in_all = f"in {len(both)} of {len(both)} cases"
        yield f"{name} is as it was before the call, {in_all}: is it written?"


def shows(judged: Judged) -> bool:
    """Say whether a wrong result has a number besides 0, which and NaN many a mistake makes."""
    got = np.asarray(judged.got, np.float64)
    return bool((np.isfinite(got) & (got != 0)).any())


def factor(both: Sequence[Wrong]) -> Iterator[str]:
    """Say by what a result is off, where that is one factor with one name in every case."""
    name, ratios, cases = both[0].judged.name, [], []
    for case, judged, _ in both:
        pair = _finite(judged)
        if pair is None:
            return
        got, exact = pair
        if exact.any():
            ratio = float(np.sum(got * exact) / np.sum(exact * exact))
            if abs(ratio) < 1e-9 or not explains(ratio * exact, judged):
                return
            ratios.append(ratio)
            cases.append(case)
    if len(ratios) < 3:
        return
    factor = f"{name} is {ratios[0]:.4g} times what it should be"
    names = [dict(_factors(case)) for case in cases]
    for text in names[0]:
        values = [others.get(text, math.nan) for others in names]
        if np.allclose(ratios, values, rtol=1e-3) and not np.allclose(values, 1, rtol=1e-3):
            yield f"{text} ({factor}, and so by one rule in {len(ratios)} cases)"
            return
    if np.allclose(ratios, ratios[0], rtol=1e-3) and f"{ratios[0]:.4g}" != "1":
        yield f"{factor}, in {len(ratios)} of {len(ratios)} cases"


def _factors(case: Case) -> Iterator[tuple[str, float]]:
    """Yield what a result may be multiplied by, and what that means."""
    yield "the sign is flipped", -1.0
    for value, text in room(case.op).ratios(case):
        yield text, value
    sizes = features(case)
    if sizes.get("rows"):
        yield "mean for sum over the rows?", 1 / sizes["rows"]
        yield "sum for mean over the rows?", sizes["rows"]
    lead = np.shape(next(iter(case.arrays.values())))
    if len(lead) > 2 and lead[0]:
        yield "mean for sum over the batch?", 1 / lead[0]
    if sizes.get("D"):
        yield "sum for mean over the last axis?", sizes["D"]
        yield "mean for sum over the last axis?", 1 / sizes["D"]
    yield "base 2 for base e? the factor is log2(e).", math.log2(math.e)
    yield "base 2 for base e? the factor is ln(2).", math.log(2)
    for letter, n in sizes.items():
        if type(n) in (int, float) and n > 0:
            yield f"the factor is {letter}", n
            yield f"the factor is 1/{letter}", 1 / n
            yield f"the factor is √{letter}", math.sqrt(n)
            yield f"the factor is 1/√{letter}", 1 / math.sqrt(n)
            if 0 < n < 1:
                yield f"the factor is 1 - {letter}", 1 - n
                yield f"the factor is 1/(1 - {letter})", 1 / (1 - n)


def of_values(both: Sequence[Wrong]) -> Iterator[str]:
    """Yield observations that hold in every case."""
    judged = both[0][1]
    name = judged.name
    pairs = [pair for pair in (_finite(j) for _, j, _ in both) if pair is not None]
    if len(pairs) == len(both) > 1 and all(e.any() and not g.any() for g, e in pairs):
        in_all = f"in {len(pairs)} of {len(pairs)} cases"
        yield f"{name} is zero everywhere {in_all}: is it written at all?"
        return
    for kind, narrow in narrower(both[0][0].dtype).items():
        rich, holding = _holding(narrow, pairs)
        if holding > 3 and holding >= 0.6 * rich:
            where = f"in {holding} of {rich} cases"
            yield f"{name} holds {kind} numbers only {where}: is it rounded to {kind}?"
            break
    yield from _transposed(both)
    yield from _where_wrong(both)


def _holding(
    narrow: Callable[[Array], Array], pairs: Sequence[tuple[Array, Array]]
) -> tuple[int, int]:
    """Return how many cases are rich enough to tell, and how many hold nothing but such numbers."""

    def share(x: Array) -> float:
        x = x[x != 0]  # zeros are narrow whatever is done
        return float(np.mean(narrow(x).astype(np.float64) == x))

    rich = [
        (got, exact)
        for got, exact in pairs
        if np.count_nonzero(got) >= (8 if got.ndim else 1) and exact.any() and share(exact) < 0.5
    ]
    return len(rich), sum(share(got) == 1 for got, _ in rich)


def _transposed(both: Sequence[Wrong]) -> Iterator[str]:
    """Say which two axes are swapped, in the result or in memory."""
    first = np.asarray(both[0][1].exact)
    name = both[0][1].name
    for i, j in itertools.combinations(range(first.ndim), 2):
        swapped = laid = 0
        for case, judged, _ in both:
            got, exact = np.asarray(judged.got), np.asarray(judged.exact)
            if exact.ndim != first.ndim:
                break
            turned, slack = exact.swapaxes(i, j), slack_of(case)
            if same(turned.reshape(-1), exact.reshape(-1), slack):
                break
            swapped += same(got, turned, slack)
            laid += got.shape == exact.shape and same(got.reshape(-1), turned.reshape(-1), slack)
        if swapped == len(both):
            yield f"transposed? {name} is right with axes {i} and {j} swapped"
        elif laid == len(both):
            yield f"transposed? {name} lies in memory with axes {i} and {j} swapped"


def _where_wrong(both: Sequence[Wrong]) -> Iterator[str]:
    """Say in which part of the result the wrong elements lie, if that is one part in all cases."""
    name = both[0][1].name
    places: list[list[str]] = []
    for case, judged, _ in both:
        pair = _finite(judged)
        if pair is None:
            return
        got, exact = pair
        off = np.abs(got - exact)
        noise = noise_of(judged) / math.sqrt(max(1, off.size))
        wrong = off > max(1e-3 * float(off.max(initial=0)), noise)
        if wrong.any() and not wrong.all():
            places.append(list(_places(case, got, wrong)))
    if len(places) < 3:
        return
    common = [text for text in places[0] if all(text in others for others in places)]
    for text in common[:1]:
        yield f"{name} is wrong only {text}, in {len(places)} of {len(places)} cases"


def _places(case: Case, got: Array, wrong: Array) -> Iterator[str]:
    """Yield what all wrong elements have in common, the most special first."""
    for axis in range(wrong.ndim):
        length = wrong.shape[axis]
        hit = np.flatnonzero(wrong.any(axis=tuple(a for a in range(wrong.ndim) if a != axis)))
        if length < 2 or len(hit) == length:
            continue
        if hit[0] == hit[-1] == length - 1:
            yield f"at the last index of axis {axis}"
        if hit[0] == hit[-1] == 0:
            yield f"at the first index of axis {axis}"
        for kind, bound in COUNTED.items():
            low, high = hit[hit < bound], hit[hit >= bound]
            if high.size and np.isin(low, (high - 2**16) % length).all():
                beyond, such = f"from index {bound} on along axis {axis}", f"as with {kind} indices"
                if not low.size:
                    yield f"{beyond}, {such}"
                yield f"{beyond} and where these wrap around, {such}"
        for tile in TILES:
            if length > tile and hit[0] >= (length - 1) // tile * tile:
                yield f"in the last tile of {tile} along axis {axis}"
        for bound in BOUNDS:
            if hit[0] >= bound:
                yield f"from index {bound} on along axis {axis}"
        if (hit % 2 == 1).all():
            yield f"at odd indices of axis {axis}"
        if hit[0] > 0:
            yield f"behind the first index of axis {axis}"
    for given, a in {**case.arrays, "dout": case.cotangent}.items():
        if isinstance(a, np.ndarray) and a.shape == wrong.shape and a.dtype.kind == "f":
            if (a[wrong] == 0).all():
                yield f"where {given} is 0"
            elif (a[wrong] < 0).all():
                yield f"where {given} < 0"
            elif (a[wrong] > 0).all():
                yield f"where {given} > 0"
    if not got[wrong].any():
        yield "where it is 0"
