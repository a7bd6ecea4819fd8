"""PyTorch's own kernels pass ``myllm verify``, and a wrong one among them does not."""

import types

import pytest

from accel.verify import check_module
from accel.verify.subject import load_file
from tests.helpers import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
EXAMPLE = ROOT / "accel" / "verify" / "examples" / "torch_kernels.py"


def test_the_example_s_kernels_are_right() -> None:
    check_module(EXAMPLE, examples=25)


def test_a_torch_kernel_without_the_projection_is_caught() -> None:
    example = load_file(EXAMPLE).module

    def rmsnorm_backward(dout: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> object:
        x, gain, rstd = cache
        return dout * gain * rstd, (dout * x * rstd).flatten(0, -2).sum(0)

    wrong = types.SimpleNamespace(**{**vars(example), "rmsnorm_backward": rmsnorm_backward})
    report = check_module(wrong, ops=["rmsnorm"], examples=20, raises=False)
    assert {f.name for f in report.failures} == {"dx"}
