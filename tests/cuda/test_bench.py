"""The benchmark of the cuda backend does what it says: tried on the shim, with another clock."""

from types import SimpleNamespace
from typing import Any

import pytest

from accel.bench import cuda as bench
from accel.cuda import device as devices
from accel.cuda import ops_bf16
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
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: 2.0)
    return SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)


@pytest.fixture
def tried() -> Any:
    before = devices.use(ShimDevice())
    yield bench.Bench(ops_bf16, fake_cupy(), 1)
    devices.use(before)


def test_every_op_is_timed_and_counted(tried: bench.Bench) -> None:
    config = toy(MYLLM_1B)
    cases = {case.what: case for case in tried.cases(config, 2, 8, 5000)}
    rows = list(tried.op_rows(tried.cases(config, 2, 8, 5000)))
    assert (
        len({row.what for row in rows})
        == len(rows)
        == sum(1 + (case.dout is not None) for case in cases.values())
    )
    assert all(row.ours == 2e-3 for row in rows)
    for case in cases.values():
        assert all(
            (m > 0) != (o > 0)
            for m, o in zip(case.moved, case.operations, strict=True)
            if case.dout is not None or m or o
        )
    assert cases["adamw (5,000 parameters)"].moved[0] == 30 * 5000
    heads, T, d = config.n_heads, 8, config.d_head
    # forward QKᵀ and PV of half a square: 2 · (2 · T·T/2 · d) operations a head
    assert cases["attention (causal)"].operations[0] == 2 * heads * 2 * T * T * d
    assert cases["linear (down)"].operations[1] == 4 * 2 * T * config.d_ff * config.d_model


def test_a_row_says_how_near_its_ceiling_it_is(tried: bench.Bench) -> None:
    tried.measure_ceilings(1000, 16)
    assert (tried.copied, tried.product) == (8 * 1000 / 2e-3, 2 * 16**3 / 2e-3)
    assert tried.row("", lambda: None, 4000, 0).note.endswith("50% of the ceiling")
    assert tried.row("", lambda: None, 0, 2 * 16**3).note.endswith("100% of the ceiling")


def test_the_step_and_its_memory(tried: bench.Bench) -> None:
    step, memory = tried.step(toy(MYLLM_1B), 2, 8)
    assert step.ours == 2e-3 and step.note.startswith("8,000 tokens/s")
    assert memory.ours > 0 and memory.unit == "B"


def test_a_kernel_that_is_wrong_is_not_timed(
    tried: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried.check()
    edits = {"attention.cuh": [("-distance > ahead", "-distance >= ahead")]}
    devices.use(ShimDevice(edits=edits))
    with pytest.raises(ValueError, match="differs from the reference by"):
        tried.check()


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--batch", "0"])
    assert "must be positive" in capsys.readouterr().err
