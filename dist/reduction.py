"""The sum of the ranks' gradients, each rank its slices; and what the ranks made of them, gathered.

With several ranks on each of several machines there are two levels. The ranks of a machine are a
subtree of the sum (``step.py``), so first they add up among themselves: each receives the others'
share, of P equal ones, and adds them in the tree's order. Then the ranks of the same number on all
machines do the same with that share. The same pairs are added as with one level, so the bits are
the same, and 1/P of the bytes leaves a machine. Gathering goes the same way back.

The backward of the last leaf finishes one layer after the other, the last layer first. So the flat
array is cut into buckets, in which layers lie that are finished together, and every rank owns a
slice of each. While the backward goes on with the layers before, another thread exchanges those
buckets and adds them up, in the same order, so with the same bits.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from dist.comm import Comm, Level
from dist.slices import Cutting, first_of
from reference.ops import Ops
from reference.params import Layout
from reference.types import Array

Accumulate = Callable[[Array, Array], None]  # adds the second onto the first


def reduce(
    levels: Sequence[Level], flat: Array, bounds: Sequence[int], accumulate: Accumulate
) -> Array:
    """Return the sum over all ranks of this rank's slice of ``flat``; ``flat`` is used up.

    Slice ``number(levels)`` of those between ``bounds`` is this rank's.
    """
    inner, *outer = levels
    count = (len(bounds) - 1) // inner.size
    share = add_in_tree_order(accumulate, inner.exchange(flat, bounds[::count]))
    if not outer:
        return share
    mine = bounds[inner.rank * count : (inner.rank + 1) * count + 1]
    return reduce(outer, share, [bound - mine[0] for bound in mine], accumulate)


def gather(levels: Sequence[Level], flat: Array, bounds: Sequence[int]) -> None:
    """Fill all other slices of ``flat`` with what their ranks have there."""
    inner, *outer = levels
    count = (len(bounds) - 1) // inner.size
    if outer:
        gather(outer, flat, bounds[inner.rank * count : (inner.rank + 1) * count + 1])
    inner.all_gather_slices(flat, bounds[::count])


def number(levels: Sequence[Level]) -> int:
    """Return which slice is this rank's: that of its share on its machine, then its machine's."""
    result = 0
    for level in levels:
        result = result * level.size + level.rank
    return result


def add_in_tree_order(accumulate: Accumulate, parts: list[Array]) -> Array:
    """Return the sum of a power of two arrays by halves, written into the first ones."""
    while len(parts) > 1:
        for left, right in zip(parts[::2], parts[1::2], strict=True):
            accumulate(left, right)
        parts = parts[::2]
    return parts[0]


class Reduction:
    """The sum of a step, bucket by bucket, beside the backward where that is possible.

    Parameters
    ----------
    ops : module
        The backend.
    comm : Comm
    layout : Layout
    n_layers : int
    cutting : Cutting
    beside : bool
        Exchange what is finished while the backward computes.
    """

    def __init__(
        self,
        ops: Ops,
        comm: Comm,
        layout: Layout,
        n_layers: int,
        cutting: Cutting,
        *,
        beside: bool,
    ) -> None:
        self._comm, self._ops = comm, ops
        self.bounds = cutting.bounds(layout, n_layers, comm.size, beside=beside)
        self._first_of = [first_of(layout, layer) for layer in range(n_layers)]
        own = number(comm.levels)
        self.slices = [(bounds[own], bounds[own + 1]) for bounds in self.bounds]
        threads = beside and len(self.bounds) > 1
        self._thread = ThreadPoolExecutor(1, "exchange") if threads else None
        self._begun: dict[int, Future[tuple[Array, float, float]]] = {}
        self.hidden = 0.0  # seconds of the last sum's exchange that passed beside the backward

    def begin(self, root: Array, complete: Callable[[int, int], None]) -> None:
        """Take the array that the sum of this rank's leaves will stand in.

        ``complete(low, high)`` adds up this range of it, of which the last leaf is finished.
        """
        self._root, self._complete = root, complete

    @property
    def listener(self) -> Callable[[int], None] | None:
        """What wants to know of each layer that the last leaf is finished; None: nothing does."""
        return None if self._thread is None else self.finished

    def finished(self, layer: int) -> None:
        """Exchange the buckets of which the last leaf is finished with this layer."""
        assert self._thread is not None
        # neither the first bucket nor the last: they are finished with the backward
        for bucket in reversed(range(1, len(self.bounds) - 1)):
            low, high = self.bounds[bucket][0], self.bounds[bucket][-1]
            if bucket not in self._begun and low >= self._first_of[layer]:
                self._complete(low, high)
                self._comm.computing.set()
                self._begun[bucket] = self._thread.submit(self._beside, self._root, bucket)

    def complete(self) -> None:
        """Complete the sum of this rank's leaves, when the backward has ended."""
        self._ended = time.perf_counter()
        for bucket, bounds in enumerate(self.bounds):
            if bucket not in self._begun:
                self._complete(bounds[0], bounds[-1])

    def finish(self) -> list[Array]:
        """Exchange the rest; return this rank's slices of the sum over all ranks.

        They may lie in the memory of the root.
        """
        self._comm.computing.clear()
        begun, self._begun = self._begun, {}
        with self._comm.watch.waiting("exchange"):
            done = {bucket: future.result() for bucket, future in begun.items()}
            sums = {bucket: total for bucket, (total, _, _) in done.items()}
            for bucket, bounds in enumerate(self.bounds):
                if bucket not in sums:
                    sums[bucket] = reduce(
                        self._comm.levels, self._root, bounds, self._ops.accumulate
                    )
        self.hidden = sum(
            max(0.0, min(end, self._ended) - start) for _, start, end in done.values()
        )
        return [sums[bucket] for bucket in range(len(self.bounds))]

    def gather(self, flat: Array) -> None:
        """Fill the other ranks' slices of ``flat``."""
        with self._comm.watch.waiting("gather"):
            for bounds in self.bounds:
                gather(self._comm.levels, flat, bounds)

    def _beside(self, root: Array, bucket: int) -> tuple[Array, float, float]:
        began = time.perf_counter()
        total = reduce(self._comm.levels, root, self.bounds[bucket], _accumulate)
        return total, began, time.perf_counter()


def _accumulate(left: Array, right: Array) -> None:
    """Add, in host memory, on one thread: the backend's are at work. The bits are the same."""
    np.add(left, right, out=left)
