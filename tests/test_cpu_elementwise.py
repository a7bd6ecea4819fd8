"""Addition on the cpu for every way in which two shapes fit; embedding; arrays without elements."""

import itertools
from typing import Any

import numpy as np
import pytest

import accel
from reference import ops as plain
from tests import needs

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
    if compute == "bf16":
        needs.bf16()
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
