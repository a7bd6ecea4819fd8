"""``myllm score``: how likely a model finds a text, token by token.

The chain rule: a text is as likely as its first token, times its second given the first, and so on.
In logarithms that is a sum::

    log p(x_1 … x_n) = Σ_t log p(x_t | x_1 … x_t-1)

and the perplexity exp(-log p / n) is among how many equally likely tokens the model was undecided.
What stands before a text in training is the end of another, so before the first stands an eos.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from accel.help import parser
from dist.evaluate import finite, perplexity
from dist.model import Model
from dist.pack import eos_of
from dist.use import add_model, load, text_of
from reference.cross_entropy import nll
from reference.model import head, hidden_forward, start_pass
from reference.params import decoder_layout
from reference.types import Array

ROWS = 1 << 22  # logits that are looked at together


class Scored(NamedTuple):
    """A text, and how likely each of its tokens was."""

    text: str
    ids: list[int]
    log_p: Array  # (n,) float64, nats: of each token, given those before it

    @property
    def total(self) -> float:
        """The logarithm of the text's probability."""
        return float(np.sum(self.log_p))

    @property
    def perplexity(self) -> float:
        """e to the mean loss of a token."""
        return perplexity(-self.total / len(self.ids))

    @property
    def bits_per_byte(self) -> float:
        """The size of the text compressed by the model; comparable between tokenizers."""
        return -self.total / math.log(2) / len(self.text.encode("utf-8", "surrogatepass"))


def log_probabilities(model: Model, ids: Sequence[int]) -> Array:
    """Return log p(ids[t] | ids[:t]) for t = 1, 2, …: (n - 1,) float64.

    What is longer than the context is read in windows that overlap by half, so that no token has
    less than half a context before it, the first ones aside.

    Raises
    ------
    ValueError
        When the model gives numbers that are not finite.
    """
    longest = model.config.context_length
    parts = []
    done = 1  # tokens with a log-probability, and the first, which has none
    while done < len(ids):
        start = max(0, done - max(1, longest // 2))
        window = ids[start : start + longest + 1]
        parts.append(_window(model, window)[done - start - 1 :])
        done = start + len(window)
    return np.concatenate([np.zeros(0), *parts])


def _window(model: Model, ids: Sequence[int]) -> Array:
    ops, params, config = model.ops, model.params, model.config
    run = start_pass(ops, params, config, decoder_layout(config))
    read = ops.from_numpy(np.array([ids[:-1]], np.int32))
    found = []
    with ops.step():
        x, _ = hidden_forward(run, read, need_backward=False)
        rows = max(1, ROWS // config.vocab_size)
        for low in range(0, len(ids) - 1, rows):
            part = x[:, low : low + rows]
            scores = ops.logits(part, head(run), params.get("head.bias"))
            z = np.asarray(ops.to_numpy(scores)[0], np.float64)
            targets = np.array(ids[1 + low : 1 + low + len(z)])
            found.append(0.0 - nll(z, targets))  # of what is certain 0, not -0
    log_p = np.concatenate(found)
    if not np.isfinite(log_p).all():
        raise ValueError("the log-probabilities are not finite; has the model diverged?")
    return log_p


def main(argv: Sequence[str]) -> int:
    """``myllm score``."""
    args = parser(
        "score",
        "Show how likely a model finds texts: the logarithm of each token's probability given "
        "those before it, their sum, and the perplexity. Before a text stands an end of text, as "
        "in training: its first token counts, too, which it does not in `myllm inspect`.",
        'myllm score runs/laptop "The cat sat." "The cat sat on on."',
    )
    add_model(args)
    args.add_argument("texts", nargs="+", metavar="TEXT", help="- reads one from standard input")
    args.add_argument("--json", action="store_true", help="one JSON object a text, on a line")
    given = args.parse_intermixed_args(argv)
    model, tokenizer = load(given)
    eos = eos_of(tokenizer)
    for text in given.texts:
        text = text_of(text)
        ids = tokenizer.encode_ordinary(text)
        if not ids:
            raise ValueError("a text is empty: there is nothing to score")
        scored = Scored(text, ids, log_probabilities(model, [eos, *ids]))
        pieces = [tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]
        print(_as_json(scored, pieces) if given.json else _as_table(scored, pieces))
    return 0


def _as_json(scored: Scored, pieces: list[str]) -> str:
    tokens = [
        {"id": i, "text": piece, "log_probability": p, "perplexity": finite(perplexity(-p))}
        for i, piece, p in zip(scored.ids, pieces, scored.log_p.tolist(), strict=True)
    ]
    fields: dict[str, Any] = {
        "text": scored.text,
        "log_probability": scored.total,
        "perplexity": finite(scored.perplexity),
        "bits_per_byte": scored.bits_per_byte,
        "tokens": tokens,
    }
    return json.dumps(fields)


def _as_table(scored: Scored, pieces: list[str]) -> str:
    lines = [f"{'log p':>10}  {'p':>9}"]
    for piece, p in zip(pieces, scored.log_p.tolist(), strict=True):
        lines.append(f"{p:10.4f}  {math.exp(p):9.3g}  {piece!r}")
    return "\n".join(
        [
            *lines,
            f"{scored.total:10.4f}  the sum: {len(pieces)} token{'s' * (len(pieces) != 1)} "
            f"behind an end of text, perplexity {scored.perplexity:.2f}, "
            f"{scored.bits_per_byte:.3f} bits per byte",
        ]
    )
