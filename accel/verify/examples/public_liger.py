"""Liger-Kernel's Triton kernels; ``PUBLIC.md`` has what was found.

pip install torch==2.13.0 triton liger-kernel
myllm verify --like accel/verify/examples/public_plain.py \
        --module accel/verify/examples/public_liger.py

They run on a GPU, or under Triton's interpreter where there is none. What a kernel overwrites by
design is handed over as a copy.
"""

import os
from typing import Any

import numpy as np
import torch

from accel.verify.examples.public_plain import _ignored

HERE = "cuda" if torch.cuda.is_available() else "cpu"
if HERE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

Tensor = torch.Tensor


def complete_the_interpreter() -> None:
    """Give the interpreter two things that a compiled kernel has.

    A float argument is a tensor there, so that kernels may write ``eps.to(tl.float32)``; here it
    stays a Python float. And the functions of ``libdevice`` have no bodies here.
    """
    convert = interpreter._implicit_cvt

    def tensor(a: Any, kind: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.asarray(a, np.float32), tl.float32), kind)

    def converted(a: Any) -> Any:
        return tensor([a], tl.float32) if type(a) is float else convert(a)

    interpreter._implicit_cvt = converted
    libdevice.rsqrt = lambda x: tensor(1 / np.sqrt(x.handle.data), x.type)
    libdevice.tanh = lambda x: tensor(np.tanh(x.handle.data), x.type)


if HERE == "cpu":
    complete_the_interpreter()  # before Liger-Kernel takes those functions

import liger_kernel.ops as liger  # noqa: E402


def call(function: Any, *args: Any, copy: bool = False) -> Tensor:
    args = tuple(a.to(HERE, copy=copy) if isinstance(a, Tensor) else a for a in args)
    out = function.apply(*args)
    return (out[0] if isinstance(out, tuple) else out).cpu()


def rms_norm(x: Tensor, gain: Tensor, eps: float, offset: float) -> Tensor:
    """Not in place: by default dx is written over dout, as its docstring says."""
    return call(liger.LigerRMSNormFunction, x, gain, eps, offset, "gemma", False)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    return call(liger.LigerLayerNormFunction, x, gain, bias, eps)


def softmax(x: Tensor) -> Tensor:
    return call(liger.LigerSoftmaxFunction, x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return call(liger.LigerSiLUMulFunction, gate, up, copy=True)


def gated_up(x: Tensor) -> Tensor:
    return call(liger.LigerFusedGateUpSiLUMulFunction, x)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return call(liger.LigerGELUMulFunction, gate, up, copy=True)


def rope(x: Tensor, base: float) -> Tensor:
    """It pairs j with j + d/2 and has heads before positions; it turns q and k at once."""
    T, d = x.shape[1], x.shape[3]
    angle = torch.outer(torch.arange(T).double(), base ** -(torch.arange(0, d, 2).double() / d))
    cos, sin = (torch.cat((a, a), -1).to(x.dtype) for a in (angle.cos(), angle.sin()))
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1).transpose(1, 2)
    out = call(liger.LigerRopeFunction, halves, halves, cos, sin, copy=True)
    return out.transpose(1, 2).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def cross_entropy(
    x: Tensor, targets: Tensor, smoothing: float, z: float, softcap: float | None, reduction: str
) -> Tensor:
    options = (None, -100, z, smoothing, reduction, softcap)
    return call(liger.LigerCrossEntropyFunction, x, _ignored(targets), *options, copy=True)


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
    options = (bias, None, -100, z, smoothing, reduction, softcap)
    return call(liger.LigerFusedLinearCrossEntropyFunction, x, head, _ignored(targets), *options)
