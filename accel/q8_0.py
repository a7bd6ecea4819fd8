"""Q8_0, llama.cpp's format of eight bits a number: blocks of 32 with a scale of their own."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 32  # numbers that share a scale
# The bits of the largest float32 below 1/2. Added before digits are cut off, it rounds halves away
# from zero: 1/2 itself would make 1 of the float32 below 1/2, and this sum of 1/2 rounds up to 1.
HALF = np.uint32(0x3EFF_FFFF)


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
    scaled = np.abs(x)
    largest = _largest(scaled.reshape(-1, BLOCK)).reshape(x.shape[:-1])
    if not (largest <= 127 * 65_504).all():
        raise ValueError(f"holds {largest.max():.3g}, and Q8_0 goes to {127 * 65_504:,}")
    d = largest / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    inverse[np.isinf(inverse)] = 0  # of zeros, or numbers so small that d is 0 in float16
    np.multiply(x, inverse[..., None], out=scaled)
    half = scaled.view(np.uint32) & np.uint32(0x8000_0000)  # of the same sign
    half |= HALF
    scaled += half.view(np.float32)
    return d.astype(np.float16), scaled.astype(np.int8)


def _largest(x: Array) -> Array:
    """Return the largest number of each row of (n, 32), in steps that are long in memory."""
    half = np.maximum(x[:, : BLOCK // 2], x[:, BLOCK // 2 :])
    return np.ascontiguousarray(half.T).max(axis=0)
