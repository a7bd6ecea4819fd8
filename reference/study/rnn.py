"""A recurrent network beside attention: how far a gradient must travel to reach an early word.

Elman 1990, "Finding structure in time", with its backward through time (Werbos 1990,
"Backpropagation through time: what it does and how to do it"). A recurrent network reads a text x
(T, D) word by word and carries a state h of width D along, which is all it knows of what it has
read::

    h_t = tanh(x_t W + h_(t-1) U + b)          h_(-1) = 0

Backward. h_t is used twice, by whoever reads it and by h_(t+1), so its gradient is a sum, and must
come back from the end. With tanh' = 1 - tanh²::

    da_t = (dh_t + da_(t+1) Uᵀ) (1 - h_t²)     from the last t to the first
    dx_t = da_t Wᵀ      dW = Σ_t x_tᵀ da_t      dU = Σ_t h_(t-1)ᵀ da_t      db = Σ_t da_t

From the last state to x_u, u counted from 0, the gradient passes T - 1 - u times through Uᵀ, and
each time a factor 1 - h² ≤ 1. When U shrinks what it multiplies, it vanishes; when U stretches, it
may explode (Bengio, Simard & Frasconi 1994, "Learning long-term dependencies with gradient descent
is difficult"). In attention o_t = Σ_u P_tu v_u, and the path from o_t to any x_u is
one step, whose size is the share P_tu: a T-th at the start, wherever u is (Vaswani et al. 2017,
table 1, "maximum path length").

    python -m reference.study.rnn
"""

from typing import NamedTuple

import numpy as np

from reference.study import attention, shown
from reference.types import Array


class RNNCache(NamedTuple):
    x: Array  # (T, D)
    h: Array  # (T + 1, D) the states, h_(-1) = 0 first
    W: Array  # (D, D)
    U: Array  # (D, D)


def forward(x: Array, W: Array, U: Array, b: Array) -> tuple[Array, RNNCache]:
    """Return the states (T, D)."""
    h = [np.zeros_like(x[0])]
    for x_t in x:  # one after the other: no state can begin before the last is done
        h.append(np.tanh(x_t @ W + h[-1] @ U + b))
    states = np.array(h)
    return states[1:], RNNCache(x, states, W, U)


def backward(dh: Array, cache: RNNCache) -> tuple[Array, Array, Array, Array]:
    """Return (dx, dW, dU, db), given the gradient of the states (T, D)."""
    x, h, W, U = cache
    da = np.zeros_like(x)
    from_later = np.zeros_like(x[0])
    for t in reversed(range(len(x))):
        da[t] = (dh[t] + from_later) * (1 - h[t + 1] ** 2)
        from_later = da[t] @ U.T
    return da @ W.T, x.T @ da, h[:-1].T @ da, da.sum(axis=0)


def reach_of_rnn(T: int, D: int, size: float, rng: np.random.Generator) -> Array:
    """Return ‖∂ℓ/∂x_u‖ for each u (T,), ℓ read from the last state; ‖U‖₂ is ``size``."""
    U = size * np.linalg.qr(rng.standard_normal((D, D)))[0]  # a rotation, stretched
    W = rng.standard_normal((D, D)) / np.sqrt(D)
    x = 0.1 * rng.standard_normal((T, D))  # small, so that tanh is nearly straight
    states, cache = forward(x, W, U, np.zeros(D))
    dh = np.zeros_like(states)
    dh[-1] = _unit(rng.standard_normal(D))
    return np.asarray(np.linalg.norm(backward(dh, cache)[0], axis=1))


def reach_of_attention(T: int, D: int, rng: np.random.Generator) -> Array:
    """Return the same for one causal head, ℓ read from the last o."""
    x = rng.standard_normal((T, D))
    weights = rng.standard_normal((3, D, D)) / np.sqrt(D)
    q, k, v = (x @ W for W in weights)
    o, P = attention.masked_forward(q, k, v, attention.causal(T))
    do = np.zeros_like(o)
    do[-1] = _unit(rng.standard_normal(D))
    grads = attention.backward(do, q, k, v, P)
    dx = sum((d @ W.T for d, W in zip(grads, weights, strict=True)), np.zeros_like(x))
    return np.asarray(np.linalg.norm(dx, axis=1))


def reaches(T: int = 64, D: int = 32) -> dict[str, Array]:
    """Return how strongly each of T words reaches the loss at the end, by network."""
    made = {
        f"recurrent, ‖U‖₂ = {size}": reach_of_rnn(T, D, size, np.random.default_rng(0))
        for size in (0.8, 1.0, 1.2)
    }
    return {**made, "attention": reach_of_attention(T, D, np.random.default_rng(0))}


def main() -> None:
    """Print how the gradient's norm falls with distance, in both networks."""
    found = reaches()
    T = len(found["attention"])
    print(f"A loss at the last of {T} words: ‖its gradient‖ at the word n steps before\n")
    distances = (0, 1, 4, 16, 32, 63)
    print(f"  {'n':<22}" + "".join(f"{n:>9}" for n in distances))
    for name, norms in found.items():
        print(f"  {name:<22}" + "".join(f"{norms[T - 1 - n]:>9.1e}" for n in distances))
    print("\n‖U‖₂: how much longer U makes a vector. To the first word a gradient")
    print(f"passes U {T - 1} times in a recurrent network, and one share in attention.")


def _unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x))


if __name__ == "__main__":
    shown(main)
