"""Functions held to a reference of one's own: drawn, called, judged, cut and explained."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from accel.tolerance import FP8, UNIT_ROUNDOFF, Magnitude, round_to
from accel.verify.calling import Judged
from accel.verify.contract import Case, shape_of
from accel.verify.draw import LAYOUTS, REPEATED, Draw, Pick
from accel.verify.evidence import Evidence
from accel.verify.like.bound import (
    HEADROOM,
    expect,
    floor_of_zero,
    largest,
    moved,
    working,
)
from accel.verify.like.case import LikeCase
from accel.verify.like.declared import DeclarationError
from accel.verify.like.frameworks import NumPy
from accel.verify.like.hints import hints_for
from accel.verify.like.reference import STATE, Reference, Refused, cotangents_of
from accel.verify.like.run import Pair, Run
from accel.verify.like.slopes import SMALL, TRIED, Slopes
from accel.verify.like.truth import KNOWN, ROUNDINGS, Truth
from accel.verify.subject import KernelError, Subject, SubjectError
from reference.contract import Op
from reference.types import Array

TRIES = 20  # to draw sizes that the reference takes


class LikeSubject(Subject):
    """Functions of one file beside those of another.

    Parameters
    ----------
    pairs : iterable of Pair
    module : module or object
        Where the functions come from; its ``from_numpy``, ``to_numpy`` and ``DTYPES`` count.
    name, command : str
        As for ``Subject``.
    """

    def __init__(self, pairs: Iterable[Pair], module: Any, name: str, command: str) -> None:
        super().__init__(module, name, command)
        # what stands in the file and is not tried, a sentence each; that a gradient is missing is
        # known when the function was called
        self.left: list[str] = []
        self.pairs = {pair.reference.name: pair for pair in pairs}
        self._dtype, self._framework = "float32", next(iter(self.pairs.values())).framework
        self.native = self.native and isinstance(self._framework, NumPy)
        self._known: list[tuple[Case, tuple[dict[str, Truth], dict[str, str]]]] = []

    # ---- what is offered ---------------------------------------------------------------------

    def specs(self) -> list[Op]:
        return [pair.reference.spec for pair in self.pairs.values()]

    def applies(self, spec: Op, dtype: str) -> bool:
        return True

    def hard(self, spec: Op) -> tuple[Mapping[str, Any], ...]:
        return self.pairs[spec.name].reference.hard()

    def has_backward(self, spec: Op) -> bool:
        pair = self.pairs[spec.name]
        return pair.backward is not None or not isinstance(pair.framework, NumPy)

    def untried(self, specs: Iterable[Op], *, among: Iterable[str] | None = None) -> list[str]:
        return self.left

    def missing_features(self, spec: Op) -> list[str]:
        return []

    def dtypes(self) -> tuple[str, ...]:
        usual = ("float32", "float64" if isinstance(self._framework, NumPy) else "bf16")
        return self.declared_dtypes() or usual

    # ---- arrays ------------------------------------------------------------------------------

    def from_numpy(self, array: Array, *, activation: bool = False) -> Any:
        if self._from is not None:
            return super().from_numpy(array, activation=activation)
        return self._framework.give(array, self._dtype)

    def to_numpy(self, value: Any) -> Array:
        if self._to is not None and not isinstance(value, (np.ndarray, np.generic, int, float)):
            return super().to_numpy(value)
        try:
            array = np.asarray(self._framework.take(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise KernelError(
                f"a result of type {type(value).__name__} cannot become a NumPy array ({error})"
            ) from None
        if array.dtype.kind not in "fiub":
            raise KernelError(f"a result of type {type(value).__name__} is no array of numbers")
        return array

    # ---- cases -------------------------------------------------------------------------------

    def draw(self, spec: Op, dtype: str, pick: Pick) -> LikeCase:
        pair = self.pairs[spec.name]
        reference = pair.reference
        for attempt in itertools.count(1):
            draw = Draw(pick, dtype)
            try:
                sizes = reference.declared.sizes(draw)
                if attempt == TRIES:
                    sizes |= reference.declared.small
                arrays, options = reference.draw(draw, sizes)
            except DeclarationError as error:
                raise SubjectError(f"{reference.name}: {error}") from None
            arrays = {
                n: round_to(a, dtype) if a.dtype.kind == "f" else a for n, a in arrays.items()
            }
            init = reference.init(sizes)
            try:
                state = reference.state(init)
                arrays |= {n: round_to(_stirred(draw, n, a), dtype) for n, a in state.items()}
                resolved = {n: reference.declared.words(o, sizes) for n, o in options.items()}
                results, _ = reference.results(arrays, resolved, init, "float64")
                break
            except Refused as error:
                if attempt == TRIES or not reference.declared.known:
                    raise SubjectError(
                        f"{reference.name}: {error} for "
                        f"{'; '.join(f'{n} {shape_of(a)}' for n, a in arrays.items())}; "
                        f"{reference.remedy}"
                    ) from None
        if pair.backward is None and isinstance(pair.framework, NumPy):
            reference.try_gradient(arrays, resolved, init, results)
        if self.differentiates(pair):
            for name, value in results.items():
                if value.dtype.kind == "f":
                    arrays[f"d{name}"] = round_to(_cotangent(draw, value.shape), dtype)
        layouts: dict[str, str] = {}
        layout = draw.pick(LAYOUTS)
        if layout != "plain":
            names = [name for name in arrays if not name.startswith(STATE)]
            chosen = draw.pick((*names, "all"))
            layouts = {name: layout for name in (names if chosen == "all" else [chosen])}
        if draw.rarely("one dout", 12):
            for name, a in arrays.items():
                if name.startswith("dout") and a.ndim:
                    arrays[name], layouts[name] = np.full_like(a, draw.pick((1, -0.5))), REPEATED
        return LikeCase(
            spec.name,
            dtype,
            arrays,
            options,
            None,
            layouts,
            "",
            draw.rarely("interleaved", 3),
            signature=spec,
            sizes=sizes,
            seed=int(draw.rng.integers(2**31)),
            made=_in_words(init),
        )

    def takes(self, case: Case) -> bool:
        """Say whether a case holds what is declared, too: numbers in their ranges."""
        assert isinstance(case, LikeCase)
        declared = self.pairs[case.op].reference.declared
        ranged = {n: a for n, a in declared.arrays.items() if a.kind == "float"}
        return super().takes(case) and all(
            a.keeps(case.arrays[n], case.sizes).all() for n, a in ranged.items()
        )

    def differentiates(self, pair: Pair) -> bool:
        """Say whether there are gradients to be checked.

        Why not is a note; where autograd has those of the reference they are left untried.
        """
        name, why = pair.reference.name, ""
        if pair.reference.untaken:
            why = f"the reference has none ({pair.reference.untaken})"
        elif pair.backward is None:
            why = pair.untaken
            if isinstance(pair.framework, NumPy):
                why = f"there is no {pair.backward_name}(dout, *inputs)"
        left = f"{name}: no gradient was checked: {why}"
        if why and pair.reference.untaken != "":
            self.notes.add(f"{name}: gradients are not checked: {why}")
        elif why and left not in self.left:
            self.left.append(left)
        return not why

    def cuts(self, case: Case) -> Iterator[Case]:
        assert isinstance(case, LikeCase)
        reference = self.pairs[case.op].reference
        for part in (lambda n: 1, lambda n: n // 2, lambda n: n - 1):
            for letter, n in case.sizes.items():
                if not isinstance(n, int) or not 0 < part(n) < n:
                    continue
                sizes = {**case.sizes, letter: part(n)}
                if reference.declared.fits(sizes):
                    for end in (False, True):
                        smaller = self._cut(case, reference, sizes, end=end)
                        if smaller is not None:
                            yield smaller

    def _cut(
        self, case: LikeCase, reference: Reference, sizes: dict[str, Any], *, end: bool
    ) -> LikeCase | None:
        """Return a case with the first or last elements of its arrays, of these sizes."""

        def cropped(a: Array, shape: tuple[int, ...]) -> Array | None:
            if a.ndim != len(shape) or any(m > n for m, n in zip(shape, a.shape, strict=True)):
                return None
            kept = zip(a.shape, shape, strict=True)
            return a[tuple(slice(n - m, n) if end else slice(m) for n, m in kept)]

        arrays: dict[str, Any] = {}
        for name, array in reference.declared.arrays.items():
            arrays[name] = cropped(case.arrays[name], array.shape(sizes))
            if arrays[name] is not None and array.kind == "int":
                arrays[name] = array.within(arrays[name], sizes)
        if any(a is None for a in arrays.values()):
            return None
        init = reference.init(sizes)
        try:
            state = reference.state(init)
            arrays |= {name: round_to(a, case.dtype) for name, a in state.items()}
            results, _ = reference.results(arrays, reference.resolved(case), init, "float64")
        except (Refused, RuntimeError):
            return None
        for name in case.arrays:
            if name.startswith("dout"):
                if name[1:] not in results:
                    return None
                arrays[name] = cropped(case.arrays[name], results[name[1:]].shape)
        if any(a is None for a in arrays.values()):
            return None
        return dataclasses.replace(case, arrays=arrays, sizes=sizes, made=_in_words(init))

    # ---- running -----------------------------------------------------------------------------

    def truths(self, case: LikeCase) -> tuple[dict[str, Truth], dict[str, str]]:
        """Return what the results of a case should be, by name, and the outputs' precisions."""
        for known, found in self._known:
            if known is case:
                return found
        reference = self.pairs[case.op].reference
        rng = np.random.default_rng(case.seed)
        wanted = frozenset(f"d{name}" for name in reference.wanted(case.arrays))
        with np.errstate(all="ignore"):
            run = reference.evaluator(case)
            try:
                truths = expect(run, case.arrays, case.dtype, rng, wanted)
            except Refused as error:
                raise SubjectError(
                    f"{reference.name}: {error} for numbers that are not those of a case, but "
                    'near them, or smaller; declare the range that it takes, such as "B T > 0"'
                ) from None
            if cotangents_of(case.arrays) and isinstance(reference.framework, NumPy):
                truths |= _of_slopes(reference, case, truths, rng)
                if any(a.size > SMALL for n, a in case.arrays.items() if f"d{n}" in truths):
                    self.notes.add(
                        f"{reference.name}: the reference has no autograd, so gradients are judged "
                        f"by differences: all of an array of up to {SMALL} elements, of a larger "
                        f"one {TRIED + 2} elements"
                    )
            types = reference.beside(case, case.arrays, working(case.dtype))[1]
        if case.dtype in FP8:  # what comes out is in no 8 bits
            types = {}
        if case.dtype == "float64":
            types = {n: "float64" if kind == "float32" else kind for n, kind in types.items()}
        self._known = [*self._known[-7:], (case, (truths, types))]
        return truths, types

    def run(self, case: Case) -> list[Judged]:
        assert isinstance(case, LikeCase)
        pair = self.pairs[case.op]
        truths, types = self.truths(case)
        self.watch("case", case)
        return Run(self, pair, case, truths, types).judged

    def plain(self, case: Case) -> Mapping[str, Array]:
        assert isinstance(case, LikeCase)
        reference = self.pairs[case.op].reference
        with np.errstate(all="ignore"):
            return reference.beside(case, case.arrays, working(case.dtype))[0]

    mistakes = None  # nobody knows those of a function of one's own

    def hints(self, case: Case, judged: Judged, evidence: Evidence | None = None) -> list[str]:
        assert isinstance(case, LikeCase)
        return hints_for(self, self.pairs[case.op].reference, case, judged, evidence)

    def work_in(self, pair: Pair, dtype: str) -> None:
        """Let arrays be those of this pair's framework, in this precision."""
        self._dtype, self._framework = dtype, pair.framework


def _in_words(init: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, init))


def _stirred(draw: Draw, name: str, a: Array) -> Array:
    """Return weights that are no longer all ones or zeros; what is positive stays so."""
    noise = 0.25 * draw.rng.standard_normal(a.shape)
    return np.asarray(a * np.exp(noise) if "running" in name else a + noise, np.float64)


def _cotangent(draw: Draw, shape: tuple[int, ...]) -> Array:
    if not shape:
        return np.asarray(draw.pick((0.5, -1.75, 1.0)))
    return draw.values(*shape, kinds=("zero rows", "wide"))


def _of_slopes(
    reference: Reference, case: LikeCase, truths: Mapping[str, Truth], rng: np.random.Generator
) -> dict[str, Truth]:
    """Return the gradients of a NumPy reference, by differences.

    What plain code is off by in a gradient is not known. It is taken to be as many times u s as it
    is in the results, in the worst of their rows, and r roundings of the terms.
    """
    state = rng.bit_generator.state

    def at(arrays: Mapping[str, Array]) -> dict[str, Slopes]:
        rng.bit_generator.state = state  # the same elements at every point
        found: dict[str, Slopes] = reference.slopes(case, arrays, rng)
        return found

    def signs(shape: tuple[int, ...]) -> Array:
        return np.asarray(np.random.default_rng(case.seed).choice([-1.0, 1.0], shape))

    u = float(UNIT_ROUNDOFF[case.dtype])
    step = max(u, 2.0**-24)  # differences do not see less
    here, there = at(case.arrays), at(moved(case.arrays, 1.5 * step, signs))
    factor = 0.0
    for truth in truths.values():
        if truth.exact.dtype.kind == "f" and truth.exact.size:
            s = np.where(truth.magnitude.s > 0, truth.magnitude.s, np.inf)
            factor = max(factor, float(np.max(np.abs(truth.plain - truth.exact) / s)) / u)
    count = sum(a.size for a in case.arrays.values() if a.dtype.kind == "f")
    # of a result of which nothing is known, or which may overflow on the way, the gradients may too
    known = all(t.judged.any() and t.finite.all() for t in truths.values() if t.judged.size)
    dout = max(float(np.max(np.abs(a), initial=0)) for a in cotangents_of(case.arrays).values())
    found = {}
    for name, slope in here.items():
        tried = ~np.isnan(slope.value) & ~np.isnan(there[name].value) & known
        tried &= (
            np.maximum(np.abs(slope.value), slope.terms) < largest(working(case.dtype)) / HEADROOM
        )
        value = np.where(tried, slope.value, 0)
        moves = np.where(tried, np.abs(np.nan_to_num(there[name].value) - value), 0)
        size = np.abs(value) + moves / step
        floor = floor_of_zero([value, moves], case.arrays, f"d{name}", 2.0**-30)
        tried &= not KNOWN * u * floor > dout
        size += floor
        terms = np.where(tried, slope.terms, 0)
        kinks = tried & (slope.low < slope.high)
        rough = np.where(tried, slope.error, 0)
        found[f"d{name}"] = Truth(
            value,
            value + np.where(kinks, 0, u * (factor * size + ROUNDINGS * terms) + rough),
            Magnitude(np.where(kinks, 0, size), ROUNDINGS, count),
            kinks,
            (value, slope.low - rough, slope.high + rough),
            tried,
            tried,
        )
    return found
