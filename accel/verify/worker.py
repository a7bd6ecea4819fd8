"""What a process of ``apart.py`` does: load the sources that come, do jobs on them, and tell."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

from accel.system import end_with_parent
from accel.verify.apart import Job, Source
from accel.verify.check import asked, check_one, planned, replay, untried
from accel.verify.report import Report
from accel.verify.subject import Subject, SubjectError


def work(trace: str) -> None:
    """Do jobs that come as what was stdin, in a worker, and tell about them as what was its stdout.

    Whatever a module prints goes to stderr: it must not stand between the lines of ``--json``. And
    what it reads is empty: nobody would know which of several processes asks.
    """
    end_with_parent(kill=True)  # whatever a kernel is doing then
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    faulthandler.enable(open(trace, "w", encoding="utf-8"))
    jobs, told = open(os.dup(0), "rb"), open(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _no_terminal

    def tell(kind: str, content: Any) -> None:
        left = memoryview(pickle.dumps((kind, content)))
        while left:
            left = left[told.write(left) :]

    try:
        tell("started", None)
        _serve(jobs, tell)
    except EOFError:
        return  # no more jobs
    except BrokenPipeError:
        sys.exit(1)  # nobody listens any more
    except Exception:
        tell("error", RuntimeError(traceback.format_exc()))


def _no_terminal(*_: Any, **__: Any) -> None:
    raise EOFError("breakpoint() has no terminal here; check_case(FILE, MODULE) in Python has one")


def _serve(jobs: IO[bytes], tell: Callable[[str, Any], None]) -> None:
    """Load the sources that come, and do the jobs that come on the last of them."""
    subject: Subject | Exception = AssertionError("a job comes before a source")
    while True:
        given = pickle.load(jobs)
        try:
            if isinstance(given, Source):
                subject = given.load()
                subject.watch, subject.caught = tell, (BaseException,)
            elif isinstance(subject, Exception):
                raise subject
            else:
                tell("loaded", None)
                _do(subject, given, tell)
                tell("done", None)
        except (ImportError, ValueError) as error:
            if not isinstance(error, (SubjectError, ImportError)) and type(error) is not ValueError:
                raise
            if isinstance(given, Source):
                subject = error  # told when a job comes
            else:
                tell("error", error)


def _do(subject: Subject, job: Job, tell: Callable[[str, Any], None]) -> None:
    if job.case is not None:
        tell("report", replay(subject, job.case))
    elif job.part is None:
        plan = planned(subject, job.options)
        report = Report(subject.name, job.options.seed, partial=job.options.partial)
        report.untried = untried(subject, job.options, plan)
        report.notes = sorted(subject.notes)
        parts = [(spec.name, dtype, count) for spec, dtype, count in plan]
        tell("plan", (report, parts, asked(subject, job.options)))
    else:
        op, dtype, count = job.part
        (spec,) = (spec for spec in subject.specs() if spec.name == op)
        found = check_one(
            subject,
            job.options,
            spec,
            dtype,
            count,
            lambda op, dtype, done, count: tell("tick", done),
            seconds=job.options.budget,
        )
        left = subject.untried([spec], among=job.options.ops)
        tell("found", (found, set(subject.notes), left))
