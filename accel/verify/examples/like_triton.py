"""Kernels in Triton, held to ``like_torch.py``: on a GPU, or on the CPU by Triton's interpreter.

On a GPU, let ``from_numpy`` end in ``.cuda()``.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, out, stride, T, TILE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, TILE)
    z = tl.load(x + row * stride + at, mask=at < T, other=-float("inf")).to(tl.float32)
    e = tl.exp(z - tl.max(z, axis=0))
    tl.store(out + row * T + at, e / tl.sum(e, axis=0), mask=at < T)


def softmax(x: torch.Tensor) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _softmax[(len(x),)](x, out, x.stride(0), x.shape[1], TILE=triton.next_power_of_2(x.shape[1]))
    return out


@triton.jit
def _gated(x, y, out, n, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    z = tl.load(x + at, mask=at < n).to(tl.float32)
    other = tl.load(y + at, mask=at < n).to(tl.float32)
    tl.store(out + at, z / (1 + tl.exp(-z)) * other, mask=at < n)


class Gated(torch.autograd.Function):
    """silu(x) y; the backward is plain."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        _gated[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), TILE=1024)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (saved.float() for saved in ctx.saved_tensors)
        s = torch.sigmoid(x)
        dx = dout * y * s * (1 + x * (1 - s))
        return dx.to(dout.dtype), (dout * x * s).to(dout.dtype)


gated = Gated.apply
