"""The benchmark of the cuda backend does what it says: tried on the shim, with another clock."""

from types import SimpleNamespace
from typing import Any

import pytest

from accel.cuda import bench, ops_bf16
from accel.cuda import device as devices
from reference.presets import MYLLM_1B
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.helpers.models import toy

require.shim()


class Event:
    """A CUDA event on which every call takes two milliseconds."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def fake_cupy() -> Any:
    pool = SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 12345)
    cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: 2.0)
    return SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)


@pytest.fixture
def tried() -> Any:
    before = devices.use(ShimDevice())
    yield bench.Bench(ops_bf16, fake_cupy(), 1)
    devices.use(before)


def test_every_op_is_timed_and_counted(tried: bench.Bench) -> None:
    config = toy(MYLLM_1B)
    rows = tried.op_rows(config, 2, 8, 5000)
    by_name = {row.what: row for row in rows}
    assert len(by_name) == len(rows) and all(row.ms == 2.0 for row in rows)
    assert all((row.bytes > 0) != (row.operations > 0) for row in rows)
    assert by_name["adamw (5,000 parameters)"].bytes == 30 * 5000
    heads, T, d = config.n_heads, 8, config.d_head
    # forward QKᵀ and PV of half a square: 2 · (2 · T·T/2 · d) operations a head
    assert by_name["attention (causal) forward"].operations == 2 * heads * 2 * T * T * d
    assert by_name["linear (down) backward"].operations == 4 * 2 * T * config.d_ff * config.d_model


def test_the_step_and_the_ceilings(tried: bench.Bench) -> None:
    assert tried.training_step(toy(MYLLM_1B), 2, 8) == (2.0, 12345)
    assert tried.ceilings(1000, 16) == (8 * 1000 / 2e-3, 2 * 16**3 / 2e-3)


def test_operations_of_the_model_are_those_of_the_design() -> None:
    # 8.80 GFLOP a token at 8,192 tokens
    assert bench.model_operations(MYLLM_1B, 8192) == pytest.approx(8.80e9, rel=0.005)


def test_a_kernel_that_is_wrong_is_not_timed(
    tried: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried.check()
    edits = {"attention.cuh": [("u > t + S - T", "u >= t + S - T")]}
    devices.use(ShimDevice(edits=edits))
    with pytest.raises(ValueError, match=r"off by .* from the reference"):
        tried.check()


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--batch", "0"]) == 2
    assert "must be positive" in capsys.readouterr().err
