"""Cases of the KV cache and of whole decoding steps, for every member of the family."""

from typing import Any

import numpy as np

from accel.verify.cases import Draft, Draw
from reference.config import Config
from reference.params import decoder_layout
from reference.types import Array

ROOMS = (1, 2, 3, 5, 17, 33, 65, 129)
MAX_CACHE = 20_000  # elements of k


def _config(draw: Draw, room: int) -> Config:
    """Return a small model, with every choice that a config has."""
    position: Any = draw.pick(("none", "rope", "learned", "alibi", "sinusoidal"))
    kv_heads, group = draw.pick((1, 2, 3)), draw.pick((1, 2, 3, 4))
    widths = [d for d in (1, 2, 4, 7, 16, 34) if position != "rope" or d % 2 == 0]
    return Config(
        vocab_size=draw.pick((2, 3, 7, 31, 65)),
        d_model=draw.pick((4, 6, 16, 34)),  # a LayerNorm of two numbers is all but their order
        n_layers=draw.pick((1, 2, 3)),
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        d_head=draw.pick(widths),
        d_ff=draw.pick((1, 3, 8, 17, 65)),
        context_length=room + draw.pick((0, 1, 7)),
        rope_base=draw.pick((10_000.0, 100.0)),
        norm_eps=draw.pick((1e-5, 0.1)),
        norm=draw.pick(("rmsnorm", "layernorm")),
        norm_placement=draw.pick(("pre", "post")),
        position=position,
        ffn=draw.pick(("relu", "gelu", "gelu_tanh", "swiglu")),
        attn_bias=draw.pick((False, True)),
        ffn_bias=draw.pick((False, True)),
        head_bias=draw.pick((False, True)),
        tied=draw.pick((True, False)),
    )


def _params(draw: Draw, config: Config) -> dict[str, Array]:
    """Return parameters that keep numbers near one all the way, so that every part shows."""
    found = {}
    for _, spec in decoder_layout(config).offsets.values():
        x = draw.rng.standard_normal(spec.shape)
        table = spec.name.startswith(("embedding", "position"))
        if len(spec.shape) > 1 and not table:
            x *= 1 / np.sqrt(spec.shape[0])
        elif not table:
            x = spec.mean + 0.3 * x
        found[f"params.{spec.name}"] = draw.rounded(x)
    return found


def _places(draw: Draw, batch: int, room: int, length: int) -> int | Array:
    """Return where to write ``length`` tokens: the first places, the last, some, or by row."""
    last = room - length
    kind = draw.pick(("last", "first", "any", "rows", "ends"))
    if kind == "rows":
        return np.asarray(draw.rng.integers(0, last + 1, batch), np.int64)
    if kind == "ends":
        return np.asarray(np.where(np.arange(batch) % 2, last, 0), np.int64)
    if kind == "any":
        return draw.pick(range(last + 1))
    return last if kind == "last" else 0


def kv_cache(draw: Draw) -> Draft:
    room = draw.pick(ROOMS)
    config = _config(draw, room)
    return Draft(
        _params(draw, config),
        {"config": config, "batch": draw.pick((1, 2, 3)), "length": room},
    )


def write_kv(draw: Draw) -> Draft:
    """One token and several, at the same place of each row and not, over what stands there."""
    B, L, heads = draw.pick((1, 2, 3)), draw.pick((1, 2, 3)), draw.pick((1, 2, 3))
    d, room = draw.pick((1, 2, 3, 8, 17, 64)), draw.pick(ROOMS)
    T = draw.pick([n for n in (1, 2, 3, 7, 16, 17, room) if n <= room])
    while L * B * room * heads * d > MAX_CACHE:
        d = max(1, d // 2)
    arrays = {
        "cache.k": draw.normal(L, B, room, heads, d),
        "cache.v": draw.normal(L, B, room, heads, d),
        "k": draw.values(B, T, heads, d),
        "v": draw.values(B, T, heads, d),
    }
    position = _places(draw, B, room, T)
    return Draft(arrays, {"layer": draw.pick(range(L)), "position": position})


def decode_step(draw: Draw) -> Draft:
    """The cache is full: what stands at the token's place and beyond is stale, and loud."""
    B, room = draw.pick((1, 2, 3)), draw.pick(ROOMS)
    config = _config(draw, room)
    position = _places(draw, B, room, 1)
    shape = (config.n_layers, B, room, config.n_kv_heads, config.d_head)
    stale = np.arange(room) >= np.broadcast_to(position, (B,))[:, None]
    loud = np.where(stale, 3.0, 1.0)[..., None, None]
    arrays: dict[str, Any] = _params(draw, config)
    arrays["token"] = draw.rng.integers(0, config.vocab_size, B).astype(np.int32)
    arrays["cache.k"] = draw.rounded(draw.rng.standard_normal(shape) * loud)
    arrays["cache.v"] = draw.rounded(draw.rng.standard_normal(shape) * loud)
    return Draft(arrays, {"config": config, "position": position})
