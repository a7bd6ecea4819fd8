"""The calls of one case: how they are made, what came of them, and how that is judged."""

import collections
import functools
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import Closeness, allowed
from accel.verify.contract import (
    Case,
    Expected,
    contract_parameters,
    gathered,
    gradient_names,
    named_parts,
    numpy_dtype,
    reference_results,
    shape_of,
)
from accel.verify.ops import room
from accel.verify.subject import KernelError, Placed, Subject, positional_of
from accel.verify.travel import element
from reference.types import Array, KVCache, Loss


class Judged(NamedTuple):
    """One result of a case beside what was expected of it."""

    name: str  # "out", "dk", "n_valid", …, or "" when the call itself failed
    # "value"; "second" when only a second call is wrong, since the case has the arguments of the
    # first, "refilled" when that call had the first one's arrays with other numbers in them; or
    # what else is wrong: raised, missing, shape, dtype, nonfinite, written, seeded…
    kind: str
    closeness: Closeness | None = None
    got: Array | None = None
    exact: Array | None = None
    problem: str = ""  # one line when something other than the value is wrong
    unknown: Array | None = None  # bool: where nobody knows what is due, and exact is got

    @property
    def known(self) -> Array | None:
        """What is due, NaN where nobody knows."""
        if self.unknown is None or self.exact is None:
            return self.exact
        return np.where(self.unknown, np.nan, self.exact)

    @property
    def ok(self) -> bool:
        return not self.problem and (self.closeness is None or self.closeness.ok)


class Run:
    """The calls of one case, in order."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case, self.spec = subject, case, case.spec
        self.activations = [o.name for o in case.spec.operands if o.kind == "activation"]
        self.judged: list[Judged] = []
        self.placed: dict[str, Placed] = {}
        # results as they were returned, and the kernel's own arrays, to see whether those change
        self.returned: dict[str, tuple[Any, Array]] = {}
        self.saved: dict[str, Any] = {}  # states of the program's generators of random numbers
        self.options = {n: v.copy() for n, v in case.options.items() if isinstance(v, np.ndarray)}

    def place(self, case: Case, *, hold: bool) -> dict[str, Any]:
        views: dict[str, Any] = {}
        for name, array in case.arrays.items():
            if array is None:
                views[name] = None
                continue
            activation = name in self.activations or name.startswith("cache.")
            placed = self.subject.place(
                array, case.layouts.get(name, "plain"), activation=activation
            )
            views[name] = placed.view
            if hold:
                self.placed[name] = placed
        return views

    def call_forward(
        self, views: dict[str, Any], case: Case, exact: dict[str, Array]
    ) -> tuple[Any, Any, bool]:
        """Return (out, cache, whether there is a cache)."""
        name = self.spec.forward_name
        given = gathered(views)
        if "params" in given and self.subject.has("parameters"):
            make = self.subject.module.parameters
            given["params"] = self.subject.call("parameters", make, given["params"])
        args, kwargs = arguments(self.subject, name, given, case.options)
        result = self.subject.call(name, getattr(self.subject.module, name), *args, **kwargs)
        if not self.spec.gradients:
            return result, None, False
        return split_result(result, exact)

    def take(self, name: str, value: Any) -> Array | None:
        """Bring a result over; a problem with it is noted."""
        try:
            if isinstance(value, (tuple, list, dict)) or value is None:
                given = "None" if value is None else f"a {type(value).__name__}"
                raise KernelError(f"{name} should be an array, but is {given}")
            array = np.array(self.subject.to_numpy(value))
        except KernelError as error:
            self.judged.append(Judged(name, "missing", problem=str(error)))
            return None
        self.returned[name] = (value, array)
        return array

    @contextmanager
    def called_before(self) -> Iterator[None]:
        """Look after the generators of random numbers that a program shares.

        The first call of a function may compile and import whatever it likes; later ones may not
        seed, or draw from, what the caller's program draws from. So each stands in a state of ours
        during the call, and must then give the number that follows it.
        """
        generators = list(_generators())
        for each in generators:
            if each.name not in self.saved:
                self.saved[each.name] = each.get()
            each.put(each.guard)
        try:
            yield
        finally:
            for each in generators:
                if each.draw() != each.follows:
                    text = f"{each.name}'s global generator was seeded or drawn from by a call"
                    self.problem("", "seeded", f"{text}: that is for the program to do")

    def give_back(self) -> None:
        """Put the shared generators into the states that the program left them in."""
        for each in _generators():
            if each.name in self.saved:
                each.put(self.saved.pop(each.name))

    def problem(self, name: str, kind: str, text: str) -> None:
        self.judged.append(Judged(name, kind, problem=text))


class Generator(NamedTuple):
    """A generator of random numbers that belongs to the whole process."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    draw: Callable[[], float]
    guard: Any  # a state of ours
    follows: float  # the first number drawn from there


_SEED = 20_261_122  # that no kernel takes


def _generators() -> Iterator[Generator]:
    """Yield those of the modules that there are by now."""
    yield _of_random()
    yield _of_numpy()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        yield _of_torch(torch)


@functools.cache
def _of_random() -> Generator:
    own = random.Random(_SEED)
    state = own.getstate()
    return Generator("random", random.getstate, random.setstate, random.random, state, own.random())


@functools.cache
def _of_numpy() -> Generator:
    legacy, own = np.random.mtrand._rand, np.random.RandomState(_SEED)  # what np.random.seed seeds
    state = own.get_state()
    get, put, draw = legacy.get_state, legacy.set_state, legacy.random_sample
    return Generator("np.random", get, put, draw, state, own.random_sample())


@functools.cache
def _of_torch(torch: Any) -> Generator:
    own = torch.Generator().manual_seed(_SEED)
    state = own.get_state()
    get, put = torch.get_rng_state, torch.set_rng_state
    follows = float(torch.rand((), generator=own))
    return Generator("torch", get, put, lambda: float(torch.rand(())), state, follows)


def poison(want: Expected) -> None:
    """Leave NaN where fresh memory of the size of a result is likely to come from."""
    for size in {np.size(a) * width for a in want.exact.values() for width in (4, 8)}:
        held = [np.full(size, 0xFF, np.uint8) for _ in range(8 if size < 1024 else 2)]
        del held


def arguments(
    subject: Subject, function: str, views: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return how a function is called: required arrays by position, the rest by name if it can."""
    args: list[Any] = []
    kwargs = dict(options)
    known = subject.signature(function)
    positional = [] if known is None else positional_of(known.values())
    for at, parameter in enumerate(contract_parameters(function)):
        name = parameter.name
        required = parameter.default is parameter.empty
        if name in kwargs and required and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            args.append(kwargs.pop(name))  # no array, but it stands among them
            continue
        if name not in views:
            continue
        if required:
            args.append(views[name])
        elif views[name] is None:
            continue
        elif known is None or name in known or at >= len(positional):
            kwargs[name] = views[name]
        else:  # it has another name in this module; everything before it must be filled
            args += [None] * (at - len(args)) + [views[name]]
    return args, kwargs


def split_result(result: Any, exact: dict[str, Array]) -> tuple[Any, Any, bool]:
    """Tell (out, cache) from an out alone.

    An out of several parts is a tuple itself, as is a loss; then the first part decides.
    """
    if "total" in exact:
        if hasattr(result, "total"):
            return result, None, False
        if isinstance(result, tuple) and len(result) == 2:
            first, second = result
            if hasattr(first, "total"):
                return first, second, True
            if isinstance(first, tuple) and len(first) == 2:
                return Loss(first[0], first[1]), second, True
            if np.ndim(first) == 0 and _is_integer(second):
                return Loss(first, int(second)), None, False
        return result, None, False
    if "out[0]" in exact:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (tuple, list)):
            return tuple(result[0]), result[1], True
        return (tuple(result) if isinstance(result, list) else result), None, False
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1], True
    return result, None, False


def _is_integer(value: Any) -> bool:
    """Say whether a value is one integer: Python's, or an array's without axes, whosever."""
    try:
        operator.index(value)
    except (TypeError, ValueError):
        return False
    return np.ndim(value) == 0


def take_out(
    run: Run, out: Any, views: dict[str, Any], exact: dict[str, Array]
) -> dict[str, Array | None]:
    if run.case.written:
        got = {"out": run.take("out", out)} if "out" in exact else {}
        return got | {name: run.take(name, views[name]) for name in run.case.written}
    if "out" in exact:
        return {"out": run.take("out", out)}
    names = [n for n in exact if n not in gradient_names(run.case)]
    kind = Loss if "total" in exact else KVCache if "out.k[0]" in exact else None
    if kind is None:
        fits, wanted = isinstance(out, tuple), f"{len(names)} parts"
    else:
        fits, wanted = all(hasattr(out, f) for f in kind._fields), " and ".join(kind._fields)
        if kind is Loss:
            wanted = f"(({', '.join(kind._fields)}), cache), or ({', '.join(kind._fields)}) alone"
    if fits and kind:
        out = kind(*(getattr(out, f) for f in kind._fields))
    parts = named_parts(out) if fits else {}
    if list(parts) != names:
        found = f"{len(out)} parts" if isinstance(out, tuple) else f"a {type(out).__name__}"
        text = f"{run.spec.forward_name} should give {wanted}, gave {found}"
        run.problem(names[0] if kind else "out", "missing", text)
        return {}
    for (first, a), (second, b) in itertools.combinations(parts.items(), 2):
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        if kind is KVCache and (a is b or (both and np.shares_memory(a, b))):
            run.problem(second, "shared", f"{first} and {second} lie in the same memory")
            break
    return {name: run.take(name, part) for name, part in parts.items()}


def inputs_tuple(subject: Subject, case: Case, views: dict[str, Any], out: Any) -> Any:
    """Return what a backward without a cache reads: the forward's arguments, out, and lse."""
    parameters = contract_parameters(case.spec.forward_name)
    fields = {
        p.name: views[p.name]
        if p.name in views
        else case.options.get(p.name, None if p.default is p.empty else p.default)
        for p in parameters
    }
    fields["out"] = out
    saved = room(case.op).saved(case)
    fields |= {name: subject.from_numpy(array) for name, array in saved.items()}
    kind = collections.namedtuple(f"{case.op}_inputs", list(fields))  # type: ignore[misc]
    return kind(**fields)


def given_out(subject: Subject, case: Case, want: Expected) -> Any:
    """Return the forward's output for a module that has only the backward."""
    if "total" in want.plain:
        return Loss(float(want.plain["total"]), int(want.plain["n_valid"]))
    dtype = numpy_dtype(case.dtype)
    # what NaN was put in makes of it is part of what the backward is given
    plain = reference_results(case, dtype) if want.travels else want.plain
    parts = [
        subject.from_numpy(np.asarray(value, dtype), activation=True)
        for name, value in plain.items()
        if name.startswith("out")
    ]
    return parts[0] if "out" in want.plain else tuple(parts)


def place_cotangent(run: Run, cotangent: Any) -> Any:
    if isinstance(cotangent, float):
        return cotangent
    layout = run.case.layouts.get("dout", "plain")
    if isinstance(cotangent, tuple):
        placed = [run.subject.place(part, layout, activation=True) for part in cotangent]
        run.placed |= {f"dout[{i}]": p for i, p in enumerate(placed)}
        return tuple(p.view for p in placed)
    run.placed["dout"] = run.subject.place(cotangent, layout, activation=True)
    return run.placed["dout"].view


def named_gradients(run: Run, result: Any, owed: list[str]) -> dict[str, Any]:
    """Name the gradients that a backward returned."""
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(found) > len(owed):  # None stands for an array that was not given, or for an option
        arguments = [p.name for p in contract_parameters(run.spec.forward_name)]
        for order in (run.spec.gradients, arguments):
            given = {f"d{n}": g for n, g in zip(order, found, strict=False) if g is not None}
            beyond = [g for g in found[len(order) :] if g is not None]
            if list(given) == owed and not beyond:
                found = list(given.values())
                break
    if len(found) != len(owed):
        run.problem(
            "",
            "count",
            f"{run.spec.backward_name} returned {len(found)} gradient{'s' * (len(found) != 1)}, "
            f"but {len(owed)} are owed: {', '.join(owed)}",
        )
        return {}
    for name, gradient in zip(owed, found, strict=True):
        if gradient is None:
            run.problem(name, "missing", f"{name} is None, though {name[1:]} was given")
    return {name: g for name, g in zip(owed, found, strict=True) if g is not None}


def judge(run: Run, got: dict[str, Array | None], want: Expected, note: str = "") -> None:
    """Compare results with what was expected of them."""
    case = run.case
    for name, value in got.items():
        if value is None:
            continue
        exact = want.exact[name]
        if np.shape(value) != np.shape(exact):
            run.judged.append(misshapen(name, note, value, exact))
            continue
        problem, kind = "", "value"
        if note.startswith(" of a"):
            kind = "second" if note.startswith(" of a second") else "refilled"
        plain, settled, shown = want.plain[name], np.asarray(value), exact
        travels, lost = want.travels.get(name), ""
        if travels is not None:
            lost, settled, shown = (
                travels.lost(name + note, value),
                travels.settled(value),
                travels.shown(),
            )
            plain, exact = plain + (travels.value - exact), travels.value
        finite = np.isfinite(settled)
        if lost:
            problem, kind = lost, "nan"
        elif not finite.all():
            problem, kind = first_of(name, note, settled, ~finite), "nonfinite"
            if travels is not None:
                kind = "nan"
                problem += f", but does not depend on {travels.place.text}"
        elif run.subject.native and note != " in out=" and _wrong_dtype(case, name, value):
            problem = (
                f"{name} is {value.dtype}, but the inputs are {case.dtype}: dtype in is dtype out"
            )
            kind = "dtype"
        unit = "float64" if case.spec.wide else case.dtype
        gradient = name in gradient_names(case)
        if want.rules.get(name) is None:
            rule = allowed(exact, plain, want.magnitudes[name], unit, gradient=gradient)
            want.rules[name] = rule
        closeness = want.rules[name].closeness(settled)
        if kind in ("second", "refilled") and not closeness.ok:
            problem = f"{name}{note} is off by {closeness.error:.2e} relative"
        run.judged.append(Judged(name, kind, closeness, value, shown, problem))


def misshapen(name: str, note: str, value: Array, exact: Array) -> Judged:
    """Return what is said of a result of another shape."""
    text = f"{name}{note} has shape {shape_of(value)}, should have {shape_of(exact)}"
    if sorted(np.shape(value)) == sorted(np.shape(exact)):
        text += "; are axes swapped?"
    return Judged(name, "shape", None, value, exact, text)


def first_of(name: str, note: str, values: Array, bad: Array) -> str:
    """Say what the first bad element is."""
    at = np.argwhere(bad)[0]
    return f"{element(name, at)}{note} is {values[tuple(at)]}"


def _wrong_dtype(case: Case, name: str, value: Array) -> bool:
    kept = case.dtype in ("float32", "float64")  # the others come as float32, and may leave as such
    if not kept or case.spec.wide or name in ("total", "n_valid"):
        return False
    return value.dtype != np.dtype(case.dtype)
