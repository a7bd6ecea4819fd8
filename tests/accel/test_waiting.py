"""How long threads wait awake: long where cores are free, briefly where others want them."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accel import load, system, waiting
from accel.cpu.kernels import scratch
from accel.threads import available_cores, most, set_threads, team, threads
from tests.helpers import ROOT, forked

counted = pytest.mark.skipif(system.starved() is None, reason="Linux alone counts it")


@counted
def test_threads_that_want_more_cores_than_there_are_starve() -> None:
    code = """
import threading, time
from accel import system
import numpy as np
x = np.ones(1 << 20, np.float32)

def work():
    while not over.is_set():
        np.exp(x)

before, start, over = system.starved(), time.monotonic(), threading.Event()
time.sleep(0.2)
print((system.starved() - before) / (time.monotonic() - start))
workers = [threading.Thread(target=work) for _ in range(system.cores() + 1)]
for worker in workers:
    worker.start()
before, start = system.starved(), time.monotonic()
time.sleep(1)
print((system.starved() - before) / (time.monotonic() - start))
over.set()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    idle, wanted = map(float, done.stdout.split())
    assert idle < waiting.BUSY < wanted, done.stderr


def test_a_second_team_is_there_while_threads_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    teams: list[tuple[int, threading.Thread]] = []
    made = threading.Event()

    def parallel(function: Any, argument: None, threads: int, flags: int) -> None:
        teams.append((threads, threading.current_thread()))
        made.set()

    now = [0.0, 0.0]
    monkeypatch.setattr(system, "starved", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[1])
    watch = waiting.Watch(parallel)

    def look(share: float) -> None:
        now[0] += share * 2
        now[1] += 2
        watch.look()

    look(waiting.BUSY / 2)
    assert not teams
    look(waiting.BUSY * 2)
    look(waiting.BUSY * 2)
    assert made.wait(60)
    ((threads, first),) = teams
    assert threads > system.cores() and first.is_alive()
    look(0)
    first.join(60)
    assert not first.is_alive() and len(teams) == 1
    made.clear()
    look(1)
    assert made.wait(60)
    assert len(teams) == 2 and teams[1][1].is_alive()
    look(-1)  # a thread that had starved has ended
    teams[1][1].join(60)
    assert not teams[1][1].is_alive()
    # and as long as threads are left out, which may be why none starves
    monkeypatch.setattr(system, "cores", lambda: 2)
    made.clear()
    assert watch.fair(2) == 2
    look(0)  # how many took part has changed meanwhile
    look(1)
    assert made.wait(60) and watch.fair(2) == 1
    look(0)
    look(0)
    assert watch.fair(2) == 1
    teams[2][1].join(0.1)
    assert teams[2][1].is_alive()
    now[1] += 1000
    look(0)
    teams[2][1].join(60)
    assert not teams[2][1].is_alive() and watch.fair(2) == 2


TICK = 0.01  # seconds


def beside(
    others: list[float],
    cores: int,
    step: float,
    monkeypatch: pytest.MonkeyPatch,
    starving: Callable[[int, float, int], float] = lambda n, others, cores: (
        n - n * cores / (n + others)
    ),
) -> list[list[int]]:
    """Return how many threads take part at each time of each second.

    Parameters
    ----------
    others : list of float
        Threads of others that want a core in each second.
    step : float
        Seconds that one thread would need for a step.
    starving : callable
        (n, others, cores) -> seconds without a core in a second, of n threads together.
    """
    now = [0.0, 0.0]
    monkeypatch.setattr(system, "starved", lambda: now[0])
    monkeypatch.setattr(system, "cores", lambda: cores)
    monkeypatch.setattr(time, "monotonic", lambda: now[1])
    watch = waiting.Watch(lambda *arguments: None)
    seconds: list[list[int]] = []
    left, ticks = 0.0, 0
    for wanted in others:
        seconds.append([])
        for _ in range(round(1 / TICK)):
            if left <= 0:
                n, left = watch.fair(cores), step
            seconds[-1].append(n)
            starved = max(0.0, starving(n, wanted, cores)) * TICK
            left -= n * TICK - starved
            now[0] += starved
            now[1] += TICK
            ticks += 1
            if ticks % round(waiting.PERIOD / TICK) == 0:
                watch.look()
    return seconds


@pytest.mark.parametrize("step", [0.05, 0.7, 1.9, 8.0])
@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(1, 3, 1), (2, 0.3, 2), (2, 1, 1), (2, 2, 1), (8, 0.1, 8), (8, 1, 7), (8, 3, 6), (8, 8, 4)],
)
def test_as_many_threads_take_part_as_a_fair_share_of_the_cores_comes_to(
    cores: int, others: float, threads: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = 200
    seconds = beside([0.0, 0.0] + [others] * long + [0.0] * long, cores, step, monkeypatch)
    assert {*seconds[0], *seconds[1]} == {cores}
    alone = int(step) + 2  # seconds of a step of one thread, and more
    among = [n for second in seconds[2 + 2 * alone : 2 + long] for n in second]
    # but for the steps in which all look whether others are still there
    assert set(among) <= {threads, cores} and among.count(threads) >= 0.85 * len(among)
    assert {*seconds[-1]} == {cores}  # when they have gone


def test_two_threads_that_share_one_core_of_two_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may leave the other core to somebody else for long."""

    def starving(n: int, others: float, cores: int) -> float:
        return others * (n - 1) * 0.5

    seconds = beside([1.0] * 10, 2, 0.05, monkeypatch, starving)
    assert {*seconds[2]} == {1}


def test_what_was_wanted_before_a_pause_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """While several processes compile kernels, nobody asks how many take part in a step."""
    now = [0.0, 0.0]
    monkeypatch.setattr(system, "starved", lambda: now[0])
    monkeypatch.setattr(system, "cores", lambda: 2)
    monkeypatch.setattr(time, "monotonic", lambda: now[1])
    watch = waiting.Watch(lambda *arguments: None)
    for pause in (30.0, 0.1, 0.1, 30.0):
        for _ in range(8):
            now[0] += 0.25
            now[1] += 0.25
            watch.look()
        now[1] += pause
        assert watch.fair(2) == (2 if pause > 1 else 1)


def test_it_goes_on_looking_where_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Over(Exception):
        pass

    looks: Iterator[float | Exception] = iter(
        [0.0, OSError(errno.EMFILE, "Too many open files"), 0.0, Over()]
    )

    def starved() -> float:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(system, "starved", starved)
    monkeypatch.setattr(waiting, "PERIOD", 0.01)
    with pytest.raises(Over):
        waiting.Watch(lambda *arguments: None).run()


@pytest.mark.skipif(available_cores() < 2, reason="one core has one thread")
def test_a_step_leaves_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, before = load("cpu"), threads()
    monkeypatch.setattr(waiting, "fair", lambda n: n - 1)
    try:
        set_threads(2)
        assert team() == 2
        with ops.step():
            assert (team(), most()) == (1, 2)
            assert len(scratch(5, np.float32)) == 2  # the same in every step
            with ops.step():
                assert team() == 1
            assert team() == 1
        assert team() == most() == 2
        with ops.step():
            set_threads(1)
        assert team() == most() == 1
        set_threads(2)
        monkeypatch.setattr(waiting, "fair", lambda n: n)
        with ops.step():
            assert team() == 2
    finally:
        set_threads(before)


# prints Numba's pool, and by turns, where cores are free and where they are wanted: the threads
# of the process, the milliseconds of the processor that a kernel takes with the waiting behind it,
# and the threads that take part in a step
KERNELS = """
import os, time
import numba, numpy as np
from accel import load, system, waiting
from accel.threads import team

taken, wanted = 0, False

def starved():
    global taken
    taken += wanted
    return taken

system.starved, waiting.PERIOD, waiting.AGAIN, waiting.PAUSE = starved, 0.01, 0.1, 1e9
ops, x = load("cpu"), np.ones((1024, 64), np.float32)

def spent():
    start = time.process_time()
    for _ in range(10):
        ops.relu_forward(x)
        time.sleep(0.05)
    return 100 * (time.process_time() - start)

ops.relu_forward(x)
print(numba.threading_layer())
for wanted in (False, True, False, True):
    time.sleep(0.5)
    threads, taken_by_it = len(os.listdir("/proc/self/task")), spent()
    for _ in range(50):
        with ops.step():
            time.sleep(0.02)
    with ops.step():
        print(threads, taken_by_it, team())
"""


@counted
@pytest.mark.skipif(available_cores() < 2, reason="one core has one thread")
def test_openmp_s_threads_sleep_soon_while_cores_are_wanted() -> None:
    out = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    env = {name: value for name, value in os.environ.items() if name not in out}
    done = forked.run(forked.NUMBA, KERNELS, cwd=ROOT, env=env | {"MYLLM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    pool, *lines = done.stdout.splitlines()
    if pool != "omp":
        pytest.skip(f"Numba's pool is {pool} here, not OpenMP")
    free, wanted, free_again, wanted_again = (
        (int(threads), float(spent), int(part)) for threads, spent, part in map(str.split, lines)
    )
    assert (free[2], wanted[2], free_again[2], wanted_again[2]) == (2, 1, 2, 1)
    assert wanted[0] == wanted_again[0] == free[0] + 1 + system.cores()
    assert free_again[0] == free[0]
    assert 3 * max(wanted[1], wanted_again[1]) < min(free[1], free_again[1])
