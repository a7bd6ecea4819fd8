"""Addition on the cpu for every way in which two shapes fit together; arrays without elements."""

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
