"""How speed grows with cores: ``myllm bench cpu --scaling``.

Threads: a training step and the main ops on 1, 2, 4, … and all cores, alternating in one process.
Ranks × threads: as many processes with as many threads each as make all cores, each taking steps of
its own at the same time. They exchange nothing: ``myllm bench train`` times ranks that do.

``python -m accel.bench.scaling MODE THREADS SECONDS`` is one such process. It says ``ready``, waits
for a line, and prints the tokens that it trained on in a second.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from accel import load
from accel.bench.bandwidth import ADAMW_BYTES
from accel.bench.cases import attention
from accel.bench.report import Row
from accel.bench.timing import Function, alternate
from accel.bench.training import PARAMETERS, SMALL, Training, adamw, adamw_state
from accel.threads import available_cores, set_threads, threads
from reference.ops import Ops

BATCH, LENGTH = 8, 512
SECONDS = 10.0  # that ranks train beside each other


class Work(NamedTuple):
    """What is timed with several numbers of threads."""

    what: str
    amount: float  # of one call
    unit: str
    call: Function


def counts(cores: int) -> list[int]:
    """Return 1, 2, 4, … and all cores."""
    return sorted({*(2**i for i in range(cores.bit_length())), cores})


def divisions(cores: int) -> list[tuple[int, int]]:
    """Return the (ranks, threads) that make all cores; ranks are a power of two, as in training."""
    ranks = (2**i for i in range(cores.bit_length()))
    return [(n, cores // n) for n in ranks if cores % n == 0]


def step_work(mode: str) -> Work:
    """Return a training step."""
    model = Training(load("cpu", compute=mode), SMALL, BATCH, LENGTH)
    return Work(f"a step, 12.6 M, T = {LENGTH}, {mode}", BATCH * LENGTH, "tokens/s", model.step)


def op_works(ops: Ops) -> Iterator[Work]:
    """Yield what a step is made of: products, attention, the head with the loss, and a pass."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    rows, width, wide, vocabulary = BATCH * LENGTH, 384, 2048, 8192
    x, weight, dout = normal(rows, width), normal(width, wide), normal(rows, wide)

    def linear() -> None:
        _, cache = ops.linear_forward(x, weight, None)
        ops.linear_backward(dout, cache)

    product = 2e-9 * rows * width * wide
    yield Work(f"linear, ({rows}, {width}, {wide})", 3 * product, "GFLOP/s", linear)
    case = attention(2048, 2, "float32")
    # scores and values forward, five products backward, half of them unseen
    work = 7 * 2e-9 * 2 * 8 * 2048 * 2048 * 64 / 2
    yield Work("attention, T = 2048", work, "GFLOP/s", partial(case.run, ops))
    head, targets = normal(vocabulary, width), rng.integers(0, vocabulary, rows).astype(np.int32)
    loss = partial(ops.linear_cross_entropy_forward, x, head, targets)
    work = 3 * 2e-9 * rows * width * vocabulary
    yield Work(f"head and loss, ({rows}, {width}), V = {vocabulary}", work, "GFLOP/s", loss)
    work = 1e-9 * ADAMW_BYTES * PARAMETERS
    yield Work("adamw, 12.6 M", work, "GB/s", adamw(ops, adamw_state()))


def rows(modes: list[str], *, quick: bool) -> Iterator[Row]:
    """Yield the speed of each work on each number of threads, then that of ranks × threads."""
    before = threads()
    makers: list[Callable[[], Work]] = [partial(step_work, mode) for mode in modes]
    ops = load("cpu")
    try:
        for make in makers:
            yield from _threads(make(), quick=quick)
        with ops.step():
            for work in op_works(ops):
                yield from _threads(work, quick=quick)
    finally:
        set_threads(before)
    for mode in modes:
        first = None
        for ranks, each in divisions(available_cores()):
            speed = together(mode, ranks, each, 1.0 if quick else SECONDS)
            first = speed if first is None else first
            what = f"a step, 12.6 M, {mode}, {ranks} × {each} / 1 × {available_cores()}"
            yield Row(what, speed, first, None, "tokens/s", "ranks × threads, no exchange")


def _threads(work: Work, *, quick: bool) -> Iterator[Row]:
    """Yield the speed of a work on each number of threads, beside that of one."""

    def call(n: int) -> None:
        set_threads(n)
        work.call()

    every = counts(available_cores())
    functions: dict[str, Function] = {str(n): partial(call, n) for n in every}
    taken = alternate(functions, want=5, budget=60, quick=quick)
    one = work.amount / taken["1"]
    for n in every:
        speed = work.amount / taken[str(n)]
        note = f"{speed / one / n:.0%} of {n}"
        yield Row(f"{work.what}, {n} / 1 threads", speed, one, None, work.unit, note)


def together(mode: str, ranks: int, each: int, seconds: float) -> float:
    """Return the tokens a second of processes that train at the same time, summed.

    Raises
    ------
    ValueError
        When one of them fails.
    """
    words = ["-m", "accel.bench.scaling", mode, str(each), str(seconds)]
    pipe = subprocess.PIPE
    env = {**os.environ, "MYLLM_THREADS": str(each)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *words], stdin=pipe, stdout=pipe, encoding="utf-8", env=env
                )
            )
            for _ in range(ranks)
        ]
        for ask in ("ready", "tokens"):
            said = [process.stdout.readline().split() for process in processes if process.stdout]
            if not all(line[:1] == [ask] for line in said):
                raise ValueError(f"a rank of {ranks} × {each} threads ended before it had trained")
            for process in processes:
                if ask == "ready" and process.stdin:
                    print("go", file=process.stdin, flush=True)
    return sum(float(line[1]) for line in said)


def main(mode: str, each: str, seconds: str) -> None:
    """Be one of the processes."""
    set_threads(int(each))
    work = step_work(mode)
    work.call()
    print("ready", flush=True)
    sys.stdin.readline()
    start, calls = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < float(seconds) or not calls:
        work.call()
        calls += 1
    print("tokens", calls * work.amount / taken, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
