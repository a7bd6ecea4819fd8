"""Attention: every query takes a weighted mean of the values, by how well their keys fit.

Vaswani et al. 2017, eq. 1; grouped queries by Ainslie et al. 2023; ALiBi by Press et al. 2022. For
one query head h that reads key/value head h // G::

    s_tu = scale · q_t·k_u  [- m_h (t' - u)]      t' = t + (S - T)
    P_tu = exp(s_tu) / Σ_(r allowed) exp(s_tr)     where allowed, else 0
    o_t  = Σ_u P_tu κ_tu v_u                       κ = keep/(1 - p), the dropout; 1 without

Which keys are allowed is said in ``visibility.py``. The queries are taken to be the last T of the S
positions, which is what a decoder with a cache has; with T = S it is the ordinary triangle. A query
that may attend to nothing gives zeros, and passes no gradient.

Backward, from the last line up, for the gradient do of one head::

    dv_u  = Σ_t P_tu κ_tu do_t                     dP_tu = κ_tu do_t·v_u
    ds_tu = P_tu (dP_tu - Σ_r dP_tr P_tr)          (softmax.py)
    dq_t  = scale Σ_u ds_tu k_u                    dk_u  = scale Σ_t ds_tu q_t

and dk, dv are summed over the G query heads that read the same key/value head. The ALiBi bias is a
constant. Here the whole T × S table P is kept.

``study/attention.py`` is the way from one head to here, and ``study/tiled_attention.py`` the way
on: a fast kernel never has that table. With dropout κ goes with v, in what the tiles sum up and in
the number that takes the place of the sum in ds::

    δ_t = Σ_u dP_tu P_tu = Σ_u κ_tu (do_t·v_u) P_tu = do_t · Σ_u P_tu κ_tu v_u = do_t·o_t
"""

from typing import NamedTuple

import numpy as np

from reference.philox import keep_mask
from reference.softmax import softmax_backward
from reference.types import Array, Dropout
from reference.visibility import Visibility


class AttentionCache(NamedTuple):
    q: Array  # (B, Hkv, G, T, d)
    k: Array  # (B, Hkv, 1, S, d)
    v: Array  # (B, Hkv, 1, S, dv)
    P: Array  # (B, Hkv, G, T, S) the probabilities
    kappa: Array | None  # (B, Hkv, G, T, S); None without dropout
    scale: float


def forward(
    q: Array, k: Array, v: Array, who: Visibility, scale: float, dropout: Dropout | None = None
) -> tuple[Array, AttentionCache]:
    """Return o (B, T, Hq, dv).

    Parameters
    ----------
    q : (B, T, Hq, d)
    k : (B, S, Hkv, d), Hq a multiple of Hkv; query head h reads key/value head h // (Hq/Hkv)
    v : (B, S, Hkv, dv)
    who : Visibility
        Who may see whom.
    scale : float
        Usually 1/√d.
    dropout : Dropout, optional
        Of the probabilities; the flat index within a sample runs over (Hq, T, S).
    """
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    G = Hq // Hkv

    # heads before tokens, so that @ multiplies per head; a key/value head meets its G query heads
    q = q.reshape(B, T, Hkv, G, d).transpose(0, 2, 3, 1, 4)
    k = k.transpose(0, 2, 1, 3)[:, :, None]
    v = v.transpose(0, 2, 1, 3)[:, :, None]

    s = scale * (q @ k.swapaxes(-1, -2))  # (B, Hkv, G, T, S)
    if who.alibi is not None:
        s = s - who.alibi.reshape(Hkv, G, 1, 1) * who.distance.astype(s.dtype)
    s = np.where(who.allowed()[:, None, None], s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True)
    # a row with nothing allowed, or whose scores are all -inf: exp(-inf) = 0
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    l = np.sum(e, axis=-1, keepdims=True)  # noqa: E741
    P = e / np.where(l == 0, 1, l)

    kappa = None
    if dropout is not None:
        keep = keep_mask((B, Hq, T, S), *dropout).reshape(P.shape)
        kappa = keep.astype(P.dtype) / (1 - dropout.p)
    o = (P if kappa is None else P * kappa) @ v  # (B, Hkv, G, T, dv)
    o = o.transpose(0, 3, 1, 2, 4).reshape(B, T, Hq, dv)
    return o, AttentionCache(q, k, v, P, kappa, scale)


def backward(do: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v were given."""
    q, k, v, P, kappa, scale = cache
    B, Hkv, G, T, d = q.shape
    do = do.reshape(B, T, Hkv, G, v.shape[-1]).transpose(0, 2, 3, 1, 4)  # (B, Hkv, G, T, dv)

    dropped = P if kappa is None else P * kappa
    dv = np.sum(dropped.swapaxes(-1, -2) @ do, axis=2)  # (B, Hkv, S, dv), summed over the group
    dP = do @ v.swapaxes(-1, -2)
    if kappa is not None:
        dP = dP * kappa
    ds = softmax_backward(dP, P)
    dq = scale * (ds @ k)  # (B, Hkv, G, T, d)
    dk = scale * np.sum(ds.swapaxes(-1, -2) @ q, axis=2)  # (B, Hkv, S, d)
    return (
        dq.transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, d),
        dk.transpose(0, 2, 1, 3),
        dv.transpose(0, 2, 1, 3),
    )
