r"""The Unicode class table: what ``\p{L}``, ``\p{N}`` and ``\s`` mean to one vocabulary, for ever.

Every release of Unicode turns unassigned code points into letters. A tokenizer that asks the
installed ``regex`` would one day cut old text at new places, and its ids would change under a model
trained with them. So a vocabulary is saved with the classes it was trained with: the general
category of every code point, and whether it is white space, as runs of equal class.
"""

import string
from functools import cached_property, lru_cache

import numpy as np
import regex

from tokenizer.arrays import Array

CATEGORIES = (
    *("Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps"),
    *("Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co"),
)
SPACE = 32  # the bit that says: matched by \s
N_CODE_POINTS = 0x110000

# What the state machines ask about a character.
OTHER, LETTER, NUMBER, WHITE, NEWLINE = range(5)  # frozen into tokenizer.kernels.split as well
NON_ASCII = 9


class UnicodeClasses:
    r"""General category and white space of every code point, as runs of equal class.

    Parameters
    ----------
    starts : Array
        (R,) uint32, ascending from 0: first code point of each run.
    values : Array
        (R,) uint8: index into ``CATEGORIES``, plus ``SPACE`` where ``\s`` matches.

    Raises
    ------
    ValueError
        If the runs are not such a table.
    """

    def __init__(self, starts: Array, values: Array):
        self.starts = np.ascontiguousarray(starts, dtype=np.uint32)
        self.values = np.ascontiguousarray(values, dtype=np.uint8)
        if self.starts.size != self.values.size or self.starts.size == 0 or self.starts[0] != 0:
            raise ValueError("the table of Unicode classes must begin at code point 0")
        if (np.diff(self.starts.astype(np.int64)) <= 0).any() or self.starts[-1] >= N_CODE_POINTS:
            raise ValueError("the table of Unicode classes must list ascending code points")
        if ((self.values & ~np.uint8(SPACE)) >= len(CATEGORIES)).any():
            raise ValueError("the table of Unicode classes names a category that does not exist")

    @cached_property
    def expanded(self) -> Array:
        """(0x110000,) uint8: the class of every code point."""
        lengths = np.diff(np.append(self.starts.astype(np.int64), N_CODE_POINTS))
        return np.repeat(self.values, lengths)

    @cached_property
    def machine(self) -> Array:
        """(0x110000,) uint8: OTHER, LETTER, NUMBER, WHITE or NEWLINE of every code point."""
        of_class = np.full(64, OTHER, np.uint8)
        for i, category in enumerate(CATEGORIES):
            of_class[i] = {"L": LETTER, "N": NUMBER}.get(category[0], OTHER)
        of_class[SPACE:] = WHITE
        table = of_class[self.expanded]
        table[[10, 13]] = NEWLINE
        return table

    @cached_property
    def ascii(self) -> Array:
        """(256,) uint8: ``machine`` for the bytes below 128, NON_ASCII above.

        Raises
        ------
        ValueError
            If ASCII is classed otherwise than in every version of Unicode, on which the kernel that
            cuts 64 bytes of ASCII at once relies.
        """
        table = self.machine[:256].copy()
        if not np.array_equal(table[:128], _ascii_classes()):
            raise ValueError("the table of Unicode classes does not class ASCII as Unicode does")
        table[128:] = NON_ASCII
        return table

    @cached_property
    def substitutes(self) -> dict[int, int]:
        """Code points the installed ``regex`` classes differently -> one of the class meant.

        Replacing them before a pattern is matched, one for one, makes the installed ``regex`` cut
        where the frozen table says.
        """
        now = installed_classes()
        if np.array_equal(now.starts, self.starts) and np.array_equal(now.values, self.values):
            return {}
        meant, have = self.expanded, now.expanded
        agreed = np.flatnonzero(meant == have)
        agreed = agreed[agreed > 127]  # a pattern may spell out ASCII characters
        classes, first = np.unique(meant[agreed], return_index=True)
        stand_in = dict(zip(classes.tolist(), agreed[first].tolist(), strict=True))
        out = {}
        for code in np.flatnonzero(meant != have).tolist():
            if int(meant[code]) not in stand_in:
                category = CATEGORIES[int(meant[code]) & ~SPACE]
                raise ValueError(f"the installed regex knows no character of category {category}")
            out[code] = stand_in[int(meant[code])]
        return out

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, UnicodeClasses)
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]


def _ascii_classes() -> Array:
    """Return (128,) uint8: what Unicode says of ASCII in terms of the state machines."""
    table = np.full(128, OTHER, np.uint8)
    for characters, kind in ((string.ascii_letters, LETTER), (string.digits, NUMBER)):
        table[list(characters.encode())] = kind
    table[list(b"\t\v\f ")] = WHITE
    table[list(b"\r\n")] = NEWLINE
    return table


@lru_cache(maxsize=1)
def installed_classes() -> UnicodeClasses:
    """Return the classes of the installed ``regex``; about 0.3 s, once."""
    everything = "".join(map(chr, range(N_CODE_POINTS)))
    pattern = "|".join(f"(?P<{name}>\\p{{{name}}}+)" for name in CATEGORIES)
    table = np.zeros(N_CODE_POINTS, np.uint8)
    for match in regex.finditer(pattern, everything):
        start, stop = match.span()
        table[start:stop] = CATEGORIES.index(match.lastgroup or "")
    for match in regex.finditer(r"\s+", everything):
        start, stop = match.span()
        table[start:stop] |= SPACE
    starts = np.flatnonzero(np.diff(table, prepend=np.uint8(255)))
    return UnicodeClasses(starts, table[starts])
