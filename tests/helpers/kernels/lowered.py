"""Correct kernels whose matrix products read rounded numbers: TF32, or 8 bits with a scale.

``lowered(rounded)`` gives those ops that have such products, everything else of them in float32.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from reference.philox import keep_mask
from reference.types import Array, KVCache, Loss
from reference.visibility import Visibility

Round = Callable[[Array], Array]


def lowered(rounded: Round, store: Round = lambda x: x) -> SimpleNamespace:
    """Return a module; ``store`` is what happens to a result."""
    made = [_linear(rounded, store), _attention(rounded), _loss(rounded)]
    return SimpleNamespace(__name__="lowered", **{n: f for m in made for n, f in vars(m).items()})


def stored(rounded: Round, store: Round) -> SimpleNamespace:
    """Return what takes arrays that are kept in 8 bits: matrix products, tables, caches."""

    def embedding_forward(ids: Array, table: Array) -> Any:
        return store(rounded(table)[ids]), (ids, table.shape)

    def embedding_backward(dout: Array, cache: Any) -> Array:
        ids, shape = cache
        grad = np.zeros(shape, np.float32)
        np.add.at(grad, ids.reshape(-1), dout.reshape(-1, shape[1]))
        return store(grad)

    def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: Any) -> None:
        k, v = rounded(k), rounded(v)
        for b, at in enumerate(np.broadcast_to(position, len(k))):
            cache.k[layer][b, at : at + k.shape[1]] = k[b]
            cache.v[layer][b, at : at + k.shape[1]] = v[b]

    found = dict(locals())
    own = {n: f for n, f in found.items() if n not in ("rounded", "store")}
    return SimpleNamespace(__name__="stored", **own, **vars(_linear(rounded, store)))


def _linear(R: Round, store: Round) -> SimpleNamespace:
    def linear_forward(x: Array, weight: Array, bias: Array | None = None) -> Any:
        y = R(x) @ R(weight)
        return store(y if bias is None else y + bias), (x, weight, bias)

    def linear_backward(dout: Array, cache: Any) -> Any:
        x, weight, bias = cache
        rows, flat = R(dout).reshape(-1, dout.shape[-1]), R(x).reshape(-1, x.shape[-1])
        dx = store(R(dout) @ R(weight).T)
        dbias = None if bias is None else store(dout.reshape(rows.shape).sum(axis=0))
        return dx, store(flat.T @ rows), dbias

    def logits(x: Array, head: Array, bias: Array | None = None) -> Array:
        y = R(x) @ R(head).T
        return store(y if bias is None else y + bias)

    return SimpleNamespace(
        linear_forward=linear_forward, linear_backward=linear_backward, logits=logits
    )


def _attention(R: Round) -> SimpleNamespace:
    def attention_forward(
        q: Array,
        k: Array,
        v: Array,
        alibi: Array | None = None,
        key_mask: Array | None = None,
        documents: Array | None = None,
        *,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        dropout_p: float = 0.0,
        dropout_key: Any = None,
    ) -> Any:
        (B, T, H, d), S, G = q.shape, k.shape[1], q.shape[2] // k.shape[2]
        who = Visibility(T, S, causal, window, alibi, key_mask, documents)
        factor = np.float32(1 / math.sqrt(d) if scale is None else scale)
        qh = q.transpose(0, 2, 1, 3)
        kh, vh = (np.repeat(x, G, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
        s = factor * (R(qh) @ R(kh).swapaxes(-1, -2))
        if alibi is not None:
            s = s - alibi[:, None, None] * who.distance.astype(np.float32)
        s = np.where(who.allowed()[:, None], s, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        e = np.exp(s - np.where(top == -np.inf, 0, top))
        total = e.sum(axis=-1, keepdims=True)
        p = e / np.where(total == 0, 1, total)
        keep = np.ones((), np.float32)
        if dropout_p:
            kept = keep_mask((B, H, T, S), dropout_p, dropout_key)
            keep = kept.astype(np.float32) / np.float32(1 - dropout_p)
        out = R(p * keep) @ R(vh)
        return out.transpose(0, 2, 1, 3), (qh, kh, vh, p, keep, out, factor, G)

    def attention_backward(dout: Array, cache: Any) -> Any:
        qh, kh, vh, p, keep, out, factor, G = cache
        do = dout.transpose(0, 2, 1, 3)
        dp = (R(do) @ R(vh).swapaxes(-1, -2)) * keep
        ds = p * (dp - np.sum(do * out, axis=-1, keepdims=True))
        dq, dk = factor * (R(ds) @ R(kh)), factor * (R(ds).swapaxes(-1, -2) @ R(qh))
        dv = R(p * keep).swapaxes(-1, -2) @ R(do)

        def group(x: Array) -> Array:
            B, H, S, width = x.shape
            return x.reshape(B, H // G, G, S, width).sum(axis=2).transpose(0, 2, 1, 3)

        return dq.transpose(0, 2, 1, 3), group(dk), group(dv)

    return SimpleNamespace(
        attention_forward=attention_forward, attention_backward=attention_backward
    )


def _loss(R: Round) -> SimpleNamespace:
    def linear_cross_entropy_forward(
        x: Array, head: Array, targets: Array, mask: Array | None = None, bias: Array | None = None
    ) -> Any:
        rows, y = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        valid = np.ones(len(rows), bool) if mask is None else mask.reshape(-1)
        y = np.where(valid, y, 0)
        z = R(rows) @ R(head).T
        z = z if bias is None else z + bias
        top = z.max(axis=-1, keepdims=True)
        e = np.exp(z - top)
        total = e.sum(axis=-1, keepdims=True)
        losses = (top + np.log(total))[:, 0] - z[np.arange(len(z)), y]
        loss = Loss(float(losses[valid].sum(dtype=np.float64)), int(valid.sum()))
        return loss, (x, head, y, valid, bias, e / total)

    def linear_cross_entropy_backward(dloss: float, cache: Any) -> Any:
        x, head, y, valid, bias, p = cache
        dz = p.copy()
        dz[np.arange(len(dz)), y] -= 1
        dz = dz * valid[:, None] * np.float32(dloss)
        dx, dhead = R(dz) @ R(head), R(dz).T @ R(x.reshape(-1, x.shape[-1]))
        return dx.reshape(x.shape), dhead, None if bias is None else dz.sum(axis=0)

    return SimpleNamespace(
        linear_cross_entropy_forward=linear_cross_entropy_forward,
        linear_cross_entropy_backward=linear_cross_entropy_backward,
    )
