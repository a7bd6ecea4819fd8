"""The backend ``cpu`` in float32 (and float64, to check): the functions of ``reference.ops``."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.cpu.activations import (
    gelu_backward,
    gelu_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    swiglu_backward,
    swiglu_forward,
)
from accel.cpu.attention import attention_backward, attention_forward
from accel.cpu.decode import decode_step
from accel.cpu.elementwise import (
    add_backward,
    add_forward,
    dropout_backward,
    dropout_forward,
    relu_backward,
    relu_forward,
    scale_backward,
    scale_forward,
)
from accel.cpu.embedding import embedding_backward, embedding_forward
from accel.cpu.linear import (
    linear_backward,
    linear_forward,
    logits,
    merge_heads_backward,
    merge_heads_forward,
    split_heads_backward,
    split_heads_forward,
)
from accel.cpu.loss import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
    softmax,
)
from accel.cpu.memory import step
from accel.cpu.norms import (
    layernorm_backward,
    layernorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
from accel.cpu.optimizer import accumulate, adamw, global_norm, square_sums
from accel.cpu.rope import rope_backward, rope_forward
from reference.kv import kv_cache, write_kv

Array = npt.NDArray[Any]

__all__ = [
    "accumulate",
    "adamw",
    "add_backward",
    "add_forward",
    "attention_backward",
    "attention_forward",
    "decode_step",
    "dropout_backward",
    "dropout_forward",
    "embedding_backward",
    "embedding_forward",
    "from_numpy",
    "gelu_backward",
    "gelu_forward",
    "gelu_tanh_backward",
    "gelu_tanh_forward",
    "global_norm",
    "kv_cache",
    "layernorm_backward",
    "layernorm_forward",
    "linear_backward",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_forward",
    "linear_forward",
    "logits",
    "merge_heads_backward",
    "merge_heads_forward",
    "parameters",
    "relu_backward",
    "relu_forward",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "rope_backward",
    "rope_forward",
    "scale_backward",
    "scale_forward",
    "softmax",
    "split_heads_backward",
    "split_heads_forward",
    "square_sums",
    "step",
    "swiglu_backward",
    "swiglu_forward",
    "to_numpy",
    "write_kv",
]


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Return the array itself: memory is shared with NumPy, and activations keep their type."""
    del activation
    return np.asarray(array)


def to_numpy(array: Array) -> Array:
    """Return the array itself."""
    return array


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters themselves: float32 products read the master."""
    return dict(master)
