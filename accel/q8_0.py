"""Q8_0, llama.cpp's format of eight bits a number: blocks of 32 with a scale of their own."""

from typing import Any

import numpy as np
import numpy.typing as npt

from accel.jit import jit

Array = npt.NDArray[Any]

BLOCK = 32  # numbers that share a scale
# The largest float32 below 1/2. Added before digits are cut off, it rounds halves away from zero:
# 1/2 itself would make 1 of the float32 below 1/2, and this sum of 1/2 rounds up to 1.
HALF = np.float32(0.5 - 2**-25)
LARGEST = 127 * 65_504  # that a block can hold
FORM: dict[str, Any] = {"nogil": True, "error_model": "numpy"}  # nothing fused, nothing reordered


def to_blocks(x: Array, out: Array | None = None) -> tuple[Array, Array]:
    """Return float16 scales d (…, n) and int8 q (…, n, 32): x ≈ d q, d = max|x| / 127.

    Source: ``quantize_row_q8_0_ref`` of ggml-quants.c; halves are rounded away from zero.

    Parameters
    ----------
    x : (…, n, 32) float32
    out : (n, 32) int8, optional
        Where q is written if x is (n, 32); the rows may lie apart.

    Raises
    ------
    ValueError
        When a number is not finite, or too large.
    """
    blocks = np.ascontiguousarray(x).reshape(-1, BLOCK)
    largest = np.empty(len(blocks), np.float32)
    q = np.empty(x.shape, np.int8) if out is None else out
    _largest(blocks.view(np.uint32), largest.view(np.uint32))
    if not (largest <= LARGEST).all():
        raise ValueError(f"holds {largest.max():.3g}, and Q8_0 goes to {LARGEST:,}")
    d = largest / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    inverse[np.isinf(inverse)] = 0  # of zeros, or numbers so small that d is 0 in float16
    _round(blocks, inverse, q.reshape(-1, BLOCK))
    return d.astype(np.float16).reshape(x.shape[:-1]), q


@jit(**FORM)
def _largest(x: Array, largest: Array) -> None:
    """Find the largest |x| of each row of (n, 32): without its sign, it has the largest bits."""
    for i in range(len(x)):
        most = np.uint32(0)
        for j in range(BLOCK):
            each = np.uint32(x[i, j] & np.uint32(0x7FFF_FFFF))
            most = each if each > most else most
        largest[i] = most


@jit(**FORM)
def _round(x: Array, inverse: Array, q: Array) -> None:
    """Write x (n, 32) times its row's number, rounded."""
    for i in range(len(x)):
        factor = inverse[i]
        for j in range(BLOCK):
            scaled = x[i, j] * factor
            q[i, j] = np.int32(scaled + (HALF if scaled >= 0 else -HALF))


@jit(**FORM)
def from_blocks(d: Array, q: Array, x: Array) -> None:
    """Write d q to x (n, 32): d (n,) float32, q (n, 32) int8."""
    for i in range(len(q)):
        scale = d[i]
        for j in range(BLOCK):
            x[i, j] = scale * np.float32(q[i, j])
