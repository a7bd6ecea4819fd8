"""What all launchers do with arrays: conversions, strides, NumPy's arrays in and out."""

import math
from collections.abc import Sequence

import numpy as np

from accel.cuda.device import BF16, F32, THREADS, ceil_div, current, empty, is_contiguous, launch
from reference.types import Array

COPIED = frozenset(map(np.dtype, (np.bool_, np.uint16, np.int32, np.float32)))  # by kernels


def pack(array: Array) -> int:
    """Return the elements that a kernel moves at once: 16 bytes of them."""
    return 16 // array.itemsize


def packs(array: Array, n: int) -> int:
    """Return the blocks of THREADS threads that cover n elements, a pack each."""
    return ceil_div(n, THREADS * pack(array))


def fours(array: Array) -> int:
    """Return the blocks of THREADS threads that cover an array, four elements each."""
    return ceil_div(array.size, 4 * THREADS)


def check_out(out: Array | None, shape: tuple[int, ...]) -> Array:
    """Return the float32 array that a parameter gradient goes to: ``out``, or a new one."""
    if out is None:
        return empty(shape, F32)
    if not is_contiguous(out):
        raise ValueError(
            "out must be contiguous, as views of the flat gradient are, got strides "
            f"{out.strides} for shape {shape}"
        )
    return out


def to_dtype(array: Array, dtype: np.dtype) -> Array:
    """Return a float array as contiguous float32 or bf16; itself when it is that already."""
    array = contiguous(array)
    if array.dtype == dtype:
        return array
    out = empty(array.shape, dtype)
    kernel = "to_bf16_array" if dtype == BF16 else "to_f32_array"
    launch("elementwise", kernel, fours(array), x=array, y=out, n=array.size)
    return out


# ---- arrays from and to NumPy ------------------------------------------------------------------


def upload(array: Array, *, as_bf16: bool) -> Array:
    """Return a device array with a NumPy array's values; float32 becomes bf16 when asked to."""
    array = np.asarray(array)
    if array.dtype == np.float64:
        raise ValueError(
            "the cuda backend computes in float32 and bf16, got a float64 array; "
            "convert with .astype(np.float32), or check in float64 with the reference"
        )
    on_device = current().upload(array)
    return to_dtype(on_device, BF16) if as_bf16 and array.dtype == F32 else on_device


def to_numpy(array: Array) -> Array:
    """Return a device array as NumPy's; bf16 comes as float32."""
    host = current().download(contiguous(array))
    if host.dtype == BF16:
        return np.asarray((host.astype(np.uint32) << np.uint32(16)).view(np.float32))
    return host


# ---- strides -----------------------------------------------------------------------------------


def strides(array: Array, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return an array's strides in elements; broadcast to ``shape`` when one is given."""
    own = tuple(s // array.itemsize for s in array.strides)
    if shape is None:
        return own
    new = len(shape) - array.ndim
    repeated = [n == 1 and shape[new + i] != 1 for i, n in enumerate(array.shape)]
    return (0,) * new + tuple(0 if r else s for r, s in zip(repeated, own, strict=True))


def fold(
    shape: Sequence[int], *by_array: Sequence[int], axes: int = 4
) -> tuple[tuple[int, ...], ...]:
    """Join neighbouring axes that every array steps through evenly, and pad in front to ``axes``.

    Returns
    -------
    shape, then the strides of each array : tuples of length ``axes``

    Raises
    ------
    ValueError
        When more axes remain.
    """
    kept: list[tuple[int, ...]] = []  # (n, stride of each array), outermost first
    for n, *steps in zip(shape, *by_array, strict=True):
        if n == 1:
            continue
        if kept and all(outer == n * s for outer, s in zip(kept[-1][1:], steps, strict=True)):
            kept[-1] = (kept[-1][0] * n, *steps)
        else:
            kept.append((n, *steps))
    if len(kept) > axes:
        raise ValueError(
            f"an array of shape {tuple(shape)} has more than {axes} axes that do not join; "
            "make it contiguous first"
        )
    padding = [(1, *(0 for _ in by_array))] * (axes - len(kept))
    columns = list(zip(*padding, *kept, strict=True))
    return tuple(tuple(int(n) for n in column) for column in columns)


def numbered(**tuples: Sequence[int]) -> dict[str, int]:
    """Return ``s0``, ``s1``, ... for ``s``: how kernels call the numbers of each axis."""
    return {f"{name}{i}": n for name, numbers in tuples.items() for i, n in enumerate(numbers)}


def contiguous(array: Array) -> Array:
    """Return the array itself, or its values in a new array when its elements are scattered."""
    if is_contiguous(array):
        return array
    out = empty(array.shape, array.dtype)
    copy(out, array)
    return out


def copy(to: Array, array: Array) -> None:
    """Write an array's values into another of the same shape and dtype, either of them a view."""
    assert to.shape == array.shape and to.dtype == array.dtype
    if array.dtype not in COPIED:
        raise TypeError(
            "the cuda backend copies views of bool, bf16, int32 and float32 arrays, got one of "
            f"{array.dtype}: convert with .astype before it is sent there"
        )
    shape, source, target = array.shape, strides(array), strides(to)
    if array.itemsize == 1:
        s, a, b = fold(shape, source, target)
        numbers = numbered(s=s, a=a, b=b)
        launch("layout", "copy_bytes", ceil_div(array.size, THREADS), x=array, y=to, **numbers)
        return
    if array.itemsize == 4:  # integers are copied as the floats that their bits are
        array, to = array.view(F32), to.view(F32)
    if not shape or source[-1] != 1 or target[-1] != 1:  # the innermost axis must be contiguous
        shape, source, target = (*shape, 1), (*source, 1), (*target, 1)
    s, a, b = fold(shape[:-1], source[:-1], target[:-1], axes=3)
    blocks = ceil_div(math.prod(s) * ceil_div(shape[-1], pack(array)), THREADS)
    numbers = numbered(s=(*s, shape[-1]), a=a, b=b)
    launch("layout", "copy_strided", blocks, x=array, y=to, **numbers)


def column_sums(x: Array, out: Array, *, accumulate: bool = False) -> None:
    """Write Σ over the rows of x (N, D) into ``out`` (D,) float32, or add it."""
    N, D = x.shape
    rows_each = max(16, ceil_div(N, 512))
    parts, blocks = ceil_div(N, rows_each), packs(x, D)
    threads = 32 * ceil_div(D, 32 * pack(x) * blocks)  # as even as may be: all have columns
    partial = empty((parts, D), F32)
    given = {"x": x, "partial": partial, "N": N, "D": D, "rows_each": rows_each}
    launch("reduce", "partial_sums", (blocks, parts), threads, **given)
    sum_rows(partial, out, accumulate=accumulate)


def sum_rows(
    partial: Array, out: Array, more: Array | None = None, *, accumulate: bool = False
) -> None:
    """Write Σ over the rows of partial (P, D) float32 into ``out``, then ``more``, or add it.

    Both are vectors, of D elements together.
    """
    P, D = partial.shape
    sizes = {"P": P, "D": D, "first": out.size, "accumulate": accumulate}
    to = {"out": out, "more": more}
    threads = 32 * max(1, min(32, P))
    blocks, shared = ceil_div(D, 32), 4 * threads
    launch("reduce", "sum_rows", blocks, threads, shared, partial=partial, **to, **sizes)
