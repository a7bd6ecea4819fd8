"""Right kernels of JAX, gradients by jax.vjp."""

import jax
import jax.numpy as jnp

DTYPES = ("float32",)
from_numpy = jnp.asarray


def rmsnorm_forward(x, gain, *, eps):
    def f(x, gain):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * gain

    return jax.vjp(f, x, gain)


def layernorm_forward(x, gain, bias, *, eps):
    def f(x, gain, bias):
        c = x - jnp.mean(x, axis=-1, keepdims=True)
        return c * jax.lax.rsqrt(jnp.mean(c * c, axis=-1, keepdims=True) + eps) * gain + bias

    return jax.vjp(f, x, gain, bias)


def linear_forward(x, weight):
    return jax.vjp(lambda x, weight: jnp.einsum("...i,io->...o", x, weight), x, weight)


def swiglu_forward(x):
    def f(x):
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * up

    return jax.vjp(f, x)


def gelu_tanh_forward(x):
    return jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def _gradients(dout, vjp):
    return vjp(dout)


rmsnorm_backward = layernorm_backward = linear_backward = _gradients
swiglu_backward = gelu_tanh_backward = _gradients
