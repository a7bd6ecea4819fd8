"""A device that runs nothing: what a step of a large model asks for, on a machine without room.

Arrays have their shapes and addresses, in memory that is reserved and never touched.
"""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.types import Array
from tests.cuda_shim.device import ShimDevice

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux


class DryDevice(ShimDevice):
    """The shim's device without memory and without arithmetic.

    Attributes
    ----------
    asked : list of (str, grid, int)
        Kernels in order, with their grids and bytes of shared memory.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.asked: list[tuple[str, tuple[int, int, int], int]] = []

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array of zeros that are not there."""
        nbytes = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        return np.ndarray(shape, dtype, buffer=mmap.mmap(-1, nbytes, flags=flags))

    def piece(
        self, block: Array, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any
    ) -> Array:
        """Return an array of its own, which keeps its owner."""
        return self.empty(shape, dtype).view(_Owned)._of(owner)

    def expired(self, block: Array) -> None:
        pass

    def clear(self, array: Array) -> None:
        pass

    def write(self, array: Array, values: Array) -> None:
        pass

    def upload(self, array: Array) -> Array:
        return self.empty(array.shape, array.dtype)

    def download(self, array: Array) -> Array:
        """Return zeros; the checks of ids find the first wrong one at the end."""
        if array.shape == (2,) and array.dtype == np.int32:
            return np.array([2**31 - 1, 1], np.int32)
        return np.zeros(array.shape, array.dtype)

    def launch(
        self, source: str, kernel: str, grid: tuple[int, int, int], *_: Any, shared: int, **__: Any
    ) -> None:
        """Take note of it."""
        self.asked.append((kernel, grid, shared))

    def gemm_ex(self, *arguments: Any) -> None:
        pass


class _Owned(np.ndarray):
    """An array that holds what the arena gave with it, as do all views of it."""

    owner: Any = None

    def _of(self, owner: Any) -> "_Owned":
        self.owner = owner
        return self

    def __array_finalize__(self, of: Any) -> None:
        self.owner = getattr(of, "owner", None)
