"""Toy models and a few training steps on any backend, for the tests of the cuda backend."""

from typing import Any

import numpy as np

from accel.tolerance import round_bf16
from reference import model
from reference.config import Config
from reference.global_norm import clip_scale
from reference.params import decoder_layout
from reference.types import Array, DropoutKey

KEY = DropoutKey(seed=7, step=1, sample=2, site=0)
B, T = 2, 9


def batch(config: Config, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    targets = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    mask = rng.random((B, T)) < 0.8
    return {"ids": ids, "targets": targets, "mask": mask}


def parameters(config: Config, scale: float = 1.0) -> Array:
    layout = decoder_layout(config)
    flat = layout.init(0) * np.float32(scale)
    flat += 0.05 * np.random.default_rng(1).standard_normal(layout.size).astype(np.float32)
    return flat


def train(
    module: Any, config: Config, flat: Array, data: dict[str, Array], steps: int
) -> tuple[list[float], Array, Array]:
    """Take AdamW steps; return the losses, the first gradient and the last master."""
    layout = decoder_layout(config)
    arrays = {name: module.from_numpy(x) for name, x in data.items()}
    master = module.from_numpy(flat.copy())  # the reference takes the array itself
    m, v = module.from_numpy(np.zeros_like(flat)), module.from_numpy(np.zeros_like(flat))
    losses, first = [], None
    for step in range(1, steps + 1):
        key = KEY._replace(step=step) if config.dropout_residual else None
        with module.step():
            params = module.parameters(layout.views(master))
            loss, cache = model.loss_forward(module, params, config, **arrays, dropout_key=key)
            grad = module.from_numpy(np.full(layout.size, np.nan, flat.dtype))
            model.loss_backward(1.0, cache, layout.views(grad))
            norm = module.global_norm(grad) / loss.n_valid
            scale = clip_scale(norm, 0.5) / loss.n_valid
            if first is None:
                first = np.array(module.to_numpy(grad))
            module.adamw(
                master,
                m,
                v,
                grad,
                step=step,
                lr=0.01,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                n_decayed=layout.n_decayed,
                grad_scale=scale,
            )
        losses.append(loss.total / loss.n_valid)
    assert first is not None
    return losses, first, np.array(module.to_numpy(master))


def bf16_weights(config: Config, flat: Array) -> Array:
    """Return parameters whose matrices are bf16 numbers, as the bf16 backend reads them."""
    rounded = round_bf16(flat)
    n_decayed = decoder_layout(config).n_decayed
    return np.concatenate([rounded[:n_decayed], flat[n_decayed:]])
