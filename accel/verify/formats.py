"""Reports as files, for programs and for pages: JSON, JUnit's XML, Markdown."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from accel.verify.report import AnyReport, Report, cases_text, failure_text


def write_reports(path: Path, reports: Sequence[AnyReport]) -> None:
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


def format_of(path: Path) -> Callable[[Sequence[AnyReport]], str]:
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


def to_json(reports: Sequence[AnyReport]) -> str:
    return json.dumps([report.to_dict() for report in reports], indent=2) + "\n"


def to_junit(reports: Sequence[AnyReport]) -> str:
    """Return a test suite for each subject, with a test case for each of its tests."""
    root = ElementTree.Element("testsuites")
    for report in reports:
        subject, tests = _xml(report.subject), report.tests()
        outcomes = [test.outcome for test in tests]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"myllm verify {subject}",
            tests=str(len(tests)),
            failures=str(outcomes.count("failure")),
            errors=str(outcomes.count("error")),
            skipped=str(outcomes.count("skipped")),
            time=f"{sum(test.seconds for test in tests):.3f}",
        )
        for test in tests:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{subject}.{_xml(test.group)}" if test.group else subject,
                name=_xml(test.name),
                time=f"{test.seconds:.3f}",
            )
            if test.outcome:
                part = ElementTree.SubElement(case, test.outcome, message=_xml(test.says))
                part.text = _xml(test.text) or None
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n"


def _xml(text: str) -> str:
    """Return a text without the control characters that XML has not."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def to_markdown(reports: Sequence[AnyReport]) -> str:
    """Return a table for each subject, and every failure below it."""
    parts = []
    for report in reports:
        lines = [f"## {_markdown(report.subject)}: {_markdown(report.verdict)}", ""]
        if report.error:
            lines.append(_fenced(report.error))
        else:
            lines += _closeness(report) if isinstance(report, Report) else _tests(report)
        parts.append("\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def _closeness(report: Report) -> list[str]:
    """Return how close each result of each op came, what was not tried, and all failures."""
    cases = f"{report.cases} case{'s' * (report.cases != 1)}"
    lines = [
        f"{cases}." if report.seed is None else f"{cases}, seed {report.seed}.",
        "",
        "| op | dtype | cases | result | error | allowed | verdict |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]
    for op in report.ops:
        head = f"| {_markdown(op.op)} | {op.dtype} | {cases_text(op)}"
        if op.not_offered:
            lines.append(f"{head} | | | | not offered |")
        if op.error:
            lines.append(f"{head} | | | | **not checked** |")
        for failure in op.failures:
            if not failure.name:
                lines.append(f"{head} | | | | **FAIL** {failure.kind} |")
        for name, tally in op.results.items():
            verdict = f"**FAIL** in {tally.failed}" if tally.failed else "ok"
            error = f"{tally.error:.1e}" if np.isfinite(tally.error) else "not finite"
            bound = f"{tally.bound:.1e}" if np.isfinite(tally.bound) else ""
            lines.append(f"{head} | {_markdown(name)} | {error} | {bound} | {verdict} |")
    lines += ["", *(f"- not checked: {_markdown(says)}" for says in report.errors)]
    lines += [f"- not tried: {_markdown(sentence)}" for sentence in report.untried]
    for failure in report.failures:
        lines += ["", f"### {_markdown(failure.where)} ({failure.dtype})", ""]
        lines.append(_fenced(failure_text(failure)))
    return lines


def _tests(report: AnyReport) -> list[str]:
    """Return what came of each test, and all failures."""
    lines, below = ["| test | verdict |", "| --- | --- |"], list[str]()
    for test in report.tests():
        name = _markdown(f"{test.group} {test.name}".strip())
        verdict = _markdown(test.says) or "ok"
        lines.append(f"| {name} | {f'**{verdict}**' if test.outcome == 'failure' else verdict} |")
        if test.text:
            below += ["", f"### {name}", "", _fenced(test.text)]
    return lines + below


def _markdown(text: str) -> str:
    """Return a text as Markdown that shows it as it is, in one line."""
    return re.sub(r"([\\`*_\[\]<>|~&$#])", r"\\\1", " ".join(text.split()))


def _fenced(text: str) -> str:
    """Return a text as a block of Markdown, between fences longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


FORMATS = {".json": to_json, ".xml": to_junit, ".md": to_markdown}
