"""The KV cache: keys and values of the tokens seen so far, so that each is computed once.

A cached decoder attends from the newest token to earlier ones; their keys and values do not change
(causality), so a token's are written once and read from then on. Rows of a batch may stand at
different positions.

A layer that sees a window of w tokens keeps no more than w of them, in a ring: the token at
position p lies in slot p mod S, where S = min(length, w) is the number of slots. So after the token
at position t, slot s holds the latest position that falls on it::

    p_s = t - ((t - s) mod S)            p_s < 0: nothing yet

and as softmax sums over keys in any order, attention may read the slots as they lie. ALiBi is the
exception: it takes a key's distance from where the key lies, so such a layer keeps all S = length
positions, where p_s = s.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from reference.checks import check_array, check_position, check_shape
from reference.config import Config
from reference.types import Array, KVCache

Positions = npt.NDArray[np.int32]


def slots(config: Config, layer: int, length: int) -> int:
    """Return S, the tokens that a layer keeps of ``length``."""
    window = config.window_of(layer)
    return min(length, window) if window and config.position != "alibi" else length


def held(last: Positions, n_slots: int) -> Positions:
    """Return the position (B, S) in each slot once a row has read up to ``last`` (B,)."""
    return last[:, None] - (last[:, None] - np.arange(n_slots)) % n_slots


def room(config: Config, cache: KVCache) -> int:
    """Return how many positions fit: a layer with just the slots of its window takes any number."""
    context = config.context_length
    kept = [k.shape[1] for k in cache.k]
    return min(
        context if S == slots(config, n, context) else min(S, context) for n, S in enumerate(kept)
    )


def empty_cache(
    config: Config, batch: int, length: int, zeros: Callable[[tuple[int, ...]], Array]
) -> KVCache:
    """Return a cache with room for ``length`` tokens of each of ``batch`` rows, made of ``zeros``.

    Its bytes are 2·B·Hkv·d·ΣS times the item size, the sum over layers.

    Raises
    ------
    ValueError
        When length exceeds the model's context.
    """
    if not 1 <= length <= config.context_length:
        raise ValueError(
            f"kv_cache: length must lie in 1..{config.context_length}, the model's context, "
            f"got {length}"
        )
    kept = [slots(config, layer, length) for layer in range(config.n_layers)]
    shapes = [(batch, S, config.n_kv_heads, config.d_head) for S in kept]
    return KVCache([zeros(shape) for shape in shapes], [zeros(shape) for shape in shapes])


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows."""
    dtype = params["embedding.weight"].dtype
    return empty_cache(config, batch, length, lambda shape: np.zeros(shape, dtype))


def check_write(cache: KVCache, k: Array, v: Array, layer: int, position: int | Array) -> Array:
    """Return the slot (B,) where each row's write begins, after checking that it fits the cache."""
    if not 0 <= layer < len(cache.k):
        raise ValueError(f"write_kv: layer must lie in 0..{len(cache.k) - 1}, got {layer}")
    batch, n_slots, *heads = cache.k[layer].shape
    check_position("write_kv", "position", position, batch)
    for name, array in (("k", k), ("v", v)):
        why = f"the layer's cache {cache.k[layer].shape}"
        check_shape("write_kv", name, array, (batch, k.shape[1], *heads), why)
        if array.dtype != cache.k[layer].dtype:
            raise ValueError(
                f"write_kv: {name} and the cache must share one dtype, {cache.k[layer].dtype}, "
                f"got {array.dtype}"
            )
    first = np.broadcast_to(np.asarray(position, np.int64), (batch,))  # int8 would wrap
    end = first + k.shape[1]
    if batch and k.shape[1] and (first.min() < 0 or end.max() > n_slots):
        raise ValueError(
            f"write_kv: positions {first.min()}..{end.max() - 1} lie outside the cache, which "
            f"has room for {n_slots} tokens"
        )
    return first


def writes(
    cache: KVCache, k: Array, v: Array, layer: int, position: int | Array
) -> Iterator[tuple[Array, Array]]:
    """Yield what a write copies, as (where to, what): rows that stand alike go together."""
    first = check_write(cache, k, v, layer, position)
    alike = len(first) > 0 and bool((first == first[0]).all())
    for rows in [slice(None)] if alike else [slice(b, b + 1) for b in range(len(first))]:
        at = slice(int(first[rows][0]), int(first[rows][0]) + k.shape[1])
        yield cache.k[layer][rows, at], k[rows]
        yield cache.v[layer][rows, at], v[rows]


def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array) -> None:
    """Write k and v (B, T, Hkv, d) of one layer into slots position, position + 1, … of each row.

    Raises
    ------
    ValueError
        When they do not have the cache's batch, heads and width, or reach beyond it.
    """
    for where, what in writes(cache, k, v, layer, position):
        where[...] = what


def check_decode(config: Config, token: Array, cache: KVCache, position: int | Array) -> Positions:
    """Return the position (B,) of each row's token, after checking that all of it fits.

    Raises
    ------
    ValueError
        When token and cache are not the config's, or a position lies outside the cache.
    """
    limit = check_cache(config, token, cache)
    return check_positions(position, len(token), limit)


def check_cache(config: Config, token: Array, cache: KVCache) -> int:
    """Return how many positions fit a cache, after checking that token and cache are the config's.

    Raises
    ------
    ValueError
        When they are not.
    """
    op, heads = "decode_step", (config.n_kv_heads, config.d_head)
    check_array(op, "token", token)
    if token.ndim != 1 or not len(token):
        raise ValueError(f"{op}: token must be (B,), one for each row, got {token.shape}")
    for name, arrays in (("k", cache.k), ("v", cache.v)):
        if len(arrays) != config.n_layers:
            raise ValueError(
                f"{op}: cache.{name} must have an array for each of {config.n_layers} layers, "
                f"got {len(arrays)}"
            )
        for layer, array in enumerate(arrays):
            keys = cache.k[layer]
            if keys.ndim != 4:
                raise ValueError(
                    f"{op}: the cache of a layer must be (B, S, Hkv, d), got {keys.shape}"
                )
            shape = (len(token), keys.shape[1], *heads)
            if array.shape == shape:
                continue
            check_shape(op, f"cache.{name}[{layer}]", array, shape, "token, config and cache.k")
    return room(config, cache)


def check_positions(position: int | Array, rows: int, limit: int) -> Positions:
    """Return the position (rows,) of each row's token.

    Raises
    ------
    ValueError
        When one does not lie in 0 .. limit - 1.
    """
    op = "decode_step"
    check_position(op, "position", position, rows)
    if np.min(position) < 0 or np.max(position) >= limit:
        raise ValueError(
            f"{op}: position must lie in 0..{limit - 1}, the cache's room, got {position}"
        )
    return np.broadcast_to(np.asarray(position), (rows,)).astype(np.int32)
