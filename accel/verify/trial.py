"""One case, run and judged: what the kernel gave beside what it should have given."""

import time
from typing import Any

import numpy as np

from accel.verify.calling import (
    Judged,
    Run,
    given_out,
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
    accumulated_onto,
    expected,
    gradient_names,
    numpy_dtype,
)
from accel.verify.luck import (
    again,
    arguments_kept,
    given_again,
    given_more,
    interleave,
    is_small,
    onto_itself,
    refill,
    repeat,
    results_kept,
)
from accel.verify.subject import KernelError, Placed, Subject
from reference.types import Array

GUARD = 5  # elements on either side of an ``out=`` that must stay as they were
CANARY = 12_345.0


@np.errstate(all="ignore")  # what comes of NaN and infinity is told by the results
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
    run = Run(subject, case)
    try:
        with subject.step():
            _perform(run, want, patience)
    except KernelError as error:
        run.problem("", "raised", str(error))
    finally:
        run.give_back()
    return run.judged


def _perform(run: Run, want: Expected, patience: float) -> None:
    subject, case, spec = run.subject, run.case, run.spec
    views = run.place(case, hold=True)
    got: dict[str, Array | None] = {}
    has_forward = subject.has(spec.forward_name)

    cache: Any = None
    inputs: Any = None
    if has_forward:
        poison(want)
        out, cache, cached = run.call_forward(views, case, want.exact)
        got = take_out(run, out, views, want.exact)
        if case.cotangent is not None and not cached:
            inputs = inputs_tuple(subject, case, views, out)
    elif case.cotangent is not None:
        inputs = inputs_tuple(subject, case, views, given_out(subject, case, want))

    judge(run, got, want)
    if any(judged.kind == "missing" for judged in run.judged):
        return  # a backward would be called with what is no cache
    if case.interleaved and has_forward:
        with run.called_before():
            interleave(run)
    if case.cotangent is not None and subject.has_backward(spec):
        _backward(run, want, cache if inputs is None else inputs)
    if has_forward and not case.interleaved:
        with run.called_before():
            repeat(run, views, want, got)
            given_again(run, views, want)
            given_more(run, views, want)
            arguments_kept(run)
            onto_itself(run, views, want)
            if is_small(case):
                refill(run, views)
    else:
        arguments_kept(run)
    if patience:
        time.sleep(patience)
    results_kept(run)


def _backward(run: Run, want: Expected, state: Any) -> None:
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
    dout = place_cotangent(run, case.cotangent)
    result = subject.call(spec.backward_name, function, dout, state, **kwargs)
    gradients = named_gradients(run, result, owed)
    got = {name: run.take(name, value) for name, value in gradients.items()}

    if case.out == "accumulate":
        (name,) = buffers
        want = want.shifted(name, accumulated_onto(case))
    judge(run, got, want)
    for name, buffer in buffers.items():
        _judge_buffer(run, name, buffer, want)
    if not case.out:
        again(run, want, state, function)


def _out_buffer(subject: Subject, case: Case, name: str) -> Placed:
    """Return a view into a flat gradient, with guards on either side, filled with canaries."""
    content = np.full(case.arrays[name[1:]].shape, CANARY)
    if case.out == "accumulate":
        content = accumulated_onto(case)
    return subject.guarded(content.astype(numpy_dtype(case.dtype)), GUARD, CANARY)


def _judge_buffer(run: Run, name: str, buffer: Placed, want: Expected) -> None:
    now = np.array(run.subject.to_numpy(buffer.base))
    around = np.zeros(now.shape, np.bool_) if buffer.around is None else buffer.around
    got = now[~around].reshape(want.exact[name].shape)
    if np.all(got == CANARY) and got.size:
        run.problem(name, "out", f"{name} was not written into the out= that was given")
    else:
        judge(run, {name: got}, want, note=" in out=")
    if np.any(now[around] != CANARY):
        run.problem(name, "written", f"elements before or behind the out= of {name} were written")
