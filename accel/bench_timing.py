"""Two functions timed side by side on a machine that is not quiet, and compared before.

Every comparison alternates between the two, ours first in one round and last in the next, and
takes medians; a sample during which the process waited for a core is left out where enough others
remain.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Function = Callable[[], object]

CLEAN = 0.03  # of a sample's time, spent waiting for a core, makes it unfit
quick = False  # set by --quick: two samples of everything, to see that all runs


def waited() -> float:
    """Return the seconds that this process's threads have waited for a core, where Linux tells."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, IndexError):  # the thread has ended meanwhile
            continue
    return total * 1e-9


def alternate(
    functions: Mapping[str, Function], *, sample: float = 0.05, want: int = 9, budget: float = 20.0
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
    """
    if quick:
        sample, want, budget = 0.0, 2, 0.0
    calls: dict[str, int] = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        calls[name] = max(1, int(sample / max(time.perf_counter() - start, 1e-7)))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for turn in range(10_000):
        for name in list(functions) if turn % 2 == 0 else list(functions)[::-1]:
            function = functions[name]
            function()  # the caches, and the other library's spinning threads, settle
            waiting, start = waited(), time.perf_counter()
            for _ in range(calls[name]):
                function()
            seconds = time.perf_counter() - start
            samples[name].append((seconds / calls[name], (waited() - waiting) / seconds))
            time.sleep(0.01)
        clean = min(sum(share < CLEAN for _, share in s) for s in samples.values())
        if clean >= want or (time.perf_counter() - begin > budget and turn >= (1 if quick else 4)):
            break
    return {name: _median(s) for name, s in samples.items()}


def _median(samples: list[tuple[float, float]]) -> float:
    clean = [seconds for seconds, share in samples if share < CLEAN]
    if len(clean) < 3:  # no sample was clean: those that waited least
        clean = [seconds for seconds, _ in sorted(samples, key=lambda s: s[1])[:3]]
    return statistics.median(clean)


def relative_error(a: Array, b: Array) -> float:
    """Return ‖a - b‖ / ‖b‖."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


def check(what: str, error: float, limit: float) -> None:
    """Raise when a result that is about to be timed is wrong."""
    if not error <= limit:
        raise ValueError(f"bench: {what} differs from PyTorch's by {error:.1e}, above {limit:.0e}")
