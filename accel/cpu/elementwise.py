"""Addition, scaling, ReLU and dropout: one pass over memory each, and nothing else to gain.

The mathematics is in ``reference/add.py``, ``scale.py``, ``relu.py`` and ``dropout.py``.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from accel.cpu.halves import as_type, wide
from accel.cpu.kernels import MAP, PIECE, address, contiguous, like, sum_rows
from accel.cpu.memory import empty
from accel.cpu.philox import philox
from accel.cpu.simd import at, pointer
from accel.cpu.streaming import AHEAD, FLAT, ask, is_far, landing, leave, part, settle
from accel.jit import jit
from reference.types import Array, Dropout

# ---- add -----------------------------------------------------------------------------------------


class AddCache(NamedTuple):
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


@jit(**MAP)
def _add(like: Any, a: int, b: int, out: int, n: int, far: Any) -> None:
    x, y, z = pointer(a, like), pointer(b, like), pointer(out, like)
    for piece in prange((n + PIECE - 1) // PIECE):
        first, last = piece * PIECE, min(n, (piece + 1) * PIECE)
        while first < last:
            count, u, v = part(last - first, far, FLAT), at(x, first), at(y, first)
            w = landing(at(z, first), far)
            ask(at(u, AHEAD), count, far)
            ask(at(v, AHEAD), count, far)
            for i in range(count):
                w[i] = u[i] + v[i]
            leave(w, at(z, first), count, far)
            first += count
        settle(far)


@jit(**MAP)
def _add_rows(like: Any, a: int, b: int, out: int, rows: int, width: int) -> None:
    x, y, z = pointer(a, like), pointer(b, like), pointer(out, like)
    for i in prange(rows):
        u, w = at(x, i * width), at(z, i * width)
        for j in range(width):
            w[j] = u[j] + y[j]


def add_forward(a: Array, b: Array) -> tuple[Array, AddCache]:
    """Return a + b, with broadcasting.

    Arrays of one shape, and an array that repeats along leading axes, are read where they lie;
    other repetitions are first written out.
    """
    cache = AddCache(a.shape, b.shape)
    if a.shape != b.shape:
        shape = np.broadcast_shapes(a.shape, b.shape)
        wide, narrow = (a, b) if a.shape == shape else (b, a)
        if wide.shape == shape and _is_tail(narrow.shape, shape):
            out = empty(shape, a.dtype)
            wide, narrow = contiguous(wide), contiguous(narrow)
            width = max(narrow.size, 1)
            rows = out.size // width
            _add_rows(like(a), address(wide), address(narrow), address(out), rows, width)
            return out, cache
        a, b = np.broadcast_to(a, shape), np.broadcast_to(b, shape)
    a, b = contiguous(a), contiguous(b)
    out = empty(a.shape, a.dtype)
    _add(like(a), address(a), address(b), address(out), out.size, is_far(out))
    return out, cache


def add_backward(dout: Array, cache: AddCache) -> tuple[Array, Array]:
    """Return (da, db); one that was not repeated is dout itself."""
    return _sum_to(dout, cache.a_shape), _sum_to(dout, cache.b_shape)


def _is_tail(narrow: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of shape ``narrow`` repeats along leading axes only."""
    trimmed = list(narrow)
    while trimmed and trimmed[0] == 1:
        del trimmed[0]
    return tuple(trimmed) == shape[len(shape) - len(trimmed) :]


def _sum_to(dout: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was repeated."""
    if dout.shape == shape:
        return dout
    new = dout.ndim - len(shape)
    repeated = [*range(new), *(i + new for i, n in enumerate(shape) if n != dout.shape[i + new])]
    kept = [i for i in range(dout.ndim) if i not in repeated]
    out = empty(shape, dout.dtype)
    rows, width = (math.prod(dout.shape[i] for i in axes) for axes in (repeated, kept))
    sum_rows(contiguous(dout.transpose(*repeated, *kept)).reshape(rows, width), out.reshape(-1))
    return out


# ---- scale ---------------------------------------------------------------------------------------


@jit(**MAP)
def _scale(factor: Any, a: int, out: int, n: int, far: Any) -> None:
    x, z = pointer(a, factor), pointer(out, factor)
    for piece in prange((n + PIECE - 1) // PIECE):
        first, last = piece * PIECE, min(n, (piece + 1) * PIECE)
        while first < last:
            count, u = part(last - first, far, FLAT), at(x, first)
            w = landing(at(z, first), far)
            ask(at(u, AHEAD), count, far)
            for i in range(count):
                w[i] = factor * u[i]
            leave(w, at(z, first), count, far)
            first += count
        settle(far)


def scale_into(x: Array, factor: float, out: Array) -> None:
    """Write factor · x into ``out``; both contiguous."""
    far = None if out is x else is_far(out)  # in place, its lines have been read anyhow
    _scale(x.dtype.type(factor), address(x), address(out), x.size, far)


def scaled(x: Array, factor: float, out: Array | None = None) -> Array:
    """Return factor · x, in a new array unless ``out`` is given."""
    x = contiguous(x)
    out = empty(x.shape, x.dtype) if out is None else out
    scale_into(x, factor, out)
    return out


def scale_forward(x: Array, *, factor: float, out: Array | None = None) -> tuple[Array, float]:
    """Return factor · x; ``out``, which may be x itself, receives it."""
    if out is not None and address(out) != address(x) and np.may_share_memory(out, x):
        x = x.copy()  # else the first results would overwrite what is yet to be read
    return scaled(x, factor, out), factor


def scale_backward(dout: Array, factor: float) -> Array:
    """Return dx."""
    return scaled(dout, factor)


# ---- relu ----------------------------------------------------------------------------------------


class ReLUCache(NamedTuple):
    x: Array  # (...), float or bfloat16


@jit(**MAP)
def _relu_forward(like: Any, kind: Any, a: int, out: int, n: int, far: Any) -> None:
    x, z = pointer(a, kind), pointer(out, like)
    zero = like
    for piece in prange((n + PIECE - 1) // PIECE):
        first, last = piece * PIECE, min(n, (piece + 1) * PIECE)
        while first < last:
            count, u = part(last - first, far, FLAT), at(x, first)
            w = landing(at(z, first), far)
            ask(at(u, AHEAD), count, far)
            for i in range(count):
                v = as_type(like, u[i])
                w[i] = zero if v < zero else v  # NaN is not below zero, and so stays
            leave(w, at(z, first), count, far)
            first += count
        settle(far)


@jit(**MAP)
def _relu_backward(like: Any, kind: Any, a: int, dout: int, out: int, n: int, far: Any) -> None:
    x, dy, z = pointer(a, kind), pointer(dout, like), pointer(out, like)
    zero = like
    for piece in prange((n + PIECE - 1) // PIECE):
        first, last = piece * PIECE, min(n, (piece + 1) * PIECE)
        while first < last:
            count, u, d = part(last - first, far, FLAT), at(x, first), at(dy, first)
            w = landing(at(z, first), far)
            ask(at(u, AHEAD), count, far)
            ask(at(d, AHEAD), count, far)
            for i in range(count):
                w[i] = d[i] if as_type(like, u[i]) > zero else zero
            leave(w, at(z, first), count, far)
            first += count
        settle(far)


def relu_forward(x: Array) -> tuple[Array, ReLUCache]:
    """Return max(x, 0)."""
    x = contiguous(x)
    out = empty(x.shape, wide(x))
    _relu_forward(like(out), like(x), address(x), address(out), x.size, is_far(out))
    return out, ReLUCache(x)


def relu_backward(dout: Array, cache: ReLUCache) -> Array:
    """Return dx."""
    x = cache.x
    dout = contiguous(dout)
    out = empty(x.shape, dout.dtype)
    _relu_backward(
        *(like(dout), like(x), address(x), address(dout), address(out), x.size, is_far(out))
    )
    return out


# ---- dropout -------------------------------------------------------------------------------------


class DropoutCache(NamedTuple):
    keep: Array | None  # of x's shape, uint8: 1 where kept; None when p is 0
    factor: float  # 1/(1 - p)


@jit(**MAP)
def _dropout_forward(
    factor: Any,
    a: int,
    out: int,
    keep: int,
    batch: int,
    size: int,
    threshold: np.uint64,
    sample: int,
    step: np.uint64,
    site: np.uint64,
    low: np.uint64,
    high: np.uint64,
) -> None:
    """Drop from ``batch`` samples of ``size`` elements; a task takes PIECE elements of a sample."""
    x, z = pointer(a, factor), pointer(out, factor)
    kept = pointer(keep, np.uint8(0))
    zero = factor - factor
    pieces = (size + PIECE - 1) // PIECE
    for task in prange(batch * pieces):
        b = task // pieces
        first = (task % pieces) * PIECE
        n = min(PIECE, size - first)
        u, w, m = at(x, b * size + first), at(z, b * size + first), at(kept, b * size + first)
        s = np.uint64(sample + b)
        block = first // 4
        for i in range(n // 4):
            w0, w1, w2, w3 = philox(np.uint64(block + i), s, step, site, low, high)
            m[4 * i] = np.uint8(w0 >= threshold)
            m[4 * i + 1] = np.uint8(w1 >= threshold)
            m[4 * i + 2] = np.uint8(w2 >= threshold)
            m[4 * i + 3] = np.uint8(w3 >= threshold)
        if n % 4:
            words = philox(np.uint64(block + n // 4), s, step, site, low, high)
            for i in range(n % 4):
                m[n - n % 4 + i] = np.uint8(words[i] >= threshold)
        for i in range(n):
            w[i] = u[i] * factor if m[i] else zero


@jit(**MAP)
def _dropout_backward(factor: Any, dout: int, keep: int, out: int, n: int) -> None:
    dy, z = pointer(dout, factor), pointer(out, factor)
    kept = pointer(keep, np.uint8(0))
    zero = factor - factor
    for piece in prange((n + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
            z[i] = dy[i] * factor if kept[i] else zero


def dropout_forward(x: Array, *, dropout: Dropout | None) -> tuple[Array, DropoutCache]:
    """Return x with elements dropped; the mask is kept, a byte an element, for the backward."""
    if dropout is None:
        return x, DropoutCache(None, 1.0)
    (p, key), batch, size = dropout, x.shape[0], math.prod(x.shape[1:])
    x = contiguous(x)
    out, keep = empty(x.shape, x.dtype), empty(x.shape, np.uint8)
    factor = 1 / (1 - p)
    word = np.uint64
    _dropout_forward(
        *(x.dtype.type(factor), address(x), address(out), address(keep), batch, size),
        *(word(int(p * 2**32)), key.sample, word(key.step), word(key.site)),
        *(word(key.seed & 0xFFFFFFFF), word(key.seed >> 32)),
    )
    return out, DropoutCache(keep, factor)


def dropout_backward(dout: Array, cache: DropoutCache) -> Array:
    """Return dx."""
    if cache.keep is None:
        return dout
    dout = contiguous(dout)
    out = empty(dout.shape, dout.dtype)
    _dropout_backward(
        *(dout.dtype.type(cache.factor), address(dout), address(cache.keep), address(out)),
        dout.size,
    )
    return out
