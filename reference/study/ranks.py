"""Training on W ranks, in one process: sums whose bits depend on W, and sums whose bits do not.

A rank is a process with parameters of its own; the W of them share the work of a step. A step has M
micro-batches, small batches whose gradients are added up; each gradient is a flat array of N
numbers. Rank r computes those of its M/W micro-batches, and what all need is the sum of all M.

**Bits.** Floating-point addition is not associative: (a + b) + c and a + (b + c) may differ in the
last bit. If every rank adds its own gradients in turn, and then the W sums are added in turn, the
brackets depend on W, and so do the last bits of the weights, from the first step on. Fixed brackets
are the cure: M is a power of two, the micro-batches are the leaves of one binary tree, and every
sum is taken along the tree, whoever takes it (Higham 1993, "The accuracy of floating point
summation", calls it pairwise summation):

    ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))

With W = 2 the outer brackets are the ranks, with W = 4 the inner ones are. W is a power of two as
well, and a rank's micro-batches are neighbours, so each rank's part is a whole branch.

**Bytes.** The gradient is cut into W slices. Each rank sends slice s of its branch to rank s (an
all-to-all) and adds the W pieces that come to it, along the top of the tree. Now rank s has slice s
of the whole sum, and is the only one to need it: it updates slice s of the parameters, for which
AdamW's two moments, m and v, lie with it alone, a W-th of them on each rank (Rajbhandari et al.
2020, "ZeRO", section 5.1: the stage called ZeRO-1). The new slices are then sent to all (an
all-gather). Each of the two exchanges has every rank send (W - 1)/W of N numbers, together

    2 N (W - 1)/W

which is what the best all-reduce needs for the sum alone (Patarasuk & Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations"). Exactness costs no traffic.

    python -m reference.study.ranks
"""

import functools
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from reference.adamw import adamw
from reference.study import gpt, shown
from reference.types import Array

Sum = Callable[[Sequence[Array]], Array]

M = 8  # micro-batches of a step


# ---- two sums ------------------------------------------------------------------------------------


def in_turn(parts: Sequence[Array]) -> Array:
    """Return the sum from left to right: (g0 + g1) + g2, and so on."""
    return functools.reduce(operator.add, parts)


def along_the_tree(parts: Sequence[Array]) -> Array:
    """Return the sum of a power of two of arrays: neighbours first, then neighbouring sums."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# ---- what lies between the ranks -----------------------------------------------------------------


class Wires:
    """Carries arrays between W ranks, and counts the bytes that each has sent to others."""

    def __init__(self, W: int):
        self.sent = [0] * W

    def all_to_all(self, outgoing: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Carry ``outgoing[r][s]`` from rank r to rank s, who finds it at [s][r]."""
        for r, parcels in enumerate(outgoing):
            self.sent[r] += sum(parcel.nbytes for s, parcel in enumerate(parcels) if s != r)
        return [[parcels[s].copy() for parcels in outgoing] for s in range(len(outgoing))]

    def all_gather(self, slices: Sequence[Array]) -> list[Array]:
        """Carry every rank's slice to every rank; each finds them joined."""
        received = self.all_to_all([[mine] * len(slices) for mine in slices])
        return [np.concatenate(parts) for parts in received]


class Rank:
    """All the parameters, and the moments of one slice of them."""

    def __init__(self, master: Array, number: int, W: int):
        self.master = master.copy()
        bounds = np.cumsum([0, *(len(piece) for piece in np.array_split(master, W))])
        self.slice = slice(bounds[number], bounds[number + 1])
        self.m, self.v = np.zeros_like(master[self.slice]), np.zeros_like(master[self.slice])

    def update(self, gradient: Array, step: int) -> Array:
        """Step this rank's slice of the parameters by its gradient, and return it."""
        mine = self.master[self.slice]
        adamw(
            mine, self.m, self.v, gradient, step=step, lr=0.01,
            beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, n_decayed=0,
        )  # fmt: skip
        return mine


# ---- training ------------------------------------------------------------------------------------


def task() -> tuple[Array, Callable[[Array, int, int], Array]]:
    """Return parameters of a tiny GPT, flat, and what computes one micro-batch's gradient there."""
    text = gpt.zen()
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text])
    start = gpt.init(len(characters), T=16, D=16, L=1, rng=np.random.default_rng(0))
    ends = np.cumsum([x.size for x in start.values()])

    def gradient(master: Array, step: int, number: int) -> Array:
        pieces = zip(start.items(), np.split(master, ends[:-1]), strict=True)
        params = {name: piece.reshape(x.shape) for (name, x), piece in pieces}
        first = np.random.default_rng([step, number]).integers(0, len(ids) - 16, (2, 1))
        window = ids[first + np.arange(17)]  # which text, depends on the step and number alone
        _, grads = gpt.loss_and_gradients(params, window[:, :-1], window[:, 1:], H=2)
        return np.concatenate([grads[name].ravel() for name in start])

    master = np.concatenate([x.ravel() for x in start.values()])
    return master.astype(np.float32), gradient


def train(W: int, total: Sum, steps: int) -> Iterator[tuple[list[Rank], Wires]]:
    """Yield the ranks after each step of training on W of them, and the bytes so far."""
    master, gradient = task()
    ranks, wires = [Rank(master, r, W) for r in range(W)], Wires(W)
    for step in range(1, steps + 1):
        branches = []
        for r, rank in enumerate(ranks):
            leaves = range(r * M // W, (r + 1) * M // W)
            branches.append(total([gradient(rank.master, step, leaf) for leaf in leaves]))
        pieces = wires.all_to_all([np.array_split(branch, W) for branch in branches])
        whole = [total(mine) * np.float32(1 / M) for mine in pieces]  # divided once, at the end
        slices = [rank.update(g, step) for rank, g in zip(ranks, whole, strict=True)]
        for rank, gathered in zip(ranks, wires.all_gather(slices), strict=True):
            rank.master = gathered
        yield ranks, wires


def main() -> None:
    """Train on 1, 2, 4 and 8 ranks, with both sums, and count what was sent and kept."""
    a, b, c = np.float32(1e8), np.float32(-1e8), np.float32(1)
    print(
        f"In float32 (1e8 - 1e8) + 1 = {(a + b) + c:g}, and 1e8 + (-1e8 + 1) = {a + (b + c):g}.\n"
    )
    steps = 20
    N = len(task()[0])
    print(f"The weights of a GPT of {N:,} parameters after {steps} steps of {M} micro-batches:\n")
    print("  ranks  added in turn   along the tree   bytes sent  2N(W-1)/W    moments kept")
    print("         (CRC-32)        (CRC-32)      a step, each   · 4 bytes  by each, bytes")
    for W in (1, 2, 4, 8):
        *_, (in_turn_ranks, _) = train(W, in_turn, steps)
        *_, (ranks, wires) = train(W, along_the_tree, steps)
        crc = [f"{zlib.crc32(each[0].master.tobytes()):08x}" for each in (in_turn_ranks, ranks)]
        sent = sum(wires.sent) / W / steps
        kept = ranks[0].m.nbytes + ranks[0].v.nbytes
        print(f"{W:>5}    {crc[0]:<16}{crc[1]:<17}{sent:>10,.0f}{2 * 4 * N * (W - 1) / W:>12,.0f}"
              f"{kept:>16,}")  # fmt: skip
    print("\nIn turn the bits depend on W (8 ranks with a leaf each have the brackets of 1")
    print("rank); along the tree they are the same for any number of ranks.")


if __name__ == "__main__":
    shown(main)
