"""The threads: one number governs all of the project's own parallelism.

It comes from ``set_threads``, else ``$MYLLM_THREADS``, else the processor cores this process may
use, divided among the ranks that MPI started on this machine. A step takes fewer while other
processes want the cores (``sharing``).
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba.core import config
from numba.np.ufunc import parallel

from accel import launcher, system, waiting

MOST = 1024  # threads that a caller may ask for

_threads: int | None = None
_pool_started = False
_whole = 0  # threads that take part where nobody else wants cores; 0 outside of ``sharing``


def available_cores() -> int:
    """Return how many processor cores this process may run on; NUMBA_NUM_THREADS may say fewer."""
    cores = system.cores()
    if "NUMBA_NUM_THREADS" in os.environ:  # Numba's pool is never larger than what it read there
        cores = min(cores, int(config.NUMBA_NUM_THREADS))
    return cores


def threads() -> int:
    """Return the number of threads that parallel kernels and pools of this process use.

    Raises
    ------
    ValueError
        If ``$MYLLM_THREADS`` is not a number from 1 to the cores available.
    """
    if _threads is not None:
        return _threads
    cores = available_cores()
    if os.environ.get("MYLLM_THREADS"):
        return _checked("MYLLM_THREADS", launcher.number("MYLLM_THREADS"))
    if cores < (os.cpu_count() or 1):
        return cores  # the launcher has bound this rank to cores of its own
    return max(1, cores // launcher.local_size())


def asked_for(n: int | None) -> int:
    """Return how many threads to use where a caller may name a number.

    Raises
    ------
    ValueError
        If it is not from 1 to ``MOST``.
    """
    if n is None:
        return threads()
    if not 1 <= n <= MOST:
        raise ValueError(f"the number of threads must be 1 to {MOST}, got {n}")
    return n


def set_threads(n: int) -> None:
    """Let parallel kernels and pools of this process use ``n`` threads.

    Numba keeps its number for each thread of Python: kernels that another thread than the caller's
    starts use all cores, unless ``$NUMBA_NUM_THREADS`` says fewer.

    Raises
    ------
    ValueError
        If ``n`` is not a number from 1 to the cores available.
    """
    global _threads
    _threads = _checked("threads", n)
    if _pool_started:
        numba.set_num_threads(_threads)


def _checked(name: str, value: object) -> int:
    cores = available_cores()
    if not isinstance(value, int) or not 1 <= value <= cores:
        raise ValueError(
            f"{name} must be a number from 1 to {cores}, the cores here, got {value!r:.40}"
        )
    return value


def team() -> int:
    """Return on how many threads a parallel kernel runs that is called now, from this one."""
    ready_pool()
    return int(parallel._get_num_threads())  # the public one takes seven times as long


@contextmanager
def sharing() -> Iterator[None]:
    """Let kernels that are called within leave cores to others who want them (``waiting.fair``)."""
    global _whole
    if not _pool_started:
        yield
        return
    before, asked = parallel._get_num_threads(), _threads
    parallel._set_num_threads(waiting.fair(before))
    _whole = before
    try:
        yield
    finally:
        _whole = 0
        if _threads == asked:  # else the user has said anew how many
            parallel._set_num_threads(before)


def most() -> int:
    """Return on how many threads a parallel kernel might run that is called now.

    With those that ``sharing`` leaves out: memory for each thread is the same so in every step.
    """
    return max(team(), _whole)


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function's kernels run in the caller's thread, and in no other.

    Waking threads and waiting for them takes microseconds, and milliseconds where another process
    has their core. The bits do not depend on it. (Numba's own functions, behind the public ones
    that check their argument, since those take as long as the kernels that this is for.)
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        ready_pool()
        others = parallel._get_num_threads()
        parallel._set_num_threads(1)
        try:
            return function(*arguments, **options)
        finally:
            parallel._set_num_threads(others)

    return call


def ready_pool() -> None:
    """Tell Numba's pool the number of threads, before the first parallel kernel starts it.

    And how long they wait for work before they sleep (``waiting.py``).
    """
    global _pool_started
    if not _pool_started:
        with waiting.chosen():
            numba.set_num_threads(threads())
        _pool_started = True
