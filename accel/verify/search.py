"""Try many cases of an op, and shrink one that fails to the smallest that still does.

The first pass tries all cases and stops at none, so that everything that fails is known. It begins
with the hard cases that the op's room names. All other choices are dealt like cards: each option of
a choice comes up once before any comes up twice, so a few dozen cases see every size, mask and
memory layout. Then, for each result that fails, Hypothesis
shrinks the choices of a failing case towards the first, simplest options. All is drawn from the
seed: the same seed gives the same cases.
"""

import dataclasses
import importlib.util
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import round_to
from accel.verify.contract import Case, storable
from accel.verify.cuts import cut_while
from accel.verify.draw import Pick
from accel.verify.subject import Subject
from accel.verify.travel import special_at, tamed
from accel.verify.trial import Judged
from reference.contract import Op

# Of the kernel, for one failing result; the smallest case found is kept. What fails only when it is
# long takes long.
SHRINK_RUNS, SHRINK_SECONDS = 500, 10.0
TELLING = 5_000  # elements of a case that hints are tried on


class Found(NamedTuple):
    """A case that fails, in what, and the choices that made it."""

    case: Case
    judged: Judged
    choices: list[int]


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
    telling: tuple[Case, Judged] | None = None  # a larger case, while hints are made

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

    @property
    def ok(self) -> bool:
        return not self.failures


def search(
    subject: Subject,
    spec: Op,
    dtype: str,
    *,
    seed: int,
    examples: int,
    shrink: bool = True,
    known: frozenset[tuple[str, str]] = frozenset(),
    tick: Callable[[], None] = lambda: None,
    seconds: float | None = None,
) -> OpReport:
    """Try ``examples`` cases of an op in one precision.

    Parameters
    ----------
    known : set of (result, kind)
        Failures seen in another precision already: reported again, but not shrunk again.
    tick : callable
        Called after every case: progress.
    seconds : float, optional
        After these no further case is tried, but one at least is.
    """
    report = OpReport(spec.name, dtype, not_covered=subject.missing_features(spec))
    report.planned, report.backward = examples, subject.has_backward(spec)
    started = time.monotonic()
    # every op has a stream of its own, so that --op draws what a whole run draws
    stream = zlib.crc32(f"{seed} {spec.name} {dtype}".encode())
    first: dict[tuple[str, str], Found] = {}  # the smallest that was drawn
    telling: dict[tuple[str, str], tuple[Case, Judged]] = {}  # a large one

    def look(case: Case, choices: list[int]) -> None:
        judged = subject.run(case)
        report.cases += 1
        arrays = [j for j in judged if j.name not in ("total", "n_valid")]
        refused = [j for j in arrays if j.kind in ("raised", "dtype") and not j.ok]
        report.refused += bool(arrays) and len(refused) == len(arrays)
        for name in dict.fromkeys(j.name for j in judged if j.name):
            report.results.setdefault(name, Tally()).add([j for j in judged if j.name == name])
        for result in judged:
            if not result.ok:
                key = (result.name, result.kind)
                if key not in first or case.size < first[key].case.size:
                    first[key] = Found(case, result, choices)
                if key not in telling or _tells(case) < _tells(telling[key][0]):
                    telling[key] = case, result
        tick()

    dealer = Dealer(stream, subject.hard(spec))
    for _ in range(examples):
        choices: list[int] = []
        look(subject.draw(spec, dtype, dealer.picks(choices)), choices)
        if seconds is not None and time.monotonic() - started > seconds:
            break
    shown: set[tuple[str, str]] = set()
    for key in _in_order(first, list(report.results)):
        # what is wrong with any number is wrong with NaN as well, and in a second call
        if key in shown or (key[1] in ("second", "nan") and (key[0], "value") in first):
            continue
        found = first[key]
        if shrink and key not in known:
            found = smallest(subject, spec, dtype, key, found, seed=stream)
        case = found.case
        # what else the smallest case shows needs no search of its own
        also = [(j.name, j.kind) for j in subject.run(case) if not j.ok]
        shown |= {key, *also}
        failure = Failure(spec.name, dtype, *key, case, found.judged, telling=telling[key])
        failure.also = list(dict.fromkeys(name for name, _ in also if name not in ("", key[0])))
        report.failures.append(failure)
    report.seconds = time.monotonic() - started
    return report


def _tells(case: Case) -> tuple[bool, int, int]:
    """Order cases by how much a hint says that explains them: few features, many numbers."""
    elements, features = case.size
    return elements > TELLING, features, -elements


def _in_order(keys: Iterable[tuple[str, str]], results: list[str]) -> list[tuple[str, str]]:
    """Return failures with those of calls first, then as the results are listed."""

    def place(key: tuple[str, str]) -> tuple[int, int]:
        at = results.index(key[0]) if key[0] in results else -1
        return at, key[1] != "value"

    return sorted(keys, key=place)


def smallest(
    subject: Subject, spec: Op, dtype: str, key: tuple[str, str], found: Found, *, seed: int
) -> Found:
    """Shrink a failing case, looking only at the one result that failed in it.

    Hypothesis cannot be handed a case to start from, so it is led to it: at each choice it may keep
    what was chosen, which it nearly always does at first, or choose anew. Shrinking then gives up
    one kept choice after another.
    """
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.errors import HypothesisException

    class Fails(Exception):
        """Tells Hypothesis that a case fails."""

    best = found
    runs, begun = 0, time.monotonic()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=200,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(st.data())
    def shrinking(data: Any) -> None:
        nonlocal best, runs
        runs += 1
        if runs > SHRINK_RUNS or time.monotonic() - begun > SHRINK_SECONDS:
            return
        choices: list[int] = []

        def pick(options: Sequence[Any], name: str = "") -> Any:
            at, last = len(choices), len(options) - 1
            kept = min(found.choices[at], last) if at < len(found.choices) else 0
            if kept and data.draw(st.integers(0, 99)):
                choices.append(kept)
            else:
                choices.append(data.draw(st.integers(0, last)))
            return options[choices[-1]]

        case = subject.draw(spec, dtype, pick)
        for result in subject.run(case):
            if not result.ok and (result.name, result.kind) == key:
                if case.size <= best.case.size:
                    best = Found(case, result, choices)
                raise Fails

    try:
        shrinking()
    except Fails:
        pass
    except (HypothesisException, BaseExceptionGroup) as error:
        # a kernel that remembers earlier calls gives other results when a case is tried again,
        # which Hypothesis calls flaky; the smallest case that failed has been noted all the same
        if "Flaky" not in type(error).__name__ and not isinstance(error, BaseExceptionGroup):
            raise
    return _without_the_needless(subject, best, key)


def _without_the_needless(subject: Subject, found: Found, key: tuple[str, str]) -> Found:
    """Take away, one at a time, whatever a failing case does not need in order to fail."""

    def fails(candidate: Case) -> bool:
        nonlocal found
        try:
            if not storable(candidate):
                return False
            results = subject.run(candidate)
        except (ValueError, IndexError):
            return False  # the reference refuses it
        still = [j for j in results if not j.ok and (j.name, j.kind) == key]
        if still:
            found = found._replace(case=candidate, judged=still[0])
        return bool(still)

    for changed in simpler(found.case):
        fails(changed(found.case))
    cut_while(found.case, fails, subject.cuts)
    for changed in simpler(found.case):
        fails(changed(found.case))
    return found


def _with_quarters(case: Case) -> Case:
    """Round every number to a quarter, which is short to read."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(rounded(part) for part in value)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        if not np.isfinite(value).all():
            return value
        quarters = np.round(4 * np.clip(value, -4, 4)) / 4 + 0.0
        # what was not zero stays so
        quarters = np.where((quarters == 0) & (value != 0), np.copysign(0.25, value), quarters)
        quarters = np.asarray(quarters, value.dtype)
        return round_to(quarters, case.dtype)

    arrays = {name: rounded(a) for name, a in case.arrays.items()}
    return dataclasses.replace(case, arrays=arrays, cotangent=rounded(case.cotangent))


def simpler(case: Case) -> list[Callable[[Case], Case]]:
    """Return what can be taken away from a case: its manner first, then optional arguments."""
    return [
        _with_quarters,
        *([_tamed] if special_at(case) is not None else []),
        partial(dataclasses.replace, interleaved=False),
        partial(dataclasses.replace, layouts={}),
        partial(dataclasses.replace, out=""),
        *(partial(_with_plain, name) for name in case.layouts),
        *(methodcaller("without", name) for name in case.optional() if name != "dropout_key"),
    ]


def _tamed(case: Case) -> Case:
    """Put a number where NaN or an infinity is."""
    place = special_at(case)
    return case if place is None else tamed(case, place, 1.0)


def _with_plain(name: str, case: Case) -> Case:
    layouts = {n: layout for n, layout in case.layouts.items() if n != name}
    return dataclasses.replace(case, layouts=layouts)


class Dealer:
    """Answers the choices of many cases, each option once before any comes up twice.

    The first cases are the hard ones: some of their choices have a name, and what they have to be.
    """

    def __init__(self, seed: int, hard: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rng = np.random.default_rng(seed)
        self.decks: dict[tuple[str | int, int], list[int]] = {}
        # NaN hides all else, so it is put into those hard cases alone that are about it
        self.hard = [{"special": "", **case} for case in hard][::-1]

    def picks(self, choices: list[int]) -> Pick:
        """Return what answers the choices of one case, and notes them in ``choices``."""
        wanted: Mapping[str, Any] = self.hard.pop() if self.hard else {}

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


def require_hypothesis() -> None:
    """Raise an ``ImportError`` that says what to install when Hypothesis is missing."""
    if importlib.util.find_spec("hypothesis") is None:
        raise ImportError(
            "myllm verify shrinks failing cases with Hypothesis, which is not installed; "
            "pip install -e '.[verify]' in the clone"
        )
