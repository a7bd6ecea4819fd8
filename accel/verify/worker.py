"""What a process of ``apart.py`` does: load the sources that come, do jobs on them, and tell.

A source has a ``name`` and a ``load()``; a job does itself, ``do(loaded, tell)``.
"""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

from accel.system import end_with_parent
from accel.verify.subject import SubjectError


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


def _no_terminal(*_: Any, **__: Any) -> None:
    raise EOFError("breakpoint() has no terminal here; check_case(FILE, MODULE) in Python has one")


def _serve(jobs: IO[bytes], tell: Callable[[str, Any], None]) -> None:
    """Load the sources that come, and do the jobs that come on the last of them."""
    loaded: Any = AssertionError("a job comes before a source")
    name = ""
    while True:
        given = pickle.load(jobs)
        source = hasattr(given, "load")
        try:
            if source:
                name = given.name
                loaded = given.load()
            elif isinstance(loaded, Exception):
                raise loaded
            else:
                tell("loaded", None)
                given.do(loaded, tell)
                tell("done", None)
        except Exception as error:
            if not isinstance(error, (SubjectError, ImportError)) and type(error) is not ValueError:
                error = SubjectError(f"{name}: the check itself failed\n{traceback.format_exc()}")
            if source:
                loaded = error  # told when a job comes
            else:
                tell("error", error)
