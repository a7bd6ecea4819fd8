"""The benchmark of the cuda backend does what it says: tried on the shim, with another clock."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.bench import cuda as bench
from accel.cuda import device as devices
from accel.cuda import ops_bf16
from reference.ops import OPS
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.cuda_shim.myllm import clocked, install
from tests.helpers.models import toy

require.shim()


class Events:
    """CUDA's events and copies: between two events are two milliseconds; what happens is kept."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.done = [False]  # of the next events, whether they are over when asked; the last stays

    def event(self) -> Any:
        def note(what: str) -> Any:
            return lambda: self.order.append(what)

        owner = self

        class Event:
            record = staticmethod(note("record"))
            synchronize = staticmethod(note("synchronize"))

            @property
            def done(self) -> bool:
                return owner.done.pop(0) if len(owner.done) > 1 else owner.done[0]

        return Event()

    def copy(self, to: int, array: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 3 and stream == devices.current().stream()
        ctypes.memmove(to, array, nbytes)
        self.order.append("copy")


def fake_cupy(events: Events | None = None) -> Any:
    events = events or Events()
    pool = SimpleNamespace(total_bytes=lambda: 5 << 20)
    cuda = SimpleNamespace(
        Event=events.event,
        get_elapsed_time=lambda begin, end: 2.0,
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        runtime=SimpleNamespace(memcpyAsync=events.copy),
    )
    return SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bench, "FILL", 64)
    monkeypatch.setattr(bench, "MOST_CALLS", 1)
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
        == sum(
            1 + (case.dout is not None) * (1 + (OPS[case.op].adds == "backward"))
            for case in cases.values()
        )
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


def test_tokens_are_timed_until_their_logits_are_there(
    tried: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy(MYLLM_1B)
    read: list[tuple[int, ...]] = []

    def wall(call: Any) -> float:
        call()
        return 2e-3

    def to_numpy(array: Any) -> None:
        read.append(array.shape)

    monkeypatch.setattr(tried, "wall", wall)
    monkeypatch.setattr(ops_bf16, "to_numpy", to_numpy)
    tried.copied = 2e6
    rows = list(tried.decode(config))
    assert [row.what for row in rows] == ["a token of 1 row at 11", "a token of 8 rows at 11"]
    assert read == [(1, 31)] * 13 + [(8, 31)] * 13  # three before ten that are timed
    layout = decoder_layout(config)
    weights = 2 * layout.n_decayed + 4 * (layout.size - layout.n_decayed)
    for row, n in zip(rows, (1, 8), strict=True):
        moved = weights + n * 2 * 12 * 2 * config.n_layers * config.n_kv_heads * config.d_head
        share = moved / 2e-3 / tried.copied
        assert row.note.startswith(f"{500 * n:,} tokens/s, ")
        assert row.note.endswith(f"{share:.0%} of the ceiling")


def test_calls_are_queued_behind_work_that_keeps_the_gpu_busy(
    tried: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    tried.cupy = fake_cupy(events)
    assert tried.queued(lambda: events.order.append("call"), 3) == 2e-3 / 3
    calls = ["record", "call", "call", "call", "record", "synchronize"]
    assert events.order == ["copy"] * 4 + calls and not tried.waited
    # the copies were over before the last call was queued: more of them
    events.order.clear()
    events.done = [True, False]
    tried.queued(lambda: events.order.append("call"), 3)
    assert events.order == ["copy"] * 4 + calls + ["copy"] * 32 + calls and not tried.waited
    events.done = [True]
    row = tried.row("", lambda: None, 4, 0)
    assert tried.waited and row.note.endswith("the GPU waits for Python")
    monkeypatch.setattr(bench, "MOST_CALLS", 50)
    events.order.clear()
    tried.wall = lambda call: 1e-3  # type: ignore[method-assign]
    assert tried.time(lambda: None) == 2e-3 / 20  # as many as 20 ms hold


def test_the_copy_that_others_are_held_against_is_cuda_s_own(tried: bench.Bench) -> None:
    device = devices.current()
    a, b = (device.upload(np.full(8, x, np.float32)) for x in (1, 2))
    tried.device_copy(b, a)
    np.testing.assert_array_equal(b, a)
    device.launches.clear()  # type: ignore[attr-defined]
    tried.measure_ceilings(1000, 16)
    assert set(device.launches) <= {"gemm", "to_bf16_array"}  # type: ignore[attr-defined]


def test_as_many_sequences_as_the_gpu_has_room_for() -> None:
    gpus = [gb * 10**9 for gb in (24, 79, 85, 150)]
    assert [bench.default_batch(room, 8192, False) for room in gpus] == [1, 1, 4, 4]
    assert [bench.default_batch(room, 1024, False) for room in gpus] == [8, 8, 32, 32]
    beside = [bench.default_batch(gpus[-1], length, True) for length in (1024, 8192, 16384)]
    assert beside == [8, 1, 1]


def test_the_step_and_its_memory(tried: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def wall(call: Any) -> float:
        call()
        return 2e-3

    tried.wall = wall  # type: ignore[method-assign]
    tried.queued(lambda: None, 1)
    assert tried.ops.memory() == 2 * bench.FILL
    device: Any = devices.current()
    trimmed: list[int] = []
    device.most = 7 << 40  # what earlier parts held
    monkeypatch.setattr(device, "trim", lambda: trimmed.append(device.most))
    monkeypatch.setattr(tried.ops, "memory", lambda: 4 << 20 | device.most)
    step, memory = tried.step(toy(MYLLM_1B), 2, 8)
    assert step.ours == 2e-3 and step.note.startswith("8,000 tokens/s")
    assert (memory.ours, memory.unit) == (4 << 20, "B")  # of this part alone
    assert memory.note == "5 MiB held after it"
    assert trimmed[0] == 7 << 40  # before it is counted anew
    assert not tried._busy  # what kept the GPU busy is no part of it


def test_a_kernel_that_is_wrong_is_not_timed(
    tried: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried.check()
    edits = {"attention.cuh": [("- u + ahead)", "- u + ahead - 1)")]}
    devices.use(ShimDevice(edits=edits))
    with pytest.raises(ValueError, match="differs from the reference by"):
        tried.check()


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--batch", "0"])
    assert "must be positive" in capsys.readouterr().err


def test_the_command_chooses_attention_s_path_at_its_own_shapes_and_goes_by_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accel.cuda.device._device", None)
    device = install(
        "none", monkeypatch.setattr, clocked({"wgmma": 2.0, "mma": 1.0}, monkeypatch.setattr)
    )
    cupy = fake_cupy()
    cupy.__version__ = "0"
    cupy.cuda.Device = lambda: SimpleNamespace(id=0, synchronize=lambda: None)
    cupy.cuda.runtime.memGetInfo = lambda: (0, 0)
    cupy.cuda.runtime.runtimeGetVersion = lambda: 0
    cupy.cuda.runtime.getDeviceProperties = lambda index: {"name": b"Shim"}
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(bench.Bench, "check", lambda self: None)
    monkeypatch.setattr(bench.Bench, "measure_ceilings", lambda self: None)
    cases = bench.Bench.cases
    monkeypatch.setattr(bench.Bench, "cases", lambda *given: cases(*given[:-1], 5000))
    monkeypatch.setattr(bench, "FILL", 64)
    for name, config in (("myllm-1b", MYLLM_1B), ("gpt2-small", GPT2_SMALL)):
        monkeypatch.setitem(bench.CONFIGS, name, toy(config, d_head=16))
    words = ["--batch", "1", "--layers", "1", "--length", "9", "--repeats", "1"]
    words += ["--parts", "attention"]
    assert bench.main(words) == 0
    said = capsys.readouterr().out
    assert "attention: mma (forward and backward at this run's shapes: wgmma 2000.00 ms" in said
    assert "attention (causal) forward" in said and device.attention == "mma"
    other = ["--config", "gpt2-small", "--attention", "wgmma"]
    assert bench.main([*words, *other]) == 0
    said = capsys.readouterr().out
    assert "attention: mma (" in said and "attention by wgmma, as asked" in said
    assert "gpt2-small, 1 sequences of 9" in said and device.attention == "wgmma"
