"""Functions held to a reference of one's own: drawn, called, judged, cut and explained."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from accel.tolerance import Magnitude
from accel.verify.calling import Judged
from accel.verify.contract import Case, shape_of
from accel.verify.draw import LAYOUTS, Draw, Pick
from accel.verify.evidence import Evidence
from accel.verify.like.bound import ROUNDINGS, Truth, close, expect, moved, rounded
from accel.verify.like.case import LikeCase
from accel.verify.like.frameworks import Framework, Jax, NoGradient, NumPy, Torch, named_parts
from accel.verify.like.hints import hints_for
from accel.verify.like.reference import STATE, Reference, Refused, cotangents_of
from accel.verify.like.slopes import Slopes
from accel.verify.subject import KernelError, Placed, Subject, SubjectError
from reference.contract import Op
from reference.types import Array

LIKE_DTYPES = ("float32", "float64", "bf16", "float16")
TRIES = 20  # to draw sizes that the reference takes


@dataclasses.dataclass
class Pair:
    """A function and what it should be like."""

    reference: Reference
    function: Any  # a function, or what makes a module
    framework: Framework
    backward: Any = None  # (dout, *inputs) -> gradients
    untaken: str = ""  # why no gradients are checked


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
        self.left: list[str] = []  # what stands in the file and is not tried, a sentence each
        self.pairs = {pair.reference.name: pair for pair in pairs}
        self._dtype, self._framework = "float32", next(iter(self.pairs.values())).framework
        self.native = self.native and isinstance(self._framework, NumPy)
        self._known: list[tuple[Case, tuple[dict[str, Truth], dict[str, str]]]] = []

    # ---- what is offered ---------------------------------------------------------------------

    def specs(self) -> list[Op]:
        return [pair.reference.spec for pair in self.pairs.values()]

    def applies(self, spec: Op, dtype: str) -> bool:
        if dtype not in LIKE_DTYPES:
            raise SubjectError(f"--like knows {', '.join(LIKE_DTYPES)}, but not {dtype}")
        return True

    def hard(self, spec: Op) -> tuple[Mapping[str, Any], ...]:
        return ()

    def has_backward(self, spec: Op) -> bool:
        pair = self.pairs[spec.name]
        return pair.backward is not None or not isinstance(pair.framework, NumPy)

    def untried(self, specs: Iterable[Op], *, among: Iterable[str] | None = None) -> list[str]:
        return self.left

    def missing_features(self, spec: Op) -> list[str]:
        return []

    def declared_dtypes(self) -> tuple[str, ...] | None:
        declared = getattr(self.module, "DTYPES", None)
        if declared is None:
            return None
        declared = (declared,) if isinstance(declared, str) else tuple(declared)
        if not declared or not set(declared) <= set(LIKE_DTYPES):
            raise SubjectError(
                f"{self.name}: DTYPES must name some of {', '.join(LIKE_DTYPES)}, got {declared}"
            )
        return declared

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
            sizes = reference.declared.sizes(draw)
            arrays, options = reference.draw(draw, sizes)
            arrays = {n: rounded(a, dtype) if a.dtype.kind == "f" else a for n, a in arrays.items()}
            init = reference.init(sizes)
            try:
                state = reference.state(init)
                arrays |= {n: rounded(_stirred(draw, n, a), dtype) for n, a in state.items()}
                resolved = {n: reference.declared.words(o, sizes) for n, o in options.items()}
                results, _ = reference.results(arrays, resolved, init, "float64")
                break
            except Refused as error:
                if attempt == TRIES or not reference.declared.known:
                    raise SubjectError(
                        f"{reference.name}: {error} for "
                        f"{'; '.join(f'{n} {shape_of(a)}' for n, a in arrays.items())}; do the "
                        "shapes that are declared hold?"
                    ) from None
        if self._differentiates(pair):
            for name, value in results.items():
                if value.dtype.kind == "f":
                    arrays[f"d{name}"] = rounded(_cotangent(draw, value.shape), dtype)
        layouts: dict[str, str] = {}
        layout = draw.pick(LAYOUTS)
        if layout != "plain":
            names = [name for name in arrays if not name.startswith(STATE)]
            chosen = draw.pick((*names, "all"))
            layouts = {name: layout for name in (names if chosen == "all" else [chosen])}
        return LikeCase(
            spec.name,
            dtype,
            arrays,
            options,
            None,
            layouts,
            "",
            draw.pick((False, True)),
            signature=spec,
            sizes=sizes,
            seed=int(draw.rng.integers(2**31)),
        )

    def _differentiates(self, pair: Pair) -> bool:
        """Say whether there are gradients to be checked; why not is a note."""
        why = ""
        if pair.reference.untaken and not isinstance(pair.reference.framework, NumPy):
            why = f"the reference has none ({pair.reference.untaken})"
        elif pair.backward is None:
            why = pair.untaken
            if isinstance(pair.framework, NumPy):
                why = f"there is no {pair.reference.name}_backward(dout, *inputs)"
        if why:
            self.notes.add(f"{pair.reference.name}: gradients are not checked: {why}")
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
            arrays |= {name: rounded(a, case.dtype) for name, a in state.items()}
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
        return dataclasses.replace(case, arrays=arrays, sizes=sizes)

    # ---- running -----------------------------------------------------------------------------

    def truths(self, case: LikeCase) -> tuple[dict[str, Truth], dict[str, str]]:
        """Return what the results of a case should be, by name, and the outputs' precisions."""
        for known, found in self._known:
            if known is case:
                return found
        reference = self.pairs[case.op].reference
        options, init = reference.resolved(case), reference.init(case.sizes)
        rng = np.random.default_rng(case.seed)
        wanted = frozenset(f"d{name}" for name in reference.wanted(case.arrays))
        work = "float32" if case.dtype == "float64" else case.dtype
        with np.errstate(all="ignore"):
            run = reference.evaluator(options, init)
            truths = expect(run, case.arrays, case.dtype, rng, wanted)
            if cotangents_of(case.arrays) and isinstance(reference.framework, NumPy):
                truths |= _of_slopes(reference, case, truths, rng)
            types = reference.results(case.arrays, options, init, work)[1]
        if case.dtype == "float64":
            types = {n: "float64" if kind == "float32" else kind for n, kind in types.items()}
        self._known = [*self._known[-7:], (case, (truths, types))]
        return truths, types

    def run(self, case: Case) -> list[Judged]:
        assert isinstance(case, LikeCase)
        pair = self.pairs[case.op]
        truths, types = self.truths(case)
        self.watch("case", case)
        return _Run(self, pair, case, truths, types).judged

    def hints(
        self,
        case: Case,
        judged: Judged,
        evidence: Evidence | None = None,
        more: Iterable[tuple[str, str]] = (),
    ) -> list[str]:
        assert isinstance(case, LikeCase)
        return hints_for(self, self.pairs[case.op].reference, case, judged)

    def work_in(self, pair: Pair, dtype: str) -> None:
        """Let arrays be those of this pair's framework, in this precision."""
        self._dtype, self._framework = dtype, pair.framework


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
    options, init = reference.resolved(case), reference.init(case.sizes)
    state = rng.bit_generator.state

    def at(arrays: Mapping[str, Array]) -> dict[str, Slopes]:
        rng.bit_generator.state = state  # the same elements at every point
        found: dict[str, Slopes] = reference.slopes(arrays, options, init, rng)
        return found

    def signs(shape: tuple[int, ...]) -> Array:
        return np.asarray(np.random.default_rng(case.seed).choice([-1.0, 1.0], shape))

    u = {"float64": 2.0**-53, "bf16": 2.0**-8, "float16": 2.0**-11}.get(case.dtype, 2.0**-24)
    step = max(u, 2.0**-24)  # differences do not see less
    here, there = at(case.arrays), at(moved(case.arrays, 1.5 * step, signs))
    factor = 0.0
    for truth in truths.values():
        if truth.exact.dtype.kind == "f" and truth.exact.size:
            s = np.where(truth.magnitude.s > 0, truth.magnitude.s, np.inf)
            factor = max(factor, float(np.max(np.abs(truth.plain - truth.exact) / s)) / u)
    count = sum(a.size for a in case.arrays.values() if a.dtype.kind == "f")
    found = {}
    for name, slope in here.items():
        tried = ~np.isnan(slope.value)
        value = np.where(tried, slope.value, 0)
        moves = np.where(tried, np.abs(np.nan_to_num(there[name].value) - value), 0)
        size = np.abs(value) + moves / step
        terms = np.where(tried, slope.terms, 0)
        kinks = tried & (slope.low < slope.high)
        rough = np.where(tried, slope.error, 0)
        found[f"d{name}"] = Truth(
            value,
            value + np.where(kinks, 0, u * (factor * size + ROUNDINGS * terms) + rough),
            Magnitude(np.where(kinks, 0, size), ROUNDINGS, count),
            kinks,
            (value, slope.low, slope.high),
            tried,
        )
    return found


class _Run:
    """The calls of one case, in order."""

    def __init__(
        self,
        subject: LikeSubject,
        pair: Pair,
        case: LikeCase,
        truths: dict[str, Truth],
        types: dict[str, str],
    ) -> None:
        self.subject, self.pair, self.case = subject, pair, case
        self.truths, self.types = truths, types
        self.reference = pair.reference
        self.options = self.reference.resolved(case)
        self.judged: list[Judged] = []
        subject.work_in(pair, case.dtype)
        try:
            self._perform()
        except KernelError as error:
            self.judged.append(Judged("", "raised", problem=str(error)))

    def _perform(self) -> None:
        placed = self._place(self.case)
        views = {name: at.view for name, at in placed.items() if not name.startswith("dout")}
        function = self._function(views)
        outputs = [name for name in self.truths if not name.startswith("d")]
        douts = {name: placed[f"d{name}"].view for name in cotangents_of(self.case.arrays)}
        gradients: dict[str, Any] | None = None
        out: Any = None
        if douts and self.pair.backward is None:
            out, gradients = self._automatic(function, views, douts)
        if gradients is None:
            out = self._call(function, views)
        parts = self._parts(out, outputs)
        taken = {name: np.array(self.subject.to_numpy(part)) for name, part in parts.items()}
        self._judge(taken, parts)
        if self.case.interleaved:
            self._second(function)
        if douts and self.pair.backward is not None:
            gradients = self._by_hand(views, douts)
        if gradients is not None:
            self._judge({n: np.array(self.subject.to_numpy(g)) for n, g in gradients.items()})
        for name, at in placed.items():
            now = self.subject.to_numpy(at.base)
            if not np.array_equal(now, at.before, equal_nan=now.dtype.kind == "f"):
                self._problem(name, "written", f"{name}, an argument, was written into")
        for name, part in parts.items():
            now = self.subject.to_numpy(part)
            if not np.array_equal(now, taken[name], equal_nan=now.dtype.kind == "f"):
                text = f"{name} changed after it was returned, by a later call"
                self._problem(name, "overwritten", text)

    def _place(self, case: LikeCase) -> dict[str, Placed]:
        return {
            name: self.subject.place(a, case.layouts.get(name, "plain"), activation=True)
            for name, a in case.arrays.items()
        }

    def _function(self, views: Mapping[str, Any]) -> Any:
        """Return the function of the kernel's file; a module with the reference's weights."""
        if self.reference.make is None:
            return self.pair.function
        assert isinstance(self.pair.framework, Torch)
        torch = self.pair.framework.torch
        init = self.reference.init(self.case.sizes)

        def make() -> Any:
            made = self.pair.function
            if isinstance(made, torch.nn.Module):
                return made
            torch.manual_seed(0)
            return made(*init)

        module = self.subject.call(self.reference.name, make)
        state = module.state_dict()
        given = {n.removeprefix(STATE): a for n, a in views.items() if n.startswith(STATE)}
        fits = {n: a for n, a in given.items() if n in state and state[n].shape == a.shape}
        if len(fits) < len(given):
            self.subject.notes.add(
                f"{self.reference.name}: its parameters have other names or shapes than the "
                "reference's: it is made after the same seed, and their gradients are not checked"
            )
            fits = {}
        kind = self.pair.framework._types[self.case.dtype]
        module = module.to(kind)
        self._weights = sorted(fits)

        def run(*args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(0)
            if not fits:
                return module(*args, **kwargs)
            return torch.func.functional_call(module, self._leaves or fits, args, kwargs)

        self._leaves: dict[str, Any] = {}
        return run

    def _call(self, function: Any, views: Mapping[str, Any]) -> Any:
        return self.subject.call(
            self.reference.name, self.reference.call, function, views, self.options
        )

    def _automatic(
        self, function: Any, views: dict[str, Any], douts: dict[str, Any]
    ) -> tuple[Any, dict[str, Any] | None]:
        """Differentiate the kernel by its own framework."""
        framework = self.pair.framework
        assert isinstance(framework, (Torch, Jax))
        wanted = [
            name for name in self.reference.wanted(self.case.arrays) if f"d{name}" in self.truths
        ]
        if self.reference.make is not None:
            wanted = [n for n in wanted if not n.startswith(STATE) or self._named(n)]

        def of(given: Mapping[str, Any]) -> Any:
            if self.reference.make is not None:
                self._leaves = {n: given[f"{STATE}{n}"] for n in self._weights}
            return self.reference.call(function, given, self.options)

        def differentiate() -> Any:
            try:
                return framework.differentiate(of, views, wanted, douts)
            except NoGradient as error:
                return error, None

        out, found = self.subject.call(f"{self.reference.name} or its backward", differentiate)
        if found is None:
            self.pair.untaken = str(out)
            self.subject._differentiates(self.pair)  # says so
            return None, None
        return out, {f"d{name}": gradient for name, gradient in found.items()}

    def _named(self, name: str) -> bool:
        return name.removeprefix(STATE) in self._weights

    def _by_hand(self, views: dict[str, Any], douts: dict[str, Any]) -> dict[str, Any]:
        """Call the backward that stands beside the function."""
        name = f"{self.reference.name}_backward"
        args, kwargs = self.reference.arguments(views, self.options)
        dout = next(iter(douts.values())) if len(douts) == 1 else tuple(douts.values())
        found = self.subject.call(name, self.pair.backward, dout, *args, **kwargs)
        found = list(found) if isinstance(found, (tuple, list)) else [found]
        owed = [n for n in self.reference.wanted(self.case.arrays) if not n.startswith(STATE)]
        if len(found) != len(owed):
            found = [gradient for gradient in found if gradient is not None]
        if len(found) != len(owed):
            names = ", ".join(f"d{n}" for n in owed)
            self._problem("", "count", f"{name} returned {len(found)} gradients; owed are {names}")
            return {}
        return {f"d{n}": gradient for n, gradient in zip(owed, found, strict=True)}

    def _second(self, function: Any) -> None:
        """Call again with other values of the same shapes, and judge that too."""
        arrays = {
            name: np.asarray(a[tuple(slice(None, None, -1) for _ in a.shape)] * np.float32(0.5))
            if a.dtype.kind == "f" and not name.startswith(STATE)
            else a
            for name, a in self.case.arrays.items()
            if not name.startswith("dout")
        }
        arrays = {
            name: rounded(a, self.case.dtype) if a.dtype.kind == "f" else a
            for name, a in arrays.items()
        }
        other = dataclasses.replace(self.case, arrays=arrays, layouts={}, interleaved=False)
        truths, _ = self.subject.truths(other)
        views = {name: at.view for name, at in self._place(other).items()}
        parts = self._parts(self._call(function, views), list(truths))
        taken = {name: np.array(self.subject.to_numpy(part)) for name, part in parts.items()}
        self._judge(taken, truths=truths, note=" of a second call")

    def _parts(self, out: Any, owed: list[str]) -> dict[str, Any]:
        parts = named_parts(out)
        if sorted(parts) != sorted(owed):
            gives = ", ".join(parts) or f"a {type(out).__name__}"
            self._problem(
                "out", "missing", f"gives {gives}, but the reference gives {', '.join(owed)}"
            )
        return {name: parts[name] for name in owed if name in parts}

    def _problem(self, name: str, kind: str, text: str) -> None:
        self.judged.append(Judged(name, kind, problem=text))

    def _judge(
        self,
        got: Mapping[str, Array],
        parts: Mapping[str, Any] | None = None,
        *,
        truths: Mapping[str, Truth] | None = None,
        note: str = "",
    ) -> None:
        for name, value in got.items():
            truth = (truths or self.truths)[name]
            exact = truth.exact
            if value.shape != exact.shape:
                text = f"{name}{note} has shape {shape_of(value)}, should have {shape_of(exact)}"
                if sorted(value.shape) == sorted(exact.shape):
                    text += "; are axes swapped?"
                self.judged.append(Judged(name, "shape", None, value, exact, text))
                continue
            kind, problem = "second" if note else "value", ""
            found = close(value, truth, self.case.dtype, gradient=name.startswith("d"))
            broken = ~np.isfinite(value) & np.isfinite(exact) & truth.judged
            if broken.any():
                at = np.argwhere(broken)[0]
                where = f"[{', '.join(map(str, at))}]" if len(at) else ""
                kind, problem = "nonfinite", f"{name}{note}{where} is {value[tuple(at)]}"
            elif parts is not None and name in self.types and not problem:
                given, due = self.pair.framework.dtype_of(parts[name]), self.types[name]
                same = type(self.pair.framework) is type(self.reference.framework)
                if (
                    same
                    and given != due
                    and not (isinstance(self.pair.framework, NumPy) and self.case.dtype == "bf16")
                ):
                    kind, problem = "dtype", f"{name} is {given}; the reference gives {due}"
            self.judged.append(Judged(name, kind, found, value, exact, problem))
