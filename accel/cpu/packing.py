"""Operands of a product, copied into the order in which its inner loop reads them.

Memory is read in the order in which it lies, whole rows at a time, so that the processor sees it
coming; written to wherever it belongs, since nobody waits for a store. (Panel by panel, each row
gives four cache lines and then a jump: 1.6 ns an element instead of 0.2.)

A transposed operand goes through the vector registers: as many rows as a register has lanes are
loaded, and log₂ of that many rounds of perfect shuffles turn them into columns. One round takes
registers x_0 … x_(L-1) and puts the lanes of x_i and x_(i + L/2) alternately into x_2i and x_2i+1,
which rotates the bits of (register, lane) by one; after log₂ L rounds the two halves have changed
places.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from accel.cpu.memory import ALIGNMENT
from accel.cpu.simd import Value, at, emit_prefetch, lanes_of, vector_columns
from accel.jit import jit

_INT32 = ir.IntType(32)

ROOM = 1024  # elements


def emit_room(context: Any, builder: Any, element: Any) -> Value:
    """Return a pointer to ``ROOM`` elements on the stack of the kernel that is being made."""
    kind = context.get_value_type(element)
    made = cgutils.alloca_once(builder, ir.ArrayType(kind, ROOM))
    made.align = ALIGNMENT
    return builder.bitcast(made, ir.PointerType(kind))


@intrinsic
def room(typingctx: Any, like: Any) -> Any:
    """Return a pointer to ``ROOM`` elements of the type of ``like``, there until the kernel ends.

    (An array made in a kernel is freed behind the last use that Numba sees, which a use of its
    address is not.)
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Value:
        return emit_room(context, builder, signature.args[0])

    return types.CPointer(like)(like), codegen


@intrinsic
def _transpose(typingctx: Any, source: Any, step: Any, target: Any, width: Any) -> Any:
    """Write the transpose of L rows of L elements, ``step`` apart, as rows ``width`` apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Value:
        rows, row_step, columns, column_step = args
        lanes = lanes_of(context, signature.args[0])
        element = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(element, lanes)
        bytes_each = 8 if isinstance(element, ir.DoubleType) else 4

        def shuffle(a: Value, b: Value, first: int) -> Value:
            order = [n for i in range(first, first + lanes // 2) for n in (i, i + lanes)]
            mask = ir.Constant(ir.VectorType(_INT32, lanes), order)
            return builder.shuffle_vector(a, b, mask)

        x = []
        for _ in range(lanes):
            p = builder.bitcast(rows, ir.PointerType(vector))
            x.append(builder.load(p, align=bytes_each))
            rows = builder.gep(rows, [row_step])
        half = lanes // 2
        for _ in range(lanes.bit_length() - 1):
            x = [shuffle(x[i], x[i + half], first) for i in range(half) for first in (0, half)]
        for value in x:
            p = builder.bitcast(columns, ir.PointerType(vector))
            builder.store(value, p, align=bytes_each)
            columns = builder.gep(columns, [column_step])
        return context.get_dummy_value()

    return types.none(source, types.int64, target, types.int64), codegen


@intrinsic
def _prefetch(typingctx: Any, p: Any) -> Any:
    """Ask for a cache line.

    It comes to the second-level cache. The first can wait for few lines at a time (24 on Zen 4:
    AMD's Software Optimization Guide for family 19h), and a kernel bound by memory that asked for
    them there took up to half as long again.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Value:
        emit_prefetch(builder, args[0], 2, write=False)
        return context.get_dummy_value()

    return types.none(p), codegen


@jit(nogil=True)
def prefetch(p: Any, first: int, last: int, line: int) -> None:
    """Ask for elements first .. last - 1 past ``p``; a cache line holds ``line`` of them."""
    for i in range(first, last, line):
        _prefetch(at(p, i))


@jit(nogil=True)
def pack_rows(
    source: Any, step: int, target: Any, width: int, size: int, first: int, last: int, columns: int
) -> None:
    """Copy rows first .. last - 1 of ``columns`` elements into blocks of ``width`` columns.

    Row i, ``step`` elements after the one before, gives row i of each block; rows of a block are
    ``width`` apart, blocks ``size``.
    """
    for i in range(first, last):
        s = at(source, i * step)
        for block in range((columns + width - 1) // width):
            u, t = at(s, block * width), at(target, block * size + i * width)
            for j in range(min(width, columns - block * width)):
                t[j] = u[j]


@jit(nogil=True)
def pack_columns(source: Any, step: int, target: Any, width: int, rows: int, columns: int) -> None:
    """Copy the transpose of ``rows`` rows of ``columns`` elements, as columns of a block."""
    lanes = vector_columns(source)
    i = 0
    while i + lanes <= rows:
        j = 0
        while j + lanes <= columns:
            _transpose(at(source, i * step + j), step, at(target, j * width + i), width)
            j += lanes
        while j < columns:
            t = at(target, j * width + i)
            for n in range(lanes):
                t[n] = source[(i + n) * step + j]
            j += 1
        i += lanes
    while i < rows:
        s = at(source, i * step)
        for j in range(columns):
            target[j * width + i] = s[j]
        i += 1
