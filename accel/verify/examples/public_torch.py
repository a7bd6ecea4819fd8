"""PyTorch's own fused ops, as its users call them; ``PUBLIC.md`` has what was found.

myllm verify --module accel/verify/examples/public_torch.py --partial
"""

from typing import Any

import torch
import torch.nn.functional as F

from accel.verify.examples.torch_kernels import (  # noqa: F401
    attention_backward,
    attention_forward,
    from_numpy,
    to_numpy,
)

Tensor = torch.Tensor


def differentiable(function: Any, *inputs: Tensor) -> tuple[Tensor, Any]:
    """Return a result, and what autograd needs."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = function(*inputs)
    return out, (out, inputs)


def gradients(dout: Any, cache: Any) -> Any:
    out, inputs = cache
    return torch.autograd.grad(out, inputs, dout, retain_graph=True)


def rmsnorm_forward(x: Tensor, gain: Tensor, *, eps: float) -> Any:
    return differentiable(lambda x, gain: F.rms_norm(x, gain.shape, gain, eps), x, gain)


def layernorm_forward(x: Tensor, gain: Tensor, bias: Tensor, *, eps: float) -> Any:
    return differentiable(
        lambda x, gain, bias: F.layer_norm(x, gain.shape, gain, bias, eps), x, gain, bias
    )


def gelu_forward(x: Tensor) -> Any:
    return differentiable(F.gelu, x)


def gelu_tanh_forward(x: Tensor) -> Any:
    return differentiable(lambda x: F.gelu(x, approximate="tanh"), x)


def relu_forward(x: Tensor) -> Any:
    return differentiable(F.relu, x)


def linear_forward(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Any:
    inputs = (x, w) if bias is None else (x, w, bias)
    return differentiable(lambda x, w, *bias: F.linear(x, w.T, *bias), *inputs)


def embedding_forward(ids: Tensor, table: Tensor) -> Any:
    return differentiable(lambda table: F.embedding(ids.long(), table), table)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def adamw(
    master: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    n_decayed: int,
    grad_scale: float = 1.0,
) -> None:
    """By ``torch.optim.AdamW(fused=True)``, decayed elements and others as two parameters."""
    for part, decay in ((slice(n_decayed), weight_decay), (slice(n_decayed, None), 0.0)):
        parameter = master[part].requires_grad_()
        if not len(parameter):
            continue
        parameter.grad = (grad * grad_scale)[part]
        optimizer = torch.optim.AdamW(
            [parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, fused=True
        )
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": m[part],
            "exp_avg_sq": v[part],
        }
        optimizer.step()


rmsnorm_backward = layernorm_backward = gelu_backward = gelu_tanh_backward = gradients
relu_backward = linear_backward = gradients


def embedding_backward(dout: Tensor, cache: Any) -> Tensor:
    return gradients(dout, cache)[0]
