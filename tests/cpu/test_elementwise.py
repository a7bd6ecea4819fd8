"""The ops on the cpu that make one pass over memory: where pieces meet, and no elements at all."""

import itertools
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu import loss, memory
from reference import ops as plain
from reference.types import DropoutKey

SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (1,), (3,), (0,), (1, 1), (1, 3), (3, 1), (3, 3), (2, 3), (3, 2), (2, 1), (1, 0), (3, 0)),
    *((2, 1, 3), (1, 1, 3), (2, 3, 1), (2, 3, 3)),
)


@pytest.fixture(scope="module")
def ops() -> Any:
    return accel.load("cpu")


@pytest.mark.parametrize(("a_shape", "b_shape"), list(itertools.product(SHAPES, SHAPES)))
def test_shapes_add_as_numpy_adds_them_or_are_refused(
    ops: Any, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    a, b = (np.asarray(rng.standard_normal(s), np.float32) for s in (a_shape, b_shape))
    try:
        exact = a + b
    except ValueError:
        with pytest.raises(ValueError, match="do not broadcast"):
            ops.add_forward(a, b)
        return
    out, cache = ops.add_forward(a, b)
    np.testing.assert_array_equal(out, exact, strict=True)
    dout = np.asarray(rng.standard_normal(out.shape), np.float32)
    expected = plain.add_backward(dout, plain.add_forward(a, b)[1])
    for mine, other in zip(ops.add_backward(dout, cache), expected, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_a_linear_layer_without_elements(compute: str, rows: int, inner: int, outer: int) -> None:
    ops = accel.load("cpu", compute=compute)
    x, weight = np.ones((rows, 2, inner), np.float32), np.ones((inner, outer), np.float32)
    out, cache = ops.linear_forward(x, weight)
    assert out.shape == (rows, 2, outer) and not out.any() == (inner == 0 or not out.size)
    dx, dweight, _ = ops.linear_backward(np.ones_like(out), cache)
    assert dx.shape == x.shape and dweight.shape == weight.shape
    assert np.all(dx == outer) and np.all(dweight == 2 * rows)


@pytest.mark.parametrize("width", [1, 3, 1023, 1024, 1025])
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 700])
@pytest.mark.parametrize("ids", ["none", "one", "few", "many", "all alike"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_embedding_sums_in_the_order_of_the_ids(
    ops: Any, width: int, vocabulary: int, ids: str, accumulate: bool
) -> None:
    rng = np.random.default_rng(width + vocabulary)
    n = {"none": 0, "one": 1, "few": 40}.get(ids, 900)
    tokens = np.full(n, vocabulary - 1) if ids == "all alike" else rng.integers(0, vocabulary, n)
    table = np.zeros((vocabulary, width), np.float32)
    dout = rng.standard_normal((n, width), dtype=np.float32)
    _, cache = ops.embedding_forward(tokens.astype(np.int32), table)
    out = rng.standard_normal(table.shape, dtype=np.float32)
    exact = out.copy() if accumulate else table
    np.add.at(exact, tokens, dout)  # one after the other, in the same precision
    given = ops.embedding_backward(dout, cache, out=out, accumulate=accumulate)
    np.testing.assert_array_equal(given, exact)
    assert given is out


def test_embedding_may_be_added_to_part_of_an_array(ops: Any) -> None:
    ids, table = np.array([1, 3, 1], np.int32), np.zeros((4, 5), np.float32)
    _, cache = ops.embedding_forward(ids, table)
    wide = np.arange(40, dtype=np.float32).reshape(4, 10)
    exact = wide[:, ::2].copy()
    np.add.at(exact, ids, np.ones((3, 5), np.float32))
    ops.embedding_backward(np.ones((3, 5), np.float32), cache, out=wide[:, ::2], accumulate=True)
    np.testing.assert_array_equal(wide[:, ::2], exact)


def test_scale_may_write_over_part_of_what_it_reads(ops: Any) -> None:
    x = np.arange(40_000, dtype=np.float32)
    expected = 2 * x[:-1]
    ops.scale_forward(x[:-1], factor=2.0, out=x[1:])
    np.testing.assert_array_equal(x[1:], expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (65, 17), (130, 384), (64, 1409), (0, 3)])
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_what_a_norm_s_backward_adds_has_the_bits_of_add(
    ops: Any, op: str, rows: int, width: int, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    x, dout, plus = (rng.standard_normal((rows, width)).astype(dtype) for _ in range(3))
    gains = [rng.standard_normal(width).astype(dtype) for _ in range(1 + (op == "layernorm"))]
    _, cache = getattr(ops, f"{op}_forward")(x, *gains, eps=1e-5)
    backward = getattr(ops, f"{op}_backward")
    dx, *others = backward(dout, cache)
    out = [np.full_like(gain, np.nan) for gain in gains]
    both, *same = backward(dout, cache, plus=plus, out=out[0] if op == "rmsnorm" else tuple(out))
    np.testing.assert_array_equal(both, ops.add_forward(plus, dx)[0], strict=True)
    for alone, beside, written in zip(others, same, out, strict=True):
        np.testing.assert_array_equal(alone, beside)
        np.testing.assert_array_equal(alone, written)


@pytest.mark.parametrize(
    ("compute", "dtype"), [("float32", "f4"), ("float32", "f8"), ("bf16", "f4")]
)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 1, 1), (65, 17, 33), (200, 1100, 130), (300, 500, 2200), (3, 0, 5), (0, 4, 5)],
)
def test_what_a_linear_layer_adds_has_the_bits_of_add(
    compute: str, dtype: str, rows: int, depth: int, columns: int
) -> None:
    """Tiles and their edges, several passes along the sum, and what lies in strides."""
    ops, rng = accel.load("cpu", compute=compute), np.random.default_rng(0)
    shapes = (rows, depth), (depth, columns), (columns,), (rows, 2 * columns)
    x, weight, bias, wide = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    out, _ = ops.linear_forward(x, weight)
    whole, _ = ops.linear_forward(x, weight, bias)
    np.testing.assert_array_equal(whole, ops.add_forward(out, bias)[0], strict=True)
    for plus in (wide[:, ::2], wide[:, :columns].copy()):
        for given, alone in ((None, out), (bias, whole)):
            with memory.poisoned():
                both, _ = ops.linear_forward(x, weight, given, plus=plus)
            np.testing.assert_array_equal(both, ops.add_forward(alone, plus)[0], strict=True)


def test_dropout_draws_by_the_place_in_the_sample(ops: Any) -> None:
    """A sample of several pieces: each must go on where the last one ended."""
    x, key = np.ones((2, 40_001), np.float32), DropoutKey(1, 2, 3, 4)
    out, cache = ops.dropout_forward(x, p=0.3, key=key)
    expected, _ = plain.dropout_forward(x, p=0.3, key=key)
    np.testing.assert_array_equal(out != 0, expected != 0)
    np.testing.assert_array_equal(ops.dropout_backward(x, cache), out)


def test_adamw_decays_up_to_a_place_that_no_piece_divides(ops: Any) -> None:
    rng = np.random.default_rng(0)
    ours = [rng.random(100_003) for _ in range(4)]
    theirs = [array.copy() for array in ours]
    for adamw, state in ((ops.adamw, ours), (plain.adamw, theirs)):
        adamw(
            *state,
            **{"step": 3, "lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
            **{"weight_decay": 0.1, "n_decayed": 40_003, "grad_scale": 0.5},
        )
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-13, atol=1e-15)


def test_the_loss_is_the_same_in_any_chunks(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, head, bias = (rng.standard_normal(shape) for shape in ((600, 7), (11, 7), (11,)))
    targets = rng.integers(0, 11, 600).astype(np.int32)
    results = []
    for elements, least in ((1, 1), (loss.CHUNK_ELEMENTS, loss.LEAST_ROWS)):
        monkeypatch.setattr(loss, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(loss, "LEAST_ROWS", least)
        total, cache = ops.linear_cross_entropy_forward(x, head, targets, None, bias)
        results.append((total.total, *ops.linear_cross_entropy_backward(0.5, cache)))
    for pieces, whole in zip(*results, strict=True):
        np.testing.assert_allclose(pieces, whole, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_leave_the_head_s_gradient_to_the_backward(ops: Any, biased: bool) -> None:
    """As many rows as the model is wide, or one more; both give what the reference gives."""
    rng, D, V = np.random.default_rng(0), 24, 37
    head, bias = rng.standard_normal((V, D)), rng.standard_normal(V) if biased else None
    for rows in (1, D, D + 1):
        x, targets = rng.standard_normal((rows, D)), rng.integers(0, V, rows).astype(np.int32)
        mask = rng.random(rows) < 0.8
        _, cache = ops.linear_cross_entropy_forward(x, head, targets, mask, bias)
        _, exact = plain.linear_cross_entropy_forward(x, head, targets, mask, bias)
        assert isinstance(cache.cache.dhead, loss.Later) == (rows <= D)
        for factor in (1.0, 0.3, 1.0):  # again, from what is kept
            wanted = plain.linear_cross_entropy_backward(factor, exact)
            strided = np.empty((D, V)).T
            for out in (None, np.empty((V, D)), strided):
                found = ops.linear_cross_entropy_backward(factor, cache, out=(out, None))
                for mine, other in zip(found, wanted, strict=True):
                    assert (mine is None) == (other is None)
                    if other is not None:
                        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-13)
                if out is not None:
                    np.testing.assert_allclose(out, wanted[1], rtol=1e-12, atol=1e-13)


def test_split_heads_joins_parts_in_the_order_given(ops: Any) -> None:
    whole = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    _, cache = ops.split_heads_forward(whole, heads=(2, 2))
    first, second = whole[:, :, :2], whole[:, :, 2:]
    for parts in ((first, second), (second, first), (first, first)):
        given = ops.split_heads_backward(parts, cache)
        np.testing.assert_array_equal(given, np.concatenate(parts, axis=2))


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_a_linear_layer_refuses_another_x_in_its_backward(compute: str) -> None:
    ops = accel.load("cpu", compute=compute)
    x, weight = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    out, cache = ops.linear_forward(x, weight, keep_x=False)
    with pytest.raises(ValueError, match="the dtype of the forward's x"):
        ops.linear_backward(out, cache, x=x.astype(np.float64))


def test_adamw_takes_numpy_s_scalars_for_numbers(ops: Any) -> None:
    rng = np.random.default_rng(0)
    ours = [rng.random(7) for _ in range(4)]
    theirs = [array.copy() for array in ours]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    short = {name: np.float16(number) for name, number in numbers.items()}
    ops.adamw(*ours, step=3, n_decayed=4, **short)
    plain.adamw(*theirs, step=3, n_decayed=4, **short)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-13)


def test_accumulate_reads_what_it_writes_before_it_does(ops: Any) -> None:
    x = np.arange(40_000, dtype=np.float64)
    expected = x[1:] + x[:-1]
    ops.accumulate(x[1:], x[:-1])
    np.testing.assert_array_equal(x[1:], expected)
