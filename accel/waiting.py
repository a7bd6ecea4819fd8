"""How long a thread that waits for the others of a kernel stays awake, and how many take part.

GNU's OpenMP turns in a loop for so many times (``$GOMP_SPINCOUNT``) and then sleeps. To wake a
thread takes longer than most pauses between kernels: where threads sleep early, a step of a small
model takes up to 15 % longer. But where another process wants the core, every kernel waits for a
thread that only turns, and a step takes many times as long. So this looks which of the two it is:
four times a second it asks for how long threads of this process were ready to run and had no core.

And while others want cores, no more threads take part than a fair share of the cores comes to: of
T threads beside k others on N cores, T N/(T + k). One thread fewer is faster than a kernel that
waits for a thread that shares its core. As T of them want to run all the time, and have N/(T + k)
of a core each, their waiting says what k is (threads of this process that are no kernel's count
among the others, or more). Fewer threads, which wait for nothing, do not notice when the others
have gone; so now and then all take part again.

OpenMP reads its environment once. But where a process has more OpenMP threads than there are cores,
it lets them turn 1,000 times at most, if ``$OMP_WAIT_POLICY`` is active (libgomp's manual,
GOMP_SPINCOUNT). So a thread of Python has a second team made, which does nothing, and keeps it for
as long as cores are wanted elsewhere.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba

from accel import system

LONG = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}  # turns: GNU's, some milliseconds
BRIEF = {"GOMP_SPINCOUNT": "2000"}  # where nobody looks: some tens of microseconds
BUSY = 0.1  # of a second without a core, in a second
PERIOD = 0.25  # seconds
AGAIN = 5.0  # seconds after which all threads take part, to see whether the others are still there,
RARELY = 20  # or so many steps, if these take longer
PAUSE = 1.0  # seconds, at least, behind which steps begin with all threads

_watch: "Watch | None" = None


def fair(n: int) -> int:
    """Return how many of ``n`` threads shall take part in what begins now."""
    return n if _watch is None else _watch.fair(n)


@contextlib.contextmanager
def chosen() -> Iterator[None]:
    """Let the threads of the pool that is started within wait so; what the user has said stays."""
    global _watch
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        yield
        return
    watched = system.starved() is not None
    own = LONG if watched else BRIEF
    os.environ |= own
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]  # other processes choose for themselves
    if watched and numba.threading_layer() == "omp":
        pool = ctypes.CDLL(sys.modules["numba.np.ufunc.omppool"].__file__)
        if hasattr(pool, "GOMP_parallel"):  # else it is not GNU's, and has heard nothing
            _watch = Watch(pool.GOMP_parallel)
            threading.Thread(target=_watch.run, daemon=True, name="watch").start()


class Watch:
    """Sees how much others want of the cores, and lets OpenMP's threads wait briefly meanwhile.

    Parameters
    ----------
    parallel : callable
        OpenMP's ``GOMP_parallel(function, argument, threads, flags)``.
    """

    def __init__(self, parallel: Callable[..., Any]) -> None:
        self._parallel = parallel
        self._crowd: threading.Event | None = None  # set to let the second team go
        self._all = self._some = 1  # threads that may take part, and that do
        self._begun = time.monotonic()
        self._lasts = 0.0  # seconds from when threads took part to when they do anew: a step
        self._changed = False  # how many take part, since this looked
        self._others = 0.0  # threads of others that want a core
        self._seen = 0.0  # when so many were seen, in seconds
        self._before = self._now()

    def fair(self, n: int) -> int:
        """Return how many of ``n`` threads shall take part in a step that begins now.

        One that would have to share its core for most of the time does not.
        """
        cores, now = system.cores(), time.monotonic()
        lasted, self._begun = now - self._begun, now
        if lasted > max(PAUSE, 3 * self._lasts):
            self._others = 0.0  # what was seen was not seen of steps: kernels were compiled, say
        self._lasts = lasted
        some = max(1, int(min(n, n * cores / (n + self._others)) + 0.4))
        self._changed |= some != self._some
        self._all, self._some = n, some
        return some

    def run(self) -> None:
        """Look for ever."""
        while True:
            time.sleep(PERIOD)
            with contextlib.suppress(OSError):  # too many files are open, say: later, then
                self.look()

    def look(self) -> None:
        """See what others want; make the second team, or let it go."""
        (starved, then), self._before = self._before, self._now()
        waited = (self._before[0] - starved) / (self._before[1] - then)  # all threads, in a second
        busy, n, now = waited > BUSY, self._some, self._before[1]
        if self._changed:  # they took part in a part of that time
            self._changed = False
        elif busy or n == self._all:
            each = max(1 - waited / n, 0.1)  # of a core
            self._others = max(0.0, system.cores() / each - n) if busy else 0.0
            self._seen = now
        elif now - self._seen > max(AGAIN, RARELY * self._lasts):
            self._others = 0.0
        if busy and self._crowd is None:
            self._crowd = threading.Event()
            crowd = threading.Thread(target=self._stay, args=(self._crowd,), daemon=True)
            crowd.start()
        elif not busy and not self._others and self._crowd is not None:
            self._crowd.set()
            self._crowd = None

    def _stay(self, over: threading.Event) -> None:
        """Be more threads than there are cores. They end with the one that had them made."""
        self._parallel(ctypes.CDLL(None).getpid, None, system.cores() + 1, 0)
        over.wait()

    @staticmethod
    def _now() -> tuple[float, float]:
        return system.starved() or 0.0, time.monotonic()
