"""add, scale, relu, gelu, swiglu and dropout: kernels that run at the speed of memory.

Kernels: ``elementwise.cu``; ``layout.cu`` for an addition that broadcasts. Bytes moved are those of
the arrays, each once: with e the element size, n·3e for add, n·2e forward and n·3e backward for the
activations, n·2e for dropout, which draws its bits again in the backward instead of keeping them.
At 4.0 TB/s (an H200 reaches about that of its 4.8) swiglu on 65,536 rows of 2·4,864 bf16 moves
1.9 GB forward and 3.2 GB backward: 0.5 and 0.8 ms.
"""

from typing import NamedTuple

import numpy as np

from accel.cuda.arrays import (
    contiguous,
    fold,
    numbered,
    packs,
    strides,
)
from accel.cuda.device import MAX_GRID_Y, THREADS, ceil_div, empty, launch
from accel.cuda.weights import written
from reference.types import Array, Dropout

SOURCE = "elementwise"


class AddCache(NamedTuple):
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


class ActivationCache(NamedTuple):
    x: Array  # (...), contiguous


# ---- add, scale ----------------------------------------------------------------------------------


def add_forward(a: Array, b: Array) -> tuple[Array, AddCache]:
    """Return a + b."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    out = empty(shape, a.dtype)
    if a.shape == b.shape:
        given = {"a": contiguous(a), "b": contiguous(b), "y": out, "n": out.size}
        launch(SOURCE, "add", packs(out, out.size), **given)
    else:
        sizes, a_steps, b_steps = fold(shape, strides(a, shape), strides(b, shape))
        numbers = numbered(s=sizes, a=a_steps, b=b_steps)
        launch("layout", "add_broadcast", ceil_div(out.size, THREADS), a=a, b=b, out=out, **numbers)
    return out, AddCache(a.shape, b.shape)


def add_backward(dout: Array, cache: AddCache) -> tuple[Array, Array]:
    """Return (da, db); without broadcasting both are dout itself."""
    return _sum_to(dout, cache.a_shape), _sum_to(dout, cache.b_shape)


def _sum_to(dout: Array, shape: tuple[int, ...]) -> Array:
    if dout.shape == shape:
        return dout
    dout = contiguous(dout)
    steps = strides(dout)
    new = dout.ndim - len(shape)
    summed = [i < new or (shape[i - new] == 1 and n != 1) for i, n in enumerate(dout.shape)]
    # the forward has at most four axes that do not join, and one of them is summed
    k, p = fold(*zip(*_axes(dout.shape, steps, summed, False), strict=True), axes=3)
    r, q = fold(*zip(*_axes(dout.shape, steps, summed, True), strict=True))
    out = empty(shape, dout.dtype)
    numbers = numbered(k=k, p=p, r=r, q=q)
    launch("layout", "sum_axes", ceil_div(out.size, THREADS), x=dout, out=out, **numbers)
    return out


def _axes(
    shape: tuple[int, ...], steps: tuple[int, ...], summed: list[bool], which: bool
) -> list[tuple[int, int]]:
    chosen = [(n, s) for n, s, gone in zip(shape, steps, summed, strict=True) if gone == which]
    return chosen or [(1, 0)]


def scale_forward(x: Array, *, factor: float, out: Array | None = None) -> tuple[Array, float]:
    """Return factor · x; ``out``, which may be x itself, receives it."""
    if out is not None:
        written(out)
    return _scaled(x, factor, out), factor


def scale_backward(dout: Array, factor: float) -> Array:
    """Return dx."""
    return _scaled(dout, factor)


def _scaled(x: Array, factor: float, out: Array | None = None) -> Array:
    x = contiguous(x)
    out = empty(x.shape, x.dtype) if out is None else out
    launch(SOURCE, "scale", packs(x, x.size), x=x, y=out, n=x.size, factor=factor)
    return out


# ---- activations ---------------------------------------------------------------------------------


def relu_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return max(x, 0)."""
    return _activate("relu", x)


def relu_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx."""
    return _activate_backward("relu", dout, cache)


def gelu_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return x Φ(x)."""
    return _activate("gelu", x)


def gelu_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx."""
    return _activate_backward("gelu", dout, cache)


def gelu_tanh_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return GELU by its tanh approximation."""
    return _activate("gelu_tanh", x)


def gelu_tanh_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx."""
    return _activate_backward("gelu_tanh", dout, cache)


def _activate(op: str, x: Array) -> tuple[Array, ActivationCache]:
    x = contiguous(x)
    out = empty(x.shape, x.dtype)
    launch(SOURCE, f"{op}_forward", packs(x, x.size), x=x, y=out, n=x.size)
    return out, ActivationCache(x)


def _activate_backward(op: str, dout: Array, cache: ActivationCache) -> Array:
    x = cache.x
    dx = empty(x.shape, x.dtype)
    given = {"x": x, "dy": contiguous(dout), "dx": dx, "n": x.size}
    launch(SOURCE, f"{op}_backward", packs(x, x.size), **given)
    return dx


def swiglu_forward(x: Array) -> tuple[Array, ActivationCache]:
    """Return silu(gate) · up of x (..., 2F), whose first half is the gate."""
    x = contiguous(x)
    F = x.shape[-1] // 2
    out = empty((*x.shape[:-1], F), x.dtype)
    rows = out.size // max(F, 1)
    grid = (packs(x, F), min(rows, MAX_GRID_Y))
    launch(SOURCE, "swiglu_forward", grid, x=x, y=out, rows=rows, F=F)
    return out, ActivationCache(x)


def swiglu_backward(dout: Array, cache: ActivationCache) -> Array:
    """Return dx (..., 2F)."""
    x = cache.x
    F = x.shape[-1] // 2
    rows = x.size // max(2 * F, 1)
    dx = empty(x.shape, x.dtype)
    grid = (packs(x, F), min(rows, MAX_GRID_Y))
    launch(SOURCE, "swiglu_backward", grid, x=x, dy=contiguous(dout), dx=dx, rows=rows, F=F)
    return dx


# ---- dropout -------------------------------------------------------------------------------------


def dropout_forward(x: Array, *, dropout: Dropout | None) -> tuple[Array, Dropout | None]:
    """Return x (B, ...) with elements dropped; None is the identity."""
    return _drop(x, dropout), dropout


def dropout_backward(dout: Array, dropout: Dropout | None) -> Array:
    """Return dx."""
    return _drop(dout, dropout)


def _drop(x: Array, dropout: Dropout | None) -> Array:
    if dropout is None:
        return x
    x = contiguous(x)
    batch = x.shape[0]
    size = x.size // max(batch, 1)
    out = empty(x.shape, x.dtype)
    grid = (packs(x, size), min(batch, MAX_GRID_Y))
    launch(SOURCE, "dropout", grid, x=x, y=out, size=size, batch=batch, **drawn_by(dropout))
    return out


def drawn_by(dropout: Dropout) -> dict[str, float]:
    """Return what kernels drop by: the factor of what is kept, the threshold, and the key."""
    p, key = dropout
    return {
        "keep_scale": 1 / (1 - p),
        "threshold": int(p * 2**32),
        **{"sample": key.sample, "step": key.step, "site": key.site},
        **{"k0": key.seed & 0xFFFFFFFF, "k1": key.seed >> 32},
    }
