"""The backend ``cuda`` in bf16: storage and products in bfloat16, sums and parameters in float32.

Matrices and tables are read as bf16 copies that ``parameters`` makes once after each optimizer
step (``weights.py``); gains, shifts and biases are read from the float32 master. Gradients of
parameters are float32.
"""

import sys
from collections.abc import Mapping
from functools import partial

from accel.cuda.arrays import check_activations, to_dtype, upload
from accel.cuda.device import BF16, zeros
from accel.cuda.embedding import EmbeddingCache
from accel.cuda.embedding import embedding_forward as lookup
from accel.cuda.ops import (
    accumulate,
    adamw,
    add_backward,
    add_forward,
    attention_backward,
    attention_forward,
    dropout_backward,
    dropout_forward,
    embedding_backward,
    gelu_backward,
    gelu_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    global_norm,
    layernorm_backward,
    layernorm_forward,
    linear_backward,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
    linear_forward,
    logits,
    memory,
    merge_heads_backward,
    merge_heads_forward,
    relu_backward,
    relu_forward,
    rmsnorm_backward,
    rmsnorm_forward,
    rope_backward,
    rope_forward,
    scale_backward,
    scale_forward,
    softmax,
    split_heads_backward,
    split_heads_forward,
    square_sums,
    step,
    swiglu_backward,
    swiglu_forward,
    to_numpy,
    write_kv,
)
from accel.cuda.weights import parameters
from reference.config import Config
from reference.kv import empty_cache
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
    """Return a device array with a NumPy array's values; float activations become bf16."""
    return upload(array, as_bf16=activation)


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows."""
    del params
    return empty_cache(config, batch, length, partial(zeros, dtype=BF16))


def embedding_forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids], shape (..., D) in bf16, also from a plain float32 table."""
    check_activations("embedding", table=table)
    return lookup(ids, to_dtype(table, BF16))


def decode_step(
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return logits (B, V) after one more token of each row: the model composed of these ops."""
    return compose_decode_step(sys.modules[__name__], params, config, token, cache, position)
