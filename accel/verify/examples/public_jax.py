"""JAX's own functions, and optax's AdamW, by the contract. ``PUBLIC.md`` has what was found.

pip install jax optax
myllm verify --module accel/verify/examples/public_jax.py --partial --examples 40
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)

from_numpy = jnp.asarray
DTYPES = ("float32", "float64")
Array = jax.Array


def attention_forward(
    q: Array, k: Array, v: Array, *, causal: bool = True, scale: float | None = None
) -> Any:
    def attend(q: Array, k: Array, v: Array) -> Array:
        T, S = q.shape[1], k.shape[1]
        seen = jnp.tril(jnp.ones((T, S), bool), S - T) if causal else jnp.ones((T, S), bool)
        return jax.nn.dot_product_attention(
            q, k, v, mask=seen[None, None], scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale
        )

    return jax.vjp(attend, q, k, v)


def softmax(x: Array) -> Array:
    return jax.nn.softmax(x, axis=-1)


def gelu_forward(x: Array) -> Any:
    return jax.vjp(lambda x: jax.nn.gelu(x, approximate=False), x)


def gelu_tanh_forward(x: Array) -> Any:
    return jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)


def relu_forward(x: Array) -> Any:
    return jax.vjp(jax.nn.relu, x)


def linear_cross_entropy_forward(
    x: Array, head: Array, targets: Array, mask: Array, *, need_backward: bool = True
) -> Any:
    """By optax's cross-entropy with integer labels."""

    def loss(x: Array, head: Array) -> Array:
        each = optax.softmax_cross_entropy_with_integer_labels(x @ head.T, targets)
        return jnp.sum(jnp.where(mask, each, 0))

    total, back = jax.vjp(loss, x, head)
    return (total, int(mask.sum())), back


def gradients(dout: Any, back: Any) -> Any:
    return back(jnp.asarray(dout))


def linear_cross_entropy_backward(dloss: float, back: Any) -> Any:
    return back(jnp.asarray(dloss, jnp.float64))


attention_backward = gelu_backward = gelu_tanh_backward = relu_backward = gradients
