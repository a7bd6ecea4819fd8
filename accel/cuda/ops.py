"""The backend ``cuda`` in strict float32: the functions of ``reference.ops`` on the device in use.

The functions look at the dtype of what they are given, so the same ones serve bf16 activations;
``ops_bf16.py`` differs only in where bf16 arrays come from.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial

from accel.cuda.arrays import check_activations, copy, to_numpy, upload
from accel.cuda.attention import attention_backward, attention_forward
from accel.cuda.device import F32, current, memory, zeros
from accel.cuda.elementwise import (
    add_backward,
    add_forward,
    dropout_backward,
    dropout_forward,
    gelu_backward,
    gelu_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    relu_backward,
    relu_forward,
    scale_backward,
    scale_forward,
    swiglu_backward,
    swiglu_forward,
)
from accel.cuda.embedding import embedding_backward, embedding_forward
from accel.cuda.linear import (
    linear_backward,
    linear_forward,
    logits,
    merge_heads_backward,
    merge_heads_forward,
    split_heads_backward,
    split_heads_forward,
)
from accel.cuda.loss import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
    softmax,
)
from accel.cuda.norm import (
    layernorm_backward,
    layernorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
from accel.cuda.optimizer import accumulate, adamw, global_norm, square_sums
from accel.cuda.rope import rope_backward, rope_forward
from reference.config import Config
from reference.kv import empty_cache, writes
from reference.model import decode_step as compose_decode_step
from reference.types import Array, KVCache

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
    "memory",
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
    """Return a device array with a NumPy array's values."""
    del activation
    return upload(array, as_bf16=False)


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters themselves: float32 products read the master."""
    return dict(master)


def step() -> AbstractContextManager[None]:
    """Open a scope whose arrays share one block and die at its end; see ``arena.py``."""
    return current().arena.step()


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows."""
    del params
    return empty_cache(config, batch, length, partial(zeros, dtype=F32))


def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array) -> None:
    """Write k and v (B, T, Hkv, d) of one layer into slots position, position + 1, … of a row."""
    check_activations("write_kv", k=k, v=v, cache=cache.k[0])
    for where, what in writes(cache, k, v, layer, position):
        copy(where, what)


def decode_step(
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return logits (B, V) after one more token of each row: the model composed of these ops."""
    return compose_decode_step(sys.modules[__name__], params, config, token, cache, position)
