"""A network that sees one word, and how well such a network can ever do.

Bengio et al. 2003, "A neural probabilistic language model", cut down to a context of one. The
current word goes in as a one-hot row x (V,)::

    e = x E                   (D,)  multiplying a one-hot row by E picks a row of it: an embedding
    h = relu(e W_up + b_up)   (F,)
    y = h W_down + b_down     (D,)
    z = y Eᵀ                  (V,)  the score of each next word; the decoder is tied to the encoder

and the loss is cross-entropy against the word that came next. The backward reads these lines from
the last to the first. E is used twice, so its gradient is the sum of two.

All occurrences of a word look the same to this model: after each it must predict the same
distribution. The best one is how often each word followed, and the loss there is the entropy of the
bigrams (``poem.bigram_entropy``). Training comes down to it and no further; what remains is not a
lack of training but of context. ``attention_poem.py`` is the way past it.

    python -m reference.study.bigram_mlp
"""

from typing import Any, NamedTuple

import numpy as np

from reference import cross_entropy, ops
from reference.blocks import Grads, Params
from reference.params import Layout, bias, weight
from reference.study.fit import fit
from reference.study.poem import bigram_counts, bigram_entropy, encode
from reference.types import Array, Ids


def mlp_layout(vocab_size: int, width: int = 32, hidden: int = 64) -> Layout:
    """Return the parameters: E (V, D), then the two linear layers of the hidden part."""
    return Layout(
        [
            weight("E", (vocab_size, width), std=width**-0.5),
            weight("W_up", (width, hidden), std=width**-0.5),
            bias("b_up", hidden),
            weight("W_down", (hidden, width), std=hidden**-0.5),
            bias("b_down", width),
        ]
    )


class MLPCache(NamedTuple):
    encode: Any
    up: Any
    relu: Any
    down: Any
    decode: Any


def forward(params: Params, words: Ids) -> tuple[Array, MLPCache]:
    """Return the scores (N, V) of the word after each of ``words`` (N,)."""
    E = params["E"]
    x = np.eye(len(E), dtype=E.dtype)[words]  # (N, V) one-hot rows
    e, encode_cache = ops.linear_forward(x, E)
    u, up_cache = ops.linear_forward(e, params["W_up"], params["b_up"])
    h, relu_cache = ops.relu_forward(u)
    y, down_cache = ops.linear_forward(h, params["W_down"], params["b_down"])
    z, decode_cache = ops.linear_forward(y, E.T)
    return z, MLPCache(encode_cache, up_cache, relu_cache, down_cache, decode_cache)


def backward(dz: Array, cache: MLPCache, grads: Grads) -> None:
    """Write the gradients of the parameters into ``grads``, given that of the scores (N, V)."""
    dy, dE_decode, _ = ops.linear_backward(dz, cache.decode)  # (N, D), (D, V)
    dh = ops.linear_backward(dy, cache.down, out=(grads["W_down"], grads["b_down"]))[0]
    du = ops.relu_backward(dh, cache.relu)
    de = ops.linear_backward(du, cache.up, out=(grads["W_up"], grads["b_up"]))[0]
    dE_encode = ops.linear_backward(de, cache.encode)[1]  # (V, D)
    grads["E"][...] = dE_encode + dE_decode.T


def loss_and_grads(params: Params, grads: Grads, words: Ids, targets: Ids) -> float:
    """Write the gradient of the mean loss into ``grads`` and return that loss, in nats.

    Parameters
    ----------
    words, targets : (N,) int
        ``targets[n]`` is the word that followed ``words[n]``.
    """
    z, cache = forward(params, words)
    loss, loss_cache = cross_entropy.forward(z, targets)
    backward(cross_entropy.backward(1 / loss.n_valid, loss_cache), cache, grads)
    return loss.total / loss.n_valid


def learn(ids: Ids, vocab_size: int, *, steps: int = 1_000) -> tuple[Params, list[float]]:
    """Train on the bigrams of a text ``ids`` (N,); return the parameters and the loss by step."""
    layout = mlp_layout(vocab_size)
    flat = layout.init(seed=0, dtype=np.float64)
    words, targets = ids[:-1], ids[1:]
    losses = fit(
        flat,
        layout,
        lambda params, grads: loss_and_grads(params, grads, words, targets),
        steps=steps,
        lr=0.01,
    )
    return layout.views(flat), losses


def main() -> None:
    """Train on the poem and print how the loss meets the entropy."""
    ids, vocabulary = encode()
    counts = bigram_counts(ids, len(vocabulary))
    entropy = bigram_entropy(counts)
    params, losses = learn(ids, len(vocabulary))
    print(f"A network that sees one word, on a poem of {len(ids)} words\n")
    print(
        f"  knowing nothing      log {len(vocabulary)} = {np.log(len(vocabulary)):.4f} nats a word"
    )
    for step in (1, 10, 100, 500, len(losses)):
        gap = losses[step - 1] - entropy
        print(f"  step {step:>5}   loss {losses[step - 1]:.5f}   above the entropy by {gap:.5f}")
    print(f"  entropy of bigrams   {entropy:.5f}   no one-word model can do better\n")
    the = vocabulary.index("the")
    p = ops.softmax(forward(params, np.array([the], dtype=np.int32))[0])[0]
    print("After 'the', the poem's own frequencies and what the network says:")
    for y in np.argsort(-counts[the], kind="stable")[: np.count_nonzero(counts[the])]:
        print(f"  {vocabulary[y]:<6} {counts[the, y] / counts[the].sum():.4f}   {p[y]:.4f}")


if __name__ == "__main__":
    main()
