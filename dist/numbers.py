"""The kinds of numbers that weights are kept as, in our files and in those of others.

Numbers are kept as elements: one each, or a block of them with the scale that they share. Blocks
lie along the rows of a matrix, and in the kinds whose names end in T along its columns: so what is
kept of a matrix is the transpose of what is kept of its transpose, whatever the kind.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from accel.jit import jit
from accel.q8_0 import BLOCK, PAIRS, columns_from_blocks, columns_to_blocks, from_blocks, to_blocks
from reference.params import Layout
from reference.types import Array


class Kind(NamedTuple):
    """How numbers are kept.

    ``numbers`` of them side by side (in columns: below each other) are ``elements`` together. What
    is not finite has all bits of ``infinity`` in its element, of a block in the first.
    """

    element: str  # numpy's name of the type
    infinity: int
    encode: Callable[[Array], Array]  # float32 (..., n) -> elements
    decode: Callable[[Array], Array]  # and back
    numbers: int = 1
    elements: int = 1
    in_columns: bool = False

    def shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the elements of so many numbers.

        Raises
        ------
        ValueError
            When they are not whole blocks.
        """
        shape, axis = [*numbers], -2 if self.in_columns else -1
        if len(shape) < -axis or shape[axis] % self.numbers:
            raise ValueError(f"{tuple(shape)} is not made of whole blocks")
        shape[axis] = shape[axis] // self.numbers * self.elements
        return tuple(shape)

    def n_bytes(self, n: int) -> int:
        """Return the bytes that ``n`` numbers take."""
        return n // self.numbers * self.elements * np.dtype(self.element).itemsize

    @property
    def width(self) -> float:
        """The bytes that a number takes."""
        return self.n_bytes(self.numbers) / self.numbers

    def row(self, number: int) -> int:
        """Return the row of elements where a row of numbers is, or the block that it begins."""
        return number // self.numbers * self.elements if self.in_columns else number

    def finite(self, elements: Array) -> bool:
        """Tell whether all is finite that elements (n,) of rows stand for."""
        bits = elements.view(f"<u{elements.itemsize}")
        return bool(_most(bits, self.elements, self.infinity) < self.infinity)


@jit(nogil=True)
def _most(bits: Array, step: int, infinity: int) -> Any:
    most = np.int64(0)
    for i in range(0, len(bits), step):
        most = max(most, np.int64(bits[i]) & infinity)
    return most


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16, to the nearest and among two as near to the even; as uint16.

    Raises
    ------
    ValueError
        When a number is too large for it.
    """
    rounded = np.empty(x.shape, "<u2")
    most = _to_bf16(np.ascontiguousarray(x).reshape(-1).view(np.uint32), rounded.reshape(-1))
    if most >= 0x7F80 and np.isfinite(x).all():
        raise ValueError(
            f"holds {np.abs(x).max():.6g}, and bf16 goes to 3.38953e+38: choose float32"
        )
    return rounded


@jit(nogil=True)
def _to_bf16(bits: Array, rounded: Array) -> Any:
    most = np.int64(0)
    for i in range(len(bits)):
        b = bits[i]
        nan = (b & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)  # the sum might be infinite
        up = b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))
        rounded[i] = ((b | np.uint32(0x40_0000)) if nan else up) >> np.uint32(16)
        most = max(most, np.int64(rounded[i]) & 0x7FFF)
    return most


def from_bf16(elements: Array) -> Array:
    """Return the float32 numbers of bfloat16."""
    bits = np.empty(elements.shape, np.uint32)
    _from_bf16(np.ascontiguousarray(elements).reshape(-1), bits.reshape(-1))
    return bits.view(np.float32)


@jit(nogil=True)
def _from_bf16(elements: Array, bits: Array) -> None:
    for i in range(len(elements)):
        bits[i] = np.uint32(elements[i]) << np.uint32(16)


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
    return halves.view("<u2")


def to_q8_0(x: Array) -> Array:
    """Return blocks of 32 numbers (..., 32 n) as (..., 17 n): a float16 scale and pairs of int8."""
    blocks = np.empty((x.size // BLOCK, 1 + PAIRS), "<u2")
    d, q = _blocks(blocks)
    d[:] = to_blocks(x.reshape(-1, BLOCK), q)[0]
    return blocks.reshape(Q8_0.shape(x.shape))


def from_q8_0(elements: Array) -> Array:
    """Return the numbers that blocks stand for."""
    d, q = _blocks(elements.reshape(-1, 1 + PAIRS))
    x = np.empty(q.shape, np.float32)
    from_blocks(d.astype(np.float32), q, x)
    return x.reshape(*elements.shape[:-1], -1)


def _blocks(blocks: Array) -> tuple[Array, Array]:
    """Return where in blocks (n, 17) their scales (n,) and numbers (n, 32) lie."""
    return blocks[:, :1].view("<f2")[:, 0], blocks[:, 1:].view(np.int8)


Q8_0 = Kind("<u2", 0x7C00, to_q8_0, from_q8_0, BLOCK, 1 + PAIRS)
KINDS = {
    "F32": Kind(
        "<f4",
        0x7F80_0000,
        lambda x: x.astype("<f4", copy=False),
        lambda elements: elements.astype(np.float32, copy=False),
    ),
    "F16": Kind("<u2", 0x7C00, to_half, lambda elements: elements.view("<f2").astype(np.float32)),
    "BF16": Kind("<u2", 0x7F80, to_bf16, from_bf16),
    "Q8_0": Q8_0,
    "Q8_0T": Q8_0._replace(encode=columns_to_blocks, decode=columns_from_blocks, in_columns=True),
}


def turned(kind: str) -> str:
    """Return the kind of a matrix whose transpose is of this kind."""
    return f"{kind}T" if KINDS[kind].numbers > 1 else kind


def converted(elements: Array, kind: str, wanted: str) -> Array:
    """Return elements of another kind that stand for the same numbers, rounded if need be.

    Raises
    ------
    ValueError
        When one is a number that the kind cannot hold.
    """
    if kind == wanted:
        return elements
    return KINDS[wanted].encode(KINDS[kind].decode(elements))


def size_of(n: int, kind: str) -> int:
    """Return the bytes that ``n`` numbers take."""
    return KINDS[kind].n_bytes(n)


def places(layout: Layout, kinds: Mapping[str, str]) -> dict[str, int]:
    """Return where each parameter's bytes begin, one behind the other, and under "" where all end.

    Parameters
    ----------
    layout : Layout
    kinds : mapping of str
        Those of the parameters that are not float32.

    Raises
    ------
    ValueError
        When a parameter cannot be of its kind, or there is none of the name.
    """
    found, at = {}, 0
    for name, (_, spec) in layout.offsets.items():
        kind = kinds.get(name, "F32")
        if kind not in KINDS:
            raise ValueError(f"{name} is of no known kind")
        KINDS[kind].shape(spec.shape)
        found[name] = at
        at += size_of(spec.size, kind)
    if not kinds.keys() <= found.keys():
        raise ValueError("it names parameters that the model does not have")
    return {**found, "": at}
