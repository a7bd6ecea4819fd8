"""What is probably wrong with a function of which nothing is known but a reference.

Most are plain observations of the numbers. The others are guesses: that an input was given back, or
that the reference's call with an input rounded or left out, or with another option, gives what the
kernel gave. They are said when that holds in the smallest case and in many larger ones; that a
result is off by a factor, or an option ignored, in all.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, round_bf16, round_float16, round_tf32
from accel.verify.calling import Judged
from accel.verify.draw import REPEATED
from accel.verify.evidence import Evidence, Wrong
from accel.verify.guesses import explains
from accel.verify.hints import contiguous, unsteady, ways_to_misread
from accel.verify.like.case import LikeCase
from accel.verify.like.frameworks import NumPy
from accel.verify.like.reference import Reference, Refused
from accel.verify.like.truth import Truth
from accel.verify.observed import same, slack_of
from accel.verify.subject import KernelError
from reference.types import Array

if TYPE_CHECKING:
    from accel.verify.like.subject import LikeSubject

FEW = 10  # times what is allowed, which roundings after each step may come to
MANY = 0.25  # of the larger cases, which may have another mistake beside the one that is guessed
TILES = (1024, 512, 256, 128, 64, 32, 16, 8, 4)


def hints_for(
    subject: "LikeSubject",
    reference: Reference,
    case: LikeCase,
    judged: Judged,
    evidence: Evidence | None = None,
) -> list[str]:
    """Return what explains a failure, the most telling first; the evidence is of other cases."""
    found = list(unsteady(subject, case, judged))
    if found:
        return found  # whatever is left out, it may pass by chance
    comparable = judged.got is not None and judged.exact is not None

    def again(**changed: Any) -> list[Judged]:
        try:
            return subject.run(dataclasses.replace(case, **changed))
        except (KernelError, ValueError):
            return []

    def passes(**changed: Any) -> bool:
        found = again(**changed)
        return bool(found) and all(j.ok for j in found if j.name in (judged.name, ""))

    if case.interleaved and judged.kind != "second" and passes(interleaved=False):
        found.append(
            "it passes when no other forward is called in between: is what the backward reads kept "
            "outside of its own call, where the next forward writes? (ctx.save_for_backward keeps "
            "it.)"
        )
    key = judged.name, judged.kind
    others = [] if evidence is None else evidence.telling(key)
    if comparable and judged.kind in ("value", "nonfinite", "shape"):
        with np.errstate(all="ignore"):
            found += _of_numbers(case, judged, others)
            likely = list(_guesses(subject, reference, case, judged))
            if likely and evidence is not None:
                likely = _borne_out(subject, reference, likely, others)
            found += likely
    if judged.kind == "second" and judged.name.startswith("d"):
        found.append(
            "the first backward is right and a second one of the same forward, with -dout, is not: "
            "does the backward write into what the forward saved, or keep a result?"
        )
    elif judged.kind == "refilled":
        found.append(
            "a stale result? The first call is right, and another with other numbers in the same "
            "arrays is not, as after a step of the optimizer: is something kept by the address of "
            "its arguments, or made of the weights only once?"
        )
    elif judged.kind == "second":
        found.append(
            "a stale result? The first call is right and another, of the same shapes with other "
            "values, is not: is something kept between calls?"
        )
    elif judged.kind == "alone":
        found.append(
            "it is right where all inputs require a gradient: does the backward look at "
            "ctx.needs_input_grad of another input, or leave out what two of them share?"
        )
    if judged.kind in ("value", "nonfinite", "shape", "raised") and case.layouts:
        owned = {n: layout for n, layout in case.layouts.items() if layout != REPEATED}
        if owned != case.layouts and passes(layouts=owned):
            found.append(
                "are strides ignored? It passes when the cotangent has memory of its own; here it "
                "is one number with strides of zero, as out.sum().backward() gives it."
            )
        elif passes(layouts={}):
            ignored = comparable and _ignores_strides(reference, case, judged)
            found.append(contiguous(case, ignored=ignored))
    if evidence is not None:
        found += evidence.conditions(key)
    near = judged.closeness
    stored = UNIT_ROUNDOFF[case.dtype].stored and not isinstance(reference.framework, NumPy)
    few = judged.kind == "value" and near is not None and near.ratio < FEW and stored
    wide = again(dtype="float32") if few and "float32" in subject.dtypes() else []
    if few and all(j.ok for j in wide if j.name == judged.name):
        found.append(
            "what is allowed follows from the roundings that the reference makes. Is that one "
            "fused call, and does the kernel round after each step? Compute in float32, or write "
            "the reference in such steps."
        )
    return list(dict.fromkeys(found))


def _ignores_strides(reference: Reference, case: LikeCase, judged: Judged) -> bool:
    """Say whether arrays read as if they were contiguous give what the kernel gave."""
    run = reference.evaluator(case)
    for read in ways_to_misread(case, case.arrays):
        try:
            results = run({**case.arrays, **read}, "float64")
        except Refused:
            continue
        if judged.name in results and explains(results[judged.name], judged):
            return True
    return False


def _of_numbers(case: LikeCase, judged: Judged, others: Sequence[Wrong]) -> Iterator[str]:
    got, exact = np.asarray(judged.got, np.float64), np.asarray(judged.exact, np.float64)
    name, slack = judged.name, slack_of(case)
    if exact.ndim >= 2 and got.size == exact.size:
        for i in range(exact.ndim):
            for j in range(i + 1, exact.ndim):
                swapped = exact.swapaxes(i, j)
                if same(swapped, exact, slack) or (i == j - 1 and 1 in exact.shape[i : j + 1]):
                    continue
                if same(got, swapped, slack):
                    yield f"transposed? {name} is right with axes {i} and {j} swapped"
                elif np.array_equal(swapped.reshape(-1), exact.reshape(-1)):
                    continue
                elif got.shape == exact.shape and same(got.reshape(-1), swapped.reshape(-1), slack):
                    yield f"transposed? {name} lies in memory with axes {i} and {j} swapped"
    if got.shape != exact.shape:
        return
    if not got.any() and exact.any():
        yield f"{name} is zero everywhere: was it written at all?"
        return
    if factor := _by_one_factor(case, judged, others):
        yield factor
        return
    if not np.all(np.isfinite(got)):
        yield from _where_rows_are_equal(case, judged, others)
        return
    off = np.abs(got - exact)
    wrong = off > 10 * slack * max(float(np.abs(exact).max()), 1e-30)
    # the others are right, and not off by less
    if wrong.any() and not wrong.all() and off[~wrong].max() <= 0.01 * off.max():
        yield from _where(name, got, wrong)


def _where_rows_are_equal(case: LikeCase, judged: Judged, others: Sequence[Wrong]) -> Iterator[str]:
    """Say that no number comes only where an input has rows of equal numbers."""
    for name in case.arrays:
        if all(_only_where_equal(wrong, name) for wrong in (Wrong(case, judged), *others)):
            yield (
                f"it is no number only where those of a row of {name} are equal, or so near that "
                "their differences squared are 0: has √ a slope there in the reference alone?"
            )


def _only_where_equal(wrong: Wrong, name: str) -> bool:
    a, got = wrong.case.arrays.get(name), wrong.judged.got
    if a is None or got is None or a.shape != np.shape(got) or not a.ndim or a.shape[-1] < 2:
        return False
    bad, apart = ~np.isfinite(got).all(axis=-1), a - a[..., :1]
    return bool(bad.any() and not (apart * apart)[bad].any())


def _ratio(case: Any, judged: Judged) -> float | None:
    """Return what a result is off by where that is one factor; None elsewhere."""
    got, exact = np.asarray(judged.got, np.float64), np.asarray(judged.exact, np.float64)
    if judged.got is None or got.shape != exact.shape:
        return None
    known = np.isfinite(exact) & (True if judged.unknown is None else ~judged.unknown)
    got, exact, slack = got[known], exact[known], slack_of(case)
    if not np.isfinite(got).all() or np.count_nonzero(exact) < 3:
        return None
    ratio = float(np.sum(got * exact) / np.sum(exact * exact))
    off = same(got, ratio * exact, slack) and abs(ratio - 1) > 10 * slack and got.any()
    return ratio if off else None


def _by_one_factor(case: LikeCase, judged: Judged, others: Sequence[Wrong]) -> str:
    """Say what a result is off by, where one rule says it of all cases that are large enough."""
    known = [(c, ratio) for c, j, _ in others if (ratio := _ratio(c, j)) is not None]
    own = _ratio(case, judged)
    if own is not None:
        known = [(case, own), *known]
    elif len(known) < 3 or len(known) < 0.5 * len(others):
        return ""  # the smallest case is too small to tell

    def holds(text: str) -> bool:
        return all(
            abs(ratio / dict(_factors(c)).get(text, np.inf) - 1) < 10 * slack_of(c)
            for c, ratio in known
        )

    first = known[0][1]
    by = f"{judged.name} is {first:.4g} times what it should be"
    for text, _ in _factors(known[0][0]):
        if holds(text):
            return f"{text} {by}"
    alike = all(abs(ratio / first - 1) < 10 * slack_of(c) for c, ratio in known)
    return f"a constant factor? {by}" if alike else ""


def _factors(case: Any) -> Iterator[tuple[str, float]]:
    """Yield what a result may be multiplied by, and what that means."""
    yield "the sign is flipped:", -1.0
    for letter, n in case.sizes.items():
        if isinstance(n, int) and n > 1:
            yield f"a mean over {letter} for a sum?", 1 / n
            yield f"a sum over {letter} for a mean?", float(n)
            yield f"√{letter} too much?", n**0.5
            yield f"1/√{letter} too much?", n**-0.5
    for name, value in case.options.items():
        if type(value) in (int, float) and abs(value) not in (0, 1):
            yield f"is {name} forgotten?", 1 / value
            yield f"is {name} twice there?", float(value)


def _borne_out(
    subject: "LikeSubject", reference: Reference, likely: list[str], others: Sequence[Wrong]
) -> list[str]:
    """Return the guesses that give what the kernel gave in many other cases, too."""
    larger = [w for w in others if w.judged.got is not None and w.judged.exact is not None]
    hits: Counter[str] = Counter()
    for case, judged, _ in larger:
        hits.update({_kind(guess) for guess in _guesses(subject, reference, case, judged)})
    # another option explains a part of what, say, another mask does
    options = {f"is {name} ignored" for name in reference.declared.options}
    least = {_kind(g): 1 if _kind(g) in options else MANY for g in likely}
    return [g for g in likely if hits[_kind(g)] >= least[_kind(g)] * len(larger)]


def _kind(guess: str) -> str:
    """Return what is guessed, without the value that one case has for it."""
    return guess.partition("?")[0]


def _guesses(
    subject: "LikeSubject", reference: Reference, case: Any, judged: Judged
) -> Iterator[str]:
    """Yield the guesses that give what the kernel gave in one case."""
    got, truth = np.asarray(judged.got, np.float64), subject.truths(case)[0].get(judged.name)
    for name, a in case.arrays.items():
        if (
            a.shape == got.shape
            and a.dtype.kind == "f"
            and a.any()
            and same(got, a, slack_of(case))
        ):
            yield f"{judged.name} is {name}, as it was given: is anything computed?"
    if truth is not None and got.shape == truth.exact.shape:
        yield from _of_calls(reference, case, judged, truth)


def _where(name: str, got: Array, wrong: Array) -> Iterator[str]:
    for axis in range(wrong.ndim):
        length = wrong.shape[axis]
        hit = np.flatnonzero(wrong.any(axis=tuple(a for a in range(wrong.ndim) if a != axis)))
        first, last = int(hit[0]), int(hit[-1])
        if length < 2 or (first == 0 and last == length - 1):
            continue
        what = "zero" if not got[wrong].any() else "wrong"
        tile = next((t for t in TILES if t <= first and first % t == 0), None)
        if tile and last == length - 1:
            yield (
                f"past a tile? {name} is {what} only from index {first} on along axis {axis} "
                f"(length {length})"
            )
        else:
            span = f"at index {first}" if first == last else f"from index {first} to {last}"
            yield f"{name} is {what} only {span} of axis {axis} (length {length})"


def _of_calls(reference: Reference, case: LikeCase, judged: Judged, truth: Truth) -> Iterator[str]:
    """Yield what explains the result when the reference is called in another way."""
    got = np.asarray(judged.got, np.float64)
    options, init = reference.resolved(case), reference.init(case.sizes)
    gradient = judged.name.startswith("d")
    if gradient and not any(n.startswith("dout") for n in case.arrays):
        return

    def tried(text: str, arrays: dict[str, Array], given: dict[str, Any]) -> Iterator[str]:
        try:
            result = reference.results(arrays, given, init, "float64")[0].get(judged.name)
        except Refused:
            return
        if result is None or result.shape != got.shape:
            return
        off = float(np.linalg.norm((got - truth.exact)[truth.judged]))
        left = float(np.linalg.norm((got - result)[truth.judged]))
        if 0 < off < np.inf and left <= 0.1 * off:
            yield text

    floats = [n for n, a in case.arrays.items() if a.dtype.kind == "f"]
    if not got.any():  # as many a thing makes it
        floats = []
    if case.dtype in ("float32", "float64"):
        for text, how in (
            ("TF32", round_tf32),
            ("bf16", round_bf16),
            ("float16", round_float16),
        ):
            for chosen in (floats, *([name] for name in floats if len(floats) > 1)):
                arrays = {n: how(a) if n in chosen else a for n, a in case.arrays.items()}
                says = f"rounded to {text}? {', '.join(chosen)} rounded so give it"
                yield from tried(says, arrays, options)
            if same(got, how(truth.exact), 1e-7) and not same(got, truth.exact, 1e-7):
                yield f"rounded to {text}? The right result rounded so is what came"
    for name in floats:
        if name.startswith("dout"):
            ones = {**case.arrays, name: np.ones_like(case.arrays[name])}
            yield from tried(
                f"is {name} ignored? With ones for it that is what comes", ones, options
            )
            continue
        for number, word in ((0, "zeros"), (1, "ones")):
            arrays = {**case.arrays, name: np.full_like(case.arrays[name], number)}
            yield from tried(
                f"is {name} ignored? With {word} for it that is what comes", arrays, options
            )
    for name, a in case.arrays.items():
        if a.dtype.kind == "b":
            for other, word in ((~a, "turned around"), (np.ones_like(a), "left out")):
                arrays = {**case.arrays, name: other}
                yield from tried(f"is {name} {word}? That gives what came", arrays, options)
    for name, all in reference.declared.options.items():
        for value in all:
            if value != case.options[name] and not isinstance(value, tuple):
                changed = {**options, name: value}
                yield from tried(
                    f"is {name} ignored? {name} = {value!r} gives it", case.arrays, changed
                )
        if isinstance(options[name], float) and options[name]:
            changed = {**options, name: 0.0}
            yield from tried(f"is {name} left out?", case.arrays, changed)
