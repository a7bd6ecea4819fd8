"""JAX's functions for neural networks and optax's optimizer; ``PUBLIC.md`` has what was found.

pip install jax optax
myllm verify --module accel/verify/examples/public_jax.py --partial --examples 30

JAX compiles for every new shape, so that few examples are patience enough.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

Array = np.ndarray[Any, Any]


def differentiable(function: Any, *inputs: Array) -> Any:
    """Return a result and what gives its gradients."""
    return jax.vjp(function, *(jnp.array(x) for x in inputs))


def gradients(dout: Any, back: Any) -> Any:
    return back(jnp.array(dout))


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    alibi: Array | None = None,
    key_mask: Array | None = None,
    documents: Array | None = None,
) -> Any:
    """By ``is_causal`` and ``local_window_size`` where T = S, else by the mask.

    Heads of v as wide as those of q and k are made so, with zeros.
    """
    (B, T, _, d), (S, _, dv) = q.shape, v.shape[1:]
    options: dict[str, Any] = {"scale": 1 / math.sqrt(d) if scale is None else float(scale)}
    distance = np.arange(S - T, S)[:, None] - np.arange(S)
    seen = np.ones((B, 1, T, S), bool)
    if T == S:
        options |= {"is_causal": causal}
        options |= {"local_window_size": (window - 1, window - 1)} if window else {}
    who = seen & (distance >= 0) if causal else seen
    who = who & (np.abs(distance) < window) if window else who
    if T != S:
        seen = who
    if key_mask is not None:
        seen = seen & np.asarray(key_mask, bool)[:, None, None]
    if documents is not None:
        seen = seen & (documents[:, None, S - T :, None] == documents[:, None, None])
    if alibi is not None:
        options["bias"] = jnp.array(-alibi[:, None, None] * distance, q.dtype)[None]
    some = (seen & who).any(-1)[:, 0, :, None, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        wide = max(d, dv)
        q, k, v = (jnp.pad(x, (*[(0, 0)] * 3, (0, wide - x.shape[3]))) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, mask=jnp.array(seen), **options)
        return jnp.where(some, out[..., :dv], 0)  # else the mean of all values

    return differentiable(attend, q, k, v)


def softmax(x: Array) -> jax.Array:
    return jax.nn.softmax(jnp.array(x), axis=-1)


def gelu_forward(x: Array) -> Any:
    return differentiable(lambda x: jax.nn.gelu(x, approximate=False), x)


def gelu_tanh_forward(x: Array) -> Any:
    return differentiable(lambda x: jax.nn.gelu(x, approximate=True), x)


def relu_forward(x: Array) -> Any:
    return differentiable(jax.nn.relu, x)


def swiglu_forward(x: Array) -> Any:
    def gated(x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * up

    return differentiable(gated, x)


def layernorm_forward(x: Array, gain: Array, bias: Array, *, eps: float) -> Any:
    """By ``jax.nn.standardize``; its default, "fast", is E[x²] - E[x]², as its docstring says."""

    def norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.standardize(x, axis=-1, epsilon=eps, algorithm="stable") * gain + bias

    return differentiable(norm, x, gain, bias)


def linear_cross_entropy_forward(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array | None = None,
    *,
    bias: Array | None = None,
) -> Any:
    """By optax's cross-entropy with integer labels."""
    seen = np.ones(targets.shape, bool) if mask is None else np.asarray(mask, bool)
    labels = jnp.array(np.where(seen, targets, 0))

    def loss(x: jax.Array, head: jax.Array, bias: Any = 0.0) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(x @ head.T + bias, labels)
        return jnp.sum(jnp.where(jnp.array(seen), each, 0))

    total, back = differentiable(loss, x, head, *(() if bias is None else (bias,)))
    return (total, int(seen.sum())), (back, x.dtype)


def linear_cross_entropy_backward(dloss: float, cache: Any) -> Any:
    back, dtype = cache
    return back(jnp.array(dloss, dtype))


def global_norm(x: Array) -> float:
    """In float64, as is asked here: it sums in the precision that it is given."""
    return float(optax.global_norm([jnp.array(x, jnp.float64)]))


def adamw(
    master: Array,
    m: Array,
    v: Array,
    grad: Array,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    n_decayed: int,
    grad_scale: float = 1.0,
) -> None:
    """By ``optax.adamw``; its arrays are new ones, put into those that were given."""
    decayed = jnp.arange(master.size) < n_decayed
    for part in (decayed, ~decayed):
        at = np.flatnonzero(part)
        if not at.size:
            continue
        rule = optax.adamw(
            lr, beta1, beta2, eps, weight_decay=weight_decay if part is decayed else 0.0
        )
        state = rule.init(jnp.array(master[at]))
        adam = state[0]._replace(
            count=jnp.array(step - 1, jnp.int32), mu=jnp.array(m[at]), nu=jnp.array(v[at])
        )
        scaled = jnp.array(grad[at]) * jnp.array(grad_scale, grad.dtype)
        change, after = rule.update(scaled, (adam, *state[1:]), jnp.array(master[at]))
        master[at] = np.asarray(optax.apply_updates(jnp.array(master[at]), change))
        m[at], v[at] = np.asarray(after[0].mu), np.asarray(after[0].nu)


attention_backward = gelu_backward = gelu_tanh_backward = relu_backward = gradients
swiglu_backward = layernorm_backward = gradients
