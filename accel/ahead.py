"""Work on other threads, or in processes, whose results are wanted in order."""

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from accel.system import fresh_memory
from reference.types import Array

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    function: Callable[[T], R],
    items: Iterable[T],
    n: int | None = None,
    pool: Callable[[int], Executor] = ThreadPoolExecutor,
) -> Iterator[R]:
    """Yield ``function`` of each item, in their order, computed on all threads.

    No more than a few items are ahead of what was yielded. They are taken in the caller's thread,
    which is free to wait for a disk meanwhile; the function should leave Python to those that do.

    Parameters
    ----------
    n : int, optional
        How many threads, if not all.
    pool : callable
        Makes of n what runs the function: threads, unless it is told to make processes.
    """
    if n is None:
        from accel.threads import threads  # and Numba with it: who has nothing to do does without

        n = threads()
    waiting: deque[Future[R]] = deque()
    executor = pool(n)
    try:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) > 2 * n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)  # what nobody will ask for need not be done


AHEAD = 1 << 26  # elements that a room has, at most, besides those of the largest that fills it
PAGE = mmap.PAGESIZE // 4  # elements


def some_ahead(fill: Callable[[T, Array], R], sizes: Sequence[tuple[T, int]]) -> Iterator[R]:
    """Yield ``fill(item, memory)`` of each item, in order; while one is used, the next are filled.

    Parameters
    ----------
    fill : callable
        Takes an item and memory (n,) float32 that holds anything; called in one other thread.
    sizes : sequence of (item, n)

    Notes
    -----
    All lie in the same room: one behind the other, each where a page begins, and then from its
    beginning again. As many are filled as have space there beside the one that is used.
    """
    most = max((n for _, n in sizes), default=0)
    # from the system, where pages begin: a file can be written past its memory out of whole pages
    room = np.frombuffer(fresh_memory(4 * (most + min(2 * most, AHEAD) + PAGE)), "<f4")
    held: deque[tuple[int, int, Future[R]]] = deque()  # first element, the one behind the last
    coming = deque(sizes)

    def space(n: int) -> int | None:
        if not held:
            return 0
        first, end = held[0][0], held[-1][1]
        again = end <= first  # the last lies before the first, at the room's beginning
        end += -end % PAGE
        if end + n <= (first if again else room.size):
            return end
        return None if again or n > first else 0

    pool = ThreadPoolExecutor(1)
    try:
        while coming or held:
            while coming and (at := space(coming[0][1])) is not None:
                item, n = coming.popleft()
                held.append((at, at + n, pool.submit(fill, item, room[at : at + n])))
            yield held[0][2].result()
            held.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


def batches(
    items: Iterable[T], size: Callable[[T], int], most: int, count: float = math.inf
) -> Iterator[list[T]]:
    """Gather items into lists, each of which ends as it reaches a size, or a number of items."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= most or len(batch) >= count:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
