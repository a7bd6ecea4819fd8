"""Where the arrays of a training step lie: pieces of one block, at the same offsets in every step.

Within ``with ops.step():`` each new array takes the best-fitting free interval of the block, and
gives it back when the last reference to it or to a view of it goes: what a block of the model needs
for a moment only makes room for the next. A step asks for the same sizes in the same order as the
one before, so each array takes the place that it had: nothing is allocated, nothing fragments.

The steps show how large the block must be. Intervals are given out without regard to its size; an
array whose interval ends beyond it gets memory of its own for this once, which in the first step is
every array, and at the end of the step the block grows to the furthest interval.

When the outermost step ends, all of its arrays are dead, referenced or not.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accel.free_list import FreeList
from reference.types import Array

if TYPE_CHECKING:
    from accel.cuda.device import Device

ALIGNMENT = 256  # bytes
ENDLESS = 1 << 62  # bytes: no step reaches so far


class Intervals(FreeList):
    """Free and taken intervals of a line that has a beginning and no end.

    Attributes
    ----------
    end : int
        Of the furthest interval ever taken.
    """

    def __init__(self) -> None:
        super().__init__(ENDLESS)
        self.end = 0

    def reset(self) -> None:
        """Make everything free."""
        super().__init__(ENDLESS)

    def take(self, size: int) -> int:
        """Return the start of an interval taken."""
        start = super().take(size)
        assert start is not None  # the line has no end
        self.end = max(self.end, start + size)
        return start


class Piece:
    """A taken interval, for as long as an array lies there; it also keeps the block."""

    __slots__ = ("_returned", "_what", "block")

    def __init__(self, returned: deque[tuple[int, int]], what: tuple[int, int], block: Any) -> None:
        self._returned, self._what, self.block = returned, what, block

    def __del__(self) -> None:
        # may run anywhere, even inside of Arena.empty: append is atomic
        self._returned.append(self._what)


class Arena:
    """The memory of a device's steps.

    Parameters
    ----------
    device : Device
        Gives the block and the arrays in it.

    Attributes
    ----------
    capacity : int
        Bytes of the block.
    missed : int
        Arrays since the start that did not lie in it.
    moves : int
        How often it has come to lie elsewhere.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._intervals = Intervals()
        self._returned: deque[tuple[int, int]] = deque()
        self._block: Any = None
        self._depth = 0
        self._suspended = 0
        self.capacity = self.missed = self.moves = 0

    @property
    def open(self) -> bool:
        """Whether a step is under way."""
        return self._depth > 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Open a scope in which arrays come from the block; scopes may be nested."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._end()

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """Open a scope, within a step or not, whose arrays outlive the step."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array: within a step a piece of the block, else fresh memory."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not self._depth or self._suspended or not nbytes:
            return self._device.empty(shape, dtype)
        while self._returned:
            self._intervals.give(*self._returned.popleft())
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._intervals.take(size)
        block, at = self._block, start
        if start + size > self.capacity:
            block, at = self._device.empty((size,), np.uint8), 0
            self.missed += 1
        piece = Piece(self._returned, (start, size), block)
        return self._device.piece(block, at, shape, dtype, owner=piece)

    def _end(self) -> None:
        self._intervals.reset()
        self._returned = deque()  # what dies from now on belonged to this step
        if self._block is not None:
            self._device.expired(self._block)
        if self._intervals.end > self.capacity:
            # first, so that both need not fit; if there is no room, what is needed is learnt anew
            end, self._intervals.end = self._intervals.end, 0
            self._block, self.capacity = None, 0
            self.moves += 1
            self._device.trim()
            self._block = self._device.empty((end,), np.uint8)
            self.capacity = self._intervals.end = end
