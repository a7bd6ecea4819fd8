"""Words as machine words: up to 15 bytes of text packed, with their number, into two uint64.

Most pieces of a text are short. A short piece is not hashed byte by byte and compared byte by byte:
its bytes, masked out of two loads, **are** the key. Longer pieces are found by hash and comparison.
All buffers end in ``PADDING`` zero bytes, so that a load may read past the last byte.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel.jit import jit
from tokenizer.arrays import Array, Int

PADDING = 16
MAX_PACKED = 15

# Masks of the low and the high word of a piece of n bytes, and n in the top byte of the high word.
LOW = np.array([(1 << 8 * min(n, 8)) - 1 for n in range(16)], np.uint64)
HIGH = np.array([(1 << 8 * max(n - 8, 0)) - 1 for n in range(16)], np.uint64)
LENGTH = np.array([n << 56 for n in range(16)], np.uint64)

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: consecutive keys land far apart
_MIX_HIGH = np.uint64(0xC2B2AE3D27D4EB4F)
_32 = np.uint64(32)
_29 = np.uint64(29)


@intrinsic  # type: ignore[untyped-decorator]
def load64(typingctx: Any, array: Any, index: Any) -> Any:
    """Read 8 bytes of a uint8 array at any index as one little-endian uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return types.uint64(array, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store64(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Write a uint64 into a uint8 array at any index, little-endian."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Count the zero bits below the lowest set bit of a uint64; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@jit(nogil=True, forceinline=True)
def slot_of(low: Int, high: Int, shift: Int) -> Int:
    """Return where in a table of 2^(64 - shift) slots the search for a packed piece begins."""
    return np.int64((low * _MIX + high * _MIX_HIGH) >> shift)


@jit(nogil=True, forceinline=True)
def hash_bytes(buf: Array, start: Int, stop: Int) -> Int:
    """Hash a piece of more than 15 bytes, 8 bytes at a time; never 0, which marks an empty slot."""
    h = np.uint64(stop - start) * _MIX
    i = start
    while i + 8 <= stop:
        h = (h ^ load64(buf, i)) * _MIX
        h ^= h >> _29
        i += 8
    if i < stop:
        h = (h ^ (load64(buf, i) & LOW[stop - i])) * _MIX
        h ^= h >> _32
    h *= _MIX_HIGH
    return h | np.uint64(1)


@jit(nogil=True, forceinline=True)
def same_bytes(a: Array, i: Int, b: Array, j: Int, n: Int) -> bool:
    """Tell whether ``a[i:i+n]`` and ``b[j:j+n]`` are equal, 8 bytes at a time."""
    k = 0
    while k + 8 <= n:
        if load64(a, i + k) != load64(b, j + k):
            return False
        k += 8
    return k == n or (load64(a, i + k) & LOW[n - k]) == (load64(b, j + k) & LOW[n - k])
