"""The classroom's first two models, a one-hot network and one head of attention, on a short poem.

Many courses end in this listing. A text is cut into words, with <start> before the first and <end>
after the last. Two models learn to tell the next word:

* a network that sees one word (Bengio et al. 2003, "A neural probabilistic language model", cut
  down to a context of one), and
* a transformer of one head (Vaswani et al. 2017, cut down), which sees all words up to there.

They are one model with and without its attention. For the word w_t at place t, V words in all, a
width D and a hidden width F::

    x_t = E[w_t] + PE_t                         a row of E (V, D); the place as sines and cosines
    x_t = Σ_(u ≤ t) P_tu (x_u W_v) W_o          attention (``attention.py``): a mean over the prefix
    y_t = relu(x_t W_up + b_up) W_down + b_down     (F,), then (D,)
    z_t = y_t Eᵀ                                the score of each next word, and -log softmax(z)_y
                                                the loss when y is the one that came

With a residual, the last two x and y are added to what came in. E is used at both ends (tied), so
its gradient is the sum of two.

**How far can they come down?** All occurrences of a word look the same to a model that sees one, so
the best it can say is how often each word followed it, and its loss stops at the entropy of these
bigrams (pairs of neighbours: ``poem.bigram_entropy``). The transformer knows two things more, what
came before and where it stands, and passes below. Take each away, and see which it needed.

Four mistakes of such listings, from ``mistakes.py``, are printed at the end.

    python -m reference.study.classroom
    python -m reference.study.classroom --text poem.txt --width 32 --residual --no-biases
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reference.params import Layout, ParamSpec, bias, weight
from reference.sinusoidal import sinusoidal_table
from reference.softmax import softmax
from reference.study import attention, shown
from reference.study.fit import fit
from reference.study.poem import POEM, between_marks, bigram_counts, bigram_entropy, decode
from reference.types import Array, Grads, Ids, Params

MOST_WORDS = 1_000  # their shares are a table of words × words


class Choices(NamedTuple):
    """What the model is; the fields are the options of the command."""

    attention: bool = True  # sees the words before; without, the word itself only
    positions: bool = True  # knows where the word stands
    width: int = 48  # D
    hidden: int = 64  # F
    biases: bool = True
    residual: bool = False


TRANSFORMER, ONE_WORD = Choices(), Choices(attention=False, positions=False)
SEES = (  # attention, positions
    (False, False, "its word alone (one-hot network)"),
    (False, True, "its word and where it stands"),
    (True, False, "the words before, not the places"),
    (True, True, "both (transformer)"),
)


def layout_of(V: int, choices: Choices) -> Layout:
    """Return the parameters, each matrix at a size that keeps numbers of size one so."""
    D, F = choices.width, choices.hidden
    specs: list[ParamSpec] = [weight("E", (V, D), std=D**-0.5)]
    if choices.attention:
        specs += [weight(name, (D, D), std=D**-0.5) for name in ("W_q", "W_k", "W_v", "W_o")]
    specs += [weight("W_up", (D, F), std=D**-0.5), weight("W_down", (F, D), std=F**-0.5)]
    if choices.biases:
        specs += [bias("b_up", F), bias("b_down", D)]
    return Layout(specs)


def forward(p: Params, ids: Ids, choices: Choices = TRANSFORMER) -> tuple[Array, dict[str, Any]]:
    """Return the scores z (T, V) of the word after each prefix of ids (T,), and all on the way."""
    E, T = p["E"], len(ids)
    x = E[ids] + sinusoidal_table(T, E.shape[1], E.dtype) if choices.positions else E[ids]
    c: dict[str, Any] = {"ids": ids, "x": x}
    if choices.attention:
        c["q"], c["k"], c["v"] = x @ p["W_q"], x @ p["W_k"], x @ p["W_v"]
        c["o"], c["P"] = attention.masked_forward(c["q"], c["k"], c["v"], attention.causal(T))
        x = c["o"] @ p["W_o"] + choices.residual * x
    c["read"] = x
    c["h"] = np.maximum(x @ p["W_up"] + p.get("b_up", 0.0), 0)
    c["y"] = c["h"] @ p["W_down"] + p.get("b_down", 0.0) + choices.residual * x
    return c["y"] @ E.T, c


def backward(dz: Array, p: Params, c: dict[str, Any], grads: Grads, choices: Choices) -> None:
    """Write the gradient of every parameter: the lines of ``forward`` from the last to the first.

    Gradients are added, so that what was used twice gets both; ``grads`` must begin as zeros.
    """
    grads["E"][...] += dz.T @ c["y"]
    dy = dz @ p["E"]
    grads["W_down"][...] += c["h"].T @ dy
    du = dy @ p["W_down"].T * (c["h"] > 0)
    grads["W_up"][...] += c["read"].T @ du
    if choices.biases:
        grads["b_up"][...] += du.sum(axis=0)
        grads["b_down"][...] += dy.sum(axis=0)
    dx = du @ p["W_up"].T + choices.residual * dy
    if choices.attention:
        grads["W_o"][...] += c["o"].T @ dx
        dqkv = attention.backward(dx @ p["W_o"].T, c["q"], c["k"], c["v"], c["P"])
        dx = choices.residual * dx
        for name, d in zip(("W_q", "W_k", "W_v"), dqkv, strict=True):
            grads[name][...] += c["x"].T @ d
            dx = dx + d @ p[name].T
    np.add.at(grads["E"], c["ids"], dx)


def loss_and_grads(p: Params, grads: Grads, ids: Ids, choices: Choices = TRANSFORMER) -> float:
    """Write the gradient of the mean loss into ``grads`` and return that loss, in nats.

    Every word of ids (T + 1,) but the first is a target: the loss has T terms.
    """
    z, cache = forward(p, ids[:-1], choices)
    error = softmax(z)
    at = np.arange(len(z)), ids[1:]
    loss = np.mean(-np.log(error[at])) + 0.0  # so that a sure thing costs 0, not -0
    error[at] -= 1  # softmax(z) - onehot(y)
    for grad in grads.values():
        grad[...] = 0
    backward(error / len(z), p, cache, grads, choices)
    return float(loss)


def learn(
    ids: Ids, V: int, choices: Choices = TRANSFORMER, *, steps: int = 500
) -> tuple[Params, list[float]]:
    """Train on a text ``ids`` (T + 1,); return the parameters and the loss by step."""
    layout = layout_of(V, choices)
    flat = layout.init(seed=0, dtype=np.float64)
    losses = fit(
        flat, layout, lambda p, grads: loss_and_grads(p, grads, ids, choices), steps=steps, lr=0.01
    )
    return layout.views(flat), losses


def recite(p: Params, first: Ids, length: int, choices: Choices = TRANSFORMER) -> Ids:
    """Return ``length`` words that begin with ``first``, each next one the likeliest."""
    ids = first
    while len(ids) < length:
        ids = np.append(ids, np.argmax(forward(p, ids, choices)[0][-1]))  # reads all, every time
    return ids


def main(arguments: Sequence[str] = ()) -> None:
    """Train both models on a poem, then take away what the transformer knows, piece by piece."""
    from reference.study import mistakes

    parser = argparse.ArgumentParser(prog="python -m reference.study.classroom")
    parser.add_argument("--text", type=Path, help="a poem of your own, in UTF-8")
    parser.add_argument("--width", type=int, default=48, help="D, an even number")
    parser.add_argument("--hidden", type=int, default=64, help="F")
    parser.add_argument("--residual", action="store_true", help="add what came in to what goes out")
    parser.add_argument("--no-biases", action="store_true", help="leave out b_up and b_down")
    given = parser.parse_args(arguments)
    if given.width % 2 or not (2 <= given.width <= 512 and 1 <= given.hidden <= 2048):
        parser.error("--width must be an even number in 2..512, and --hidden a number in 1..2048")
    try:
        text = given.text.read_text(encoding="utf-8") if given.text else POEM
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {given.text} cannot be read as UTF-8 text: {error}")
    ids, words = between_marks(text)
    if not 4 <= len(ids) <= MOST_WORDS + 2:
        parser.error(f"--text: a poem of 2 to {MOST_WORDS} words is asked for, not {len(ids) - 2}")
    shape = given.width, given.hidden, not given.no_biases, given.residual
    report(ids, words, Choices(True, True, *shape))
    mistakes.main()


def report(ids: Ids, words: list[str], choices: Choices) -> None:
    """Print how far each model comes down, and what the transformer recites."""
    entropy = bigram_entropy(bigram_counts(ids, len(words)))
    print(f"{len(ids) - 2} words, {len(words) - 2} different; entropy of bigrams {entropy:.4f}.\n")
    print(f"  {'sees':<34}loss at step 1     30    100    500   right")
    for attends, placed, name in SEES:
        this = choices._replace(attention=attends, positions=placed)
        p, losses = learn(ids, len(words), this)
        said = recite(p, ids[:1], len(ids), this)
        shown = "".join(f"{losses[step - 1]:7.3f}" for step in (1, 30, 100, 500))
        print(f"  {name:<41}{shown}{np.sum(said[1:] == ids[1:]):>8}")
    print(f"\n  right: of {len(ids) - 1} words, when the model writes on from the first")
    print(f"\nGiven <start>, the transformer recites:\n\n{decode(said[1:], words)}\n")


if __name__ == "__main__":
    shown(main, sys.argv[1:])
