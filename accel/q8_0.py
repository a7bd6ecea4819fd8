"""Q8_0, llama.cpp's format of eight bits a number: blocks of 32 with a scale of their own."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 32  # numbers that share a scale


def to_blocks(x: Array) -> tuple[Array, Array]:
    """Return float16 scales d (…, n) and int8 q (…, n, 32): x ≈ d q, d = max|x| / 127.

    Source: ``quantize_row_q8_0_ref`` of ggml-quants.c; halves are rounded away from zero.

    Parameters
    ----------
    x : (…, n, 32) float32

    Raises
    ------
    ValueError
        When a number is not finite, or too large.
    """
    largest = np.abs(x).max(axis=-1)
    if not (largest <= 127 * 65_504).all():
        raise ValueError(f"holds {largest.max():.3g}, and Q8_0 goes to {127 * 65_504:,}")
    d = largest / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))[..., None]
    scaled = np.abs(x * inverse)
    below = np.floor(scaled)
    q = np.copysign(below + np.floor(2 * (scaled - below)), x)
    return d.astype(np.float16), q.astype(np.int8)
