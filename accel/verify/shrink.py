"""Shrink a failing case to the smallest that still fails, and still shows something.

A case is made of choices, the simplest option of each first. Shrinking makes them simpler, one
after the other, as long as the same result fails in the same way; then it takes away from the case
what is not needed.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import round_to
from accel.verify.calling import Judged
from accel.verify.contract import Case
from accel.verify.cuts import cut_while
from accel.verify.draw import Pick
from accel.verify.subject import Subject
from accel.verify.travel import special_at, tamed

SEEDS = 4  # other numbers that a simpler case is tried with
# of the kernel, and of the clock, for one failing result; the smallest case found is kept
RUNS = 200
SECONDS = 30.0


class Found(NamedTuple):
    """A case that fails, in what, and the choices that made it."""

    case: Case
    judged: Judged
    choices: list[int]

    @property
    def order(self) -> tuple[bool, tuple[int, int]]:
        """The better to show, the less: cases in which there is something to see, small ones."""
        return not is_rich(self.judged), self.case.size


def smallest(
    subject: Subject, draw: Callable[[Pick], Case], key: tuple[str, str], found: Found
) -> Found:
    """Shrink a failing case, looking only at the one result that failed in it."""
    asked: set[tuple[int, ...]] = set()
    tried: set[tuple[int, ...]] = set()
    rich, begun = is_rich(found.judged), time.monotonic()

    def simpler_one(found: Found) -> Found | None:
        for wanted in _simplified(found.choices):
            if len(tried) >= RUNS or time.monotonic() - begun > SECONDS:
                return None
            if tuple(wanted) in asked:
                continue
            asked.add(tuple(wanted))
            choices: list[int] = []
            case = draw(_answers(wanted, choices))
            if tuple(choices) in tried or case.size[0] > found.case.size[0]:
                continue
            tried.add(tuple(choices))
            for result in subject.run(case):
                shows = is_rich(result) or not rich
                if not result.ok and (result.name, result.kind) == key and shows:
                    candidate = Found(case, result, choices)
                    if (candidate.case.size, choices) < (found.case.size, found.choices):
                        return candidate
        return None

    better: Found | None = found
    while better is not None:
        found = better
        better = simpler_one(found)
    return _without_the_needless(subject, found, key)


def _answers(wanted: Sequence[int], choices: list[int]) -> Pick:
    """Return what answers with given choices, then with the first options; notes the answers."""

    def pick(options: Sequence[Any], name: str = "") -> Any:
        at = len(choices)
        choices.append(min(wanted[at], len(options) - 1) if at < len(wanted) else 0)
        return options[choices[-1]]

    return pick


def _simplified(choices: list[int]) -> Iterator[list[int]]:
    """Yield simpler choices: all but the first few left out, then one at a time, then with others
    of the numbers that the first choice, a seed, stands for.
    """
    for kept in range(min(len(choices), 8)):
        yield choices[:kept]
    for at, choice in enumerate(choices):
        if choice:
            for less in dict.fromkeys((0, 1, choice // 2, choice - 1)):
                if less < choice:
                    yield [*choices[:at], less, *choices[at + 1 :]]
            for gone in (1, 2):  # what is asked only because of this choice
                yield [*choices[:at], 0, *choices[at + 1 + gone :]]
    for seed in range(SEEDS):
        for at, choice in enumerate(choices[1:], 1):
            for less in dict.fromkeys((0, choice // 2)):
                if less < choice:
                    yield [seed, *choices[1:at], less, *choices[at + 1 :]]


def is_rich(judged: Judged) -> bool:
    """Say whether a case shows something: what it should give is not zero, nor all one number."""
    if judged.exact is None:
        return True
    numbers = np.unique(np.asarray(judged.exact))
    return bool(numbers.any()) and (len(numbers) > 1 or np.ndim(judged.exact) == 0)


def _is_finite(judged: Judged) -> bool:
    return judged.exact is None or bool(np.isfinite(judged.exact).all())


def _without_the_needless(subject: Subject, found: Found, key: tuple[str, str]) -> Found:
    """Take away, one at a time, whatever a failing case does not need in order to fail."""
    rich, finite = is_rich(found.judged), _is_finite(found.judged)

    def fails(candidate: Case) -> bool:
        nonlocal found
        try:
            if not subject.takes(candidate):
                return False
            results = subject.run(candidate)
        except (ValueError, IndexError):
            return False  # the reference refuses it
        still = [j for j in results if not j.ok and (j.name, j.kind) == key]
        still = [j for j in still if (is_rich(j) or not rich) and (_is_finite(j) or not finite)]
        if still:
            found = found._replace(case=candidate, judged=still[0])
        return bool(still)

    for changed in simpler(found.case):
        fails(changed(found.case))
    cut_while(found.case, fails, subject.cuts)
    for changed in simpler(found.case):
        fails(changed(found.case))
    return found


def _with_quarters(case: Case) -> Case:
    """Round every number to a quarter, which is short to read."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(rounded(part) for part in value)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        if not np.isfinite(value).all():
            return value
        quarters = np.round(4 * np.clip(value, -4, 4)) / 4 + 0.0
        # what was not zero stays so
        quarters = np.where((quarters == 0) & (value != 0), np.copysign(0.25, value), quarters)
        return round_to(np.asarray(quarters, value.dtype), case.dtype)

    arrays = {name: rounded(a) for name, a in case.arrays.items()}
    return dataclasses.replace(case, arrays=arrays, cotangent=rounded(case.cotangent))


def simpler(case: Case) -> list[Callable[[Case], Case]]:
    """Return what can be taken away from a case: its manner first, then optional arguments."""
    return [
        _with_quarters,
        *([_tamed] if special_at(case) is not None else []),
        partial(dataclasses.replace, interleaved=False),
        partial(dataclasses.replace, layouts={}),
        partial(dataclasses.replace, out=""),
        *(partial(_with_plain, name) for name in case.layouts),
        *(methodcaller("without", name) for name in case.optional() if name != "dropout_key"),
    ]


def _tamed(case: Case) -> Case:
    """Put a number where NaN or an infinity is."""
    place = special_at(case)
    return case if place is None else tamed(case, place, 1.0)


def _with_plain(name: str, case: Case) -> Case:
    layouts = {n: layout for n, layout in case.layouts.items() if n != name}
    return dataclasses.replace(case, layouts=layouts)
