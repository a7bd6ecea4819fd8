"""The backend ``cuda`` in bf16: storage and products in bfloat16, sums and parameters in float32.

Matrices and tables are read as bf16 copies that ``parameters`` makes once after each optimizer
step (``weights.py``); gains, shifts and biases are read from the float32 master. Gradients of
parameters are float32.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.cuda import decode, embedding, weights
from accel.cuda.arrays import to_dtype, upload
from accel.cuda.device import BF16, zeros
from accel.cuda.embedding import EmbeddingCache
from accel.cuda.gradient import gradient as recorded_gradient
from accel.cuda.ops import IMPLEMENTATIONS, RULES
from reference.config import Config
from reference.kv import empty_cache
from reference.ops import backend
from reference.types import Array, KVCache


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Return a device array with a NumPy array's values; floats become bf16 as ``activation``."""
    return upload(array, as_bf16=activation)


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows."""
    del params
    return empty_cache(config, batch, length, partial(zeros, dtype=BF16))


def embedding_forward(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """Return table[ids] in bf16, shape (..., D)."""
    return embedding.embedding_forward(ids, to_dtype(table, BF16))


def lookup(ids: Array, table: Array) -> Array:
    """Return table[ids] in bf16, of ids that nobody has looked at."""
    return embedding.lookup(ids, to_dtype(table, BF16))


decode_step, gradient = (
    partial(function, sys.modules[__name__]) for function in (decode.decode_step, recorded_gradient)
)

globals().update(backend(__name__, RULES, dict(globals()), vars(weights), *IMPLEMENTATIONS))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
