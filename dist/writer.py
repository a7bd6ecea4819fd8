"""Writes a packed folder, and can go on where an interrupted one stopped."""

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from accel.system import sync_folder
from dist import manifest, shards
from dist.manifest import Count, Crc, crc32
from reference.types import Array
from tokenizer.files import writing


def is_shard_file(name: str) -> bool:
    """Tell whether a file of a packed folder has a name that a writer gives."""
    return re.fullmatch(r"[0-9]{5,}\.(bin|mask)", name) is not None


class StreamState(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Of a file that is being written: what has the CRCs of what was written into it."""

    size: Count  # bytes behind the header
    crcs: tuple[Crc, ...]  # of the blocks that have begun; the last may not be full


class WriterState(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a writer needs to go on."""

    finished: tuple[shards.Entry, ...] = ()
    open: Annotated[int, msgspec.Meta(ge=0, le=shards.MAX_SHARD_TOKENS)] = 0  # tokens, unfinished
    ids: StreamState | None = None
    mask: StreamState | None = None


class _Stream:
    """A file behind its header, and the CRC of each block of what was written into it."""

    def __init__(self, path: Path, dtype: np.dtype[Any], state: StreamState | None = None) -> None:
        self.path, self.dtype = path, dtype
        self.size = state.size if state else 0
        self.crcs = list(state.crcs) if state else []
        self._file = path.open("r+b" if state else "xb")  # x: never through a link
        end = shards.HEADER_BYTES + self.size
        if state is None:
            self._file.write(shards.header(dtype, 0))
            return
        if os.fstat(self._file.fileno()).st_size < end:
            self._file.close()
            raise ValueError(
                f"{path} is shorter than this packing's journal says; remove {path.parent.parent} "
                "and pack again"
            )
        self._file.truncate(end)
        self._file.seek(end)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        left = memoryview(data)
        while left:
            at = self.size % shards.BLOCK
            piece, left = left[: shards.BLOCK - at], left[shards.BLOCK - at :]
            if not at:
                self.crcs.append(0)
            self.crcs[-1] = crc32(piece, self.crcs[-1])
            with writing(self.path):
                self._file.write(piece)
            self.size += len(piece)

    def state(self) -> StreamState:
        """Make what was written durable and return it."""
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        return StreamState(size=self.size, crcs=tuple(self.crcs))

    def finish(self, n_tokens: int) -> tuple[int, ...]:
        """Say in the header how many tokens there are, close, and return the CRCs."""
        self._file.seek(0)
        self._file.write(shards.header(self.dtype, n_tokens))
        self.state()
        self.close()
        return tuple(self.crcs)

    def close(self) -> None:
        """Close the file, finished or not."""
        with writing(self.path):
            self._file.close()


class ShardWriter:
    """Appends tokens to the shards of one folder.

    Nothing of the result depends on how the tokens were cut into calls.

    Parameters
    ----------
    folder : path
    vocab_size : int
        Decides between uint16 and uint32.
    shard_tokens : int
        Tokens of a full shard.
    state : WriterState, optional
        From ``state`` of an earlier writer: go on from there, dropping what came after.

    Raises
    ------
    ValueError, OSError
        When the folder holds no such state, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        shard_tokens: int,
        state: WriterState = WriterState(),  # noqa: B008  (frozen)
    ) -> None:
        if not 1 <= shard_tokens <= shards.MAX_SHARD_TOKENS:
            raise ValueError(
                f"a shard holds 1 to {shards.MAX_SHARD_TOKENS:,} tokens, got {shard_tokens:,}"
            )
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = shards.dtype_for(vocab_size)
        self.finished = list(state.finished)
        self._open = state.open
        self._ids: _Stream | None = None
        self._mask: _Stream | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # what an earlier writer wrote behind that state
            if is_shard_file(path.name):
                ours = [state.ids, state.mask][path.suffix == ".mask"]
                if int(path.stem) > len(self.finished) - (ours is None):
                    path.unlink()
        if state.ids is not None:
            self._ids = self._stream(".bin", state.ids)
        if state.mask is not None:
            self._mask = self._stream(".mask", state.mask)

    def _stream(self, suffix: str, state: StreamState | None = None) -> _Stream:
        return _Stream(self.folder / f"{len(self.finished):05d}{suffix}", self.dtype, state)

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(entry.tokens for entry in self.finished) + self._open

    def write(self, ids: Array, predict: Array | None = None) -> None:
        """Append ids and, unless all are to be predicted, which of them are: bool, as long."""
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + self.shard_tokens - self._open)
            part = slice(start, stop)
            if self._ids is None:
                self._ids = self._stream(".bin")
            if predict is not None and self._mask is None:
                # the first masked token of this shard: all before it are to be predicted
                self._mask = self._stream(".mask")
                self._mask.write(b"\1" * self._open)
            self._ids.write(ids[part].astype(self.dtype.newbyteorder("<")).tobytes())
            if self._mask is not None:
                ones = np.ones(stop - start, np.uint8)
                self._mask.write(
                    (ones if predict is None else predict[part].astype(np.uint8)).tobytes()
                )
            self._open += stop - start
            start = stop
            if self._open == self.shard_tokens:
                self._finish_shard()

    def state(self) -> WriterState:
        """Make what was written durable and return what ``__init__`` needs to go on from here."""
        sync_folder(self.folder)
        return WriterState(
            finished=tuple(self.finished),
            open=self._open,
            ids=self._ids.state() if self._ids else None,
            mask=self._mask.state() if self._mask else None,
        )

    def _finish_shard(self) -> None:
        assert self._ids is not None
        self.finished.append(
            shards.Entry(
                name=self._ids.path.name,
                tokens=self._open,
                mask=self._mask is not None,
                crcs=self._ids.finish(self._open),
                mask_crcs=self._mask.finish(self._open) if self._mask is not None else (),
            )
        )
        self._ids = self._mask = None
        self._open = 0

    def finish(self, **facts: Any) -> shards.Manifest:
        """Close the last shard and write the manifest, with ``facts`` in it; return it."""
        if self._open:
            self._finish_shard()
        packed = shards.Manifest(
            format=shards.FORMAT,
            tokens=self.tokens,
            dtype=self.dtype.name,
            shards=tuple(self.finished),
            **facts,
        )
        sync_folder(self.folder)
        manifest.write(self.folder / shards.MANIFEST, packed)
        return packed

    def close(self) -> None:
        """Close the files, finished or not."""
        with ExitStack() as stack:  # all, also where one cannot be: its disk is full
            for stream in (self._ids, self._mask):
                if stream is not None:
                    stack.callback(stream.close)
