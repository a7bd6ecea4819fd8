"""The benchmark's two sides compute the same: it checks results and gradients before it times."""

import pytest

from accel import bench, bench_timing


@pytest.mark.parametrize("part", ["ops", "attention", "decode"])
def test_every_part_agrees_with_pytorch(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_timing, "quick", False)
    assert bench.main(["--quick", "--parts", part]) == 0
    assert "differs" not in capsys.readouterr().err
