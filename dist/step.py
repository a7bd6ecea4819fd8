"""One exact optimizer step, shared among ranks.

The gradient of a step is a sum over M micro-batches, and floating-point addition is not
associative: a library's reduction adds in an order that depends on the number of ranks. Here each
micro-batch's gradient is a leaf of one binary tree over 0 .. M - 1 that is fixed by M alone::

        (0 1) (2 3) (4 5) (6 7)          M = 8
        ((01)(23)) ((45)(67))
        all

A rank holds a contiguous block of M/W leaves, W a power of two: exactly a subtree, which it adds up
by itself. The W roots are then added by slices: each rank receives everybody's part of the slices
that it owns and adds them in the tree's order (``reduction.py``). So every W adds the same pairs,
and gives the same bits. What goes over the wire is what reduce-scatter would send.

Then, as each slice is whole blocks or whole matrices (``slices.py``; ZeRO stage 1, Rajbhandari et
al. 2020): the norm from per-block sums; AdamW or Muon on this rank's slices of the master, of m and
of v, each multiplying the sum by what clips it and by 1/N, N the valid targets of all ranks; gather
the master.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from dist.comm import Comm, slices_of
from dist.config import Optim
from dist.data import Batch, on_backend
from dist.reduction import Reduction
from dist.slices import Cutting, Range
from reference.blocks import Recompute
from reference.config import Config
from reference.global_norm import clip_scale
from reference.ops import Ops
from reference.params import Layout
from reference.types import Array, DropoutKey, Loss


class Gradient(NamedTuple):
    """What a step knows before it decides whether to take it."""

    loss: float  # mean over the valid targets of all ranks, in nats
    n_valid: int  # of all ranks
    norm: float  # of the whole mean gradient, before clipping
    mine: list[Array]  # this rank's slices of the summed gradient, n_valid times the mean

    @property
    def finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class TreeSum:
    """Adds arrays as the leaves of a balanced binary tree, in as few buffers as that needs.

    Used for log2(leaves) + 1 buffers of the size of ``like`` (n,) float32, made when first wanted.
    """

    def __init__(self, ops: Ops, like: Array) -> None:
        self._ops, self._like = ops, like
        self._free: list[Array] = []
        self._stack: list[tuple[int, Array]] = []  # (height, sum), heights falling

    def leaf(self) -> Array:
        """Return a buffer to write the next leaf into."""
        if self._free:
            return self._free.pop()
        # made by the backend, where it is to lie
        return self._ops.scale_forward(self._like, factor=0.0)[0]

    def push(self, leaf: Array) -> None:
        """Add the next leaf: like carrying in a binary counter, equal heights merge."""
        height = 0
        while self._stack and self._stack[-1][0] == height:
            _, left = self._stack.pop()
            self._ops.accumulate(left, leaf)
            self._free.append(leaf)
            leaf, height = left, height + 1
        self._stack.append((height, leaf))

    def open(self, leaf: Array) -> Array:
        """Return where the root will stand, of which ``leaf``, not yet written, is the last."""
        return self._stack[0][1] if self._stack else leaf

    def complete(self, leaf: Array, low: int, high: int) -> None:
        """Add up a range of the last leaf's and of all that wait: ``push``, but for the range."""
        for _, left in reversed(self._stack):
            self._ops.accumulate(left[low:high], leaf[low:high])
            leaf = left

    def close(self, leaf: Array) -> None:
        """Take all ranges for complete."""
        heights = [height for height, _ in self._stack]
        if heights != list(reversed(range(len(heights)))):
            raise ValueError("the leaves of a tree sum must be a power of two")
        arrays = [*(array for _, array in self._stack), leaf]
        self._stack = [(len(heights), arrays[0])]
        self._free += arrays[1:]

    def root(self) -> Array:
        """Return the sum of a power of two leaves; ``give_back`` it when it has been read."""
        if len(self._stack) != 1:
            raise ValueError("the leaves of a tree sum must be a power of two")
        return self._stack.pop()[1]

    def give_back(self, root: Array) -> None:
        """Let the buffer of a root be used again."""
        self._free.append(root)

    def clear(self) -> None:
        """Forget a sum that was not finished."""
        self._free += [array for _, array in self._stack]
        self._stack.clear()


def initial_weights(ops: Ops, layout: Layout, seed: int) -> Array:
    """Return what ``layout.init`` draws, as the backend's array.

    It is drawn a parameter at a time: where the backend has memory of its own, the host never holds
    more of it than that, on any of the ranks that share the host.
    """
    flat = ops.from_numpy(np.zeros(layout.size, np.float32))
    for name, view in layout.views(flat).items():
        ops.accumulate(view, ops.from_numpy(layout.draw(name, seed)))
    return flat


class Clock:
    """Seconds since the last reading."""

    def __init__(self) -> None:
        self.comm = 0.0  # spent in communication
        self.hidden = 0.0  # of communication, beside the backend
        self.backend = 0.0  # spent in the backend

    def read(self) -> tuple[float, float, float]:
        """Return (communication, hidden, backend) and start again."""
        seconds = self.comm, self.hidden, self.backend
        self.comm = self.hidden = self.backend = 0.0
        return seconds


class Stepper:
    """The model's weights, the optimizer's state, and how a step changes them.

    Parameters
    ----------
    ops : module
        The backend.
    model : Config
    optim : Optim
    layout : Layout
    comm : Comm
    flat : (n,) float32
        The initial weights, an array of the backend's, the same on every rank.
    seed : int
        Of dropout.
    recompute : str
        What the backward recomputes instead of keeping it.
    overlap : bool
        Exchange gradients beside the backward, where the ranks can.
    """

    def __init__(
        self,
        ops: Ops,
        model: Config,
        optim: Optim,
        layout: Layout,
        comm: Comm,
        flat: Array,
        seed: int,
        recompute: Recompute = "auto",
        overlap: bool = True,
    ) -> None:
        self.ops, self.model, self.optim, self.layout, self.comm = ops, model, optim, layout, comm
        self.cutting = cutting = Cutting.of(layout, optim.kind)
        self.reduction = Reduction(
            ops, comm, layout, model.n_layers, cutting, beside=overlap and not comm.behind
        )
        self.slices = self.reduction.slices  # this rank's, (low, high) in the flat arrays
        self.master = flat
        self.m = ops.from_numpy(np.zeros(self.owned("m"), np.float32))  # one slice after the other
        self.v = ops.from_numpy(np.zeros(self.owned("v"), np.float32))
        self.updates = 0  # optimizer steps taken: AdamW's t
        self.seed, self.recompute = seed, recompute
        self.clock = Clock()
        self._tree = TreeSum(ops, flat)
        self._drops = any(
            (model.dropout_embedding, model.dropout_attention, model.dropout_residual)
        )
        self.refresh()

    def held(self, array: str) -> list[Range]:
        """Return what this rank holds of m or v, for each of its slices."""
        return self.cutting.held(array, self.slices)

    def owned(self, array: str) -> int:
        """Return how many elements of m or v this rank holds."""
        return sum(high - low for low, high in self.held(array))

    def by_slice(self, array: str) -> list[Array]:
        """Return the parts of m or v, one for each of this rank's slices."""
        ends = itertools.accumulate((high - low for low, high in self.held(array)), initial=0)
        return slices_of(getattr(self, array), list(ends))

    def refresh(self) -> None:
        """Make the weights that the ops read from the master; needed whenever that changed."""
        self.params = self.ops.parameters(self.layout.views(self.master))

    def gradient(self, batches: Iterable[Batch], step: int, first_sample: int) -> Gradient:
        """Return the gradient of a step.

        Parameters
        ----------
        batches : iterable of Batch
            This rank's micro-batches, in order.
        step : int
            Of the run; with the sample it keys dropout.
        first_sample : int
            Number of this rank's first window within the step.

        Returns
        -------
        Gradient
            Where no rank has a valid target, one that is not finite.
        """
        tree, reduction = self._tree, self.reduction
        tree.clear()
        losses: list[Loss] = []
        batches = iter(batches)
        batch = next(batches)
        while (following := next(batches, None)) is not None:
            leaf = tree.leaf()
            losses.append(self._micro_batch(batch, leaf, step, first_sample))
            started = time.perf_counter()
            tree.push(leaf)
            self.clock.backend += time.perf_counter() - started
            first_sample += len(batch.ids)
            batch = following
        leaf = tree.leaf()
        root = tree.open(leaf)
        reduction.begin(root, partial(tree.complete, leaf))
        losses.append(self._micro_batch(batch, leaf, step, first_sample, reduction.listener))

        started = time.perf_counter()
        reduction.complete()
        tree.close(leaf)
        self.clock.backend += time.perf_counter() - started

        started = time.perf_counter()
        mine = reduction.finish()
        everyone = [loss for losses in self.comm.all_gather(losses) for loss in losses]
        self.clock.comm += time.perf_counter() - started
        self.clock.hidden += reduction.hidden

        n_valid = sum(loss.n_valid for loss in everyone)
        started = time.perf_counter()
        ops = self.ops
        own = [
            (start, ops.to_numpy(ops.square_sums(part[start - low : end - low])))
            for (low, high), part in zip(self.slices, mine, strict=True)
            for start, end in self.cutting.pieces(low, high)
        ]
        tree.give_back(tree.root())
        self.clock.backend += time.perf_counter() - started

        started = time.perf_counter()
        by_place = sorted(itertools.chain(*self.comm.all_gather(own)), key=lambda found: found[0])
        sums = np.concatenate([part for _, part in by_place])
        self.clock.comm += time.perf_counter() - started
        # fsum is exact, so neither the leaves' order nor their number per rank can matter
        total = sum_of(loss.total for loss in everyone)
        if not n_valid:
            return Gradient(math.nan, 0, math.nan, mine)
        norm = math.sqrt(float(np.sum(sums))) / n_valid
        return Gradient(total / n_valid, n_valid, norm, mine)

    def _micro_batch(
        self,
        batch: Batch,
        leaf: Array,
        step: int,
        sample: int,
        finished: Callable[[int], None] | None = None,
    ) -> Loss:
        ops = self.ops
        started = time.perf_counter()
        gradients = self.layout.views(leaf)  # before a GPU has been waited for
        loss = ops.gradient(
            self.params,
            self.model,
            *on_backend(ops, batch),
            gradients,
            dropout_key=DropoutKey(self.seed, step, sample, 0) if self._drops else None,
            recompute=self.recompute,
            finished=finished,
        )
        self.clock.backend += time.perf_counter() - started
        return Loss(float(loss.total), int(loss.n_valid))

    def update(self, gradient: Gradient, lr: float) -> None:
        """Clip, and take one step of the optimizer; ``gradient`` must be finite."""
        started = time.perf_counter()
        optim = self.optim
        clipped = clip_scale(gradient.norm, optim.clip) if optim.clip else 1.0
        scale = clipped / gradient.n_valid
        self.updates += 1
        states = zip(
            self.slices, self.by_slice("m"), self.by_slice("v"), gradient.mine, strict=True
        )
        for (low, high), m, v, mine in states:
            if low in self.cutting.matrices:
                self._muon(low, high, m, mine, lr, scale)
                continue
            for start, end, rate in self._rates(low, high):
                here = slice(start - low, end - low)
                self._adamw(start, end, m[here], v[here], mine[here], lr * rate, scale)
        between = time.perf_counter()
        self.reduction.gather(self.master)
        gathered = time.perf_counter()
        self.refresh()
        self.clock.comm += gathered - between
        self.clock.backend += between - started + time.perf_counter() - gathered

    def _rates(self, low: int, high: int) -> list[tuple[int, int, float]]:
        """Return a range in pieces of one rate each, in units of that of the step."""
        rate = self.optim.embedding_rate
        first, spec = self.layout.offsets["embedding.weight"]
        last = first + (spec.size if rate != 1 else 0)
        edges = sorted({low, high, *(edge for edge in (first, last) if low < edge < high)})
        return [
            (start, end, rate if first <= start < last else 1.0)
            for start, end in itertools.pairwise(edges)
        ]

    def _adamw(
        self, low: int, high: int, m: Array, v: Array, grad: Array, lr: float, scale: float
    ) -> None:
        optim = self.optim
        n_decayed = self.layout.size if optim.decay_all else self.layout.n_decayed
        self.ops.adamw(
            self.master[low:high],
            m,
            v,
            grad,
            step=self.updates,
            lr=lr,
            beta1=optim.beta1,
            beta2=optim.beta2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            n_decayed=min(max(n_decayed - low, 0), high - low),
            grad_scale=scale,
        )

    def _muon(self, low: int, high: int, m: Array, grad: Array, lr: float, scale: float) -> None:
        for start, end in self.cutting.pieces(low, high):
            spec, here = self.cutting.matrices[start], slice(start - low, end - low)
            self.ops.muon(
                self.master[start:end].reshape(spec.shape),
                m[here].reshape(spec.shape),
                grad[here].reshape(spec.shape),
                lr=lr,
                momentum=self.optim.momentum,
                weight_decay=self.optim.weight_decay,
                parts=spec.parts,
                grad_scale=scale,
            )


def sum_of(values: Iterable[float]) -> float:
    """Return the exactly rounded sum; NaN or infinity when one is among them."""
    values = list(values)
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return float(np.sum(values))
