"""The checks themselves, for Python and pytest: one op, or everything a module offers."""

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel.verify.calling import Judged
from accel.verify.contract import DTYPES, Case
from accel.verify.files import (
    case_command,
    case_file,
    load_failure,
    remove_case,
    save_failure,
    search_command,
)
from accel.verify.like.case import OwnOp
from accel.verify.load import as_subject
from accel.verify.ops import room
from accel.verify.report import Report, failure_text
from accel.verify.search import LEANS, Failure, OpReport, follows, gather, search
from accel.verify.subject import OTHERS, KernelError, Subject, SubjectError
from reference.contract import Op
from reference.ops import OPS

EXAMPLES = 100  # cases of an op in one precision, times the WEIGHT of its room
MAX_HINTS = 4
THOROUGH = 10  # as many times more with thorough


class VerificationError(AssertionError):
    """A kernel does not do what the reference does; ``report`` has the details."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report


@dataclasses.dataclass(frozen=True)
class Options:
    """What to try, and where failures go."""

    ops: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    seed: int = 0
    examples: int | None = None  # cases of every op in one precision; by the op's WEIGHT when None
    thorough: bool = False
    shrink: bool = True
    save: Path | None = None  # the folder for .npz files of failures; None writes none
    partial: bool = False  # whether what the subject offers and nobody tries is all right
    budget: float | None = None  # seconds for all of it; fewer cases are tried when they run out
    short: bool = False  # leave out what is longer than other sizes, which only an index minds

    def __post_init__(self) -> None:
        if self.examples is not None and self.examples < 1:
            raise SubjectError(f"examples must be at least 1, got {self.examples}")
        for name in ("ops", "dtypes"):
            if getattr(self, name) == ():
                raise SubjectError(f"{name} is empty: name some, or leave it out for all there are")


def check_module(
    module: Any,
    *,
    ops: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    seed: int = 0,
    examples: int | None = None,
    thorough: bool = False,
    shrink: bool = True,
    save: str | Path | None = None,
    partial: bool = False,
    budget: float | None = None,
    raises: bool = True,
) -> Report:
    """Hold every function that a module offers to the reference.

    Parameters
    ----------
    module : module, object with functions as attributes, or path of a Python file
        It offers functions named like ``reference.ops.OPS``'s; any part of them will do. A
        file is checked in a process of its own, which may crash.
    ops : iterable of str, optional
        Only these: ``["attention", "rmsnorm"]``.
    dtypes : iterable of {"float32", "float64", "bf16", "float16", "tf32", "e4m3", "e5m2"}, optional
        The precisions to check in. When None, the module's ``DTYPES`` or else those of float32 and
        float64 that it works in (bf16 where its ``from_numpy`` rounds to bf16).
    seed : int
        The same seed gives the same cases.
    examples : int, optional
        Cases of every op in one precision.
    thorough : bool
        Ten times as many cases as by default.
    shrink : bool
        Whether to look for the smallest case that fails.
    save : path, optional
        A folder for the failing cases, one ``.npz`` each.
    partial : bool
        Whether it is all right that something which the module offers is not tried: a forward
        without a backward, an option that the contract has not, a function named nearly like one
        of the contract's.
    budget : float, optional
        Seconds: fewer cases are tried where they run out, at least one of each op and precision.
    raises : bool
        Whether a failure raises, or is only reported.

    Returns
    -------
    Report

    Raises
    ------
    VerificationError
        When a result is wrong, or something is not tried; an ``AssertionError``, whose message is
        the report.
    SubjectError
        A ``ValueError``: the file does not import, offers nothing, or an op or dtype is unknown.
    """
    options = Options(
        known_names("op", ops, OPS),
        known_names("dtype", dtypes, DTYPES),
        seed,
        examples,
        thorough,
        shrink,
        None if save is None else Path(save),
        partial,
        budget,
    )
    if isinstance(module, (str, Path)):
        from accel.verify.apart import Source, check_apart  # which needs this module

        report = check_apart(Source(module=str(module)), options)
    else:
        subject = module if isinstance(module, Subject) else as_subject(module)
        report = check_subject(subject, options)
    if raises and not report.ok:
        raise VerificationError(report)
    return report


def check_op(
    op: str,
    module: Any = None,
    *,
    forward: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    **options: Any,
) -> Report:
    """Hold one op to the reference: of a module, or given as functions.

    Parameters
    ----------
    op : str
        ``"rmsnorm"``, ``"attention"``, …
    module : module, object or path, optional
        As for ``check_module``.
    forward, backward : callable, optional
        Instead of a module. A forward gives ``(out, cache)`` or ``out`` alone, a backward takes
        ``(dout, cache)``; where no cache was given it takes ``(dout, inputs)``, a NamedTuple of the
        forward's arguments, ``out``, and for attention ``lse``.
    **options
        Those of ``check_module``.

    Raises
    ------
    VerificationError, SubjectError
        As ``check_module``.
    """
    (name,) = known_names("op", [op], OPS) or ()
    if module is None or forward is not None or backward is not None:
        module = _of_functions(OPS[name], module, forward, backward)
    return check_module(module, ops=[name], **options)


def check_case(
    path: str | Path,
    module: Any = None,
    *,
    forward: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Run a saved case again, on what ``check_op`` takes.

    Raises
    ------
    AssertionError
        When a result is wrong, or a module has nothing that gives what the case is of, with that
        as its message.
    ValueError
        When the file holds no case, or the op of the case is not offered.
    """
    case = load_failure(path)
    if module is None or forward is not None or backward is not None:
        module = _of_functions(case.spec, module, forward, backward)
    report = replay(module if isinstance(module, Subject) else as_subject(module), case)
    if not report.ok:
        said = [failure_text(failure) for failure in report.failures] or report.untried
        raise AssertionError("\n\n".join(said))


def _of_functions(spec: Op, module: Any, forward: Any, backward: Any) -> Subject:
    """Return a subject that is a forward, a backward, or both."""
    given = {"forward": forward, "backward": backward}
    named = dict(zip(given, (spec.forward_name, spec.backward_name), strict=True))
    given = {role: function for role, function in given.items() if function is not None}
    if module is not None:
        raise SubjectError("check_op takes a module, or a forward and backward, but not both")
    if not given:
        raise SubjectError(f"check_op({spec.name!r}) needs a module, a forward or a backward")
    offered = SimpleNamespace(**{named[role]: function for role, function in given.items()})
    name = getattr(forward or backward, "__module__", None) or spec.name
    words = [f"{role}={getattr(f, '__qualname__', '…')}" for role, f in given.items()]
    return as_subject(offered, name, ", ".join(words), alone=True)


def known_names(
    what: str, names: Iterable[str] | None, known: Iterable[str]
) -> tuple[str, ...] | None:
    """Return names, or the one that is given by itself.

    Raises
    ------
    SubjectError
        When one is not among those that are known.
    """
    if names is None:
        return None
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in known:
            short = re.sub(r"_(forward|backward)$", "", name)
            near = f"; did you mean {short}?" if short in known else ""
            other = OTHERS if what == "op" and not near else ""
            raise SubjectError(
                f"there is no {what} {name!r}{near or '; known: ' + ', '.join(known)}{other}"
            )
    return names


# What a run says while it goes on: (op, dtype, cases so far, cases in all).
Progress = Callable[[str, str, int, int], None]


def planned(subject: Subject, options: Options) -> list[tuple[Op, str, int]]:
    """Return what is checked: each op in each precision, and with how many cases.

    Raises
    ------
    SubjectError
        When the subject does not offer an op that was asked for, or no array crosses to it.
    """
    specs = subject.specs()
    if options.ops is not None:
        offered = {spec.name for spec in specs}
        missing = [op for op in options.ops if op not in offered]
        if missing:
            raise SubjectError(f"{subject.name} offers no {', '.join(missing)}")
        specs = [spec for spec in specs if spec.name in options.ops]
    try:
        dtypes = options.dtypes or subject.dtypes()
        plan = [
            (spec, dtype, cases_of(spec, options))
            for spec in specs
            for dtype in dtypes
            if subject.applies(spec, dtype)
        ]
        if not plan:
            names = ", ".join(spec.name for spec in specs)
            raise ValueError(f"nothing to check: {names} has no {', '.join(dtypes)}")
        for dtype in dtypes:
            none = [spec.name for spec in specs if not subject.applies(spec, dtype)]
            if none:
                subject.notes.add(f"without cases in {dtype}: {', '.join(none)}")
        return plan
    except KernelError as error:
        raise SubjectError(f"{subject.name}: {error}") from None
    except NotImplementedError as error:  # an op without a room
        raise SubjectError(str(error)) from None


def untried(subject: Subject, options: Options, plan: Iterable[tuple[Op, str, int]]) -> list[str]:
    """Return what the subject offers and the plan passes over, a sentence each."""
    specs = {spec.name: spec for spec, _, _ in plan}
    return subject.untried(specs.values(), among=options.ops)


def check_subject(
    subject: Subject, options: Options, progress: Progress = lambda *_: None
) -> Report:
    """Check what a subject offers, op by op; nothing that goes wrong in one stops the others."""
    report, started = Report(subject.name, options.seed, partial=options.partial), time.monotonic()
    plan = planned(subject, options)
    end = None if options.budget is None else time.monotonic() + options.budget
    for at, (spec, dtype, count) in enumerate(plan):
        known = {
            (failure.name, failure.kind)
            for op in report.ops
            if op.op == spec.name
            for failure in op.failures
        }
        left = None if end is None else (end - time.monotonic()) / (len(plan) - at)
        report.ops.append(
            check_one(subject, options, spec, dtype, count, progress, known=known, seconds=left)
        )
    refuse_none(report.ops)
    leave_out(report.ops, asked(subject, options), options.save)
    report.untried = untried(subject, options, plan)  # some of it shows when functions are called
    report.notes = sorted(subject.notes)
    report.seconds = time.monotonic() - started
    return report


def check_one(
    subject: Subject,
    options: Options,
    spec: Op,
    dtype: str,
    count: int,
    progress: Progress,
    *,
    known: Collection[tuple[str, str]] = (),
    seconds: float | None = None,
) -> OpReport:
    """Check one op in one precision with so many cases, and explain what fails.

    Parameters
    ----------
    known : collection of (result, kind)
        Failures seen in another precision already: reported again, but not shrunk again.
    seconds : float, optional
        After these no further case is tried.
    """
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(spec.name, dtype, min(done, count), count)

    try:
        found = search(
            subject,
            spec,
            dtype,
            seed=options.seed,
            examples=count,
            short=options.short,
            shrink=options.shrink,
            known=known,
            tick=tick,
            seconds=seconds,
        )
    except SubjectError as error:  # which is no reason not to check the others
        return OpReport(spec.name, dtype, error=str(error))
    for failure in found.failures:
        _explain(subject, failure, options)
    return found


def asked(subject: Subject, options: Options) -> bool:
    """Return whether somebody said which precisions there are to check in."""
    return options.dtypes is not None or subject.declared_dtypes() is not None


def refuse_none(found: list[OpReport]) -> None:
    """See that something was checked.

    Raises
    ------
    SubjectError
        When nothing could be.
    """
    if found and all(op.error for op in found):
        raise SubjectError(found[0].error)


def leave_out(found: list[OpReport], asked: bool, save: Path | None = None) -> None:
    """Take a precision that nobody asked for, and that an op never manages, as not offered.

    A float32 kernel behind ctypes is right in float32 and gives float32, or raises, for float64.
    Its cases were saved under ``save`` before that was known, and go.
    """
    right = {op.op for op in found if op.dtype == "float32" and op.ok}
    for op in found:
        if not asked and op.op in right and op.cases and op.refused == op.cases:
            op.not_offered = op.failures[0].judged.problem if op.failures else ""
            for failure in op.failures:
                if save is not None and failure.file:
                    remove_case(Path(failure.file), save)
            op.failures.clear()


def cases_of(spec: Op, options: Options) -> int:
    """Return how many cases of an op are tried in one precision."""
    # first: an op without a room is refused before anything runs
    weight = spec.WEIGHT if isinstance(spec, OwnOp) else room(spec.name).WEIGHT
    if options.examples is not None:
        return options.examples
    return int(EXAMPLES * weight * (THOROUGH if options.thorough else 1))


def _explain(subject: Subject, failure: Failure, options: Options) -> None:
    """Add hints, the file, and the command that runs the case again."""
    evidence, failure.evidence = failure.evidence, None
    if failure.kind == LEANS:
        return  # it has its hint, and no case of its own
    failure.hints = subject.hints(failure.case, failure.judged, evidence)[:MAX_HINTS]
    judged = [] if options.save is None else [failure.judged, *subject.run(failure.case)]
    subject.notes |= leave_behind(failure, subject.command, options, judged)


def leave_behind(
    failure: Failure, subject: str, options: Options, judged: list[Judged]
) -> set[str]:
    """Save the case of a failure, and have it say what runs it again; return what cannot be done.

    Parameters
    ----------
    subject : str
        Its command (see ``Subject``).
    judged : list of Judged
        The results of the case.
    """
    op, dtype, cases = failure.op, failure.dtype, cases_of(failure.case.spec, options)
    failure.rerun = search_command(subject, op, dtype, seed=options.seed, cases=cases)
    if options.save is None:
        return set()
    path = case_file(options.save, subject, op, dtype, failure.name, failure.kind)
    try:
        save_failure(path, failure.case, judged)
    except OSError as error:
        why = f"{options.save} cannot be written to ({error.strerror or error})"
        return {f"failing cases were not saved: {why}; --save (save=) names another folder"}
    failure.file, failure.rerun = str(path), case_command(subject, path)
    return set()


def replay(subject: Subject, case: Case) -> Report:
    """Run one case again, and report what is wrong with it and what of it was not tried.

    Raises
    ------
    SubjectError
        When the subject does not offer the op.
    """
    if case.spec not in subject.specs():
        raise SubjectError(f"{subject.name} offers no {case.op}, which the case is of")
    started = time.monotonic()
    judged = subject.run(case)
    gradients = [j for j in judged if j.name[:1] == "d" and j.name[1:] in case.spec.gradients]
    found = OpReport(case.op, case.dtype, planned=1, backward=bool(gradients))
    found.add(judged)
    wrong = [result for result in judged if not result.ok]
    kinds = {(result.name, result.kind) for result in wrong}
    wrong = [result for result in wrong if not follows((result.name, result.kind), kinds)]
    evidence = gather(subject, case.spec, case.dtype) if wrong else None
    for result in wrong:
        failure = Failure(case.op, case.dtype, result.name, result.kind, case, result)
        failure.hints = subject.hints(case, result, evidence)[:MAX_HINTS]
        found.failures.append(failure)
    found.seconds = time.monotonic() - started
    report = Report(subject.name, None, [found], seconds=found.seconds)
    if not wrong and not subject.alone:
        lacking = {
            "a gradient": _differentiated(case) and not gradients,
            "the value": len(gradients) == len(judged),
        }
        report.untried = [
            f"the case is of {what} of {case.op}, which {subject.name} does not give"
            for what, lacks in lacking.items()
            if lacks
        ]
    return report


def _differentiated(case: Case) -> bool:
    """Whether a case has a cotangent, of its own or among its arrays."""
    return case.cotangent is not None or any(name.startswith("dout") for name in case.arrays)
