"""Checks in processes of their own, so that a kernel that crashes does not end the run.

A wrong index in C or CUDA may end the process that it runs in, or never come back. Workers
therefore load the module and check its ops, each precision for itself and several at once, telling
what they do over a pipe; each case is told before it is tried. All that a run checks shares a few
of them: one may load several backends, which keep out of each other's way, but never two modules.
When a worker dies or falls silent, the case that it was in becomes a failure of its op, and a fresh
worker goes on with what is left. It is a new interpreter, not a fork, so that nothing of a GPU's
state is shared.
"""

import contextlib
import dataclasses
import importlib
import os
import pickle
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

from accel.system import cores
from accel.verify.calling import Judged
from accel.verify.check import (
    Options,
    asked,
    check_one,
    leave_behind,
    leave_out,
    planned,
    refuse_none,
    replay,
    untried,
)
from accel.verify.contract import Case
from accel.verify.load import as_subject, load_file, load_op
from accel.verify.report import Report
from accel.verify.search import Failure, OpReport
from accel.verify.shrink import simpler
from accel.verify.subject import Subject, SubjectError

TIMEOUT = 300.0  # seconds that a case may take, compilation included
MOST_JOBS = 4  # processes at once, unless told: each may hold a GPU's context
SHRINK_SECONDS = 15.0  # each try of a case that crashes costs a process

# What stands in a worker's environment, where the user's has nothing of the name. Several run at
# once, so a thread that waits should sleep rather than hold up others: products of the reference
# are small enough for one thread, and OpenMP's pool spins otherwise (its kernels keep their
# threads). And memory that was freed is used again, large arrays included: it costs less than
# fresh pages of the system, and has in it what was left there (``poison``).
WORKERS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}

Part = tuple[str, str, int]  # (op, dtype, cases)
Plan = list[Part]


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
    """What a worker is asked to do: tell the plan, check a part of it, or run one case."""

    options: Options
    part: Part | None = None
    case: Case | None = None

    def do(self, subject: Subject, tell: Callable[[str, Any], None]) -> None:
        """Do it, in the worker."""
        subject.watch, subject.caught = tell, (BaseException,)
        if self.case is not None:
            tell("report", replay(subject, self.case))
        elif self.part is None:
            plan = planned(subject, self.options)
            report = Report(subject.name, self.options.seed, partial=self.options.partial)
            report.untried = untried(subject, self.options, plan)
            report.notes = sorted(subject.notes)
            parts = [(spec.name, dtype, count) for spec, dtype, count in plan]
            tell("plan", (report, parts, asked(subject, self.options)))
        else:
            op, dtype, count = self.part
            (spec,) = (spec for spec in subject.specs() if spec.name == op)
            found = check_one(
                subject,
                self.options,
                spec,
                dtype,
                count,
                lambda op, dtype, done, count: tell("tick", done),
                seconds=self.options.budget,
            )
            left = subject.untried([spec], among=self.options.ops)
            tell("found", (found, set(subject.notes), left))


class Ended(Exception):
    """A worker ended; says how."""

    kind = "crash"


class Silent(Ended):
    """A worker was stopped, since it gave no answer."""

    kind = "hang"


def check_apart(source: Source, options: Options, *, timeout: float = TIMEOUT) -> Report:
    """Check one module or backend in processes of its own; see ``check_all``.

    Raises
    ------
    SubjectError
        When the module cannot be checked at all.
    ImportError, ValueError
        When the backend cannot run here; the message says why.
    """
    (found,) = check_all([(source, options)], timeout=timeout)
    if isinstance(found, Exception):
        raise found
    return found


# What is told while it goes on: which source by its place, op, dtype, cases so far, cases in all.
ProgressOfAll = Callable[[int, str, str, int, int], None]


def check_all(
    subjects: Sequence[tuple[Source, Options]],
    *,
    begin: Callable[[list[Plan]], ProgressOfAll] = lambda plans: lambda *_: None,
    timeout: float = TIMEOUT,
    jobs: int | None = None,
) -> list[Report | Exception]:
    """Check modules and backends side by side, in processes that they share.

    Parameters
    ----------
    subjects : sequence of (Source, Options)
        A budget is one for all of them.
    begin : callable
        Called once with what will be checked of each; returns what is told progress, from any
        thread.
    timeout : float
        Seconds after which a case that gives no answer is taken for one that never will.
    jobs : int, optional
        How many processes; as many as cores, and ``MOST_JOBS`` at most, when None.

    Returns
    -------
    list of Report, SubjectError, ImportError or ValueError
        In the order of what was asked: a report, or why there can be none.
    """
    pool = _Pool([_Checked(*one) for one in subjects], timeout, jobs or min(cores(), MOST_JOBS))
    try:
        pool.work()  # on the plans
        pool.progress = begin([checked.plan for checked in pool.checked])
        pool.begun = time.monotonic()
        for checked in pool.checked:
            checked.lay_out()
        pool.work()
    finally:
        pool.end()
    return [checked.result() for checked in pool.checked]


def plan_apart(source: Source, options: Options) -> tuple[Plan, Report]:
    """Return what ``check_apart`` would check, and its report without results.

    Raises
    ------
    SubjectError, ImportError, ValueError
        As ``check_apart``.
    """
    worker = Worker(source, TIMEOUT)
    try:
        return _plan(worker, source, options)[:2]
    finally:
        worker.end()


def _plan(worker: "Worker", source: Source, options: Options) -> tuple[Plan, Report, bool]:
    """Return what will be checked, the report without results, and whether dtypes were asked."""
    try:
        ((_, (report, plan, chosen)),) = worker.do(Job(options))
    except Ended as end:
        worker.end()
        raise SubjectError(f"{source.name}: importing it {end}") from None
    return plan, report, chosen


class _Checked:
    """One of the sources, and what is known of it by now."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options, self.started = source, options, time.monotonic()
        self.left: list[Part | None] = [None]  # the last is taken first; None is to say the plan
        self.plan: Plan = []
        self.found: dict[Part, OpReport] = {}
        self.report, self.notes = Report(source.name, options.seed), set[str]()
        self.chosen = False  # whether somebody said which precisions there are
        self.error: Exception | None = None

    def lay_out(self) -> None:
        """Have the whole plan to do, what takes longest, or what the plan has first, at first."""
        cases: dict[str, int] = {}
        for op, _, count in self.plan:
            cases[op] = cases.get(op, 0) + count
        self.left = [*sorted(reversed(self.plan), key=lambda part: cases[part[0]])]

    def cases(self) -> int:
        """Return how many cases nobody has begun."""
        return sum(part[2] for part in self.left if part)

    def result(self) -> Report | Exception:
        """Return the report, or why there is none."""
        if self.error is not None:
            return self.error
        self.report.ops = [self.found[part] for part in self.plan]
        try:
            refuse_none(self.report.ops)
        except SubjectError as error:
            return error
        leave_out(self.report.ops, self.chosen, self.options.save)
        self.report.notes = sorted(self.notes.union(self.report.notes))
        return self.report


class _Pool:
    """Workers, at most ``jobs`` at once, and all that they have to do, part by part."""

    def __init__(self, checked: list[_Checked], timeout: float, jobs: int) -> None:
        self.checked, self.timeout, self.jobs = checked, timeout, jobs
        self.lock, self.stopped = threading.Lock(), False
        self.begun = time.monotonic()  # with the cases
        self.progress: ProgressOfAll = lambda *_: None
        # two start and load at once: of one source, the first has to have loaded before it is
        # known what is left
        first = (checked * 2)[: min(jobs, max(2, len(checked)))]
        self.workers = [Worker(one.source, timeout) for one in first]
        # as long as there are workers: Linux ends these with the thread that started them
        self.threads = ThreadPoolExecutor(jobs)

    def work(self) -> None:
        """Do all that is left, in as many threads as there may be processes."""
        try:
            for line in [self.threads.submit(self._line) for _ in range(self.jobs)]:
                line.result()
        except BaseException:
            with self.lock:
                self.stopped = True
                for worker in self.workers:
                    worker.process.kill()  # whatever it is doing
            raise

    def end(self) -> None:
        """End all threads and workers."""
        self.threads.shutdown()
        for worker in self.workers:
            worker.end()

    def _line(self) -> None:
        """Do one part after the other, until none is left."""
        while (taken := self._take()) is not None:
            checked, part, worker, options = taken
            try:
                if part is None:
                    found = _plan(worker, checked.source, options)
                    checked.plan, checked.report, checked.chosen = found
                else:
                    self._check(worker, checked, part, options)
            except (ImportError, ValueError) as error:
                with self.lock:
                    checked.error, checked.left = error, []
            with self.lock:
                worker.free = worker.process.poll() is None
                if not worker.free:
                    self.workers.remove(worker)

    def _take(self) -> "tuple[_Checked, Part | None, Worker, Options] | None":
        """Return a part that is left, and a worker: at best one that has loaded the source."""
        with self.lock:
            waiting = [checked for checked in self.checked if checked.left]
            if self.stopped or not waiting:
                return None
            free = [worker for worker in self.workers if worker.free]
            pairs = [(checked, worker) for checked in waiting for worker in (*free, None)]
            checked, worker = max(pairs, key=lambda pair: (_fits(*pair), pair[0].cases()))
            if worker is None or not _fits(checked, worker):
                if len(self.workers) == self.jobs:
                    self.workers.remove(free[0])
                    free[0].end()
                worker = Worker(checked.source, self.timeout)
                self.workers.append(worker)
            elif worker.source != checked.source:
                worker.load(checked.source)
            worker.free = False
            options = dataclasses.replace(checked.options, budget=self._budget(checked.options))
            return checked, checked.left.pop(), worker, options

    def _budget(self, options: Options) -> float | None:
        """Return the seconds of the part that is taken next."""
        if options.budget is None:
            return None
        left = sum(len(checked.left) for checked in self.checked)
        end = self.begun + options.budget
        return max(0.0, end - time.monotonic()) * min(self.jobs, left) / left

    def _check(self, worker: "Worker", checked: _Checked, part: Part, options: Options) -> None:
        """Check a part, and end a worker that fails on the way."""
        op, dtype, planned = part
        at = self.checked.index(checked)
        case: Case | None = None
        calling, tried = "", 0
        try:
            for kind, content in worker.do(Job(options, part)):
                if kind == "case":
                    case, calling = content, ""
                elif kind == "calling":
                    calling = content
                elif kind == "tick":
                    tried = content
                    self.progress(at, op, dtype, tried, planned)
                elif kind == "found":
                    found, notes, left = content
                    with self.lock:
                        checked.notes |= notes
                        told = checked.report.untried
                        told += [sentence for sentence in left if sentence not in told]
        except Ended as end:
            worker.end()
            if self.stopped:
                return
            if case is None:
                said = f"{checked.source.name}: {op} {end}, before its first case"
                raise SubjectError(said) from None
            if options.shrink and end.kind == "crash":
                case = _simplest(checked.source, options, case, self.timeout)
            failure = _failure(case, calling, end)
            notes = leave_behind(failure, checked.source.command, options, [])
            with self.lock:
                checked.notes |= notes
            found = OpReport(op, dtype, tried + 1, planned, failures=[failure])
        checked.found[part] = found
        checked.report.seconds = time.monotonic() - checked.started
        self.progress(at, op, dtype, planned, planned)


def _fits(checked: _Checked, worker: "Worker | None") -> int:
    """Return 2 for a worker that has loaded the source, 1 for one that may load it as well."""
    if worker is None or worker.source == checked.source:
        return 0 if worker is None else 2
    return int(not worker.source.module and not checked.source.module)


def replay_apart(source: Source, case: Case, *, timeout: float = TIMEOUT) -> Report:
    """Run one case again, in a process of its own, and report on it."""
    calling = ""
    worker = Worker(source, timeout)
    try:
        for kind, content in worker.do(Job(Options(), case=case)):
            if kind == "calling":
                calling = content
            elif kind == "report":
                return cast(Report, content)
    except Ended as end:
        failure = _failure(case, calling, end)
        found = OpReport(case.op, case.dtype, 1, 1, failures=[failure])
        return Report(source.name, None, [found])
    finally:
        worker.end()
    raise AssertionError("a worker ends with what it found, or by Ended")


def _simplest(source: Source, options: Options, case: Case, timeout: float) -> Case:
    """Take away what the case does not need in order to crash, while there is time."""
    stop = time.monotonic() + SHRINK_SECONDS
    for changed in simpler(case):
        if time.monotonic() > stop:
            break
        candidate = changed(case)
        worker = Worker(source, timeout)
        try:
            for _ in worker.do(Job(options, case=candidate)):
                pass
        except Ended as end:
            if end.kind == "crash":
                case = candidate
        except ValueError:
            continue  # the reference refuses it
        finally:
            worker.end()
    return case


def _failure(case: Case, calling: str, end: Ended) -> Failure:
    judged = Judged("", end.kind, problem=f"{calling or case.op} {end}")
    return Failure(case.op, case.dtype, "", end.kind, case, judged)


# ---- the process ---------------------------------------------------------------------------------


class Loadable(Protocol):
    """What a worker can load: a ``Source``, or a file of adapters."""

    @property
    def module(self) -> str: ...
    @property
    def name(self) -> str: ...
    def load(self) -> Any: ...


class Worker:
    """A process that loads a source and does jobs on it, one after the other.

    Parameters
    ----------
    timeout : float
        Seconds of silence after which it is given up.
    loading : float, optional
        The same while the source is loaded; ``timeout`` when None.
    """

    def __init__(self, source: Loadable, timeout: float, loading: float | None = None) -> None:
        self.timeout, self.loading = timeout, timeout if loading is None else loading
        self.free, self._started = True, False
        trace, self.trace = tempfile.mkstemp(prefix="myllm-verify-")
        os.close(trace)
        code = f"import sys; sys.path[:] = {sys.path!r}; from accel.verify.worker import work; "
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{code}work({self.trace!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**WORKERS, **os.environ},
        )
        self._told: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.load(source)

    def load(self, source: Loadable) -> None:
        """Have the process load a source, which its next jobs are on."""
        self.source, self.loaded = source, False
        with contextlib.suppress(BrokenPipeError):  # it ended: the first job tells
            self._tell(source)

    def _tell(self, content: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump(content, self.process.stdin)
        self.process.stdin.flush()

    def _listen(self) -> None:
        """Hand on what the process tells, then None: a pipe cannot be waited for with a limit."""
        source = cast(IO[bytes], self.process.stdout)
        try:
            with source, contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:
                    self._told.put(pickle.load(source))
        finally:
            self._told.put(None)

    def do(self, job: Any) -> Iterator[tuple[str, Any]]:
        """Yield what the process tells of a job.

        Raises ``Ended`` when it dies or is silent for too long, ``SubjectError`` when it does that
        while it loads the source, and what it raised when it raised.
        """
        try:
            for kind, content in self._heard(job):
                self._started, self.loaded = True, self.loaded or kind == "loaded"
                if kind not in ("started", "loaded"):
                    yield kind, content
        except Ended as end:
            if self.loaded:
                raise
            self.end()
            raise SubjectError(f"{self.source.name}: importing it {end}") from None

    def _heard(self, job: Any) -> Iterator[tuple[str, Any]]:
        try:
            self._tell(job)
            while True:
                # how long an interpreter takes to start is not the module's doing
                patience = self.timeout if self.loaded else self.loading
                patience = patience if self._started else max(patience, TIMEOUT)
                try:
                    told = self._told.get(timeout=patience)
                except queue.Empty:
                    raise Silent(f"gave no answer within {patience:g} s and was stopped") from None
                if told is None:
                    raise EOFError
                kind, content = told
                if kind == "error":
                    raise content
                if kind == "done":
                    return
                yield kind, content
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise Ended(how_it_ended(self.process.wait(), self._trace(), self.source)) from None

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self.process.stdin.close()
        self._listener.join(1)  # what a kernel has forked may hold the pipe
        Path(self.trace).unlink(missing_ok=True)

    def _trace(self) -> str:
        return Path(self.trace).read_text(encoding="utf-8", errors="replace")


def how_it_ended(status: int, trace: str, source: Loadable) -> str:
    """Say how a process ended, and in which line of the module."""
    how = f"ended the process with status {status}"
    if status < 0:
        name = signal.Signals(-status).name
        how = f"ended the process by {name} ({signal.strsignal(-status)})"
    path = re.escape(str(Path(source.module).absolute()))
    line = re.search(rf'File "{path}", line (\d+)', trace) if source.module else None
    return how + (f" ({source.name}:{line[1]})" if line else "")
