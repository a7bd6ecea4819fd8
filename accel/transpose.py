"""The transpose of a matrix in memory of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LINE = 64  # bytes of a cache line


def transpose(source: Array, target: Array | None = None) -> Array:
    """Write the transpose of a matrix: a band at a time, whose cache lines are used whole.

    Parameters
    ----------
    source : (n, m)
    target : (m, n) of the same type, optional
    """
    if target is None:
        target = np.empty(source.shape[::-1], source.dtype)
    band = LINE // source.itemsize
    for row in range(0, len(source), band):
        target[:, row : row + band] = source[row : row + band].T
    return target
