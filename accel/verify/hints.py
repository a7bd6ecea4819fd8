"""What is probably wrong: guesses that give what the kernel gave, and what is plain to see.

A sentence with a question mark was put to the test (``guesses.py``): on the failing case, and on
larger ones. First come the mistakes that stand in the op's room; where none of those explains a
result, each place of the reference is changed in turn (``spoiled.py``). All else that is said is an
observation (``observed.py``, ``evidence.py``), or a thing that makes the case pass when left out.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from accel.verify.calling import Judged
from accel.verify.contract import Case, other_case, plus_of, reference_results
from accel.verify.evidence import Evidence, Wrong
from accel.verify.guesses import any_place, explained, explains, known, that_explain
from accel.verify.layouts import misread
from accel.verify.observed import factor, of_parts, of_values, shows, unwritten
from accel.verify.subject import Subject
from accel.verify.trial import run_case
from reference.types import Array

SECONDS = 3.0  # for changing the reference place by place
LATER = 0.1  # seconds after which a result is read again
OTHERS = 3  # failing cases that must pass as well when something is left out
AGAIN = 3  # times that a case which fails is run once more


def hints_for(
    subject: Subject, case: Case, judged: Judged, evidence: Evidence | None = None
) -> list[str]:
    """Return what explains a failure, the most telling first.

    Parameters
    ----------
    case, judged : Case, Judged
        The smallest case that fails, and what is wrong in it.
    evidence : Evidence, optional
        Of the other cases.
    """
    evidence = evidence or Evidence()
    key = judged.name, judged.kind
    larger = [w for w in evidence.telling(key) if not _same_case(w.case, case)]
    both = [Wrong(case, judged), *(w for w in larger if w.judged.got is not None)]
    values = judged.kind in ("value", "shape", "nonfinite") and judged.got is not None
    found = list(_late(subject, case, judged))
    if not found and (found := list(unsteady(subject, case, judged))):
        # whatever is left out, it may pass by chance
        return [*found, *factor(both)] if values else found
    if values and not found:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a mistake may well divide by zero
            found += of_parts(both)
            found = found or list(unwritten(both))
            finite = _finite(evidence, judged)
            if not found:
                found += explained(both, known, finite=finite)
            if not found:
                found += factor(both)
            if not found and any(shows(w.judged) for w in both):
                found += explained(both, any_place, limit=2, seconds=SECONDS, finite=finite)
            found += of_values(both)
    if not found:
        found += _not_added(case, judged) or _kept(evidence, judged.name)
    if judged.kind in ("value", "second", "nonfinite", "shape", "raised", "refilled"):
        found += _of_manner(subject, [both[0], *larger], bool(found))
    found += evidence.conditions(key)
    return list(dict.fromkeys(found))


def _same_case(a: Case, b: Case) -> bool:
    names = [n for n, x in a.arrays.items() if x is not None]
    return all(
        b.arrays.get(n) is not None and np.array_equal(a.arrays[n], b.arrays[n]) for n in names
    ) and str(a.options) == str(b.options)


def _finite(evidence: Evidence, judged: Judged) -> list[Wrong]:
    """Return cases in which a result that is not finite here is so, right ones among them."""
    key = judged.name, "value"
    right = evidence.right
    seen = [Wrong(case, j) for case, every in right for j in every if (j.name, j.kind) == key]
    seen += evidence.telling(key)
    return [w for w in seen if not _overflows(w.judged)] if _overflows(judged) else []


def _overflows(judged: Judged) -> bool:
    return judged.got is None or not bool(np.isfinite(judged.got).all())


def _not_added(case: Case, judged: Judged) -> list[str]:
    """Say that what a result should have had added to it is not in it."""
    if "given plus" not in judged.problem or judged.exact is None:
        return []
    without = judged.exact - plus_of(case.dtype, judged.exact.shape)
    return [f"is plus not added to {judged.name}?"] if explains(without, judged) else []


def _kept(evidence: Evidence, name: str) -> Iterator[str]:
    """Say what a second call, with other arguments, seems to have kept from the first."""
    seconds = [b for kind in ("second", "refilled") for b in evidence.telling((name, kind))]
    hits: Counter[str] = Counter()
    for case, judged, _ in seconds:
        hits.update(that_explain(other_case(case), judged, partial(_as_before, case)))
    for text, count in hits.most_common(1):
        if count > 1 and count >= 0.5 * len(seconds):
            yield (
                f"a stale cache? A second call seems to use {text} of the first: that gives the "
                f"{name} which it gave, in {count} of {len(seconds)} cases."
            )


def _as_before(first: Case, case: Case, dtype: Any) -> Iterator[Any]:
    """Yield a call with some of the arguments of the one before it."""
    yield "all arguments", partial(reference_results, first, dtype)
    for name, a in case.arrays.items():
        if a is not None:
            yield (
                f"the {name}",
                partial(reference_results, case.but({name: first.arrays[name]}), dtype),
            )
    before = dataclasses.replace(case, options=first.options)
    yield "the options", partial(reference_results, before, dtype)


def _late(subject: Subject, case: Case, judged: Judged) -> Iterator[str]:
    """Read the result again after a while."""
    if judged.kind in ("value", "nonfinite"):
        later = run_case(subject, case, patience=LATER)
        if any(j.kind == "overwritten" and j.name == judged.name for j in later):
            yield (
                f"is a stream or a thread not waited for? {judged.name} changed within {LATER} s "
                "after it was returned."
            )


def unsteady(subject: Subject, case: Case, judged: Judged) -> Iterator[str]:
    """Say that a case which fails passes when it is run again as it is."""
    if any(_right(subject, case, judged.name) for _ in range(AGAIN)):
        yield (
            "this case passes when it is run again: the kernel does not give one answer (a race, "
            "memory that was never written, or state of earlier calls)."
        )


def _right(subject: Subject, case: Case, name: str) -> bool:
    """Say whether a result is right, and the call itself, in all that is looked at in a case."""
    judged = subject.run(case)
    return bool(judged) and all(j.ok for j in judged if j.name in (name, ""))


def _of_manner(subject: Subject, both: Sequence[Wrong], explained: bool) -> Iterator[str]:
    """Leave out one thing at a time: where the failure goes away, that thing is to blame."""
    (case, judged, _), *larger = both

    def passes(changed: Case) -> bool:
        try:
            return _right(subject, changed, judged.name)
        except ValueError:
            return False  # the reference refuses the changed case

    if judged.kind == "refilled" or (judged.kind == "second" and case.interleaved):
        given = {"cotangent": case.cotangent, "interleaved": False}
        other = dataclasses.replace(other_case(case), **given)
        if any(j.kind == "value" and not j.ok for j in subject.run(other) if j.name == judged.name):
            yield f"the other call is wrong as the only one, too: {other.describe()}."
        elif judged.kind == "refilled":
            yield "is a result kept by the address of its arguments? Their numbers have changed."
    if case.layouts and passes(dataclasses.replace(case, layouts={})):
        yield contiguous(case, ignored=_ignores_strides(case, judged))
    if case.interleaved and passes(dataclasses.replace(case, interleaved=False)):
        yield (
            "a stale cache? It passes when no other forward is called in between: state may be "
            "kept outside the cache."
        )
    if case.out and passes(dataclasses.replace(case, out="")):
        yield f"it passes without out={'' if case.out == 'out' else ' and accumulate=True'}."
    if explained:
        return

    def passes_without(name: str, case: Case) -> bool:
        # who counts is told by a mask: without it what it hid is read
        told = np.asarray(case.arrays.get(name)).dtype == np.bool_
        return passes(case.but(_in_range(case) if told else {}).without(name))

    others = [w.case for w in larger[:OTHERS]]
    for name in case.optional():
        # not of its own gradient; nor where it is left out and the result wrong all the same
        if f"d{name}" == judged.name or not all(name in w.case.optional() for w in larger):
            continue
        if others and all(passes_without(name, other) for other in (case, *others)):
            yield (
                f"it passes without {name}, here and in {len(others)} of {len(others)} larger "
                "cases."
            )
    for name in (masked := _in_range(case)):
        if passes(case.but(masked)):
            yield f"are masked {name} read? They need not be entries of the vocabulary."


def contiguous(case: Case, *, ignored: bool) -> str:
    """Say that a case passes when nothing in it is strided, and whether strides are ignored."""
    names, verb = ", ".join(case.layouts), "is" if len(case.layouts) == 1 else "are"
    passes = f"passes when {names} {verb} contiguous."
    return f"are strides ignored? It {passes}" if ignored else f"it {passes}"


def ways_to_misread(case: Case, given: Mapping[str, Any]) -> Iterator[dict[str, Array]]:
    """Yield what is read where strides are ignored: of each of the arrays given, and of all."""
    read = {
        name: list(misread(given[name], layout))
        for name, layout in case.layouts.items()
        if isinstance(given.get(name), np.ndarray) and np.ndim(given[name])
    }
    yield from ({name: way} for name, ways in read.items() for way in ways)
    if len(read) > 1:
        for at in range(max(map(len, read.values()))):
            yield {name: ways[min(at, len(ways) - 1)] for name, ways in read.items()}


def _ignores_strides(case: Case, judged: Judged) -> bool:
    """Say whether arrays read as if they were contiguous give what the kernel gave."""
    if judged.got is None:
        return False

    def makes(wrong: Mapping[str, Array]) -> bool:
        read = case.but({n: a for n, a in wrong.items() if n != "dout"})
        read = dataclasses.replace(read, cotangent=wrong.get("dout", case.cotangent))
        try:
            results = reference_results(read, np.float64)
        except (IndexError, ValueError):  # ids that are none
            return False
        return judged.name in results and explains(results[judged.name], judged)

    return any(
        makes(wrong) for wrong in ways_to_misread(case, {**case.arrays, "dout": case.cotangent})
    )


def _in_range(case: Case) -> dict[str, Array]:
    """Return the ids of a case that have some below zero, with zeros for these."""
    ids = {n: a for n, a in case.arrays.items() if a is not None and a.dtype.kind == "i"}
    return {n: np.maximum(a, 0) for n, a in ids.items() if (a < 0).any()}
