"""Attention from one head up: four short functions, each held to the one before.

Vaswani et al. 2017, "Attention is all you need", eq. 1. A text of T tokens is a matrix with a row
for each. Every token asks a question, the query q_t; every token u offers a key k_u and a value
v_u, all rows of width d. The better a key fits, the more of its value the token takes home:

    s_tu = scale · q_t·k_u             the score of key u for query t; scale is usually 1/√d
    P_tu = e^s_tu / Σ_u' e^s_tu'       softmax: the scores of a row become shares that sum to 1
    o_t  = Σ_u P_tu v_u                the mean of the values, weighted by these shares

As matrices S = scale · Q Kᵀ, P = softmax(S), O = P V. That is the whole forward. Why 1/√d: a dot
product of d numbers of size one is of size √d, and a softmax of large scores has no slope.

Backward. Write ``dx`` for how the loss moves when x does, an array of x's shape; somebody hands us
dO. The rule Y = A B gives dA = dY Bᵀ and dB = Aᵀ dY, so O = P V and S = scale · Q Kᵀ are one line
each. Between them is softmax: a score raises its own share and lowers the others, which takes the
weighted mean out of every row (``reference/softmax.py`` derives it):

    dS_tu = P_tu (dP_tu - Σ_u' P_tu' dP_tu')

Then three things that models need, each of which changes one line:

masks           a score of -∞ has e^-∞ = 0 for its share. With every u > t masked, no token sees its
                future, and one pass trains the predictions at all T places (causal attention).
heads           H heads look for H different things at once. Each is the function above on columns
                of its own: (T, H·d) is cut into H pieces of width d.
grouped heads   Hkv key/value heads serve H query heads (Ainslie et al. 2023, "GQA"), G = H/Hkv
                each, so that fewer keys and values must be kept while a text is written. A key that
                was read by G heads gets the sum of G gradients.

``reference/attention.py`` is the same with the heads beside each other in one array, and a batch.

    python -m reference.study.attention
"""

import numpy as np

from reference import ops
from reference.study import shown
from reference.types import Array

Gradients = tuple[Array, Array, Array]


# ---- one head ------------------------------------------------------------------------------------


def forward(Q: Array, K: Array, V: Array) -> tuple[Array, Array]:
    """Return O (T, d) and the shares P (T, T), which the backward needs, of one head."""
    S = Q @ K.T / np.sqrt(Q.shape[1])  # (T, T), a row for each query
    E = np.exp(S - S.max(axis=1, keepdims=True))  # the maximum cancels, and nothing overflows
    P = E / E.sum(axis=1, keepdims=True)
    return P @ V, P


def backward(dO: Array, Q: Array, K: Array, V: Array, P: Array) -> Gradients:
    """Return (dQ, dK, dV), each (T, d)."""
    dV = P.T @ dO  # from O = P V
    dP = dO @ V.T
    dS = P * (dP - np.sum(P * dP, axis=1, keepdims=True))  # through softmax
    dQ = dS @ K / np.sqrt(Q.shape[1])  # from S = Q Kᵀ / √d
    dK = dS.T @ Q / np.sqrt(Q.shape[1])
    return dQ, dK, dV


# ---- masks ---------------------------------------------------------------------------------------


def causal(T: int) -> Array:
    """Return which keys each query may see, (T, T): itself and those before it."""
    return np.tri(T, dtype=bool)


def masked_forward(Q: Array, K: Array, V: Array, allowed: Array) -> tuple[Array, Array]:
    """Return O and P of one head whose query t sees key u where ``allowed`` (T, T) is true.

    The backward is the one above, unchanged: where P is 0, so is dS.
    """
    S = np.where(allowed, Q @ K.T / np.sqrt(Q.shape[1]), -np.inf)
    E = np.exp(S - S.max(axis=1, keepdims=True))
    P = E / E.sum(axis=1, keepdims=True)
    return P @ V, P


# ---- heads ---------------------------------------------------------------------------------------


def heads_forward(
    Q: Array, K: Array, V: Array, allowed: Array, H: int
) -> tuple[Array, list[Array]]:
    """Return O (T, H·d) and each head's P; head h owns columns h·d … (h + 1)·d - 1 everywhere."""
    cut = [np.split(x, H, axis=1) for x in (Q, K, V)]
    each = [masked_forward(q, k, v, allowed) for q, k, v in zip(*cut, strict=True)]
    return np.concatenate([o for o, _ in each], axis=1), [P for _, P in each]


def heads_backward(dO: Array, Q: Array, K: Array, V: Array, Ps: list[Array]) -> Gradients:
    """Return (dQ, dK, dV), each (T, H·d): heads never met, and neither do their gradients."""
    cut = [np.split(x, len(Ps), axis=1) for x in (dO, Q, K, V)]
    each = [backward(*head) for head in zip(*cut, Ps, strict=True)]
    dQ, dK, dV = (np.concatenate(parts, axis=1) for parts in zip(*each, strict=True))
    return dQ, dK, dV


# ---- grouped heads -------------------------------------------------------------------------------


def grouped_forward(
    Q: Array, K: Array, V: Array, allowed: Array, H: int, Hkv: int
) -> tuple[Array, list[Array]]:
    """Return O (T, H·d) and each head's P, of Q (T, H·d) and K, V (T, Hkv·d).

    Query head h reads key/value head h // G: repeat each of those G times, and it is the above.
    """
    return heads_forward(Q, repeated(K, H, Hkv), repeated(V, H, Hkv), allowed, H)


def grouped_backward(
    dO: Array, Q: Array, K: Array, V: Array, Ps: list[Array], Hkv: int
) -> Gradients:
    """Return dQ (T, H·d) and dK, dV (T, Hkv·d): what was repeated, is summed."""
    T, H = len(Q), len(Ps)
    dQ, dK, dV = heads_backward(dO, Q, repeated(K, H, Hkv), repeated(V, H, Hkv), Ps)
    dK, dV = (dx.reshape(T, Hkv, H // Hkv, -1).sum(axis=2).reshape(T, -1) for dx in (dK, dV))
    return dQ, dK, dV


def repeated(x: Array, H: int, Hkv: int) -> Array:
    """Return x (T, Hkv·d) with each of its heads G = H/Hkv times in a row, (T, H·d)."""
    T = len(x)
    return np.repeat(x.reshape(T, Hkv, -1), H // Hkv, axis=1).reshape(T, -1)


# ---- what it shows -------------------------------------------------------------------------------


def look_up() -> None:
    """Print whom three words ask, and what they take home, with and without a mask."""
    words = ["the", "cat", "sat"]
    K = 2 * np.eye(3)  # each key points in a direction of its own
    Q = K[[1, 2, 0]]  # 'the' asks for what 'cat' offers, 'cat' for 'sat', 'sat' for 'the'
    V = np.diag([10.0, 20, 30])
    print("One head, three words, d = 3. Shares P, a row for each word that asks:\n")
    for name, allowed in (("all are seen", np.ones((3, 3), bool)), ("causal", causal(3))):
        O, P = masked_forward(Q, K, V, allowed)
        print(f"  {name:<14}" + "".join(f"{word:>7}" for word in words) + "     takes home")
        for word, shares, o in zip(words, P, O, strict=True):
            row = "".join(f"{100 * share:6.1f}%" for share in shares)
            print(f"    {word:<12}{row}     " + " ".join(f"{x:5.2f}" for x in o))
        print()


def main() -> None:
    """Look up words by hand, then hold each function to the one before it."""
    look_up()
    rng = np.random.default_rng(0)
    T, H, Hkv, d = 7, 6, 2, 4
    Q, dO = rng.standard_normal((2, T, H * d))
    K, V = rng.standard_normal((2, T, Hkv * d))
    tri, everything = causal(T), np.ones((T, T), bool)
    q, k, v, do, way = (x[:, :d] for x in (Q, K, V, dO, rng.standard_normal(Q.shape)))

    dq = backward(do, q, k, v, forward(q, k, v)[1])[0]
    h = 1e-5  # the loss is Σ do∘o; q moves along some way
    moved = forward(q + h * way, k, v)[0] - forward(q - h * way, k, v)[0]
    in_heads, Ps = grouped_forward(Q, K, V, tri, H, Hkv)
    batch = [x.reshape(1, T, -1, d) for x in (Q, K, V, dO)]
    o, cache = ops.attention_forward(*batch[:3])
    grads = grouped_backward(dO, Q, K, V, Ps, Hkv), ops.attention_backward(batch[3], cache)
    rows = [
        ("backward of one head, and a difference", np.sum(way * dq), np.sum(do * moved) / (2 * h)),
        ("a mask that allows all, and none", masked_forward(q, k, v, everything)[0],
         forward(q, k, v)[0]),
        ("the first of 6 heads, and one alone", heads_forward(Q, Q, Q, tri, H)[0][:, :d],
         masked_forward(q, q, q, tri)[0]),
        ("6 groups of 1 head, and 6 heads", grouped_forward(Q, Q, Q, tri, H, H)[0],
         heads_forward(Q, Q, Q, tri, H)[0]),
        ("2 groups of 3 heads, and reference.attention", in_heads, o.reshape(T, -1)),
        ("their dK, and its", grads[0][1], grads[1][1].reshape(T, -1)),
    ]  # fmt: skip
    print("Each function beside the one before it: the largest difference\n")
    for name, a, b in rows:
        print(f"  {name:<46}{np.max(np.abs(a - b)):8.0e}")
    print(f"\nKept of each token while a text is written: {2 * H * d} numbers with {H} key/value\n"
          f"heads, {2 * Hkv * d} with {Hkv}.")  # fmt: skip


if __name__ == "__main__":
    shown(main)
