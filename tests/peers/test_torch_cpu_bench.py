"""The benchmark's two sides compute the same: it checks results and gradients before it times."""

import dataclasses

import pytest

from accel.bench import cpu
from accel.bench.training import SMALL

pytest.importorskip("torch")


@pytest.mark.parametrize(
    "part",
    [
        "decode",
        "products",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("ops", "attention")),
    ],
)
def test_every_part_agrees_with_pytorch(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.main(["--quick", "--parts", part]) == 0
    assert "differs" not in capsys.readouterr().err


def test_muon_agrees_with_pytorch_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NARROW", "SMALL", "LARGE"):
        small = dataclasses.replace(SMALL, n_layers=1, d_model=40, d_ff=72)
        monkeypatch.setattr(cpu, name, small)
    assert cpu.main(["--quick", "--parts", "muon"]) == 0
    said = capsys.readouterr()
    assert "differs" not in said.err and said.out.count("| muon, ") == 3 * len(cpu.offered("cpu"))


def test_a_training_step_agrees_with_pytorch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(SMALL, n_layers=1, vocab_size=512)
    step = cpu.STEPS[0]._replace(config=small, batch=2, length=64)
    monkeypatch.setattr(cpu, "STEPS", [step])
    monkeypatch.setattr(cpu, "SMALL", small)
    assert cpu.main(["--quick", "--parts", "step"]) == 0
    said = capsys.readouterr()
    assert "differs" not in said.err and "float32 / eager" in said.out
