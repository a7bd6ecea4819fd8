r"""The tokenizer file: one small file, no pickle, the same bytes on every machine.

::

    MyLLM tokenizer 1\n                     name and version of the format
    {"merges": ..., "pattern": ..., ...}\n   header: JSON on one line, keys sorted
    sections                                arrays, little-endian, as the header lists them
    SHA-256 of all bytes above              32 bytes

Tokens are not stored: bytes are, by their ids, and merges, of which each makes the next token. Only
tokens that no merge makes, and ids out of order, both of imported vocabularies, take more room.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tokenizer.arrays import Array
from tokenizer.classes import UnicodeClasses
from tokenizer.vocabulary import Vocabulary

NAME = b"MyLLM tokenizer "
VERSION = 1
_DIGEST = 32
_DTYPES = ("<u1", "<u2", "<u4")


def to_bytes(vocabulary: Vocabulary) -> bytes:
    """Return the file of a vocabulary."""
    wide = "<u2" if vocabulary.n_vocab <= 1 << 16 else "<u4"
    merges = np.zeros((0, 2), np.int32) if vocabulary.merges is None else vocabulary.merges
    results = np.zeros(0, np.int32) if vocabulary.merges is None else vocabulary.results
    made = set(vocabulary.byte_ids.tolist()) | set(results.tolist())
    extra = {i: token for i, token in vocabulary.tokens.items() if i not in made}
    if np.array_equal(results, vocabulary.byte_ids.max() + 1 + np.arange(results.size)):
        results = results[:0]  # in order, as the loader assumes where there are none
    sections: list[tuple[str, str, Any]] = [
        ("byte_ids", wide, vocabulary.byte_ids),
        ("merges", wide, merges.reshape(-1)),
        ("results", wide, results),
        ("extra_ids", wide, list(extra)),
        ("extra_lengths", "<u4", [len(token) for token in extra.values()]),
        ("extra_bytes", "<u1", list(b"".join(extra.values()))),
        ("class_starts", "<u4", vocabulary.classes.starts),
        ("class_values", "<u1", vocabulary.classes.values),
    ]
    arrays = [(name, dtype, np.asarray(values).astype(dtype)) for name, dtype, values in sections]
    header = {
        "has_merges": vocabulary.merges is not None,
        "n_vocab": vocabulary.n_vocab,
        "pattern": vocabulary.pattern,
        "sections": [[name, dtype, array.size] for name, dtype, array in arrays],
        "special_tokens": dict(vocabulary.special_tokens),
        "whole_pieces": vocabulary.whole_pieces,
    }
    data = NAME + str(VERSION).encode() + b"\n"
    data += json.dumps(header, sort_keys=True).encode() + b"\n"
    data += b"".join(array.tobytes() for _, _, array in arrays)
    return data + hashlib.sha256(data).digest()


def save(vocabulary: Vocabulary, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all: beside its place first, then renamed."""
    write_atomically(Path(path), to_bytes(vocabulary))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str]) -> Vocabulary:
    """Read a file and check it.

    Raises
    ------
    ValueError
        If it is damaged, of another version, or no tokenizer of this project.
    """
    data = Path(path).read_bytes()
    if not data.startswith(NAME):
        raise ValueError(f"{path} is no tokenizer file of MyLLM{_looks_like(data)}")
    end_of_name = data.find(b"\n", 0, 64)
    version = data[len(NAME) : end_of_name]
    if version != str(VERSION).encode():
        shown = version.decode("ascii", "replace")
        raise ValueError(f"{path} has version {shown!r} of the format; known is {VERSION}")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path} is damaged: its bytes do not match the hash at its end")
    try:
        return _parse(body, end_of_name + 1)
    except (
        LookupError,
        TypeError,
        AttributeError,
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        raise ValueError(f"{path} has a header that cannot be read: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"{path} holds no valid vocabulary: {error}") from None


def _parse(body: bytes, begin: int) -> Vocabulary:
    end = body.index(b"\n", begin)
    header = json.loads(body[begin:end])
    at = end + 1
    arrays: dict[str, Array] = {}
    for name, dtype, count in header["sections"]:
        if dtype not in _DTYPES:
            raise ValueError(f"section {name} has the type {dtype!r}")
        size = np.dtype(dtype).itemsize * count
        if count < 0 or at + size > len(body):
            raise ValueError(f"section {name} reaches past the end of the file")
        arrays[name] = np.frombuffer(body[at : at + size], dtype)
        at += size
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes belong to no section")

    byte_ids = arrays["byte_ids"].tolist()
    if len(byte_ids) != 256:
        raise ValueError(f"{len(byte_ids)} ids of bytes, not 256")
    tokens = {i: bytes([byte]) for byte, i in enumerate(byte_ids)}
    extra = arrays["extra_bytes"].tobytes()
    ends = np.cumsum(arrays["extra_lengths"], dtype=np.int64).tolist()
    if [0, *ends][-1] != len(extra) or len(ends) != arrays["extra_ids"].size:
        raise ValueError("the extra tokens do not add up")
    for i, start, stop in zip(arrays["extra_ids"].tolist(), [0, *ends], ends, strict=False):
        tokens[i] = extra[start:stop]
    merges = arrays["merges"].reshape(-1, 2).astype(np.int32)
    results = arrays["results"].tolist()
    if not results:
        first = max(byte_ids) + 1
        results = list(range(first, first + len(merges)))
    for (a, b), i in zip(merges.tolist(), results, strict=True):
        if a not in tokens or b not in tokens:
            raise ValueError(f"the merge that makes id {i} joins ids {a} and {b}, not both known")
        tokens[i] = tokens[a] + tokens[b]
    return Vocabulary(
        dict(sorted(tokens.items())),
        merges if header["has_merges"] is True else None,
        {str(name): int(i) for name, i in header["special_tokens"].items()},
        str(header["pattern"]),
        UnicodeClasses(arrays["class_starts"], arrays["class_values"]),
        header["whole_pieces"] is True,
    )


def _looks_like(data: bytes) -> str:
    if not data:
        return ": it is empty"
    if data.lstrip()[:1] == b"{":
        return "; if it is Hugging Face's tokenizer.json, import it: myllm tokenizer import"
    return ""
