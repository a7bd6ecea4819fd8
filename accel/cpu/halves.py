"""bfloat16 numbers as arrays of uint16: each is the upper half of a float32.

So a half becomes a float32 by a shift, exactly, and a float32 a half by rounding to nearest even.
Weights for decoding, the KV cache of the mode bf16, and what its backward reads of attention and of
activations are kept so; what is packed for a product is
rounded on the way instead (``bf16_tiles.py``).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from accel.cpu.kernels import COMPILED, MAP, PIECE, address, contiguous, like
from accel.cpu.memory import empty
from accel.cpu.simd import at, pointer
from accel.jit import jit
from accel.threads import alone
from reference.types import Array

BF16 = np.dtype(np.uint16)
FLOAT32 = np.dtype(np.float32)
_NAN = 0x7FC0


def as_type(target: Any, x: Any) -> Any:
    """Return x in the type of ``target``, of which one may be uint16. Kernels only."""
    raise TypeError(COMPILED)


@overload(as_type)
def _as_type_overload(target: Any, x: Any) -> Callable[..., Any]:
    if target == x:

        def same(target: Any, x: Any) -> Any:
            return x

        return same

    if target == types.uint16:

        def narrow(target: Any, x: Any) -> Any:
            if x != x:
                return np.uint16(_NAN)
            bits = np.float32(x).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return narrow

    def widen(target: Any, x: Any) -> Any:
        bits = np.uint32(np.uint32(x) << np.uint32(16))
        return bits.view(np.float32)

    return widen


@jit(**MAP)
def _convert(source_like: Any, target_like: Any, source: int, target: int, n: int) -> None:
    x, y = pointer(source, source_like), pointer(target, target_like)
    for piece in prange((n + PIECE - 1) // PIECE):
        u, z = at(x, piece * PIECE), at(y, piece * PIECE)
        for i in range(min(PIECE, n - piece * PIECE)):
            z[i] = as_type(target_like, u[i])


_convert_alone = alone(_convert)


def _converted(x: Array, dtype: np.dtype[Any]) -> Array:
    x = contiguous(x)
    out = empty(x.shape, dtype)
    convert = _convert if x.size > PIECE else _convert_alone
    convert(like(x), like(out), address(x), address(out), x.size)
    return out


def to_bf16(x: Array) -> Array:
    """Return float32 numbers rounded to nearest even, as uint16; NaN stays."""
    return _converted(np.asarray(x, FLOAT32), BF16)


def wide(x: Array) -> np.dtype[Any]:
    """Return the dtype that is computed in with x: float32 for halves, else its own."""
    return FLOAT32 if x.dtype == BF16 else x.dtype


def to_float32(x: Array) -> Array:
    """Return the numbers whose upper halves x has, or x itself where it has none."""
    return _converted(x, FLOAT32) if x.dtype == BF16 else x
