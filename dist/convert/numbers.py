"""The kinds of numbers that files of weights hold, and tensors of them in files."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.ahead import in_order
from accel.jit import jit
from accel.q8_0 import BLOCK, from_blocks, to_blocks
from dist.convert.mapping import Tensor
from dist.places import Steady
from dist.weights import Part, Weights, parts
from reference.types import Array


class Kind(NamedTuple):
    """How numbers are stored: so many of them in so many bytes."""

    numbers: int
    n_bytes: int
    encode: Callable[[Array], Array]  # (n,) float32 -> uint8 or the like, any shape
    decode: Callable[[Array], Array]  # (bytes,) uint8 -> (n,) float32


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16, to the nearest and among two as near to the even; as uint16."""
    rounded = np.empty(x.shape, "<u2")
    _to_bf16(np.ascontiguousarray(x).reshape(-1).view(np.uint32), rounded.reshape(-1))
    return rounded


@jit(nogil=True)
def _to_bf16(bits: Array, rounded: Array) -> None:
    for i in range(len(bits)):
        b = bits[i]
        nan = (b & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)  # the sum might be infinite
        up = b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))
        rounded[i] = ((b | np.uint32(0x40_0000)) if nan else up) >> np.uint32(16)


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
    x = x.reshape(-1, BLOCK)
    blocks = np.empty((len(x), 2 + BLOCK), np.uint8)
    d, _ = to_blocks(x, blocks[:, 2:].view(np.int8))
    blocks[:, :2] = d[:, None].view(np.uint8)
    return blocks


def from_q8_0(raw: Array) -> Array:
    """Return the numbers that blocks stand for."""
    blocks = raw.reshape(-1, 2 + BLOCK)
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    x = np.empty((len(blocks), BLOCK), np.float32)
    from_blocks(d.reshape(-1), blocks[:, 2:].view(np.int8), x)
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


def write_tensors(
    file: Steady,
    weights: Weights,
    tensors: Iterable[Tensor],
    kind_of: Callable[[Tensor], str],
) -> Iterator[Tensor]:
    """Write tensors of theirs, and yield each when it is written, for what comes behind it.

    Raises
    ------
    ValueError
        When one holds a number that its kind cannot.
    """
    wanted = [
        (tensor, [*parts(weights.layout, tensor.ours, whole=not tensor.by_rows)])
        for tensor in tensors
    ]
    found = weights.in_turn(part for _, those in wanted for part in those)
    for tensor, those in wanted:
        for part in those:
            for values in _encoded(tensor, part, next(found), KINDS[kind_of(tensor)]):
                file.write(values.data)
        yield tensor


def _encoded(tensor: Tensor, part: Part, ours: Array, kind: Kind) -> Iterator[Array]:
    """Yield what of a tensor of theirs lies in a part of ours, a stretch at a time."""

    def encoded(chunk: tuple[int, int]) -> Array:
        try:
            return np.ascontiguousarray(kind.encode(tensor.take(ours, part.low, *chunk)))
        except ValueError as error:
            raise ValueError(f"{tensor.name} {error}") from None

    return in_order(encoded, tensor.chunks(part.low, part.high))


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
