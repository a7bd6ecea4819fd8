"""Work on several threads whose results are wanted in order: files that are read and written."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
