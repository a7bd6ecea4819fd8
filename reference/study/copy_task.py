"""The copy task: an encoder-decoder reads a sequence and writes it down again.

The smallest task that needs all of Vaswani et al. 2017. The encoder reads symbols in random order
and of random number; the decoder, from a start token, writes them one by one and then an end token.
It can only know them by cross-attention: at its t-th step it must look up the encoder's t-th
position, by position rather than by content, and stop when the source stops::

    source  7 3 3 9 END              (padded, and the padding masked)
    target  START 7 3 3 9            what the decoder reads
    labels  7 3 3 9 END              what it learns to write

There are 111 million sequences and training draws thirteen thousand. Copying others exactly
means that the rule was learned and not the sequences.

    python -m reference.study.copy_task
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reference import ops
from reference.encoder_decoder import (
    EncoderDecoderConfig,
    encoder_decoder_layout,
    greedy_decode,
    loss_backward,
    loss_forward,
)
from reference.params import INIT_STD
from reference.study import shown
from reference.study.fit import fit
from reference.types import Array, Grads, Ids, Params

START, END, SYMBOLS = 0, 1, 10  # symbols are the ids from 2 on
LENGTHS = (3, 8)  # fewest and most symbols in a sequence

CONFIG = EncoderDecoderConfig(
    vocab_size=2 + SYMBOLS,
    d_model=32,
    n_layers=1,
    n_encoder_layers=1,
    n_heads=4,
    n_kv_heads=4,
    d_head=8,
    d_ff=64,
    context_length=LENGTHS[1] + 1,
    norm="layernorm",
    norm_placement="post",
    position="sinusoidal",
    ffn="relu",
    ffn_bias=True,
)


class CopyBatch(NamedTuple):
    source: Ids  # (B, T) symbols, END, then padding
    target: Ids  # (B, T) START, symbols, then padding
    mask: Array  # (B, T) bool: not padding, in the source as in the labels, which are equal


def draw(rng: np.random.Generator, n: int) -> CopyBatch:
    """Return n random sequences to copy; T is the longest length and one for END."""
    T = LENGTHS[1] + 1
    lengths = rng.integers(LENGTHS[0], LENGTHS[1] + 1, (n, 1))
    symbols = rng.integers(2, 2 + SYMBOLS, (n, T), dtype=np.int32)
    source = np.where(np.arange(T) < lengths, symbols, np.int32(END))
    target = np.concatenate([np.full((n, 1), START, np.int32), source[:, :-1]], axis=1)
    return CopyBatch(source, target, np.arange(T) <= lengths)


def loss_and_grads(params: Params, grads: Grads, batch: CopyBatch) -> float:
    """Write the gradient of the mean loss into ``grads`` and return that loss, in nats."""
    source, target, mask = batch
    loss, cache = loss_forward(ops, params, CONFIG, source, target, source, mask, mask)
    loss_backward(1 / loss.n_valid, cache, grads)
    return loss.total / loss.n_valid


def learn(batches: Sequence[CopyBatch]) -> tuple[Params, list[float]]:
    """Train on each of ``batches`` once; return the parameters and the loss by step.

    The layout draws matrices with a standard deviation of 0.02, which suits a width of a thousand
    or more. Beside sines and cosines of size one, such an embedding would hardly matter, so all
    matrices are scaled to 1/√D here; Vaswani et al. multiply the embedding by √D instead.
    """
    layout = encoder_decoder_layout(CONFIG)
    flat = layout.init(0)
    flat[: layout.n_decayed] /= INIT_STD * np.sqrt(CONFIG.d_model)
    feed = iter(batches)
    losses = fit(
        flat,
        layout,
        lambda params, grads: loss_and_grads(params, grads, next(feed)),
        steps=len(batches),
        lr=0.01,
    )
    return layout.views(flat), losses


def unseen(batch: CopyBatch, batches: Sequence[CopyBatch]) -> CopyBatch:
    """Return the sequences of ``batch`` that occur in none of ``batches``."""
    seen = {row.tobytes() for other in batches for row in other.source}
    new = [row.tobytes() not in seen for row in batch.source]
    return CopyBatch(*(array[new] for array in batch))


def write(params: Params, batch: CopyBatch) -> Ids:
    """Return what greedy decoding writes for each source, (B, T); it is to stop at its END."""
    return greedy_decode(
        ops,
        params,
        CONFIG,
        batch.source,
        start=START,
        length=batch.source.shape[1],
        source_mask=batch.mask,
    )


def copied(written: Ids, batch: CopyBatch) -> Array:
    """Return for each sequence (B,) whether it was written exactly, END and all."""
    return np.asarray(np.all((written == batch.source) | ~batch.mask, axis=1))


def cross_attention(params: Params, batch: CopyBatch) -> Array:
    """Return where each step of the decoder looks in the source: (B, heads, T, T)."""
    source, target, mask = batch
    _, cache = loss_forward(ops, params, CONFIG, source, target, source, mask, mask)
    cross = cache.decoder[0].cross
    assert cross is not None  # a decoder block of this model always has one
    return np.asarray(cross.branch.attention.cache.P[:, :, 0])


def show(ids: Ids) -> str:
    """Return a sequence as text, up to its END: symbols as letters, END as a full stop."""
    letters = "^." + "abcdefghij"
    text = "".join(letters[i] for i in ids)
    return text[: text.find(".") + 1] or text


def main() -> None:
    """Train, copy sequences never seen, and show where the decoder looked."""
    rng = np.random.default_rng(0)
    batches = [draw(rng, 32) for _ in range(400)]
    params, losses = learn(batches)
    possible = sum(SYMBOLS**n for n in range(LENGTHS[0], LENGTHS[1] + 1))
    n_drawn = sum(len(batch.source) for batch in batches)
    print(f"The copy task, learned from {n_drawn:,} draws of {possible:,} sequences\n")
    for step in (1, 50, 100, 200, len(losses)):
        print(f"  step {step:>4}   loss {losses[step - 1]:.4f}")

    new = unseen(draw(rng, 2_000), batches)
    written = write(params, new)
    exact = copied(written, new)
    print(f"\n{exact.sum():,} of {len(exact):,} sequences never seen are copied exactly. Some:\n")
    for source, copy in list(zip(new.source, written, strict=True))[:4]:
        print(f"  {show(source):<10} -> {show(copy)}")

    i = int(np.argmax(new.mask.sum(axis=1)))
    p = cross_attention(params, CopyBatch(*(array[[i]] for array in new)))[0]  # (heads, T, T)
    head = int(np.argmax(np.trace(p, axis1=1, axis2=2)))
    print(f"\nWhere head {head} looks while '{show(new.source[i])}' is written, in percent:\n")
    source = show(new.source[i])
    print("            " + "".join(f"{c:>5}" for c in source))
    for t, c in enumerate(source):
        print(f"  writes {c}  " + "".join(f"{100 * x:5.0f}" for x in p[head, t, : len(source)]))


if __name__ == "__main__":
    shown(main)
