r"""The tokenizer file: one small file, no pickle, the same bytes on every machine.

::

    MyLLM tokenizer 1\n                     name and version of the format
    {"merges": ..., "pattern": ..., ...}\n   header: JSON on one line, keys sorted
    sections                                arrays, little-endian, as the header lists them
    SHA-256 of all bytes above              32 bytes

A file has the least version that says it all: 1 is of a tokenizer that takes text as it is, 2 of
one that makes it NFC, and the header of 3 says which, and what special tokens of others are for.

Tokens are not stored: bytes are, by their ids, and merges, of which each makes the next token. Only
tokens that no merge makes, or none before a merge that joins them (as in Llama 3's), and ids out of
order, all of imported vocabularies, take more room.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from tokenizer.arrays import Array
from tokenizer.classes import UnicodeClasses
from tokenizer.files import read_json, replace_durably
from tokenizer.vocabulary import Id, Uses, Vocabulary, check_size

NAME = b"MyLLM tokenizer "
PLAIN, NFC, USED = b"1", b"2", b"3"  # versions
_DIGEST = 32


class _Header(msgspec.Struct, kw_only=True):
    has_merges: bool
    n_vocab: int
    pattern: str
    sections: list[tuple[str, Literal["<u1", "<u2", "<u4"], Annotated[int, msgspec.Meta(ge=0)]]]
    special_tokens: dict[str, Id]
    whole_pieces: bool
    nfc: bool = False
    uses: Uses = Uses()


class _Sections(NamedTuple):
    """The arrays that a file holds."""

    byte_ids: Array  # (256,); n_vocab of a byte without a token
    merges: Array  # (2M,) pairs of ids
    results: Array  # (M,) what each makes; empty where that is in order
    extra_ids: Array  # of the tokens that no merge makes, or too late for another merge
    extra_lengths: Array
    extra_bytes: Array
    class_starts: Array
    class_values: Array


def to_bytes(vocabulary: Vocabulary) -> bytes:
    """Return the file of a vocabulary."""
    byte_ids, n_vocab = vocabulary.byte_ids, vocabulary.n_vocab
    wide = "<u2" if n_vocab + (byte_ids.min() < 0) <= 1 << 16 else "<u4"
    merges = np.zeros((0, 2), np.int32) if vocabulary.merges is None else vocabulary.merges
    results = np.zeros(0, np.int32) if vocabulary.merges is None else vocabulary.results
    # by which merge a token is there: bytes before all, what no merge makes never
    there = np.full(n_vocab, results.size)
    there[results[::-1]] = np.arange(results.size)[::-1]
    there[byte_ids[byte_ids >= 0]] = -1
    late = merges[there[merges] >= np.arange(results.size)[:, None]]
    wanted = {*late.tolist(), *np.flatnonzero(there == results.size).tolist()}
    extra = {i: token for i, token in vocabulary.tokens.items() if i in wanted}
    if np.array_equal(results, byte_ids.max() + 1 + np.arange(results.size)):
        results = results[:0]  # in order, as the loader assumes where there are none
    sections = _Sections(
        np.where(byte_ids < 0, n_vocab, byte_ids).astype(wide),
        merges.reshape(-1).astype(wide),
        results.astype(wide),
        np.array(list(extra), wide),
        np.array([len(token) for token in extra.values()], "<u4"),
        np.frombuffer(b"".join(extra.values()), np.uint8),
        vocabulary.classes.starts.astype("<u4"),
        vocabulary.classes.values,
    )
    header = {
        "has_merges": vocabulary.merges is not None,
        "n_vocab": n_vocab,
        "pattern": vocabulary.pattern,
        "sections": [
            [name, f"<u{array.itemsize}", array.size] for name, array in sections._asdict().items()
        ],
        "special_tokens": dict(vocabulary.special_tokens),
        "whole_pieces": vocabulary.whole_pieces,
    }
    version = NFC if vocabulary.nfc else PLAIN
    if vocabulary.uses != Uses():
        version = USED
        header |= {"nfc": vocabulary.nfc, "uses": dataclasses.asdict(vocabulary.uses)}
    data = NAME + version + b"\n"
    data += json.dumps(header, sort_keys=True).encode() + b"\n"
    data += b"".join(array.tobytes() for array in sections)
    return data + hashlib.sha256(data).digest()


def save(vocabulary: Vocabulary, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all."""
    replace_durably(Path(path), to_bytes(vocabulary))


def load(path: str | os.PathLike[str]) -> Vocabulary:
    """Read a file and check it.

    Raises
    ------
    ValueError
        If it is damaged, of another version, or no tokenizer of this project.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name the tokenizer's file")
    data = Path(path).read_bytes()
    if not data.startswith(NAME):
        raise ValueError(f"{path} is no tokenizer file of MyLLM{_looks_like(data)}")
    end_of_name = data.find(b"\n", 0, 64)
    version = data[len(NAME) : end_of_name]
    if version not in (PLAIN, NFC, USED):
        shown = version[:20].decode("ascii", "replace")
        raise ValueError(f"{path} has version {shown!r} of the format; known are 1 to 3")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path} is damaged: its bytes do not match the hash at its end")
    begin = end_of_name + 1
    end = body.find(b"\n", begin)
    try:
        header = read_json(body[begin:end], _Header)
    except ValueError as error:
        raise ValueError(f"{path} has a header that cannot be read: {error}") from None
    try:
        header.nfc |= version == NFC
        return _vocabulary_of(header, body[end + 1 :])
    except ValueError as error:
        raise ValueError(f"{path} holds no valid vocabulary: {error}") from None


def _sections_of(header: _Header, data: bytes) -> _Sections:
    if [name for name, _, _ in header.sections] != list(_Sections._fields):
        raise ValueError(f"its sections are not {', '.join(_Sections._fields)}")
    arrays = []
    at = 0
    for name, dtype, count in header.sections:
        size = np.dtype(dtype).itemsize * count
        if at + size > len(data):
            raise ValueError(f"section {name} reaches past the end of the file")
        arrays.append(np.frombuffer(data[at : at + size], dtype))
        at += size
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes belong to no section")
    return _Sections(*arrays)


def _vocabulary_of(header: _Header, data: bytes) -> Vocabulary:
    sections = _sections_of(header, data)
    byte_ids = sections.byte_ids.tolist()
    if len(byte_ids) != 256:
        raise ValueError(f"{len(byte_ids)} ids of bytes, not 256")
    tokens = {i: bytes([byte]) for byte, i in enumerate(byte_ids) if i != header.n_vocab}
    extra = sections.extra_bytes.tobytes()
    stops = np.cumsum(sections.extra_lengths, dtype=np.int64).tolist()
    if [0, *stops][-1] != len(extra) or len(stops) != sections.extra_ids.size:
        raise ValueError("the extra tokens do not add up")
    for i, start, stop in zip(sections.extra_ids.tolist(), [0, *stops], stops, strict=False):
        tokens[i] = extra[start:stop]
    if sections.merges.size % 2:
        raise ValueError("the merges are no pairs")
    merges = sections.merges.reshape(-1, 2).astype(np.int32)
    results = sections.results.tolist()
    if not results:
        first = 1 + max((i for i in byte_ids if i != header.n_vocab), default=-1)
        results = list(range(first, first + len(merges)))
    if len(results) != len(merges):
        raise ValueError(f"{len(merges)} merges make {len(results)} tokens")
    total = sum(map(len, tokens.values()))
    for (a, b), i in zip(merges.tolist(), results, strict=True):
        if a not in tokens or b not in tokens:
            raise ValueError(f"the merge that makes id {i} joins ids {a} and {b}, not both known")
        size = len(tokens[a]) + len(tokens[b])
        total += size
        check_size(i, size, total)
        tokens[i] = tokens[a] + tokens[b]
    vocabulary = Vocabulary(
        dict(sorted(tokens.items())),
        merges if header.has_merges else None,
        header.special_tokens,
        header.pattern,
        UnicodeClasses(sections.class_starts, sections.class_values),
        header.whole_pieces,
        header.nfc,
        header.uses,
    )
    if vocabulary.n_vocab != header.n_vocab:
        raise ValueError(f"it says n_vocab = {header.n_vocab}, but has {vocabulary.n_vocab}")
    return vocabulary


def _looks_like(data: bytes) -> str:
    if not data:
        return ": it is empty"
    if data.lstrip()[:1] == b"{":
        return "; if it is Hugging Face's tokenizer.json, import it: myllm tokenizer import"
    return ""
