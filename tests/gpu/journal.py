"""A plugin of pytest that keeps what each test gave, passes over what is known, and stops in time.

``-p tests.gpu.journal``, told by the environment: GPU_JOURNAL is the file, GPU_UNTIL the second of
the clock after which no test begins. A test that began and never ended (the GPU hung, say) counts
as failed, so that the next run goes on behind it.
"""

import os
import time
from pathlib import Path

import pytest


def read(path: Path) -> dict[str, str]:
    """Return test -> its last word: began, passed, failed or skipped."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {test: word for word, _, test in (line.partition(" ") for line in lines)}


def _note(word: str, test: str) -> None:
    with Path(os.environ["GPU_JOURNAL"]).open("a", encoding="utf-8") as file:
        file.write(f"{word} {test}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what ended before, or broke off."""
    known = read(Path(os.environ["GPU_JOURNAL"]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins."""
    _note("began", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended: of its three parts the worst."""
    if report.outcome != "passed" or report.when == "teardown":
        known = read(Path(os.environ["GPU_JOURNAL"])).get(report.nodeid)
        if known not in ("failed", "skipped"):
            _note(report.outcome, report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):  # type: ignore[no-untyped-def]
    """Stop after a test behind which the time is up."""
    done = yield
    if time.time() > float(os.environ["GPU_UNTIL"]):
        item.session.shouldstop = "the time is up"
    return done
