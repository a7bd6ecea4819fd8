"""The kinds of numbers that files of weights hold, and tensors of them in files."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.ahead import in_order
from accel.q8_0 import BLOCK, to_blocks
from dist.convert.mapping import Tensor
from reference.types import Array


class Kind(NamedTuple):
    """How numbers are stored: so many of them in so many bytes."""

    numbers: int
    n_bytes: int
    encode: Callable[[Array], Array]  # (n,) float32 -> uint8 or the like, any shape
    decode: Callable[[Array], Array]  # (bytes,) uint8 -> (n,) float32


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16, to the nearest and among two as near to the even; as uint16."""
    bits = x.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    nan = np.isnan(x)
    if nan.any():  # the sum might have made one infinite
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype("<u2")


def from_bf16(raw: Array) -> Array:
    """Return the float32 numbers of bfloat16."""
    bits = raw.view("<u2").astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def to_half(x: Array) -> Array:
    """Round float32 to float16.

    Raises
    ------
    ValueError
        When a number is too large for it.
    """
    with np.errstate(over="ignore"):
        halves = x.astype("<f2")
    if np.isinf(halves).any() and np.isfinite(x).all():
        raise ValueError(
            f"holds {np.abs(x).max():.3g}, and float16 goes to 65,504: choose bf16 or float32"
        )
    return halves


def to_q8_0(x: Array) -> Array:
    """Return blocks of 32 numbers as a float16 scale and 32 int8, as ``accel.q8_0`` has them."""
    d, q = to_blocks(x.reshape(-1, BLOCK))
    return np.concatenate([d[:, None].view(np.uint8), q.view(np.uint8)], axis=1)


def from_q8_0(raw: Array) -> Array:
    """Return the numbers that blocks stand for."""
    blocks = raw.reshape(-1, 2 + BLOCK)
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    x = blocks[:, 2:].view(np.int8).astype(np.float32)
    x *= d
    return x.reshape(-1)


KINDS = {
    "F32": Kind(1, 4, lambda x: x.astype("<f4", copy=False), lambda raw: raw.view("<f4")),
    "F16": Kind(1, 2, to_half, lambda raw: raw.view("<f2").astype(np.float32)),
    "BF16": Kind(1, 2, to_bf16, from_bf16),
    "Q8_0": Kind(BLOCK, 2 + BLOCK, to_q8_0, from_q8_0),
}


def size_of(n: int, kind: str) -> int:
    """Return the bytes that ``n`` numbers take."""
    return n // KINDS[kind].numbers * KINDS[kind].n_bytes


def write_tensor(
    file: io.RawIOBase | io.BufferedIOBase, tensor: Tensor, ours: Array, kind: str
) -> None:
    """Write a tensor of theirs, out of our parameter, a stretch at a time.

    Raises
    ------
    ValueError
        When it holds a number that the kind cannot.
    """

    def encoded(chunk: tuple[int, int]) -> Array:
        try:
            return np.ascontiguousarray(KINDS[kind].encode(tensor.take(ours, *chunk)))
        except ValueError as error:
            raise ValueError(f"{tensor.name} {error}") from None

    for values in in_order(encoded, tensor.chunks()):
        file.write(values.data)


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes

    def rows(self, low: int, high: int) -> Array:
        """Return low .. high - 1 of the first axis, float32.

        Raises
        ------
        ValueError, OSError
            When the file has become shorter.
        """
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        start, stop = (size_of(row * width, self.kind) for row in (low, high))
        raw = np.empty(stop - start, np.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset + start)
            if file.readinto(raw.data) != raw.size:
                raise ValueError(f"{self.path} was cut short while it was being read")
        return KINDS[self.kind].decode(raw).reshape(high - low, *self.shape[1:])
