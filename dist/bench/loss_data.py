"""What the contenders of ``myllm bench loss`` learn from, packed once and for all of them."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.system import cores
from dist import demo, pack
from dist.data import Windows
from dist.evaluate import load_tokenizer, token_lengths
from dist.pack import eos_of
from dist.shards import MANIFEST, TOKENIZER, read_manifest
from dist.writer import ShardWriter
from reference.types import Array
from tokenizer import train_from_iterator
from tokenizer.files import replace_durably
from tokenizer.read import Source

HELD_OUT = 0.1  # of a text that is given: its end, as nanoGPT takes it
CHARACTERS = "characters.txt"  # which the ids stand for, where there is no tokenizer


class Text(NamedTuple):
    """The packed sets."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train"

    @property
    def heldout(self) -> Path:
        return self.folder / "heldout"

    @property
    def vocab_size(self) -> int:
        return read_manifest(self.train).vocab_size

    def lengths(self) -> Array:
        """Return how many bytes each id stands for."""
        characters = self.folder / CHARACTERS
        if characters.exists():
            known = characters.read_bytes().decode()
            return np.array([len(c.encode()) for c in known], np.int64)
        sha256 = read_manifest(self.train).tokenizer_sha256
        return token_lengths(load_tokenizer(self.train / TOKENIZER, sha256), self.vocab_size)

    def bits_per_nat(self, heldout: Windows, n_windows: int) -> float:
        """Return what makes bits per byte of nats per token, over the first held-out windows."""
        batch = heldout.batch(0, min(n_windows, heldout.dataset.n_windows))
        targets = batch.targets[batch.mask]
        return len(targets) / (math.log(2) * int(self.lengths()[targets].sum()))


def prepare(out: Path, paths: Sequence[str], vocab_size: int) -> Text:
    """Pack the texts, or the demo's corpus where none are given; 0 ids: their characters.

    Of texts that are given the last tenth is held out.

    Raises
    ------
    ValueError, OSError
        When there is too little text.
    """
    text = Text(out / "data")
    if (text.heldout / MANIFEST).exists():
        return text
    if not paths:
        if not vocab_size:
            raise ValueError("characters are learned from a text: give one by --text")
        _prepare_demo(out, text.folder, vocab_size)
        return text
    content = "\n".join(t.decode("utf-8", "replace") for t in Source(paths).texts())
    cut = round((1 - HELD_OUT) * len(content))
    halves = {text.train: content[:cut], text.heldout: content[cut:]}
    if not all(halves.values()):
        raise ValueError(f"{', '.join(paths)}: there is no text to learn from and to hold out")
    shutil.rmtree(text.folder, ignore_errors=True)  # what an interruption has left
    text.folder.mkdir(parents=True)
    if vocab_size:
        tokenizer = train_from_iterator([content[:cut]], vocab_size)
        size, sha256, eos = tokenizer.n_vocab, tokenizer.sha256, eos_of(tokenizer)
        ids = {folder: tokenizer.encode_ordinary(half) for folder, half in halves.items()}
    else:
        known = "".join(sorted(set(content)))
        size, sha256, eos = len(known), "", 0
        number = {character: i for i, character in enumerate(known)}
        ids = {folder: [number[c] for c in half] for folder, half in halves.items()}
        replace_durably(text.folder / CHARACTERS, known.encode())
    for folder, half in ids.items():
        writer = ShardWriter(folder, size, len(half))
        writer.write(np.array(half, np.int32), None)
        if vocab_size:
            tokenizer.save(folder / TOKENIZER)
        writer.finish(
            vocab_size=size, eos=eos, window=None, documents=1, tokenizer_sha256=sha256 or None
        )
    return text


def _prepare_demo(out: Path, folder: Path, vocab_size: int) -> None:
    places = demo.Paths(out)
    demo.prepare_corpus(places)
    known = [text.text for text in demo.read_corpus(places)[0]]
    train_from_iterator(known, vocab_size).save(places.tokenizer)
    settings = pack.Settings(str(places.tokenizer), heldout=demo.HELDOUT)
    pack.pack([str(places.corpus)], folder, settings, processes=cores())
