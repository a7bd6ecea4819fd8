"""The transpose of a matrix in memory of its own."""

import numpy as np

from accel.jit import jit
from reference.types import Array

BAND = 16  # rows that are read together: of float32 they become whole cache lines


def transpose(source: Array, target: Array | None = None) -> Array:
    """Write the transpose of a matrix, a band of rows at a time.

    Parameters
    ----------
    source : (n, m)
    target : (m, n) of the same type, optional

    Raises
    ------
    ValueError
        When the target is of another shape.
    """
    if target is None:
        target = np.empty(source.shape[::-1], source.dtype)
    if target.shape != source.shape[::-1]:  # the kernel would write beside it
        raise ValueError(f"the transpose of {source.shape} is not of shape {target.shape}")
    _transpose(source, target)
    return target


@jit(nogil=True)
def _transpose(source: Array, target: Array) -> None:
    rows, columns = source.shape
    whole = rows // BAND * BAND
    for low in range(0, whole, BAND):
        band = source[low : low + BAND]
        for j in range(columns):
            line = target[j, low : low + BAND]
            for i in range(BAND):
                line[i] = band[i, j]
    for i in range(whole, rows):
        for j in range(columns):
            target[j, i] = source[i, j]
