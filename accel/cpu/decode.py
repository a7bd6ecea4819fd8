"""One token for each row of a batch, and the KV cache it reads and extends.

The mathematics is ``reference/model.py``'s ``decode_step``; how it is done at the speed of reading
the weights is told in ``decode_kernels.py``. This file is the boundary: it checks what arrives and
gathers the addresses of the weights.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.cpu.activations import TANH_2C, TANH_CUBIC
from accel.cpu.decode_kernels import KEY_BLOCK, MAX_TASKS, decode_token
from accel.cpu.kernels import address, contiguous
from reference.alibi import alibi_slopes
from reference.checks import (
    check_array,
    check_float,
    check_ids,
    check_position,
    check_shape,
    check_writable,
)
from reference.config import Config
from reference.kv import check_write
from reference.params import check_names, decoder_layout
from reference.sinusoidal import sinusoidal_table
from reference.types import KVCache

Array = npt.NDArray[Any]

# Where each weight of a layer stands in the table of addresses; 0 stands for one that is not there.
_PER_LAYER = (
    "attention_norm.gain",
    "attention_norm.bias",
    "attention.wqkv",
    "attention.bqkv",
    "attention.wo",
    "attention.bo",
    "ffn_norm.gain",
    "ffn_norm.bias",
    "ffn.w_up",
    "ffn.b_up",
    "ffn.w_down",
    "ffn.b_down",
)
_FFN = {"swiglu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_MATRICES = (2, 4, 8, 10)


# ---- the KV cache --------------------------------------------------------------------------------


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows."""
    if not 1 <= length <= config.context_length:
        raise ValueError(
            f"kv_cache: length must lie in 1..{config.context_length}, the model's context, "
            f"got {length}"
        )
    shape = (config.n_layers, batch, length, config.n_kv_heads, config.d_head)
    dtype = np.result_type(params["embedding.weight"].dtype, np.float32)
    return KVCache(np.zeros(shape, dtype), np.zeros(shape, dtype))


def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array) -> None:
    """Write k and v (B, T, Hkv, d) of one layer at position, position + 1, … of each row."""
    check_float("write_kv", k=k, v=v, cache=cache.k)
    columns = check_write(cache, k, v, layer, position)
    rows = np.arange(len(columns))[:, None]
    cache.k[layer, rows, columns] = k
    cache.v[layer, rows, columns] = v


# ---- the boundary --------------------------------------------------------------------------------


def decode_step(
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return the logits (B, V) after one more token of each row, extending the cache."""
    return decode(params, params, config, token, cache, position)


def decode(
    params: Mapping[str, Array],
    matrices: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Decode with the matrices of ``matrices`` and the rest of ``params``.

    Parameters
    ----------
    matrices : mapping
        The two-dimensional weights under their names, all of one type: that of the cache, or uint16
        for bfloat16. ``params`` has the other weights, and tables, in the cache's type.
    """
    _check_fit(params, config, token, cache)
    batch, room = len(token), cache.k.shape[2]
    check_position("decode_step", "position", position, batch)
    positions = np.broadcast_to(np.asarray(position), (batch,))
    if positions.min() < 0 or positions.max() >= room:
        raise ValueError(
            f"decode_step: position must lie in 0..{room - 1}, the cache's room, got {position}"
        )
    positions = np.ascontiguousarray(positions, np.int32)
    check_ids("decode_step", "token", token, config.vocab_size)
    dtype = cache.k.dtype
    number = dtype.type
    head_name = "embedding.weight" if config.tied else "head.weight"
    weight_type = matrices[head_name].dtype
    kept: list[Array] = []  # what the addresses point into

    def where(name: str, source: Mapping[str, Array], wanted: Any) -> int:
        if name not in source:
            return 0
        array = source[name]
        if array.dtype != wanted:
            raise ValueError(
                f"decode_step: {name} must be {wanted} as the cache and the other weights are, "
                f"got {array.dtype}"
            )
        kept.append(contiguous(array))
        return address(kept[-1])

    table = np.zeros((config.n_layers + 1, len(_PER_LAYER)), np.int64)
    swiglu = config.ffn == "swiglu"
    for layer in range(config.n_layers):
        for i, part in enumerate(_PER_LAYER):
            name = part.replace("_up", "_gate_up") if swiglu else part
            matrix = i in _MATRICES
            source, wanted = (matrices, weight_type) if matrix else (params, dtype)
            table[layer, i] = where(f"layers.{layer}.{name}", source, wanted)
    table[-1, 0] = where("final_norm.gain", params, dtype)
    table[-1, 1] = where("final_norm.bias", params, dtype)
    table[-1, 2] = where(head_name, matrices, weight_type)
    table[-1, 3] = where("head.bias", params, dtype)

    x = params["embedding.weight"][token]
    if config.position == "learned":
        x = x + params["position.weight"][positions]
    elif config.position == "sinusoidal":
        x = x + _sinusoidal(config.context_length, config.d_model, dtype)[positions]
    if x.dtype != dtype:
        raise ValueError(f"decode_step: the tables must be {dtype} as the cache is, got {x.dtype}")
    d, heads, kv_heads = config.d_head, config.n_heads, config.n_kv_heads
    angle = positions[:, None] * config.rope_base ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    slopes = alibi_slopes(heads, dtype)
    blocks = -(-(int(positions.max()) + 1) // KEY_BLOCK)
    work = np.empty(_work_size(config, batch, blocks), dtype)
    out = np.empty((batch, config.vocab_size), dtype)
    arguments: tuple[Any, ...] = (
        *(number(1), number(1 / config.d_model), number(config.norm_eps), number(1 / math.sqrt(d))),
        *(number(TANH_2C), number(TANH_CUBIC), weight_type.type(0), table, config.n_layers, batch),
        *(config.d_model, heads, kv_heads, d, config.d_ff, config.vocab_size, _FFN[config.ffn]),
        *(config.norm_placement == "pre", config.norm == "layernorm", config.position == "rope"),
        *(config.position == "alibi", address(cos), address(sin), address(slopes)),
        *(address(positions), address(cache.k), address(cache.v), room, blocks),
        *(address(x), address(work), address(out)),
    )
    decode_token(*arguments)
    return out


_layout = functools.lru_cache(maxsize=8)(decoder_layout)


def _check_fit(params: Mapping[str, Array], config: Config, token: Array, cache: KVCache) -> None:
    """Raise unless parameters and cache are those of the config, and the cache has a row a token.

    The kernel is given addresses: what does not fit would be read, or written, out of bounds.
    """
    layout = _layout(config)
    check_names(list(params), layout)
    for name, (_, spec) in layout.offsets.items():
        if getattr(params[name], "shape", None) != spec.shape:
            check_shape("decode_step", name, params[name], spec.shape, "the config")
    check_array("decode_step", "token", token)
    if token.ndim != 1:
        raise ValueError(f"decode_step: token must be (B,), one for each row, got {token.shape}")
    if cache.k.ndim != 5:
        raise ValueError(f"decode_step: the cache must be (L, B, S, Hkv, d), got {cache.k.shape}")
    rows, room = cache.k.shape[1:3]
    if rows != len(token):
        raise ValueError(f"decode_step: the cache has {rows} rows, token has {len(token)}")
    shape = (config.n_layers, rows, room, config.n_kv_heads, config.d_head)
    for name, array in (("cache.k", cache.k), ("cache.v", cache.v)):
        check_shape("decode_step", name, array, shape, "the config")
        if not array.flags.c_contiguous:
            raise ValueError("decode_step: the cache must be contiguous, as kv_cache makes it")
    check_float("decode_step", k=cache.k, v=cache.v)
    check_writable("decode_step", k=cache.k, v=cache.v)


def _work_size(config: Config, batch: int, blocks: int) -> int:
    """Return the elements that ``decode_token`` works in, in the order in which it cuts them up."""
    d, heads = config.d_head, config.n_heads
    fused = (heads + 2 * config.n_kv_heads) * d
    inner = 2 * config.d_ff if config.ffn == "swiglu" else config.d_ff
    rows = config.d_model + fused + heads * d + inner + config.d_ff
    attention = heads * blocks * (KEY_BLOCK + d + 2)
    partial = MAX_TASKS * max(config.d_model, fused, inner)
    return batch * (rows + attention + partial)


@functools.lru_cache(maxsize=2)
def _sinusoidal(length: int, width: int, dtype: Any) -> Array:
    return sinusoidal_table(length, width, dtype)
