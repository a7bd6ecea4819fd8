"""The comparison of training steps with PyTorch: tried with the shim beside PyTorch's processor."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.bench import cuda as bench
from accel.bench.training import Training
from accel.cuda import device as devices
from accel.cuda import ops_bf16
from reference.presets import MYLLM_1B
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.helpers.models import toy

require.shim()
pytest.importorskip("torch")

from accel.bench import peer as bench_torch  # noqa: E402  (only where PyTorch is)

CONFIG = toy(MYLLM_1B)
CPU: dict[str, Any] = {"device": "cpu"}
BESIDE: dict[str, Any] = {"kind": "bf16", "clip": True}


class Cupy:
    """Counts what the benchmark asks of CuPy."""

    def __init__(self) -> None:
        self.waits = 0
        self.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=self.wait))

    def wait(self) -> None:
        self.waits += 1

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(total_bytes=lambda: 2 << 30)


@pytest.fixture
def tried() -> Any:
    before = devices.use(ShimDevice())
    yield bench.Bench(ops_bf16, Cupy(), 3)
    devices.use(before)


def test_both_compute_the_same_gradient(tried: bench.Bench) -> None:
    bench.check_peer(ops_bf16, bench_torch, CONFIG, 2, 8, **CPU)


def test_a_peer_that_computes_something_else_is_not_timed(tried: bench.Bench) -> None:
    class Wrong(bench_torch.Peer):
        def gradient(self) -> Any:
            loss, gradients = super().gradient()
            return loss, {
                **gradients,
                "layers.1.ffn.w_down": gradients["layers.1.ffn.w_down"] * 0.8,
            }

    peer = SimpleNamespace(Peer=Wrong)
    with pytest.raises(ValueError, match=r"the gradient of layers\.1\.ffn\.w_down of"):
        bench.check_peer(ops_bf16, peer, CONFIG, 2, 8, **CPU)
    peer = SimpleNamespace(
        Peer=lambda config, *rest, **how: bench_torch.Peer(
            dataclasses.replace(config, rope_base=3.0), *rest, **how
        )
    )
    with pytest.raises(ValueError, match="differs from PyTorch's"):
        bench.check_peer(ops_bf16, peer, CONFIG, 2, 8, **CPU)


def test_both_take_the_same_steps(tried: bench.Bench) -> None:
    ours = Training(ops_bf16, CONFIG, 2, 8, recompute="norms", clip=True)
    theirs = bench_torch.Peer(CONFIG, ours.initial, ours.ids, ours.targets, **BESIDE)
    for _ in range(5):
        ours.step()
        theirs.step()
    mine, other = ours.layout.views(ops_bf16.to_numpy(ours.master)), theirs.weights()
    moved = np.concatenate([(mine[n] - ours.initial[n]).ravel() for n in other])
    apart = np.concatenate([(mine[n] - other[n]).ravel() for n in other])
    # each rounds to bf16 in its own places, and AdamW's first steps are little more than signs
    assert np.linalg.norm(apart) < 0.2 * np.linalg.norm(moved)
    assert np.linalg.norm(moved) > 0


def test_they_take_turns_and_ratios_are_ours_by_theirs(
    tried: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    clock = [0.0]

    def step_of(name: str, seconds: float, original: Any) -> Any:
        def step(self: Any) -> None:
            order.append(name)
            clock[0] += seconds
            if len(order) <= 5:  # what is taken before the timing is really done
                original(self)

        return step

    monkeypatch.setattr(Training, "step", step_of("ours", 0.25, Training.step))
    monkeypatch.setattr(bench_torch.Peer, "step", step_of("theirs", 0.5, bench_torch.Peer.step))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bench_torch, "forget_peak", lambda: None)
    monkeypatch.setattr(bench_torch, "peak", lambda: 4 << 30)
    monkeypatch.setattr(ops_bf16, "memory", lambda: 3 << 30)
    how = {"device": "cpu", "compiled": False}
    times, memory = tried.compare(bench_torch, CONFIG, 2, 8, "norms", **how)
    assert order[:5] == ["ours"] * 2 + ["theirs"] * 3
    assert order[5:] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert tried.cupy.waits == 2 * 6
    assert (times.ours, times.theirs, times.ratio, times.bar) == (0.25, 0.5, 0.5, 1.0)
    assert (memory.ours, memory.theirs, memory.ratio) == (3 << 30, 4 << 30, 0.75)
    assert memory.note == "2,048 MiB held after it"


def test_a_build_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ImportError, match="sees no GPU: install its build for CUDA"):
        bench.load_peer()
    monkeypatch.setitem(sys.modules, "accel.bench.peer", None)
    with pytest.raises(ImportError, match="--peer torch needs PyTorch: pip install torch"):
        bench.load_peer()
