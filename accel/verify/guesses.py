"""Guesses at what is wrong, and which of them give what the kernel gave.

A guess is a mistake that people make, written as a change of the reference: the mask left out, the
heads mapped another way, ε outside the root. It explains a wrong result where it gives that result,
and not the right one: in the smallest case, which has many explanations, and in most larger ones,
which leave few. Of guesses that explain as much, those stay that agree best with the other results.
"""

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from accel.system import bounded_memory
from accel.tolerance import round_bf16, round_float16, round_tf32, round_to
from accel.verify.calling import Judged
from accel.verify.contract import (
    Case,
    accumulated_onto,
    gradient_names,
    numpy_dtype,
    reference_results,
)
from accel.verify.evidence import Wrong
from accel.verify.ops import Mistakes, room
from accel.verify.spoiled import by_rule, listed, spoiled
from reference.types import Array

MOST_MEMORY = 1 << 29  # bytes that trying one guess may take
MOST = 0.6  # of the larger cases, in which a guess must give what the kernel gave
ALIKE = "~ "  # before what loses digits, of which only the size of the loss is compared

# a case and a dtype -> (what is wrong, in words; what comes of it)
Guesses = Callable[[Case, Any], Iterator[tuple[str, Callable[[], Mapping[str, Array]]]]]


def explained(
    both: Sequence[Wrong],
    guesses: Guesses,
    limit: int = 9,
    seconds: float = math.inf,
    finite: Sequence[Wrong] = (),
) -> Iterator[str]:
    """Yield the guesses that give what the kernel gave: in the first case, and in most others.

    None is told that is contradicted by cases in which the kernel gave finite numbers.
    """
    (case, judged, _), *larger = both
    hits = Counter(that_explain(case, judged, guesses, stop=time.monotonic() + seconds))
    if not larger and np.size(np.asarray(judged.got)) < 8:
        return  # too small a case to tell one mistake from another
    for other in larger if hits else []:
        hits.update(that_explain(other.case, other.judged, guesses, wanted=frozenset(hits)))
    best = max(hits.values(), default=0)
    if best - 1 < MOST * len(larger):
        return
    likely = [text for text, count in hits.items() if count >= best - bool(larger)]
    for other in finite if likely else ():
        gone = _contradicted(other, guesses, frozenset(likely))
        likely = [text for text in likely if text not in gone]
    if len(likely) > 1:
        likely = _that_agree(larger, guesses, likely)
    for text in likely[:limit]:
        also = f", here and in {hits[text] - 1} of {len(larger)} larger cases" if larger else ""
        if not text.startswith(ALIKE):
            yield f"{text} That gives the {judged.name} which the kernel gave{also}."
        elif hits[text] > len(larger) > 2:
            yield f"{text.removeprefix(ALIKE)} That loses as many digits as the kernel did{also}."


def that_explain(
    case: Case,
    judged: Judged,
    guesses: Guesses,
    wanted: frozenset[str] | None = None,
    stop: float = math.inf,
) -> Iterator[str]:
    """Yield the guesses that give what the kernel gave in one case."""
    told: set[str] = set()
    for text, results in tried(case, guesses, _precise(case, judged), wanted, stop):
        if text in told or judged.name not in results:
            continue
        check = _loses_alike if text.startswith(ALIKE) else explains
        try:
            right = check(onto(results[judged.name], case, judged), judged)
        except (TypeError, ValueError):
            continue  # no array at all
        if right:
            told.add(text)
            yield text


def _precise(case: Case, judged: Judged) -> np.dtype[Any]:
    """Return the precision of mistakes: the working one where it is what overflows."""
    finite = judged.got is None or np.all(np.isfinite(judged.got))
    return np.dtype(np.float64) if finite else numpy_dtype(case.dtype)


def tried(
    case: Case,
    guesses: Guesses,
    dtype: np.dtype[Any],
    wanted: frozenset[str] | None = None,
    stop: float = math.inf,
) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Yield what comes of the guesses that apply to a case."""
    for text, make in guesses(case, dtype):
        if time.monotonic() > stop:
            return
        if wanted is None or text in wanted:
            try:
                # a changed formula may ask for an array as long as a position is high
                with bounded_memory(MOST_MEMORY):
                    results = make()
            except Exception:  # a change of the source may raise whatever it likes
                continue
            yield text, results


def _contradicted(other: Wrong, guesses: Guesses, likely: frozenset[str]) -> set[str]:
    """Return the guesses that give, in the working precision, neither what the kernel gave, which
    is finite, nor what is right, as where they make no difference.
    """
    case, judged, _ = other
    first: dict[str, Any] = {}
    for text, results in tried(case, guesses, numpy_dtype(case.dtype), likely):
        if judged.name in results:
            first.setdefault(text, onto(results[judged.name], case, judged))
    due = (judged, judged._replace(got=judged.exact))
    return {text for text, a in first.items() if not any(_near(a, j) for j in due)}


def _that_agree(larger: Sequence[Wrong], guesses: Guesses, likely: list[str]) -> list[str]:
    """Return the guesses that disagree least with all results, right ones among them."""
    differ = Counter(dict.fromkeys(likely, 0))
    for case, judged, every in larger:
        first = {j.name: j for j in reversed(every) if j.got is not None}  # not of a second call
        others = {**first, judged.name: judged}
        here: Counter[str] = Counter()
        for text, results in tried(case, guesses, _precise(case, judged), frozenset(likely)):
            far = sum(
                not _near(onto(results[name], case, other), other)
                for name, other in others.items()
                if name in results
            )
            here[text] = min(here.get(text, far), far)
        differ.update(here)
    least = min(differ.values())
    return [text for text in likely if differ[text] == least]


def _near(wrong: Array, judged: Judged) -> bool:
    got = np.asarray(judged.got, np.float64)
    if got.shape != np.shape(wrong):
        return False
    room = 1e-3 * float(np.linalg.norm(got)) + noise_of(judged)
    return bool(np.linalg.norm(got - wrong) <= room)


def noise_of(judged: Judged) -> float:
    """Return what the rounding of a right kernel may come to, as a norm."""
    if judged.closeness is None:
        return 0.0
    return judged.closeness.bound * (float(np.linalg.norm(np.asarray(judged.exact))) or 1.0)


def onto(wrong: Array, case: Case, judged: Judged) -> Array:
    """Return what a mistake gives where a gradient was added onto something."""
    if case.out == "accumulate" and judged.name == f"d{case.spec.parameters[0]}":
        return np.asarray(wrong + accumulated_onto(case))
    return wrong


def _loses_alike(wrong: Any, judged: Judged) -> bool:
    """Say whether a way to lose digits loses about as many: which ones is left to the compiler."""
    wrong, got, exact = (np.asarray(a, np.float64) for a in (wrong, judged.got, judged.exact))
    if not wrong.shape == got.shape == exact.shape:
        return False
    theirs, own = float(np.linalg.norm(wrong - exact)), float(np.linalg.norm(got - exact))
    return 0.2 * own <= theirs <= 5 * own


def explains(wrong: Any, judged: Judged) -> bool:
    """Say whether a mistake accounts for nearly all of what separates got from exact."""
    wrong, got, exact = (np.asarray(a, np.float64) for a in (wrong, judged.got, judged.exact))
    if wrong.shape != got.shape:
        return False
    if got.shape != exact.shape:
        return bool(np.linalg.norm(got - wrong) <= 1e-3 * np.linalg.norm(got))
    if not got.any():
        return not wrong.any()  # what is nearly zero is like any zero
    finite = np.isfinite(got)
    if not finite.all():
        same = np.array_equal(np.isfinite(wrong), finite)
        return same and bool(np.allclose(got[finite], wrong[finite], rtol=1e-2))
    off, left = float(np.linalg.norm(got - exact)), float(np.linalg.norm(got - wrong))
    return off > 0 and left <= max(0.02 * off, min(noise_of(judged), 0.2 * off))


def known(case: Case, dtype: Any) -> Iterator[Any]:
    """Yield the mistakes that are listed."""
    # what overflows does so in the working precision alone
    yield from in_words(case, dtype, numpy_dtype(case.dtype), np.dtype(np.float64))
    if dtype == np.float64:
        for text, rounded in _rounded(case):
            yield text, partial(reference_results, rounded, dtype)


def in_words(case: Case, dtype: Any, *more: Any) -> Iterator[Any]:
    """Yield the mistakes that rooms know, changes of the reference in more precisions, too."""
    yield from _exchanged(case, dtype)
    for text, wrong in itertools.chain(_left_out(case), room(case.op).mistakes(case)):
        if isinstance(wrong, Case):
            yield text, partial(reference_results, wrong, dtype)
        else:
            yield text, wrong
    for mistake in listed(case.op):
        for kind in dict.fromkeys((dtype, *more)):
            make = partial(spoiled, case.op, mistake)
            yield mistake.says, partial(_spoiled_results, case, make, kind)


def _spoiled_results(case: Case, make: Callable[[], Any], dtype: Any) -> dict[str, Array]:
    """Return the results of an op with a mistake; the forward's alone if dout then fits no more."""
    try:
        return reference_results(case, dtype, make())
    except ValueError:
        return reference_results(dataclasses.replace(case, cotangent=None), dtype, make())


def any_place(case: Case, dtype: Any) -> Iterator[Any]:
    """Yield the changes of the reference that are made by rule."""
    for text, make in by_rule(case.op):
        yield text, partial(_spoiled_results, case, make, dtype)


def _exchanged(case: Case, dtype: Any) -> Iterator[Any]:
    """Yield the gradients in another order."""

    def swapped(a: str, b: str) -> dict[str, Array]:
        results = reference_results(case, dtype)
        return {**results, a: results[b], b: results[a]}

    for a, b in itertools.combinations(gradient_names(case), 2):
        yield f"are {a} and {b} returned in each other's place?", partial(swapped, a, b)


def _left_out(case: Case) -> Mistakes:
    """Yield the mistakes with arguments that need not be given."""
    shapes = {o.name: o.shape for o in case.spec.arrays}
    for name in case.optional():
        a = case.arrays.get(name)
        if a is None:
            continue
        # zeros for what is trained, whose gradient is owed all the same
        left = np.zeros_like(a) if name in case.spec.gradients else None
        yield f"is {name} left out?", case.but({name: left})
        if a.dtype == np.bool_:
            yield f"is {name} turned around (True = take part)?", case.but({name: ~a})
            yield f"{name} off by one?", case.but({name: np.roll(a, 1, axis=-1)})
            yield f"{name} off by one?", case.but({name: np.roll(a, -1, axis=-1)})
        if len(a) > 1 and shapes[name].split()[0] in ("B", "..."):
            text = f"is {name} of the batch's first row taken for all?"
            yield text, case.but({name: np.repeat(a[:1], len(a), axis=0)})


NARROW: dict[str, Callable[[Array], Array]] = {
    "bf16": round_bf16,
    "float16": round_float16,
    "TF32": round_tf32,
    "float32": partial(round_to, dtype="float32"),
}


def narrower(dtype: str) -> dict[str, Callable[[Array], Array]]:
    less = {"float64": 4, "float32": 3}.get(dtype, 0)
    return dict(itertools.islice(NARROW.items(), less))


def _rounded(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case with inputs rounded to what is narrower than its dtype."""
    names = [n for n, a in case.arrays.items() if a is not None and a.dtype.kind == "f"]
    for kind, narrow in narrower(case.dtype).items():

        def less(a: Any, narrow: Any = narrow) -> Any:
            if isinstance(a, tuple):
                return tuple(less(part) for part in a)
            return narrow(a) if isinstance(a, np.ndarray) else a

        arrays = {n: less(case.arrays[n]) for n in names}
        dout = less(case.cotangent)
        every = dataclasses.replace(case.but(arrays), cotangent=dout)
        yield f"are the inputs rounded to {kind}?", floats_of(every)
        for name in names:
            yield f"is {name} rounded to {kind}?", floats_of(case.but({name: arrays[name]}))
        for name, value in case.options.items():
            if kind == "float32" and isinstance(value, float):
                yield f"is {name} rounded to float32?", _with_option(case, name, value)
        if case.cotangent is not None:
            only = dataclasses.replace(case, cotangent=dout)
            yield f"is dout rounded to {kind}?", floats_of(only)


def _with_option(case: Case, name: str, value: float) -> Case:
    return dataclasses.replace(case, options={**case.options, name: float(np.float32(value))})


def floats_of(case: Case) -> Case:
    """Return the case in float64, so that what was rounded counts as it is."""
    arrays, dout = case.in_float64()
    return dataclasses.replace(case, arrays=arrays, cotangent=dout)
