"""Checks in a process of their own, so that a kernel that crashes does not end the run.

A wrong index in C or CUDA may end the process that it runs in, or never come back. A worker
therefore loads the module and checks it, telling what it does over a pipe; each case is told before
it is tried. When the worker dies or falls silent, the case that it was in becomes a failure of its
op, and a fresh worker goes on with what is left. It is a new interpreter, not a fork, so that
nothing of a GPU's state is shared.
"""

import ctypes
import faulthandler
import importlib
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from accel.verify.check import Options, Progress, check_subject, failure_path, planned, replay
from accel.verify.contract import Case
from accel.verify.files import case_command, save_failure
from accel.verify.report import Report
from accel.verify.search import Failure, OpReport, simpler
from accel.verify.subject import Subject, SubjectError, as_subject, load_file, load_op
from accel.verify.trial import Judged

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIMEOUT = 300.0  # seconds that a case may take, compilation included
SHRINK_SECONDS = 15.0  # each try of a case that crashes costs a process

Plan = list[tuple[str, str, int]]  # (op, dtype, cases)


class Source(NamedTuple):
    """What a worker loads: the file of a module, or a backend."""

    module: str = ""
    backend: str = ""
    compute: str = "float32"
    op: str = ""  # the module holds this op alone, as a file of reference/ or accel/cpu/ does
    like: str = ""  # the file of a reference of one's own, which the module is held to
    functions: tuple[str, ...] = ()  # of it, when not all

    @property
    def command(self) -> str:
        if self.like:
            only = "".join(f" --function {shlex.quote(name)}" for name in self.functions)
            return f"--like {shlex.quote(self.like)} --module {shlex.quote(self.module)}{only}"
        if self.module:
            return f"--module {shlex.quote(self.module)}"
        return f"--backend {self.backend} --compute {self.compute}"

    @property
    def name(self) -> str:
        return Path(self.module).name if self.module else f"{self.backend} ({self.compute})"

    def load(self) -> Subject:
        """Load it, in this process."""
        if self.like:
            from accel.verify.like.source import load  # which may import a framework

            return load(self.like, self.module, self.functions, self.command)
        if self.module:
            return load_op(self.module, self.op) if self.op else load_file(self.module)
        module = importlib.import_module("accel").load(self.backend, compute=self.compute)
        return as_subject(module, self.name, self.command)


class Job(NamedTuple):
    """What a worker is asked to do: what is left of a check, or one case."""

    source: Source
    options: Options
    earlier: list[OpReport]
    case: Case | None
    trace: str  # a file for the traceback of a crash


class Ended(Exception):
    """A worker ended; says how."""

    kind = "crash"


class Silent(Ended):
    """A worker was stopped, since it gave no answer."""

    kind = "hang"


def check_apart(
    source: Source,
    options: Options,
    *,
    begin: Callable[[str, Plan], Progress] = lambda name, plan: lambda *_: None,
    timeout: float = TIMEOUT,
) -> Report:
    """Check a module or backend in a process of its own.

    Parameters
    ----------
    begin : callable
        Called once with the subject's name and what will be checked; returns what is told progress.
    timeout : float
        Seconds after which a case that gives no answer is taken for one that never will.

    Raises
    ------
    SubjectError
        When the module cannot be checked at all.
    ImportError, ValueError
        When the backend cannot run here; the message says why.
    """
    done: list[OpReport] = []
    progress: Progress | None = None
    while True:
        case: Case | None = None
        calling = ""
        tried = 0
        try:
            for kind, content in _worker(source, options, done, None, timeout):
                if kind == "plan" and progress is None:
                    progress = begin(*content)
                elif kind == "case":
                    case, calling = content, ""
                elif kind == "calling":
                    calling = content
                elif kind == "tick" and progress is not None:
                    tried = content[2]
                    progress(*content)
                elif kind == "op":
                    done.append(content)
                elif kind == "report":
                    return Report(content.subject, content.seed, done, content.notes)
        except Ended as end:
            if case is None:
                raise SubjectError(f"{source.name}: importing it {end}") from None
            if options.shrink and end.kind == "crash":
                case = _simplest(source, options, case, timeout)
            failure = _failure(source, options, case, calling, end)
            done.append(OpReport(case.op, case.dtype, tried + 1, failures=[failure]))
            if progress is not None:
                progress(case.op, case.dtype, 1, 1)


def replay_apart(source: Source, case: Case, *, timeout: float = TIMEOUT) -> list[Failure]:
    """Run one case again, in a process of its own, and return what is wrong with it."""
    calling = ""
    try:
        for kind, content in _worker(source, Options(), [], case, timeout):
            if kind == "calling":
                calling = content
            elif kind == "failures":
                return list(content)
    except Ended as end:
        return [_failure(source, Options(), case, calling, end)]
    raise AssertionError("a worker ends with what it found, or by Ended")


def _simplest(source: Source, options: Options, case: Case, timeout: float) -> Case:
    """Take away what the case does not need in order to crash, while there is time."""
    stop = time.monotonic() + SHRINK_SECONDS
    for changed in simpler(case):
        if time.monotonic() > stop:
            break
        candidate = changed(case)
        try:
            for _ in _worker(source, options, [], candidate, timeout):
                pass
        except Ended as end:
            if end.kind == "crash":
                case = candidate
        except ValueError:
            continue  # the reference refuses it
    return case


def _failure(source: Source, options: Options, case: Case, calling: str, end: Ended) -> Failure:
    problem = f"{calling or case.op} {end}"
    judged = Judged("", end.kind, problem=problem)
    failure = Failure(case.op, case.dtype, "", end.kind, case, judged)
    failure.rerun = (
        f"myllm verify {source.command} --op {case.op} --dtype {case.dtype} --seed {options.seed}"
    )
    if options.save is not None:
        path = failure_path(options.save, failure)
        save_failure(path, case, [])
        failure.file, failure.rerun = str(path), case_command(source.command, path)
    return failure


# ---- the process ---------------------------------------------------------------------------------


def _worker(
    source: Source, options: Options, earlier: list[OpReport], case: Case | None, timeout: float
) -> Iterator[tuple[str, Any]]:
    """Start a worker and yield what it tells, up to its last word.

    Raises ``Ended`` when it dies or is silent for too long, and what it raised when it raised.
    """
    reading, writing = os.pipe()
    with tempfile.NamedTemporaryFile("r", prefix="myllm-verify-") as trace:
        code = f"import sys; sys.path[:] = {sys.path!r}; from accel.verify.apart import work; "
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}work({writing})"],
            stdin=subprocess.PIPE,
            stdout=2,  # whatever a module prints must not stand between the lines of --json
            pass_fds=(writing,),
        )
        os.close(writing)
        try:
            assert process.stdin is not None
            with Connection(reading, writable=False) as told:
                pickle.dump(Job(source, options, earlier, case, trace.name), process.stdin)
                process.stdin.close()
                while True:
                    if not told.poll(timeout):
                        raise Silent(f"gave no answer within {timeout:g} s and was stopped")
                    kind, content = told.recv()
                    if kind == "error":
                        raise content
                    yield kind, content
                    if kind in ("report", "failures"):
                        return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise Ended(_how(process.wait(), trace.read(), source)) from None
        finally:
            process.kill()
            process.wait()


def _how(status: int, trace: str, source: Source) -> str:
    """Say how a process ended, and in which line of the module."""
    how = f"ended the process with status {status}"
    if status < 0:
        name = signal.Signals(-status).name
        how = f"ended the process by {name} ({signal.strsignal(-status)})"
    path = re.escape(str(Path(source.module).absolute()))
    line = re.search(rf'File "{path}", line (\d+)', trace) if source.module else None
    return how + (f" ({source.name}:{line[1]})" if line else "")


def _end_with_parent() -> None:
    """Have Linux end this process when its parent goes, whatever a kernel is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def work(writing: int) -> None:
    """Do a job that comes as stdin, in a worker, and tell about it through a pipe."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    job: Job = pickle.load(sys.stdin.buffer)
    faulthandler.enable(open(job.trace, "w", encoding="utf-8"))
    told = Connection(writing, readable=False)

    def tell(kind: str, content: Any) -> None:
        told.send((kind, content))

    try:
        subject = job.source.load()
        subject.watch = tell
        if job.case is not None:
            tell("failures", replay(subject, job.case))
            return
        plan = [(spec.name, dtype, n) for spec, dtype, n in planned(subject, job.options)]
        tell("plan", (subject.name, plan))
        report = check_subject(
            subject,
            job.options,
            lambda *at: tell("tick", at),
            earlier=job.earlier,
            found=lambda op: tell("op", op),
        )
        report.ops = []  # they have been told
        tell("report", report)
    except BrokenPipeError:
        sys.exit(1)  # nobody listens any more
    except Exception as error:
        known = isinstance(error, (SubjectError, ImportError)) or type(error) is ValueError
        tell("error", error if known else RuntimeError(traceback.format_exc()))
