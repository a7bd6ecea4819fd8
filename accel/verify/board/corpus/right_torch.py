"""Right kernels of PyTorch: by its own fused functions where they are right, gradients by autograd."""

import math

import torch
from torch.nn import functional as F

DTYPES = ("float32", "float64")


def from_numpy(array):
    return torch.from_numpy(array.copy())


def to_numpy(tensor):
    return tensor.detach().numpy()


def _leaf(tensor):
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def _grads(out, dout, leaves):
    given = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(out, given, dout))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


def linear_forward(x, weight, *, bias=None):
    leaves = [_leaf(t) for t in (x, weight, bias)]
    y = F.linear(leaves[0], leaves[1].T, leaves[2])
    return y.detach(), (y, leaves)


def linear_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])


def layernorm_forward(x, gain, bias, *, eps):
    # F.layer_norm's own backward loses digits where a row's mean is far above its spread
    x, gain, bias = leaves = [_leaf(t) for t in (x, gain, bias)]
    apart = x - x.mean(-1, keepdim=True)
    y = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps) * gain + bias
    return y.detach(), (y, leaves)


def layernorm_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])


def rmsnorm_forward(x, gain, *, eps):
    leaves = [_leaf(t) for t in (x, gain)]
    y = F.rms_norm(leaves[0], (x.shape[-1],), leaves[1], eps)
    return y.detach(), (y, leaves)


def rmsnorm_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])


def gelu_forward(x):
    x = _leaf(x)
    y = F.gelu(x)
    return y.detach(), (y, [x])


def gelu_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])[0]


def gelu_tanh_forward(x):
    x = _leaf(x)
    y = F.gelu(x, approximate="tanh")
    return y.detach(), (y, [x])


def gelu_tanh_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])[0]


def swiglu_forward(x):
    x = _leaf(x)
    gate, up = x.chunk(2, dim=-1)
    y = F.silu(gate) * up
    return y.detach(), (y, [x])


def swiglu_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])[0]


def softmax(x):
    return torch.softmax(x, dim=-1)


def attention_forward(q, k, v, *, key_mask=None, causal=True, window=0, scale=None):
    leaves = [_leaf(t) for t in (q, k, v)]
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    kk, vv = (t.repeat_interleave(G, dim=2).transpose(1, 2) for t in leaves[1:])
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    seen = torch.ones(1, 1, T, S, dtype=torch.bool)
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance.abs() < window)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    s = scale * (leaves[0].transpose(1, 2) @ kk.transpose(-1, -2))
    s = s.masked_fill(~seen, torch.finfo(q.dtype).min)
    p = torch.softmax(s, dim=-1) * seen
    y = (p @ vv).transpose(1, 2)
    return y.detach(), (y, leaves)


def attention_backward(dout, cache):
    return _grads(cache[0], dout, cache[1])
