"""How the benchmarks take times, on a machine that is not quiet, and compare results before.

Whatever is compared alternates, ours first in one round and last in the next, and medians are
taken. A sample during which the process waited for a core is left out where enough others remain.
"""

import cProfile
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np

from accel.system import starved
from accel.threads import set_threads, threads
from reference.ops import Ops
from reference.types import Array

Function = Callable[[], object]
T = TypeVar("T")

CLEAN = 0.03  # of a sample's time, spent waiting for a core, makes it unfit


def rounds(functions: Mapping[str, Callable[[], T]], n: int) -> Iterator[dict[str, T]]:
    """Call every function once a round, in the other order every second time; yield the results."""
    for turn in range(n):
        yield {name: functions[name]() for name in list(functions)[:: -1 if turn % 2 else 1]}


def medians(
    functions: Mapping[str, Function], n: int, clock: Callable[[Function], float]
) -> dict[str, float]:
    """Return the median seconds of each function over n rounds, by a clock that times one call."""
    taken = list(rounds({name: partial(clock, call) for name, call in functions.items()}, n))
    return {name: statistics.median(times[name] for times in taken) for name in functions}


def clocked(call: Function) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(
    functions: Mapping[str, Function],
    *,
    sample: float = 0.05,
    want: int = 9,
    budget: float = 20.0,
    quick: bool = False,
) -> dict[str, float]:
    """Return the median seconds of one call of each function.

    Parameters
    ----------
    sample : float
        Seconds that one sample shall last, at least; short functions are called often enough.
    want : int
        Clean samples of each that end the measurement.
    budget : float
        Seconds after which it ends in any case.
    quick : bool
        Take two samples of each, to see that all runs.
    """
    if quick:
        sample, want, budget = 0.0, 2, 0.0
    calls: dict[str, int] = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        calls[name] = max(1, int(sample / max(time.perf_counter() - start, 1e-7)))

    def take(name: str) -> tuple[float, float]:
        """Return the seconds of a call, and the share of the time spent waiting."""
        function = functions[name]
        function()  # the caches, and the other library's spinning threads, settle
        waiting, start = starved() or 0.0, time.perf_counter()
        for _ in range(calls[name]):
            function()
        seconds = time.perf_counter() - start
        taken = seconds / calls[name], ((starved() or 0.0) - waiting) / seconds
        time.sleep(0.01)
        return taken

    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for turn, taken in enumerate(rounds({name: partial(take, name) for name in calls}, 10_000)):
        for name, one in taken.items():
            samples[name].append(one)
        clean = min(sum(share < CLEAN for _, share in s) for s in samples.values())
        if clean >= want or (time.perf_counter() - begin > budget and turn >= (1 if quick else 4)):
            break
    return {name: _median(s) for name, s in samples.items()}


def _median(samples: list[tuple[float, float]]) -> float:
    clean = [seconds for seconds, share in samples if share < CLEAN]
    if len(clean) < 3:  # no sample was clean: those that waited least
        clean = [seconds for seconds, _ in sorted(samples, key=lambda s: s[1])[:3]]
    return statistics.median(clean)


@contextmanager
def settled(ops: Ops, call: Callable[[], object]) -> Iterator[None]:
    """Open a step behind one that made the same call, as the steps of a training are.

    The first that is as large gives memory back to the system, and would be timed with the page
    faults that follow. All threads take part, also where others want cores.
    """
    with ops.step():
        call()
    with ops.step():
        set_threads(threads())
        yield


def within(call: Function, *functions: Callable[..., object]) -> tuple[float, float]:
    """Return the seconds that a call spends in the Python functions given, and all its seconds."""
    codes = {inspect.unwrap(function).__code__: function for function in functions}
    profile = cProfile.Profile(builtins=False)
    start = time.perf_counter()
    profile.runcall(call)
    whole = time.perf_counter() - start
    found = {entry.code: entry.totaltime for entry in profile.getstats() if entry.code in codes}
    for code, function in codes.items():
        if code not in found:
            raise ValueError(f"{function.__qualname__} was not called: no share can be taken")
    return sum(found.values()), whole


def relative_error(a: Array, b: Array) -> float:
    """Return ‖a - b‖ / ‖b‖."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


def check(what: str, error: float, limit: float, whose: str = "PyTorch's") -> None:
    """Raise when a result that is about to be timed is wrong."""
    if not error <= limit:
        raise ValueError(
            f"{what} differs from {whose} by {error:.1e}, above {limit:.0e}: the times would mean "
            "nothing"
        )
