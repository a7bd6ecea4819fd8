r"""Cut 64 bytes of ASCII at once: one bit a byte, and the GPT-4 pattern as arithmetic on words.

Branches are what cutting costs: which alternative of the pattern takes a piece, and how long it is,
cannot be predicted, and a piece has only four bytes or so. Here nothing is decided byte by byte.
Vector comparisons give a word of 64 bits for each class of characters; where pieces begin follows
from shifts, masks and carries of those words (as simdjson finds the structure of JSON: Langdale and
Lemire, "Parsing gigabytes of JSON per second", 2019); and the loop takes bit after bit.

What has to be known of a byte to say whether a piece begins there:

- a run of letters begins a piece, unless the character before belongs to it: white space that is no
  newline always does; another sign does if it is alone, neither a sign nor a space before it;
- numbers begin a piece with the first digit of a run and after every ``max_digits``;
- a run of other signs begins a piece, unless a space before it does; newlines behind are its own;
- of the white space that is left, a piece ends behind the last newline of a run, and what follows
  that leaves its last character to a piece that begins there.

The first byte must begin a piece. Where the answer needs bytes that are not there, or a contraction
like ``'s`` comes first, no more beginnings are given, and ``tokenizer.kernels.split`` goes on.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel.jit import jit
from tokenizer.arrays import Array, Int
from tokenizer.kernels.words import trailing_zeros

SIZE = 64  # bytes of a block
_ONE, _TWO, _ALL = np.uint64(1), np.uint64(2), np.uint64(0xFFFFFFFFFFFFFFFF)
_SIZE = np.uint64(SIZE)


@intrinsic  # type: ignore[untyped-decorator]
def ascii_masks(typingctx: Any, array: Any, index: Any) -> Any:
    """Compare the 64 bytes of a uint8 array from ``index`` on; bit k of a mask is byte k's.

    Returns (11,) uint64: not ASCII; letter; digit; white space; newline; space; apostrophe; of the
    letters in either case, one of s, d, m, t; l; v or r; e.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        vector = ir.VectorType(ir.IntType(8), SIZE)
        place = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        byte = builder.load(place, align=1)

        def of(value: int) -> Any:
            return ir.Constant(vector, [value] * SIZE)

        def between(value: Any, low: str, high: str) -> Any:
            from_low = builder.sub(value, of(ord(low)))
            return builder.icmp_unsigned("<=", from_low, of(ord(high) - ord(low)))

        def one_of(value: Any, characters: str) -> Any:
            found = [builder.icmp_unsigned("==", value, of(ord(c))) for c in characters]
            out = found[0]
            for other in found[1:]:
                out = builder.or_(out, other)
            return out

        small = builder.or_(byte, of(0x20))
        found = [
            builder.icmp_unsigned(">=", byte, of(0x80)),
            between(small, "a", "z"),
            between(byte, "0", "9"),
            builder.or_(between(byte, "\t", "\r"), one_of(byte, " ")),
            *(one_of(byte, characters) for characters in ("\r\n", " ", "'")),
            *(one_of(small, characters) for characters in ("sdmt", "l", "vr", "e")),
        ]
        masks = [builder.bitcast(mask, ir.IntType(64)) for mask in found]
        return context.make_tuple(builder, signature.return_type, masks)

    return types.UniTuple(types.uint64, 11)(array, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def leading_zeros(typingctx: Any, value: Any) -> Any:
    """Count the zero bits above the highest set bit of a uint64; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@jit(nogil=True, forceinline=True)
def beginnings(buf: Array, i: Int, n: Int, max_digits: Int) -> Int:
    """Return where pieces begin in ``buf[i:min(i + 64, n)]`` behind ``i``, as bits.

    A piece of the GPT-4 pattern begins at ``i``, and 64 bytes can be read. Bit k is set if a piece
    begins at ``i + k``, for all k up to the last that is set.
    """
    not_ascii, letter, digit, white, newline, space, apostrophe, sdmt, ell, vr, e = ascii_masks(
        buf, i
    )
    size = min(trailing_zeros(not_ascii), n - i)
    here = _ALL >> (_SIZE - np.uint64(size)) if size > 0 else np.uint64(0)
    letter &= here
    digit &= here
    white &= here
    newline &= here
    sign = here & ~(letter | digit | white)

    # newlines behind signs: a carry runs through each such run and clears it
    first = newline & sign << _ONE
    free = white & ~(newline & ~(newline + first))
    # a run of white space up to its last newline: each newline reaches down to where its run begins
    lines = newline & free
    through = free
    for step in (1, 2, 4, 8, 16, 32):
        lines |= through & lines >> np.uint64(step)
        through &= through >> np.uint64(step)
    tail = free & ~lines

    alone = sign & ~(
        (sign | space) << _ONE
    )  # a sign that begins a piece and is not followed by one
    joined = (tail | alone) << _ONE
    begin = letter & ~(letter << _ONE | joined)
    begin |= sign & ~((sign | space) << _ONE)
    begin |= free & ~(free << _ONE) | tail & ~(tail << _ONE) | tail & ~(tail >> _ONE)
    begins = digit & ~(digit << _ONE)
    full = digit
    for step in range(1, max_digits + 1):
        full &= digit << np.uint64(step)
    while begins != 0:
        begin |= begins
        begins = begins << np.uint64(max_digits) & full

    # what is not yet known: white space at the end, and what follows a contraction
    known = np.uint64(64 - leading_zeros(here & ~free))
    short = sdmt | ell & ell >> _ONE | vr & e >> _ONE
    contraction = alone & apostrophe & short >> _ONE
    known = min(known, np.uint64(trailing_zeros(contraction)))
    if known < _SIZE:
        begin &= (_TWO << known) - _ONE
    return begin & ~_ONE
