"""Correct 16-bit attention as eager frameworks do it: whatever is written to memory has 16 bits."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.tolerance import round_bf16
from reference.philox import keep_mask
from reference.types import Array


def unfused_attention(
    scale_first: bool, stored: Callable[[Array], Array] = round_bf16
) -> SimpleNamespace:
    """Return a forward and a backward; q may be multiplied by the scale before the product."""

    def attention_forward(
        q: Array,
        k: Array,
        v: Array,
        alibi: Array | None = None,
        key_mask: Array | None = None,
        documents: Array | None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        dropout_p: float = 0.0,
        dropout_key: Any = None,
    ) -> Any:
        (B, T, Hq, d), S, G = q.shape, k.shape[1], q.shape[2] // k.shape[2]
        factor = np.float32(1 / math.sqrt(d) if scale is None else scale)
        qh = q.transpose(0, 2, 1, 3)
        kh, vh = (np.repeat(x, G, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
        if scale_first:
            qh = stored(qh * factor)
        s = stored(qh @ kh.swapaxes(-1, -2))
        s = s if scale_first else stored(s * factor)
        distance = np.arange(S - T, S)[:, None] - np.arange(S)
        if alibi is not None:
            s = stored(s - alibi[:, None, None] * distance.astype(np.float32))
        seen = (
            np.broadcast_to(distance >= 0, (B, 1, T, S)) if causal else np.ones((B, 1, T, S), bool)
        )
        if key_mask is not None:
            seen = seen & key_mask[:, None, None]
        if documents is not None:
            seen = seen & (documents[:, None, S - T :, None] == documents[:, None, None])
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        e = stored(np.exp(stored(s - np.where(np.isfinite(top), top, 0))))
        total = e.sum(axis=-1, keepdims=True)
        p = stored(e / np.where(total == 0, 1, total))
        keep = np.ones((), np.float32)
        if dropout_p:
            kept = keep_mask((B, Hq, T, S), dropout_p, dropout_key).astype(np.float32)
            keep = stored(kept / np.float32(1 - dropout_p))
        pk = stored(p * keep)
        return stored(pk @ vh).transpose(0, 2, 1, 3), (qh, kh, vh, p, keep, pk, factor, G)

    def attention_backward(dout: Array, cache: Any) -> Any:
        qh, kh, vh, p, keep, pk, factor, G = cache
        do = dout.transpose(0, 2, 1, 3)
        dp = stored(stored(do @ vh.swapaxes(-1, -2)) * keep)
        mean = stored(stored(p * dp).sum(axis=-1, keepdims=True))
        ds = stored(p * stored(dp - mean))
        ds = ds if scale_first else stored(ds * factor)
        dq = stored(ds @ kh)
        dq = stored(dq * factor) if scale_first else dq

        def group(x: Array) -> Array:
            B, H, S, d = x.shape
            return stored(x.reshape(B, H // G, G, S, d).sum(axis=2)).transpose(0, 2, 1, 3)

        dk, dv = stored(ds.swapaxes(-1, -2) @ qh), stored(pk.swapaxes(-1, -2) @ do)
        return dq.transpose(0, 2, 1, 3), group(dk), group(dv)

    return SimpleNamespace(
        attention_forward=attention_forward, attention_backward=attention_backward
    )
