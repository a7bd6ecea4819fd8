"""Arrays in and out of the backend ``cpu``, which shares its memory with NumPy."""

from collections.abc import Mapping

import numpy as np

from reference.types import Array


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Return the array itself: activations keep their type."""
    del activation
    return np.asarray(array)


def to_numpy(array: Array) -> Array:
    """Return the array itself."""
    return array


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters themselves: float32 products read the master."""
    return dict(master)
