"""Muon on the CPU: the reference's step to rounding, the same bits whatever the threads."""

from typing import Any

import numba
import numpy as np
import pytest

import accel
from accel.cpu import bf16_muon, muon
from accel.tolerance import round_bf16
from reference import muon as reference
from reference import ops as plain
from reference.types import Array
from tests.helpers import needs  # noqa: F401  (without the instructions: the portable ones)

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.1, "grad_scale": 0.3}


def state(rows: int, columns: int, dtype: Any) -> list[Array]:
    rng = np.random.default_rng(rows + columns)
    return [rng.standard_normal((rows, columns)).astype(dtype) for _ in range(3)]


@pytest.fixture(params=["where they lie", "packed", "bf16"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the products of small matrices made in either way, or of numbers in bfloat16."""
    if request.param == "packed":
        monkeypatch.setattr(muon, "NEAR", 0)
    return str(request.param)


@pytest.fixture
def ops(way: str) -> Any:
    return accel.load("cpu", compute="bf16" if way == "bf16" else "float32")


# one past the tiles of the products, matrices side by side, a sum in two blocks, and squares
SHAPES = [
    (1, 1, None),
    (97, 70, (33, 20, 17)),
    (17, 130, (130,)),
    (700, 101, None),
    (40, 120, (40, 40, 40)),
]


def test_of_nothing_there_is_nothing_to_step(ops: Any) -> None:
    arrays = [np.zeros((0, 3), np.float32) for _ in range(3)]
    ops.muon(*arrays, parts=None, **OPTIONS)
    assert all(a.shape == (0, 3) for a in arrays)


@pytest.mark.parametrize("way", ["where they lie", "packed"], indirect=True)
@pytest.mark.parametrize(("rows", "columns", "parts"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), [(np.float32, 2e-6), (np.float64, 1e-13)])
def test_two_steps_are_the_reference_s(
    ops: Any, rows: int, columns: int, parts: Any, dtype: Any, close: float
) -> None:
    ours, theirs = state(rows, columns, dtype), state(rows, columns, np.float64)
    if dtype == np.float32:
        theirs = [a.astype(np.float64) for a in state(rows, columns, np.float32)]
    for _ in range(2):
        ops.muon(*ours, parts=parts, **OPTIONS)
        plain.muon(*theirs, parts=parts, **OPTIONS)
    for got, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, expected, atol=close * np.abs(expected).max())


def halved(x: Array) -> Array:
    return round_bf16(x).astype(np.float64)


def rounded(x: Array) -> Array:
    """Return a tall x orthogonalised in float64 by products of what bfloat16 makes of it."""
    x = x / np.linalg.norm(x)
    for _ in range(reference.ITERATIONS):
        gram = halved(x).T @ halved(x)
        p = reference.B * gram + reference.C * (halved(gram) @ halved(gram))
        x = reference.A * x + halved(x) @ halved(p)
    return x


def distance(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("long", "side"), [(1, 1), (31, 2), (64, 64), (97, 70), (700, 101), (2100, 40)]
)
@pytest.mark.parametrize("falling", [False, True], ids=["", "with small singular values"])
def test_in_bf16_what_products_read_is_rounded_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, long: int, side: int, falling: bool
) -> None:
    """Sums in another order move some numbers across an edge of bfloat16, and later steps more."""
    rng = np.random.default_rng(side)
    x = rng.standard_normal((long, side))
    if falling:
        x = x * np.logspace(0, -3, side) @ rng.standard_normal((side, side))
    x = x.astype(np.float32)
    for steps in (5, 2):
        monkeypatch.setattr(reference, "ITERATIONS", steps)
        exact = reference.orthogonalise(x.astype(np.float64))
        emulated, got = rounded(x.astype(np.float64)), bf16_muon.orthogonalise(x.copy())
        error = distance(emulated, exact)
        assert distance(got, exact) <= 2 * error + 1e-6
    assert distance(got, emulated) <= 0.4 * error + 1e-6


def test_the_mode_bf16_rounds_and_float32_does_not() -> None:
    found = []
    for compute in ("float32", "bf16"):
        arrays = state(40, 50, np.float32)
        accel.load("cpu", compute=compute).muon(*arrays, **OPTIONS)
        found.append(arrays[0])
    expected = [a.astype(np.float64) for a in state(40, 50, np.float32)]
    plain.muon(*expected, **OPTIONS)
    float32, bf16 = (distance(master, expected[0]) for master in found)
    assert float32 < 1e-6 and 1e-5 < bf16 < 1e-2


def test_the_bits_do_not_depend_on_threads(ops: Any) -> None:
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


def test_views_are_written_where_they_lie(ops: Any, way: str) -> None:
    wide = state(9, 14, np.float32)
    ours, theirs = [a[:, ::2] for a in wide], [a[:, ::2].astype(np.float64) for a in wide]
    odd = [a[:, 1::2].copy() for a in wide]
    ops.muon(*ours, parts=(3, 4), **OPTIONS)
    plain.muon(*theirs, parts=(3, 4), **OPTIONS)
    for got, expected, name in zip(ours, theirs, ("master", "m", "grad"), strict=True):
        rounds = way == "bf16" and name == "master"
        np.testing.assert_allclose(got, expected, atol=5e-3 if rounds else 1e-5)
    for a, kept in zip(wide, odd, strict=True):
        np.testing.assert_array_equal(a[:, 1::2], kept)


def test_a_nan_in_the_gradient_reaches_the_weights_of_its_matrix_alone(ops: Any) -> None:
    arrays = state(8, 12, np.float32)
    arrays[2][3, 2] = np.nan
    ops.muon(*arrays, parts=(6, 6), **OPTIONS)
    assert np.isnan(arrays[0][:, :6]).all() and np.isfinite(arrays[0][:, 6:]).all()
