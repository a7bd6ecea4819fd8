"""Reports as files, for programs and for pages: JSON, JUnit's XML, Markdown."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from accel.verify.report import Report, cases_text, failure_text, problem_line
from accel.verify.search import Failure, OpReport


def write_reports(path: Path, reports: Sequence[Report]) -> None:
    """Write reports in the format that a file's name ends in.

    Raises
    ------
    ValueError
        When there is no such format, or the file cannot be written.
    """
    text = format_of(path)(reports)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the report cannot be written to {path}: {error.strerror}") from None


def format_of(path: Path) -> Callable[[Sequence[Report]], str]:
    """Return what makes the text of a report file.

    Raises
    ------
    ValueError
        When there is no such format.
    """
    try:
        return FORMATS[path.suffix]
    except KeyError:
        raise ValueError(
            f"a report ends in {', '.join(FORMATS)} (JSON, JUnit, Markdown), but {path} does not"
        ) from None


def to_json(reports: Sequence[Report]) -> str:
    return json.dumps([report.to_dict() for report in reports], indent=2) + "\n"


def to_junit(reports: Sequence[Report]) -> str:
    """Return a test suite for each subject, with a test case for each op, precision, direction."""
    root = ElementTree.Element("testsuites")
    for report in reports:
        subject = _xml(report.subject)
        suite = ElementTree.SubElement(root, "testsuite", name=f"myllm verify {subject}")
        tests = failed = skipped = 0
        if report.error:
            tests += 1
            case = ElementTree.SubElement(
                suite, "testcase", classname=subject, name="can be checked", time="0"
            )
            ElementTree.SubElement(case, "error", message=_xml(report.error))
        for op in report.ops:
            for direction, failures in by_direction(op).items():
                tests += 1
                case = ElementTree.SubElement(
                    suite,
                    "testcase",
                    classname=f"{subject}.{op.op}",
                    name=f"{op.dtype}-{direction}",
                    time=f"{op.seconds / len(by_direction(op)):.3f}",
                )
                if op.not_offered:
                    skipped += 1
                    ElementTree.SubElement(case, "skipped", message=_xml(op.not_offered))
                if failures:
                    failed += 1
                    lines = "; ".join(problem_line(failure) for failure in failures)
                    text = "\n\n".join(failure_text(failure) for failure in failures)
                    ElementTree.SubElement(case, "failure", message=_xml(lines)).text = _xml(text)
        if report.untried:
            tests += 1
            case = ElementTree.SubElement(
                suite, "testcase", classname=subject, name="all was tried", time="0"
            )
            kind = "skipped" if report.partial else "failure"
            skipped, failed = skipped + report.partial, failed + (not report.partial)
            ElementTree.SubElement(case, kind, message=_xml("; ".join(report.untried)))
        suite.set("tests", str(tests))
        suite.set("failures", str(failed))
        suite.set("errors", str(int(bool(report.error))))
        suite.set("skipped", str(skipped))
        suite.set("time", f"{sum(op.seconds for op in report.ops):.3f}")
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n"


def _xml(text: str) -> str:
    """Return a text without the control characters that XML has not."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def by_direction(op: OpReport) -> dict[str, list[Failure]]:
    """Return the failures of an op's forward, and of its backward where one was called."""
    found: dict[str, list[Failure]] = {"forward": []}
    for failure in op.failures:
        found.setdefault(failure.direction, []).append(failure)
    if op.backward:
        found.setdefault("backward", [])
    return found


def to_markdown(reports: Sequence[Report]) -> str:
    """Return a table for each subject, and every failure below it."""
    parts = []
    for report in reports:
        head = f"## {_markdown(report.subject)}: {report.verdict}"
        if report.error:
            parts.append(f"{head}\n\n{_fenced(report.error)}\n")
            continue
        cases = f"{report.cases} case{'s' * (report.cases != 1)}"
        lines = [
            head,
            "",
            f"{cases}." if report.seed is None else f"{cases}, seed {report.seed}.",
            "",
            "| op | dtype | cases | result | error | allowed | verdict |",
            "| --- | --- | ---: | --- | ---: | ---: | --- |",
        ]
        for op in report.ops:
            head = f"| {_markdown(op.op)} | {op.dtype} | {cases_text(op)}"
            if op.not_offered:
                lines.append(f"{head} | | | | not offered |")
            for failure in op.failures:
                if not failure.name:
                    lines.append(f"{head} | | | | **FAIL** {failure.kind} |")
            for name, tally in op.results.items():
                verdict = f"**FAIL** in {tally.failed}" if tally.failed else "ok"
                error = f"{tally.error:.1e}" if np.isfinite(tally.error) else "not finite"
                bound = f"{tally.bound:.1e}" if np.isfinite(tally.bound) else ""
                lines.append(f"{head} | {_markdown(name)} | {error} | {bound} | {verdict} |")
        lines += ["", *(f"- not tried: {_markdown(sentence)}" for sentence in report.untried)]
        for failure in report.failures:
            lines += ["", f"### {_markdown(failure.where)} ({failure.dtype})", ""]
            lines.append(_fenced(failure_text(failure)))
        parts.append("\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def _markdown(text: str) -> str:
    """Return a text as Markdown that shows it as it is, in one line."""
    return re.sub(r"([\\`*_\[\]<>|~&$#])", r"\\\1", " ".join(text.split()))


def _fenced(text: str) -> str:
    """Return a text as a block of Markdown, between fences longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


FORMATS = {".json": to_json, ".xml": to_junit, ".md": to_markdown}
