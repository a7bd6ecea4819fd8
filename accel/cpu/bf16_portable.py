"""Vectors of the mode bf16 in LLVM's code, and what stands in for its instructions in tests.

``MYLLM_BF16=portable`` makes the mode run on any processor, slowly: the three functions at the end
take the place of AMX or AVX512-BF16 (``bf16_tiles.py``) and of AVX-512 (``bf16_softmax.py``), so
that all around them is tested where neither is.
"""

import os

from llvmlite import ir
from numba.core import cgutils

from accel.cpu.simd import Builder, Value, declare, splat

SIDE = 32  # rows and columns of a block of C, and the step along k
TILE = 256  # elements of a packed tile: 16 rows of 16 pairs
STEP = 2 * TILE  # of the two tiles of one step along k

INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOATS = ir.VectorType(ir.FloatType(), 16)
PAIRS = ir.VectorType(INT32, 16)


def portable() -> bool:
    """Whether the mode is compiled for any processor, for tests."""
    return os.environ.get("MYLLM_BF16") == "portable"


def constant(n: int) -> Value:
    return ir.Constant(INT64, n)


def offset(builder: Builder, p: Value, *elements: int) -> Value:
    return builder.gep(p, [constant(sum(elements))])


def load_floats(builder: Builder, p: Value) -> Value:
    return builder.load(builder.bitcast(p, ir.PointerType(FLOATS)), align=4)


# --- in place of the instructions ----------------------------------------------------------------


def emit_portable(
    builder: Builder, a: Value, b: Value, c: Value, c_row: Value, steps: Value, add: Value
) -> None:
    """Emit the block in float32, row by row."""
    multiply = declare(builder, "llvm.fmuladd.v16f32", [FLOATS] * 3, FLOATS)
    zero, high = ir.Constant(FLOATS, [0.0] * 16), ir.Constant(PAIRS, [0xFFFF0000] * 16)
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(2)]

    def widened(pairs: Value) -> list[Value]:
        """Return the first and the second number of each pair."""
        low = builder.shl(pairs, ir.Constant(PAIRS, [16] * 16))
        return [builder.bitcast(x, FLOATS) for x in (low, builder.and_(pairs, high))]

    with cgutils.for_range(builder, constant(SIDE)) as row:
        a_row = builder.gep(a, [builder.mul(row.index, constant(16))])
        c_line = builder.gep(c, [builder.mul(row.index, c_row)])
        for half, total in enumerate(sums):
            before = load_floats(builder, offset(builder, c_line, 16 * half))
            builder.store(builder.select(add, before, zero), total)
        with (
            cgutils.for_range(builder, steps) as step,
            cgutils.for_range(builder, constant(16)) as k,
        ):
            first = builder.mul(step.index, constant(STEP))
            one = builder.load(builder.gep(a_row, [builder.add(first, k.index)]), align=4)
            left = widened(splat(builder, one, 16))
            here = builder.gep(b, [builder.add(first, builder.mul(k.index, constant(16)))])
            for half, total in enumerate(sums):
                p = builder.bitcast(offset(builder, here, TILE * half), ir.PointerType(PAIRS))
                for x, y in zip(left, widened(builder.load(p, align=4)), strict=True):
                    builder.store(builder.call(multiply, [x, y, builder.load(total)]), total)
        for half, total in enumerate(sums):
            p = builder.bitcast(offset(builder, c_line, 16 * half), ir.PointerType(FLOATS))
            builder.store(builder.load(total), p, align=4)


def round_portably(builder: Builder, *halves: Value) -> Value:
    """Return the upper halves of 2 · 16 float32, rounded to nearest even; NaN stays."""

    def every(n: int) -> Value:
        return ir.Constant(PAIRS, [n] * 16)

    made = []
    for x in halves:
        bits = builder.bitcast(x, PAIRS)
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        rounded = builder.lshr(builder.add(builder.add(bits, every(0x7FFF)), odd), every(16))
        rounded = builder.select(builder.fcmp_unordered("uno", x, x), every(0x7FC0), rounded)
        made.append(builder.trunc(rounded, ir.VectorType(ir.IntType(16), 16)))
    return builder.shuffle_vector(*made, ir.Constant(ir.VectorType(INT32, 32), list(range(32))))


def floor_and_power(builder: Builder, x: Value) -> tuple[Value, Value]:
    """Return x - floor(x) and 2^floor(x), of 16 float32; NaN falls through both comparisons."""

    def every(n: float) -> Value:
        return ir.Constant(FLOATS, [n] * 16)

    for sign, end in (("<", -127.0), (">", 128.0)):
        x = builder.select(builder.fcmp_ordered(sign, x, every(end)), every(end), x)
    floor = builder.call(declare(builder, "llvm.floor.v16f32", [FLOATS], FLOATS), [x])
    to_int = declare(builder, "llvm.fptosi.sat.v16i32.v16f32", [FLOATS], PAIRS)
    exponent = builder.add(builder.call(to_int, [floor]), ir.Constant(PAIRS, [127] * 16))
    power = builder.shl(exponent, ir.Constant(PAIRS, [23] * 16))
    return builder.fsub(x, floor), builder.bitcast(power, FLOATS)
