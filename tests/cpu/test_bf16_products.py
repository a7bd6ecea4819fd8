"""Products of bfloat16: blocks in every way there is, packing, linear layers, their weights."""

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accel
from accel.cpu import bf16_gemm, bf16_packing, bf16_tiles, memory
from accel.cpu.halves import to_bf16
from accel.cpu.simd import start
from tests.helpers import needs
from tests.helpers.bf16 import U32, rounded

sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 95, 129]))


@pytest.fixture(scope="module")
def ops():
    return accel.load("cpu", compute="bf16")


def block_kernel(emit):
    """Return a kernel around one way of computing a block; not kept in any cache."""
    block = bf16_tiles.block_by(emit)

    @numba.njit
    def kernel(a, b, c, c_row, steps, add):
        bf16_tiles.configure()
        block(start(a), start(b), start(c), c_row, steps, add)
        bf16_tiles.release()

    return kernel


@pytest.mark.parametrize("way", ["emit_tiles", "emit_vectors", "emit_portable"])
@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize("c_row", [32, 45])
def test_a_block_is_the_product_of_its_tiles(way, steps, c_row):
    """All ways that the processor has; where it has neither instruction, the portable one."""
    if way == "emit_tiles":
        needs.tiles()
        bf16_tiles.enable()
    if way == "emit_vectors" and not needs.HAS_BF16:
        pytest.skip("the processor has no AVX512-BF16 (asked of /proc/cpuinfo)")
    kernel = block_kernel(getattr(bf16_tiles, way))
    rng = np.random.default_rng(steps)
    a, b = (rng.standard_normal((32, 32 * steps)).astype(np.float32) for _ in range(2))
    left = bf16_packing.pack(a, bf16_packing.A, transposed=False)
    right = bf16_packing.pack(b, bf16_packing.B, transposed=True)
    exact, size = rounded(a) @ rounded(b).T, np.abs(rounded(a)) @ np.abs(rounded(b)).T
    for add in (False, True):
        c = rng.standard_normal((32, c_row)).astype(np.float32)
        before = c.astype(np.float64)
        kernel(left.reshape(-1), right.reshape(-1), c.reshape(-1), c_row, steps, add)
        expected, bound = exact + add * before[:, :32], size + add * np.abs(before[:, :32])
        assert np.all(np.abs(c[:, :32] - expected) <= 32 * steps * U32 * bound)
        assert np.array_equal(c[:, 32:], before[:, 32:]), "beside the block nothing is written"


def unpack(packed, side, rows, columns):
    """Return the matrix behind packed panels, by the layout that ``bf16_tiles.py`` states."""
    halves = packed.view(np.uint16).reshape(*packed.shape[:2], 2, 16, 16, 2)
    values = (halves.astype(np.uint32) << 16).view(np.float32)
    if side == "A":  # panel, step, half, row, pair, parity -> (M, K)
        full = values.transpose(0, 2, 3, 1, 4, 5).reshape(packed.shape[0] * 32, -1)
    else:  # panel, step, half, pair, column, parity -> (K, N)
        full = values.transpose(1, 3, 5, 0, 2, 4).reshape(packed.shape[1] * 32, -1)
    assert not full[rows:].any() and not full[:, columns:].any(), "the padding must be zeros"
    return full[:rows, :columns]


@given(rows=sizes, columns=sizes, transposed=st.booleans(), side=st.sampled_from("AB"))
def test_packing_rounds_and_pads_either_side_either_way(rows, columns, transposed, side):
    x = np.random.default_rng(rows).standard_normal((rows, columns + 3)).astype(np.float32)
    x = x[:, :columns]  # rows that are not neighbours
    packed = bf16_packing.pack(x, getattr(bf16_packing, side), transposed=transposed)
    want = rounded(x.T if transposed else x)
    np.testing.assert_array_equal(unpack(packed, side, *want.shape), want)


def test_packing_keeps_nan_and_infinities():
    x = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-3]], np.float32)
    packed = bf16_packing.pack(x, bf16_packing.A, transposed=False)
    np.testing.assert_array_equal(unpack(packed, "A", 1, 6), rounded(x))


@given(rows=sizes, depth=sizes, columns=sizes, has_bias=st.booleans(), seed=st.integers(0, 99))
@example(rows=300, depth=1100, columns=70, has_bias=True, seed=0)  # several passes along k
@example(rows=40, depth=33, columns=2100, has_bias=False, seed=0)  # many columns
@example(rows=20, depth=70, columns=130, has_bias=True, seed=0)  # two threads share the columns
def test_linear_is_the_product_of_rounded_operands(ops, rows, depth, columns, has_bias, seed):
    rng = np.random.default_rng(seed)
    x, w, b, dy = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in [(rows, depth), (depth, columns), (columns,), (rows, columns)]
    )
    with memory.poisoned():
        y, cache = ops.linear_forward(x, w, b if has_bias else None)
        dx, dw, db = ops.linear_backward(dy, cache)
    bx, bw, bdy = rounded(x), rounded(w), rounded(dy)
    for got, want, terms in [
        (y, bx @ bw + (b if has_bias else 0), np.abs(bx) @ np.abs(bw) + 1),
        (dx, bdy @ bw.T, np.abs(bdy) @ np.abs(bw.T)),
        (dw, bx.T @ bdy, np.abs(bx.T) @ np.abs(bdy)),
    ]:
        # Products are exact in float32; every addition, of at most as many, rounds once.
        assert got.dtype == np.float32
        assert np.all(np.abs(got - want) <= max(rows, depth, columns) * 2 * U32 * terms)
    assert (db is None) == (not has_bias)
    if db is not None:
        np.testing.assert_allclose(db, dy.sum(0, dtype=np.float64), atol=rows * 4 * U32 * 8)


def test_no_rows_give_no_gradient(ops):
    x, w = np.ones((0, 40), np.float32), np.ones((40, 33), np.float32)
    y, cache = ops.linear_forward(x, w, np.ones(33, np.float32))
    dx, dw, db = ops.linear_backward(y, cache)
    assert y.shape == (0, 33) and dx.shape == (0, 40) and not dw.any() and not db.any()


def test_linear_writes_weight_gradients_where_told(ops):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 40), dtype=np.float32)
    w, b = rng.standard_normal((40, 33), dtype=np.float32), np.zeros(33, np.float32)
    flat = np.full(40 * 33 + 33, 7, np.float32)
    out = flat[: 40 * 33].reshape(40, 33), flat[40 * 33 :]
    y, cache = ops.linear_forward(x, w, b)
    dy = rng.standard_normal(y.shape, dtype=np.float32)
    want = ops.linear_backward(dy, cache)
    got = ops.linear_backward(dy, cache, out=out)
    assert y.shape == (2, 5, 33) and got[0].shape == x.shape
    for x1, x2, x3 in zip(got[1:], want[1:], out, strict=True):
        np.testing.assert_array_equal(x1, x2)
        np.testing.assert_array_equal(x3, x2)


def test_products_read_the_weights_as_they_are(ops):
    rng = np.random.default_rng(0)
    master = {"w": rng.standard_normal((40, 50), dtype=np.float32), "gain": np.ones(40, np.float32)}
    x = rng.standard_normal((3, 40), dtype=np.float32)
    params = ops.parameters(master)
    before, cache = ops.linear_forward(x, params["w"])
    dx = ops.linear_backward(before, cache)[0]
    master["w"] *= 2
    np.testing.assert_array_equal(ops.linear_forward(x, params["w"])[0], 2 * before)
    np.testing.assert_array_equal(ops.linear_backward(before, cache)[0], 2 * dx)


@pytest.mark.parametrize("turned", [False, True])
@given(rows=sizes, depth=sizes, columns=st.integers(1, 700), seed=st.integers(0, 99))
@example(rows=1, depth=1, columns=600, seed=0)
@example(rows=33, depth=2100, columns=290, seed=0)  # three passes along k, more than one group
@example(rows=70, depth=333, columns=2001, seed=1)
@example(rows=300, depth=40, columns=70, seed=2)  # packed beforehand
def test_an_operand_that_tasks_pack_gives_the_bits_of_a_packed_one(
    turned, rows, depth, columns, seed
):
    rng = np.random.default_rng(seed)
    x, w = (
        rng.standard_normal(shape, np.float32)
        for shape in ((rows, depth), (columns, depth) if turned else (depth, columns))
    )
    bias, plus = rng.standard_normal(columns, np.float32), rng.standard_normal((rows, columns))
    more = {"bias": bias, "plus": plus.astype(np.float32)}
    weight = w.T if turned else w
    operands = [
        bf16_packing.pack(w, bf16_packing.B, transposed=turned),
        weight,
        to_bf16(np.ascontiguousarray(weight.T)).T,
    ]
    for options in ({}, more, more | {"also": bf16_packing.A}, {"also": bf16_packing.B}):
        outs = np.full((3, rows, columns), np.nan, np.float32)
        twins = [
            bf16_gemm.multiply_rows(x, operand, out, **options)
            for operand, out in zip(operands, outs, strict=True)
        ]
        for out, twin in zip(outs[1:], twins[1:], strict=True):
            np.testing.assert_array_equal(out, outs[0])
            np.testing.assert_array_equal(twin, twins[0])
    left = bf16_packing.pack(x, bf16_packing.A, transposed=False)
    for operand, out in zip(operands, outs, strict=True):
        bf16_gemm.multiply(left, operand, out, accumulate=True)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a_part_of_a_prepared_weight_is_not_taken_for_the_whole(ops):
    rng = np.random.default_rng(0)
    w = ops.parameters({"w": rng.standard_normal((64, 64), dtype=np.float32)})["w"]
    x = rng.standard_normal((3, 32), dtype=np.float32)
    ops.linear_forward(rng.standard_normal((3, 64), dtype=np.float32), w)
    got = ops.linear_forward(x, w[:32])[0]
    np.testing.assert_array_equal(got, ops.linear_forward(x, np.array(w[:32]))[0])


@pytest.mark.parametrize("part", [lambda w: w.T, lambda w: w[:, ::2], lambda w: w[:, 8:40]])
def test_a_prepared_weight_may_be_seen_from_another_side(ops, part):
    rng = np.random.default_rng(0)
    w = ops.parameters({"w": rng.standard_normal((64, 96), dtype=np.float32)})["w"]
    seen, same = part(w), np.array(part(w))
    for size, product in (
        (seen.shape[0], lambda x, w: ops.linear_forward(x, w)[0]),
        (seen.shape[1], ops.logits),
    ):
        x = rng.standard_normal((3, size), dtype=np.float32)
        np.testing.assert_array_equal(product(x, seen), product(x, same))
