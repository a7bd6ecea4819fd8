"""Plain versions in PyTorch, for the kernels of ``like_triton.py``, ``like_jax.py``, ``like_c.py``.

TRITON_INTERPRET=1 myllm verify --like accel/verify/examples/like_torch.py \
        --module accel/verify/examples/like_triton.py --dtype float32
"""

import torch
import torch.nn.functional as F

SHAPES = {"softmax": {"x": "B T"}, "gated": {"x": "... D", "y": "... D"}}


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, dim=-1)


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y
