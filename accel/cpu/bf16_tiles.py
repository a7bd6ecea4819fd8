"""Blocks of bfloat16 products as Numba intrinsics, on AMX tiles or AVX-512, and their operands.

``block`` adds up a 32 × 32 block of C, in one of two ways for users and a third for tests:

- AMX-BF16 (Intel from Sapphire Rapids on) has eight tile registers of 16 rows of 64 bytes.
  ``TDPBF16PS`` takes a tile of A (16 × 32 bfloat16), a tile of B (32 × 16, stored as 16 rows of
  pairs: row r holds rows 2r and 2r + 1 interleaved) and adds the product to a tile of 16 × 16
  float32: 16,384 floating-point operations in 16 cycles. The block is four tiles, so that each step
  of 32 along k loads 4 KiB for 65,536 operations.
- AVX512-BF16 (AMD from Zen 4 on) has ``VDPBF16PS``, which takes 16 pairs of A and 16 of B and adds
  their products to 16 float32: on Zen 5 two such instructions a cycle, twice what float32 does. The
  block is four bands of 8 rows, each of 16 vectors in registers; a row of a tile of B is a vector
  as it lies there, and a pair of A is read into all lanes.

- ``MYLLM_BF16=portable`` widens the pairs to float32 by shifts and multiplies these, on any
  processor and slowly, so that the whole mode can be tested where neither is.

All multiply exactly, add in float32 and round to nearest; the first two take denormal numbers for
zero. They add in another order, so that their results are close and not equal.

Operands are packed so that all a block reads is one run of memory::

    A (M, K) -> panels of 32 rows:     [M/32][K/32][2 halves][16 rows][16 pairs along k]
    B (K, N) -> panels of 32 columns:  [N/32][K/32][2 halves][16 pairs along k][16 columns]

as uint32, a pair to an element, padded with zeros to multiples of 32. Rounding to bfloat16 happens
while packing, which takes denormal numbers for zero. A matrix can enter as A or as B, as it is or
transposed; since a packed tile of B is the transpose of a packed tile of A, two ways to convert and
one transpose of 16 × 16 elements make all four.

Measured with AMX, on one core: 2.5 TFLOP/s from the first-level cache, 1.9 from the second, a
quarter of that when tiles cross cache lines, so packed memory starts at multiples of 64 bytes.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from accel.cpu.bf16_portable import (
    FLOATS,
    INT32,
    INT64,
    PAIRS,
    SIDE,
    STEP,
    TILE,
    constant,
    emit_portable,
    load_floats,
    offset,
    portable,
    round_portably,
)
from accel.cpu.simd import Builder, Context, Value, at, declare, splat, target
from accel.jit import jit

_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_SYS_ARCH_PRCTL = 158


def _features() -> set[str]:
    """Return what the processor that Numba compiles for has, as "+name"."""
    return set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def has_tiles() -> bool:
    """Whether ``block`` is compiled for AMX; else for AVX512-BF16, unless it is ``portable``."""
    return not portable() and {"+amx-tile", "+amx-bf16"} <= _features()


@functools.cache
def enable() -> None:
    """See that the processor can, and ask Linux for the tile registers, which are given once.

    Raises
    ------
    ImportError
        When the processor has no AVX512-BF16, or AMX-BF16 that the system does not hand out.
    """
    if not portable() and "+avx512bf16" not in _features():
        raise ImportError(
            "the backend 'cpu' computes in bf16 on processors with AMX-BF16 (Intel Xeon from "
            "Sapphire Rapids on) or AVX512-BF16 (AMD from Zen 4 on), and this one "
            f"({target().split('-')[0]}) has neither; use compute='float32'"
        )
    if has_tiles() and (not sys.platform.startswith("linux") or _request_tiles() != 0):
        raise ImportError(
            "the processor has AMX-BF16, but the operating system does not let processes use it "
            "(Linux does from 5.16 on); use compute='float32'"
        )


def _request_tiles() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    status: int = libc.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL),
        ctypes.c_long(_ARCH_REQ_XCOMP_PERM),
        ctypes.c_long(_XFEATURE_XTILEDATA),
    )
    return status


# --- instructions --------------------------------------------------------------------------------

_INT8 = ir.IntType(8)
_BYTES = ir.PointerType(_INT8)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite's types lack."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_BFLOATS = ir.VectorType(_BFloat(), 32)


# The configuration of the tile registers: palette 1, each of 16 rows of 64 bytes.
_CONFIGURATION = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)


@intrinsic
def configure(typingctx: Context) -> Any:
    """Set up the tile registers of this thread, if any: once a task, before ``block``."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        if not has_tiles():
            return context.get_dummy_value()
        array = cgutils.create_constant_array(_INT8, list(_CONFIGURATION))
        memory = cgutils.alloca_once_value(builder, array)
        configure_tiles = declare(builder, "llvm.x86.ldtilecfg", [_BYTES])
        builder.call(configure_tiles, [builder.bitcast(memory, _BYTES)])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def release(typingctx: Context) -> Any:
    """Give the tile registers back: the processor need not save them, and may clock up."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        if has_tiles():
            builder.call(declare(builder, "llvm.x86.tilerelease", []), [])
        return context.get_dummy_value()

    return types.none(), codegen


def emit_tiles(
    builder: Builder, a: Value, b: Value, c: Value, c_row: Value, steps: Value, add: Value
) -> None:
    """Emit the block on AMX tiles."""
    zero = declare(builder, "llvm.x86.tilezero", [_INT8])
    load = declare(builder, "llvm.x86.tileloadd64", [_INT8, _BYTES, INT64])
    store = declare(builder, "llvm.x86.tilestored64", [_INT8, _BYTES, INT64])
    multiply = declare(builder, "llvm.x86.tdpbf16ps", [_INT8, _INT8, _INT8])

    def tile(n: int) -> Value:
        return ir.Constant(_INT8, n)

    def bytes_at(p: Value, offset: Value) -> Value:
        return builder.bitcast(builder.gep(p, [offset]), _BYTES)

    low = builder.mul(c_row, constant(16))
    corners = [
        constant(0),
        constant(16),
        low,
        builder.add(low, constant(16)),
    ]
    row_bytes, tile_row = builder.mul(c_row, constant(4)), constant(64)
    with builder.if_else(add) as (then, otherwise):
        with then:
            for i, corner in enumerate(corners):
                builder.call(load, [tile(i), bytes_at(c, corner), row_bytes])
        with otherwise:
            for i in range(4):
                builder.call(zero, [tile(i)])
    # Tiles 0-3 hold C; 4, 5 the halves of A; 6, 7 those of B.
    with cgutils.for_range(builder, steps) as loop:
        first = builder.mul(loop.index, constant(STEP))
        second = builder.add(first, constant(TILE))
        builder.call(load, [tile(6), bytes_at(b, first), tile_row])
        builder.call(load, [tile(4), bytes_at(a, first), tile_row])
        builder.call(multiply, [tile(0), tile(4), tile(6)])
        builder.call(load, [tile(7), bytes_at(b, second), tile_row])
        builder.call(multiply, [tile(1), tile(4), tile(7)])
        builder.call(load, [tile(5), bytes_at(a, second), tile_row])
        builder.call(multiply, [tile(2), tile(5), tile(6)])
        builder.call(multiply, [tile(3), tile(5), tile(7)])
    for i, corner in enumerate(corners):
        builder.call(store, [tile(i), bytes_at(c, corner), row_bytes])


BAND = 8  # rows whose sums fill 16 of the 32 vector registers


def emit_vectors(
    builder: Builder, a: Value, b: Value, c: Value, c_row: Value, steps: Value, add: Value
) -> None:
    """Emit the block on AVX512-BF16, band by band."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    multiply = declare(builder, name, [FLOATS, _BFLOATS, _BFLOATS], FLOATS)
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(2)] for _ in range(BAND)]

    def pair(p: Value) -> Value:
        """Return the pair at p in all lanes."""
        return builder.bitcast(splat(builder, builder.load(p, align=4), 16), _BFLOATS)

    with cgutils.for_range(builder, constant(SIDE // BAND)) as band:
        a_band = builder.gep(a, [builder.mul(band.index, constant(16 * BAND))])
        c_band = builder.gep(c, [builder.mul(band.index, builder.mul(c_row, constant(BAND)))])
        c_rows = [c_band]
        for _ in range(1, BAND):
            c_rows.append(builder.gep(c_rows[-1], [c_row]))
        for row, p in zip(sums, c_rows, strict=True):
            for half, total in enumerate(row):
                with builder.if_else(add) as (then, otherwise):
                    with then:
                        builder.store(load_floats(builder, offset(builder, p, 16 * half)), total)
                    with otherwise:
                        builder.store(ir.Constant(FLOATS, [0.0] * 16), total)
        with cgutils.for_range(builder, steps) as loop:
            first = builder.mul(loop.index, constant(STEP))
            a_step, b_step = builder.gep(a_band, [first]), builder.gep(b, [first])
            for k in range(16):
                halves = [offset(builder, b_step, TILE * half, 16 * k) for half in range(2)]
                columns = [
                    builder.load(builder.bitcast(p, ir.PointerType(_BFLOATS)), align=4)
                    for p in halves
                ]
                for i, row in enumerate(sums):
                    left = pair(offset(builder, a_step, 16 * i, k))
                    for right, total in zip(columns, row, strict=True):
                        made = builder.call(multiply, [builder.load(total), left, right])
                        builder.store(made, total)
        for row, p in zip(sums, c_rows, strict=True):
            for half, total in enumerate(row):
                target = builder.bitcast(offset(builder, p, 16 * half), ir.PointerType(FLOATS))
                builder.store(builder.load(total), target, align=4)


def block_by(emit: Callable[..., None] | None = None) -> Any:
    """Make the intrinsic ``block`` of one of the ways, or of the one that is compiled for here."""

    @intrinsic
    def block(typingctx: Context, a: Any, b: Any, c: Any, c_row: Any, steps: Any, add: Any) -> Any:
        """C (+)= A B for a block of 32 × 32.

        Parameters
        ----------
        a, b : pointer to uint32
            A panel's first step: ``steps`` steps of 512 elements.
        c : pointer to float32
            The block's first element.
        c_row : int
            Elements from row to row of C.
        steps : int
            K / 32.
        add : bool
            Start from C, else from zero.
        """

        def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
            compiled_for = emit_tiles if has_tiles() else emit_vectors
            (emit or (emit_portable if portable() else compiled_for))(builder, *args)
            return context.get_dummy_value()

        if not all(isinstance(p, types.CPointer) for p in (a, b, c)):
            return None
        return types.none(a, b, c, types.int64, types.int64, types.boolean), codegen

    return block


_block = block_by()


@jit(apart=True)
def block(a: Any, b: Any, c: Any, c_row: int, steps: int, add: bool) -> None:
    """Call the intrinsic, whose thousand instructions are too many to be where a product is."""
    _block(a, b, c, c_row, steps, add)


# --- packing -------------------------------------------------------------------------------------


def round_pair(builder: Builder, low: Value, high: Value) -> Value:
    """Return 32 bfloat16, those of ``low`` first; round to nearest even."""
    if portable():
        return round_portably(builder, low, high)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.call(declare(builder, name, [FLOATS] * 2, _BFLOATS), [high, low])


def pairs_of(builder: Builder, even: Value, odd: Value) -> Value:
    """Return 16 pairs (even[i], odd[i]) of bfloat16."""
    rounded = round_pair(builder, even, odd)
    order = [i for pair in zip(range(16), range(16, 32), strict=True) for i in pair]
    mask = ir.Constant(ir.VectorType(INT32, 32), order)
    return builder.bitcast(
        builder.shuffle_vector(rounded, ir.Constant(rounded.type, ir.Undefined), mask), PAIRS
    )


def _transpose(builder: Builder, rows: list[Value]) -> list[Value]:
    """Transpose 16 × 16 elements in four rounds of exchanging halves of blocks."""
    distance = 8
    while distance:
        low = [(i & ~distance) + (16 if i & distance else 0) for i in range(16)]
        high = [(i | distance) + (16 if i & distance else 0) for i in range(16)]
        for i in range(16):
            if not i & distance:
                x, y = rows[i], rows[i | distance]
                for j, order in ((i, low), (i | distance, high)):
                    mask = ir.Constant(ir.VectorType(INT32, 16), order)
                    rows[j] = builder.shuffle_vector(x, y, mask)
        distance //= 2
    return rows


def _rounded_line(builder: Builder, source: Value, element: Any) -> Value:
    """Return 32 elements of a row as 16 pairs; as uint16 they are rounded already."""
    if element == types.uint16:
        return builder.load(builder.bitcast(source, ir.PointerType(PAIRS)), align=2)
    low, high = (load_floats(builder, offset(builder, source, n)) for n in (0, 16))
    return builder.bitcast(round_pair(builder, low, high), PAIRS)


@intrinsic
def _pack_line(typingctx: Context, source: Any, target: Any) -> Any:
    """Pack 32 elements of a row of A: one row of a tile, and a cache line."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        p = builder.bitcast(args[1], ir.PointerType(PAIRS))
        line = _rounded_line(builder, args[0], signature.args[0].dtype)
        builder.store(line, p, align=4)
        return context.get_dummy_value()

    return types.none(source, target), codegen


def _packer(interleave: bool, transpose: bool) -> Any:
    """Make the intrinsic that packs one tile from float32.

    ``interleave`` reads 32 rows of 16 elements and pairs the rows; otherwise 16 rows of 32 elements
    are read and the columns paired. ``transpose`` then exchanges rows and columns of the pairs.
    """

    @intrinsic
    def pack(typingctx: Context, source: Any, row: Any, target: Any) -> Any:
        def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
            source, row, target = args
            rows = []
            for _ in range(16):
                if interleave:
                    even = load_floats(builder, source)
                    source = builder.gep(source, [row])
                    odd = load_floats(builder, source)
                    rows.append(pairs_of(builder, even, odd))
                else:
                    rows.append(_rounded_line(builder, source, signature.args[0].dtype))
                source = builder.gep(source, [row])
            if transpose:
                rows = _transpose(builder, rows)
            for i, value in enumerate(rows):
                p = builder.bitcast(builder.gep(target, [constant(16 * i)]), ir.PointerType(PAIRS))
                builder.store(value, p, align=4)
            return context.get_dummy_value()

        return types.none(source, types.int64, target), codegen

    return pack


_pack_b = _packer(True, False)  # 16 columns of B
_pack_a_transposed = _packer(True, True)  # 16 rows of A, given as columns
_pack_b_transposed = _packer(False, True)  # 16 columns of B, given as rows


@intrinsic
def transpose_16(typingctx: Context, source: Any, row: Any, target: Any, target_row: Any) -> Any:
    """Copy 16 × 16 float32 so that rows become columns."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        source, row, target, target_row = args
        rows = []
        for _ in range(16):
            rows.append(load_floats(builder, source))
            source = builder.gep(source, [row])
        for value in _transpose(builder, rows):
            builder.store(value, builder.bitcast(target, ir.PointerType(FLOATS)), align=4)
            target = builder.gep(target, [target_row])
        return context.get_dummy_value()

    return types.none(source, types.int64, target, types.int64), codegen


@jit
def _padded_copy(
    source: Any, step: int, rows: int, columns: int, target: Any, height: int, width: int
) -> None:
    """Copy rows × columns into a tile-sized corner of zeros."""
    for r in range(height):
        for c in range(width):
            target[r * width + c] = 0
    for r in range(rows):
        for c in range(columns):
            target[r * width + c] = source[r * step + c]


@jit(apart=True)
def pack_rows(
    source: Any, step: int, rows: int, columns: int, target: Any, panel: int, spare: Any
) -> None:
    """Pack 32 rows, or fewer, along their columns: as A, or as the transpose of B.

    Parameters
    ----------
    source : pointer to float32, or to bfloat16 as uint16
        Element (0, 0); rows are ``step`` elements apart.
    rows, columns : int
        What there is; up to 32 rows.
    target : pointer to uint32
        The panel as A; ``columns / 32`` steps, rounded up.
    panel : int
        0 for A, 1 for B.
    spare : pointer to the same
        Room for 512 elements; for A, 32.
    """
    if panel == 0:
        for r in range(SIDE):  # whole rows at a time, so that the processor sees them coming
            for k in range(0, columns, 32):
                x, width = at(source, r * step + k), min(32, columns - k) if r < rows else 0
                if width < 32:
                    _padded_copy(x, step, 1, width, spare, 1, 32)
                    x = spare
                _pack_line(x, at(target, k // 32 * STEP + r * 16))
        return
    for k in range(0, columns, 32):
        width = min(32, columns - k)
        for half in range(2):
            height = min(16, rows - 16 * half)
            x, tile_step = at(source, 16 * half * step + k), step
            if height < 16 or width < 32:
                _padded_copy(x, step, max(height, 0), width, spare, 16, 32)
                x, tile_step = spare, 32
            _pack_b_transposed(x, tile_step, at(target, k // 32 * STEP + half * TILE))


@jit(apart=True)
def pack_columns(
    source: Any,
    step: int,
    rows: int,
    columns: int,
    target: Any,
    panel_elements: int,
    panel: int,
    spare: Any,
) -> None:
    """Pack up to 32 rows, one step along k, of all columns: as B, or as the transpose of A.

    Panel j, which has columns 32 j .. of the source, lies ``j · panel_elements`` after ``target``.
    The other parameters are those of ``pack_rows``, but ``panel`` is 0 for A, 1 for B.
    """
    for j in range(0, columns, 32):
        for half in range(2):
            width = min(16, columns - j - 16 * half)
            x, tile_step = at(source, j + 16 * half), step
            if width < 16 or rows < 32:
                _padded_copy(x, step, rows, max(width, 0), spare, 32, 16)
                x, tile_step = spare, 16
            y = at(target, j // 32 * panel_elements + half * TILE)
            if panel == 0:
                _pack_a_transposed(x, tile_step, y)
            else:
                _pack_b(x, tile_step, y)
