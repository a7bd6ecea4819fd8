"""A model of ours in training on random tokens: what both backends' benchmarks step."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from accel.bench.timing import Function, check, relative_error
from reference.blocks import Recompute
from reference.config import Config
from reference.global_norm import clip_scale
from reference.ops import Ops
from reference.params import decoder_layout
from reference.types import Array

SETTINGS: dict[str, Any] = {
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}

SMALL = Config(
    vocab_size=8192,
    d_model=384,
    n_layers=6,
    n_heads=6,
    n_kv_heads=2,
    d_head=64,
    d_ff=1024,
    context_length=1024,
)
PARAMETERS = 12_600_000  # of SMALL, about


def adamw_state(n: int = PARAMETERS) -> list[Array]:
    """Return weights, both moments and a gradient of n numbers."""
    rng = np.random.default_rng(0)
    state = [rng.standard_normal(n, dtype=np.float32) for _ in range(4)]
    state[2] = np.abs(state[2])
    return state


def adamw(ops: Ops, state: list[Array]) -> Function:
    """Return AdamW's ninth step of a state."""
    return partial(ops.adamw, *state, step=9, n_decayed=state[0].size, **SETTINGS)


class Matrix(NamedTuple):
    """A weight that Muon steps."""

    state: list[Array]  # weight, moment and gradient (I, O)
    parts: tuple[int, ...]  # the widths of the matrices side by side

    def apart(self) -> Iterator[tuple[Array, ...]]:
        """Yield the three of each matrix, as views."""
        edges = np.cumsum(self.parts)[:-1]
        return zip(*(np.split(array, edges, axis=1) for array in self.state), strict=True)


def muon_state(config: Config) -> list[Matrix]:
    """Return the matrices of a model's blocks."""
    rng = np.random.default_rng(0)
    specs = [spec for _, spec in decoder_layout(config).offsets.values() if spec.parts]
    return [
        Matrix(list(rng.standard_normal((3, *spec.shape), dtype=np.float32)), spec.parts)
        for spec in specs
    ]


def muon(ops: Ops, matrices: list[Matrix]) -> None:
    """Take a step of Muon of each."""
    for state, parts in matrices:
        ops.muon(*state, parts=parts, **MUON)


class Training:
    """A model with its optimizer; all tokens of its one batch are targets.

    Parameters
    ----------
    ops : Ops
    config : Config
    B, T : int
    recompute : str
    clip : bool
        Clip the gradient to a global norm of 1.
    """

    def __init__(
        self,
        ops: Ops,
        config: Config,
        B: int,
        T: int,
        *,
        recompute: Recompute = "auto",
        clip: bool = False,
    ) -> None:
        self.ops, self.config, self.recompute, self.clip = ops, config, recompute, clip
        self.layout = decoder_layout(config)
        flat = self.layout.init(0)
        # far enough from the initial weights that no gradient is all rounding
        flat[: self.layout.n_decayed] *= np.float32(3)
        self.initial = self.layout.views(flat.copy())
        self.master = ops.from_numpy(flat)
        self.m, self.v, self.grad = (
            ops.from_numpy(np.zeros(flat.shape, np.float32)) for _ in range(3)
        )
        rng = np.random.default_rng(0)
        self.take(*(rng.integers(0, config.vocab_size, (B, T)).astype(np.int32) for _ in range(2)))
        self.settings: Mapping[str, Any] = SETTINGS
        self.params = ops.parameters(self.layout.views(self.master))
        self.steps = 0

    def take(self, ids: Array, targets: Array) -> None:
        """Go on with another batch (B, T) int32."""
        self.ids, self.targets = ids, targets
        self._given = self.ops.from_numpy(ids), self.ops.from_numpy(targets), None, None

    def loss(self) -> float:
        """Return the mean loss; the gradient of the sum is then in ``grad``."""
        gradients = self.layout.views(self.grad)  # before a GPU has been waited for
        loss = self.ops.gradient(
            self.params, self.config, *self._given, gradients, recompute=self.recompute
        )
        return loss.total / loss.n_valid

    def step(self) -> float:
        """Take a training step; return the mean loss before it."""
        loss = self.loss()
        self.steps += 1
        n = self.ids.size
        clipped = clip_scale(self.ops.global_norm(self.grad) / n, 1.0) if self.clip else 1.0
        self.ops.adamw(
            self.master,
            self.m,
            self.v,
            self.grad,
            step=self.steps,
            n_decayed=self.layout.n_decayed,
            grad_scale=clipped / n,
            **self.settings,
        )
        self.params = self.ops.parameters(self.layout.views(self.master))
        return loss

    def check(self, what: str, limit: float, loss: float, gradients: dict[str, Array]) -> None:
        """Raise a ``ValueError`` when a peer's mean loss or gradients differ by more."""
        check(f"the loss of {what}", abs(self.loss() / loss - 1), limit)
        found = self.layout.views(self.ops.to_numpy(self.grad) / np.float32(self.ids.size))
        for name, gradient in gradients.items():
            error = relative_error(found[name], gradient)
            check(f"the gradient of {name} of {what}", error, limit)
