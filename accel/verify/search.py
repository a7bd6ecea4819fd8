"""Try many cases of an op, and shrink one that fails to the smallest that still does.

The first pass tries all cases and stops at none, so that everything that fails is known. It begins
with the hard cases that the op's room names. All other choices are dealt like cards: each option of
a choice comes up once before any comes up twice, so a few dozen cases see every size, mask and
memory layout. Then, for each result that fails, the choices of a failing case shrink towards the
first, simplest options (``shrink.py``). All is drawn from the seed: the same seed gives the same
cases.
"""

import dataclasses
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from accel.verify.calling import Judged
from accel.verify.contract import Case
from accel.verify.draw import Pick
from accel.verify.evidence import Evidence
from accel.verify.files import search_command
from accel.verify.leaning import leanings
from accel.verify.shrink import Found, smallest
from accel.verify.subject import Subject
from reference.contract import Op

LEANS = "leans"  # the kind of a failure that no case shows by itself
LATER = ("second", "refilled", "alone", "nan")  # kinds of what is wrong beside the first call alone
ALONE = 0.5  # of the cases in which a result fails, by itself: then it is told by itself
GATHERED = 40  # cases beside one that is run again, for its hints


@dataclasses.dataclass
class Failure:
    """One thing that is wrong with an op, and the smallest case that shows it."""

    op: str
    dtype: str
    name: str  # "out", "dk", …; "" when the call itself failed
    kind: str
    case: Case
    judged: Judged
    hints: list[str] = dataclasses.field(default_factory=list)
    also: list[str] = dataclasses.field(default_factory=list)  # what else fails in this case
    file: str = ""  # the .npz
    rerun: str = ""  # the command that runs this case again
    evidence: Evidence | None = None  # of all cases, while hints are made

    @property
    def gradient(self) -> bool:
        """Whether it is a gradient that is wrong."""
        return self.name[1:] in self.case.spec.gradients and self.name[0] == "d"

    @property
    def direction(self) -> str:
        """Return whether the forward is wrong or the backward, as far as one can tell."""
        called = self.case.spec.backward and self.case.spec.backward_name in self.judged.problem
        return "backward" if self.gradient or (called and not self.name) else "forward"

    @property
    def where(self) -> str:
        """Return the op and the result in words."""
        if not self.name:
            return self.op
        return f"{self.op}: {'gradient ' if self.gradient else ''}{self.name}"


@dataclasses.dataclass
class Tally:
    """What was seen of one result of an op over all cases."""

    cases: int = 0
    failed: int = 0
    error: float = 0.0  # the worst relative error
    bound: float = 0.0  # what the rule allowed in the case with the worst ratio
    ratio: float = 0.0  # the worst error / allowed

    def add(self, judged: list[Judged]) -> None:
        """Count one case, in which the result may have been looked at more than once."""
        self.cases += 1
        self.failed += not all(j.ok for j in judged)
        for near in (j.closeness for j in judged):
            if near is not None and not near.ratio < self.ratio:
                self.error, self.bound, self.ratio = near.error, near.bound, near.ratio


@dataclasses.dataclass
class OpReport:
    """One op in one precision."""

    op: str
    dtype: str
    cases: int = 0
    planned: int = 0  # cases that would have been tried, had time not run out
    seconds: float = 0.0
    results: dict[str, Tally] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    not_covered: list[str] = dataclasses.field(default_factory=list)
    not_offered: str = ""  # why this precision was left out, when it was
    backward: bool = False  # whether a backward was called
    refused: int = 0  # cases that raised, or gave nothing but a narrower dtype
    error: str = ""  # why it could not be checked, when it could not

    @property
    def ok(self) -> bool:
        return not self.failures and not self.error

    def add(self, judged: list[Judged]) -> None:
        """Count one case."""
        self.cases += 1
        for name in dict.fromkeys(j.name for j in judged if j.name):
            self.results.setdefault(name, Tally()).add([j for j in judged if j.name == name])


def search(
    subject: Subject,
    spec: Op,
    dtype: str,
    *,
    seed: int,
    examples: int,
    shrink: bool = True,
    known: Collection[tuple[str, str]] = (),
    tick: Callable[[], None] = lambda: None,
    seconds: float | None = None,
    short: bool = False,
) -> OpReport:
    """Try ``examples`` cases of an op in one precision.

    Parameters
    ----------
    known : collection of (result, kind)
        Failures seen in another precision already: reported again, but not shrunk again.
    tick : callable
        Called after every case: progress.
    seconds : float, optional
        After these no further case is tried, but one at least is.
    short : bool
        Whether arrays that are long beyond what indices of 15 and 16 bits count are left out.
    """
    report = OpReport(spec.name, dtype, not_covered=subject.missing_features(spec))
    report.planned, report.backward = examples, subject.has_backward(spec)
    started = time.monotonic()
    # every op has a stream of its own, so that --op draws what a whole run draws
    stream = zlib.crc32(f"{seed} {spec.name} {dtype}".encode())
    first: dict[tuple[str, str], Found] = {}  # the smallest that was drawn
    evidence = Evidence()

    def look(case: Case, choices: list[int]) -> None:
        judged = subject.run(case)
        report.add(judged)
        arrays = [j for j in judged if j.name not in ("total", "n_valid")]
        refused = [j for j in arrays if j.kind in ("raised", "dtype") and not j.ok]
        report.refused += bool(arrays) and len(refused) == len(arrays)
        for result in judged:
            if not result.ok:
                key = (result.name, result.kind)
                found = Found(case, result, choices)
                if key not in first or found.order < first[key].order:
                    first[key] = found
        evidence.add(case, judged)
        tick()

    dealer = Dealer(stream, subject.hard(spec), short)
    for _ in range(examples):
        choices: list[int] = []
        look(subject.draw(spec, dtype, dealer.picks(choices)), choices)
        if seconds is not None and time.monotonic() - started > seconds:
            break
    shown: set[tuple[str, str]] = set()
    beside: set[tuple[str, str]] = set()  # what fails in the smallest case of another
    for key in _in_order(first, list(report.results)):
        if follows(key, first) or (key in beside and not _alone(key, shown, evidence)):
            continue
        found = first[key]
        if shrink and key not in known:
            found = smallest(subject, partial(subject.draw, spec, dtype), key, found)
        case = found.case
        # what else the smallest case shows needs no search of its own
        also = [(j.name, j.kind) for j in subject.run(case) if not j.ok]
        shown.add(key)
        beside.update(other for other in also if (other[1] in LATER) == (key[1] in LATER))
        failure = Failure(spec.name, dtype, *key, case, found.judged, evidence=evidence)
        failure.also = list(dict.fromkeys(name for name, _ in also if name not in ("", key[0])))
        report.failures.append(failure)
    wrong = {name for name, _ in first}
    if "" not in wrong:
        report.failures += _leaning(subject, report, evidence, wrong, seed)
    report.seconds = time.monotonic() - started
    return report


def _leaning(
    subject: Subject, report: OpReport, evidence: Evidence, wrong: Collection[str], seed: int
) -> Iterator[Failure]:
    """Yield the results that are right in every case, and wrong in all together."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mistake may well divide by zero
        found = list(leanings(subject, report.dtype, evidence.right, wrong))
    op, dtype = report.op, report.dtype
    again = search_command(subject.command, op, dtype, seed=seed, cases=report.cases)
    for name, problem, hints, cases in found:
        report.results[name].failed = cases
        judged, case = Judged(name, LEANS, problem=problem), evidence.right[0].case
        yield Failure(op, dtype, name, LEANS, case, judged, hints=list(hints), rerun=again)


def follows(key: tuple[str, str], keys: Collection[tuple[str, str]]) -> bool:
    """Whether one failure, (result, kind), comes of another.

    What is wrong with any number is wrong with NaN as well, and in a second call; and what has
    another shape than ``out=`` is not written there.
    """
    if key[1] == "out":
        return (key[0], "shape") in keys
    wrong = any((key[0], kind) in keys for kind in ("value", "nonfinite"))
    return key[1] in LATER and wrong


def _alone(key: tuple[str, str], shown: set[tuple[str, str]], evidence: Evidence) -> bool:
    """Whether a failure is one of its own: in most of its cases nothing fails that is shown."""
    cases = [failed for _, failed in evidence.seen if key in failed]
    return sum(not failed & shown for failed in cases) > ALONE * len(cases)


def gather(subject: Subject, spec: Op, dtype: str) -> Evidence:
    """Return what some cases say of an op of which one failing case is known."""
    evidence, dealer = Evidence(), Dealer(0, subject.hard(spec))
    for _ in range(GATHERED):
        case = subject.draw(spec, dtype, dealer.picks([]))
        evidence.add(case, subject.run(case))
    return evidence


def _in_order(keys: Iterable[tuple[str, str]], results: list[str]) -> list[tuple[str, str]]:
    """Return failures of calls, and of what they may not write, then as results are listed."""

    def place(key: tuple[str, str]) -> tuple[int, int]:
        at = results.index(key[0]) if key[0] in results and key[1] != "written" else -1
        return at, key[1] != "value"

    return sorted(keys, key=place)


class Dealer:
    """Answers the choices of many cases, each option once before any comes up twice.

    The first cases are the hard ones: some of their choices have a name, and what they have to be.
    """

    def __init__(
        self, seed: int, hard: Iterable[Mapping[str, Any]] = (), short: bool = False
    ) -> None:
        self.rng, self.short = np.random.default_rng(seed), short
        self.decks: dict[tuple[str | int, int], list[int]] = {}
        # NaN hides all else, so it is put into those hard cases alone that are about it
        hard = (case for case in hard if not (short and case.get("long")))
        self.hard = [{"special": "", **case} for case in hard][::-1]

    def picks(self, choices: list[int]) -> Pick:
        """Return what answers the choices of one case, and notes them in ``choices``."""
        wanted: Mapping[str, Any] = self.hard.pop() if self.hard else {}
        wanted = {**wanted, "long": False} if self.short else wanted

        def pick(options: Sequence[Any], name: str = "") -> Any:
            if name in wanted and wanted[name] in options:
                choices.append(options.index(wanted[name]))
                return options[choices[-1]]
            # the same question is asked by the same name, or else at the same place, as far as
            # earlier answers allow
            deck = self.decks.setdefault((name or len(choices), len(options)), [])
            if not deck:
                deck += self.rng.permutation(len(options)).tolist()
            choices.append(deck.pop())
            return options[choices[-1]]

        return pick
