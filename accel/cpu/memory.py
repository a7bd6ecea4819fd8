"""Where the arrays that ops return come from.

Outside of ``with step():`` an array is fresh memory that lives as long as it is referenced. Inside,
it is a piece of an arena that is kept from one training step to the next: a fresh large array costs
a page fault for every 4 KiB that is first touched, which is 10 % of a step and more, and the pieces
of a step are the same every time.

The arena hands out a free interval and takes it back when the last reference to the array, or to a
view of it, goes; so memory is also reused *within* a step, as activations die during the backward
pass. An array that outlives its step stays intact all the same: the contract promises less than is
kept here.

Which interval: the one that fits best, in a step that is larger than those before. Between arrays
that stay, it leaves holes that nothing fits in, 5 to 15 % of a step. So what a step asks for is
written down, and how long each array lives, and the step that follows a large one finds a place
planned for each (``plan.py``) that leaves next to none. The large step itself gives freed pages
back to the system, from where it has become large. Steps of few bytes are left as they are.
"""

import bisect
import contextlib
import ctypes
import itertools
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accel.cpu.plan import Plan
from accel.free_list import FreeList
from accel.system import fresh_memory, give_back
from accel.threads import sharing
from reference.memory import memory as memory  # arrays lie where NumPy's do
from reference.types import Array

ALIGNMENT = 64  # bytes: one cache line, and one AVX-512 register
CHUNK = 256 << 20  # bytes of address space taken at a time; pages count only once they are touched
SMALL = 4096  # bytes: below this a plain array costs less than a piece of the arena
HUGE = 2 << 20  # bytes: a huge page, which is given back as a whole, or becomes many small ones
PLANNED = 64 << 20  # bytes of a step, from which on holes can lose much: the next one is planned
RECORDED = 5_000  # arrays of a step, at most, whose places are planned
GROWN = 1.02  # times as much memory as any step before: a larger step
RETURNED = 4  # times its memory that such a step gives back at most: a long loop would pay for ever
BYTE = np.dtype(np.uint8)


class _Piece(np.ndarray):
    """The bytes of the arena that an array lies in; NumPy keeps them as the array's base."""

    start = -1  # on the arena's line; of a view of these bytes stays -1
    returned: deque[tuple[int, int]]

    def __del__(self) -> None:
        # The collector may call this anywhere, even inside Arena.take: append is atomic.
        if self.start >= 0:
            self.returned.append((self.start, self.size))


class _Chunk(NamedTuple):
    address: int
    memory: mmap.mmap


class Arena:
    """A heap that takes address space from the system and keeps it.

    Its chunks stand one after another on a line, in the order in which they were taken, and free
    intervals of the same length are given out in the order of the line. So steps that ask for the
    same settle on the same places, and touch no further page.

    Attributes
    ----------
    reserved : int
        Bytes of address space taken so far.
    held, most : int
        Bytes given out now, and the most that ever were.
    """

    def __init__(self) -> None:
        self.reserved = self.held = self.most = 0
        self._chunks: list[_Chunk] = []
        self._starts: list[int] = []  # where the chunks stand on the line
        self._free = FreeList()  # of the line
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._plan = Plan()
        self._step: Plan | None = None  # what the present step has asked for
        self._given_back = 0  # bytes of this step's arrays
        self._before: list[int] = []  # the sizes that the step before asked for
        self._numbers: dict[int, int] = {}  # start of an array of this step -> its number there

    def take(self, shape: int | Sequence[int], dtype: np.dtype[Any] = BYTE) -> Array:
        """Return an uninitialised C-contiguous array, aligned to a cache line."""
        count = shape if isinstance(shape, int) else math.prod(shape)
        nbytes = int(count) * dtype.itemsize  # NumPy's integers would stay in the list
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            self._take_back()
            start = self._place(size)
            self.held += size
            self.most = max(self.most, self.held)
            if self._step is not None and len(self._step.sizes) < RECORDED:
                self._numbers[start] = self._step.born(size)
        i = self._chunk(start)
        piece = _Piece(size, BYTE, self._chunks[i].memory, start - self._starts[i])
        piece.start, piece.returned = start, self._returned
        return np.ndarray(shape, dtype, piece)

    def begin(self) -> None:
        """Begin a step, which may ask for the same as the one before."""
        with self._lock:
            self._take_back()
            done, self._step = self._step, Plan()
            self._numbers.clear()
            self._given_back = 0
            if done is None or done.most < PLANNED:
                return
            again = done.sizes == self._before and done.sizes != self._plan.sizes
            self._before = done.sizes
            if done.most > GROWN * self._plan.most or (again and 2 * done.most > self._plan.most):
                done.make(
                    [(s, len(c.memory)) for s, c in zip(self._starts, self._chunks, strict=True)]
                )
                self._plan = done
                for start, size in self._free.intervals():  # else what was touched stays resident
                    self._give_back(start, start + size)

    def _place(self, size: int) -> int:
        """Take an interval: the planned one, or that which fits best."""
        planned = None if self._step is None else self._plan.place(len(self._step.sizes), size)
        if planned is not None and self._free.take_at(planned, size):
            return planned
        start = self._free.take(size)
        if start is None:
            self._grow(size)
            start = self._free.take(size)
            assert start is not None
        return start

    def _take_back(self) -> None:
        """Make free what has been returned."""
        while self._returned:
            start, size = self._returned.popleft()
            low, length = self._free.give(start, size)
            if self._step is not None:
                self._step.died(self._numbers.pop(start, None))
                larger = self._step.most > max(PLANNED, GROWN * self._plan.most)
                if larger and self._given_back < RETURNED * self._step.most:
                    self._given_back += size
                    # whole huge pages: also those that neighbours held until now
                    end = min(low + length, start + size + HUGE)
                    self._give_back(max(low, start - HUGE), end)
            self.held -= size

    def _chunk(self, start: int) -> int:
        """Return the number of the chunk that a place of the line lies in."""
        return bisect.bisect(self._starts, start) - 1

    def _give_back(self, start: int, end: int) -> None:
        """Give the huge pages that lie within a free interval back to the system."""
        i = self._chunk(start)
        to_line = self._starts[i] - self._chunks[i].address
        first, last = -(-(start - to_line) // HUGE) * HUGE, (end - to_line) // HUGE * HUGE
        if first < last:
            give_back(self._chunks[i].memory, first - self._chunks[i].address, last - first)

    def _grow(self, size: int) -> None:
        length = -(-size // CHUNK) * CHUNK  # so that a somewhat larger array fits here as well
        memory = fresh_memory(length)
        # The gap keeps free intervals of two chunks from joining.
        start = self.reserved + len(self._chunks) * ALIGNMENT
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._chunks.append(_Chunk(address, memory))
        self._starts.append(start)
        self.reserved += length
        self._free.give(start, length)


_arena = Arena()
_lasting = Arena()  # apart, as between what comes and goes it would leave holes that little fits in
if hasattr(os, "register_at_fork"):  # else a child may inherit the lock held, and wait for ever
    for _each in (_arena, _lasting):
        os.register_at_fork(
            before=_each._lock.acquire,
            after_in_parent=_each._lock.release,
            after_in_child=_each._lock.release,
        )
_depth = 0  # of nested steps
_poison = False


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Open a scope in which arrays come from the arena; scopes may be nested.

    Within the outermost, kernels leave cores to other processes that want them.
    """
    global _depth
    outermost = not _depth
    if outermost:
        _arena.begin()
    _depth += 1
    try:
        with sharing() if outermost else contextlib.nullcontext():
            yield
    finally:
        _depth -= 1


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Open a scope in which new float arrays hold NaN, to show elements that a kernel forgot."""
    global _poison
    before, _poison = _poison, True
    try:
        yield
    finally:
        _poison = before


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised C-contiguous array, aligned to a cache line; see above for where.

    A vector register holds a cache line: loads that straddle two lines take twice as long.
    """
    dtype = np.dtype(dtype)
    nbytes = (shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize
    if _depth and nbytes >= SMALL:
        array = _arena.take(shape, dtype)
    else:
        raw = np.empty(nbytes + ALIGNMENT, BYTE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(raw.data)) % ALIGNMENT
        array = np.ndarray(shape, dtype, raw, start)
    if _poison and dtype.kind == "f":
        array.fill(np.nan)
    return array


def several(dtype: npt.DTypeLike, *shapes: tuple[int, ...]) -> list[Array]:
    """Return such arrays side by side in one piece of memory, which takes the time of one."""
    dtype = np.dtype(dtype)
    sizes = (-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)
    *starts, end = itertools.accumulate(sizes, initial=0)
    piece = empty(end // dtype.itemsize, dtype)
    return [
        np.ndarray(shape, dtype, piece, start) for shape, start in zip(shapes, starts, strict=True)
    ]


def lasting(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return such an array from an arena, for what is read again and again, as weights are.

    Small arrays, too, lie in huge pages there: read one after the other, as a token reads them,
    they come a quarter faster than from pages of 4 KiB.
    """
    return _lasting.take(shape, np.dtype(dtype))
