"""RMSNorm and LayerNorm. Kernels: ``norm.cu``, and ``reduce.cu`` for the last sum over rows.

Forward reads x and writes y, 2·D·e bytes a row; backward reads dy and x and writes dx, 3·D·e, or
4·D·e with what is to be added to dx. On 65,536 rows of 1,792 bf16 that is 0.47, 0.70 and 0.94 GB:
0.12, 0.18 and 0.23 ms at 4.0 TB/s. Means and roots are kept in float32, four or eight bytes a row.
Gains and shifts are read in float32.
"""

from typing import NamedTuple

from accel.cuda.arrays import (
    check_out,
    contiguous,
    pack,
    sum_rows,
    to_dtype,
)
from accel.cuda.device import F32, SCRATCH, THREADS, ceil_div, empty, launch
from reference.types import Array

# Blocks of a backward pass, of THREADS threads each or more of fewer: each stays for ROWS rows, or
# as many as it must, and leaves one row of partial sums. How many there are, and with it the order
# of summation, depends on nothing but the shape.
BLOCKS, ROWS = 512, 8


class RMSNormCache(NamedTuple):
    x: Array  # (..., D)
    gain: Array  # (D,) float32
    rstd: Array  # (N,) float32, of each row


class LayerNormCache(NamedTuple):
    x: Array  # (..., D)
    gain: Array  # (D,) float32
    mean: Array  # (N,) float32
    rstd: Array  # (N,) float32


def _threads(x: Array) -> int:
    return min(THREADS, 32 * ceil_div(x.shape[-1], 32 * pack(x)))


def _blocks(x: Array, rows: int) -> int:
    return min(ceil_div(rows, ROWS), BLOCKS * (THREADS // _threads(x)))


def _sums(x: Array) -> int:
    """Return the bytes of a float for each column, in whole packs."""
    return 4 * pack(x) * ceil_div(x.shape[-1], pack(x))


def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> tuple[Array, RMSNormCache]:
    """Return x / √(mean(x²) + eps) · gain, shape (..., D)."""
    x, gain = contiguous(x), to_dtype(gain, F32)
    D = x.shape[-1]
    rows = x.size // D
    out, rstd = empty(x.shape, x.dtype), empty((rows,), F32)
    given = {"x": x, "gain": gain, "y": out, "rstd": rstd, "D": D, "eps": eps}
    launch("norm", "rmsnorm_forward", rows, _threads(x), SCRATCH, **given)
    return out, RMSNormCache(x, gain, rstd)


def rmsnorm_backward(
    dout: Array, cache: RMSNormCache, *, out: tuple[Array | None], plus: Array | None
) -> tuple[Array, Array]:
    """Return (dx + plus, dgain); dgain is float32."""
    x, gain, rstd = cache
    dgain = check_out(out[0], gain.shape)
    D = x.shape[-1]
    rows = x.size // D
    blocks = _blocks(x, rows)
    dx, partial = empty(x.shape, x.dtype), empty((blocks, D), F32)
    given = {"dy": contiguous(dout), "x": x, "gain": gain, "rstd": rstd, "N": rows, "D": D}
    given |= {"dx": dx, "partial": partial}
    plus, shared = None if plus is None else contiguous(plus), 2 * SCRATCH + _sums(x)
    launch("norm", "rmsnorm_backward", blocks, _threads(x), shared, plus=plus, **given)
    sum_rows(partial, dgain)
    return dx, dgain


def layernorm_forward(
    x: Array, gain: Array, bias: Array, *, eps: float
) -> tuple[Array, LayerNormCache]:
    """Return (x - mean) / √(var + eps) · gain + bias, shape (..., D)."""
    x, gain = contiguous(x), to_dtype(gain, F32)
    D = x.shape[-1]
    rows = x.size // D
    out = empty(x.shape, x.dtype)
    mean, rstd = empty((rows,), F32), empty((rows,), F32)
    given = {"x": x, "gain": gain, "bias": to_dtype(bias, F32), "D": D, "eps": eps}
    given |= {"y": out, "mean": mean, "rstd": rstd}
    launch("norm", "layernorm_forward", rows, _threads(x), SCRATCH, **given)
    return out, LayerNormCache(x, gain, mean, rstd)


def layernorm_backward(
    dout: Array,
    cache: LayerNormCache,
    *,
    out: tuple[Array | None, Array | None],
    plus: Array | None,
) -> tuple[Array, Array, Array]:
    """Return (dx + plus, dgain, dbias); the last two are float32."""
    x, gain, mean, rstd = cache
    dgain, dbias = (check_out(o, gain.shape) for o in out)
    D = x.shape[-1]
    rows = x.size // D
    blocks = _blocks(x, rows)
    dx, partial = empty(x.shape, x.dtype), empty((blocks, 2 * D), F32)
    given = {"dy": contiguous(dout), "x": x, "gain": gain, "mean": mean, "rstd": rstd}
    given |= {"dx": dx, "partial": partial, "N": rows, "D": D}
    plus, shared = None if plus is None else contiguous(plus), 4 * SCRATCH + 2 * _sums(x)
    launch("norm", "layernorm_backward", blocks, _threads(x), shared, plus=plus, **given)
    sum_rows(partial, dgain, dbias)
    return dx, dgain, dbias
