"""How an array lies in memory, and what a kernel reads that takes it to lie without gaps."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from accel.verify.draw import MAX_ELEMENTS, REPEATED
from reference.types import Array


def laid(array: Array, layout: str, between: Any = 0) -> tuple[Array, Callable[[Any], Any]]:
    """Return memory that holds an array in a layout, and the function that takes it from there.

    Parameters
    ----------
    layout : str
        One of ``draw.LAYOUTS``, or ``draw.REPEATED`` of an array of equal numbers.
    between
        What stands in the gaps, and around.
    """
    if array.ndim == 0 or layout == "plain":
        return array.copy(), lambda memory: memory
    if layout == REPEATED:
        memory = np.full(array.shape, between, array.dtype)
        memory[(slice(0, 1),) * array.ndim] = array.reshape(-1)[0]
        return memory, partial(_repeated, array.shape)
    if layout == "transposed":  # heads before tokens, as (B, H, T, d) is often kept; or the ends
        axes = (1, 2) if array.ndim == 4 else (0, array.ndim - 1)
        return array.swapaxes(*axes).copy(), lambda memory: memory.swapaxes(*axes)
    cut: tuple[Any, ...]
    if layout == "strided":
        shape = (*array.shape[:-1], 2 * array.shape[-1] + 1)
        cut = (..., slice(1, None, 2))
    elif layout == "sliced":
        # of a long array axes of size one stay so: around each lies as much again
        more = [3 * (n > 1 or array.size < MAX_ELEMENTS) for n in array.shape]
        shape = tuple(n + m for n, m in zip(array.shape, more, strict=True))
        cut = tuple(slice(m // 3, m // 3 + n) for n, m in zip(array.shape, more, strict=True))
    else:  # reversed
        shape = array.shape
        cut = tuple(slice(None, None, -1) for _ in shape)
    memory = np.full(shape, between, array.dtype)
    memory[cut] = array
    return memory, lambda memory: memory[cut]


def _repeated(shape: tuple[int, ...], memory: Any) -> Any:
    """Return the first element of an array at every place of a shape, without copies if that is
    to be had.
    """
    first = memory[(slice(0, 1),) * len(shape)]
    if isinstance(memory, np.ndarray):
        return np.lib.stride_tricks.as_strided(first, shape, (0,) * len(shape))
    if hasattr(first, "expand"):  # PyTorch's
        return first.expand(shape)
    if hasattr(first, "__array_function__"):  # CuPy's
        return np.broadcast_to(first, shape)
    return memory[tuple(np.zeros(shape, np.intp) for _ in shape)]


def in_layout(array: Any, layout: str) -> Any:
    """Return an array, or each of several, in a layout."""
    if isinstance(array, tuple):
        return tuple(in_layout(part, layout) for part in array)
    if not isinstance(array, np.ndarray):
        return array
    memory, taken = laid(array, layout)
    return taken(memory)


def misread(array: Array, layout: str) -> Iterator[Array]:
    """Yield what is read of an array in a layout, NaN in its gaps, by code that ignores strides.

    That is from its first element on (and at the memory's end from the begin again), from the begin
    of the memory, or in each row from its first element on.
    """
    memory, taken = laid(array, layout, np.nan if array.dtype.kind == "f" else 0)
    view, flat = taken(memory), memory.reshape(-1)
    first = (view.ctypes.data - flat.ctypes.data) // flat.itemsize
    for begin in dict.fromkeys((first, 0)):
        yield flat.take(np.arange(begin, begin + view.size), mode="wrap").reshape(view.shape)
    if view.ndim > 1:
        rows = (view[..., :1].ctypes.data - flat.ctypes.data) // flat.itemsize + sum(
            np.arange(n).reshape([-1 if a == axis else 1 for a in range(view.ndim)])
            * (view.strides[axis] // flat.itemsize if axis < view.ndim - 1 else 1)
            for axis, n in enumerate(view.shape)
        )
        yield flat.take(rows, mode="wrap")
