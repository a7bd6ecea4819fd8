"""One head of attention that recites, and what it knows that one word does not.

Vaswani et al. 2017, cut down to a single causal head with sinusoidal positions: no feed-forward, no
norm and no residual, so that whatever reaches the prediction has come through attention::

    x_t = E[w_t] + PE_t                          (D,)  the word and where it stands
    q, k, v = x W_q, x W_k, x W_v                (D,)
    o_t = Σ_(u ≤ t) softmax_u(q_t·k_u/√D) v_u    (D,)  a weighted mean over the prefix
    z_t = (o_t W_o) Eᵀ                           (V,)  the score of each next word

The whole poem goes in at once and every position predicts its next word; causality keeps each from
seeing it. The network of ``bigram_mlp.py`` knows w_t alone and stops at the entropy of the bigrams.
This one knows two things more, where the word stands and what came before it, and recites. Which of
the two does it? Take each away and look: without either we are back at the entropy of the bigrams;
the place alone is enough, since a poem that always starts at 0 can be learned as a list; and the
prefix alone, with the sines gone, goes far below that entropy too, although a mean over the prefix
forgets its order. Texts that start anywhere leave only the prefix, which is why models need it.

    python -m reference.study.attention_poem
"""

from typing import Any, NamedTuple

import numpy as np

from reference import cross_entropy, ops
from reference.blocks import Grads, Params
from reference.params import Layout, weight
from reference.sinusoidal import sinusoidal_table
from reference.study.fit import fit
from reference.study.poem import bigram_counts, bigram_entropy, decode, encode
from reference.types import Array, Ids


def attention_layout(vocab_size: int, width: int = 48) -> Layout:
    """Return the parameters: the tied table E (V, D) and the four projections (D, D)."""
    projections = [
        weight(name, (width, width), std=width**-0.5) for name in ("Wq", "Wk", "Wv", "Wo")
    ]
    return Layout([weight("E", (vocab_size, width), std=width**-0.5), *projections])


class Knows(NamedTuple):
    """What a position knows beside its own word."""

    place: bool = True  # PE_t is added to the word
    prefix: bool = True  # attention sees the words before; without, the word itself only


EVERYTHING = Knows()


class PoemCache(NamedTuple):
    embedding: Any
    q: Any
    k: Any
    v: Any
    attention: Any
    o: Any
    decode: Any


def forward(params: Params, ids: Ids, knows: Knows = EVERYTHING) -> tuple[Array, PoemCache]:
    """Return the scores (T, V) of the word after each prefix of ids (T,)."""
    E = params["E"]
    T, D = len(ids), E.shape[1]
    e, embedding_cache = ops.embedding_forward(ids, E)
    x = e + sinusoidal_table(T, D, E.dtype) if knows.place else e
    q, q_cache = ops.linear_forward(x, params["Wq"])
    k, k_cache = ops.linear_forward(x, params["Wk"])
    v, v_cache = ops.linear_forward(x, params["Wv"])
    one_head = (1, T, 1, D)  # attention is given (batch, tokens, heads, width)
    # attention stays within a document; with every word a document, each sees itself alone
    documents = None if knows.prefix else np.arange(T, dtype=np.int32)[None]
    q, k, v = (a.reshape(one_head) for a in (q, k, v))
    o, attention_cache = ops.attention_forward(q, k, v, documents=documents)
    y, o_cache = ops.linear_forward(o.reshape(T, D), params["Wo"])
    z, decode_cache = ops.linear_forward(y, E.T)
    return z, PoemCache(
        embedding_cache, q_cache, k_cache, v_cache, attention_cache, o_cache, decode_cache
    )


def backward(dz: Array, cache: PoemCache, grads: Grads) -> None:
    """Write the gradients of the parameters into ``grads``, given that of the scores (T, V)."""
    dy, dE_decode, _ = ops.linear_backward(dz, cache.decode)  # (T, D), (D, V)
    do = ops.linear_backward(dy, cache.o, out=(grads["Wo"], None))[0]
    T, D = do.shape
    dqkv = ops.attention_backward(do.reshape(1, T, 1, D), cache.attention)
    dq, dk, dv = (a.reshape(T, D) for a in dqkv)
    dx = (
        ops.linear_backward(dq, cache.q, out=(grads["Wq"], None))[0]
        + ops.linear_backward(dk, cache.k, out=(grads["Wk"], None))[0]
        + ops.linear_backward(dv, cache.v, out=(grads["Wv"], None))[0]
    )
    grads["E"][...] = ops.embedding_backward(dx, cache.embedding) + dE_decode.T


def loss_and_grads(params: Params, grads: Grads, ids: Ids, knows: Knows = EVERYTHING) -> float:
    """Write the gradient of the mean loss into ``grads`` and return that loss, in nats.

    Every word of ids (T + 1,) but the first is a target: the loss has T terms.
    """
    z, cache = forward(params, ids[:-1], knows)
    loss, loss_cache = cross_entropy.forward(z, ids[1:])
    backward(cross_entropy.backward(1 / loss.n_valid, loss_cache), cache, grads)
    return loss.total / loss.n_valid


def learn(
    ids: Ids, vocab_size: int, knows: Knows = EVERYTHING, *, steps: int = 500
) -> tuple[Params, list[float]]:
    """Train on a text ``ids`` (T + 1,); return the parameters and the loss by step."""
    layout = attention_layout(vocab_size)
    flat = layout.init(seed=0, dtype=np.float64)

    def step(params: Params, grads: Grads) -> float:
        return loss_and_grads(params, grads, ids, knows)

    losses = fit(flat, layout, step, steps=steps, lr=0.01)
    return layout.views(flat), losses


def recite(params: Params, first: Ids, length: int, knows: Knows = EVERYTHING) -> Ids:
    """Return ``length`` words that begin with ``first``, each next one the most likely."""
    ids = first
    while len(ids) < length:
        z, _ = forward(params, ids, knows)  # the whole prefix, again for every word
        ids = np.append(ids, np.argmax(z[-1]).astype(np.int32))
    return ids


def main() -> None:
    """Train on the poem and recite it, then take away what the model knows, piece by piece."""
    ids, vocabulary = encode()
    entropy = bigram_entropy(bigram_counts(ids, len(vocabulary)))
    params, losses = learn(ids, len(vocabulary))
    print(f"One head of attention, on a poem of {len(ids)} words\n")
    for step in (1, 10, 30, 100, 300, len(losses)):
        below = "   below the entropy of bigrams" if losses[step - 1] < entropy else ""
        print(f"  step {step:>4}   loss {losses[step - 1]:.5f}{below}")
    print("\nGiven the word 'the', it recites:\n")
    print(decode(recite(params, ids[:1], len(ids)), vocabulary))
    print(f"What it needs for that (the entropy of bigrams is {entropy:.4f}):\n")
    print("  knows beside its word     loss after 500 steps   words recited right")
    for knows in (Knows(False, False), Knows(False, True), Knows(True, False), EVERYTHING):
        params, losses = learn(ids, len(vocabulary), knows)
        right = np.sum(recite(params, ids[:1], len(ids), knows)[1:] == ids[1:])
        told = " and ".join(name for name, told in knows._asdict().items() if told) or "nothing"
        print(f"  {told:<24}  {losses[-1]:>20.4f}   {right:>12} of {len(ids) - 1}")


if __name__ == "__main__":
    main()
