"""Tensors of numbers in files of others: written part by part, and read a few rows at a time."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.ahead import in_order, some_ahead
from accel.threads import threads
from dist.convert.mapping import Tensor
from dist.numbers import KINDS, converted, size_of, turned
from dist.places import Steady
from dist.weights import BAND, STRETCH, Part, Weights, parts, strips
from reference.types import Array

ROOM = 1 << 27  # bytes that all threads together hold of rows, where one does not hold more


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
        kind = kind_of(those[0][0])  # they have the same rows, so the same kind
        ours = turned(kind) if those[0][0].transposed else kind
        ends = [*itertools.accumulate((n for *_, n in those), initial=0)]
        found = [
            room.view(np.uint8)[low:high].view(KINDS[kind].element).reshape(rows, -1)
            for (low, high), (_, rows, _) in zip(itertools.pairwise(ends), those, strict=True)
        ]

        def put(some: Part) -> None:
            for first, kept in weights.rows(some):
                try:
                    elements = converted(kept, weights.kind(part.name), ours)
                except ValueError:
                    numbers = converted(kept, weights.kind(part.name), "F32")
                    raise _blamed([t for t, *_ in those], numbers, ours) from None
                row = KINDS[ours].row(some.low - part.low + first)
                for (tensor, *_), out in zip(those, found, strict=True):
                    tensor.take(row, elements, out)

        each = 12 * max(STRETCH, BAND * math.prod(part.shape[1:]))  # bytes that a thread holds
        for _ in in_order(put, strips(part), max(1, min(threads(), ROOM // each))):
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


def _blamed(tensors: list[Tensor], rows: Array, kind: str) -> ValueError:
    """Return what is said of the tensor, side by side with others, that its kind cannot hold."""
    for tensor in tensors:
        try:
            KINDS[kind].encode(np.ascontiguousarray(rows[..., tensor.columns]))
        except ValueError as error:
            return ValueError(f"{tensor.name} {error}")
    raise AssertionError("what tensors hold side by side, each of them holds")


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes

    def raw(self, low: int, high: int) -> Array:
        """Return the elements of rows low .. high - 1 of the first axis, one behind the other.

        Raises
        ------
        ValueError, OSError
            When the file has become shorter.
        """
        width = math.prod(self.shape[1:])
        start, stop = (size_of(row * width, self.kind) for row in (low, high))
        raw = np.empty(stop - start, np.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset + start)
            if file.readinto(raw.data) != raw.size:
                raise ValueError(f"{self.path} was cut short while it was being read")
        return raw.view(KINDS[self.kind].element)

    def rows(self, low: int, high: int) -> Array:
        """Return their numbers, float32, in their shape."""
        numbers = KINDS[self.kind].decode(self.raw(low, high))
        return numbers.reshape(high - low, *self.shape[1:])
