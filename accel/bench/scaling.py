"""How speed grows with cores, and what is left of it beside others' work: ``myllm bench cpu``.

Threads (``--scaling``): a training step and the main ops on 1, 2, 4, … and all cores, alternating
in one process. Ranks × threads: as many processes with as many threads each as make all cores, each
taking steps of its own at the same time. They exchange nothing: ``myllm bench train`` times ranks
that do. Busy (``--parts busy``): a step of a small model on all cores, of which 0, 1 and 2
processes that only count take their part.

``python -m accel.bench.scaling SIZE MODE THREADS SECONDS`` is a process that trains. It says
``ready``, and for each line that it is given prints the tokens that it trained on in a second.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from accel import load
from accel.bench.bandwidth import ADAMW_BYTES
from accel.bench.cases import attention
from accel.bench.report import Row
from accel.bench.timing import Function, alternate, settled
from accel.bench.training import PARAMETERS, SMALL, Training, adamw, adamw_state
from accel.threads import available_cores, set_threads, threads
from reference.ops import Ops

BATCH, LENGTH = 8, 512
DEMO = replace(
    SMALL, vocab_size=4096, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_head=32, d_ff=352
)
SIZES = {"12.6 M": (SMALL, BATCH, LENGTH), "1.3 M": (DEMO, 4, 256)}
SECONDS = 10.0  # that ranks train beside each other
TURN = 3.0  # that one trains beside what only counts
GNU = "300000"  # turns that GNU's OpenMP lets a waiting thread spin, unless told otherwise
IDLE_BAR, BUSY_BAR = 1.03, 1.5  # of GNU's time on an idle machine; of that of a fair share


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


def step_work(mode: str, size: str = "12.6 M") -> Work:
    """Return a training step."""
    config, batch, length = SIZES[size]
    model = Training(load("cpu", compute=mode), config, batch, length)
    return Work(f"a step, {size}, T = {length}, {mode}", batch * length, "tokens/s", model.step)


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
        for work in op_works(ops):
            with settled(ops, work.call):
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


@contextmanager
def training(
    number: int, size: str, mode: str, each: int, seconds: float, **environment: str
) -> Iterator[Callable[[], float]]:
    """Start processes that train; what is given has all do so, and returns their tokens a second.

    Raises
    ------
    ValueError
        When one of them fails.
    """
    words = ["-m", "accel.bench.scaling", size, mode, str(each), str(seconds)]
    pipe = subprocess.PIPE
    env = {**os.environ, "MYLLM_THREADS": str(each), **environment}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *words], stdin=pipe, stdout=pipe, encoding="utf-8", env=env
                )
            )
            for _ in range(number)
        ]

        def heard(word: str) -> list[float]:
            said = [process.stdout.readline().split() for process in processes if process.stdout]
            if not all(line[:1] == [word] for line in said):
                raise ValueError(f"one of {number} × {each} threads ended before it had trained")
            return [float(line[1]) for line in said]

        def train() -> float:
            for process in processes:
                print("go", file=process.stdin, flush=True)
            return sum(heard("tokens"))

        heard("ready")
        yield train


def together(mode: str, ranks: int, each: int, seconds: float) -> float:
    """Return the tokens a second of processes that train at the same time, summed."""
    with training(ranks, "12.6 M", mode, each, seconds) as train:
        return train()


def busy(*, quick: bool) -> Iterator[Row]:
    """Yield the time of a step beside processes that only count, and that of a fair share of cores.

    On an idle machine it is held against GNU's own way to wait, by turns.
    """
    cores, size, seconds = threads(), "1.3 M", 0.1 if quick else TURN
    tokens = math.prod(SIZES[size][1:])
    with (
        training(1, size, "float32", cores, seconds) as ours,
        training(1, size, "float32", cores, seconds, GOMP_SPINCOUNT=GNU) as theirs,
    ):
        alone = 0.0
        for others in range(3):
            with ExitStack() as stack:
                for _ in range(others):
                    counting = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    stack.enter_context(counting)
                    stack.callback(counting.kill)
                turns = [(ours(), theirs()) for _ in range(1 if quick else 5)]
            mine, gnu = (tokens / float(np.median(each)) for each in zip(*turns, strict=True))
            alone = alone or mine
            fair = alone * (cores + others) / cores
            what = f"a step, {size}, beside {others} busy processes"
            note = f"waiting as GNU does {1e3 * gnu:.3g} ms"
            if others:
                yield Row(f"{what} / a fair share", mine, fair, BUSY_BAR, "s", note)
            else:
                yield Row(f"{what} / waiting as GNU does", mine, gnu, IDLE_BAR)


def main(size: str, mode: str, each: str, seconds: str) -> None:
    """Be one of the processes."""
    set_threads(int(each))
    work = step_work(mode, size)
    work.call()
    print("ready 0", flush=True)
    for _ in sys.stdin:
        start, calls = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < float(seconds) or not calls:
            work.call()
            calls += 1
        print("tokens", calls * work.amount / taken, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
