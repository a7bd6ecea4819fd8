"""The kinds of numbers that files of weights hold, and tensors of them in files."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel.ahead import in_order, some_ahead
from accel.jit import jit
from accel.q8_0 import BLOCK, columns_from_blocks, columns_to_blocks, from_blocks, to_blocks
from accel.transpose import in_columns, in_rows, transpose
from dist.convert.mapping import Tensor
from dist.places import Steady
from dist.weights import Part, Weights, parts
from reference.types import Array

INFINITY = np.float32(np.inf).view(np.uint32)


class Kind(NamedTuple):
    """How numbers are stored: so many of them in so many bytes.

    A matrix of float32 may be another's transpose, as numpy's ``.T`` has it.
    """

    numbers: int
    n_bytes: int
    encode: Callable[[Array], Array]  # float32 of any shape -> what is stored, together
    # (bytes,) uint8, written to float32 of any shape -> whether all is finite
    decode: Callable[[Array, Array], bool]

    @property
    def width(self) -> float:
        """The bytes that a number takes."""
        return self.n_bytes / self.numbers


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16, to the nearest and among two as near to the even; as uint16."""
    rounded = np.empty(x.shape, "<u2")
    _to_bf16(in_rows(x).reshape(-1).view(np.uint32), rounded.reshape(-1))
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
    stored = raw.view("<u2")
    bits = np.empty(stored.shape, np.uint32)
    _from_bf16(stored, bits)
    return bits.view(np.float32)


@jit(nogil=True)
def _from_bf16(stored: Array, bits: Array) -> None:
    for i in range(len(stored)):
        bits[i] = np.uint32(stored[i]) << np.uint32(16)


def to_half(x: Array) -> Array:
    """Round float32 to float16.

    Raises
    ------
    ValueError
        When a number is too large for it.
    """
    with np.errstate(over="ignore"):
        halves = in_rows(x).astype("<f2")
    if np.isinf(halves).any() and np.isfinite(x).all():
        raise ValueError(
            f"holds {np.abs(x).max():.3g}, and float16 goes to 65,504: choose bf16 or float32"
        )
    return halves


def to_q8_0(x: Array) -> Array:
    """Return blocks of 32 numbers as a float16 scale and 32 int8, as ``accel.q8_0`` has them."""
    blocks, d, q = _blocks(np.empty(x.size // BLOCK * (2 + BLOCK), np.uint8))
    if in_columns(x):
        shape = len(x), -1
        columns_to_blocks(x.T, d.reshape(shape), q.reshape(*shape, BLOCK))
    else:
        d[:] = to_blocks(x.reshape(-1, BLOCK), q)[0]
    return blocks


def from_q8_0(raw: Array, out: Array) -> bool:
    """Write the numbers that blocks stand for, and tell whether all are finite."""
    _, d, q = _blocks(raw)
    if in_columns(out):
        shape = len(out), -1
        columns_from_blocks(d.reshape(shape), q.reshape(*shape, BLOCK), out.T)
    else:
        x = np.empty(q.shape, np.float32)
        from_blocks(d.astype(np.float32), q, x)
        out[...] = x.reshape(out.shape)
    return bool(np.isfinite(d).all())


def _blocks(raw: Array) -> tuple[Array, Array, Array]:
    """Return blocks (n, 34), and where their scales (n,) and numbers (n, 32) lie in them."""
    blocks = raw.reshape(-1, 2 + BLOCK)
    return blocks, blocks[:, :2].view("<f2")[:, 0], blocks[:, 2:].view(np.int8)


def _written(values: Array, out: Array) -> bool:
    """Write float32 numbers, and tell whether all are finite."""
    if in_columns(out):
        transpose(values.reshape(out.shape), out.T)
    else:
        out[...] = values.reshape(out.shape)
    return bool(_largest(values.view(np.uint32)) < INFINITY)


@jit(nogil=True)
def _largest(bits: Array) -> Any:
    """Return the bits of the largest |x|."""
    most = np.uint32(0)
    for i in range(len(bits)):
        most = max(most, np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)))
    return most


KINDS = {
    "F32": Kind(
        1,
        4,
        lambda x: in_rows(x).astype("<f4", copy=False),
        lambda raw, out: _written(raw.view("<f4"), out),
    ),
    "F16": Kind(
        1,
        2,
        to_half,
        lambda raw, out: _written(raw.view("<f2").astype(np.float32), out),
    ),
    "BF16": Kind(
        1,
        2,
        to_bf16,
        lambda raw, out: _written(from_bf16(raw), out),
    ),
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

    Parameters are read a few rows at a time, which are converted while they are in a cache, and
    put where they lie among those of theirs.

    Raises
    ------
    ValueError
        When one holds a number that its kind cannot.
    """

    def fill(at: tuple[Part, list[tuple[Tensor, int, int]]], room: Array) -> list[Array]:
        """Return what tensors side by side hold of a part, as it is stored."""
        part, those = at
        ends = [*itertools.accumulate((n for *_, n in those), initial=0)]
        found = [
            room.view(np.uint8)[low:high].reshape(rows, -1)
            for (low, high), (_, rows, _) in zip(itertools.pairwise(ends), those, strict=True)
        ]

        def put(some: tuple[int, Array]) -> None:
            for (tensor, *_), out in zip(those, found, strict=True):
                try:
                    tensor.take(*some, out, KINDS[kind_of(tensor)].encode)
                except ValueError as error:
                    raise ValueError(f"{tensor.name} {error}") from None

        for _ in in_order(put, weights.rows(part)):
            pass
        return found

    wanted = []
    for (ours, by_rows, _), same in itertools.groupby(
        tensors, lambda t: (t.ours, t.by_rows, t.by_rows and t.name)
    ):
        side_by_side = [*same]
        for part in parts(weights.layout, ours, whole=not by_rows):
            those = []
            for tensor in side_by_side:
                *rows, width = tensor.part(part.low, part.high)
                n = size_of(math.prod(rows) * width, kind_of(tensor))
                those.append((tensor, math.prod(rows), n))
            wanted.append(((part, those), -(-sum(n for *_, n in those) // 4)))
    for ((part, those), _), found in zip(wanted, some_ahead(fill, wanted), strict=True):
        for (tensor, *_), stored in zip(those, found, strict=True):
            file.write(stored.reshape(-1).data)
            if part.high == weights.layout.offsets[part.name][1].shape[0]:
                yield tensor


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes

    def raw(self, low: int, high: int) -> Array:
        """Return rows low .. high - 1 of the first axis, as they are stored: uint8.

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
        return raw

    def rows(self, low: int, high: int) -> Array:
        """Return the same in float32."""
        values = np.empty((high - low, *self.shape[1:]), np.float32)
        KINDS[self.kind].decode(self.raw(low, high), values)
        return values
