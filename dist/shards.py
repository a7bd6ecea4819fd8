"""Packed tokens on disk: shards, their manifest, and reading windows out of them.

A dataset is a folder::

    manifest.json       format, vocabulary, layout, and of each shard its tokens and CRC
    00000.bin, ...      256 int32 (llm.c's header: magic, version, tokens), then the token ids,
                        uint16, or uint32 for a vocabulary beyond 65,536
    00000.mask, ...     only where some tokens are not to be predicted: the same header, then one
                        uint8 a token, 1 = predict it
    tokenizer.myllm     the tokenizer it was packed with

Its tokens are the shards' one after the other, and window i is tokens[i·T : (i+1)·T]. Windows are
read with plain reads: a shard cut short after it was opened is then an error with a name, where a
memory map would kill the process with SIGBUS.

llm.c's own shards and nanoGPT's headerless uint16 files can be opened too, a file at a time.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference.types import Array

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.myllm"
FORMAT = "myllm-tokens"
FORMAT_VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
# dtype of the ids -> (magic, version), as llm.c has them for GPT-2 and for Llama 3
HEADERS: dict[np.dtype[Any], tuple[int, int]] = {
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7),
}
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32


def header(dtype: npt.DTypeLike, n_tokens: int) -> bytes:
    """Return the 1,024 bytes before the ids of a shard."""
    ints = np.zeros(HEADER_INTS, "<i4")
    ints[:3] = (*HEADERS[np.dtype(dtype)], n_tokens)
    return ints.tobytes()


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the type of ids below ``vocab_size`` on disk."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def count_windows(n_tokens: int, window: int) -> int:
    """Return how many whole windows there are; the tokens left over are not used."""
    return n_tokens // window


class Shard(NamedTuple):
    """One file of ids, and its mask where it has one."""

    path: Path
    n_tokens: int
    dtype: np.dtype[Any]
    offset: int  # bytes before the first id
    mask: Path | None

    def read(self, start: int, stop: int) -> Array:
        """Return the ids start .. stop - 1, int32."""
        raw = _read(self.path, self.offset + start * self.dtype.itemsize,
                    (stop - start) * self.dtype.itemsize)  # fmt: skip
        return np.frombuffer(raw, self.dtype.newbyteorder("<")).astype(np.int32)

    def read_mask(self, start: int, stop: int) -> Array:
        """Return which of the tokens start .. stop - 1 are to be predicted, bool."""
        if self.mask is None:
            return np.ones(stop - start, np.bool_)
        raw = _read(self.mask, HEADER_BYTES + start, stop - start)
        return np.frombuffer(raw, np.uint8).astype(np.bool_)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        raw = file.read(size)
    if len(raw) < size:
        raise ValueError(
            f"{path} ends at byte {offset + len(raw)}, {size - len(raw)} bytes early: it was cut "
            "short while in use; pack it again"
        )
    return raw


def open_shard(path: Path, mask: bool = False) -> Shard:
    """Open one file of ids and check that its header and its size agree.

    A file without a header is nanoGPT's: bare uint16.

    Raises
    ------
    ValueError, OSError
        When it is missing, empty, cut short, or no such file.
    """
    shard = _open(path)
    if not mask:
        return shard
    beside = path.with_suffix(".mask")
    size, head = _head(beside)
    tokens = int(head[2]) if len(head) == HEADER_INTS else -1
    if tokens != shard.n_tokens or size != HEADER_BYTES + tokens:
        raise ValueError(
            f"{beside} does not fit {path.name} of {shard.n_tokens:,} tokens (it has {size:,} "
            "bytes): it is cut short or another's; pack again"
        )
    return shard._replace(mask=beside)


def _head(path: Path) -> tuple[int, Array]:
    """Return the size of a file and the whole int32 that it begins with, 256 at most."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    return size, np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")


def _open(path: Path) -> Shard:
    size, head = _head(path)
    if size == 0:
        raise ValueError(f"{path} is empty; pack it again")
    for dtype, (magic, version) in HEADERS.items():
        if not len(head) or head[0] != magic:
            continue
        if len(head) < HEADER_INTS or head[1] != version:
            raise ValueError(f"{path} has a damaged header; pack it again")
        tokens = int(head[2])
        expected = HEADER_BYTES + tokens * dtype.itemsize
        if size != expected:
            raise ValueError(
                f"{path} should have {expected:,} bytes for its {tokens:,} tokens but has "
                f"{size:,}: it is {'cut short' if size < expected else 'too long'}; pack it again"
            )
        return Shard(path, tokens, dtype, HEADER_BYTES, None)
    if size % 2:
        raise ValueError(f"{path} is no token file: no header, and {size:,} bytes are not uint16")
    return Shard(path, size // 2, np.dtype(np.uint16), 0, None)


class Dataset:
    """The windows of a packed folder, or of a single ``.bin`` file.

    Parameters
    ----------
    path : path
    window : int
        T, tokens of a window.

    Raises
    ------
    ValueError, OSError
        When anything about it is missing, damaged or does not fit; the message says what.
    """

    def __init__(self, path: str | Path, window: int) -> None:
        self.path, self.window = Path(path), window
        self.manifest: dict[str, Any] = {}
        if self.path.is_dir():
            self.manifest = read_manifest(self.path)
            entries = self.manifest["shards"]
            self.shards = [open_shard(self.path / e["name"], e["mask"]) for e in entries]
            for shard, entry in zip(self.shards, entries, strict=True):
                if shard.n_tokens != entry["tokens"]:
                    raise ValueError(
                        f"{shard.path} holds {shard.n_tokens:,} tokens, but its manifest says "
                        f"{entry['tokens']:,}; pack again"
                    )
            packed = self.manifest["window"]
            if packed not in (None, window):
                raise ValueError(
                    f"{self.path} was packed in windows of {packed} tokens, one a document, but "
                    f"the model's context_length is {window}; pack again with --window {window}"
                )
        elif self.path.exists():
            self.shards = [open_shard(self.path)]
        else:
            raise FileNotFoundError(f"there is no dataset {self.path}; make one by `myllm pack`")
        self.n_tokens = sum(shard.n_tokens for shard in self.shards)
        self.n_windows = count_windows(self.n_tokens, window)
        self._ends = np.cumsum([shard.n_tokens for shard in self.shards], dtype=np.int64)
        if not self.n_windows:
            raise ValueError(
                f"{self.path} holds {self.n_tokens:,} tokens, less than one window of {window}; "
                "pack more text or shorten model.context_length"
            )

    @property
    def vocab_size(self) -> int | None:
        """Of the tokenizer that it was packed with; None for a bare file."""
        return self.manifest.get("vocab_size")

    @property
    def eos(self) -> int | None:
        """The id that ends a document."""
        return self.manifest.get("eos")

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer file beside the shards, when there is one."""
        path = self.path / TOKENIZER
        return path if path.is_file() else None

    def read(self, index: int) -> tuple[Array, Array]:
        """Return window ``index`` and which of its tokens are to be predicted: (T,) each."""
        if not 0 <= index < self.n_windows:
            raise IndexError(f"window {index} lies outside 0..{self.n_windows - 1}")
        start, stop = index * self.window, (index + 1) * self.window
        ids, masks = [], []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first = int(self._ends[number]) - self.shards[number].n_tokens
            end = min(stop, int(self._ends[number]))
            ids.append(self.shards[number].read(start - first, end - first))
            masks.append(self.shards[number].read_mask(start - first, end - first))
            start, number = end, number + 1
        return np.concatenate(ids), np.concatenate(masks)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a packed folder, checked to be one."""
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: it is no packed folder, or packing did not finish"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        good = manifest["format"] == FORMAT and manifest["format_version"] == FORMAT_VERSION
        keys = {"shards", "window", "vocab_size", "eos", "documents", "tokens", "tokenizer_sha256"}
        good = good and keys <= set(manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); pack again") from error
    if not good:
        raise ValueError(f"{path} is not a manifest of this version of MyLLM; pack again")
    return dict(manifest)


def file_crc(path: Path) -> int:
    """Return the CRC-32 of a whole file."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc


def check_crcs(folder: Path) -> int:
    """Read every shard of a folder and compare its CRC; return how many files were read.

    Raises
    ------
    ValueError
        For the first file whose bytes are not those that were packed.
    """
    files = 0
    for entry in read_manifest(folder)["shards"]:
        open_shard(folder / entry["name"], entry["mask"])
        for name, crc in ((entry["name"], entry["crc32"]), (_mask(entry), entry["mask_crc32"])):
            if crc is None:
                continue
            files += 1
            if file_crc(folder / name) != crc:
                raise ValueError(
                    f"{folder / name} has changed since it was packed (its CRC differs)"
                )
    return files


def _mask(entry: dict[str, Any]) -> str:
    return str(Path(entry["name"]).with_suffix(".mask"))
