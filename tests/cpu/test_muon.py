"""Muon on the CPU: the reference's step to rounding, the same bits whatever the threads."""

from typing import Any

import numba
import numpy as np
import pytest

from accel.cpu import muon, ops
from reference import ops as plain
from reference.types import Array

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.1, "grad_scale": 0.3}


def state(rows: int, columns: int, dtype: Any) -> list[Array]:
    rng = np.random.default_rng(rows + columns)
    return [rng.standard_normal((rows, columns)).astype(dtype) for _ in range(3)]


@pytest.fixture(params=["where they lie", "packed"], autouse=True)
def near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the products of small matrices made in either way."""
    if request.param == "packed":
        monkeypatch.setattr(muon, "NEAR", 0)


# one past the tiles of the products, matrices side by side, a sum in two blocks, and squares
SHAPES = [
    (1, 1, None),
    (97, 70, (33, 20, 17)),
    (17, 130, (130,)),
    (700, 101, None),
    (40, 120, (40, 40, 40)),
]


@pytest.mark.parametrize(("rows", "columns", "parts"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), [(np.float32, 2e-6), (np.float64, 1e-13)])
def test_two_steps_are_the_reference_s(
    rows: int, columns: int, parts: Any, dtype: Any, close: float
) -> None:
    ours, theirs = state(rows, columns, dtype), state(rows, columns, np.float64)
    if dtype == np.float32:
        theirs = [a.astype(np.float64) for a in state(rows, columns, np.float32)]
    for _ in range(2):
        ops.muon(*ours, parts=parts, **OPTIONS)
        plain.muon(*theirs, parts=parts, **OPTIONS)
    for got, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, expected, atol=close * np.abs(expected).max())


def test_the_bits_do_not_depend_on_threads() -> None:
    found = []
    before = numba.get_num_threads()
    try:
        for threads in (1, before):
            numba.set_num_threads(threads)
            arrays = state(190, 300, np.float32)
            ops.muon(*arrays, parts=(100, 200), **OPTIONS)
            found.append(b"".join(a.tobytes() for a in arrays))
    finally:
        numba.set_num_threads(before)
    assert found[0] == found[1]


def test_views_are_written_where_they_lie() -> None:
    wide = state(9, 14, np.float32)
    ours, theirs = [a[:, ::2] for a in wide], [a[:, ::2].astype(np.float64) for a in wide]
    odd = [a[:, 1::2].copy() for a in wide]
    ops.muon(*ours, parts=(3, 4), **OPTIONS)
    plain.muon(*theirs, parts=(3, 4), **OPTIONS)
    for got, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    for a, kept in zip(wide, odd, strict=True):
        np.testing.assert_array_equal(a[:, 1::2], kept)


def test_a_nan_in_the_gradient_reaches_the_weights_of_its_matrix_alone() -> None:
    arrays = state(8, 12, np.float32)
    arrays[2][3, 2] = np.nan
    ops.muon(*arrays, parts=(6, 6), **OPTIONS)
    assert np.isnan(arrays[0][:, :6]).all() and np.isfinite(arrays[0][:, 6:]).all()
