"""One token for each row of a batch, and the KV cache it reads and extends.

The mathematics is ``reference/model.py``'s ``decode_step``; how it is done at the speed of reading
the weights is told in ``decode_kernels.py``. This file is the boundary: it checks what arrives and
gathers the addresses of the weights.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.cpu.activations import TANH_2C, TANH_CUBIC
from accel.cpu.decode_kernels import (
    KEY_BLOCK,
    LAYER,
    MAX_TASKS,
    TOKEN,
    decode_token,
    model_record,
)
from accel.cpu.halves import BF16, FLOAT32
from accel.cpu.kernels import address, contiguous, like
from accel.q8_0 import BLOCK
from accel.threads import alone
from reference.alibi import alibi_slopes
from reference.boundary import FEW
from reference.checks import check_float, check_ids, check_shape, check_writable
from reference.config import Config
from reference.kv import check_decode
from reference.params import check_names, decoder_layout
from reference.rope import frequencies
from reference.sinusoidal import sinusoidal_table
from reference.types import KVCache

Array = npt.NDArray[Any]

FEW_A_LAYER = 4 * FEW  # bytes of weights; a layer is four products, and each is a parallel region


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
        for bfloat16. ``params`` has the other weights, and tables, in the cache's type; float32
        where the cache, too, is bfloat16.
    """
    positions = check_decode(config, token, cache, position)
    _check_arrays(params, config, cache)
    check_ids("decode_step", "token", token, config.vocab_size)
    batch, length = len(token), int(positions.max()) + 1
    head_name = "embedding.weight" if config.tied else "head.weight"
    weight_type, dtype = matrices[head_name].dtype, cache.k[0].dtype
    if weight_type == dtype == BF16:
        dtype = FLOAT32
    else:
        check_float("decode_step", cache=cache.k[0])
    kept: list[Array] = []  # what the addresses point into

    def where(name: str) -> int:
        if name not in params:
            return 0
        array, wanted = params[name], dtype
        if array.ndim == 2:
            array, wanted = matrices[name], weight_type
        if array.dtype != wanted:
            raise ValueError(
                f"decode_step: {name} must be {wanted} as the cache and the other weights are, "
                f"got {array.dtype}"
            )
        kept.append(contiguous(array))
        return address(kept[-1])

    layers = []
    for n, names in enumerate(_names(config)):
        k, v = cache.k[n], cache.v[n]
        ring = {"keys": address(k), "values": address(v), "slots": k.shape[1]}
        weights = {field: where(name) for field, name in names.items()}
        layers.append(_row(LAYER, weights | ring | {"window": config.window_of(n)}))

    x = params["embedding.weight"][token]
    if config.position == "learned":
        x = x + params["position.weight"][positions]
    elif config.position == "sinusoidal":
        x = x + _sinusoidal(config.context_length, config.d_model, dtype)[positions]
    if x.dtype != dtype:
        raise ValueError(f"decode_step: the tables must be {dtype} as the cache is, got {x.dtype}")
    out = np.empty((batch, config.vocab_size), dtype)
    given = {"x": x, "out": out, "positions": positions}
    if config.position == "rope":
        omega = frequencies(config.rope_base, config.d_head, config.rope_scaling)
        angle = positions[:, None] * omega
        given |= {"cos": np.cos(angle).astype(dtype), "sin": np.sin(angle).astype(dtype)}
    elif config.position == "alibi":
        given["slopes"] = alibi_slopes(config.n_heads, dtype)
    parts = _work(config, batch, length)
    work = np.empty(parts["end"], dtype)
    fields = {name: address(work) + first * dtype.itemsize for name, first in parts.items()}
    fields |= {name: address(array) for name, array in given.items()}
    fields |= {"head": where(head_name), "head_bias": where("head.bias")}
    fields |= {f"final_norm_{part}": where(f"final_norm.{part}") for part in ("gain", "bias")}
    token_record = _row(TOKEN, fields | {"batch": batch, "length": length})
    few = _layout(config).size * weight_type.itemsize <= FEW_A_LAYER * config.n_layers
    (_decode_alone if few else decode_token)(
        _model(config, dtype),
        np.array(layers, LAYER),
        np.array([token_record], TOKEN),
        weight_type.type(0),
        like(cache.k[0]),
    )
    return out


def is_table(name: str) -> bool:
    """Whether a matrix is read as (V, D), row by row, and not as a layer's (in, out)."""
    return not name.startswith("layers.")


_decode_alone = alone(decode_token)
_layout = functools.lru_cache(maxsize=8)(decoder_layout)


@functools.lru_cache(maxsize=8)
def _names(config: Config) -> list[dict[str, str]]:
    """Return, layer by layer, the parameter that each field of ``LAYER`` points to."""
    found: list[dict[str, str]] = [{} for _ in range(config.n_layers)]
    for name in _layout(config).offsets:
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            field = part.removeprefix("attention.").removeprefix("ffn.").replace("gate_up", "up")
            found[int(layer)][field.replace(".", "_")] = name
    return found


def _row(dtype: Any, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a record, 0 for those not given."""
    return tuple([fields.get(name, 0) for name in dtype.names])


@functools.lru_cache(maxsize=8)
def _model(config: Config, dtype: Any) -> Array:
    """Return the record of a model."""
    kind = model_record(dtype)
    fields = {
        **{"width": config.d_model, "heads": config.n_heads, "kv_heads": config.n_kv_heads},
        **{"d": config.d_head, "hidden": config.d_ff, "vocabulary": config.vocab_size},
        **{"pre": config.norm_placement == "pre", config.ffn: True, "one": 1},
        **{"inv_width": 1 / config.d_model, "inv_head": 1 / config.d_head, "eps": config.norm_eps},
        **{"scale": 1 / math.sqrt(config.d_head), "tanh_2c": TANH_2C, "tanh_cubic": TANH_CUBIC},
    }
    return np.array([_row(kind, fields)], kind)


def _check_arrays(params: Mapping[str, Array], config: Config, cache: KVCache) -> None:
    """Raise unless parameters are those of the config, and the cache can be written to.

    The kernel is given addresses: what does not fit would be read, or written, out of bounds.
    """
    layout = _layout(config)
    check_names(params, layout)
    for name, (_, spec) in layout.offsets.items():
        if getattr(params[name], "shape", None) != spec.shape:
            check_shape("decode_step", name, params[name], spec.shape, "the config")
    for k, v in zip(cache.k, cache.v, strict=True):
        if not (k.flags.carray and v.flags.carray):  # contiguous, and to be written to
            check_writable("decode_step", k=k, v=v)
            raise ValueError("decode_step: the cache must be contiguous, as kv_cache makes it")
        if k.dtype != v.dtype or k.dtype != cache.k[0].dtype:
            check_float("decode_step", k=k, v=v, cache=cache.k[0])


@functools.lru_cache(maxsize=8)
def _work(config: Config, batch: int, length: int) -> dict[str, int]:
    """Return the first element of each part of what ``decode_token`` works in, and the end."""
    d, heads = config.d_head, config.n_heads
    fused = (heads + 2 * config.n_kv_heads) * d
    inner = 2 * config.d_ff if config.ffn == "swiglu" else config.d_ff
    pieces = heads * -(-length // KEY_BLOCK)
    sizes = {
        **{"h": config.d_model, "qkv": fused, "attended": heads * d, "up": inner},
        **{"active": config.d_ff, "scores": pieces * KEY_BLOCK, "joined": pieces * (d + 2)},
        "partial": max(MAX_TASKS * max(config.d_model, fused, inner), config.vocab_size + BLOCK),
        "end": 0,
    }
    ends = itertools.accumulate((batch * size for size in sizes.values()), initial=0)
    return dict(zip(sizes, ends, strict=False))


@functools.lru_cache(maxsize=2)
def _sinusoidal(length: int, width: int, dtype: Any) -> Array:
    return sinusoidal_table(length, width, dtype)
