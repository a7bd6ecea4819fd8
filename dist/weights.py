"""Weights without the rest of a run: read from a checkpoint, or written as one, part by part.

A part is a parameter, or some rows of one that need not be held whole. Others are filled while one
is written, as many as the memory of the largest and 256 MiB holds (``accel.ahead``).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from accel.ahead import in_order, some_ahead
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
# elements of rows that are read at once, some bands of 32 where rows are wide: they stay in a cache
STRETCH = 10 * SUM_BLOCK
STRIP = 32 * SUM_BLOCK  # elements of rows that a thread reads and converts
PART = 64 * SUM_BLOCK  # elements of rows that are held at once


class Part(NamedTuple):
    """Rows low .. high - 1 of a parameter."""

    name: str
    low: int
    high: int
    shape: tuple[int, ...]


def parts(layout: Layout, name: str, *, whole: bool) -> Iterator[Part]:
    """Yield a parameter in stretches of its rows, or the whole of it."""
    shape = layout.offsets[name][1].shape
    part = Part(name, 0, shape[0], shape)
    yield from [part] if whole else strips(part, PART)


def strips(part: Part, size: int = STRIP) -> Iterator[Part]:
    """Yield a part in strips of its rows: 32 at least, and else no more than ``size`` elements."""
    rows, *others = part.shape
    step = max(1, size // BAND // math.prod(others)) * BAND
    for low in range(0, rows, step):
        n = min(step, rows - low)
        yield Part(part.name, part.low + low, part.low + low + n, (n, *others))


class Weights:
    """The weights of a checkpoint, or of the best of a run folder.

    Raises
    ------
    ValueError, OSError
        When there is none, or it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        from dist.numbers import KINDS, places  # and Numba with it: who reads none does without

        self.path = checkpoint.find(path)
        self.manifest = checkpoint.read_manifest(self.path)
        self.config = checkpoint.model_of(self.manifest)
        self.layout = decoder_layout(self.config)
        self._cutting = checkpoint.cutting_of(self.manifest)
        self._places = places(self.layout, self.manifest.kinds)
        self._kinds = {name: KINDS[self.kind(name)] for name in self.layout.offsets}
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
        found = np.empty(self.layout.offsets[name][1].shape, np.float32)
        self._read_into(name, found)
        return found

    def master(self) -> Array:
        """Return all of them: (parameters,) float32."""
        flat = np.empty(self.layout.size, np.float32)
        views = self.layout.views(flat)
        for _ in in_order(lambda name: self._read_into(name, views[name]), views):
            pass
        return flat

    def _read_into(self, name: str, out: Array) -> None:
        (part,) = parts(self.layout, name, whole=True)
        for first, kept in self.rows(part):
            rows = self._kinds[name].decode(kept)
            out[first : first + len(rows)] = rows

    def kind(self, name: str) -> str:
        """Return the kind of numbers that a parameter is kept as."""
        return self.manifest.kinds.get(name, "F32")

    def rows(self, part: Part) -> Iterator[tuple[int, Array]]:
        """Yield some rows of a part at a time, as they are kept, after the number of the first.

        They are multiples of 32, but for the last; of a vector, all. The next lie where these did.
        The CRCs of all that was yielded are checked when the iteration ends.
        """
        n, *others = part.shape
        step = max(1, STRETCH // BAND // math.prod(others)) * BAND if others else n
        kind = self._kinds[part.name]
        array, width = (checkpoint.KEPT, 1) if self.manifest.kinds else ("master", 4)
        start = self._places[part.name] + kind.n_bytes(part.low * math.prod(others))
        end = start + kind.n_bytes(math.prod(part.shape))
        blocks = self._cutting.around(start // width, end // width)
        whole = checkpoint.reading(self.path, array, self.manifest, self._cutting, blocks)
        with whole as read:
            read(np.empty(start - width * blocks[0], np.uint8))
            room = np.empty(kind.shape((min(step, n), *others)), kind.element)
            for first in range(0, n, step):
                some = room[: kind.row(n - first) if others else n]
                read(some.reshape(-1))
                yield first, some
            read(np.empty(width * blocks[1] - end, np.uint8))


def load_master(path: str | Path) -> Array:
    """Return the weights of a checkpoint, or of the best of a run folder: (parameters,) float32."""
    return Weights(path).master()


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
        The run has no checkpoint yet. What one goes on with is read later: zeros until then.

    Raises
    ------
    AllRanksError
        When there is no such checkpoint, or it is another model, or one for another tokenizer.
    """
    if not fresh:
        return ops.from_numpy(np.zeros(layout.size, np.float32)), ""
    if not config.train.init:
        return initial_weights(ops, layout, config.train.seed), ""
    found: list[Array] = []

    def read() -> str:
        weights = Weights(config.train.init)
        _same_model(weights.config, config.model, weights.path)
        same_tokenizer(weights.path, weights.manifest.tokenizer_sha256, tokenizer)
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


def same_tokenizer(path: Path, sha256: str | None, tokenizer: "Tokenizer | None") -> None:
    """Refuse data whose ids mean something else to the model of a checkpoint.

    Raises
    ------
    ValueError, OSError
        When both tokenizers are known, and that of the data has not the other's ids.
    """
    if not sha256 or tokenizer is None or tokenizer.sha256 == sha256:
        return
    old, new = load_tokenizer(path / TOKENIZER, sha256).vocabulary, tokenizer.vocabulary
    specials = old.special_tokens.items() <= new.special_tokens.items()
    if not (specials and old == dataclasses.replace(new, special_tokens=old.special_tokens)):
        raise ValueError(
            f"the data was packed with another tokenizer than that of {path}, so its ids mean "
            f"something else: pack it with {path / TOKENIZER}, or with that tokenizer and more "
            "special tokens (myllm tokenizer extend)"
        )


# ---- what was imported ---------------------------------------------------------------------------


def write_weights(
    path: Path,
    config: Config,
    fill: Callable[[Part, Array], None],
    tokenizer: "Tokenizer | None",
    whole: Collection[str] = (),
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a checkpoint that holds weights alone.

    Parameters
    ----------
    path : Path
        A folder that is not there yet.
    config : Config
    fill : callable
        Takes a part and memory for its elements, and writes them there; called for all in the order
        of the flat buffer, in another thread.
    tokenizer : Tokenizer or None
    whole : collection of str
        The parameters that are to be one part.
    kinds : mapping of str
        The parameters that are kept in fewer bits than float32 has, and the kinds of their numbers.
    """
    from dist.numbers import KINDS, places, size_of

    if path.name.startswith("step-"):
        raise ValueError(f"{path} is named as a run names its checkpoints: choose another name")
    layout = decoder_layout(config)
    array, block = (checkpoint.KEPT, SUM_BLOCK) if kinds else ("master", 4 * SUM_BLOCK)  # bytes
    crcs = [0] * -(-places(layout, kinds)[""] // block)
    at = 0

    def n_bytes(part: Part) -> int:
        return size_of(math.prod(part.shape), kinds.get(part.name, "F32"))

    def filled(part: Part, room: Array) -> Array:
        """Fill a part, and go on with the CRCs of the blocks that it lies in."""
        nonlocal at
        kind = kinds.get(part.name, "F32")
        left = room.view(np.uint8)[: n_bytes(part)]
        fill(part, left.view(KINDS[kind].element).reshape(KINDS[kind].shape(part.shape)))
        done = left
        while left.size:
            number, size = at // block, block - at % block
            crcs[number] = crc32(left[:size].data, crcs[number])
            at, left = at + min(size, left.size), left[size:]
        return done

    with new_place(path) as part:
        part.mkdir()
        with steadily(part / f"{array}.bin") as file:
            named = [parts(layout, name, whole=name in whole) for name in layout.offsets]
            sizes = [(part, -(-n_bytes(part) // 4)) for those in named for part in those]
            for written in some_ahead(filled, sizes):
                file.write(written.data)
        if tokenizer is not None:
            tokenizer.save(part / TOKENIZER)
        manifest.write(
            part / checkpoint.MANIFEST,
            checkpoint.Manifest(
                format=checkpoint.FORMAT,
                format_version=manifest.NEWEST if kinds else manifest.SEALED_SINCE,
                step=0,
                updates=0,
                position=0,
                seed=0,
                tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
                config={"model": config.to_dict()},
                monitor=Memory(),
                parameters=layout.size,
                block=SUM_BLOCK,
                crc32={array: tuple(crcs)},
                kinds=dict(kinds),
            ),
        )
