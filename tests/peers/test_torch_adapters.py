"""An ``adapters.py`` over PyTorch's own functions is right by ``myllm verify --adapters``."""

from pathlib import Path

import pytest

from dist.cli import main
from tests.helpers import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

TORCH = """
import torch
import torch.nn.functional as F

def run_linear(d_in, d_out, weights, in_features):
    return F.linear(in_features, weights)

def run_embedding(vocab_size, d_model, weights, token_ids):
    return F.embedding(token_ids, weights)

def run_silu(in_features):
    return F.silu(in_features)

def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    return (F.silu(in_features @ w1_weight.T) * (in_features @ w3_weight.T)) @ w2_weight.T

def run_softmax(in_features, dim):
    return torch.softmax(in_features, dim)

def run_rmsnorm(d_model, eps, weights, in_features):
    return F.rms_norm(in_features, (d_model,), weights, eps)

def run_cross_entropy(inputs, targets):
    return F.cross_entropy(inputs, targets)

def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return F.scaled_dot_product_attention(Q, K, V, mask)

def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    omega = theta ** (-torch.arange(0, d_k, 2) / d_k)  # in float32
    turn = torch.polar(torch.ones(()), token_positions[..., None] * omega)
    pairs = torch.view_as_complex(in_query_or_key.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)

def run_gradient_clipping(parameters, max_l2_norm):
    torch.nn.utils.clip_grad_norm_(parameters, max_l2_norm)

def get_adamw_cls():
    return torch.optim.AdamW
"""
# what PyTorch has no function for is in NumPy
PARTS = (ROOT / "tests" / "helpers" / "course_adapters.py").read_text("utf-8").split("\n\n\n")
REST = [part for part in PARTS if "import math" in part or "schedule" in part or "PAT" in part]


def adapters(folder: Path, text: str) -> list[str]:
    path = folder / "adapters.py"
    path.write_text("\n\n\n".join([*REST, text]), encoding="utf-8")
    return ["verify", "--adapters", str(path), "--examples", "20"]


def test_pytorch_s_own_functions_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(adapters(tmp_path, TORCH)) == 0, capsys.readouterr().out
    assert "13 of 13 adapters right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        pytest.param("run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3", "run_swiglu(d_model, "
         "d_ff, w3_weight, w2_weight, w1", "w1 and w3 swapped?", marks=pytest.mark.slow),
        pytest.param("in_query_or_key.unflatten(-1, (-1, 2))", "in_query_or_key.unflatten(-1, "
         "(2, -1)).transpose(-1, -2)", "FAIL run_rope", marks=pytest.mark.slow),
        ("return torch.optim.AdamW", "return torch.optim.Adam", "is the decay added to the "
         "gradient"),
        pytest.param("F.linear(in_features, weights)", "F.linear(in_features, weights) / "
         "math.sqrt(d_in)", "FAIL run_linear", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_mistake_among_them_is_named(
    old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert TORCH.count(old) == 1
    assert main(adapters(tmp_path, TORCH.replace(old, new))) == 1
    said = capsys.readouterr().out
    assert says in said and "12 of 13 adapters right, 1 wrong" in said
