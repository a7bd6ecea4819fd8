"""Kernels in JAX and Pallas, the latter interpreted, held to ``like_torch.py``.

    myllm verify --like accel/verify/examples/like_torch.py \
        --module accel/verify/examples/like_jax.py --dtype float32 --examples 10

JAX compiles for every new shape, so that few examples are patience enough.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def softmax(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _gated(x: Any, y: Any, out: Any) -> None:
    out[...] = x[...] * jax.nn.sigmoid(x[...]) * y[...]


def gated(x: jax.Array, y: jax.Array) -> jax.Array:
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_gated, out_shape=kind, interpret=True)(x, y)
