"""Attention as eager code computes it in bf16: every array that it makes is rounded.

Its error is the measure of flash-attention's tests.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.tolerance import round_bf16
from reference import ops
from reference.types import Array


def forward(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Return o and what the backward needs."""
    _, cache = ops.attention_forward(q, k, v, **options)
    inner = cache.cache
    P = round_bf16(_softmax_of_rounded(inner, options, q.shape[1], k.shape[1]))
    kept = P if inner.kappa is None else round_bf16(P * inner.kappa)
    o = round_bf16(kept @ inner.v)
    B, Hkv, G, T, dv = o.shape
    rounded = inner._replace(P=P)
    return o.transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, dv), rounded


def _softmax_of_rounded(inner: Any, options: Any, T: int, S: int) -> Array:
    s = round_bf16(inner.scale * round_bf16(inner.q @ inner.k.swapaxes(-1, -2)))
    seen = inner.P > 0
    if options.get("alibi") is not None:
        distance = np.arange(S - T, S)[:, None] - np.arange(S)
        _, Hkv, G = inner.q.shape[:3]
        s = round_bf16(s - options["alibi"].reshape(Hkv, G, 1, 1) * distance.astype(s.dtype))
    s = np.where(seen, s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True)
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    total = e.sum(axis=-1, keepdims=True)
    return np.asarray(e / np.where(total == 0, 1, total))


def backward(dout: Array, c: Any) -> Any:
    """Return (dq, dk, dv)."""
    B, Hkv, G, T, d = c.q.shape
    do = dout.reshape(B, T, Hkv, G, -1).transpose(0, 2, 3, 1, 4)
    kept = c.P if c.kappa is None else round_bf16(c.P * c.kappa)
    dv = kept.swapaxes(-1, -2) @ do
    dP = round_bf16(do @ c.v.swapaxes(-1, -2))
    dP = dP if c.kappa is None else round_bf16(dP * c.kappa)
    ds = round_bf16(c.P * (dP - np.sum(dP * c.P, axis=-1, keepdims=True)))
    ds = round_bf16(c.scale * ds)
    dq = (ds @ c.k).transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, d)
    dk = round_bf16(ds.swapaxes(-1, -2) @ c.q).sum(axis=2)
    return (
        round_bf16(dq),
        round_bf16(dk).transpose(0, 2, 1, 3),
        round_bf16(round_bf16(dv).sum(axis=2)).transpose(0, 2, 1, 3),
    )


EAGER = SimpleNamespace(attention_forward=forward, attention_backward=backward)
