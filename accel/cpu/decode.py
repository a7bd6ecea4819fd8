"""One token for each row of a batch, and the KV cache it reads and extends.

The mathematics is ``reference/model.py``'s ``decode_step``; how it is done at the speed of reading
the weights is told in ``decode_kernels.py``. This file is the boundary: it checks what arrives and
gathers the addresses of the weights.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

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
from accel.cpu.rope import turns_of
from accel.q8_0 import BLOCK
from accel.threads import alone
from reference.alibi import alibi_slopes
from reference.boundary import FEW
from reference.checks import check_float, check_ids, check_params, check_writable
from reference.config import Config
from reference.kv import check_decode
from reference.params import decoder_layout
from reference.rope import frequencies
from reference.sinusoidal import sinusoidal_table
from reference.types import Array, KVCache

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
    _check_cache(cache)
    check_ids("decode_step", "token", token, config.vocab_size)
    batch, length = len(token), int(positions.max()) + 1
    weights = _weights(params, matrices, config, cache.k[0])
    dtype = weights.dtype

    layers = weights.layers.copy()
    layers["keys"], layers["values"] = [address(k) for k in cache.k], [address(v) for v in cache.v]
    layers["slots"] = [k.shape[1] for k in cache.k]
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
        given["cos"], given["sin"] = turns_of(omega, positions, dtype)
    elif config.position == "alibi":
        given["slopes"] = alibi_slopes(config.n_heads, dtype)
    parts = _work(config, batch, length)
    work = np.empty(parts["end"], dtype)
    fields = {name: address(work) + first * dtype.itemsize for name, first in parts.items()}
    fields |= {name: address(array) for name, array in given.items()}
    token_record = _row(TOKEN, weights.fields | fields | {"batch": batch, "length": length})
    (_decode_alone if weights.few else decode_token)(
        weights.model,
        layers,
        np.array([token_record], TOKEN),
        weights.like,
        like(cache.k[0]),
    )
    return out


class _Weights(NamedTuple):
    """What the kernel is told of a model's weights, and for what that is right."""

    key: tuple[Config, Any]  # and the type of the cache
    arrays: dict[str, Callable[[], Any]]  # weak references, which keep no model in memory
    matrices: dict[str, Callable[[], Any]]
    copies: list[Array]  # what addresses point into, beside the arrays
    dtype: Any  # what is computed in
    model: Array
    layers: Array  # LAYER, without the cache
    fields: dict[str, int]  # of TOKEN
    like: Any  # a scalar of the matrices' type
    few: bool


_latest: _Weights | None = None


def _weights(
    params: Mapping[str, Array], matrices: Mapping[str, Array], config: Config, kept: Array
) -> _Weights:
    """Return the record of the weights: that of the last token, if all arrays are the same ones.

    Behind a token's weights Python finds the caches empty, and to look at each weight's shape, type
    and address took a tenth of GPT-2 small's token in bfloat16.
    """
    global _latest
    known = _latest
    if (
        known is not None
        and known.key[0] is config
        and known.key[1] == kept.dtype
        and len(params) == len(known.arrays)
        and _are(params, known.arrays)
        and _are(matrices, known.matrices)
    ):
        return known
    # the kernel is given addresses: what does not fit would be read, or written, out of bounds
    check_params("decode_step", params, decoder_layout(config))
    head = "embedding.weight" if config.tied else "head.weight"
    weight_type = matrices[head].dtype
    dtype = FLOAT32 if weight_type == kept.dtype == BF16 else kept.dtype
    if dtype == kept.dtype:
        check_float("decode_step", cache=kept)
    copies: list[Array] = []

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
        if not array.flags.c_contiguous:
            array = contiguous(array)
            copies.append(array)
        return address(array)

    rows = [
        _row(LAYER, {k: where(name) for k, name in names.items()} | {"window": config.window_of(n)})
        for n, names in enumerate(_names(config))
    ]
    fields = {f"final_norm_{part}": where(f"final_norm.{part}") for part in ("gain", "bias")}
    made = _Weights(
        key=(config, kept.dtype),
        arrays={name: ref(array) for name, array in params.items()},
        matrices={name: ref(matrices[name]) for name, array in params.items() if array.ndim == 2},
        copies=copies,
        dtype=dtype,
        model=_model(config, dtype),
        layers=np.array(rows, LAYER),
        fields=fields | {"head": where(head), "head_bias": where("head.bias")},
        like=weight_type.type(0),
        few=decoder_layout(config).size * weight_type.itemsize <= FEW_A_LAYER * config.n_layers,
    )
    if not copies:  # they would not follow what they are copies of
        _latest = made
    return made


def _are(arrays: Mapping[str, Array], known: Mapping[str, Callable[[], Any]]) -> bool:
    """Return whether the arrays under the names known are those, and are still there."""
    for name, reference in known.items():
        array = reference()
        if array is None or arrays.get(name) is not array:
            return False
    return True


def is_table(name: str) -> bool:
    """Whether a matrix is read as (V, D), row by row, and not as a layer's (in, out)."""
    return not name.startswith("layers.")


_decode_alone = alone(decode_token)


@functools.lru_cache(maxsize=8)
def _names(config: Config) -> list[dict[str, str]]:
    """Return, layer by layer, the parameter that each field of ``LAYER`` points to."""
    found: list[dict[str, str]] = [{} for _ in range(config.n_layers)]
    for name in decoder_layout(config).offsets:
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


def _check_cache(cache: KVCache) -> None:
    """Raise unless the cache can be read and written by address."""
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
    inner = 2 * config.d_ff if config.gated else config.d_ff
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
