r"""Where one piece ends: the GPT-4 and GPT-2 patterns as state machines over UTF-8 bytes.

The patterns look at three classes of characters (letter, number, white space) and never back, so
the end of a piece follows from its first two characters and a run. ASCII runs of letters, most of
any text, are measured 8 bytes at a time without a branch per byte: the bytes of one load are tested
in parallel ("SIMD within a register"), and the first non-letter is found by counting zero bits.
Most pieces of ASCII text never come here: ``tokenizer.kernels.block`` cuts 64 bytes at once.

Every function takes ``buf``, uint8, in which the text ``[.., n)`` is whole characters, and is
followed by a byte that is zero or belongs to no character, and by ``PADDING`` bytes in all. A
pattern is five arguments, passed one by one because a tuple of arrays costs reference counts in the
inner loop: ``table`` and ``ascii`` (``UnicodeClasses.machine`` and ``.ascii``), ``kind`` (4 or 2),
``max_digits`` of one piece, and ``whole_tail`` (white space that ends the text is one piece).

``cut`` is the way in. Callers let it write ``BLOCK`` ends and then look those pieces up: two short
loops predict their branches better than one long one.
"""

import numpy as np

from accel.jit import jit
from tokenizer.arrays import Array, Int
from tokenizer.kernels.block import SIZE, beginnings
from tokenizer.kernels.words import load64, trailing_zeros

OTHER, LETTER, NUMBER, WHITE, NEWLINE, NON_ASCII = 0, 1, 2, 3, 4, 9  # as in tokenizer.classes

BLOCK = 512

_ONE = np.uint64(1)
_8 = np.uint64(8)
_EACH = 0x0101010101010101
_HIGH_BITS = np.uint64(0x80 * _EACH)
_LOW_BITS = np.uint64(0x7F * _EACH)
_SPACES = np.uint64(0x20 * _EACH)
_CASE = np.uint64(0x20 * _EACH)
_FROM_A = np.uint64((0x80 - ord("a")) * _EACH)
_PAST_Z = np.uint64((0x80 - ord("z") - 1) * _EACH)


@jit(nogil=True, forceinline=True)
def letters_ahead(word: Int) -> Int:
    """Return how many of the 8 bytes of a load, from the first, are ASCII letters."""
    small = (word | _CASE) & _LOW_BITS
    letter = (small + _FROM_A) & ~(small + _PAST_Z) & ~word & _HIGH_BITS
    return trailing_zeros(letter ^ _HIGH_BITS) >> 3


@jit(nogil=True, forceinline=True)
def character(buf: Array, i: Int, table: Array) -> tuple[Int, Int]:
    """Return the class and the number of bytes of the character at ``i``, which is whole."""
    c = np.int64(buf[i])
    if c < 0x80:
        return np.int64(table[c]), 1
    if c < 0xE0:
        return np.int64(table[(c & 31) << 6 | np.int64(buf[i + 1]) & 63]), 2
    if c < 0xF0:
        code = (c & 15) << 12 | (np.int64(buf[i + 1]) & 63) << 6 | np.int64(buf[i + 2]) & 63
        return np.int64(table[code]), 3
    code = (c & 7) << 18 | (np.int64(buf[i + 1]) & 63) << 12
    code |= (np.int64(buf[i + 2]) & 63) << 6 | np.int64(buf[i + 3]) & 63
    return np.int64(table[code]), 4


@jit(nogil=True, forceinline=True)
def end_of_run(buf: Array, i: Int, n: Int, table: Array, kind: Int) -> Int:
    """Return where the run of characters of one class ends that goes on at ``i``."""
    while i < n:
        found, size = character(buf, i, table)
        if found != kind:
            break
        i += size
    return i


@jit(nogil=True, forceinline=True)
def end_of_letters(buf: Array, i: Int, n: Int, table: Array) -> Int:
    """Return where the run of letters ends that goes on at ``i``."""
    step = letters_ahead(load64(buf, i))
    i += step
    while step == 8:
        step = letters_ahead(load64(buf, i))
        i += step
    if buf[i] >= 0x80:
        return end_of_run(buf, i, n, table, LETTER)
    return i


@jit(nogil=True, forceinline=True)
def end_of_spaces(
    buf: Array, i: Int, n: Int, table: Array, by_lines: bool, whole_tail: bool
) -> Int:
    r"""Return the end of a piece that begins with white space no other alternative takes.

    ``\s*[\r\n]`` (if ``by_lines``) ends at the last newline of the run, ``\s+(?!\S)`` leaves the
    last character to the word that follows, and ``\s+`` takes a single one.
    """
    after_newline = -1
    last = i
    j = i
    while j < n:
        c = buf[j]
        if c == ord(" "):
            j += trailing_zeros(load64(buf, j) ^ _SPACES) >> 3  # up to 8 spaces at once
            last = j - 1
        elif c == 10 or c == 13:
            last = j
            j += 1
            after_newline = j
        else:
            found, size = character(buf, j, table)
            if found < WHITE:
                break
            last = j
            j += size
    if j == n and whole_tail:
        return n
    if by_lines and after_newline >= 0:
        return after_newline
    return last if j < n and last > i else j


@jit(nogil=True, forceinline=True)
def contraction(buf: Array, i: Int, any_case: bool) -> Int:
    """Return the end of 's, 't, 'd, 'm, 'll, 've or 're at the apostrophe ``i``; else -1."""
    fold = np.uint8(0x20) if any_case else np.uint8(0)
    c = buf[i + 1] | fold
    if c == ord("s") or c == ord("t") or c == ord("d") or c == ord("m"):
        return i + 2
    e = buf[i + 2] | fold
    if (c == ord("l") and e == ord("l")) or ((c == ord("v") or c == ord("r")) and e == ord("e")):
        return i + 3
    if any_case and buf[i + 1] == 0xC5 and buf[i + 2] == 0xBF:  # the long s folds to s
        return i + 3
    return -1


@jit(nogil=True, forceinline=True)
def end_gpt4(
    buf: Array, i: Int, n: Int, table: Array, ascii: Array, max_digits: Int, whole_tail: bool
) -> Int:
    """Return the end of the piece of the GPT-4 pattern that begins at ``i``."""
    c = buf[i]
    kind = np.int64(ascii[c])
    # Most pieces are ASCII letters, or one other character and then letters. Both are measured, and
    # one of them selected, without a branch between them: which it is cannot be predicted.
    word = load64(buf, i)
    letters = letters_ahead(word)
    after_one = letters_ahead(word >> _8)
    one = (kind == OTHER) | (kind == WHITE)
    if (letters > 0) | (one & (after_one > 0) & (c != ord("'"))):
        j = i + (letters if letters > 0 else 1 + after_one)
        if (j - i >= 8) | (buf[j] >= 0x80):
            return end_of_letters(buf, j, n, table)
        return j
    size = 1
    if kind == NON_ASCII:
        kind, size = character(buf, i, table)
    if kind == LETTER:
        return end_of_letters(buf, i + size, n, table)
    if c == ord("'"):
        end = contraction(buf, i, True)
        if end >= 0:
            return end
    j = i + size
    if kind == NUMBER:
        digits = 1
        while digits < max_digits and j < n:
            found, size = character(buf, j, table)
            if found != NUMBER:
                break
            j += size
            digits += 1
        return j
    if j < n and kind != NEWLINE:
        following = np.int64(ascii[buf[j]])
        size = 1
        if following == NON_ASCII:
            following, size = character(buf, j, table)
        if following == LETTER:
            return end_of_letters(buf, j + size, n, table)
        if c == ord(" ") and following == OTHER:
            kind = OTHER
    if kind == OTHER:
        while j < n and ascii[buf[j]] == OTHER:
            j += 1
        if buf[j] >= 0x80:
            j = end_of_run(buf, j, n, table, OTHER)
        while j < n and (buf[j] == 10 or buf[j] == 13):
            j += 1
        return j
    return end_of_spaces(buf, i, n, table, True, whole_tail)


@jit(nogil=True, forceinline=True)
def end_gpt2(buf: Array, i: Int, n: Int, table: Array) -> Int:
    """Return the end of the piece of the GPT-2 pattern that begins at ``i``."""
    c = buf[i]
    if c == ord("'"):
        end = contraction(buf, i, False)
        if end >= 0:
            return end
    kind, size = character(buf, i, table)
    j = i + size
    if c == ord(" ") and j < n:
        following, size = character(buf, j, table)
        if following < WHITE:
            kind = following
            j += size
    if kind == LETTER:
        return end_of_letters(buf, j, n, table)
    if kind < WHITE:
        return end_of_run(buf, j, n, table, kind)
    return end_of_spaces(buf, i, n, table, False, False)


@jit(nogil=True, forceinline=True)
def end_of_characters(buf: Array, i: Int, n: Int) -> Int:
    """Return where the run of whole UTF-8 characters (and lone surrogates) from ``i`` on ends."""
    while i < n:
        if i + 8 <= n and load64(buf, i) & _HIGH_BITS == 0:
            i += 8
            continue
        c = buf[i]
        if c < 0x80:
            i += 1
            continue
        if c < 0xC2 or c > 0xF4:
            break
        size = 2 if c < 0xE0 else 3 if c < 0xF0 else 4
        if i + size > n:
            break
        second = buf[i + 1]
        if (
            (c == 0xE0 and second < 0xA0)
            or (c == 0xF0 and second < 0x90)
            or (c == 0xF4 and second > 0x8F)
        ):
            break
        whole = True
        for k in range(1, size):
            whole = whole and buf[i + k] & 0xC0 == 0x80
        if not whole:
            break
        i += size
    return i


@jit(nogil=True)
def cut_gpt4(
    buf: Array,
    i: Int,
    n: Int,
    table: Array,
    ascii: Array,
    max_digits: Int,
    whole_tail: bool,
    ends: Array,
    k: Int,
) -> Int:
    """Write the ends of pieces from ``i`` on into ``ends[k:]`` until it is full; return k."""
    while i < n and k < ends.size:
        if i + SIZE <= buf.size and k + SIZE <= ends.size and load64(buf, i) & _HIGH_BITS == 0:
            begins = beginnings(buf, i, n, max_digits)
            if begins != 0:
                start = i
                while begins != 0:
                    i = start + trailing_zeros(begins)
                    ends[k] = i
                    k += 1
                    begins &= begins - _ONE
                continue
        i = end_gpt4(buf, i, n, table, ascii, max_digits, whole_tail)
        ends[k] = i
        k += 1
    return k


@jit(nogil=True)
def cut_gpt2(buf: Array, i: Int, n: Int, table: Array, ends: Array, k: Int) -> Int:
    """Do the same for the GPT-2 pattern; in one loop, both would run at two thirds the speed."""
    while i < n and k < ends.size:
        i = end_gpt2(buf, i, n, table)
        ends[k] = i
        k += 1
    return k


@jit(nogil=True)
def cut(
    buf: Array,
    i: Int,
    n: Int,
    stop: Int,
    table: Array,
    ascii: Array,
    kind: Int,
    max_digits: Int,
    whole_tail: bool,
    ends: Array,
) -> tuple[Int, Int]:
    """Write the ends of pieces of any bytes ``[i, stop)`` into ``ends`` until it is full.

    ``[i, n)`` is known to be whole characters. Returns the number of ends, and the new ``n``.
    """
    k = np.int64(0)  # a literal 0 would be a type, and its callees compiled twice
    while i < stop and k < ends.size:
        if i == n:
            n = end_of_characters(buf, i, stop)
        if i == n:  # a byte of no character
            n = i + 1
            ends[k] = n
            k += 1
        elif kind == 4:
            k = cut_gpt4(buf, i, n, table, ascii, max_digits, whole_tail, ends, k)
        else:
            k = cut_gpt2(buf, i, n, table, ends, k)
        i = ends[k - 1]
    return k, n
