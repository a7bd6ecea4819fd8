"""Liger-Kernel's Triton kernels under Triton's interpreter. ``PUBLIC.md`` has what was found.

pip install liger-kernel triton
TRITON_INTERPRET=1 myllm verify --module accel/verify/examples/public_liger.py --partial --examples 20
"""

from typing import Any

import torch
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction

from accel.verify.examples.public_torch import differentiable, gradients
from accel.verify.examples.torch_kernels import from_numpy, to_numpy  # noqa: F401

DTYPES = "float32"
Tensor = torch.Tensor


def rmsnorm_forward(x: Tensor, gain: Tensor, *, eps: float) -> Any:
    return differentiable(
        lambda x, gain: LigerRMSNormFunction.apply(x, gain, eps, 0.0, "llama", False), x, gain
    )


def layernorm_forward(x: Tensor, gain: Tensor, bias: Tensor, *, eps: float) -> Any:
    return differentiable(
        lambda x, gain, bias: LigerLayerNormFunction.apply(x, gain, bias, eps), x, gain, bias
    )


def swiglu_forward(x: Tensor) -> Any:
    return differentiable(lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1)), x)


def gelu_tanh_forward(x: Tensor) -> Any:
    """Its GELU is fused with a product, here by one."""
    return differentiable(lambda x: LigerGELUMulFunction.apply(x, torch.ones_like(x)), x)


def softmax(x: Tensor) -> Tensor:
    return LigerSoftmaxFunction.apply(x)


rmsnorm_backward = layernorm_backward = swiglu_backward = gelu_tanh_backward = gradients
