"""One token for each row of a batch, and the KV cache that it reads and extends.

Kernels: ``decode.cu``. The mathematics is ``reference/model.py``'s ``decode_step``. A token of one
row is some ten launches a layer, each shorter than Python takes to ask for it, so they are recorded
(``recorded.py``): ids and positions lie in the GPU's memory, and all that follows from them is
worked out there.

A token reads all weights, and of each row's cache the slots that are written.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from accel.cuda.arrays import copy, pack, strides
from accel.cuda.device import F32, NAMES, THREADS, Device, ceil_div, empty, launch
from accel.cuda.embedding import check, verdict
from accel.cuda.recorded import Inputs, Recorded, RecordedOps, Results, kept
from reference.checks import check_array, check_params
from reference.config import Config
from reference.kv import check_cache, check_positions
from reference.model import embed_at, head, layers_forward, start_pass
from reference.ops import Ops
from reference.params import decoder_layout
from reference.types import Array, KVCache

PART, MORE, TOGETHER = 128, 2, 8  # of decode.cu
MOST = 8  # query heads of a block


def decode_step(
    ops: Ops,
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return the logits (B, V) after one more token of each row, extending the cache.

    Parameters
    ----------
    ops : module
        This backend in float32 or in bf16, whose ops the layers are made of.
    """
    check_array("decode_step", "token", token)
    if token.dtype != np.int32:
        raise ValueError(f"decode_step: token must be integers (int32), got {token.dtype}")

    def make(device: Device) -> Step:
        check_params("decode_step", params, decoder_layout(config))
        return Step(device, config, token, check_cache(config, token, cache))

    what = "decode_step", ops, config, token.shape, *params
    step = kept(make, what, params.values(), cache.k, cache.v)
    return step(ops, params, token, cache, check_positions(position, len(token), step.limit))


class Step:
    """What computes tokens of one kind.

    Parameters
    ----------
    device : Device
    config : Config
    token : (B,) int32
        Like those that will be read.
    limit : int
        Positions that fit the cache.
    """

    def __init__(self, device: Device, config: Config, token: Array, limit: int) -> None:
        self._device, self._config, self.limit = device, config, limit
        self._inputs = Inputs(device, (token, token))  # tokens and positions
        self._recorded = Recorded(device)

    def __call__(
        self,
        ops: Ops,
        params: Mapping[str, Array],
        token: Array,
        cache: KVCache,
        positions: Array,
    ) -> Array:
        """Return the logits (B, V), as ``decode_step``."""
        self._inputs.take((token, None))
        self._device.write(self._inputs.arrays[1], positions)

        def read(results: Results) -> Array:
            """Return the logits in memory of their own, once it is known that all ids exist."""
            logits, checked = results
            verdict("decode_step", "token", token, checked, self._config.vocab_size)
            out = self._device.empty(logits.shape, logits.dtype)
            copy(out, logits)
            return out

        return self._recorded(partial(self._logits, ops, params, cache), read)

    def _logits(self, ops: Ops, params: Mapping[str, Array], cache: KVCache) -> Results:
        config, (token, positions) = self._config, self._inputs.arrays
        checked = check(token, None, config.vocab_size)

        def remember(layer: int, k: Array, v: Array) -> tuple[Array, Array, dict[str, Any]]:
            here = cache.k[layer], cache.v[layer]
            write_slots(k, v, *here, positions)
            return *here, {"window": config.window_of(layer)}

        mine = OpsOfAToken(ops, self._recorded, config.context_length)
        mine.positions = positions
        run = start_pass(mine, params, config, decoder_layout(config))
        where = positions.reshape(-1, 1) if config.position in ("learned", "sinusoidal") else None
        x, _ = embed_at(run, token.reshape(-1, 1), where)
        x, _ = layers_forward(run, x, start=positions, remember=remember, need_backward=False)
        x = x.reshape(-1, config.d_model)
        return ops.logits(x, head(run), params.get("head.bias")), checked


class OpsOfAToken(RecordedOps):
    """The backend's ops, of which attention is to a cache."""

    positions: Array  # (B,) int32 of the GPU's

    def attention_forward(
        self, q: Array, k: Array, v: Array, alibi: Array | None, *, window: int
    ) -> tuple[Array, None]:
        """Return attention to what the cache k, v (B, S, Hkv, d) holds."""
        return attend(q, k, v, self.positions, alibi, window), None


def write_slots(key: Array, value: Array, k: Array, v: Array, positions: Array) -> None:
    """Write key and value (B, 1, Hkv, d) into k and v (B, S, Hkv, d), at slots positions % S."""
    B, S, Hkv, d = k.shape
    given: dict[str, Any] = {"positions": positions, "S": S, "Hkv": Hkv, "d": d}
    for name, x, to in (("key", key, k), ("value", value, v)):
        if x.dtype != to.dtype:
            wanted, found = (NAMES.get(one.dtype, one.dtype) for one in (x, to))
            raise ValueError(f"decode_step: the cache must be {wanted} as its {name}s, got {found}")
        if d > 1 and strides(to)[3] != 1:
            raise ValueError(
                "decode_step: the cache must be contiguous along a head's width, as kv_cache "
                f"makes it, got strides {to.strides}"
            )
        b, _, h, _ = strides(x)
        given |= {name: x, f"{name}_b": b, f"{name}_h": h}
    grid = (ceil_div(Hkv * ceil_div(d, pack(k)), THREADS), B)
    launch("decode", "write_slots", grid, **given, **_cached(k, v))


def attend(
    q: Array, k: Array, v: Array, positions: Array, alibi: Array | None, window: int
) -> Array:
    """Return attention (B, 1, Hq, d) of q (B, 1, Hq, d) to the tokens that slots of a cache hold.

    Parameters
    ----------
    k, v : (B, S, Hkv, d)
        Row b has read up to positions[b], its own token included.
    alibi : (Hq,) float32, optional
    window : int
        How many of the last tokens are seen, its own included; 0: all.
    """
    B, S, Hkv, d = k.shape
    Hq, parts, n = q.shape[2], ceil_div(S, PART), pack(k)
    chunks = ceil_div(Hq // Hkv, MOST)
    heads = ceil_div(Hq // Hkv, chunks)
    lanes = min(32, 1 << (ceil_div(d, n) - 1).bit_length())
    padded = n * TOGETHER * ceil_div(d, n * TOGETHER)
    shared = 4 * heads * (padded + PART + PART * n)
    b, _, h, _ = strides(q)
    part, out = empty((B, Hq, parts, d + MORE), F32), empty((B, 1, Hq, d), q.dtype)
    sizes = {"S": S, "Hq": Hq, "Hkv": Hkv, "d": d, "window": window, "lanes": lanes}
    given = {"q": q, "q_b": b, "q_h": h, "alibi": alibi, "positions": positions, "part": part}
    how = {**given, **sizes, **_cached(k, v), "scale": 1 / d**0.5, "HEADS": heads}
    launch("decode", "attend_parts", (Hkv * chunks, B, parts), PART, shared, **how)
    threads, shared = min(THREADS, 32 * ceil_div(d, 32)), 4 * (32 + 4 * ceil_div(parts, 4))
    joined = {"part": part, "positions": positions, "out": out, "parts": parts, "d": d}
    launch("decode", "attend_join", (Hq, B), threads, shared, **joined)
    return out


def _cached(k: Array, v: Array) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, x in (("k", k), ("v", v)):
        b, t, h, _ = strides(x)
        given |= {name: x, f"{name}_b": b, f"{name}_t": t, f"{name}_h": h}
    return given
