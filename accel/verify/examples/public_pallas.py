"""The Pallas kernels for GPUs that JAX ships, interpreted; ``PUBLIC.md`` has what was found.

pip install torch==2.13.0 jax
myllm verify --like accel/verify/examples/public_plain.py \
        --module accel/verify/examples/public_pallas.py --dtype float32 --examples 10
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as attention_ops
from jax.experimental.pallas.ops.gpu import layer_norm as layer_norm_ops
from jax.experimental.pallas.ops.gpu import rms_norm as rms_norm_ops
from jax.experimental.pallas.ops.gpu import softmax as softmax_ops

Array = jax.Array


def rms_norm(x: Array, gain: Array, eps: float, offset: float) -> Array:
    bias = jnp.zeros_like(gain)
    return rms_norm_ops.rms_norm(x[None], gain + offset, bias, eps=eps, interpret=True)[0]


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Array:
    return layer_norm_ops.layer_norm(x[None], gain, bias, eps=eps, interpret=True)[0]


def softmax(x: Array) -> Array:
    return softmax_ops.softmax(x, interpret=True)


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    scale = q.shape[-1] ** -0.5
    return attention_ops.mha(q, k, v, None, sm_scale=scale, causal=causal, interpret=True)
