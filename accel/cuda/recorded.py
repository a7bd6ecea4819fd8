"""Work that a GPU is asked for again and again: recorded once, and from then on sent as one.

A token of a model, or the gradient of a micro-batch, is hundreds of launches, and Python takes
longer to ask for many of them than the GPU to do them. They are the same each time but for what
lies in the arrays: within a step of the arena these have the same addresses every time. So whatever
differs has to be in the GPU's memory, and nothing may be read from there in between: what depends
on it is worked out on the GPU, or looked at when all is done.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from accel.cuda import embedding, loss, rope
from accel.cuda.arrays import contiguous, copy
from accel.cuda.device import Device, current
from accel.cuda.embedding import EmbeddingCache
from accel.cuda.loss import LinearCrossEntropyCache, losses_of
from accel.cuda.rope import RopeCache
from reference.ops import Ops
from reference.types import Array, Loss, RopeScaling

KINDS = 32  # of work that a device keeps: other models, buffers for gradients, caches, rows
Results = tuple[Array, ...]
Work = TypeVar("Work")
Found = TypeVar("Found")


def kept(make: Callable[[Device], Work], what: tuple[Any, ...], *given: Iterable[Array]) -> Work:
    """Return the work of a kind that the device in use keeps, made when it is first asked for.

    Parameters
    ----------
    make : callable
    what : tuple
        What tells kinds apart, beside these.
    *given : iterables of Array
        What the work is given where it lies: launches are told addresses, so they are right for as
        long as these are.
    """
    device = current()
    works, key = device.recordings, (what, *map(device.identities, given))
    if key not in works:
        works[key] = make(device)
        if len(works) > KINDS:
            works.popitem(last=False)
    works.move_to_end(key)
    work: Work = works[key]
    return work


class Recorded:
    """Calls of a device with the same arguments each time.

    The first time they are made one by one, which loads kernels and shows how much memory their
    arrays take. With the second they are recorded, and again where the arena has moved since.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._results: Results | None = None  # where they are copied to: not in the arena
        self._moves = -1  # of the arena, when the calls were recorded
        self._constants: dict[Hashable, Array] = {}

    def __call__(self, run: Callable[[], Results], read: Callable[[Results], Found]) -> Found:
        """Do what ``run`` asks for, and return what ``read`` finds in its results.

        ``run`` is called twice or so, ``read`` each time. Within a step it is called each time.
        """
        device, arena = self._device, self._device.arena
        if arena.open:
            return read(run())
        if self._results is None:
            with arena.step():
                results = run()
                own = tuple(device.empty(x.shape, x.dtype) for x in results)
                _copy_all(own, results)
                del results  # before the step ends, which gives memory back
            self._results = own
        else:
            if self._moves != arena.moves:
                self._record(run, self._results)
            self._again()
        return read(self._results)

    def _record(self, run: Callable[[], Results], own: Results) -> None:
        def calls() -> None:
            _copy_all(own, run())

        arena, missed = self._device.arena, -1
        while missed != arena.missed:  # until all arrays lie in it
            missed = arena.missed
            with arena.step():
                self._again = self._device.record(calls)
        self._moves = arena.moves

    def constant(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """Return what is sent to the GPU once, for all times."""
        if key not in self._constants:
            with self._device.arena.lasting():
                self._constants[key] = make()
        return self._constants[key]


def _copy_all(to: Results, arrays: Results) -> None:
    for own, x in zip(to, arrays, strict=True):
        copy(own, x)


class Inputs:
    """Arrays with addresses of their own, into which those of each time are copied."""

    def __init__(self, device: Device, like: Sequence[Array | None]) -> None:
        self.arrays: list[Any] = [
            None if x is None else device.empty(x.shape, x.dtype) for x in like
        ]

    def take(self, given: Sequence[Array | None]) -> None:
        """Copy arrays of the same shapes and types."""
        for own, x in zip(self.arrays, given, strict=True):
            if own is not None and x is not None:
                copy(own, x)


class RecordedOps:
    """A backend's ops, but for those that would read from the GPU, or send something to it.

    Parameters
    ----------
    ops : module
    recorded : Recorded
    context : int
        The model's.

    Attributes
    ----------
    losses : Array
        (N,) float32 of each target, once ``linear_cross_entropy_forward`` was called.
    """

    losses: Array

    def __init__(self, ops: Ops, recorded: Recorded, context: int) -> None:
        self._ops, self._constant, self._context = ops, recorded.constant, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def from_numpy(self, array: Array, *, activation: bool = False) -> Array:
        """Return an array that is the same each time: slopes, positions, the table of sines."""
        digest = hashlib.sha256(np.ascontiguousarray(array).data).digest()
        key = digest, array.shape, str(array.dtype), activation
        return self._constant(key, lambda: self._ops.from_numpy(array, activation=activation))

    def embedding_forward(self, ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
        """Return table[ids], of ids that are looked at afterwards."""
        ids = contiguous(ids)
        return self._ops.lookup(ids, table), EmbeddingCache(ids.reshape(-1), table.shape)

    def embedding_backward(
        self, dout: Array, cache: EmbeddingCache, *, out: Array, accumulate: bool
    ) -> Array:
        """Write the gradient of the table, or add it."""
        return embedding.embedding_backward(dout, cache, out=(out,), accumulate=accumulate)

    def rope_forward(
        self,
        x: Array,
        *,
        base: float,
        start: int | Array,
        rotate_heads: int | None,
        scaling: RopeScaling | None,
    ) -> tuple[Array, RopeCache]:
        """Turn x (B, T, H, d), whose rows begin at position 0, or ``start`` (B,) of the GPU's."""
        _, T, H, d = x.shape
        starts, length = (None, T) if isinstance(start, int) else (start, self._context)
        every = base, scaling, (0,), length, d
        table = self._constant(every, lambda: rope.table(current(), *every))
        cache = RopeCache(table, H if rotate_heads is None else rotate_heads, starts)
        return rope.rotate(x, cache), cache

    def rope_backward(self, dout: Array, cache: RopeCache) -> Array:
        """Turn the gradient back."""
        return rope.rotate(dout, cache, -1.0)

    def linear_cross_entropy_forward(
        self,
        x: Array,
        head: Array,
        targets: Array,
        mask: Array | None,
        bias: Array | None,
        *,
        need_backward: bool,
    ) -> tuple[Loss, LinearCrossEntropyCache]:
        """Keep the loss of each target, of targets that are looked at afterwards."""
        self.losses, cache = losses_of(x, head, targets, mask, bias, need_backward=need_backward)
        return Loss(math.nan, 0), cache

    def linear_cross_entropy_backward(
        self, dloss: float, cache: LinearCrossEntropyCache, *, out: tuple[Array, Array | None]
    ) -> tuple[Array, Array, Array | None]:
        """Return (dx, dhead, dbias) of dloss · total."""
        return loss.linear_cross_entropy_backward(dloss, cache, out=out)
