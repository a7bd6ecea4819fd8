"""Kernels in PyTorch, checked with ``myllm verify --module``: gradients by autograd and by hand.

    pip install -e . torch
    myllm verify --module accel/verify/examples/torch_kernels.py

A Triton kernel is called in the same place as the PyTorch functions here; on a GPU let
``from_numpy`` end in ``.cuda()`` and ``to_numpy`` begin with ``.cpu()``.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def from_numpy(array: Any) -> Tensor:
    """Bring an array of the checker over."""
    return torch.from_numpy(np.ascontiguousarray(array))


def to_numpy(tensor: Tensor) -> Any:
    """Bring a result back."""
    return tensor.detach().numpy()


def rmsnorm_forward(x: Tensor, gain: Tensor, *, eps: float) -> tuple[Tensor, Any]:
    """By hand."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd * gain, (x, gain, rstd)


def rmsnorm_backward(dout: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
    x, gain, rstd = cache
    n, dn = x * rstd, dout * gain
    dx = rstd * (dn - n * (dn * n).mean(-1, keepdim=True))
    return dx, (dout * n).flatten(0, -2).sum(0)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Any]:
    """By PyTorch's fused attention; what it lacks here (key_mask, ALiBi, …) is left unchecked."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in inputs]
    T, S = q.shape[1], k.shape[1]
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else None
    if causal and T > S:  # queries before the first key attend to nothing, and must give zeros
        seen = seen[T - S :]  # type: ignore[index]
        heads_first[0] = heads_first[0][:, :, T - S :]
    out = F.scaled_dot_product_attention(
        *heads_first,
        attn_mask=seen,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        enable_gqa=True,
    ).transpose(1, 2)
    if out.shape[1] < T:
        out = F.pad(out, (0, 0, 0, 0, T - out.shape[1], 0))
    return out, (out, inputs)


def attention_backward(dout: Tensor, cache: Any) -> tuple[Tensor, ...]:
    """By autograd."""
    out, inputs = cache
    return torch.autograd.grad(out, inputs, dout)


def gelu_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(x), x


def gelu_backward(dout: Tensor, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.gelu(x), x, dout)[0]
