"""Packing small texts, and what it wrote."""

from pathlib import Path
from typing import Any

import pytest

from dist import cli, pack
from dist.shards import Dataset, read_manifest
from reference.types import Array
from tokenizer import Tokenizer


def run(corpus: Path, out: Path, tokenizer_file: Path, *arguments: str) -> int:
    words = ["pack", str(corpus), "--tokenizer", str(tokenizer_file), "-o", str(out)]
    words += ["--processes", "1"]  # as quick for so little text; a later one replaces it
    return cli.main([*words, *arguments])


def tokens_of(folder: Path) -> Array:
    return Dataset(folder, read_manifest(folder).tokens).read(0)[0]


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def eos_behind(tokenizer_file: Path, texts: list[str]) -> list[int]:
    t = Tokenizer.load(tokenizer_file)
    return [i for text in texts for i in [*t.encode_ordinary(text), t.special_tokens["<|eos|>"]]]


def interrupt(monkeypatch: pytest.MonkeyPatch, *, batch: int, document: int) -> list[Any]:
    """Have Ctrl-C come at a document that is encoded; return those that were, as they come.

    All before its batch are in the journal then.
    """
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", batch)
    monkeypatch.setattr(pack, "JOURNAL_SECONDS", 0.0)
    original, encoded = pack.Encoder.encode, []

    def encode(self: pack.Encoder, given: Any) -> Any:
        encoded.append(given)
        if len(encoded) == document:
            raise KeyboardInterrupt
        return original(self, given)

    monkeypatch.setattr(pack.Encoder, "encode", encode)
    return encoded
