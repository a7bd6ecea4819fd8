"""Products of one row with a matrix of blocks of eight bits (``q8.py``), 32 numbers at a time.

A weight (in, out) lies in memory as tiles of 32 inputs and 32 outputs, those of the same outputs
one after the other: in a tile 32 scales as float16, then its rows of 32 numbers. A table (V, D), by
which the head multiplies, is the transpose of such a weight.
"""

import functools
from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from accel.cpu.kernels import SUM
from accel.cpu.simd import Builder, Context, Value, at, declare, pointer, splat, vector_bytes
from accel.jit import jit
from accel.q8_0 import BLOCK

SCALE = 2  # bytes of one
TILE = BLOCK * SCALE + BLOCK * BLOCK  # bytes

_INT64 = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), BLOCK)
_BYTES = ir.VectorType(ir.IntType(8), BLOCK)
_HALVES = ir.VectorType(ir.IntType(16), BLOCK)
_ALIGNED = 2  # bytes: no more is known of an address


def _load(builder: Builder, p: Value, kind: Any) -> Value:
    return builder.load(builder.bitcast(p, ir.PointerType(kind)), align=_ALIGNED)


def _numbers(builder: Builder, p: Value) -> Value:
    """Return 32 int8 as floats."""
    return builder.sitofp(_load(builder, p, _BYTES), _FLOATS)


def _widened(builder: Builder, halves: Value) -> Value:
    """Return what float16 numbers that are not negative are as float32: exactly, in two steps.

    Shifted into place, exponent and digits of a float16 mean 2¹⁵⁻¹²⁷ times as much in a float32.
    """
    digits = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [13] * BLOCK)  # more in a float32
    bits = builder.shl(builder.zext(halves, digits.type), digits)
    factor = ir.Constant(_FLOATS, [2.0**112] * BLOCK)
    return builder.fmul(builder.bitcast(bits, _FLOATS), factor)


def _multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    f = declare(builder, f"llvm.fmuladd.v{BLOCK}f32", [_FLOATS] * 3, _FLOATS)
    return builder.call(f, [a, b, c])


def _rows_together() -> int:
    """Return for how many rows of a tile there are sums of their own.

    32 columns are two registers of 64 bytes, too few sums to keep the multiply-add units busy; of
    smaller registers they are enough.
    """
    return 4 if vector_bytes() == 64 else 1


@intrinsic
def _add_tile(typingctx: Context, tile: Any, u: Any, y: Any, rows: Any) -> Any:
    """y[j] += scale[j] Σ_i u[i] q[i, j], over the first rows of a tile."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        tile, u, y, rows = args
        numbers = builder.gep(tile, [ir.Constant(_INT64, BLOCK * SCALE)])
        sums = [
            cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * BLOCK))
            for _ in range(_rows_together())
        ]

        def add_row(i: Value, target: Value) -> None:
            row = builder.gep(numbers, [builder.mul(i, ir.Constant(_INT64, BLOCK))])
            x = splat(builder, builder.load(builder.gep(u, [i])), BLOCK)
            q = _numbers(builder, row)
            builder.store(_multiply_add(builder, x, q, builder.load(target)), target)

        step = ir.Constant(_INT64, len(sums))
        whole = builder.sub(rows, builder.srem(rows, step))
        with cgutils.for_range_slice(builder, ir.Constant(_INT64, 0), whole, step) as (i, _):
            for n, target in enumerate(sums):
                add_row(builder.add(i, ir.Constant(_INT64, n)), target)
        one = ir.Constant(_INT64, 1)
        with cgutils.for_range_slice(builder, whole, rows, one) as (i, _):
            add_row(i, sums[0])
        total = functools.reduce(builder.fadd, [builder.load(target) for target in sums])
        scales = _widened(builder, _load(builder, tile, _HALVES))
        before = _load(builder, y, _FLOATS)
        after = _multiply_add(builder, scales, total, before)
        builder.store(after, builder.bitcast(y, ir.PointerType(_FLOATS)), align=_ALIGNED)
        return context.get_dummy_value()

    return types.none(tile, u, y, types.int64), codegen


@jit(**SUM)
def matvec(
    one: Any,
    like: Any,
    x: Any,
    weight: int,
    bias_address: int,
    out: Any,
    partial: Any,
    batch: int,
    n_in: int,
    n_out: int,
) -> None:
    """Write x W + b: x (B, n_in), weight in tiles, ``partial`` has room for out."""
    tiles, bias = pointer(weight, like), pointer(bias_address, one)
    blocks = (n_in + BLOCK - 1) // BLOCK
    for column in prange((n_out + BLOCK - 1) // BLOCK):
        sums = at(partial, column * batch * BLOCK)
        for j in range(batch * BLOCK):
            sums[j] = 0
        for block in range(blocks):
            tile, rows = at(tiles, (column * blocks + block) * TILE), n_in - block * BLOCK
            for b in range(batch):
                u = at(x, b * n_in + block * BLOCK)
                _add_tile(tile, u, at(sums, b * BLOCK), min(rows, BLOCK))
        first = column * BLOCK
        for b in range(batch):
            y, z = at(sums, b * BLOCK), at(out, b * n_out + first)
            for j in range(min(BLOCK, n_out - first)):
                z[j] = y[j] + bias[first + j] if bias_address else y[j]
