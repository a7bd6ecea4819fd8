"""The KV cache: keys and values of the tokens seen so far, so that each is computed once.

A cached decoder attends from the newest token to all earlier ones; their keys and values do not
change (causality), so a token's are written where it stands and read from then on. Rows of a batch
may stand at different positions.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from reference.checks import check_float, check_position, check_shape
from reference.config import Config
from reference.types import Array, KVCache


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows.

    Its bytes are 2·L·B·S·Hkv·d times the item size of the parameters.

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
    shape = (config.n_layers, batch, length, config.n_kv_heads, config.d_head)
    dtype = params["embedding.weight"].dtype
    return KVCache(np.zeros(shape, dtype), np.zeros(shape, dtype))


def check_write(
    cache: KVCache, k: Array, v: Array, layer: int, position: int | Array
) -> npt.NDArray[np.int64]:
    """Return the places (B, T) that a write goes to, once it is seen to fit the cache."""
    n_layers, batch, room, *heads = cache.k.shape
    if not 0 <= layer < n_layers:
        raise ValueError(f"write_kv: layer must lie in 0..{n_layers - 1}, got {layer}")
    check_position("write_kv", "position", position, batch)
    for name, array in (("k", k), ("v", v)):
        check_shape("write_kv", name, array, (batch, k.shape[1], *heads), f"cache {cache.k.shape}")
    start = np.asarray(position).astype(np.int64)
    columns = np.broadcast_to(start, (batch,))[:, None] + np.arange(k.shape[1])
    if columns.size and (columns.min() < 0 or columns.max() >= room):
        raise ValueError(
            f"write_kv: positions {columns.min()}..{columns.max()} lie outside the cache, which "
            f"has room for {room} tokens"
        )
    return columns


def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array) -> None:
    """Write k and v (B, T, Hkv, d) of one layer at position, position + 1, … of each row.

    Raises
    ------
    ValueError
        When they do not have the cache's batch, heads and width, or reach beyond it.
    """
    check_float("write_kv", k=k, v=v, cache=cache.k)
    columns = check_write(cache, k, v, layer, position)
    rows = np.arange(len(columns))[:, None]
    cache.k[layer, rows, columns] = k
    cache.v[layer, rows, columns] = v
