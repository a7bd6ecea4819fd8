"""The Llama layers of Hugging Face's transformers; ``PUBLIC.md`` has what was found.

pip install torch==2.13.0 transformers
myllm verify --module accel/verify/examples/public_transformers.py --dtype float32 --partial
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.func import functional_call
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama

from accel.verify.examples.public_torch import differentiable, gradients
from accel.verify.examples.torch_kernels import from_numpy, to_numpy  # noqa: F401

Tensor = torch.Tensor


def rmsnorm_forward(x: Tensor, gain: Tensor, *, eps: float) -> Any:
    norm = llama.LlamaRMSNorm(gain.numel(), eps)
    return differentiable(
        lambda x, gain: functional_call(norm, {"weight": gain.to(x.dtype)}, x), x, gain
    )


def gelu_forward(x: Tensor) -> Any:
    return differentiable(ACT2FN["gelu"], x)


def gelu_tanh_forward(x: Tensor) -> Any:
    return differentiable(ACT2FN["gelu_new"], x)


def swiglu_forward(x: Tensor) -> Any:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ACT2FN["silu"](gate) * up

    return differentiable(gated, x)


def rope_forward(x: Tensor, *, base: float, start: Any = 0) -> Any:
    """It pairs j with j + d/2."""
    B, T, H, d = x.shape
    config = llama.LlamaConfig(
        hidden_size=H * d,
        num_attention_heads=H,
        num_key_value_heads=H,
        head_dim=d,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    position = torch.as_tensor(start).reshape(-1, 1) + torch.arange(T)
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, position.expand(B, T))

    def turn(x: Tensor) -> Tensor:
        halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        out, _ = llama.apply_rotary_pos_emb(halves, halves, cos, sin, unsqueeze_dim=2)
        return out.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    return differentiable(turn, x)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Any:
    """Eager attention, with a mask of the lowest number of the precision, as the library makes."""
    (B, T, Hq, d), (S, Hkv) = q.shape, k.shape[1:3]
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    seen = torch.ones(B, 1, T, S, dtype=torch.bool)
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance.abs() < window)
    if key_mask is not None:
        seen = seen & key_mask.bool()[:, None, None]
    mask = torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    layer: Any = SimpleNamespace(num_key_value_groups=Hq // Hkv, training=False)
    some = seen.any(-1)[:, 0, :, None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scaling = 1 / math.sqrt(d) if scale is None else scale
        out, _ = llama.eager_attention_forward(layer, q, k, v, mask, scaling)
        return torch.where(some, out, 0)  # else the mean of all values

    return differentiable(attend, q, k, v)


rmsnorm_backward = gelu_backward = gelu_tanh_backward = swiglu_backward = gradients
rope_backward = attention_backward = gradients
