"""One case, run and judged: what the kernel gave beside what it should have given."""

import collections
import math
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import Closeness, Magnitude, allowed
from accel.verify.contract import (
    Case,
    Expected,
    accumulated_onto,
    contract_parameters,
    expected,
    floats,
    gathered,
    gradient_names,
    named_parts,
    numpy_dtype,
    other_case,
    reference_results,
    shape_of,
)
from accel.verify.ops import room
from accel.verify.subject import KernelError, Placed, Subject, positional_of
from accel.verify.travel import special_at
from reference.types import Array, KVCache, Loss

GUARD = 5  # elements on either side of an ``out=`` that must stay as they were
CANARY = 12_345.0
REFILLED = 5_000  # elements of a case that is tried with other numbers in the same arrays as well


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

    @property
    def ok(self) -> bool:
        return not self.problem and (self.closeness is None or self.closeness.ok)


class _Run:
    """The calls of one case, in order."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case, self.spec = subject, case, case.spec
        self.activations = [o.name for o in case.spec.operands if o.kind == "activation"]
        self.judged: list[Judged] = []
        self.placed: dict[str, Placed] = {}
        # results as they were returned, and the kernel's own arrays, to see whether those change
        self.returned: dict[str, tuple[Any, Array]] = {}
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
        seed, or draw from, what the caller's program draws from.
        """
        generators = _generators()
        saved = [get() for _, get, _, _ in generators]
        for _, _, _, draw in generators:
            draw()  # so that seeding anew with the same number shows as well
        drawn = [_bits(get()) for _, get, _, _ in generators]
        try:
            yield
        finally:
            for (name, get, put, _), before, state in zip(generators, saved, drawn, strict=True):
                if _bits(get()) != state:
                    text = f"{name}'s global generator was seeded or drawn from by a call"
                    self.problem("", "seeded", f"{text}: that is for the program to do")
                put(before)

    def problem(self, name: str, kind: str, text: str) -> None:
        self.judged.append(Judged(name, kind, problem=text))


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], Any], Callable[[], Any]]]:
    """Return what belongs to the whole process: its name, how it is read, set and drawn from."""
    legacy = np.random.mtrand._rand  # what np.random.seed and np.random.rand use
    found: list[Any] = [
        ("random", random.getstate, random.setstate, random.random),
        ("np.random", legacy.get_state, legacy.set_state, legacy.random_sample),
    ]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        draw = partial(torch.rand, ())
        found.append(("torch", torch.get_rng_state, torch.set_rng_state, draw))
    return found


def _bits(state: Any) -> bytes:
    return bytes(state.numpy()) if hasattr(state, "numpy") else pickle.dumps(state)


def run_case(
    subject: Subject, case: Case, want: Expected | None = None, *, patience: float = 0.0
) -> list[Judged]:
    """Run a case and judge every result.

    Parameters
    ----------
    patience : float
        Seconds to wait before results are read once more.

    Returns
    -------
    list of Judged
        One for each result, with more for whatever else is wrong: a call that raised, an argument
        that was written into, a result that changed after it was returned.
    """
    want = want or expected(case)
    subject.watch("case", case)
    run = _Run(subject, case)
    try:
        with subject.step():
            _perform(run, want, patience)
    except KernelError as error:
        run.problem("", "raised", str(error))
    return run.judged


def _perform(run: _Run, want: Expected, patience: float) -> None:
    subject, case, spec = run.subject, run.case, run.spec
    views = run.place(case, hold=True)
    got: dict[str, Array | None] = {}
    has_forward = subject.has(spec.forward_name)

    cache: Any = None
    inputs: Any = None
    if has_forward:
        _poison(want)
        out, cache, cached = run.call_forward(views, case, want.exact)
        got = _take_out(run, out, views, want.exact)
        if case.cotangent is not None and not cached:
            inputs = inputs_tuple(subject, case, views, out)
    elif case.cotangent is not None:
        inputs = inputs_tuple(subject, case, views, _given_out(subject, case, want))

    judge(run, got, want)
    if case.interleaved and has_forward:
        with run.called_before():
            _interleave(run)
    if case.cotangent is not None and subject.has_backward(spec):
        _backward(run, want, cache if inputs is None else inputs)
    if has_forward and not case.interleaved:
        with run.called_before():
            _repeat(run, views, want, got)
            _arguments_kept(run)
            if case.size[0] <= REFILLED and special_at(case) is None:
                _refill(run, views)
    else:
        _arguments_kept(run)
    if patience:
        time.sleep(patience)
    _results_kept(run)


def _poison(want: Expected) -> None:
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
            if np.ndim(first) == 0 and isinstance(second, (int, np.integer)):
                return Loss(first, int(second)), None, False
        return result, None, False
    if "out[0]" in exact:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (tuple, list)):
            return tuple(result[0]), result[1], True
        return (tuple(result) if isinstance(result, list) else result), None, False
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1], True
    return result, None, False


def _take_out(
    run: _Run, out: Any, views: dict[str, Any], exact: dict[str, Array]
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
    if fits and kind:
        out = kind(*(getattr(out, f) for f in kind._fields))
    parts = named_parts(out) if fits else {}
    if list(parts) != names:
        found = f"{len(out)} parts" if isinstance(out, tuple) else f"a {type(out).__name__}"
        text = f"{run.spec.forward_name} should give {wanted}, gave {found}"
        run.problem(names[0] if kind else "out", "missing", text)
        return {}
    if kind is KVCache:
        for k, v in zip(out.k, out.v, strict=True):
            both = isinstance(k, np.ndarray) and isinstance(v, np.ndarray)
            if k is v or (both and np.shares_memory(k, v)):
                run.problem("out.v[0]", "shared", "k and v of the cache lie in the same memory")
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


def _given_out(subject: Subject, case: Case, want: Expected) -> Any:
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


def _place_cotangent(run: _Run, cotangent: Any) -> Any:
    if isinstance(cotangent, float):
        return cotangent
    layout = run.case.layouts.get("dout", "plain")
    if isinstance(cotangent, tuple):
        placed = [run.subject.place(part, layout, activation=True) for part in cotangent]
        run.placed |= {f"dout[{i}]": p for i, p in enumerate(placed)}
        return tuple(p.view for p in placed)
    run.placed["dout"] = run.subject.place(cotangent, layout, activation=True)
    return run.placed["dout"].view


def _backward(run: _Run, want: Expected, state: Any) -> None:
    subject, case, spec = run.subject, run.case, run.spec
    function = getattr(subject.module, spec.backward_name)
    owed = gradient_names(case)
    kwargs: dict[str, Any] = {}
    buffers: dict[str, Placed] = {}
    if case.out:
        names = [f"d{p}" for p in spec.parameters]
        buffers = {name: _out_buffer(subject, case, name) for name in names if name in owed}
        views = [buffers[name].view if name in buffers else None for name in names]
        kwargs["out"] = views[0] if len(spec.parameters) == 1 else tuple(views)
        if case.out == "accumulate":
            kwargs["accumulate"] = True
    dout = _place_cotangent(run, case.cotangent)
    result = subject.call(spec.backward_name, function, dout, state, **kwargs)
    gradients = _gradients(run, result, owed)
    got = {name: run.take(name, value) for name, value in gradients.items()}

    if case.out == "accumulate":
        (name,) = buffers
        want = _shifted(want, name, accumulated_onto(case).astype(np.float64))
    judge(run, got, want)
    for name, buffer in buffers.items():
        _judge_buffer(run, name, buffer, want)
    if not case.out:
        _again(run, want, state, function)


def _gradients(run: _Run, result: Any, owed: list[str]) -> dict[str, Any]:
    """Name the gradients that a backward returned."""
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(found) > len(owed):  # None stands for an array that was not given
        trailing = [g for g in found if g is not None]
        found = trailing if len(trailing) == len(owed) else found
    if len(found) != len(owed):
        run.problem(
            "",
            "count",
            f"{run.spec.backward_name} returned {len(found)} gradient{'s' * (len(found) != 1)}, "
            f"but {len(owed)} are owed: {', '.join(owed)}",
        )
        return {}
    return dict(zip(owed, found, strict=True))


def _out_buffer(subject: Subject, case: Case, name: str) -> Placed:
    """Return a view into a flat gradient, with guards on either side, filled with canaries."""
    shape = case.arrays[name[1:]].shape
    size = int(np.prod(shape))
    flat = np.full(size + 2 * GUARD, CANARY, "float64" if case.dtype == "float64" else "float32")
    if case.out == "accumulate":
        flat[GUARD : GUARD + size] = accumulated_onto(case).reshape(-1)
    base = subject.from_numpy(flat)
    before = subject.to_numpy(base).copy()
    return Placed(base[GUARD : GUARD + size].reshape(shape), base, before)


def _shifted(want: Expected, name: str, base: Array) -> Expected:
    """Return the expectation of a gradient that was added onto something."""
    magnitude = want.magnitudes[name]
    grown = Magnitude(magnitude.s + np.abs(base), 3, magnitude.terms)
    return want._replace(
        exact={**want.exact, name: want.exact[name] + base},
        plain={**want.plain, name: (want.plain[name] + base).astype(np.float32)},
        magnitudes={**want.magnitudes, name: grown},
        travels={n: t.shifted(base) if n == name else t for n, t in want.travels.items()},
        rules={},
    )


def _judge_buffer(run: _Run, name: str, buffer: Placed, want: Expected) -> None:
    flat = np.array(run.subject.to_numpy(buffer.base))
    inside = slice(GUARD, len(flat) - GUARD)
    got = flat[inside].reshape(want.exact[name].shape)
    if np.all(flat[inside] == CANARY) and got.size:
        run.problem(name, "out", f"{name} was not written into the out= that was given")
    else:
        judge(run, {name: got}, want, note=" in out=")
    if np.any(flat[:GUARD] != CANARY) or np.any(flat[len(flat) - GUARD :] != CANARY):
        run.problem(name, "written", f"elements before or behind the out= of {name} were written")


def judge(run: _Run, got: dict[str, Array | None], want: Expected, note: str = "") -> None:
    """Compare results with what was expected of them."""
    case = run.case
    for name, value in got.items():
        if value is None:
            continue
        exact = want.exact[name]
        if np.shape(value) != np.shape(exact):
            near = ""
            if sorted(np.shape(value)) == sorted(np.shape(exact)):
                near = "; are axes swapped?"
            run.judged.append(
                Judged(
                    name,
                    "shape",
                    got=value,
                    exact=exact,
                    problem=f"{name}{note} has shape {shape_of(value)}, should have "
                    f"{shape_of(exact)}{near}",
                )
            )
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
            bad = np.argwhere(~finite)[0]
            what = settled[tuple(bad)]
            at = f"[{', '.join(str(i) for i in bad)}]" if len(bad) else ""
            problem, kind = f"{name}{note}{at} is {what}", "nonfinite"
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


def _wrong_dtype(case: Case, name: str, value: Array) -> bool:
    kept = case.dtype in ("float32", "float64")  # the others come as float32, and may leave as such
    if not kept or case.spec.wide or name in ("total", "n_valid"):
        return False
    return value.dtype != np.dtype(case.dtype)


def _interleave(run: _Run) -> None:
    """Make another call, as a model does between a forward and its backward."""
    other = other_case(run.case)
    second = expected(other)
    views = run.place(other, hold=False)
    out, _, _ = run.call_forward(views, other, second.exact)
    held = run.returned
    run.returned = {}
    got = _take_out(run, out, views, second.exact)
    run.returned = held
    judge(run, got, second, note=" of a second call")


def _repeat(run: _Run, views: dict[str, Any], want: Expected, first: dict[str, Any]) -> None:
    """Make the same call again: what is not written, or added onto what was, gives itself away."""
    if run.case.written:
        return  # its arguments are not what they were
    _poison(want)
    out, _, _ = run.call_forward(views, run.case, want.exact)
    held, run.returned = run.returned, {}
    got = _take_out(run, out, views, want.exact)
    run.returned = held
    if all(
        a is not None and a.tobytes() == np.asarray(first.get(n)).tobytes() for n, a in got.items()
    ):
        return
    before = len(run.judged)
    judge(run, got, want, note=" of a second call, the same again,")
    if all(j.ok for j in run.judged):
        del run.judged[before:]
        run.subject.notes.add(
            f"{run.spec.forward_name}: the same call twice gives other bits; are sums made in a "
            "varying order?"
        )


def _refill(run: _Run, views: dict[str, Any]) -> None:
    """Put other numbers into the same arrays and call again, as a training loop does."""
    if any(o.kind == "object" for o in run.spec.operands):
        return  # a cache that has grown, parameters that were prepared
    other, subject = other_case(run.case), run.subject
    for name in list(run.returned):  # what is a view of an argument changes with it
        own = run.returned[name][0]
        if any(_overlap(subject, own, placed.base) for placed in run.placed.values()):
            del run.returned[name]
    for name, value in other.arrays.items():
        if value is None:
            continue
        if not subject.fill(views[name], value, activation=name in run.activations):
            subject.notes.add(
                "its arrays cannot be filled anew, so results kept by address were not looked for"
            )
            return
    want = expected(other)
    out, _, _ = run.call_forward(views, other, want.exact)
    held, run.returned = run.returned, {}
    got = _take_out(run, out, views, want.exact)
    run.returned = held
    judge(run, got, want, note=" of a call with other numbers in the same arrays")


def _overlap(subject: Subject, a: Any, b: Any) -> bool:
    """Say whether two arrays of a subject may lie in the same memory."""
    own, other = _bounds(a), _bounds(b)
    if own is None or other is None:
        return np.may_share_memory(subject.to_numpy(a), subject.to_numpy(b))
    return own[0] < other[1] and other[0] < own[1]


def _bounds(value: Any) -> tuple[int, int] | None:
    """Return the first and last address of an array in NumPy's or CUDA's memory, else None."""
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        about = getattr(value, protocol, None)
        if isinstance(about, Mapping):
            size = np.dtype(about["typestr"]).itemsize
            shape, strides = about["shape"], about.get("strides")
            if strides is None:
                strides = [size * math.prod(shape[i + 1 :]) for i in range(len(shape))]
            steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
            start = about["data"][0]
            low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
            return (start + low, start + high + size) if math.prod(shape) else (start, start)
    return None


def _again(run: _Run, want: Expected, state: Any, function: Any) -> None:
    """Call the backward once more: a cache that the first call wrote into gives itself away.

    A cache may be used up (automatic differentiation frees its graph), so raising is no fault.
    """
    case = run.case
    if isinstance(case.cotangent, float):
        second: Any = -case.cotangent
    else:
        second = floats(case.cotangent, np.float64)
        second = tuple(-p for p in second) if isinstance(second, tuple) else -second
        second = floats(second, numpy_dtype(case.dtype))
    placed = dict(run.placed)
    dout = _place_cotangent(run, second)
    run.placed = placed
    try:
        _poison(want)
        with run.called_before():
            result = run.subject.call(run.spec.backward_name, function, dout, state)
        gradients = _gradients(run, result, gradient_names(case))
        got = {name: np.array(run.subject.to_numpy(g)) for name, g in gradients.items()}
    except KernelError:
        return
    negated = want.negated(gradient_names(case))
    judge(run, dict(got), negated, note=" of a second backward from one cache")


def _arguments_kept(run: _Run) -> None:
    """See whether arguments, or what lies around them, were written into."""
    for name, placed in run.placed.items():
        now = np.asarray(run.subject.to_numpy(placed.base))
        same = (now == placed.before) | ((now != now) & (placed.before != placed.before))
        around = np.zeros(same.shape, np.bool_) if placed.around is None else placed.around
        if name not in run.case.written and not same[~around].all():
            run.problem(name, "written", f"{name}, an argument, was written into")
        elif not same[around].all():
            run.problem(name, "written", f"elements before, behind or between {name} were written")
    for name, before in run.options.items():
        if not np.array_equal(run.case.options[name], before):
            run.problem(name, "written", f"{name}, an argument, was written into")
            run.case.options[name][...] = before


def _results_kept(run: _Run) -> None:
    """See whether results changed after they were returned, by a later call or a late one."""
    for name, (given, copy) in run.returned.items():
        now = copy if name in run.case.written else run.subject.to_numpy(given)
        if not np.array_equal(now, copy, equal_nan=copy.dtype.kind == "f"):
            text = f"{name} changed after it was returned, by a later call or as it came late"
            run.problem(name, "overwritten", text)
