"""Right kernels of PyTorch: by its own fused functions where they are right, gradients by autograd."""

import math

import torch
from torch.nn import functional as F

DTYPES = ("float32", "float64")


def from_numpy(array):
    return torch.from_numpy(array.copy())


def to_numpy(tensor):
    return tensor.detach().numpy()


def _tracked(function, *tensors):
    """What a function gives, and what its gradients are found by."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    return y.detach(), (y, leaves)


def _gradients(dout, cache):
    y, leaves = cache
    given = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(y, given, dout))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


def linear_forward(x, weight, *, bias=None):
    return _tracked(lambda x, weight, bias: F.linear(x, weight.T, bias), x, weight, bias)


def layernorm_forward(x, gain, bias, *, eps):
    # F.layer_norm's own backward loses digits where a row's mean is far above its spread
    def norm(x, gain, bias):
        apart = x - x.mean(-1, keepdim=True)
        return apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps) * gain + bias

    return _tracked(norm, x, gain, bias)


def rmsnorm_forward(x, gain, *, eps):
    return _tracked(lambda x, gain: F.rms_norm(x, (x.shape[-1],), gain, eps), x, gain)


def gelu_forward(x):
    return _tracked(F.gelu, x)


def gelu_tanh_forward(x):
    return _tracked(lambda x: F.gelu(x, approximate="tanh"), x)


def swiglu_forward(x):
    def gated(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _tracked(gated, x)


def softmax(x):
    return torch.softmax(x, dim=-1)


def attention_forward(q, k, v, *, key_mask=None, causal=True, window=0, scale=None):
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    seen = torch.ones(1, 1, T, S, dtype=torch.bool)
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance.abs() < window)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale

    def attend(q, k, v):
        k, v = (t.repeat_interleave(G, dim=2).transpose(1, 2) for t in (k, v))
        s = scale * (q.transpose(1, 2) @ k.transpose(-1, -2))
        s = s.masked_fill(~seen, torch.finfo(q.dtype).min)
        p = torch.softmax(s, dim=-1) * seen
        return (p @ v).transpose(1, 2)

    return _tracked(attend, q, k, v)


linear_backward = layernorm_backward = rmsnorm_backward = attention_backward = _gradients
gelu_backward = gelu_tanh_backward = swiglu_backward = _gradients
