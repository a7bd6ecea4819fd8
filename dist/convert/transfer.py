"""From tensors in files to a checkpoint: all there, none over, each of the right shape."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from accel.ahead import in_order
from dist.convert.mapping import Family, Tensor, named, shown
from dist.convert.tensors import Stored
from dist.numbers import KINDS, turned
from dist.weights import Part
from reference.config import Config
from reference.types import Array

if TYPE_CHECKING:
    from tokenizer import Tokenizer


class Found(NamedTuple):
    """A model of others, as it lies in their files."""

    family: Family
    config: Config
    stored: Mapping[str, Stored]
    kinds: tuple[str, ...]  # of numbers that such files hold
    tokenizer: "Tokenizer | None"
    notes: list[str]  # sentences on what does not come along


class Written(NamedTuple):
    """What was written."""

    family: Family
    notes: list[str]  # sentences for the person who asked


class Parameters(NamedTuple):
    """What ``write_weights`` asks of a model of others."""

    fill: Callable[[Part, Array], None]
    whole: set[str]
    kinds: dict[str, str]


def parameters(found: Found, where: Path) -> Parameters:
    """Return how a model of theirs becomes ours: its numbers are kept as they are.

    Vectors are kept as float32, and so are parameters whose tensors are not all of one kind.

    Raises
    ------
    ValueError
        When a tensor is missing, not known, or of another shape or type; the message names it.
    """
    tensors = found.family.tensors(found.config)
    stored = _named(found, where)
    for tensor in tensors:
        kind = stored[tensor.name].kind
        if kind not in found.kinds:
            raise ValueError(
                f"{where}: the tensor {tensor.name} holds {shown(kind)}; known are "
                f"{', '.join(found.kinds)}"
            )
        if stored[tensor.name].shape != tensor.shape:
            raise ValueError(
                f"{where}: the tensor {tensor.name} has shape {stored[tensor.name].shape}, but the "
                f"configuration asks for {tensor.shape}"
            )
    of: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        of.setdefault(tensor.ours, []).append(tensor)
    kinds = {}
    for name, those in of.items():
        (kind, *others) = {stored[tensor.name].kind for tensor in those}
        if kind != "F32" and not others and len(those[0].shape) > 1:
            kinds[name] = turned(kind) if those[0].transposed else kind

    def fill(part: Part, ours: Array) -> None:
        def fetch(at: tuple[Tensor, tuple[int, int]]) -> None:
            tensor, (low, high) = at
            theirs, kind = stored[tensor.name].raw(low, high), KINDS[stored[tensor.name].kind]
            if not kind.finite(theirs):
                raise ValueError(f"{where}: the tensor {tensor.name} is not finite everywhere")
            if part.name not in kinds:
                theirs = kind.decode(theirs)
            tensor.put(ours, part.low, low, high, theirs)

        chunks = (
            (t, chunk)
            for t in of[part.name]
            for chunk in t.chunks(part.low, part.high, KINDS[stored[t.name].kind])
        )
        for _ in in_order(fetch, chunks):
            pass

    return Parameters(fill, {tensor.ours for tensor in tensors if not tensor.by_rows}, kinds)


def _named(found: Found, where: Path) -> dict[str, Stored]:
    """Return the stored tensors by the names that the family has for them, exactly those."""
    family = found.family
    stored = dict(found.stored)
    if family.prefix and not any(name.startswith(family.prefix) for name in stored):
        heads = family.head_names
        stored = {n if n in heads else family.prefix + n: at for n, at in stored.items()}
    stored = {
        name: at
        for name, at in stored.items()
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored)
    }
    expected = {tensor.name for tensor in family.tensors(found.config)}
    missing = [name for name in sorted(expected) if name not in stored]
    if missing:
        raise ValueError(f"{where} has no tensor {named(missing)}")
    surplus = [name for name in sorted(stored) if name not in expected]
    if found.config.tied:  # some write the head although it is the embedding
        for name in [name for name in surplus if name in family.head_names]:
            if not _equal(stored[name], stored[family.embedding_name]):
                raise ValueError(
                    f"{where}: the tensor {name} differs from {family.embedding_name}, although "
                    "the configuration says that they are one (tied)"
                )
            surplus.remove(name)
    if surplus:
        raise ValueError(f"{where} has a tensor that {family.name} does not know: {named(surplus)}")
    return {name: stored[name] for name in expected}


def _equal(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape or one.kind != other.kind:
        return False
    step = max(1, (1 << 22) // max(1, int(np.prod(one.shape[1:], dtype=np.int64))))
    return all(
        np.array_equal(
            one.raw(i, min(i + step, one.shape[0])), other.raw(i, min(i + step, one.shape[0]))
        )
        for i in range(0, one.shape[0], step)
    )
