"""The calls of one case of a function that is held to a reference of one's own."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, round_to
from accel.verify.calling import Judged, first_of, misshapen
from accel.verify.like.case import LikeCase
from accel.verify.like.frameworks import (
    Backward,
    Framework,
    NoGradient,
    NumPy,
    Torch,
    named_parts,
)
from accel.verify.like.reference import STATE, Reference, Refused, cotangents_of
from accel.verify.like.truth import Truth, close
from accel.verify.observed import same
from accel.verify.subject import KernelError, Placed
from reference.types import Array

if TYPE_CHECKING:
    from accel.verify.like.subject import LikeSubject


@dataclasses.dataclass
class Pair:
    """A function and what it should be like."""

    reference: Reference
    function: Any  # a function, or what makes a module
    framework: Framework
    backward: Any = None  # (dout, *inputs) -> gradients
    untaken: str = ""  # why no gradients are checked
    name: str = ""  # of the function in its file, where it is another than the reference's

    @property
    def backward_name(self) -> str:
        """What the function's backward is called."""
        return f"{self.name or self.reference.name}_backward"


class Run:
    """The calls of one case, in order."""

    def __init__(
        self,
        subject: "LikeSubject",
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
        out, backward = self._forward(function, views)
        parts = self._parts(out, outputs)
        taken = self._taken(parts)
        self._judge(taken, parts)
        if any(judged.kind in ("missing", "shape") for judged in self.judged):
            backward = None  # which would be called with a cotangent of another shape
        if self.case.interleaved:
            self._second(function)
        if cotangents_of(self.case.arrays) and (backward or self.pair.backward):
            gradients = self._gradients(backward, placed, views)
            taken |= self._taken(gradients)
            self._judge({name: taken[name] for name in gradients})
            parts |= gradients
            if self._written(placed):
                return  # what comes of later calls comes of that
            if gradients:
                self._turned(backward, views)
        elif self._written(placed):
            return
        for name, part in parts.items():
            now = self.subject.to_numpy(part)
            if not np.array_equal(now, taken[name], equal_nan=now.dtype.kind == "f"):
                text = f"{name} changed after it was returned, by a later call"
                self._problem(name, "overwritten", text)
        if not self.case.interleaved and not any(j.kind == "missing" for j in self.judged):
            self._repeat(function, views, taken)
            if backward is not None:
                self._alone(function, placed, views)
            self._refill(function, views)

    def _written(self, placed: Mapping[str, Placed]) -> bool:
        """Say whether arguments were written into, and note those that were."""
        found = False
        for name, at in placed.items():
            if name in self.reference.buffers:
                continue
            now = self.subject.to_numpy(at.base)
            if not np.array_equal(now, at.before, equal_nan=now.dtype.kind == "f"):
                self._problem(name, "written", f"{name}, an argument, was written into")
                found = True
        return found

    def _taken(self, parts: Mapping[str, Any]) -> dict[str, Array]:
        return {name: np.array(self.subject.to_numpy(part)) for name, part in parts.items()}

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
                return copy.deepcopy(made)  # which is not for us to change
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
        kind = self.pair.framework.type_of(self.case.dtype)
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

    def _wanted(self) -> list[str]:
        """Return the arrays that gradients are asked of."""
        owed = self.reference.wanted(self.case.arrays)
        return [
            name
            for name in owed
            if f"d{name}" in self.truths and (not name.startswith(STATE) or self._named(name))
        ]

    def _of(self, function: Any) -> Any:
        """Return the function as one of arrays by name."""

        def of(given: Mapping[str, Any]) -> Any:
            if self.reference.make is not None:
                self._leaves = {n: given[f"{STATE}{n}"] for n in self._weights}
            return self.reference.call(function, given, self.options)

        return of

    def _forward(self, function: Any, views: dict[str, Any]) -> tuple[Any, Backward | None]:
        """Call the function, so that its own framework differentiates it where that is wanted."""
        results, wanted = list(cotangents_of(self.case.arrays)), self._wanted()
        of = self._of(function)
        if results and wanted and self.pair.backward is None and not self.pair.untaken:
            found: tuple[Any, Backward] | None = self._unless_none(
                self.reference.name, self.pair.framework.forward, of, views, wanted, results
            )
            if found is not None:
                return found
        return self._call(function, views), None

    def _unless_none(self, what: str, function: Any, *args: Any) -> Any:
        """Make a call that may find that there is no gradient: then None."""

        def attempt() -> Any:
            try:
                return function(*args)
            except NoGradient as error:
                return error

        found = self.subject.call(what, attempt)
        if not isinstance(found, NoGradient):
            return found
        self.pair.untaken = str(found)
        self.subject.differentiates(self.pair)  # says so
        return None

    def _gradients(
        self, backward: Backward | None, placed: Mapping[str, Placed], views: dict[str, Any]
    ) -> dict[str, Any]:
        douts = {name: placed[f"d{name}"].view for name in cotangents_of(self.case.arrays)}
        if backward is None:
            return self._by_hand(views, douts)
        found = self._unless_none(f"the backward of {self.reference.name}", backward, douts)
        return {f"d{name}": gradient for name, gradient in (found or {}).items()}

    def _turned(self, backward: Backward | None, views: dict[str, Any]) -> None:
        """Call the backward again with -dout, which has to give the same gradients, turned."""
        arrays = {n: -a if n.startswith("dout") else a for n, a in self.case.arrays.items()}
        placed = self._place(dataclasses.replace(self.case, arrays=arrays))
        found = self._taken(self._gradients(backward, placed, views))
        note = " of a second backward of the same forward, with -dout,"
        self._judge({name: -gradient for name, gradient in found.items()}, note=note)

    def _alone(self, function: Any, placed: Mapping[str, Placed], views: dict[str, Any]) -> None:
        """Ask for the gradient of one array alone, where the framework can tell a function so.

        Two of the arrays have their turn.
        """
        wanted = self._wanted()
        if not isinstance(self.pair.framework, Torch) or len(wanted) < 2:
            return
        forward, of = self.pair.framework.forward, self._of(function)
        douts = {name: placed[f"d{name}"].view for name in cotangents_of(self.case.arrays)}

        def gradients(name: str) -> dict[str, Any]:
            try:
                return forward(of, views, [name], douts)[1](douts)
            except NoGradient:
                return {}  # it is zero then, which has been judged

        for at in range(2):
            name = wanted[(self.case.seed + at) % len(wanted)]
            note = f", where {name} alone requires a gradient,"
            try:
                found = self.subject.call(self.reference.name, gradients, name)
            except KernelError as error:
                raise KernelError(f"{error}{note.rstrip(',')}") from None
            got = self._taken({f"d{n}": gradient for n, gradient in found.items()})
            self._judge(got, note=note, beside="alone")

    def _named(self, name: str) -> bool:
        return name.removeprefix(STATE) in self._weights

    def _by_hand(self, views: dict[str, Any], douts: dict[str, Any]) -> dict[str, Any]:
        """Call the backward that stands beside the function."""
        name = self.pair.backward_name
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

    def _other(self, *, weights: bool) -> LikeCase:
        """Return a case with other values of the same shapes; those of weights are turned."""
        ranged = {name for name, a in self.reference.declared.arrays.items() if a.bounds}

        def other(name: str, a: Array) -> Array:
            if a.dtype.kind != "f" or (name.startswith(STATE) and not weights):
                return a
            keep = name in ranged or name.startswith(STATE)
            return round_to(np.flip(a) * a.dtype.type(1 if keep else 0.5), self.case.dtype)

        given = {n: a for n, a in self.case.arrays.items() if not n.startswith("dout")}
        arrays = {name: other(name, a) for name, a in given.items()}
        return dataclasses.replace(self.case, arrays=arrays, layouts={}, interleaved=False)

    def _second(self, function: Any) -> None:
        """Call again with other values of the same shapes, and judge that too."""
        other = self._other(weights=False)
        truths, _ = self.subject.truths(other)
        views = {name: at.view for name, at in self._place(other).items()}
        parts = self._parts(self._forward(function, views)[0], list(truths))
        self._judge(self._taken(parts), truths=truths, note=" of a second call")

    def _repeat(self, function: Any, views: dict[str, Any], first: Mapping[str, Array]) -> None:
        """Make the same call again."""
        outputs = [name for name in self.truths if not name.startswith("d")]
        again = self._taken(self._parts(self._forward(function, views)[0], outputs))
        if all(a.tobytes() == first[name].tobytes() for name, a in again.items()):
            return
        self._judge(again, note=" of a second call, the same again,")
        self.subject.notes.add(
            f"{self.reference.name}: the same call twice gives other bits; are sums made in a "
            "varying order, or is something drawn at random?"
        )

    def _refill(self, function: Any, views: dict[str, Any]) -> None:
        """Put other numbers into the same arrays and call again, as a training loop does."""
        other = self._other(weights=True)
        try:
            due, _ = self.reference.results(
                other.arrays, self.options, self.reference.init(other.sizes), "float64"
            )
        except Refused:
            return
        for name, a in other.arrays.items():
            if not self.subject.fill(views[name], a, activation=True):
                return  # arrays that never change, as JAX's
        got = self._taken(self._parts(self._forward(function, views)[0], list(due)))
        if all(_near(got[name], due[name], self.case.dtype) for name in got):
            return  # what is kept is not nearly right
        truths, _ = self.subject.truths(other)
        note = " of a call with other numbers in the same arrays"
        self._judge(got, truths=truths, note=note, beside="refilled")

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
        beside: str = "second",
    ) -> None:
        wrong = {j.name for j in self.judged if not j.ok and not _only_dtype(j)}
        for name, value in got.items():
            if note and name in wrong:
                continue  # a second call says nothing where the first is wrong
            truth = (truths or self.truths)[name]
            exact = truth.exact
            if value.shape != exact.shape:
                self.judged.append(misshapen(name, note, value, exact))
                continue
            kind, problem = beside if note else "value", ""
            found = close(value, truth, self.case.dtype, gradient=name.startswith("d"))
            broken = ~np.isfinite(value) & truth.finite
            if broken.any():
                kind, problem = "nonfinite", first_of(name, note, value, broken)
            elif note and not found.ok:
                problem = f"{name}{note} is off by {found.error:.2e} relative"
            elif parts is not None and name in self.types and found.ok:
                given, due = self.pair.framework.dtype_of(parts[name]), self.types[name]
                if given == self.case.dtype and due == "float64":
                    due = given  # NumPy widens, as float32 by integers; who does not is right, too
                same = type(self.pair.framework) is type(self.reference.framework)
                if (
                    same
                    and given != due
                    and not (isinstance(self.pair.framework, NumPy) and self.case.dtype == "bf16")
                ):
                    kind, problem = "dtype", f"{name} is {given}; the reference gives {due}"
            known = truth.judged | broken
            shown = np.where(known, exact, value)  # what nobody knows is no difference
            unknown = None if known.all() else ~known
            self.judged.append(Judged(name, kind, found, value, shown, problem, unknown))


def _near(got: Array, due: Array, dtype: str) -> bool:
    """Say whether a result is as near as roundings leave it that add up little."""
    return bool(np.isfinite(due).all()) and same(got, due, 64 * float(UNIT_ROUNDOFF[dtype]))


def _only_dtype(judged: Judged) -> bool:
    """Say whether a result has the right value, and another precision than is due."""
    near = judged.closeness
    return judged.kind == "dtype" and near is not None and near.ok
