"""Toy sizes of every family member, for tests of whole models."""

import dataclasses

from reference.config import Config
from reference.encoder_decoder import EncoderDecoderConfig
from reference.presets import GPT2_SMALL, GPT2_TEXTBOOK, MYLLM_1B, ORIGINAL_DECODER

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
    "untied_post_rmsnorm": toy(MYLLM_1B, tied=False, norm_placement="post"),
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
