"""What a model makes of one text: losses, predictions, attention, norms, layer by layer.

The model is run by the reference, whose attention keeps its probabilities. What the head would say
of the residual stream before the last block is the logit lens (nostalgebraist 2020): the final norm
and the head, applied to what a block gives.
"""

from typing import Any, NamedTuple

import numpy as np

from reference import ops
from reference.blocks import block_backward, block_forward, norm_backward, norm_forward
from reference.config import Config
from reference.cross_entropy import nll
from reference.model import embed_forward, head, start_pass
from reference.params import decoder_layout
from reference.softmax import softmax
from reference.types import Array, Params


class Trace(NamedTuple):
    """Everything about T tokens; the i-th but first is predicted from those before it.

    Layers are counted from the embedding, which is layer 0, to L.
    """

    loss: Array  # (T - 1,) nats
    rank: Array  # (T - 1,) int, how many tokens were thought likelier
    best: Array  # (L + 1, T - 1, K) int, the likeliest tokens, if the head read each layer
    best_p: Array  # (L + 1, T - 1, K)
    true_p: Array  # (L + 1, T - 1), of the token that came
    attention: Array  # (L, Hq, T, T), queries by keys
    x_norm: Array  # (L + 1, T), of the residual stream behind each layer
    dx_norm: Array  # (L + 1, T), of the gradient of the summed loss there


def trace(params: Params, config: Config, ids: Array, n_best: int) -> Trace:
    """Run a text (T,) forward and backward.

    Raises
    ------
    ValueError
        When it has fewer than two tokens, or more than the model's context, or that has but one.
    """
    if config.context_length < 2:
        raise ValueError(
            "the model's context is one token, and of a text's first token nothing is predicted: "
            "there is nothing to show of it"
        )
    if not 2 <= len(ids) <= config.context_length:
        raise ValueError(
            f"the text has {len(ids)} token{'s' * (len(ids) != 1)}; it must have from 2 to "
            f"{config.context_length}, the context of the model"
        )
    layout = decoder_layout(config)
    run = start_pass(ops, params, config, layout)
    targets = ids[None, 1:].astype(np.int32)
    x, _ = embed_forward(run, ids[None, :].astype(np.int32))
    stream, caches = [x], []
    for layer in range(config.n_layers):
        x, cache = block_forward(run, f"layers.{layer}", layer, x)
        stream.append(x)
        caches.append(cache)

    best, best_p, true_p = [], [], []
    for x in stream:
        z = _read(run, x[:, :-1])[0]
        order = np.argsort(-z, axis=-1, kind="stable")[:, :n_best]
        p = softmax(z.astype(np.float64))
        best.append(order)
        best_p.append(np.take_along_axis(p, order, axis=-1))
        true_p.append(np.take_along_axis(p, targets[0, :, None], axis=-1)[:, 0])
    loss = nll(z.astype(np.float64), targets[0])  # of the last layer, which the model goes by
    at_target = np.take_along_axis(z, targets[0, :, None], axis=-1)

    return Trace(
        loss,
        np.sum(z > at_target, axis=-1),
        np.stack(best),
        np.stack(best_p),
        np.stack(true_p),
        np.stack([_probabilities(cache.attention.branch.attention) for cache in caches]),
        np.stack([np.linalg.norm(x[0], axis=-1) for x in stream]),
        _gradients(run, stream[-1], caches, targets),
    )


def _read(run: Any, x: Array) -> Array:
    """Return the logits (B, T, V) of the head over the stream x behind any layer."""
    if run.config.norm_placement == "pre":
        x, _ = norm_forward(run, "final_norm", x)
    return np.asarray(ops.logits(x, head(run), run.params.get("head.bias")))


def _probabilities(saved: Any) -> Array:
    """Return the attention of one text, (Hq, T, T), from the cache of the reference's op."""
    P = saved.cache.P
    return np.asarray(P.reshape(-1, *P.shape[-2:]))


def _gradients(run: Any, x: Array, caches: list[Any], targets: Array) -> Array:
    """Return ‖dx‖ of the summed loss behind each layer, (L + 1, T)."""
    grads = run.layout.views(np.zeros(run.layout.size, x.dtype))
    pre, norm_cache = run.config.norm_placement == "pre", None
    if pre:
        x, norm_cache = norm_forward(run, "final_norm", x)
    _, cache = ops.linear_cross_entropy_forward(
        np.ascontiguousarray(x[:, :-1]), head(run), targets, None, run.params.get("head.bias")
    )
    dx = np.zeros_like(x)
    dx[:, :-1] = ops.linear_cross_entropy_backward(1.0, cache)[0]
    if pre:
        dx = norm_backward(run, grads, "final_norm", dx, norm_cache)
    norms = [np.linalg.norm(dx[0], axis=-1)]
    for layer in reversed(range(run.config.n_layers)):
        dx, _ = block_backward(run, grads, f"layers.{layer}", dx, caches[layer])
        norms.append(np.linalg.norm(dx[0], axis=-1))
    return np.stack(norms[::-1])
