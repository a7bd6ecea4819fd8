"""Writes a packed folder, and can go on where an interrupted one stopped."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dist import shards
from dist.files import sync_folder, write_durably
from reference.types import Array


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
    state : dict, optional
        From ``state`` of an earlier writer: go on from there, dropping what came after.
    """

    def __init__(
        self, folder: Path, vocab_size: int, shard_tokens: int, state: dict[str, Any] | None = None
    ) -> None:
        if not 1 <= shard_tokens <= shards.MAX_SHARD_TOKENS:
            raise ValueError(
                f"a shard holds 1 to {shards.MAX_SHARD_TOKENS:,} tokens, got {shard_tokens:,}"
            )
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = shards.dtype_for(vocab_size)
        self._ids: BinaryIO | None = None
        self._mask: BinaryIO | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if state is None:  # what an earlier writer left unfinished
            for path in [*folder.glob("[0-9]*.bin"), *folder.glob("[0-9]*.mask")]:
                path.unlink()
        state = state or {"finished": [], "open": 0, "masked": False}
        self.finished: list[dict[str, Any]] = list(state["finished"])
        self._open = int(state["open"])  # tokens in the unfinished shard
        if self._open:
            self._ids = self._reopen(".bin", self.dtype.itemsize)
            if state["masked"]:
                self._mask = self._reopen(".mask", 1)

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{len(self.finished):05d}{suffix}"

    def _reopen(self, suffix: str, item: int) -> BinaryIO:
        file = self._path(suffix).open("r+b")
        file.truncate(shards.HEADER_BYTES + self._open * item)
        file.seek(0, os.SEEK_END)
        if file.tell() != shards.HEADER_BYTES + self._open * item:
            raise ValueError(
                f"{file.name} is shorter than this packing's journal says; remove {self.folder}"
            )
        return file

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(int(entry["tokens"]) for entry in self.finished) + self._open

    def write(self, ids: Array, predict: Array | None = None) -> None:
        """Append ids and, unless all are to be predicted, which of them are: bool, as long."""
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + self.shard_tokens - self._open)
            part = slice(start, stop)
            if self._ids is None:
                self._ids = self._path(".bin").open("wb")
                self._ids.write(shards.header(self.dtype, 0))
            if predict is not None and self._mask is None:
                # the first masked token of this shard: all before it are to be predicted
                self._mask = self._path(".mask").open("wb")
                self._mask.write(shards.header(self.dtype, 0))
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

    def state(self) -> dict[str, Any]:
        """Make what was written durable and return what ``__init__`` needs to go on from here."""
        for file in (self._ids, self._mask):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return {"finished": self.finished, "open": self._open, "masked": self._mask is not None}

    def _finish_shard(self) -> None:
        entry: dict[str, Any] = {"name": self._path(".bin").name, "tokens": self._open}
        for key, file, suffix in (
            ("crc32", self._ids, ".bin"),
            ("mask_crc32", self._mask, ".mask"),
        ):
            entry[key] = None
            if file is not None:
                file.seek(0)
                file.write(shards.header(self.dtype, self._open))
                file.flush()
                os.fsync(file.fileno())
                file.close()
                entry[key] = shards.file_crc(self._path(suffix))
        entry["mask"] = self._mask is not None
        self.finished.append(entry)
        self._ids = self._mask = None
        self._open = 0

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Close the last shard and write the manifest, with ``facts`` in it; return it."""
        if self._open:
            self._finish_shard()
        manifest = {
            "format": shards.FORMAT,
            "format_version": shards.FORMAT_VERSION,
            **facts,
            "tokens": self.tokens,
            "dtype": self.dtype.name,
            "shards": self.finished,
        }
        sync_folder(self.folder)
        write_durably(
            self.folder / shards.MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode()
        )
        sync_folder(self.folder)
        return manifest

    def close(self) -> None:
        """Close the files, finished or not."""
        for file in (self._ids, self._mask):
            if file is not None:
                file.close()
