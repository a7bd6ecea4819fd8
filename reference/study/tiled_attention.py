"""Tiled attention: the same numbers as ``attention.py``, without ever holding a T × T table.

Dao et al. 2022, "FlashAttention", algorithms 1 and 4, with the loop over queries outside: in the
forward as Dao 2023, "FlashAttention-2", has it, in the backward by our choice; the running softmax
is Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3. Letters are
those of ``attention.py``: Q, K, V and O are (T, d), s_tu is a score, P_tu a share.

**Online softmax.** A row of scores comes piece by piece and will not be kept. Of the scores so far
keep three things: the maximum m, the sum l = Σ e^(s_u - m), and the row o = Σ e^(s_u - m) v_u. When
the next piece raises the maximum to m', every term so far is too large by one and the same factor:

    e^(s_u - m') = e^(s_u - m) · e^(m - m'),   so   l ← l e^(m - m') + Σ_piece e^(s_u - m')
                                               and  o ← o e^(m - m') + Σ_piece e^(s_u - m') v_u

*Proof that this is softmax.* Before any piece m = -∞ and l = o = 0, the sums over nothing. If m, l
and o are right for the scores so far, the two lines make them right for one piece more: what was
summed is brought to the new maximum, what is new is added. So after the last piece they are right
for the whole row, and o / l = Σ e^(s_u - m) v_u / Σ e^(s_u - m) = Σ P_tu v_u: the factor e^(-m)
stands above and below. No exponent is ever positive, so nothing overflows.

**What the backward needs of a row** is one number, lse = m + log l, the log of Σ e^s_u. From it any
tile of P can be made again when it is wanted: P_tu = e^s_tu / Σ e^s_tu' = e^(s_tu - lse_t).

**The sum in the backward** of softmax, dS_tu = P_tu (dP_tu - δ_t), goes over a whole row, which a
tile does not have. But it is a number that the forward's result already holds:

    δ_t = Σ_u dP_tu P_tu = Σ_u (do_t·v_u) P_tu = do_t · Σ_u P_tu v_u = do_t·o_t

because dP_tu = do_t·v_u, with do_t the row t of dO, a dot product does not mind the order of sums,
and the last sum is o_t.

So both directions walk over tiles, and hold nothing that grows as T². Names that the kernels share:
``m``, ``l``, ``lse``, ``delta`` (δ), and per tile S, P, dP, dS. Fast kernels take 2^x for e^x, with
log₂e multiplied into the scale, and keep lse2 = lse · log₂e: the same in other units.

    python -m reference.study.tiled_attention
"""

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np

from reference.study import attention, shown
from reference.types import Array

TILE = 32  # queries, and keys, of a tile


def running(s: Array, v: Array, piece: int) -> Iterator[tuple[float, float, Array]]:
    """Yield (m, l, o) after each piece of one row of scores s (S,) with the values v (S, d)."""
    m, l, o = -np.inf, 0.0, np.zeros(v.shape[1])
    for u in range(0, len(s), piece):
        s_piece, v_piece = s[u : u + piece], v[u : u + piece]
        m_new = max(m, float(s_piece.max()))
        shrink, e = np.exp(m - m_new), np.exp(s_piece - m_new)  # at the first piece e^-∞ = 0
        m, l, o = m_new, l * shrink + e.sum(), o * shrink + e @ v_piece
        yield m, l, o


def online_softmax(s: Array, v: Array, piece: int) -> tuple[Array, float]:
    """Return softmax(s)·v (d,), and lse = log Σ e^s."""
    *_, (m, l, o) = running(s, v, piece)
    return o / l, float(m + np.log(l))


def tiles_up_to(t: int) -> range:
    """Return where the tiles of keys begin that the tile of queries from t on can see."""
    return range(0, t + 1, TILE)


def scores(Q: Array, K: Array, t: int, u: int) -> Array:
    """Return S of the tile of queries from t on and keys from u on: -∞ where u > t."""
    S = Q[t : t + TILE] @ K[u : u + TILE].T / np.sqrt(Q.shape[1])
    later = np.arange(u, u + S.shape[1])[None, :] > np.arange(t, t + S.shape[0])[:, None]
    return np.where(later, -np.inf, S)


def forward(Q: Array, K: Array, V: Array) -> tuple[Array, Array]:
    """Return O (T, d) and lse (T,) of causal attention: all the lines above, for a tile of rows."""
    T = len(Q)
    O, lse = np.empty_like(V), np.empty(T)
    for t in range(0, T, TILE):
        rows = slice(t, t + TILE)
        m = np.full((len(Q[rows]), 1), -np.inf)
        l, o = np.zeros_like(m), np.zeros_like(V[rows])
        for u in tiles_up_to(t):
            S = scores(Q, K, t, u)
            m_new = np.maximum(m, S.max(axis=1, keepdims=True))
            shrink, P = np.exp(m - m_new), np.exp(S - m_new)  # P but for a factor of its row
            l = l * shrink + P.sum(axis=1, keepdims=True)
            o = o * shrink + P @ V[u : u + TILE]
            m = m_new
        O[rows], lse[rows] = o / l, (m + np.log(l))[:, 0]
    return O, lse


def backward(
    dO: Array,
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    lse: Array,
) -> tuple[Array, Array, Array]:
    """Return (dQ, dK, dV), each (T, d), from what the forward kept."""
    T, scale = len(Q), 1 / np.sqrt(Q.shape[1])
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    delta = np.sum(dO * O, axis=1, keepdims=True)  # (T, 1)
    for t in range(0, T, TILE):
        rows = slice(t, t + TILE)
        for u in tiles_up_to(t):
            keys = slice(u, u + TILE)
            P = np.exp(scores(Q, K, t, u) - lse[rows, None])
            dP = dO[rows] @ V[keys].T
            dS = P * (dP - delta[rows])
            dV[keys] += P.T @ dO[rows]
            dQ[rows] += scale * dS @ K[keys]
            dK[keys] += scale * dS.T @ Q[rows]
    return dQ, dK, dV


def whole(dO: Array, Q: Array, K: Array, V: Array) -> tuple[Array, ...]:
    """Return O, dQ, dK, dV by way of the whole table, as ``attention.py`` has them."""
    O, P = attention.masked_forward(Q, K, V, attention.causal(len(Q)))
    return O, *attention.backward(dO, Q, K, V, P)


def tiled(dO: Array, Q: Array, K: Array, V: Array) -> tuple[Array, ...]:
    """Return the same tile by tile."""
    O, lse = forward(Q, K, V)
    return O, *backward(dO, Q, K, V, O, lse)


def peak_bytes(way: Callable[..., object], *given: Array) -> int:
    """Return the most memory that ``way(*given)`` held at once beyond what it was given."""
    tracemalloc.start()
    way(*given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    """Walk along one row, hold the tiles to the table, and measure the memory of both."""
    rng = np.random.default_rng(0)
    s = np.array([1.0, 3, 2, 5, 0, 4])
    print("Online softmax of the scores", *(f"{x:g}" for x in s), "two at a time:\n")
    for n, (m, l, _) in enumerate(running(s, rng.standard_normal((6, 2)), piece=2), start=1):
        print(f"  after {2 * n} scores   m = {m:g}   l = {l:.4f}   m + log l = {m + np.log(l):.4f}")
    print(f"  all at once                       log Σ e^s = {np.log(np.exp(s).sum()):.4f}\n")

    d = 32
    print(f"Causal attention, one head of width {d}, forward and backward, float64:\n")
    print("     T   largest difference   most memory held: whole table       tiles")
    for T in (100, 256, 512, 1024):
        given = rng.standard_normal((4, T, d))
        apart = max(np.abs(a - b).max() for a, b in zip(tiled(*given), whole(*given), strict=True))
        table, linear = peak_bytes(whole, *given), peak_bytes(tiled, *given)
        print(f"{T:>6}{apart:>21.0e}{table / 2**20:>31.2f} MiB{linear / 2**20:>8.2f} MiB")
    print(
        "\nTwice the tokens: four times the table, twice the tiles' arrays (O, dQ, dK, dV,\nlse)."
    )


if __name__ == "__main__":
    shown(main)
