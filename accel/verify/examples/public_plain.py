"""Plain versions of what fused kernels compute, to hold them to; ``PUBLIC.md`` has the commands.

Rows are few: a kernel under an interpreter takes about a millisecond for each. Positions are not,
since far ones are where RoPE goes wrong.
"""

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

ROWS = "B D, B <= 40, D <= 4097"
LOSS = {
    "targets": "B int < V",
    "smoothing": [0.0, 0.1],
    "z": [0.0, 0.01],
    "softcap": [None, 5.0],
    "reduction": ["sum", "mean", "none"],
}
SHAPES = {
    "rms_norm": {"x": ROWS, "gain": "D", "eps": [1e-6, 1e-2], "offset": [0.0, 1.0]},
    "layer_norm": {"x": ROWS, "gain": "D", "bias": "D", "eps": [1e-6, 1e-2]},
    "softmax": {"x": ROWS},
    "swiglu": {"gate": ROWS, "up": "B D"},
    "gated_up": {"x": "B 2*D, B <= 40, D <= 4097"},
    "geglu": {"gate": ROWS, "up": "B D"},
    "rope": {"x": "B T H 2*J, B <= 2, T >= 250, B * T <= 1100", "base": [10000.0, 500.0]},
    "attention": {
        "q": "B T H D, B <= 2, T <= 128, H <= 3, D <= 64",
        "k": "B T H D",
        "v": "B T H D",
        "causal": [False, True],
    },
    "cross_entropy": {"x": "B V, B <= 40, V >= 2, V <= 40000", **LOSS},
    "linear_cross_entropy": {"x": "B D, B <= 40, V >= 2", "head": "V D", "bias": "V", **LOSS},
}


def rms_norm(x: Tensor, gain: Tensor, eps: float, offset: float) -> Tensor:
    return F.rms_norm(x, gain.shape, gain + offset, eps)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, gain.shape, gain, bias, eps)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gated_up(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def rope(x: Tensor, base: float) -> Tensor:
    """Pairs (2j, 2j + 1) turned by t base^(-2j/d), from position 0 on."""
    T, d = x.shape[1], x.shape[3]
    angle = torch.outer(
        torch.arange(T).double(), base ** -(torch.arange(0, d, 2).double() / d)
    ).unsqueeze(1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)


def cross_entropy(
    x: Tensor, targets: Tensor, smoothing: float, z: float, softcap: float | None, reduction: str
) -> Tensor:
    """The target of every third row is to be ignored."""
    targets = _ignored(targets)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    each = F.cross_entropy(x, targets, reduction="none", label_smoothing=smoothing)
    each = each + z * torch.where(targets < 0, 0, torch.logsumexp(x, -1) ** 2)
    if reduction == "none":
        return each
    return each.sum() / ((targets >= 0).sum() if reduction == "mean" else 1)


def linear_cross_entropy(
    x: Tensor,
    head: Tensor,
    bias: Tensor,
    targets: Tensor,
    smoothing: float,
    z: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    """A float32 loss, also of bf16."""
    logits = x @ head.T + bias
    return cross_entropy(logits, targets, smoothing, z, softcap, reduction).float()


def _ignored(targets: Tensor) -> Tensor:
    """Put -100 for what is not to count."""
    return torch.where(torch.arange(len(targets)) % 3 == 2, -100, targets.long())
