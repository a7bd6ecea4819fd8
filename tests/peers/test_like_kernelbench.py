"""KernelBench's form: how large its problems get to be, and what may vary in them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.like import checked

pytest.importorskip("torch", reason="PyTorch is not installed")

from accel.verify.like.kernelbench import pair

NORM = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.eps = eps
    def forward(self, x):
        return x / torch.sqrt((x**2).mean(1, keepdim=True) + self.eps)
def get_inputs():
    return [torch.rand(16, 64, 64)]
def get_init_inputs():
    return [64]
"""
BY_THE_SIZE_GIVEN = """
import torch
import torch.nn as nn
class ModelNew(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.eps, self.features = eps, features
    def forward(self, x):
        return x * torch.rsqrt(x.square().sum(1, keepdim=True) / self.features + self.eps)
"""


def test_a_size_that_the_model_ignores_stays_that_of_the_axis(tmp_path: Path) -> None:
    report = checked(tmp_path, BY_THE_SIZE_GIVEN, ref=NORM, examples=12)
    assert report.ok, report.text()
    wrong = BY_THE_SIZE_GIVEN.replace("/ self.features", "/ (self.features + 1)")
    report = checked(tmp_path, wrong, ref=NORM, examples=6)
    assert "; made with " in report.text()


@pytest.mark.parametrize("shape", ["112, 64, 32, 32", "16, 64, 256, 256"])
def test_four_axes_are_made_small(tmp_path: Path, shape: str) -> None:
    ref = NORM.replace("16, 64, 64", shape)
    report = checked(tmp_path, BY_THE_SIZE_GIVEN, ref=ref, examples=4)
    assert report.ok, report.text()


def test_an_example_of_four_axes_is_made_small(tmp_path: Path) -> None:
    text = "import torch\nEXAMPLES = {'f': (torch.rand(32, 24, 32, 48),)}\n"
    text += "def f(x):\n    return x.mean((2, 3)).tanh()\n"
    report = checked(tmp_path, text, ref=text, examples=4)
    assert report.ok, report.text()


@pytest.mark.parametrize("sizes", ["64, 64", "48, 64"])
def test_what_a_layer_is_made_with_goes_with_its_axis(sizes: str) -> None:
    import torch

    rows, width = map(int, sizes.split(", "))
    problem = SimpleNamespace(
        Model=torch.nn.Linear,
        get_inputs=lambda: [torch.rand(rows, width)],
        get_init_inputs=lambda: [width, 96],
    )
    solution = SimpleNamespace(ModelNew=torch.nn.Linear)
    reference = pair(problem, solution, "ref.py", "new.py").reference  # type: ignore[arg-type]
    groups = dict(reference.declared.known)
    assert len(groups) == 3  # rows, width, and 96, which no axis has
