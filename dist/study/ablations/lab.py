"""What the experiments share: the corpus as bytes, a model trained on it, and claims."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from accel import load
from dist.comm import Solo
from dist.config import Optim
from dist.corpus import standard_library
from dist.data import Batch
from dist.step import Stepper, initial_weights
from reference import model
from reference.config import Config
from reference.cross_entropy import nll
from reference.ops import Ops
from reference.params import decoder_layout
from reference.schedule import learning_rate
from reference.types import Array

HELDOUT = 0.05  # of the documents
SEED = 0


class Claim(NamedTuple):
    """What a paper says, and what was seen here."""

    source: str
    says: str
    seen: str  # with the numbers
    holds: bool


class Curve(NamedTuple):
    """One line of a plot."""

    label: str
    x: list[float]
    y: list[float]


class Plot(NamedTuple):
    """One plot of the page."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    log: bool = False  # whether y is drawn by its logarithm
    mark: float | None = None  # an x worth a line


class Finding(NamedTuple):
    """What an experiment gives."""

    plots: list[Plot]
    table: list[list[str]]  # its first row is the head; empty for none
    claims: list[Claim]


class Lab:
    """The corpus and the backend; what is long says what it does through ``say``."""

    def __init__(self, ops: Ops, train: Array, heldout: Array, say: Callable[[str], None]) -> None:
        self.ops, self.train_bytes, self.heldout, self.say = ops, train, heldout, say

    @classmethod
    def of_the_library(cls, say: Callable[[str], None]) -> "Lab":
        """Take Python's own library, a twentieth of its documents held out."""
        texts = [text.text.encode() for text in standard_library()]
        order = np.random.default_rng(SEED).permutation(len(texts))
        cut = int(HELDOUT * len(texts))
        parts = [b"\n".join(texts[i] for i in some) for some in (order[cut:], order[:cut])]
        train, heldout = (np.frombuffer(part, np.uint8).astype(np.int32) for part in parts)
        return cls(load("cpu"), train, heldout, say)

    def windows(self, data: Array, length: int, count: int, seed: int) -> Array:
        """Return windows (count, length + 1) from places drawn by the seed."""
        starts = np.random.default_rng(seed).integers(0, len(data) - length - 1, count)
        return np.stack([data[start : start + length + 1] for start in starts])

    def batch(self, length: int, count: int, seed: int) -> Batch:
        """Return a batch to train on."""
        w = self.windows(self.train_bytes, length, count, seed)
        ids, targets = np.ascontiguousarray(w[:, :-1]), np.ascontiguousarray(w[:, 1:])
        return Batch(ids, targets, np.ones(ids.shape, np.bool_), None)

    def stepper(self, config: Config) -> Stepper:
        """Return a fresh model and its optimizer."""
        layout = decoder_layout(config)
        flat = initial_weights(self.ops, layout, SEED)
        return Stepper(self.ops, config, Optim(), layout, Solo(), flat, SEED)

    def train(
        self, name: str, config: Config, *, length: int, count: int, steps: int, lr: float
    ) -> tuple[Stepper, list[float]]:
        """Train a model and return it with the loss of each step.

        A step whose loss or gradient is not finite is not taken.
        """
        stepper, losses = self.stepper(config), []
        for step in range(1, steps + 1):
            gradient = stepper.gradient([self.batch(length, count, step)], step, 0)
            losses.append(gradient.loss)
            if gradient.finite:
                rate = learning_rate(
                    step, peak=lr, warmup_steps=max(1, steps // 20), total_steps=steps
                )
                stepper.update(gradient, rate)
            if step == steps or step % max(1, steps // 4) == 0:
                self.say(f"{name}: step {step}/{steps}, loss {gradient.loss:.3f}")
        return stepper, losses

    def loss_by_position(self, stepper: Stepper, length: int, count: int) -> Array:
        """Return the mean loss (length,) of held-out windows at each position."""
        total = np.zeros(length)
        for seed in range(0, count, 8):
            w = self.windows(self.heldout, length, 8, seed + 1)
            ids, targets = np.ascontiguousarray(w[:, :-1]), w[:, 1:]
            z = model.logits(self.ops, stepper.params, stepper.model, ids)
            total += nll(self.ops.to_numpy(z), targets).sum(axis=0)
        return total / (8 * len(range(0, count, 8)))


def byte_model(**choices: Any) -> Config:
    """Return a small model over bytes; ``choices`` differ from it."""
    given: dict[str, Any] = {
        **{"vocab_size": 256, "d_model": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4},
        **{"d_head": 32, "d_ff": 352, "context_length": 128, "rope_base": 10_000.0},
    }
    return Config(**{**given, **choices})


def smooth(values: list[float], over: int = 10) -> list[float]:
    """Return the running mean of the last ``over`` values."""
    return [float(np.mean(values[max(0, i - over + 1) : i + 1])) for i in range(len(values))]
