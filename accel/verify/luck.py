"""Calls beside the first: they show kernels that remember, cheat, or are right by luck."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from accel.verify.calling import (
    Run,
    inputs_tuple,
    judge,
    named_gradients,
    place_cotangent,
    poison,
    take_out,
)
from accel.verify.contract import (
    Case,
    Expected,
    expected,
    floats,
    gradient_names,
    numpy_dtype,
    other_case,
    plus_of,
)
from accel.verify.draw import REPEATED
from accel.verify.subject import KernelError, Subject
from accel.verify.travel import special_at
from reference.types import Array

LAYERS = 8  # calls between a forward and its backward, of small cases
SMALL = 5_000  # elements of a case that is called some times more


def interleave(run: Run) -> None:
    """Make other calls, as a model of some layers does between a forward and its backward."""
    other = other_case(run.case)
    second = expected(other)
    views = run.place(other, hold=False)
    out, _, _ = run.call_forward(views, other, second.exact)
    judge(run, _taken(run, out, views, second.exact), second, note=" of a second call")
    for _ in range(LAYERS - 1 if is_small(run.case) else 0):
        run.call_forward(views, other, second.exact)


def is_small(case: Case) -> bool:
    """Say whether a case is called some times more."""
    return case.size[0] <= SMALL and special_at(case) is None


def _taken(
    run: Run, out: Any, views: dict[str, Any], exact: dict[str, Array]
) -> dict[str, Array | None]:
    """Bring over results of a call beside the first, which later calls may change."""
    held, run.returned = run.returned, {}
    got = take_out(run, out, views, exact)
    run.returned = held
    return got


def _gradients(run: Run, result: Any) -> dict[str, Array | None]:
    """Bring over what a backward returned beside the first."""
    gradients = named_gradients(run, result, gradient_names(run.case))
    return {name: np.array(run.subject.to_numpy(g)) for name, g in gradients.items()}


def repeat(run: Run, views: dict[str, Any], want: Expected, first: dict[str, Any]) -> None:
    """Make the same call again: what is not written, or added onto what was, gives itself away.

    A forward that writes where ``out=`` says is given a place this time.
    """
    if run.case.written:
        return  # its arguments are not what they were
    case, note, place = run.case, " of a second call, the same again,", None
    if _takes(run, "out"):
        nothing = np.full(want.exact["out"].shape, np.nan, numpy_dtype(case.dtype))
        place = run.subject.from_numpy(nothing, activation=True)
        case, note = case.but(out=place), " of a second call, into out=,"
    poison(want)
    out, _, _ = run.call_forward(views, case, want.exact)
    got = _taken(run, out if place is None else place, views, want.exact)
    if all(
        a is not None and a.tobytes() == np.asarray(first.get(n)).tobytes() for n, a in got.items()
    ):
        return
    before = len(run.judged)
    judge(run, got, want, note=note)
    if all(j.ok for j in run.judged):
        del run.judged[before:]
        run.subject.notes.add(
            f"{run.spec.forward_name}: the same call twice gives other bits; are sums made in a "
            "varying order?"
        )


def _takes(run: Run, need: str) -> bool:
    """Say whether a forward takes what the contract lets fast ones offer."""
    return need in run.spec.needs and need in (run.subject.signature(run.spec.forward_name) or ())


def onto_itself(run: Run, views: dict[str, Any], want: Expected) -> None:
    """Have a forward that writes where ``out=`` says write over its own x."""
    if not _takes(run, "out"):
        return
    place = run.subject.from_numpy(run.case.arrays["x"].copy(), activation=True)
    out, _, _ = run.call_forward({**views, "x": place}, run.case.but(out=place), want.exact)
    judge(run, _taken(run, out, views, want.exact), want, note=" of a second call, into out=x,")


def given_again(run: Run, views: dict[str, Any], want: Expected) -> None:
    """Where they offer it, have the forward keep no x, and give it to the backward instead."""
    case, subject, spec = run.case, run.subject, run.spec
    if not _takes(run, "keep_x") or "dout" not in run.placed:
        return
    _, cache, _ = run.call_forward(views, case.but(keep_x=False), want.exact)
    other = other_case(case)
    run.call_forward(run.place(other, hold=False), other, expected(other).exact)
    function = getattr(subject.module, spec.backward_name)
    dout = run.placed["dout"].view
    result = subject.call(spec.backward_name, function, dout, cache, x=views["x"])
    judge(run, _gradients(run, result), want, note=" of a second backward, which is given x,")


def given_more(run: Run, views: dict[str, Any], want: Expected) -> None:
    """Where it offers it, have it add ``plus`` to its output, or to its first gradient."""
    case, subject, spec = run.case, run.subject, run.spec
    forward, has_dout = spec.adds == "forward", "dout" in run.placed
    taken = subject.signature(spec.forward_name if forward else spec.backward_name) or ()
    if not spec.adds or "plus" not in taken or not (forward or has_dout):
        return
    name = "out" if forward else f"d{spec.gradients[0]}"
    plus = plus_of(case.dtype, want.exact[name].shape)
    layout = case.layouts.get("dout", "plain")
    placed = subject.place(plus, "plain" if layout == REPEATED else layout, activation=True)
    run.placed["plus"], given = placed, {"plus": placed.view}
    due, note = want.shifted(name, plus), f" of a second {spec.adds}, which is given plus,"
    poison(want)
    asked = case.but(**given) if forward else case
    out, cache, cached = run.call_forward(views, asked, want.exact)
    if forward:
        judge(run, {"out": np.array(subject.to_numpy(out))}, due, note=note)
    if not has_dout:
        return
    state = cache if cached else inputs_tuple(subject, case, views, out)
    function, dout = getattr(subject.module, spec.backward_name), run.placed["dout"].view
    poison(want)
    how = {} if forward else given
    result = subject.call(spec.backward_name, function, dout, state, **how)
    judge(run, _gradients(run, result), due, note=note)


def refill(run: Run, views: dict[str, Any]) -> None:
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
    note = " of a call with other numbers in the same arrays"
    judge(run, _taken(run, out, views, want.exact), want, note=note)


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


def again(run: Run, want: Expected, state: Any, function: Any) -> None:
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
    dout = place_cotangent(run, second)
    run.placed = placed
    try:
        poison(want)
        with run.called_before():
            result = run.subject.call(run.spec.backward_name, function, dout, state)
        got = _gradients(run, result)
    except KernelError:
        return
    negated = want.negated(gradient_names(case))
    judge(run, got, negated, note=" of a second backward from one cache")


def arguments_kept(run: Run) -> None:
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


def results_kept(run: Run) -> None:
    """See whether results changed after they were returned, by a later call or a late one."""
    for name, (given, copy) in run.returned.items():
        now = copy if name in run.case.written else run.subject.to_numpy(given)
        if not np.array_equal(now, copy, equal_nan=copy.dtype.kind == "f"):
            text = f"{name} changed after it was returned, by a later call or as it came late"
            run.problem(name, "overwritten", text)
