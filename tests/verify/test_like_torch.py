"""``--like`` and PyTorch: gradients that are missing, and what is kept between calls."""

import json
from pathlib import Path

import pytest

from accel.verify import VerificationError
from accel.verify.report import Report
from tests.helpers.like import checked

pytest.importorskip("torch", reason="PyTorch is not installed")

TANH = """
import torch
SHAPES = {"tanh": {"x": "N D"}}
def tanh(x):
    return torch.tanh(x)
"""


# ---- no gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new",
    [
        "import torch\ndef tanh(x):\n    return torch.tanh(x.detach())",
        "import torch\n@torch.no_grad()\ndef tanh(x):\n    return torch.tanh(x)",
        "import torch\ndef tanh(x):\n    return torch.tanh(x).detach().numpy()",
        "import numpy as np\ndef tanh(x):\n    return np.tanh(x)",
    ],
)
def test_a_gradient_that_the_reference_alone_has_is_not_tried(tmp_path: Path, new: str) -> None:
    report = checked(tmp_path, new, ref=TANH, examples=6)
    assert report.right and not report.ok, report.text()
    (said,) = json.loads(json.dumps(report.to_dict()))["untried"]
    assert said.startswith("tanh: no gradient was checked: ")
    report = checked(tmp_path, new, ref=TANH, examples=6, partial=True)
    assert report.ok and report.untried


def test_a_gradient_that_the_reference_has_not_is_no_matter(tmp_path: Path) -> None:
    ref = TANH.replace("torch.tanh(x)", "torch.tanh(x.detach())")
    for new in (ref, TANH, "import numpy as np\ndef tanh(x):\n    return np.tanh(x)"):
        report = checked(tmp_path, new, ref=ref, examples=6)
        assert report.ok and any("the reference has none" in note for note in report.notes)
    ref = TANH.replace("torch.tanh(x)", "x.argmax(-1)")
    new = "import numpy as np\ndef tanh(x):\n    return np.argmax(x, -1)"
    assert checked(tmp_path, new, ref=ref, examples=6).ok


def test_a_line_in_a_test_asks_for_the_gradient_unless_it_is_partial() -> None:
    import torch

    from accel.verify.torch import check

    def forward_only(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.detach())

    with pytest.raises(VerificationError, match="no gradient was checked"):
        check(forward_only, like=torch.tanh, x="N D", examples=4)
    report: Report = check(forward_only, like=torch.tanh, x="N D", examples=4, partial=True)
    assert report.untried
