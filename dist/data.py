"""From windows of token ids to what the model is fed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist.config import RunFile
from dist.order import DataOrder, Mixture
from dist.shards import Dataset
from reference.ops import Ops
from reference.types import Array


class Batch(NamedTuple):
    """One micro-batch: B windows of T tokens."""

    ids: Array  # (B, T) int32
    targets: Array  # (B, T) int32, the token after each
    mask: Array  # (B, T) bool, which targets count; never the last, whose target is unknown
    documents: Array | None  # (B, T) int32, when attention stays within a document


def on_backend(ops: Ops, batch: Batch) -> Batch:
    """Return a batch as a backend's own arrays, in the order that the loss takes them."""
    documents = None if batch.documents is None else ops.from_numpy(batch.documents)
    ids, targets, mask = (ops.from_numpy(array) for array in batch[:3])
    return Batch(ids, targets, mask, documents)


def make_batch(windows: Sequence[tuple[Array, Array]], eos: int | None = None) -> Batch:
    """Make a micro-batch of windows (ids, to be predicted), each (T,).

    ``targets[b, t] = ids[b, t + 1]``, counted where that token is to be predicted. With ``eos``,
    attention is kept within documents: one ends with its eos.
    """
    ids = np.stack([window for window, _ in windows])
    predict = np.stack([mask for _, mask in windows])
    targets = np.zeros_like(ids)
    targets[:, :-1] = ids[:, 1:]
    mask = np.zeros_like(predict)
    mask[:, :-1] = predict[:, 1:]
    documents = None
    if eos is not None:
        ends = (ids == eos).astype(np.int32)
        documents = np.cumsum(ends, axis=1, dtype=np.int32) - ends
    return Batch(ids, targets, mask, documents)


def any_known(facts: Iterable[bool | None]) -> bool | None:
    """Return whether any holds; None where that is not known, since some are not."""
    given = list(facts)
    return True if True in given else None if None in given else False


class Windows:
    """Micro-batches of one dataset, its ids checked against the model's vocabulary.

    Raises
    ------
    ValueError, OSError
        When the dataset cannot be used with this model.
    """

    def __init__(self, path: str, config: RunFile) -> None:
        self.dataset = Dataset(path, config.window)
        self.vocab_size = config.model.vocab_size
        known = self.dataset.vocab_size
        if known is not None and known > self.vocab_size:
            raise ValueError(
                f"{path} was packed with {known} token ids, but model.vocab_size is "
                f"{self.vocab_size}; set it to {known} or more"
            )
        self.eos = self.dataset.eos if config.data.isolate_documents else None
        if config.data.isolate_documents and self.eos is None:
            raise ValueError(
                f"data.isolate_documents needs to know where documents end, but {path} has no eos"
            )

    def read(self, index: int) -> tuple[Array, Array]:
        """Return one window and which of its tokens are to be predicted."""
        ids, predict = self.dataset.read(index)
        greatest = int(ids.max())
        if greatest >= self.vocab_size:
            raise ValueError(
                f"window {index} of {self.dataset.path} holds token id {greatest}, but "
                f"model.vocab_size is {self.vocab_size}"
            )
        return ids, predict

    def batch(self, start: int, stop: int) -> Batch:
        """Return the windows start .. stop - 1 as they lie."""
        return make_batch([self.read(i) for i in range(start, stop)], self.eos)

    def has_targets(self, n_windows: int) -> bool:
        """Say whether any token of the first windows is to be predicted."""
        first = range(min(n_windows, self.dataset.n_windows))
        return any(self.batch(i, i + 1).mask.any() for i in first)


def held_out(config: RunFile) -> list[Windows]:
    """Return the held-out sets of a run, in the order of its file."""
    return [Windows(path, config) for path in config.data.heldout_sets]


def short_names(paths: Sequence[str]) -> list[str]:
    """Return what tells paths apart: data/web/heldout and data/code/heldout are web and code."""
    names = [list(Path(path).parts) for path in paths]
    for end in (-1, 0):
        while all(len(parts) > 1 for parts in names) and len({p[end] for p in names}) == 1:
            for parts in names:
                del parts[end]
    return ["/".join(parts) for parts in names]


class TrainingData:
    """The windows of a run in the order in which it takes them."""

    def __init__(self, config: RunFile) -> None:
        phases = [phase.sources for phase in config.data.phases]
        paths = [source.path for phase in phases for source in phase] or [config.data.train]
        names = list(dict.fromkeys(paths))
        self.sources = [Windows(name, config) for name in names]
        mixtures = [
            Mixture(
                steps * config.train.global_batch,
                tuple(names.index(source.path) for source in phase) if phase else (0,),
                tuple(source.weight for source in phase) if phase else (1.0,),
            )
            for steps, phase in zip(config.phase_steps, phases or [()], strict=True)
        ]
        sizes = [source.dataset.n_windows for source in self.sources]
        self.order = DataOrder(config.train.seed, sizes, mixtures)
        tokenizers = {source.dataset.tokenizer_sha256 for source in self.sources}
        if len(tokenizers) > 1:
            raise ValueError(f"{', '.join(names)} were not all packed with the same tokenizer")
        self.tokenizer_sha256: str | None = tokenizers.pop()

    @property
    def chats(self) -> bool | None:
        """Whether there are chats among its documents; None: not known."""
        manifests = [source.dataset.manifest for source in self.sources]
        counts = [None if m is None else m.chats for m in manifests]
        return any_known(None if n is None else n > 0 for n in counts)

    def batch(self, position: int, count: int) -> Batch:
        """Return ``count`` windows from ``position`` of the run on."""
        windows, eos = [], None
        for p in range(position, position + count):
            place = self.order[p]
            source = self.sources[place.source]
            windows.append(source.read(place.window))
            eos = source.eos
        return make_batch(windows, eos)
