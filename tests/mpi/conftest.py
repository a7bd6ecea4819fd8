"""A test that fails leaves no run behind."""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.helpers.processes import STARTED, of_run


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """End what a failed test has started: ranks that train for ever slow down all that follows."""
    yield
    while STARTED:
        for process in of_run(STARTED.pop()).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
