"""AdamW writes the bf16 copies of weights: always the master's bits, with no work done twice."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16, weights
from reference.params import Layout, ParamSpec, bias, decoder_layout, weight
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice, to_bf16
from tests.helpers.models import MODELS

require.shim()

RATES: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHIM = ShimDevice("shuffled")  # one: compiled kernels are kept


@pytest.fixture(autouse=True)
def shim() -> Iterator[ShimDevice]:
    before = devices.use(SHIM)
    SHIM.launches.clear()
    yield SHIM
    devices.use(before)
    assert not weights._ties  # none outlives what parameters returned


class Run:
    """A master with its state, and what the ops read."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.rng = layout, np.random.default_rng(0)
        self.master = ops_bf16.from_numpy(self.rng.standard_normal(layout.size, np.float32))
        self.m, self.v = (ops.from_numpy(np.zeros(layout.size, np.float32)) for _ in range(2))
        self.refresh()

    def update(self, low: int = 0, high: int | None = None) -> None:
        """Take a step on a slice, as a rank does on its own."""
        part = slice(low, self.layout.size if high is None else high)
        grad = ops.from_numpy(self.rng.standard_normal(self.layout.size, np.float32))[part]
        arrays = self.master[part], self.m[part], self.v[part], grad
        n_decayed = min(max(self.layout.n_decayed - low, 0), len(grad))
        ops_bf16.adamw(*arrays, step=1, n_decayed=n_decayed, **RATES)

    def refresh(self) -> None:
        self.params = ops_bf16.parameters(self.layout.views(self.master))

    def check(self) -> None:
        for name, x in self.layout.views(self.master).items():
            expected = to_bf16(x) if x.ndim >= 2 else x
            np.testing.assert_array_equal(self.params[name], expected, err_msg=name)


LAYOUTS = {
    "myllm": decoder_layout(MODELS["myllm"]),
    "odd": Layout([weight("a", (3, 7)), bias("b", 5), weight("c", (1, 1)), weight("d", (2, 3, 5))]),
    "one": Layout([weight("a", (1, 1))]),
    "no matrix": Layout([ParamSpec("gain", (6,), 0.0, 1.0)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_leaves_nothing_to_convert(name: str, shim: ShimDevice) -> None:
    run = Run(LAYOUTS[name])
    run.check()
    held = run.params
    for _ in range(2):
        shim.launches.clear()
        run.update()
        run.refresh()
        assert shim.launches == ["adamw"]
        run.check()
    matrices = [n for n, x in run.layout.views(run.master).items() if x.ndim >= 2]
    assert all(held[n].ctypes.data == run.params[n].ctypes.data for n in matrices)


@given(st.integers(0, 80), st.integers(0, 80))
def test_what_other_ranks_updated_is_converted(a: int, b: int) -> None:
    run = Run(LAYOUTS["odd"])
    size = run.layout.size
    low, high = sorted((min(a, size), min(b, size)))
    if low < high:
        run.update(low, high)
    others = np.random.default_rng(a).standard_normal(size, np.float32)
    run.master[:low], run.master[high:] = others[:low], others[high:]
    SHIM.launches.clear()
    run.refresh()
    run.check()
    if low == 0 and high >= run.layout.n_decayed:
        assert not SHIM.launches
    run.update(high, size) if high < size else None
    run.update(low, high) if low < high else None  # of two slices the first may be forgotten
    run.refresh()
    run.check()
    run.master[:] = others  # what was updated counts for one call
    run.refresh()
    run.check()


def test_other_ops_that_write_the_master_are_seen() -> None:
    run = Run(LAYOUTS["odd"])
    n = run.layout.n_decayed
    for low, high in ((0, n), (5, 9), (n - 1, n + 2), (n, n + 2)):
        run.update()
        ones = ops.from_numpy(np.ones(high - low, np.float32))
        ops_bf16.accumulate(run.master[low:high], ones)
        run.refresh()
        run.check()
        run.update()
        part = run.master[low:high]
        ops_bf16.scale_forward(part, factor=1.7, out=part)
        run.refresh()
        run.check()


def test_a_master_of_scattered_matrices_is_copied_one_by_one() -> None:
    arrays = [ops.from_numpy(np.ones(s, np.float32)) for s in ((2, 3), (3, 4), (4,))]
    params = ops_bf16.parameters(dict(zip("abc", arrays, strict=True)))
    assert [params[n].dtype for n in "abc"] == [np.uint16, np.uint16, np.float32]
    assert not weights._ties


def test_two_masters_do_not_meet() -> None:
    one, two = Run(LAYOUTS["odd"]), Run(LAYOUTS["odd"])
    before = [np.array(two.params[name]) for name in "acd"]
    one.update()
    one.refresh()
    one.check()
    two.check()
    for x, name in zip(before, "acd", strict=True):
        np.testing.assert_array_equal(two.params[name], x)


def test_a_strided_master_is_updated_and_its_copy_with_it() -> None:
    run = Run(LAYOUTS["odd"])
    run.update()
    part = run.master[::2]
    arrays: list[Array] = [ops.from_numpy(np.ones(len(part), np.float32)) for _ in range(3)]
    ops_bf16.adamw(part, *arrays, step=1, n_decayed=0, **RATES)
    run.refresh()
    run.check()


def test_after_muon_the_copy_of_its_matrix_is_made_again() -> None:
    run = Run(LAYOUTS["odd"])
    run.update()
    matrix = run.master[:21].reshape(3, 7)
    m, grad = (ops.from_numpy(np.ones((3, 7), np.float32)) for _ in range(2))
    ops_bf16.muon(matrix, m, grad, lr=0.5, momentum=0.9, weight_decay=0.1)
    run.refresh()
    run.check()
