"""In which order attention's blocks are handed out, so that all multiprocessors end together.

A GPU starts the blocks of a grid one after the other, each as soon as a multiprocessor has room.
Under causality a block walks over one tile, or over as many as there are, by the rows that it owns.
The longest first is a good order (Graham 1969, "Bounds on multiprocessing timing anomalies"), as
the shortest fill the gaps at the end. But where a place gets three or four blocks in all, it may
leave a twelfth of the time unused: what begins later is shorter by as much, so that all places come
to their third block at once. If some of the longest are handed out shortest first, they come to it
one after the other. How many, is tried here for each grid, once. No bit depends on it.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache

EVEN = 0.97  # of the places' time is used: well enough not to look further
TRIED = 16  # numbers of tiles, at most


@lru_cache(1024)
def walked(own: int, others: int, block: int, rows: int, back: int, fore: int) -> tuple[int, ...]:
    """Return the tiles of ``rows`` rows that blocks walk over, those of the first rows first.

    Parameters
    ----------
    own, others : int
        Rows of the side whose rows blocks own, ``block`` each, and of the side that they walk over.
        The last of both stand at one position.
    back, fore : int
        How far behind and ahead of its own position a row sees.
    """
    shift, found = others - own, []
    for first in range(0, own, block):
        begin = max(0, first + shift - back)
        end = min(others, min(first + block, own) + shift + fore)
        found.append(-(-end // rows) - begin // rows if end > begin else 0)
    return tuple(found)


def turned(lengths: Sequence[int], rising: int) -> list[int]:
    """Return lengths with the first ``rising`` turned round: as attention.cuh turns its tiles."""
    return [*lengths[:rising][::-1], *lengths[rising:]]


def dealt(blocks: Sequence[float], places: int) -> float:
    """Return how long the blocks of a grid take, each handed out as soon as there is a place."""
    free = [0.0] * places
    for cycles in blocks:
        heapq.heapreplace(free, free[0] + cycles)
    return max(free)


@lru_cache(1024)
def rising(lengths: tuple[int, ...], alike: int, places: int) -> int:
    """Return how many of the first lengths to hand out in the reverse of their order.

    Parameters
    ----------
    lengths : tuple of int
        Of the blocks of each tile, the longest first.
    alike : int
        Blocks of each tile.
    places : int
        Blocks that the GPU has at a time.
    """

    def time(first: int) -> float:
        return dealt([n for n in turned(lengths, first) for _ in range(alike)], places)

    if sum(lengths) * alike >= EVEN * places * time(0):
        return 0
    step = -(-len(lengths) // TRIED)
    return min(range(0, len(lengths) + 1, step), key=time)
