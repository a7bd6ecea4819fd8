"""Weights without the rest of a run: read from a checkpoint, or written as one, part by part.

A part is a parameter, or some rows of one that need not be held whole. Others are filled while one
is written, as many as the memory of the largest and 256 MiB holds (``accel.ahead``).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from accel.ahead import some_ahead
from dist import checkpoint, manifest
from dist.comm import Comm, together
from dist.config import RunFile
from dist.evaluate import load_tokenizer
from dist.manifest import crc32
from dist.monitor import Memory
from dist.places import new_place, steadily
from dist.shards import TOKENIZER
from dist.step import initial_weights
from reference.config import Config
from reference.global_norm import SUM_BLOCK
from reference.ops import Ops
from reference.params import Layout, decoder_layout
from reference.types import Array

if TYPE_CHECKING:
    from tokenizer import Tokenizer

BAND = 32  # rows: of what has blocks along columns, such as Q8_0, whole ones
STRETCH = 4 * SUM_BLOCK  # elements of rows that are read at once: they stay in a cache
PART = 64 * SUM_BLOCK  # elements of rows that are held at once


class Part(NamedTuple):
    """Rows low .. high - 1 of a parameter."""

    name: str
    low: int
    high: int
    shape: tuple[int, ...]
    start: int  # in the flat buffer
    end: int


def parts(layout: Layout, name: str, *, whole: bool) -> Iterator[Part]:
    """Yield a parameter in stretches of its rows, or the whole of it."""
    start, spec = layout.offsets[name]
    rows, *others = spec.shape
    row = math.prod(others)
    step = rows if whole else max(1, PART // row)
    for low in range(0, rows, step):
        high = min(low + step, rows)
        yield Part(name, low, high, (high - low, *others), start + low * row, start + high * row)


class Weights:
    """The weights of a checkpoint, or of the best of a run folder.

    Raises
    ------
    ValueError, OSError
        When there is none, or it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = checkpoint.find(path)
        self.manifest = checkpoint.read_manifest(self.path)
        self.config = checkpoint.model_of(self.manifest)
        self.layout = decoder_layout(self.config)
        self._cutting = checkpoint.cutting_of(self.manifest)
        if self.layout.size != self.manifest.parameters:
            raise ValueError(
                f"{self.path} holds {self.manifest.parameters:,} parameters, but its config "
                f"describes {self.layout.size:,}"
            )

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer beside the weights, where there is one."""
        return self.path / TOKENIZER if self.manifest.tokenizer_sha256 else None

    def read(self, name: str) -> Array:
        """Return one parameter, float32, its CRCs checked."""
        (part,) = parts(self.layout, name, whole=True)
        return np.concatenate([rows for _, rows in self.rows(part)])

    def rows(self, part: Part) -> Iterator[tuple[int, Array]]:
        """Yield some rows of a part at a time, float32, after the number of the first among them.

        They are multiples of 32, but for the last; of a vector, all. The CRCs of all that was
        yielded are checked when the iteration ends.
        """
        n, *others = part.shape
        step = max(1, STRETCH // BAND // math.prod(others)) * BAND if others else n
        low, high = self._cutting.around(part.start, part.end)
        whole = checkpoint.reading(self.path, "master", self.manifest, self._cutting, (low, high))
        with whole as read:
            read(np.empty(part.start - low, "<f4"))
            for first in range(0, n, step):
                some = np.empty((min(step, n - first), *others), "<f4")
                read(some.reshape(-1))
                yield first, some.astype(np.float32, copy=False)
            read(np.empty(high - part.end, "<f4"))


# ---- where a run begins --------------------------------------------------------------------------


def first_weights(
    ops: Ops,
    layout: Layout,
    config: RunFile,
    comm: Comm,
    tokenizer: "Tokenizer | None",
    *,
    fresh: bool,
) -> tuple[Array, str]:
    """Return the weights that a run begins with, on every rank, and a sentence on their origin.

    That is ``train.init``, or the seed alone. The vocabulary may be larger than there: the rows of
    new ids are the mean of the others. The context may be longer or shorter, unless positions are
    learned: then not longer. Dropout may differ.

    Parameters
    ----------
    ops : Ops
    layout : Layout
    config : RunFile
    comm : Comm
    tokenizer : Tokenizer or None
        That of the run's data.
    fresh : bool
        The run has no checkpoint yet; what one goes on with is read later.

    Raises
    ------
    AllRanksError
        When there is no such checkpoint, or it is another model, or one for another tokenizer.
    """
    if not (fresh and config.train.init):
        return initial_weights(ops, layout, config.train.seed), ""
    found: list[Array] = []

    def read() -> str:
        weights = Weights(config.train.init)
        _same_model(weights.config, config.model, weights.path)
        _same_tokenizer(weights, tokenizer)
        flat = ops.from_numpy(np.zeros(layout.size, np.float32))
        for name, view in layout.views(flat).items():  # as ``initial_weights`` does
            ops.accumulate(view, ops.from_numpy(_resized(weights.read(name), view.shape)))
        found.append(flat)  # not a result of ``together``: arrays are not to be sent
        new = config.model.vocab_size - weights.config.vocab_size
        more = f", and {new} new ids, whose rows are the mean of the others" if new else ""
        return f"beginning with the weights of {weights.path}{more}"

    said = together(comm, read)[0]
    return found[0], said


def _resized(parameter: Array, shape: tuple[int, ...]) -> Array:
    """Return a table with rows left out at its end, or with its mean for new rows."""
    rows, new = parameter[: shape[0]], shape[0] - len(parameter)
    if new <= 0:
        return np.ascontiguousarray(rows)
    mean = parameter.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    return np.concatenate([parameter, np.repeat(mean, new, axis=0)])


def _same_model(there: Config, here: Config, path: Path) -> None:
    ours, theirs = here.to_dict(), there.to_dict()
    differ = {name for name in ours if ours[name] != theirs[name]}
    differ -= {name for name in differ if name.startswith("dropout_")}
    if here.vocab_size >= there.vocab_size:
        differ.discard("vocab_size")
    if here.position != "learned" or here.context_length <= there.context_length:
        differ.discard("context_length")
    if differ:
        listed = "; ".join(
            f"model.{name} is {theirs[name]!r} there and {ours[name]!r} here"
            for name in ours
            if name in differ
        )
        raise ValueError(
            f"train.init: {path} holds another model: {listed}. Without [model] the run takes the "
            "model from there; more ids are fine, and so is a longer context unless positions are "
            "learned"
        )


def _same_tokenizer(weights: Weights, tokenizer: "Tokenizer | None") -> None:
    """Refuse data whose ids mean something else to the model."""
    sha = weights.manifest.tokenizer_sha256
    if weights.tokenizer is None or tokenizer is None or tokenizer.sha256 == sha:
        return
    old, new = load_tokenizer(weights.tokenizer, sha).vocabulary, tokenizer.vocabulary
    specials = old.special_tokens.items() <= new.special_tokens.items()
    if not (specials and old == dataclasses.replace(new, special_tokens=old.special_tokens)):
        raise ValueError(
            f"train.init: the data was packed with another tokenizer than that of {weights.path}, "
            f"so its ids mean something else: pack it with {weights.tokenizer}, or with that "
            "tokenizer and more special tokens (myllm tokenizer extend)"
        )


# ---- what was imported ---------------------------------------------------------------------------


def write_weights(
    path: Path,
    config: Config,
    fill: Callable[[Part, Array], None],
    tokenizer: "Tokenizer | None",
    whole: Collection[str] = (),
) -> None:
    """Write a checkpoint that holds weights alone.

    Parameters
    ----------
    path : Path
        A folder that is not there yet.
    config : Config
    fill : callable
        Takes a part and memory of its shape, little-endian float32, and writes it there; called
        for all in the order of the flat buffer, in another thread.
    tokenizer : Tokenizer or None
    whole : collection of str
        The parameters that are to be one part.
    """
    if path.name.startswith("step-"):
        raise ValueError(f"{path} is named as a run names its checkpoints: choose another name")
    layout = decoder_layout(config)
    crcs = [0] * -(-layout.size // SUM_BLOCK)

    def filled(part: Part, flat: Array) -> Array:
        """Fill a part, and go on with the CRCs of the blocks that it lies in."""
        fill(part, flat.reshape(part.shape))
        at, left = part.start, flat
        while left.size:
            block, size = at // SUM_BLOCK, SUM_BLOCK - at % SUM_BLOCK
            crcs[block] = crc32(left[:size].data, crcs[block])
            at, left = at + size, left[size:]
        return flat

    with new_place(path) as part:
        part.mkdir()
        with steadily(part / "master.bin") as file:
            named = [parts(layout, name, whole=name in whole) for name in layout.offsets]
            sizes = [(part, part.end - part.start) for those in named for part in those]
            for flat in some_ahead(filled, sizes):
                file.write(flat.data)
        if tokenizer is not None:
            tokenizer.save(part / TOKENIZER)
        manifest.write(
            part / checkpoint.MANIFEST,
            checkpoint.Manifest(
                format=checkpoint.FORMAT,
                step=0,
                updates=0,
                position=0,
                seed=0,
                tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
                config={"model": config.to_dict()},
                monitor=Memory(),
                parameters=layout.size,
                block=SUM_BLOCK,
                crc32={"master": tuple(crcs)},
            ),
        )
