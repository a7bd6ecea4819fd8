"""Q8_0, llama.cpp's format of eight bits a number: blocks of 32 with a scale of their own."""

from typing import Any

import numpy as np

from accel.jit import jit
from reference.types import Array

BLOCK = 32  # numbers that share a scale
PAIRS = BLOCK // 2
STRIP = 512  # columns of 32 rows that are rounded at once: they stay in a cache
# The largest float32 below 1/2. Added before digits are cut off, it rounds halves away from zero:
# 1/2 itself would make 1 of the float32 below 1/2, and this sum of 1/2 rounds up to 1.
HALF = np.float32(0.5 - 2**-25)
LARGEST = 127 * 65_504  # that a block can hold
LARGEST_BITS = np.float32(LARGEST).view(np.uint32)
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


def columns_to_blocks(x: Array) -> Array:
    """Return the blocks of a matrix's columns, (17 n, m) uint16 of x (32 n, m) float32.

    Below each other lie a block's scale, the bits of a float16, and 16 pairs of its numbers, the
    first in the lower bits. So the transpose of what is returned has the bytes of llama.cpp's rows.

    Raises
    ------
    ValueError
        When a number is not finite, or too large.
    """
    x = np.ascontiguousarray(x)
    n, m = len(x) // BLOCK, x.shape[1]
    blocks, scales = np.empty((n, 1 + PAIRS, m), "<u2"), np.empty((n, m), np.float32)
    bits = _round_columns(x, x.view(np.uint32), scales, blocks)
    if bits > LARGEST_BITS:
        largest = np.uint32(bits).view(np.float32)
        raise ValueError(f"holds {largest:.3g}, and Q8_0 goes to {LARGEST:,}")
    blocks[:, 0] = scales.astype("<f2").view("<u2")
    return blocks.reshape(-1, m)


def columns_from_blocks(blocks: Array) -> Array:
    """Return the numbers that such blocks stand for: d q."""
    each = np.ascontiguousarray(blocks).reshape(-1, 1 + PAIRS, blocks.shape[1])
    x = np.empty((BLOCK * len(each), blocks.shape[1]), np.float32)
    _write_columns(each[:, 0].view("<f2").astype(np.float32), each, x)
    return x


@jit(**FORM)
def _round_columns(x: Array, bits: Array, scales: Array, blocks: Array) -> Any:
    """Round 32 rows at a time, some columns of each in vectors; return the largest |x|'s bits."""
    n, m = scales.shape
    most, factor = np.empty(STRIP, np.uint32), np.empty(STRIP, np.float32)
    found = most.view(np.float32)
    largest = np.uint32(0)
    for low in range(0, m, STRIP):
        high = min(m, low + STRIP)
        for b in range(n):
            most[:] = 0
            for i in range(BLOCK * b, BLOCK * (b + 1)):
                each = bits[i, low:high]
                for c in range(high - low):
                    most[c] = max(most[c], np.uint32(each[c] & np.uint32(0x7FFF_FFFF)))
            for c in range(high - low):
                largest = max(largest, most[c])
            if largest > LARGEST_BITS:
                return largest
            scale = scales[b, low:high]
            for c in range(high - low):
                scale[c] = found[c] / np.float32(127)
                inverse = np.float32(1) / scale[c]
                factor[c] = inverse if inverse < np.inf else np.float32(0)
            for pair in range(PAIRS):
                i = BLOCK * b + 2 * pair
                x0, x1, to = x[i, low:high], x[i + 1, low:high], blocks[b, 1 + pair, low:high]
                for c in range(high - low):
                    second = _rounded(x1[c] * factor[c]) << np.uint32(8)
                    to[c] = np.uint16(_rounded(x0[c] * factor[c]) | second)
    return largest


@jit(**FORM)
def _rounded(scaled: Any) -> Any:
    """Return the eight bits of a number, rounded."""
    return np.uint32(np.uint8(np.int32(scaled + (HALF if scaled >= 0 else -HALF))))


@jit(**FORM)
def _write_columns(scales: Array, blocks: Array, x: Array) -> None:
    n, m = scales.shape
    for b in range(n):
        scale = scales[b]
        for pair in range(PAIRS):
            each, i = blocks[b, 1 + pair], BLOCK * b + 2 * pair
            first, second = x[i], x[i + 1]
            for c in range(m):
                first[c] = scale[c] * np.float32(np.int8(each[c]))
                second[c] = scale[c] * np.float32(np.int8(each[c] >> np.uint16(8)))


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
