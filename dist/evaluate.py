"""How well a model predicts text it has not seen."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dist.comm import Comm
from dist.data import Windows, on_backend
from dist.step import sum_of
from reference.config import Config
from reference.model import loss_forward
from reference.ops import Ops
from reference.types import Array

if TYPE_CHECKING:
    from tokenizer import Tokenizer


def perplexity(loss: float) -> float:
    """Return e^loss: among how many equally likely tokens a model is undecided."""
    return math.exp(loss) if loss < 700 else math.inf


def finite(x: float | None) -> float | None:
    """Return a number for JSON, which has no infinity."""
    return x if x is not None and math.isfinite(x) else None


class Evaluation(NamedTuple):
    """Of the held-out windows that were looked at."""

    loss: float  # nats a token
    n_targets: int
    n_bytes: int | None  # bytes that those tokens stand for; None when the tokenizer is unknown

    @property
    def perplexity(self) -> float:
        """Of the mean loss of a token."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The size of the text compressed by the model; comparable between tokenizers."""
        if not self.n_bytes:
            return None
        return self.loss * self.n_targets / math.log(2) / self.n_bytes

    def fields(self) -> dict[str, float | None]:
        """Return the figures for programs."""
        return {
            "loss": finite(self.loss),
            "perplexity": finite(self.perplexity),
            "bits_per_byte": finite(self.bits_per_byte),
            "tokens": self.n_targets,
        }

    def __str__(self) -> str:
        bits = self.bits_per_byte
        said = "" if bits is None else f", {bits:.3f} bits per byte"
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{said}"


def pooled(results: Sequence[Evaluation]) -> Evaluation:
    """Return what was found of several sets as that of one: every token counts the same."""
    if len(results) == 1:
        return results[0]
    targets = sum(r.n_targets for r in results)
    sizes = [r.n_bytes for r in results if r.n_bytes is not None]
    return Evaluation(
        sum_of(r.loss * r.n_targets for r in results) / targets,
        targets,
        sum(sizes) if len(sizes) == len(results) else None,
    )


def load_tokenizer(path: Path, sha256: str | None) -> "Tokenizer":
    """Load the tokenizer beside packed data or weights, held to the hash that these give.

    Raises
    ------
    ValueError, OSError
        When it is missing, damaged, or another one.
    """
    from tokenizer import Tokenizer  # not before it is needed: it loads its Unicode tables

    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: put the tokenizer with SHA-256 {sha256} there")
    found = Tokenizer.load(path)
    if found.sha256 != sha256:
        raise ValueError(
            f"{path} is another tokenizer than the one that the files beside it were made with: "
            f"its SHA-256 is {found.sha256}, theirs {sha256}"
        )
    return found


def token_lengths(tokenizer: "Tokenizer", vocab_size: int) -> Array:
    """Return how many bytes of text each id stands for: (V,) int64, 0 for special tokens."""
    lengths = np.zeros(max(vocab_size, tokenizer.n_vocab), np.int64)
    for token, text in tokenizer.vocabulary.tokens.items():
        lengths[token] = len(text)
    return lengths


def evaluate(
    ops: Ops,
    params: Mapping[str, Array],
    config: Config,
    windows: Windows,
    *,
    n_windows: int,
    micro_batch: int,
    comm: Comm,
    lengths: Array | None = None,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Return the mean loss over the first ``n_windows`` windows, divided among the ranks.

    The micro-batches are the same for any number of ranks, and so is the result. ``between`` is
    called on all ranks as often, before each micro-batch of rank 0.

    Raises
    ------
    ValueError
        When no token of them is to be predicted.
    """
    n_windows = min(n_windows, windows.dataset.n_windows)
    starts = list(range(0, n_windows, micro_batch))
    totals, n_targets, n_bytes = [], 0, 0
    for first in range(0, len(starts), comm.size):
        between()
        if first + comm.rank >= len(starts):
            break
        start = starts[first + comm.rank]
        batch = windows.batch(start, min(start + micro_batch, n_windows))
        with ops.step():
            loss, _ = loss_forward(
                ops, params, config, *on_backend(ops, batch), need_backward=False
            )
            totals.append(float(loss.total))
        n_targets += int(loss.n_valid)
        if lengths is not None:
            n_bytes += int(lengths[batch.targets[batch.mask]].sum())
    everyone = comm.all_gather((totals, n_targets, n_bytes))
    targets = sum(n for _, n, _ in everyone)
    if not targets:
        raise ValueError(f"no token of {windows.dataset.path} is to be predicted")
    total = sum_of(t for rank, _, _ in everyone for t in rank)
    size = sum(n for _, _, n in everyone) if lengths is not None else None
    return Evaluation(total / targets, targets, size)
