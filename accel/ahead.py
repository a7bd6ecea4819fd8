"""Work on other threads whose results are wanted in order: files that are read and written."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

T = TypeVar("T")
R = TypeVar("R")


def in_order(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield ``function`` of each item, in their order, computed on all threads.

    No more than a few items are ahead of what was yielded. They are taken in the caller's thread,
    which is free to wait for a disk meanwhile; the function should leave Python to those that do.
    """
    from accel.threads import threads  # and Numba with it, which who has nothing to do does without

    n = threads()
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(n) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
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
