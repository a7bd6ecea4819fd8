"""Read reference/study/tiled_attention.py first: its softmax, between packed tiles of bfloat16.

``probabilities`` and ``gradients`` are P and dS of ``reference/attention.py``, of one tile; who may
see whom has been settled in the scores.

Beside bfloat16 products the exponentials are what attention waits for, so they are written
vector by vector, as LLVM intermediate code: scores are loaded once, and leave as tiles of the next
product without a stop in memory. The mode bf16 has AVX-512, whose ``VREDUCEPS`` and
``VSCALEFPS`` do the range reduction of 2ˣ::

    2ˣ = 2^floor(x) · p(x - floor(x))         p of degree 4, at most 2.9e-6 off (a minimax fit)

The result is rounded to bfloat16 (2e-3), so more would be thrown away. Scores far below the maximum
give exact zeros.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from accel.cpu.bf16_portable import (
    FLOATS,
    PAIRS,
    STEP,
    TILE,
    constant,
    floor_and_power,
    load_floats,
    portable,
)
from accel.cpu.bf16_tiles import pairs_of, round_pair
from accel.cpu.simd import Builder, Context, Value, declare

# The first is 1, so that the largest score of a query gives exactly 1.
_COEFFICIENTS = (1.0, 6.930448437e-1, 2.412802143e-1, 5.224245385e-2, 1.342669696e-2)
_FLOOR = 0x09  # VREDUCEPS: subtract the floor, raise nothing
_CURRENT_ROUNDING = 4
_LANES = 16


def _splat(x: float) -> Value:
    return ir.Constant(FLOATS, [x] * _LANES)


def _exp2(builder: Builder, x: Value) -> Value:
    """Return 2ˣ of a vector."""
    if portable():
        f, power = floor_and_power(builder, x)
        return builder.fmul(_polynomial(builder, f), power)
    int16, int32 = ir.IntType(16), ir.IntType(32)
    every, rounding = ir.Constant(int16, -1), ir.Constant(int32, _CURRENT_ROUNDING)
    reduce = declare(
        builder,
        "llvm.x86.avx512.mask.reduce.ps.512",
        [FLOATS, int32, FLOATS, int16, int32],
        FLOATS,
    )
    scale = declare(
        builder,
        "llvm.x86.avx512.mask.scalef.ps.512",
        [FLOATS, FLOATS, FLOATS, int16, int32],
        FLOATS,
    )
    f = builder.call(reduce, [x, ir.Constant(int32, _FLOOR), _splat(0.0), every, rounding])
    p = _polynomial(builder, f)
    return builder.call(scale, [p, x, _splat(0.0), every, rounding])


def _polynomial(builder: Builder, f: Value) -> Value:
    """Return p(f) by Horner's rule."""
    fma = declare(builder, "llvm.fma.v16f32", [FLOATS] * 3, FLOATS)
    p = _splat(_COEFFICIENTS[-1])
    for c in reversed(_COEFFICIENTS[:-1]):
        p = builder.call(fma, [p, f, _splat(c)])
    return p


def _store_pairs(builder: Builder, value: Value, p: Value) -> None:
    builder.store(value, builder.bitcast(p, ir.PointerType(PAIRS)), align=4)


@intrinsic
def probabilities(
    typingctx: Context, s: Any, width: Any, steps: Any, m: Any, l: Any, target: Any
) -> Any:
    """P = 2^(S - m) of 16 queries, packed; their sums are added to ``l``.

    Parameters
    ----------
    s : pointer to float32
        The scores: 32 · ``steps`` keys (rows, ``width`` elements apart), 16 queries (columns).
    m, l : pointer to float32
        16 numbers each.
    target : pointer to uint32
        One half of each step of a panel of the right operand: steps are 512 elements apart.
    """

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        s, width, steps, m, l, target = args
        ceiling = load_floats(builder, m)
        with cgutils.for_range(builder, steps) as loop:
            row = builder.gep(s, [builder.mul(loop.index, builder.mul(width, constant(32)))])
            tile = builder.gep(target, [builder.mul(loop.index, constant(STEP))])
            sums = [load_floats(builder, l), _splat(0.0)]
            for pair in range(16):
                both = []
                for k in range(2):
                    x = builder.fsub(load_floats(builder, row), ceiling)
                    both.append(_exp2(builder, x))
                    row = builder.gep(row, [width])
                    sums[k] = builder.fadd(sums[k], both[k])
                p = builder.gep(tile, [constant(16 * pair)])
                _store_pairs(builder, pairs_of(builder, *both), p)
            total_vector = builder.bitcast(l, ir.PointerType(FLOATS))
            builder.store(builder.fadd(*sums), total_vector, align=4)
        return context.get_dummy_value()

    return types.none(s, types.int64, types.int64, m, l, target), codegen


@intrinsic
def gradients(
    typingctx: Context,
    s: Any,
    dp: Any,
    width: Any,
    lse2: Any,
    delta: Any,
    p_rows: Any,
    ds_rows: Any,
    ds_columns: Any,
) -> Any:
    """P = 2^(S - lse2) and dS = P (dP - delta) of 32 keys and 32 queries, packed three ways.

    Parameters
    ----------
    s, dp : pointer to float32
        Scores and gradients of probabilities: 32 keys (rows, ``width`` apart), 32 queries.
    lse2, delta : pointer to float32
        32 numbers each.
    p_rows, ds_rows : pointer to uint32
        A step of a left operand whose rows are keys.
    ds_columns : pointer to uint32
        A step of a right operand whose columns are queries.
    """

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        s, dp, width, lse2, delta, p_rows, ds_rows, ds_columns = args
        halves = [constant(0), constant(_LANES)]
        normal = [load_floats(builder, builder.gep(lse2, [h])) for h in halves]
        mean = [load_floats(builder, builder.gep(delta, [h])) for h in halves]
        with cgutils.for_range(builder, constant(16)) as loop:
            ds: list[list[Value]] = []
            for k in range(2):
                r = builder.add(builder.mul(loop.index, constant(2)), constant(k))
                first, left = builder.mul(r, width), builder.mul(r, constant(16))
                p, g = [], []
                for h in range(2):
                    here = builder.add(first, halves[h])
                    x = load_floats(builder, builder.gep(s, [here]))
                    y = load_floats(builder, builder.gep(dp, [here]))
                    p.append(_exp2(builder, builder.fsub(x, normal[h])))
                    g.append(builder.fmul(p[h], builder.fsub(y, mean[h])))
                for made, target in ((p, p_rows), (g, ds_rows)):
                    rounded = builder.bitcast(round_pair(builder, *made), PAIRS)
                    _store_pairs(builder, rounded, builder.gep(target, [left]))
                ds.append(g)
            for h in range(2):
                offset = builder.add(builder.mul(loop.index, constant(16)), constant(h * TILE))
                both = pairs_of(builder, ds[0][h], ds[1][h])
                _store_pairs(builder, both, builder.gep(ds_columns, [offset]))
        return context.get_dummy_value()

    pointers = (s, dp, types.int64, lse2, delta, p_rows, ds_rows, ds_columns)
    return types.none(*pointers), codegen
