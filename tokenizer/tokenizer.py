"""``Tokenizer``: text to ids and back, by the kernels."""

import array
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np
import regex

from accel.ahead import batches, in_order
from accel.threads import asked_for
from tokenizer import fileformat, reference
from tokenizer.arrays import Array
from tokenizer.kernels import decode as decoding
from tokenizer.kernels import encode as kernels
from tokenizer.kernels.words import MAX_PACKED, PADDING
from tokenizer.patterns import compiled, machine_of
from tokenizer.vocabulary import Vocabulary

Names = Collection[str] | Literal["all"]

BATCH_BYTES = 1 << 19  # of text, in characters, handed to a thread at once
ROOM = 1 << 20  # ids: what a thread keeps for the texts to come, so that its pages stay mapped
CACHE_BITS = 15  # 2 MB: pieces of up to 15 bytes that one thread remembers
LONG_CACHE_BITS = 12  # 0.5 MB: longer ones
_GAP = b"\0" * PADDING
_ZERO = np.zeros(1, np.int64)
_NONE = np.zeros(0, np.int64)


class Tokenizer:
    """Turns text into token ids and ids into text, without loss unless ``loss`` says otherwise.

    Make one by ``train_from_iterator``, ``Tokenizer.load``, ``from_huggingface`` or
    ``from_tiktoken``. Calls from several threads are safe, and run at the same time.

    Parameters
    ----------
    vocabulary : Vocabulary
        Tokens, merges, special tokens and pattern.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._machine = machine_of(vocabulary.pattern)
        self._pattern = compiled(vocabulary.pattern)
        self._idle: list[tuple[kernels.Tables, Array]] = []  # tables and room no thread is using
        self._marks: dict[tuple[object, ...], _Marks] = {}

    # --- files

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a file written by ``save``.

        Raises
        ------
        ValueError
            If the file is damaged, or no tokenizer of this project.
        """
        return cls(fileformat.load(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one file; what was there before stays whole if this fails."""
        fileformat.save(self.vocabulary, path)

    @cached_property
    def sha256(self) -> str:
        """The hash of the file ``save`` writes: two tokenizers are equal if theirs are."""
        return hashlib.sha256(fileformat.to_bytes(self.vocabulary)).hexdigest()

    # --- the vocabulary

    @property
    def n_vocab(self) -> int:
        """One more than the greatest id."""
        return self.vocabulary.n_vocab

    @property
    def special_tokens(self) -> dict[str, int]:
        """Names and ids of the special tokens, which ordinary text never becomes."""
        return dict(self.vocabulary.special_tokens)

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """The smaller of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16) if self.n_vocab <= 1 << 16 else np.dtype(np.uint32)

    @property
    def loss(self) -> str:
        """What of a text does not come back, as a sentence; empty: all of it does."""
        losses = []
        if self.vocabulary.nfc:
            losses.append(
                "it brings text to Unicode's form NFC, so that of two spellings of one character "
                "(é, or e and an accent) the composed one comes back"
            )
        if lacking := self.vocabulary.lacking:
            shown = lacking[:32].hex(" ") + " …" * (len(lacking) > 32)
            losses.append(
                f"it has no token for {len(lacking)} of the 256 bytes (0x{shown}), which are left "
                "out"
            )
        return f"this tokenizer is not lossless: {'; '.join(losses)}" if losses else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id; of a special token, its name."""
        return self.decode_bytes([token_id])

    # --- text to ids

    def encode(
        self,
        text: str,
        *,
        allowed_special: Names = frozenset(),
        disallowed_special: Names = "all",
    ) -> list[int]:
        """Encode a text that may hold special tokens.

        Parameters
        ----------
        text : str
            Any str, lone surrogates included.
        allowed_special : names or "all"
            Special tokens whose names in the text become their ids.
        disallowed_special : names or "all"
            Special tokens whose names in the text are an error. ``"all"`` means all that are not
            allowed; ``()`` takes their names as ordinary text.

        Raises
        ------
        ValueError
            If the text holds a disallowed special token, or a name is unknown.
        """
        ids: list[int] = self._encode(text, allowed_special, disallowed_special).tolist()
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode a text in which no special token is special."""
        ids: list[int] = self._encode_parts([_to_bytes(text)], True)[0].tolist()
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Encode any bytes, as ordinary text where they are text."""
        ids: list[int] = self._encode_parts([bytes(data)], False)[0].tolist()
        return ids

    def encode_to_numpy(
        self,
        text: str,
        *,
        allowed_special: Names = frozenset(),
        disallowed_special: Names = "all",
    ) -> Array:
        """Encode as ``encode`` does, into an array of ``dtype``."""
        return self._encode(text, allowed_special, disallowed_special)

    def encode_batch(
        self,
        texts: Iterable[str],
        *,
        allowed_special: Names = frozenset(),
        disallowed_special: Names = "all",
        num_threads: int | None = None,
    ) -> list[list[int]]:
        """Encode many texts, each as ``encode`` does.

        Parameters
        ----------
        texts : iterable of str
            Taken up as they are encoded.
        allowed_special, disallowed_special : names or "all"
            As for ``encode``.
        num_threads : int, optional
            How many threads work; ``accel.threads.threads()`` if not given. The result is the same.
        """
        groups = self._encode_groups(texts, allowed_special, disallowed_special, num_threads)
        return [self._ints[part].tolist() for group in groups for part in group]

    def encode_batch_to_numpy(
        self,
        texts: Iterable[str],
        *,
        allowed_special: Names = frozenset(),
        disallowed_special: Names = "all",
        num_threads: int | None = None,
    ) -> list[Array]:
        """Encode many texts as ``encode_batch`` does, into arrays of ``dtype``."""
        groups = self._encode_groups(texts, allowed_special, disallowed_special, num_threads)
        return [part for group in groups for part in group]

    # --- ids to text

    def decode_bytes(self, ids: Sequence[int] | Array) -> bytes:
        """Return the bytes that ids stand for; of special tokens, their names.

        Raises
        ------
        ValueError
            If an id is not in the vocabulary; the message says which, and where.
        """
        numbers = _id_array(ids)
        table, flat = self._decode_table
        size = int(decoding.decoded_size(numbers, table))
        if size < 0:
            raise ValueError(
                f"id {numbers[-1 - size]} at position {-1 - size} is not in the vocabulary, "
                f"which has {len(self.vocabulary.tokens) + len(self.special_tokens)} ids "
                f"below {self.n_vocab}"
            )
        out = np.empty(size + PADDING, np.uint8)
        decoding.decode_ids(numbers, table, flat, out)
        return out[:size].tobytes()

    def decode(self, ids: Sequence[int] | Array, errors: str = "replace") -> str:
        """Return the text that ids stand for.

        Parameters
        ----------
        ids : sequence of int, or Array
            Token ids.
        errors : str
            What becomes of bytes that are no text: ``"replace"`` by U+FFFD, ``"ignore"``,
            ``"backslashreplace"``, or ``"strict"``, an error.

        Raises
        ------
        ValueError
            If an id is unknown, or, with ``"strict"``, at the byte that is no text.
        """
        return decode_utf8(self.decode_bytes(ids), errors)

    # --- how it is done

    @cached_property
    def _decode_table(self) -> tuple[Array, Array]:
        """By id, the first 8 bytes, start and size of its bytes; and the bytes of all."""
        vocabulary = self.vocabulary
        by_id = dict(vocabulary.tokens)
        by_id |= {i: reference.to_bytes(name) for name, i in vocabulary.special_tokens.items()}
        tokens = list(by_id.values())
        sizes = np.array([len(token) for token in tokens], np.uint64)
        starts = np.cumsum(sizes, dtype=np.uint64) - sizes
        table = np.zeros((self.n_vocab, 2), np.uint64)
        ids = np.array(list(by_id), np.int64)
        table[ids, 0] = np.frombuffer(b"".join(t[:8].ljust(8, b"\0") for t in tokens), "<u8")
        table[ids, 1] = starts << np.uint64(32) | sizes
        return table.reshape(-1), np.frombuffer(b"".join(tokens) + _GAP, np.uint8)

    @cached_property
    def _ints(self) -> Array:
        """An int for every id: lists that share them are smaller, and made faster."""
        return np.arange(self.n_vocab).astype(object)

    @cached_property
    def _template(self) -> kernels.Tables:
        return _fill_tables(self.vocabulary)

    @cached_property
    def _cutter(self) -> tuple[Array, Array, int, int, bool]:
        """The pattern as kernels take it; kind 0 where pieces are cut by ``regex``."""
        classes = self.vocabulary.classes
        if self._machine is None:
            return np.zeros(1, np.uint8), np.zeros(1, np.uint8), 0, 0, False
        return classes.machine, classes.ascii, *self._machine

    def _encode_parts(self, parts: list[bytes], checked: bool) -> list[Array]:
        """Encode byte strings, in one call of the kernel; ``checked`` ones are whole characters."""
        if self.vocabulary.nfc:
            parts = [reference.composed(part) for part in parts]
        if len(parts) == 1:  # a short text is encoded in less time than these arrays take
            starts, part_stops = _ZERO, np.array([len(parts[0])])
            buf = np.frombuffer(parts[0] + _GAP, np.uint8)
        else:
            sizes = np.array([len(part) for part in parts], np.int64)
            starts = np.cumsum(sizes + PADDING) - (sizes + PADDING)
            part_stops = starts + sizes
            buf = np.frombuffer(_GAP.join([*parts, b""]), np.uint8)
        ends = self._ends(parts, starts) if self._machine is None else _NONE
        stops = np.empty(len(parts), np.int64)
        try:
            tables, out = self._idle.pop()
        except IndexError:
            tables, out = _fresh(self._template), np.empty(ROOM, np.int32)
        room = out if buf.size + 2 <= ROOM else np.empty(buf.size + 2, np.int32)
        kernels.encode_texts(
            buf, starts, part_stops, checked, ends, room, stops, *self._cutter, tuple(tables)
        )
        ids = room[: stops[-1]].astype(self.dtype)
        self._idle.append((tables, out))
        begin = 0
        arrays = []
        for stop in stops.tolist():
            arrays.append(ids[begin:stop])
            begin = stop
        return arrays

    def _ends(self, parts: list[bytes], starts: Array) -> Array:
        """Cut parts by ``regex``; return the end of every piece, counted from ``starts``."""
        ends = []
        for part, start in zip(parts, starts.tolist(), strict=True):
            pieces = reference.split(part, self._pattern, self.vocabulary.classes)
            ends.append(start + np.cumsum([len(piece) for piece in pieces], dtype=np.int64))
        return np.concatenate([np.zeros(0, np.int64), *ends])

    def _encode(self, text: str, allowed: Names, disallowed: Names) -> Array:
        return self._encode_marked([text], self._marks_of(allowed, disallowed))[0]

    def _marks_of(self, allowed: Names, disallowed: Names) -> "_Marks":
        key = tuple(
            names if names == "all" else frozenset(names) for names in (allowed, disallowed)
        )
        if key not in self._marks:
            self._marks[key] = _Marks(self.vocabulary.special_tokens, allowed, disallowed)
        return self._marks[key]

    def _encode_marked(self, texts: list[str], marks: "_Marks") -> list[Array]:
        """Encode texts with their special tokens."""
        cut = [marks.cut(text) for text in texts]
        parts = [reference.to_bytes(part) for pieces in cut for part in pieces[::2]]
        encoded = iter(self._encode_parts(parts, True))
        out = []
        for pieces in cut:
            arrays = [
                next(encoded) if i % 2 == 0 else np.array([marks.ids[piece]], self.dtype)
                for i, piece in enumerate(pieces)
            ]
            out.append(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        return out

    def _encode_groups(
        self, texts: Iterable[str], allowed: Names, disallowed: Names, num_threads: int | None
    ) -> Iterator[list[Array]]:
        """Encode texts group by group, in order, on several threads."""
        if isinstance(texts, str):
            raise ValueError("texts must be several texts, got one str; see encode")
        encode = partial(self._encode_marked, marks=self._marks_of(allowed, disallowed))
        n_threads, groups = asked_for(num_threads), batches(texts, len, BATCH_BYTES)
        return map(encode, groups) if n_threads == 1 else in_order(encode, groups, n_threads)


class _Marks:
    """Which special tokens a text may hold, and where it holds them."""

    def __init__(self, special_tokens: Mapping[str, int], allowed: Names, disallowed: Names):
        self.ids = special_tokens
        names = set(self.ids)
        allow = names if allowed == "all" else set(allowed)
        forbid = names - allow if disallowed == "all" else set(disallowed)
        for name in (allow | forbid) - names:
            raise ValueError(f"{name!r} is not a special token; known: {', '.join(sorted(names))}")
        self._allowed = _any_of(allow)
        self._forbidden = _any_of(forbid)

    def cut(self, text: str) -> list[str]:
        """Cut a text at its special tokens: text, name, text, name, ..., text."""
        if not isinstance(text, str):
            raise ValueError(f"a text must be a str, got {type(text).__name__}; see encode_bytes")
        if self._forbidden is not None:
            found = self._forbidden.search(text)
            if found is not None:
                name = found.group()
                raise ValueError(
                    f"text holds the special token {name!r} at character {found.start()}: name it "
                    "in allowed_special to get its id, or pass disallowed_special=() to take it "
                    "as ordinary text"
                )
        return [text] if self._allowed is None else self._allowed.split(text)


def _any_of(names: set[str]) -> "regex.Pattern[str] | None":
    """Compile a pattern that captures any of the names, the longest first."""
    if not names:
        return None
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")


def _fresh(tables: kernels.Tables) -> kernels.Tables:
    """Return tables for another thread: the vocabulary is shared, the cache is empty."""
    return tables._replace(
        cache=np.zeros_like(tables.cache), long_cache=np.zeros_like(tables.long_cache)
    )


def _fill_tables(vocabulary: Vocabulary) -> kernels.Tables:
    """Make encoder tables that know the vocabulary."""
    tokens = list(vocabulary.tokens.values())
    left, right, rank, new = vocabulary.ranked_pairs()
    n_long = sum(len(token) > MAX_PACKED for token in tokens)
    pair_bits = (2 * left.size + 2).bit_length()
    bits = (2 * len(tokens) + 2).bit_length()
    long_bits = (2 * n_long + 2).bit_length()
    tables = kernels.Tables(
        byte_ids=vocabulary.byte_ids,
        pairs=np.zeros(2 << pair_bits, np.uint64),
        pair_shift=np.uint64(64 - pair_bits),
        slots=np.zeros(kernels.SLOT << bits, np.uint64),
        shift=np.uint64(64 - bits),
        long_slots=np.zeros(kernels.SLOT << long_bits, np.uint64),
        long_shift=np.uint64(64 - long_bits),
        token_bytes=np.frombuffer(b"".join(tokens) + _GAP, np.uint8),
        cache=np.zeros(kernels.SHORT_SLOT << CACHE_BITS, np.uint64),
        cache_shift=np.uint64(64 - CACHE_BITS),
        long_cache=np.zeros(kernels.LONG_SLOT << LONG_CACHE_BITS, np.uint64),
        long_cache_shift=np.uint64(64 - LONG_CACHE_BITS),
    )
    kernels.fill_pairs(tables.pairs, tables.pair_shift, left, right, rank, new)
    offsets = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum([len(token) for token in tokens], out=offsets[1:])
    ids = np.fromiter(vocabulary.tokens, np.int32, len(tokens))
    whole = vocabulary.whole_pieces or vocabulary.merges is None
    kernels.fill_vocabulary(offsets, ids, whole, tuple(tables))
    return tables


def _to_bytes(text: str) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"a text must be a str, got {type(text).__name__}; see encode_bytes")
    return reference.to_bytes(text)


def _id_array(ids: Sequence[int] | Array) -> Array:
    """Return ids as int32; what does not fit is -1, which names no token."""
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise ValueError(f"ids must be one row of integers, got {ids.dtype} {ids.shape}")
        if ids.dtype.itemsize > 2 and ids.size and (ids.max() >= 1 << 31 or ids.min() < -(1 << 31)):
            where = int(np.flatnonzero((ids >= 1 << 31) | (ids < -(1 << 31)))[0])
            raise ValueError(f"id {ids[where]} at position {where} is not in the vocabulary")
        return np.ascontiguousarray(ids, np.int32)
    if isinstance(ids, bytes | bytearray | str):  # array.array would take them for memory
        raise ValueError(f"ids must be integers, got {type(ids).__name__}")
    try:
        return np.frombuffer(array.array("i", ids), np.int32)
    except (TypeError, OverflowError):
        for i, value in enumerate(ids):
            if not isinstance(value, int | np.integer) or not 0 <= value < 1 << 31:
                raise ValueError(f"id {value!r} at position {i} is not in the vocabulary") from None
        raise


def decode_utf8(data: bytes, errors: str = "replace") -> str:
    """Decode UTF-8 with lone surrogates; ``errors`` says what becomes of other bytes.

    Raises
    ------
    ValueError
        With ``errors="strict"``, at the first byte that is no text.
    """
    if errors not in ("strict", "replace", "ignore", "backslashreplace"):
        raise ValueError(
            f"errors must be 'strict', 'replace', 'ignore' or 'backslashreplace', got {errors!r}"
        )
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        pass
    out = []
    end = 0
    for run in [*reference.CHARACTERS.finditer(data), None]:
        start, stop = run.span() if run is not None else (len(data), len(data))
        if end < start:
            if errors == "strict":
                raise ValueError(f"byte {end} of the decoded bytes, 0x{data[end]:02x}, is no text")
            out.append(data[end:start].decode("utf-8", errors))
        out.append(data[start:stop].decode("utf-8", "surrogatepass"))
        end = stop
    return "".join(out)
