"""The backend ``cuda`` in strict float32: the functions of ``reference.ops`` on the device in use.

The functions look at the dtype of what they are given, so the same ones serve bf16 activations;
``ops_bf16.py`` differs only in where bf16 arrays come from.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.cuda import (
    arrays,
    attention,
    decode,
    device,
    elementwise,
    embedding,
    linear,
    loss,
    norm,
    optimizer,
    rope,
)
from accel.cuda.arrays import copy, upload
from accel.cuda.device import F32, NAMES, current, zeros
from accel.cuda.gradient import gradient as recorded_gradient
from accel.cuda.muon import muon as muon
from reference.boundary import Rules
from reference.config import Config
from reference.kv import empty_cache, writes
from reference.ops import backend
from reference.types import Array, KVCache

RULES = Rules(
    NAMES,
    "convert with from_numpy, which holds bf16 as uint16",
    masters=(F32,),
    mixed=True,
    host=False,
)


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Return a device array with a NumPy array's values."""
    del activation
    return upload(array, as_bf16=False)


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters themselves: float32 products read the master."""
    return dict(master)


def step() -> AbstractContextManager[None]:
    """Open a scope whose arrays share one block and die at its end; see ``arena.py``."""
    return current().arena.step()


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows."""
    del params
    return empty_cache(config, batch, length, partial(zeros, dtype=F32))


def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array) -> None:
    """Write k, v (B, T, Hkv, d) of one layer at position, position + 1, …; int or (B,)."""
    for where, what in writes(cache, k, v, layer, position):
        copy(where, what)


lookup = embedding.lookup
decode_step, gradient = (
    partial(function, sys.modules[__name__]) for function in (decode.decode_step, recorded_gradient)
)

# a copy: the public functions take the names of those here that they are made of
IMPLEMENTATIONS = (
    *(dict(globals()), vars(arrays), vars(attention), vars(device), vars(elementwise)),
    *(vars(embedding), vars(linear), vars(loss), vars(norm), vars(optimizer), vars(rope)),
)
globals().update(backend(__name__, RULES, *IMPLEMENTATIONS))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
