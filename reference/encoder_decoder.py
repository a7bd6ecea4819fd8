"""The encoder–decoder transformer of Vaswani et al. 2017, from the same parts as the decoder.

The encoder reads the source, every position seeing every other; the decoder writes the target,
each position seeing itself, earlier ones and, by cross-attention, all of the encoder's output::

    memory = encoder blocks(embedding(source))     attention, feed-forward
    x      = decoder blocks(embedding(target))     masked attention, cross-attention, feed-forward
    z      = x headᵀ

Source and target share one vocabulary and one table, as in the paper (section 3.4); ``tied`` makes
it the head too. ``ORIGINAL`` is the base model of the paper's table 3, except that the embedding is
not multiplied by √D.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from reference.blocks import (
    BlockCache,
    Pass,
    block_backward,
    block_forward,
    norm_backward,
    norm_forward,
)
from reference.config import Config, Depth
from reference.model import EmbedCache, embed_backward, embed_forward, head, start_pass
from reference.ops import ENCODER_EMBEDDING_SITE, Ops
from reference.params import (
    INIT_STD,
    Layout,
    block_specs,
    check_names,
    embedding_specs,
    head_specs,
    norm_specs,
)
from reference.presets import ORIGINAL_DECODER
from reference.types import Array, DropoutKey, Grads, Loss, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(Config):
    """A config whose ``n_layers`` are the decoder's; the encoder has its own number."""

    n_encoder_layers: Depth

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position == "alibi":
            raise ValueError(
                "position 'alibi' lowers scores by the distance to earlier keys, but an encoder "
                "also sees later ones, whose scores it would raise; choose another position"
            )
        if self.window:
            raise ValueError(
                f"an encoder-decoder attends to whole sentences, so window must be 0, "
                f"got {self.window!r}"
            )


ORIGINAL = EncoderDecoderConfig(
    **{**ORIGINAL_DECODER.to_dict(), "tied": True, "n_encoder_layers": 6}
)


class EncoderDecoderCache(NamedTuple):
    run: Pass
    source_embed: EmbedCache
    encoder: list[BlockCache]
    encoder_norm: Any
    target_embed: EmbedCache
    decoder: list[BlockCache]
    final_norm: Any
    loss: Any


def encoder_decoder_layout(config: EncoderDecoderConfig) -> Layout:
    """Return the layout of the parameters.

    Projections into the residual stream start at 0.02/√(branches of their stack): two a block in
    the encoder, three in the decoder.
    """
    specs = embedding_specs(config)
    std = INIT_STD / math.sqrt(2 * config.n_encoder_layers)
    for layer in range(config.n_encoder_layers):
        specs += block_specs(config, f"encoder.{layer}", std)
    std = INIT_STD / math.sqrt(3 * config.n_layers)
    for layer in range(config.n_layers):
        specs += block_specs(config, f"layers.{layer}", std, cross=True)
    if config.norm_placement == "pre":
        specs += norm_specs(config, "encoder_norm") + norm_specs(config, "final_norm")
    return Layout(specs + head_specs(config))


def loss_forward(
    ops: Ops,
    params: Params,
    config: EncoderDecoderConfig,
    source: Array,
    target: Array,
    labels: Array,
    source_mask: Array | None = None,
    label_mask: Array | None = None,
    *,
    dropout_key: DropoutKey | None = None,
) -> tuple[Loss, EncoderDecoderCache]:
    """Return the summed loss of predicting ``labels`` from ``source`` and ``target``.

    Parameters
    ----------
    source : (B, S) int32
    target : (B, T) int32
        The decoder's input: the sentence to write, shifted right behind a start token.
    labels : (B, T) int32
        ``labels[b, t]`` is the token after ``target[b, t]``.
    source_mask : (B, S) bool, optional
        False where the source is padding: no attention sees it.
    label_mask : (B, T) bool, optional
        False where a label does not count.
    dropout_key : DropoutKey, optional
        Turns dropout on.
    """
    run = start_pass(ops, params, config, encoder_decoder_layout(config), dropout_key)
    x, cache = _hidden_forward(run, config, source, target, source_mask)
    loss, loss_cache = ops.linear_cross_entropy_forward(
        x, head(run), labels, label_mask, params.get("head.bias")
    )
    return loss, cache._replace(loss=loss_cache)


def loss_backward(dloss: float, cache: EncoderDecoderCache, grads: Grads) -> None:
    """Write the gradient of dloss · total into ``grads``; every element is overwritten."""
    run, ops = cache.run, cache.run.ops
    config = run.config
    check_names(list(grads), run.layout, "the gradients")
    pre = config.norm_placement == "pre"
    name = "embedding.weight" if config.tied else "head.weight"
    out = (grads[name], grads.get("head.bias"))
    dx = ops.linear_cross_entropy_backward(dloss, cache.loss, out=out)[0]
    if pre:
        dx = norm_backward(run, grads, "final_norm", dx, cache.final_norm)
    dmemory = None
    for layer in reversed(range(config.n_layers)):
        block = cache.decoder[layer]
        dx, dmemory = block_backward(run, grads, f"layers.{layer}", dx, block, dmemory)
    embed_backward(run, grads, dx, cache.target_embed, onto_tokens=config.tied)

    assert dmemory is not None  # a config has at least one decoder block
    if pre:
        dmemory = norm_backward(run, grads, "encoder_norm", dmemory, cache.encoder_norm)
    for layer in reversed(range(len(cache.encoder))):
        dmemory, _ = block_backward(run, grads, f"encoder.{layer}", dmemory, cache.encoder[layer])
    embed_backward(run, grads, dmemory, cache.source_embed, onto_tokens=True, onto_positions=True)


def logits(
    ops: Ops,
    params: Params,
    config: EncoderDecoderConfig,
    source: Array,
    target: Array,
    source_mask: Array | None = None,
) -> Array:
    """Return the logits (B, T, V) after each token of target (B, T)."""
    run = start_pass(ops, params, config, encoder_decoder_layout(config))
    x, _ = _hidden_forward(run, config, source, target, source_mask)
    return ops.logits(x, head(run), params.get("head.bias"))


def greedy_decode(
    ops: Ops,
    params: Params,
    config: EncoderDecoderConfig,
    source: Array,
    *,
    start: int,
    length: int,
    source_mask: Array | None = None,
) -> Array:
    """Return the most likely next token, ``length`` times: (B, length) int32, NumPy.

    The decoder reads its whole output again for each token: short and plain, for study.
    """
    target = np.full((source.shape[0], 1), start, np.int32)
    for _ in range(length):
        scores = logits(ops, params, config, source, ops.from_numpy(target), source_mask)
        chosen = np.argmax(ops.to_numpy(scores)[:, -1], axis=-1).astype(np.int32)
        target = np.concatenate([target, chosen[:, None]], axis=1)
    return target[:, 1:]


def _hidden_forward(
    run: Pass, config: EncoderDecoderConfig, source: Array, target: Array, source_mask: Array | None
) -> tuple[Array, EncoderDecoderCache]:
    pre = config.norm_placement == "pre"
    memory, source_cache = embed_forward(run, source, site=ENCODER_EMBEDDING_SITE)
    encoder = []
    for layer in range(config.n_encoder_layers):
        # the encoder's blocks are numbered after the decoder's, for their dropout sites
        memory, encoder_cache = block_forward(
            run,
            f"encoder.{layer}",
            config.n_layers + layer,
            memory,
            causal=False,
            key_mask=source_mask,
        )
        encoder.append(encoder_cache)
    encoder_norm = None
    if pre:
        memory, encoder_norm = norm_forward(run, "encoder_norm", memory)

    x, target_cache = embed_forward(run, target)
    decoder = []
    for layer in range(config.n_layers):
        x, decoder_cache = block_forward(
            run, f"layers.{layer}", layer, x, memory=memory, memory_mask=source_mask
        )
        decoder.append(decoder_cache)
    final_norm = None
    if pre:
        x, final_norm = norm_forward(run, "final_norm", x)
    return x, EncoderDecoderCache(
        run, source_cache, encoder, encoder_norm, target_cache, decoder, final_norm, None
    )
