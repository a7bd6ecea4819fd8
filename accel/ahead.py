"""Work on other threads, or in processes, whose results are wanted in order."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

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
    with pool(n) as executor:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) > 2 * n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


AHEAD = 1 << 26  # elements that a room has, at most, besides those of the largest that fills it


def one_ahead(fill: Callable[[T, Array], R], sizes: Sequence[tuple[T, int]]) -> Iterator[R]:
    """Yield ``fill(item, memory)`` of each item, in order; while one is used, the next is filled.

    Parameters
    ----------
    fill : callable
        Takes an item and memory (n,) float32 that holds anything; called in one other thread.
    sizes : sequence of (item, n)

    Notes
    -----
    All lie in the same room, each at the other end than the one before. Where it has no space for
    two, the next is filled when the one before is done with: when the iteration goes on.
    """
    most = max((n for _, n in sizes), default=0)
    room = np.empty(most + min(most, AHEAD), "<f4")
    with ThreadPoolExecutor(1) as pool:

        def begin(k: int) -> Future[R]:
            item, n = sizes[k]
            return pool.submit(fill, item, room[room.size - n :] if k % 2 else room[:n])

        coming = [begin(0)] if sizes else []
        for k, (_, n) in enumerate(sizes):
            found = coming.pop().result()
            following = sizes[k + 1 : k + 2]
            if following and n + following[0][1] <= room.size:
                coming.append(begin(k + 1))
            yield found
            if following and not coming:
                coming.append(begin(k + 1))


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
