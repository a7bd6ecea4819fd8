"""Attention: every query takes a weighted mean of the values, by how well their keys fit.

Vaswani et al. 2017, eq. 1; grouped queries by Ainslie et al. 2023; ALiBi by Press et al. 2022. For
one query head h that reads key/value head h // G::

    s_tu = scale · q_t·k_u  [- m_h (t' - u)]      t' = t + (S - T)
    P_tu = exp(s_tu) / Σ_(u' allowed) exp(s_tu')   where allowed, else 0
    o_t  = Σ_u P_tu κ_tu v_u                       κ = keep/(1 - p), the dropout; 1 without

Which keys are allowed is said in ``visibility.py``. The queries are taken to be the last T of the S
positions, which is what a decoder with a cache has; with T = S it is the ordinary triangle. A query
that may attend to nothing gives zeros, and passes no gradient.

Backward, from the last line up, for the gradient do of one head::

    dv_u  = Σ_t P_tu κ_tu do_t                     dP_tu = κ_tu do_t·v_u
    ds_tu = P_tu (dP_tu - Σ_u' dP_tu' P_tu')       (softmax.py)
    dq_t  = scale Σ_u ds_tu k_u                    dk_u  = scale Σ_t ds_tu q_t

and dk, dv are summed over the G query heads that read the same key/value head. The ALiBi bias is a
constant. Here the whole T × S table P is kept; a fast kernel keeps only log Σ exp of each row and
makes P again tile by tile (Dao et al. 2022), which is the same mathematics.
"""

import math
from typing import NamedTuple

import numpy as np

from reference.checks import check_dout, check_float, check_mask, check_number, check_shape
from reference.dropout import check_dropout
from reference.philox import keep_mask
from reference.softmax import softmax_backward
from reference.types import Array, DropoutKey
from reference.visibility import Visibility


class AttentionCache(NamedTuple):
    q: Array  # (B, Hkv, G, T, d)
    k: Array  # (B, Hkv, 1, S, d)
    v: Array  # (B, Hkv, 1, S, dv)
    p: Array  # (B, Hkv, G, T, S) the probabilities
    dropout: Array | None  # (B, Hkv, G, T, S) κ; None without dropout
    scale: float


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
    dropout_key: DropoutKey | None = None,
) -> tuple[Array, AttentionCache]:
    """Return the attention of q over k and v, shape (B, T, Hq, dv).

    Parameters
    ----------
    q : (B, T, Hq, d)
    k : (B, S, Hkv, d), Hq a multiple of Hkv; query head h reads key/value head h // (Hq/Hkv)
    v : (B, S, Hkv, dv)
    alibi : (Hq,), optional
        Slopes m_h; not trained, so without a gradient.
    key_mask : (B, S) bool, optional
        False keys (padding) are seen by nobody.
    documents : (B, S) int32, optional
        Keys are seen by queries of the same document only; query t is position t + (S - T).
    causal : bool
        A query sees no later position.
    window : int
        A query sees positions less than this many away, its own included; 0: no limit.
    scale : float, optional
        1/√d when None.
    dropout_p, dropout_key
        Dropout on the probabilities; the flat index within a sample runs over (Hq, T, S).

    Raises
    ------
    ValueError
        When shapes, head counts or dtypes do not fit.
    """
    check_float("attention", q=q, k=k, v=v, alibi=alibi)
    check_heads(q, k, v)
    check_dropout(dropout_p, dropout_key)
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    G = Hq // Hkv
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    check_number("attention", "scale", scale)
    if key_mask is not None:
        check_mask("attention", "key_mask", key_mask, (B, S), "the batch and keys")
    if documents is not None:
        check_documents(documents, B, T, S)
    if window != int(window) or window < 0:
        raise ValueError(f"attention: window must be an integer >= 0 (0: no limit), got {window!r}")
    who = Visibility(T, S, causal, int(window), alibi, key_mask, documents)

    # heads before tokens, so that @ multiplies per head; a key/value head meets its G query heads
    q = q.reshape(B, T, Hkv, G, d).transpose(0, 2, 3, 1, 4)
    k = k.transpose(0, 2, 1, 3)[:, :, None]
    v = v.transpose(0, 2, 1, 3)[:, :, None]

    s = scale * (q @ k.swapaxes(-1, -2))  # (B, Hkv, G, T, S)
    if alibi is not None:
        check_shape("attention", "alibi", alibi, (Hq,), f"the query heads of q {(B, T, Hq, d)}")
        s = s - alibi.reshape(Hkv, G, 1, 1) * who.distance.astype(s.dtype)
    s = np.where(who.allowed()[:, None, None], s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True)
    e = np.exp(s - np.where(top == -np.inf, 0, top))  # a row with nothing allowed: exp(-inf) = 0
    total = np.sum(e, axis=-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)

    dropout = None
    if dropout_p > 0 and dropout_key is not None:
        keep = keep_mask((B, Hq, T, S), dropout_p, dropout_key).reshape(p.shape)
        dropout = keep.astype(p.dtype) / (1 - float(dropout_p))
    out = (p if dropout is None else p * dropout) @ v  # (B, Hkv, G, T, dv)
    out = out.transpose(0, 3, 1, 2, 4).reshape(B, T, Hq, dv)
    return out, AttentionCache(q, k, v, p, dropout, scale)


def attention_backward(dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v were given."""
    q, k, v, p, dropout, scale = cache
    B, Hkv, G, T, d = q.shape
    check_dout("attention", dout, (B, T, Hkv * G, v.shape[-1]), v)
    do = dout.reshape(B, T, Hkv, G, -1).transpose(0, 2, 3, 1, 4)  # (B, Hkv, G, T, dv)

    p_dropped = p if dropout is None else p * dropout
    dv = np.sum(p_dropped.swapaxes(-1, -2) @ do, axis=2)  # (B, Hkv, S, dv), summed over the group
    dp = do @ v.swapaxes(-1, -2)
    if dropout is not None:
        dp = dp * dropout
    ds = softmax_backward(dp, p)
    dq = scale * (ds @ k)  # (B, Hkv, G, T, d)
    dk = scale * np.sum(ds.swapaxes(-1, -2) @ q, axis=2)  # (B, Hkv, S, d)
    return (
        dq.transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, d),
        dk.transpose(0, 2, 1, 3),
        dv.transpose(0, 2, 1, 3),
    )


def check_documents(documents: Array, B: int, T: int, S: int) -> None:
    """Raise unless ``documents`` (B, S) are integers that tell T queries among S keys apart."""
    check_shape("attention", "documents", documents, (B, S), "the batch and keys")
    if not np.issubdtype(documents.dtype, np.integer):
        raise ValueError(f"attention: documents must be int32, got {documents.dtype}")
    if S < T:
        raise ValueError(
            "attention: documents need the queries to be the last T of the S positions, "
            f"but T = {T} > S = {S}"
        )


def check_heads(q: Array, k: Array, v: Array) -> None:
    """Raise unless q, k and v agree in batch, positions, heads and widths."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            "attention: q, k and v must be (B, T, H, d) with tokens before heads, "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "attention: q (B, T, Hq, d), k (B, S, Hkv, d) and v (B, S, Hkv, dv) must agree in "
            f"B, S, Hkv and d, got {q.shape}, {k.shape} and {v.shape}"
        )
    if 0 in k.shape[1:]:
        raise ValueError(f"attention: there must be a key and a key head, got k {k.shape}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: query heads ({q.shape[2]}) must be a multiple of key/value heads "
            f"({k.shape[2]})"
        )
