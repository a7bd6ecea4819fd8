"""A trained model, of a checkpoint and on a backend, for all that runs one."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from accel import load as load_backend
from dist import checkpoint
from dist.weights import Weights
from reference.config import Config
from reference.ops import Ops
from reference.types import Array


class Model(NamedTuple):
    """A trained model, ready to be run."""

    ops: Ops
    config: Config
    params: dict[str, Array]
    path: Path
    state: checkpoint.State
    tokenizer: Path | None


def load_model(path: str | Path, backend: str, compute: str = "float32") -> Model:
    """Load the weights of a checkpoint, or of the best of a run folder, into a backend."""
    weights = Weights(path)
    state, master = weights.manifest, weights.master()
    ops = load_backend(backend, compute=compute)
    if backend == "cuda":
        from accel.cuda import attention, products

        # as when it was trained, where that can be had
        if state.attention in attention.offered():
            attention.take(state.attention)
        with contextlib.suppress(ImportError):
            products.take(state.products)
    params = ops.parameters(weights.layout.views(ops.from_numpy(master)))
    return Model(ops, weights.config, params, weights.path, state, weights.tokenizer)
