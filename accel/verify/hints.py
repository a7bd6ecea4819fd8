"""What is probably wrong: each guess is put to the test on the failing case.

A guess is a mistake that people make, written as a change of the reference: the mask left out, the
heads mapped another way, ε outside the root. Where the kernel's result equals what the mistake
gives, and the mistake gives something else than the right answer, the guess is a hint. Mistakes of
one op stand in its room.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from accel.verify.contract import Case, reference_results
from accel.verify.ops import Mistakes, room
from accel.verify.subject import Subject, functions_of
from accel.verify.trial import Judged, run_case
from reference.types import Array

_CLOSE = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-3, "tf32": 3e-3}
_CLOSE |= dict.fromkeys(("bf16", "e4m3", "e5m2"), 2e-2)


def hints_for(
    subject: Subject, case: Case, judged: Judged, more: Iterable[tuple[str, str]] = ()
) -> list[str]:
    """Return the guesses that explain a failure, the most telling first.

    ``more`` are mistakes beside those that the op's room knows: a sentence, and an op with that
    mistake, as ``load_op`` takes it.
    """
    found: list[str] = list(_of_parts(case, judged))
    if judged.kind in ("value", "shape", "nonfinite") and judged.got is not None:
        with np.errstate(all="ignore"):  # a mistake may well divide by zero
            found += [*_of_values(case, judged), *_of_mistakes(case, judged, more)]
    if judged.kind in ("value", "second", "nonfinite", "shape", "raised"):
        found += list(_of_manner(subject, case, judged))
    if not found:
        found += list(room(case.op).remarks(case))
    return list(dict.fromkeys(found))


def _same(a: Any, b: Any, case: Case) -> bool:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return False
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) <= _CLOSE[case.dtype] * max(size, 1e-30)


def _explains(wrong: Any, got: Any, exact: Any) -> bool:
    """Say whether a mistake accounts for nearly all of what separates got from exact."""
    wrong, got, exact = (np.asarray(a, np.float64) for a in (wrong, got, exact))
    if not wrong.shape == got.shape == exact.shape:
        return False
    off = float(np.linalg.norm(got - exact))
    return off > 0 and float(np.linalg.norm(got - wrong)) <= 0.1 * off


def _of_parts(case: Case, judged: Judged) -> Iterator[str]:
    """Say what a part of a result stands for when that part alone is wrong."""
    got, exact = judged.got, judged.exact
    for text, name, part in room(case.op).only(case):
        if name != judged.name or got is None or exact is None or got.shape != exact.shape:
            continue
        if (
            part.any()
            and _same(got[~part], exact[~part], case)
            and np.any(got[part] != exact[part])
        ):
            yield text


# ---- from the numbers alone ----------------------------------------------------------------------


def _of_values(case: Case, judged: Judged) -> Iterator[str]:
    assert judged.got is not None and judged.exact is not None
    got, exact = np.asarray(judged.got, np.float64), np.asarray(judged.exact, np.float64)
    name = judged.name
    if exact.ndim >= 2:
        for i in range(exact.ndim):
            for j in range(i + 1, exact.ndim):
                swapped = exact.swapaxes(i, j)
                if not _same(swapped, exact, case) and _same(got, swapped, case):
                    yield f"transposed? {name} is right with axes {i} and {j} swapped"
                elif (
                    got.shape == exact.shape
                    and swapped.shape != exact.shape
                    and not np.array_equal(swapped.reshape(-1), exact.reshape(-1))
                    and _same(got.reshape(-1), swapped.reshape(-1), case)
                ):
                    yield f"transposed? {name} lies in memory with axes {i} and {j} swapped"
    if got.shape != exact.shape or not np.all(np.isfinite(got)):
        return
    if not got.any():
        yield f"{name} is zero everywhere: was it written at all?"
        return
    size = float(np.sum(exact * exact))
    if size > 0:
        ratio = float(np.sum(got * exact)) / size
        if _same(got, ratio * exact, case) and abs(ratio - 1) > _CLOSE[case.dtype]:
            yield _name_ratio(case, name, ratio)
    wrong = np.abs(got - exact) > 10 * _CLOSE[case.dtype] * max(float(np.abs(exact).max()), 1e-30)
    if wrong.any() and not wrong.all():
        yield from _where_wrong(case, name, wrong)


def _where_wrong(case: Case, name: str, wrong: Array) -> Iterator[str]:
    """Say in which part of the array the wrong elements lie."""
    for axis in range(wrong.ndim):
        length = wrong.shape[axis]
        others = tuple(a for a in range(wrong.ndim) if a != axis)
        hit = np.flatnonzero(wrong.any(axis=others))
        first, last = int(hit[0]), int(hit[-1])
        tile = next((t for t in (128, 64, 32, 16, 8) if length > t), None)
        if tile and first >= tile and first % tile == 0:
            yield (
                f"last tile? {name} is wrong only from index {first} on along axis {axis} "
                f"(length {length})"
            )
        elif length > 1 and first > 0 and first == last == length - 1:
            yield f"off by one? {name} is wrong only at the last index of axis {axis}"
        elif length > 1 and first == last == 0:
            yield f"off by one? {name} is wrong only at the first index of axis {axis}"


def _name_ratio(case: Case, name: str, ratio: float) -> str:
    """Say what a constant factor might be."""
    known = [(-1.0, "the sign is flipped"), *room(case.op).ratios(case)]
    x = case.arrays.get("x")
    if x is not None and x.ndim > 1:
        rows, width = math.prod(x.shape[:-1]), x.shape[-1]
        known += [
            (1 / rows, "mean for sum over the rows?"),
            (1 / x.shape[0], "mean for sum over the batch?"),
            (float(width), "sum for mean over the last axis?"),
            (1 / width, "mean for sum over the last axis?"),
        ]
    for value, text in known:
        if abs(ratio - value) <= 10 * _CLOSE[case.dtype] * abs(value) and abs(value - 1) > 1e-6:
            return f"{text} ({name} is {ratio:.4g} times what it should be)"
    return f"a constant factor? {name} is {ratio:.4g} times what it should be"


# ---- from mistakes of the reference --------------------------------------------------------------


def _of_mistakes(case: Case, judged: Judged, more: Iterable[tuple[str, str]]) -> Iterator[str]:
    given = ((says, partial(_results_of, source, case)) for says, source in more)
    for text, wrong in itertools.chain(_left_out(case), room(case.op).mistakes(case), given):
        try:
            results = reference_results(wrong, np.float64) if isinstance(wrong, Case) else wrong()
        except (ValueError, IndexError):
            continue  # the mistake does not apply to these shapes
        if judged.name in results and _explains(results[judged.name], judged.got, judged.exact):
            yield f"{text} That gives the {judged.name} which the kernel gave."


def _results_of(source: str, case: Case) -> dict[str, Array]:
    """Return the results of a case of an op whose source is given."""
    module = ModuleType("mistaken")
    exec(compile(source, "<mistaken>", "exec"), vars(module))
    ops = SimpleNamespace(**functions_of(case.op, module))
    return reference_results(case, np.float64, ops)


def _left_out(case: Case) -> Mistakes:
    """Yield the mistakes with arguments that need not be given."""
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


# ---- from the manner of the call -----------------------------------------------------------------


def _of_manner(subject: Subject, case: Case, judged: Judged) -> Iterator[str]:
    """Leave out one thing at a time: where the failure goes away, that thing is to blame."""

    def passes(changed: Case) -> bool:
        try:
            again = run_case(subject, changed)
        except ValueError:
            return False  # the reference refuses the changed case
        return all(j.ok for j in again if j.name in (judged.name, "")) and bool(again)

    if case.layouts and passes(dataclasses.replace(case, layouts={})):
        names = ", ".join(case.layouts)
        verb = "is" if len(case.layouts) == 1 else "are"
        yield f"are strides ignored? It passes when {names} {verb} contiguous."
    if case.interleaved and passes(dataclasses.replace(case, interleaved=False)):
        yield (
            "a stale cache? It passes when no other forward is called in between: state may be "
            "kept outside the cache."
        )
    if case.out and passes(dataclasses.replace(case, out="")):
        yield f"it passes without out={'' if case.out == 'out' else ' and accumulate=True'}."
    masked = {n: np.maximum(a, 0) for n, a in case.arrays.items() if _negative(a)}
    for name in case.optional():
        # who counts is told by a mask: without it what it hid is read
        hidden = masked if np.asarray(case.arrays.get(name)).dtype == np.bool_ else {}
        if passes(case.but(hidden).without(name)):
            yield f"it passes without {name}."
    for name in masked:
        if passes(case.but(masked)):
            yield f"are masked {name} read? They need not be entries of the vocabulary."


def _negative(a: Any) -> bool:
    return a is not None and a.dtype.kind == "i" and bool((a < 0).any())
