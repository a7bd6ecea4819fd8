"""Where the arrays that ops return come from.

Outside of ``with step():`` an array is fresh memory that lives as long as it is referenced. Inside,
it is a piece of an arena that is kept from one training step to the next: a fresh large array costs
a page fault for every 4 KiB that is first touched, which is 10 % of a step and more, and the pieces
of a step are the same every time.

The arena hands out the best-fitting free interval and takes it back when the last reference to the
array, or to a view of it, goes; so memory is also reused *within* a step, as activations die during
the backward pass. An array that outlives its step stays intact all the same: the contract promises
less than is kept here.
"""

import bisect
import contextlib
import ctypes
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accel.free_list import FreeList
from accel.system import fresh_memory
from reference.memory import memory as memory  # arrays lie where NumPy's do

Array = npt.NDArray[Any]

ALIGNMENT = 64  # bytes: one cache line, and one AVX-512 register
CHUNK = 256 << 20  # bytes of address space taken at a time; pages count only once they are touched
SMALL = 4096  # bytes: below this a plain array costs less than a piece of the arena
BYTE = np.dtype(np.uint8)


class _Piece:
    """One interval of the arena while an array lives in it; NumPy keeps it as the array's base."""

    __slots__ = ("__array_interface__", "_interval", "_returned")

    def __init__(
        self,
        address: int,
        interval: tuple[int, int],
        returned: deque[tuple[int, int]],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._interval = interval
        self._returned = returned
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        # The collector may call this anywhere, even inside Arena.take: append is atomic.
        self._returned.append(self._interval)


class _Chunk(NamedTuple):
    address: int
    memory: mmap.mmap


class Arena:
    """A heap that never gives memory back to the system.

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

    def take(self, shape: int | Sequence[int], dtype: np.dtype[Any] = BYTE) -> Array:
        """Return an uninitialised C-contiguous array, aligned to a cache line."""
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(math.prod(dims)) * dtype.itemsize  # NumPy's integers would stay in the list
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            while self._returned:
                interval = self._returned.popleft()
                self.held -= interval[1]
                self._free.give(*interval)
            start = self._free.take(size)
            if start is None:
                self._grow(size)
                start = self._free.take(size)
                assert start is not None
            self.held += size
            self.most = max(self.most, self.held)
        i = bisect.bisect(self._starts, start) - 1
        address = self._chunks[i].address + start - self._starts[i]
        return np.asarray(_Piece(address, (start, size), self._returned, dims, dtype))

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
    """Open a scope in which arrays come from the arena; scopes may be nested."""
    global _depth
    _depth += 1
    try:
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


def lasting(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return such an array from an arena, for what is read again and again, as weights are.

    Small arrays, too, lie in huge pages there: read one after the other, as a token reads them,
    they come a quarter faster than from pages of 4 KiB.
    """
    return _lasting.take(shape, np.dtype(dtype))
