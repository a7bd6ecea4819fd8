"""Cases of kv_cache, and the small models of decoding."""

import dataclasses
from typing import Any, get_args

import numpy as np

from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops
from reference.config import Config, FeedForward
from reference.params import decoder_layout
from reference.types import Array

WEIGHT = 0.1
GOLDEN = False  # an array of zeros proves nothing
LENGTHS = (1, 2, 3, 5, 17, 33, 64, 65, 128, 129)
LONG_LENGTHS = (257, 513, 1_025, 4_099)


def small_model(draw: Draw, length: int) -> Config:
    """Return a small model, with every choice that a config has; a thin one for long texts."""
    most = 34 if length <= LENGTHS[-1] else 4
    position: Any = draw.pick(("none", "rope", "learned", "alibi", "sinusoidal"), "positions")
    kv_heads, group = draw.pick((1, 2, 3), "Hkv"), draw.pick((1, 2, 3, 4), "G")
    biases = draw.pick((None, "attn_bias", "qkv_bias"), "attn_bias")
    scaled = draw.pick((False, True), "scaling")
    widths = [d for d in (1, 2, 4, 7, 16, 34) if d <= most and (position != "rope" or d % 2 == 0)]
    return Config(
        vocab_size=draw.pick((2, 3, 7, 31, 65), "V"),
        d_model=draw.pick((4, 6, 16, 34), "D"),  # a LayerNorm of two numbers is all but their order
        n_layers=draw.pick((1, 2, 3), "L"),
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        d_head=draw.pick(widths, "d"),
        d_ff=draw.pick((1, 3, 8, 17, 65), "F"),
        context_length=length + draw.pick((0, 1, 7), "spare"),
        rope_base=draw.pick((10_000.0, 100.0), "base"),
        # so that among few pairs one is kept, one divided, and one between
        rope_factor=8.0 if scaled else 1.0,
        rope_original_context=64,
        norm_eps=draw.pick((1e-5, 0.1), "eps"),
        norm=draw.pick(("rmsnorm", "layernorm"), "norm"),
        norm_placement=draw.pick(("pre", "post"), "norm_placement"),
        position=position,
        ffn=draw.pick(get_args(FeedForward)[::-1], "ffn"),
        attn_bias=biases == "attn_bias",
        qkv_bias=biases == "qkv_bias",
        ffn_bias=draw.pick((False, True), "ffn_bias"),
        head_bias=draw.pick((False, True), "head_bias"),
        tied=draw.pick((True, False), "tied"),
        qk_norm=draw.pick((False, True), "qk_norm"),
        window=draw.pick((0, 1, 2, 7, 33, 300, length), "window"),
    )


def parameters(draw: Draw, config: Config) -> dict[str, Array]:
    """Return parameters that keep numbers near one all the way, so that every part shows."""
    params = {}
    for _, spec in decoder_layout(config).offsets.values():
        x = draw.rng.standard_normal(spec.shape)
        table = spec.name.startswith(("embedding", "position"))
        if len(spec.shape) > 1 and not table:
            x *= 1 / np.sqrt(spec.shape[0])
        elif not table:
            x = spec.mean + 0.3 * x
        params[f"params.{spec.name}"] = draw.rounded(x)
    return params


def generate(draw: Draw) -> Draft:
    length = draw.pick((*LENGTHS, *LONG_LENGTHS), "length")
    config = small_model(draw, length)
    if draw.pick((False, True), "by layer"):  # a window for each layer
        windows = tuple(draw.pick((0, 1, 2, 7, length)) for _ in range(config.n_layers))
        config = dataclasses.replace(config, window=windows)
    arrays = parameters(draw, config)
    return Draft(arrays, {"config": config, "batch": draw.pick((1, 2, 3)), "length": length})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """Zeros, exactly."""
    cache = ops.kv_cache(v["params"], v["config"], v["batch"], v["length"])
    return {f"out.{n}[{i}]": Magnitude(a, 0) for n in "kv" for i, a in enumerate(getattr(cache, n))}
