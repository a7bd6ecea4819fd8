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


def columns_to_blocks(x: Array, d: Array, q: Array) -> None:
    """Write the same of the columns of a matrix, reading it by rows.

    Parameters
    ----------
    x : (32 n, m) float32
        Rows may lie apart, the numbers of one not.
    d : (m, n) float16
    q : (m, n, 32) int8
        Blocks may lie apart.

    Raises
    ------
    ValueError
        When a number is not finite, or too large.
    """
    line, row = _line(x)
    scales = np.empty(d.shape[::-1], np.float32)
    bits = _round_columns(line, line.view(np.uint32), row, scales, q.view("<u4"))
    if bits > LARGEST_BITS:
        largest = np.uint32(bits).view(np.float32)
        raise ValueError(f"holds {largest:.3g}, and Q8_0 goes to {LARGEST:,}")
    d[...] = scales.T


def columns_from_blocks(d: Array, q: Array, x: Array) -> None:
    """Write d q, of the same shapes, to the columns of x (32 n, m)."""
    _write_columns(d.T.astype(np.float32, order="C"), q.view("<u4"), *_line(x))


def _line(x: Array) -> tuple[Array, int]:
    """Return all that lies from a matrix's first number to its last, and from a row to the next."""
    row = x.strides[0] // x.itemsize
    n = (len(x) - 1) * row + x.shape[1]
    return np.lib.stride_tricks.as_strided(x, (n,), (x.itemsize,)), row


@jit(**FORM)
def _round_columns(x: Array, bits: Array, row: int, scales: Array, words: Array) -> Any:
    """Round 32 rows at a time, all columns of a row in vectors; return the largest |x|'s bits.

    What is transposed are words (m, n, 8) of four rounded numbers, the first in the lowest bits.
    """
    n, m = scales.shape
    most, four = np.empty(m, np.uint32), np.empty(m, np.uint32)
    factor = np.empty(m, np.float32)
    largest = np.uint32(0)
    for block in range(n):
        first = BLOCK * block * row
        most[:] = 0
        for at in range(first, first + BLOCK * row, row):
            each = bits[at : at + m]
            for c in range(m):
                most[c] = max(most[c], np.uint32(each[c] & np.uint32(0x7FFF_FFFF)))
        for c in range(m):
            largest = max(largest, most[c])
        if largest > LARGEST_BITS:
            break
        scale, found = scales[block], most.view(np.float32)
        for c in range(m):
            scale[c] = found[c] / np.float32(127)
            inverse = np.float32(1) / scale[c]
            factor[c] = inverse if inverse < np.inf else np.float32(0)
        for word in range(BLOCK // 4):
            at = first + 4 * word * row
            x0, x1, x2, x3 = x[at:], x[at + row :], x[at + 2 * row :], x[at + 3 * row :]
            for c in range(m):
                four[c] = (
                    _rounded(x0[c] * factor[c])
                    | _rounded(x1[c] * factor[c]) << np.uint32(8)
                    | _rounded(x2[c] * factor[c]) << np.uint32(16)
                    | _rounded(x3[c] * factor[c]) << np.uint32(24)
                )
            for c in range(m):
                words[c, block, word] = four[c]
    return largest


@jit(**FORM)
def _rounded(scaled: Any) -> Any:
    """Return the eight bits of a number, rounded."""
    return np.uint32(np.uint8(np.int32(scaled + (HALF if scaled >= 0 else -HALF))))


@jit(**FORM)
def _write_columns(scales: Array, words: Array, x: Array, row: int) -> None:
    n, m = scales.shape
    four = np.empty(m, np.uint32)
    for block in range(n):
        scale = scales[block]
        for word in range(BLOCK // 4):
            for c in range(m):
                four[c] = words[c, block, word]
            for j in range(4):
                to = x[(BLOCK * block + 4 * word + j) * row :]
                for c in range(m):
                    to[c] = scale[c] * np.float32(np.int8(four[c] >> np.uint32(8 * j)))


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
