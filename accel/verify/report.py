"""What a run found, for people (a table and the failures) and for programs (JSON)."""

import dataclasses
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel.verify.contract import Case
from accel.verify.search import LEANS, Failure, OpReport, Tally
from accel.verify.travel import element
from reference.types import Array

if TYPE_CHECKING:  # rich is wanted where a report is printed: a GPU's tests do without
    from rich.console import Console


class Test(NamedTuple):
    """One thing that was looked at, as programs count it that read JUnit's XML."""

    group: str
    name: str
    outcome: str = ""  # "failure", "error" or "skipped"; "": all is right
    says: str = ""  # what came of it, in a line
    text: str = ""  # all that is known of a failure
    seconds: float = 0.0


@dataclasses.dataclass
class AnyReport(ABC):
    """What was found of one subject, in a form that can be written to a file."""

    subject: str
    _: dataclasses.KW_ONLY
    error: str = ""  # why it could not be checked at all, when it could not
    untried: list[str] = dataclasses.field(default_factory=list)  # sentences: what nobody looked at
    partial: bool = False  # whether that is all right

    @property
    @abstractmethod
    def found_right(self) -> bool:
        """Whether all that was found is as the reference."""

    @property
    @abstractmethod
    def found_verdict(self) -> str:
        """What was found, in a line."""

    @abstractmethod
    def found_tests(self) -> Iterator[Test]:
        """Yield what was found, a test each."""

    @abstractmethod
    def found_facts(self) -> dict[str, Any]:
        """Return what was found as plain values, for JSON."""

    @property
    def right(self) -> bool:
        """Whether all that was tried is as the reference."""
        return not self.error and self.found_right

    @property
    def ok(self) -> bool:
        return self.right and (self.partial or not self.untried)

    @property
    def verdict(self) -> str:
        return "not checked" if self.error else self.found_verdict

    def tests(self) -> list[Test]:
        """Return a test for each thing that was looked at, and for what was not."""
        tests = [Test("", "can be checked", "error", self.error)] if self.error else []
        tests += self.found_tests()
        if self.untried:
            outcome = "skipped" if self.partial else "failure"
            tests.append(Test("", "all was tried", outcome, "; ".join(self.untried)))
        return tests

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        head = {"subject": self.subject, "ok": self.ok, "error": self.error}
        return head | self.found_facts()


@dataclasses.dataclass
class Report(AnyReport):
    """The result of checking one module or backend."""

    seed: int | None  # None: no cases were drawn
    ops: list[OpReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # that all of it took, several processes at once

    @property
    def found_right(self) -> bool:
        return all(op.ok for op in self.ops)

    @property
    def found_verdict(self) -> str:
        if self.right and self.untried:
            return "what was tried is as the reference, but not all was tried"
        return "all as the reference" if self.right else "not as the reference"

    @property
    def cases(self) -> int:
        return sum(op.cases for op in self.ops)

    @property
    def failures(self) -> list[Failure]:
        return [failure for op in self.ops for failure in op.failures]

    @property
    def errors(self) -> list[str]:
        """Why ops could not be checked, one sentence each."""
        first: dict[str, str] = {}
        for op in self.ops:
            if op.error:
                first.setdefault(op.op, op.error)
        return list(first.values())

    def text(self) -> str:
        """Return the report as plain text."""
        from rich.console import Console

        buffer = io.StringIO()
        show(self, Console(file=buffer, width=110, no_color=True))
        return buffer.getvalue()

    def found_tests(self) -> Iterator[Test]:
        """Yield a test for each op, precision and direction."""
        for op in self.ops:
            each = by_direction(op)
            for direction, failures in each.items():
                outcome, says = "skipped" if op.not_offered else "", op.not_offered
                if op.error:
                    outcome, says = "error", op.error
                if failures:
                    outcome, says = "failure", "; ".join(map(problem_line, failures))
                text = "\n\n".join(map(failure_text, failures))
                name, seconds = f"{op.dtype}-{direction}", op.seconds / len(each)
                yield Test(op.op, name, outcome, says, text, seconds)

    def found_facts(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "cases": self.cases,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
            "untried": self.untried,
            "ops": [_op_dict(op) for op in self.ops],
        }


def _op_dict(op: OpReport) -> dict[str, Any]:
    return {
        "op": op.op,
        "dtype": op.dtype,
        "ok": op.ok,
        "error": op.error,
        "cases": op.cases,
        "planned": op.planned,
        "seconds": round(op.seconds, 3),
        "not_covered": op.not_covered,
        "not_offered": op.not_offered,
        "results": {
            name: {
                "cases": tally.cases,
                "failed": tally.failed,
                "worst_error": _finite(tally.error),
                "bound": _finite(tally.bound),
                "worst_ratio": _finite(tally.ratio),
            }
            for name, tally in op.results.items()
        },
        "failures": [
            {
                "result": failure.name,
                "kind": failure.kind,
                "problem": problem_line(failure),
                "also": failure.also,
                "case": "" if failure.kind == LEANS else failure.case.describe(),
                "hints": failure.hints,
                "file": failure.file,
                "rerun": failure.rerun,
            }
            for failure in op.failures
        ],
    }


def by_direction(op: OpReport) -> dict[str, list[Failure]]:
    """Return the failures of an op's forward, and of its backward where one was called."""
    found: dict[str, list[Failure]] = {"forward": []}
    for failure in op.failures:
        found.setdefault(failure.direction, []).append(failure)
    if op.backward:
        found.setdefault("backward", [])
    return found


def _finite(x: float) -> float | None:
    """Return x, or None where JSON has no number for it."""
    return float(x) if np.isfinite(x) else None


def show(report: Report, console: "Console") -> None:
    """Print the table, then each failure."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(report.subject) + ("" if report.seed is None else f", seed {report.seed}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("op", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("result", overflow="fold")
    for title in ("error", "allowed", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict")
    for op in report.ops:
        lead = [op.op, op.dtype, cases_text(op)]
        if op.not_offered:
            table.add_row(*lead, "", "", "", "", "[yellow]not offered[/]")
            continue
        if op.error:
            table.add_row(*lead, "", "", "", "", "[red]not checked[/]")
            continue
        calls = [f for f in op.failures if not f.name]
        if calls:
            kinds = ", ".join(dict.fromkeys(f.kind for f in calls))
            table.add_row(*lead, "", "", "", "", f"[red]FAIL[/] {kinds}")
            lead = ["", "", ""]
        for name, tally in op.results.items():
            verdict = "[green]ok[/]"
            if tally.failed:
                verdict = f"[red]FAIL[/] in {tally.failed}"
            table.add_row(*lead, escape(name), *_closeness(tally), verdict)
            lead = ["", "", ""]
    console.print(table)
    for op in report.ops:
        if op.not_offered:
            console.print(
                f"{op.op} does not work in {op.dtype} ({escape(op.not_offered)}), which was left "
                "out; DTYPES in the module says so for all ops",
                style="yellow",
                highlight=False,
            )
    for says in report.errors:
        console.print(f"not checked: {escape(says)}", style="red", highlight=False, soft_wrap=True)
    lacking: dict[str, list[str]] = {}
    for op in report.ops:
        if op.not_covered:
            lacking[op.op] = op.not_covered
    for name, parameters in lacking.items():
        console.print(f"not covered: {name} takes no {', '.join(parameters)}", highlight=False)
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    told: set[tuple[str, str, str]] = set()
    for failure in report.failures:
        key = (failure.op, failure.name, failure.kind)
        if key in told:
            line = f"FAIL {failure.where} ({failure.dtype}): the same; again: {failure.rerun}"
            console.print(escape(line), highlight=False, soft_wrap=True)
            continue
        told.add(key)
        console.print()
        console.print(escape(failure_text(failure)), highlight=False, soft_wrap=True)
    for sentence in report.untried:
        console.print(f"not tried: {escape(sentence)}", style="yellow", highlight=False)
    if report.untried and not report.partial:
        console.print("--partial (partial=True) takes that for all right", highlight=False)
    colour = "green" if report.ok else "red"
    console.print(
        f"{report.cases} cases in {report.seconds:.1f} s: [{colour}]{report.verdict}[/]",
        highlight=False,
    )


def cases_text(op: OpReport) -> str:
    """Return how many cases were tried, and of how many when time ran out."""
    return f"{op.cases}/{op.planned}" if 0 < op.cases < op.planned else str(op.cases)


def _closeness(tally: Tally) -> tuple[str, str, str]:
    """Return the worst error, what was allowed, and how much of that it is."""
    if not np.isfinite(tally.error):  # NaN or infinity, where a number was due
        return "not finite", f"{tally.bound:.1e}" if np.isfinite(tally.bound) else "", ""
    ratio = f"{100 * tally.ratio:.0f} %"
    if not tally.ratio < 10:
        ratio = f"{tally.ratio:.2g} ×" if np.isfinite(tally.ratio) else ""
    return f"{tally.error:.1e}", f"{tally.bound:.1e}", ratio


def problem_line(failure: Failure) -> str:
    """Return what is wrong, in one line."""
    judged = failure.judged
    if judged.problem:
        return judged.problem
    near = judged.closeness
    assert near is not None
    times = f"{near.ratio:.3g} times what is allowed" if np.isfinite(near.ratio) else "unbounded"
    return f"{failure.name} is off by {near.error:.2e} relative, {times}"


def failure_text(failure: Failure) -> str:
    """Return one failure in words: what, the case, the first wrong element, hints, the command."""
    lines = [f"FAIL {failure.where} ({failure.dtype}): {problem_line(failure)}"]
    if failure.kind != LEANS:
        lines.append(f"  smallest case: {failure.case.describe()}")
        lines += [f"    {line}" for line in small_arrays(failure.case)]
    judged = failure.judged
    if (
        judged.got is not None
        and judged.exact is not None
        and judged.got.shape == judged.exact.shape
    ):
        lines.append(f"  {first_difference(failure.name, judged.got, judged.exact)}")
        if 1 < judged.exact.size <= 12:
            with np.printoptions(nanstr="nan" if judged.unknown is None else "?"):
                lines.append(f"    expected {_numbers(judged.known)}")
            lines.append(f"    got      {_numbers(judged.got)}")
    if failure.also:
        lines.append(f"  wrong in the same case: {', '.join(failure.also)}")
    lines += [f"  hint: {hint}" for hint in failure.hints]
    if failure.file:
        lines.append(f"  saved: {failure.file}")
    if failure.rerun:
        lines.append(f"  again: {failure.rerun}")
    return "\n".join(lines)


def small_arrays(case: Case) -> list[str]:
    """Return the inputs of a case that are short enough to read."""
    given: dict[str, Any] = {
        n: a for n, a in case.arrays.items() if a is not None and not n.startswith("params.")
    }
    if case.cotangent is not None and not isinstance(case.cotangent, tuple):
        given["dout"] = np.asarray(case.cotangent)
    return [f"{name} = {_numbers(a)}" for name, a in given.items() if a.size <= 8]


def _numbers(a: Any) -> str:
    return np.array2string(a, precision=6, separator=", ", max_line_width=200).replace("\n", "")


def first_difference(name: str, got: Array, exact: Array) -> str:
    """Name the first element that differs by more than a hundredth of the largest difference."""
    g, e = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    with np.errstate(invalid="ignore"):  # where both are infinite
        off = np.where((g == e) | (np.isnan(g) & np.isnan(e)), 0, np.abs(g - e))
    off = np.where(np.isnan(off), np.inf, off)
    top = float(off.max(initial=0.0))
    if top == 0:
        return f"every element of {name} has the right value"
    at = np.argwhere(off >= (top / 100 if np.isfinite(top) else np.inf))[0]
    given, due = g[tuple(at)], e[tuple(at)]
    return f"first difference: {element(name, at)} is {given:.9g}, should be {due:.9g}"
