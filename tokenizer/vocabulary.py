"""What a vocabulary is: tokens, merges, special tokens, how text is cut. No algorithms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np

from tokenizer.arrays import Array
from tokenizer.classes import UnicodeClasses
from tokenizer.patterns import NAMED, compiled
from tokenizer.reference import MAX_TOKEN_BYTES

FIRST_SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>")  # ids 0 to 3
CONTROLS = (  # the last 16 ids
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *(f"<|reserved_{i}|>" for i in range(12)),
)
FIRST_BYTE = len(FIRST_SPECIALS)
MIN_VOCAB = FIRST_BYTE + 256 + len(CONTROLS)
MAX_VOCAB = 1 << 16
MAX_ID = (1 << 24) - 1
MAX_BYTES = MAX_VOCAB * MAX_TOKEN_BYTES  # of all tokens: no trained vocabulary has more


Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]


def check_size(i: int, size: int, total: int) -> None:
    """Refuse the token ``i`` of ``size`` bytes if it, or the ``total`` with it, is too large.

    A merge may double a token, so a file of 22 kB could ask for 17 GB.
    """
    if size > MAX_TOKEN_BYTES:
        raise ValueError(f"token {i} has {size:,} bytes; {MAX_TOKEN_BYTES:,} are allowed")
    if total > MAX_BYTES:
        raise ValueError(f"the tokens have more than {MAX_BYTES:,} bytes, which are allowed")


@dataclass(frozen=True)
class Uses:
    """What special tokens are for, by the files of others, where their names do not say it here.

    Parameters
    ----------
    bos, pad : str
        The names of what begins a text, and of what fills one up; "" where nothing is said.
    ends : tuple of str
        At which a model stops writing; first the one that ends a text.
    chat_template : str
        How messages become a text, in Jinja. It is kept for others: nothing here runs it.
    """

    bos: str = ""
    ends: tuple[str, ...] = ()
    pad: str = ""
    chat_template: str = ""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A byte-level vocabulary, checked when it is made.

    Parameters
    ----------
    tokens : mapping
        Id -> bytes, special tokens left out. No two are equal, none has more than
        ``MAX_TOKEN_BYTES``, and all have ``MAX_BYTES`` at most. Bytes without a token (SmolLM's
        vocabulary lacks those that its corpus did) are left out of a text.
    merges : Array or None
        (M, 2) int32 pairs of ids in the order learned, each making the token of their bytes
        together. None: every pair whose bytes together are a token may merge, the lowest id first
        (what a ``.tiktoken`` file means).
    special_tokens : mapping
        Name -> id.
    pattern : str
        The pattern that cuts text into pieces; ``"gpt2"`` and ``"gpt4"`` stand for theirs.
    classes : UnicodeClasses
        What the pattern's letters, numbers and spaces are.
    whole_pieces : bool
        A piece that is a token becomes that token, whatever the merges say.
    nfc : bool
        Text is brought to Unicode's normal form C before it is cut, as Qwen2 has it. That is not
        lossless: what comes back is composed, e and its accent one character.
    uses : Uses
        What special tokens of others are for.

    Raises
    ------
    ValueError
        If these contradict each other; the message names the token or id.
    """

    tokens: Mapping[int, bytes]
    merges: Array | None
    special_tokens: Mapping[str, int]
    pattern: str
    classes: UnicodeClasses
    whole_pieces: bool = False
    nfc: bool = False
    uses: Uses = Uses()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", NAMED.get(self.pattern, self.pattern))
        compiled(self.pattern)
        ids = list(self.tokens) + list(self.special_tokens.values())
        if not self.tokens:
            raise ValueError("there are no tokens")
        if min(ids) < 0 or max(ids) > MAX_ID:
            raise ValueError(
                f"ids run from {min(ids)} to {max(ids)}; they must lie in 0 to 2^24 - 1"
            )
        if len(set(ids)) < len(ids):
            twice = next(name for name, i in self.special_tokens.items() if ids.count(i) > 1)
            raise ValueError(f"special token {twice!r} has the id of another token")
        if "" in self.special_tokens:
            raise ValueError("a special token has no name")
        for name in filter(None, (self.uses.bos, *self.uses.ends, self.uses.pad)):
            if name not in self.special_tokens:
                raise ValueError(f"{name!r} has a use, but is no special token")
        for text in (self.pattern, *self.special_tokens, self.uses.chat_template):
            if text != text.encode("utf-8", "replace").decode():
                raise ValueError(f"{text!r} is no text that a file could hold")
        if len(self.ids) < len(self.tokens):
            first, second = next(
                (self.ids[t], i) for i, t in self.tokens.items() if self.ids[t] != i
            )
            raise ValueError(
                f"ids {second} and {first} have the same bytes, {self.tokens[first]!r}"
            )
        if b"" in self.ids:
            raise ValueError(f"token {self.ids[b'']} has no bytes")
        total = 0
        for i, token in self.tokens.items():
            total += len(token)
            check_size(i, len(token), total)
        if self.merges is not None:
            _ = self.results
        elif self.lacking:
            raise ValueError(f"no token for byte 0x{self.lacking[0]:02x}, as tiktoken must have")

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Bytes -> id."""
        return {token: i for i, token in self.tokens.items()}

    @cached_property
    def byte_ids(self) -> Array:
        """(256,) int32: the id of every single byte; -1 of one without a token."""
        return np.array([self.ids.get(bytes([byte]), -1) for byte in range(256)], np.int32)

    @property
    def lacking(self) -> bytes:
        """The bytes without a token."""
        return np.flatnonzero(self.byte_ids < 0).astype(np.uint8).tobytes()

    @cached_property
    def results(self) -> Array:
        """(M,) int32: the id that each of ``merges`` makes."""
        if self.merges is None:
            raise ValueError("this vocabulary has no list of merges")
        out = []
        for k, (a, b) in enumerate(self.merges.tolist()):
            if a not in self.tokens or b not in self.tokens:
                raise ValueError(f"merge {k} joins ids {a} and {b}, which are not both tokens")
            joined = self.tokens[a] + self.tokens[b]
            if joined not in self.ids:
                raise ValueError(f"merge {k} makes {joined!r}, which is no token")
            out.append(self.ids[joined])
        return np.array(out, np.int32)

    @cached_property
    def n_vocab(self) -> int:
        """One more than the greatest id."""
        return 1 + max(max(self.tokens), *self.special_tokens.values(), -1)

    def ranked_pairs(self) -> tuple[Array, Array, Array, Array]:
        """Return left, right, rank and result, (P,) int32 each, of all pairs that may merge."""
        if self.merges is not None:
            rank = np.arange(len(self.merges), dtype=np.int32)
            return self.merges[:, 0], self.merges[:, 1], rank, self.results
        rows = [
            (self.ids[token[:cut]], self.ids[token[cut:]], i)
            for i, token in self.tokens.items()
            for cut in range(1, len(token))
            if token[:cut] in self.ids and token[cut:] in self.ids
        ]
        left, right, result = np.array(rows, np.int32).reshape(-1, 3).T
        return left, right, result, result

    @classmethod
    def learned(
        cls, left: Array, right: Array, pattern: str, classes: UnicodeClasses
    ) -> "Vocabulary":
        """Lay merges out in the project's own way: 4 specials, bytes, merges, 16 controls."""
        tokens = [bytes([byte]) for byte in range(256)]
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            tokens.append(tokens[a - FIRST_BYTE] + tokens[b - FIRST_BYTE])
        specials = {name: i for i, name in enumerate(FIRST_SPECIALS)}
        end = FIRST_BYTE + len(tokens)
        specials |= {name: end + i for i, name in enumerate(CONTROLS)}
        merges = np.stack([left, right], axis=1).astype(np.int32)
        return cls(dict(enumerate(tokens, FIRST_BYTE)), merges, specials, pattern, classes)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Vocabulary)
            and dict(self.tokens) == dict(other.tokens)
            and dict(self.special_tokens) == dict(other.special_tokens)
            and self.pattern == other.pattern
            and self.classes == other.classes
            and (self.whole_pieces, self.nfc) == (other.whole_pieces, other.nfc)
            and self.uses == other.uses
            and (self.merges is None) == (other.merges is None)
            and (self.merges is None or np.array_equal(self.merges, other.merges))  # type: ignore[arg-type]
        )

    __hash__ = None  # type: ignore[assignment]
