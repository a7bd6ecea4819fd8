"""Toy sizes of every family member, and the gradient of a whole model on any backend."""

import dataclasses
from typing import Any

import numpy as np

from reference.config import Config
from reference.encoder_decoder import EncoderDecoderConfig
from reference.model import loss_backward, loss_forward
from reference.ops import Ops
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, GPT2_TEXTBOOK, MYLLM_1B, ORIGINAL_DECODER
from reference.types import Array, DropoutKey

KEY = DropoutKey(seed=3, step=1, sample=5, site=0)
B, T = 3, 11

_TOY = {
    "vocab_size": 31,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "d_head": 6,
    "d_ff": 20,
    "context_length": 12,
}


def toy(config: Config, **changes: object) -> Config:
    """Return a config with its choices kept and its sizes made small."""
    kv_heads = 4 if config.n_kv_heads == config.n_heads else 2
    return dataclasses.replace(config, **{**_TOY, "n_kv_heads": kv_heads, **changes})  # type: ignore[arg-type]


MODELS: dict[str, Config] = {
    "myllm": toy(MYLLM_1B),
    "gpt2": toy(GPT2_SMALL),
    "gpt2_textbook": toy(GPT2_TEXTBOOK),
    "original": toy(ORIGINAL_DECODER),
    "original_head_bias": toy(ORIGINAL_DECODER, head_bias=True),
    "alibi_mqa": toy(MYLLM_1B, position="alibi", n_kv_heads=1),
    "tied_head_bias": toy(GPT2_SMALL, head_bias=True, position="none"),
    # one of its pairs keeps its frequency, one lies between, one is divided
    "untied_post_rmsnorm": toy(
        MYLLM_1B,
        tied=False,
        norm_placement="post",
        qkv_bias=True,
        **{"rope_base": 100.0, "rope_factor": 8.0, "rope_original_context": 64},
    ),
    "qk_norm_windows": toy(MYLLM_1B, qk_norm=True, window=(3, 0)),
    "alibi_window_qk_norm": toy(GPT2_SMALL, position="alibi", window=4, qk_norm=True),
    "dropout": toy(MYLLM_1B, dropout_embedding=0.1, dropout_attention=0.2, dropout_residual=0.3),
}


def encoder_decoder(**changes: object) -> EncoderDecoderConfig:
    """Return a toy encoder–decoder, post-norm as in the paper unless changed."""
    fields = {
        **toy(ORIGINAL_DECODER, tied=True).to_dict(),
        "n_encoder_layers": 3,
        "dropout_embedding": 0.0,
        "dropout_residual": 0.0,
        **changes,
    }
    return EncoderDecoderConfig(**fields)  # type: ignore[arg-type]


def inputs(config: Config) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    ids, targets = (rng.integers(0, config.vocab_size, (B, T)).astype(np.int32) for _ in range(2))
    return {
        "ids": ids,
        "targets": targets,
        "mask": rng.random((B, T)) < 0.8,
        "documents": np.cumsum(rng.random((B, T)) < 0.2, axis=1).astype(np.int32),
    }


def weights(config: Config, dtype: Any) -> Array:
    flat = decoder_layout(config).init(0)
    rng = np.random.default_rng(2)  # gains away from one, biases away from zero
    return np.asarray(flat + 0.1 * rng.standard_normal(flat.shape), np.float32).astype(dtype)


def gradient(ops: Ops, config: Config, flat: Array) -> tuple[float, Array]:
    """Return the loss and its flat gradient, NaN where nothing was written."""
    layout = decoder_layout(config)
    grads = np.full_like(flat, np.nan)
    with ops.step():
        loss, cache = loss_forward(
            *(ops, ops.parameters(layout.views(flat)), config), **inputs(config), dropout_key=KEY
        )
        loss_backward(1.0, cache, layout.views(grads))
    return loss.total, grads
