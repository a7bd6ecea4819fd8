"""The backend ``cpu`` in float32 (and float64, to check): the functions of ``reference.ops``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import (
    activations,
    attention,
    decode,
    elementwise,
    embedding,
    linear,
    loss,
    norms,
    optimizer,
    rope,
)
from reference import kv
from reference.boundary import offer
from reference.ops import HOST, NAMES, OPS
from reference.types import Array

SOURCES = [
    vars(module)
    for module in (
        *(activations, attention, decode, elementwise, embedding),
        *(linear, loss, norms, optimizer, rope, kv),
    )
]


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Return the array itself: memory is shared with NumPy, and activations keep their type."""
    del activation
    return np.asarray(array)


def to_numpy(array: Array) -> Array:
    """Return the array itself."""
    return array


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters themselves: float32 products read the master."""
    return dict(master)


globals().update(offer(OPS.values(), HOST, *SOURCES))
__all__ = [*NAMES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
