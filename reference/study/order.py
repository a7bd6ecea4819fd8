"""Order lost and recovered: a bag of words, then positions added, then positions concatenated.

"dog bites man" and "man bites dog" have the same words. A model that takes the mean of its words'
rows (a bag of words; Harris 1954, "Distributional structure") sees the same thing twice, and when
asked who bites it can only guess: two answers, a loss of log 2. Where does order come back?

A word w_t at place t becomes a row x_t, through a layer h_t to the mean over places, to a score for
each word as the one who bites::

    bag             x_t = e_t                   e_t = E[w_t], a row of a table, of width D
    added           x_t = e_t + p_t             p_t marks the place t, as in ``sinusoidal.py``
    concatenated    x_t = [e_t, p_t]            side by side, 2 D wide
    h_t = x_t W, or bent: relu(x_t W)           m = mean_t h_t            z = m A

Positions alone do not help: mean(e_t + p_t) = mean(e_t) + mean(p_t), and a sum does not know who
came with whom. **What is linear before the mean loses order, whatever it is told.** A bend before
the mean keeps a word and its place together, since relu(e + p) is no sum of an e-part and a p-part;
so does a product, which is what attention's scores are.

Adding is concatenating with less room: [e, p] [W_e; W_p] = e W_e + p W_p has a matrix for each
part, while e + p has one for both, (e + p) W, so that words and places must find room beside each
other in D numbers. They do, where D is large, and every layer is half as wide; transformers add.

    python -m reference.study.order
"""

import itertools

import numpy as np

from reference.params import Layout, weight
from reference.sinusoidal import sinusoidal_table
from reference.softmax import softmax
from reference.study import attention, shown
from reference.study.fit import fit
from reference.types import Array, Grads, Ids, Params

NAMES = ("dog", "man", "cat", "fox", "owl", "bee")
BITES = len(NAMES)  # the id of the verb
PLACES = ("none", "added", "concatenated")


def sentences() -> tuple[Ids, Ids]:
    """Return the ids of all sentences 'a bites b' (N, 3), and who bites (N,)."""
    pairs = itertools.permutations(range(len(NAMES)), 2)
    ids = np.array([(a, BITES, b) for a, b in pairs], dtype=np.int32)
    return ids, ids[:, 0]


def layout_of(places: str, width: int = 16, hidden: int = 32) -> Layout:
    """Return the parameters E (7, D), W (D or 2 D, F) and A (F, 6)."""
    read = width * (2 if places == "concatenated" else 1)
    return Layout(
        [
            weight("E", (len(NAMES) + 1, width), std=1),
            weight("W", (read, hidden), std=read**-0.5),
            weight("A", (hidden, len(NAMES)), std=hidden**-0.5),
        ]
    )


def forward(p: Params, ids: Ids, places: str, bent: bool) -> tuple[Array, tuple[Array, ...]]:
    """Return the scores z (N, 6) of who bites in ids (N, T), and what the backward needs."""
    T = ids.shape[1]
    e = p["E"][ids]
    where = np.broadcast_to(sinusoidal_table(T, e.shape[2], e.dtype), e.shape)
    x = {"none": e, "added": e + where, "concatenated": np.concatenate([e, where], axis=2)}[places]
    h = x @ p["W"]
    h = np.maximum(h, 0) if bent else h
    m = h.mean(axis=1)
    return m @ p["A"], (ids, x, h, m)


def loss_and_grads(p: Params, grads: Grads, places: str, bent: bool) -> float:
    """Write the gradient of the mean loss over all sentences into ``grads``, return the loss."""
    ids, targets = sentences()
    z, (_, x, h, m) = forward(p, ids, places, bent)
    dz, at = softmax(z), (np.arange(len(z)), targets)
    loss = -np.mean(np.log(dz[at]))
    dz[at] -= 1
    dz /= len(z)
    grads["A"][...] = m.T @ dz
    dh = np.repeat((dz @ p["A"].T)[:, None], ids.shape[1], axis=1) / ids.shape[1]  # of the mean
    dh = dh * (h > 0) if bent else dh
    grads["W"][...] = np.einsum("ntx,nth->xh", x, dh)
    grads["E"][...] = 0
    np.add.at(grads["E"], ids, (dh @ p["W"].T)[..., : p["E"].shape[1]])  # places have no gradient
    return float(loss)


def learn(places: str, bent: bool, steps: int = 300) -> float:
    """Train, and return the loss at the end."""
    layout = layout_of(places)
    flat = layout.init(seed=0, dtype=np.float64)
    losses = fit(flat, layout, lambda p, grads: loss_and_grads(p, grads, places, bent),
                 steps=steps, lr=0.02)  # fmt: skip
    return losses[-1]


def last_of(words: list[int], places: bool) -> Array:
    """Return what one causal head, with fixed random weights, says at the last of ``words``."""
    rng = np.random.default_rng(0)
    E, W = rng.standard_normal((len(NAMES) + 1, 16)), rng.standard_normal((3, 16, 16)) / 4
    x = E[words] + (sinusoidal_table(len(words), 16, np.float64) if places else 0)
    q, k, v = (x @ w for w in W)
    o, _ = attention.masked_forward(q, k, v, attention.causal(len(words)))
    return np.asarray(o[-1])


def main() -> None:
    """Print how well each way tells who bites, and what attention makes of order."""
    print("Who bites, in 'dog bites man'? The loss after 300 steps; a guess costs "
          f"{np.log(2):.4f}\n")  # fmt: skip
    print("  positions        straight before the mean   bent before the mean")
    for places in PLACES:
        print(f"  {places:<16}{learn(places, False):>25.4f}{learn(places, True):>23.4f}")
    dog, man, owl = (NAMES.index(name) for name in ("dog", "man", "owl"))
    print("\nOne head of attention, at the end of 'dog man bites owl', 'man dog bites owl':")
    for name, told in (("without positions", False), ("positions added", True)):
        a, b = (last_of([*two, BITES, owl], told) for two in ((dog, man), (man, dog)))
        print(f"  {name:<20}{np.abs(a - b).max():.0e} apart")


if __name__ == "__main__":
    shown(main)
