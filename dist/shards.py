"""Packed tokens on disk: shards, their manifest, and reading windows out of them.

A dataset is a folder::

    manifest.json       format, vocabulary, layout, of each shard its tokens and CRCs, and a
                        checksum of itself
    00000.bin, ...      256 int32 (llm.c's header: magic, version, tokens), then the token ids,
                        uint16, or uint32 for a vocabulary beyond 65,536
    00000.mask, ...     only where some tokens are not to be predicted: the same header, then one
                        uint8 a token, 1 = predict it
    tokenizer.myllm     the tokenizer it was packed with

Its tokens are the shards' one after the other, and window i is tokens[i·T : (i+1)·T]. Windows are
read with plain reads: a shard cut short after it was opened is then an error with a name, where a
memory map would kill the process with SIGBUS. What follows a header is divided into blocks of 1 MiB
with a CRC-32 each; a process checks a block when it first reads from it.

llm.c's own shards and nanoGPT's headerless uint16 files can be opened too, a file at a time.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dist import manifest
from dist.manifest import Count, Crc, crc32
from reference.types import Array

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.myllm"
FORMAT = "myllm-tokens"
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
# dtype of the ids -> (magic, version), as llm.c has them for GPT-2 and for Llama 3
HEADERS: dict[np.dtype[Any], tuple[int, int]] = {
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7),
}
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
BLOCK = 1 << 20  # bytes of a block that has a CRC


class Entry(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of one shard."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{5,}\.bin\Z")]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARD_TOKENS)]
    mask: bool
    crcs: tuple[Crc, ...] = ()  # of the blocks
    mask_crcs: tuple[Crc, ...] = ()
    crc32: Crc | None = None  # of the whole file, in manifests of version 1
    mask_crc32: Crc | None = None

    @property
    def mask_name(self) -> str:
        """The name of the mask's file, where there is one."""
        return str(Path(self.name).with_suffix(".mask"))


class Manifest(manifest.Record, kw_only=True, frozen=True):
    """What a packed folder says of itself."""

    tokens: Count
    documents: Count
    chats: Count | None = None  # of the documents; None: packed by an older version
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    eos: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    window: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None
    tokenizer_sha256: str | None
    dtype: Annotated[str, msgspec.Meta(pattern=r"\Auint(16|32)\Z")]
    shards: tuple[Entry, ...]


def header(dtype: npt.DTypeLike, n_tokens: int) -> bytes:
    """Return the 1,024 bytes before the ids of a shard."""
    ints = np.zeros(HEADER_INTS, "<i4")
    ints[:3] = (*HEADERS[np.dtype(dtype)], n_tokens)
    return ints.tobytes()


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the type of ids below ``vocab_size`` on disk."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class Stream:
    """One file behind its header: bytes that are checked, a block at a time, when first read."""

    def __init__(self, path: Path, offset: int, size: int, crcs: tuple[int, ...] = ()) -> None:
        self.path, self.offset, self.size = path, offset, size  # bytes
        self.crcs = crcs  # of the blocks; empty: there are none
        self._unchecked = set(range(len(crcs)))

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes start .. stop - 1."""
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        if self._unchecked.isdisjoint(blocks):
            return self._raw(start, stop)
        first = blocks.start * BLOCK
        raw = memoryview(self._raw(first, min(blocks.stop * BLOCK, self.size)))
        for block in blocks:
            at = block * BLOCK - first
            if crc32(raw[at : at + BLOCK]) != self.crcs[block]:
                raise ValueError(
                    f"{self.path} has changed since it was packed: the bytes from "
                    f"{self.offset + block * BLOCK:,} on do not have the CRC they were written "
                    "with; pack it again"
                )
            self._unchecked.discard(block)
        return bytes(raw[start - first : stop - first])

    def _raw(self, start: int, stop: int) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start)
            raw = b""
            while piece := file.read(stop - start - len(raw)):
                raw += piece
        if len(raw) < stop - start:
            end = self.offset + start + len(raw)
            raise ValueError(
                f"{self.path} ends at byte {end}, {stop - start - len(raw)} bytes early: it was "
                "cut short while in use; pack it again"
            )
        return raw

    def check(self) -> None:
        """Read all of it."""
        for start in range(0, self.size, BLOCK):
            self.read(start, min(start + BLOCK, self.size))


class Shard(NamedTuple):
    """One file of ids, and its mask where it has one."""

    ids: Stream
    n_tokens: int
    dtype: np.dtype[Any]
    mask: Stream | None

    def read(self, start: int, stop: int) -> Array:
        """Return the ids start .. stop - 1, int32."""
        size = self.dtype.itemsize
        raw = self.ids.read(start * size, stop * size)
        return np.frombuffer(raw, self.dtype.newbyteorder("<")).astype(np.int32)

    def read_mask(self, start: int, stop: int) -> Array:
        """Return which of the tokens start .. stop - 1 are to be predicted, bool."""
        if self.mask is None:
            return np.ones(stop - start, np.bool_)
        return np.frombuffer(self.mask.read(start, stop), np.uint8).astype(np.bool_)


def open_packed(folder: Path, entry: Entry) -> Shard:
    """Open a shard of a packed folder and check that it is the one that its manifest lists.

    Raises
    ------
    ValueError, OSError
        When a file of it is missing, empty, cut short, or another's.
    """
    shard = open_shard(folder / entry.name)
    path = shard.ids.path
    if shard.n_tokens != entry.tokens:
        raise ValueError(
            f"{path} holds {shard.n_tokens:,} tokens, but its manifest says {entry.tokens:,}; "
            "pack again"
        )
    _hold_to_header(path, header(shard.dtype, entry.tokens))
    mask = None
    if entry.mask:
        beside = folder / entry.mask_name
        size = beside.stat().st_size
        if size != HEADER_BYTES + entry.tokens:
            raise ValueError(
                f"{beside} does not fit {path.name} of {entry.tokens:,} tokens (it has {size:,} "
                "bytes): it is cut short or another's; pack again"
            )
        _hold_to_header(beside, header(shard.dtype, entry.tokens))
        mask = Stream(beside, HEADER_BYTES, entry.tokens, entry.mask_crcs)
    ids = Stream(path, shard.ids.offset, shard.ids.size, entry.crcs)
    return shard._replace(ids=ids, mask=mask)


def _hold_to_header(path: Path, expected: bytes) -> None:
    with path.open("rb") as file:
        found = file.read(HEADER_BYTES)
    if found != expected:
        at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise ValueError(f"{path} has a damaged header, at byte {at}; pack it again")


def _head(path: Path) -> tuple[int, Array]:
    """Return the size of a file and the whole int32 that it begins with, 256 at most."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    return size, np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")


def open_shard(path: Path) -> Shard:
    """Open one file of ids and check that its header and its size agree.

    A ``.bin`` file without a header is nanoGPT's: bare uint16.

    Raises
    ------
    ValueError, OSError
        When it is missing, empty, cut short, or no such file.
    """
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
        return Shard(Stream(path, HEADER_BYTES, size - HEADER_BYTES), tokens, dtype, None)
    if path.suffix != ".bin":
        raise ValueError(f"{path} is no token file; of texts `myllm pack` makes a folder of such")
    if size % 2:
        raise ValueError(f"{path} is no token file: no header, and {size:,} bytes are not uint16")
    return Shard(Stream(path, 0, size), size // 2, np.dtype(np.uint16), None)


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
        self.manifest: Manifest | None = None
        if self.path.is_dir():
            self.manifest = read_manifest(self.path)
            self.shards = [open_packed(self.path, entry) for entry in self.manifest.shards]
            packed = self.manifest.window
            if packed not in (None, window):
                raise ValueError(
                    f"{self.path} was packed in windows of {packed} tokens, one a document, but "
                    f"the model's context_length is {window}; pack again with --window {window}"
                )
        elif self.path.exists():
            self.shards = [open_shard(self.path)]
        else:
            where = "" if self.path.is_absolute() else f" in {Path.cwd()}"
            raise FileNotFoundError(
                f"there is no dataset {str(self.path)!r}{where}; make one by `myllm pack`"
            )
        self.n_tokens = sum(shard.n_tokens for shard in self.shards)
        self.n_windows = self.n_tokens // window
        self._ends = np.cumsum([shard.n_tokens for shard in self.shards], dtype=np.int64)
        if not self.n_windows:
            raise ValueError(
                f"{self.path} holds {self.n_tokens:,} tokens, less than one window of {window}; "
                "pack more text, hold more of it out (--heldout) where this is to be held out, or "
                "shorten model.context_length"
            )

    @property
    def vocab_size(self) -> int | None:
        """Of the tokenizer that it was packed with; None for a bare file."""
        return self.manifest.vocab_size if self.manifest else None

    @property
    def eos(self) -> int | None:
        """The id that ends a document."""
        return self.manifest.eos if self.manifest else None

    @property
    def tokenizer_sha256(self) -> str | None:
        """The hash of the tokenizer that it was packed with."""
        return self.manifest.tokenizer_sha256 if self.manifest else None

    @property
    def checksum(self) -> str:
        """Of all that was packed, by its manifest; empty: not known."""
        return self.manifest.checksum if self.manifest else ""

    @property
    def unchecked(self) -> str:
        """What of it cannot be checked when it is read, in a sentence; empty: nothing."""
        if self.manifest is None or self.manifest.sealed:
            return ""
        return (
            f"{self.path} was packed by an older version: its tokens are not checked as they are "
            "read, `myllm pack --check` reads them all, and nothing checks its manifest"
        )

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer file beside the shards; None where they do not name one."""
        return self.path / TOKENIZER if self.tokenizer_sha256 is not None else None

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


def is_packed(folder: Path) -> bool:
    """Tell whether a folder has a manifest of ours, damaged or not; others have such files, too."""
    path = folder / MANIFEST
    return path.is_file() and FORMAT.encode() in path.read_bytes()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a packed folder, checked to be one.

    Raises
    ------
    ValueError, OSError
        When it is missing, damaged, or contradicts itself.
    """
    path = folder / MANIFEST
    if not path.exists():
        why = "it is no packed folder, or packing did not finish"
        within = [str(folder / name) for name in ("train", "heldout") if is_packed(folder / name)]
        if within:
            why = f"name {' or '.join(within)}"
        elif folder.name == "heldout" and is_packed(folder.with_name("train")):
            why = "no text was held out when it was packed (--heldout 0)"
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: {why}")
    found = manifest.read(path, Manifest, FORMAT, "pack again")
    item = np.dtype(found.dtype).itemsize
    for entry in found.shards if found.sealed else ():
        sizes = (entry.tokens * item, entry.tokens * entry.mask)
        if (len(entry.crcs), len(entry.mask_crcs)) != tuple(-(-size // BLOCK) for size in sizes):
            raise ValueError(f"{path} does not have a CRC for each block of {entry.name}")
    if found.tokens != sum(entry.tokens for entry in found.shards):
        raise ValueError(f"{path} is damaged: its shards do not add up to its tokens; pack again")
    return found


def check_crcs(folder: Path) -> int:
    """Read every shard of a folder and compare its CRCs; return how many files were read.

    Raises
    ------
    ValueError
        For the first file whose bytes are not those that were packed.
    """
    streams = 0
    for entry in read_manifest(folder).shards:
        shard = open_packed(folder, entry)
        for stream, whole in ((shard.ids, entry.crc32), (shard.mask, entry.mask_crc32)):
            if stream is None:
                continue
            streams += 1
            stream.check()
            if whole is not None and _file_crc(stream.path) != whole:
                raise ValueError(
                    f"{stream.path} has changed since it was packed (its CRC differs); pack again"
                )
    return streams


def _file_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(BLOCK):
            crc = crc32(piece, crc)
    return crc
