"""In which order a run sees the windows: a pure function of seed and position.

There is no shuffled list to store or to send around. Position p of a run is the p-th window it
takes, counted over all ranks; ``DataOrder`` says which window of which source that is. So the whole
state of the data is one integer, the same for any number of ranks.

Within a source, epoch after epoch is a permutation of its windows: a Feistel network (Luby &
Rackoff 1988) is a bijection of 2^2h numbers whatever its round function, and walking its cycle
until the result lies below n makes it one of n (Black & Rogaway 2002, "cycle walking").
"""

import bisect
import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

ROUNDS = 6
MIX_BLOCK = 1024  # positions in which every source has its exact share

_WORD = (1 << 64) - 1


class Mixture(NamedTuple):
    """One phase: a number of positions, drawn from sources by weight."""

    windows: int  # positions of this phase
    sources: tuple[int, ...]  # which sources, by number
    weights: tuple[float, ...]


class Place(NamedTuple):
    """Where a position of the run finds its window."""

    source: int
    window: int  # within the source
    epoch: int  # how often the source has been read through before


def permute(index: int, n: int, key: tuple[int, ...]) -> int:
    """Return π(index), π the seeded bijection of 0 .. n - 1.

    Parameters
    ----------
    index : int
    n : int
    key : tuple of int
        Any integers, such as (seed, source, epoch).

    Raises
    ------
    ValueError
        When the index is outside the range.
    """
    if not 0 <= index < n:
        raise ValueError(f"permute: index {index} lies outside 0..{n - 1}")
    half = ((n - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    packed = b"".join(struct.pack("<Q", part & _WORD) for part in key)
    round_keys = struct.unpack(f"<{ROUNDS}Q", hashlib.blake2b(packed, digest_size=48).digest())
    while True:
        left, right = index >> half, index & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        index = left << half | right
        if index < n:
            return index


def _mix(x: int) -> int:
    """Return 64 well-mixed bits of x: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many of ``MIX_BLOCK`` positions each weight gets, by largest remainder.

    Raises
    ------
    ValueError
        When a source would get none.
    """
    # where the sum is infinite; else by 1, as the order of runs that there are must stay
    scale = 1.0 if math.isfinite(sum(weights)) else max(weights)
    parts = [weight / scale for weight in weights]
    exact = [part / sum(parts) * MIX_BLOCK for part in parts]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda j: (counts[j] - exact[j], j))
    for j in by_remainder[: MIX_BLOCK - sum(counts)]:
        counts[j] += 1
    if 0 in counts:
        raise ValueError(
            f"source {counts.index(0) + 1} has less than 1/{MIX_BLOCK} of the weight of its phase, "
            "the smallest share there is; raise its weight or leave it out"
        )
    return tuple(counts)


class DataOrder:
    """Maps positions of the run to windows of its sources.

    In every 1,024 positions of a phase each source has its exact share, at places that a
    permutation of those 1,024 decides. A source that two phases read goes on in the second where
    it stopped in the first.

    Parameters
    ----------
    seed : int
    windows : sequence of int
        Windows in each source.
    phases : sequence of Mixture
    """

    def __init__(self, seed: int, windows: Sequence[int], phases: Sequence[Mixture]) -> None:
        for source, n in enumerate(windows):
            if n < 1:
                raise ValueError(f"source {source + 1} holds no whole window")
        self.seed, self.windows, self.phases = seed, tuple(windows), tuple(phases)
        self._shares = [shares(phase.weights) for phase in phases]
        self._blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._read_before: list[dict[int, int]] = []  # by phase: source -> windows taken before it
        read: dict[int, int] = {}
        for number, phase in enumerate(phases):
            self._read_before.append(dict(read))
            whole, rest = divmod(phase.windows, MIX_BLOCK)
            taken = [self._slot(number, whole, slot)[0] for slot in range(rest)]
            for j, source in enumerate(phase.sources):
                n = whole * self._shares[number][j] + taken.count(j)
                read[source] = read.get(source, 0) + n

    def __len__(self) -> int:
        return sum(phase.windows for phase in self.phases)

    def __getitem__(self, position: int) -> Place:
        """Return the place of a position."""
        if position < 0:
            raise IndexError(f"positions count from 0, got {position}")
        rest = position
        number = 0
        while number < len(self.phases) and rest >= self.phases[number].windows:
            rest -= self.phases[number].windows
            number += 1
        if number == len(self.phases):
            raise IndexError(f"position {position} lies behind the last phase ({len(self)})")
        block, slot = divmod(rest, MIX_BLOCK)
        j, within = self._slot(number, block, slot)
        source = self.phases[number].sources[j]
        taken = self._read_before[number].get(source, 0)
        index = taken + block * self._shares[number][j] + within
        epoch, index = divmod(index, self.windows[source])
        window = permute(index, self.windows[source], (self.seed, source, epoch))
        return Place(source, window, epoch)

    def _slot(self, phase: int, block: int, slot: int) -> tuple[int, int]:
        """Return which source owns a slot of a block, and the slot's index among that source's."""
        counts = self._shares[phase]
        if len(counts) == 1:
            return 0, slot
        if (phase, block) not in self._blocks:
            # keyed apart from the windows, whose second number is a source
            key = (self.seed, -1 - phase, block)
            ends = list(itertools.accumulate(counts))
            owners = [bisect.bisect(ends, permute(s, MIX_BLOCK, key)) for s in range(MIX_BLOCK)]
            seen = [0] * len(counts)
            slots = []
            for j in owners:
                slots.append((j, seen[j]))
                seen[j] += 1
            self._blocks = {(phase, block): slots}  # positions come in order: one is enough
        return self._blocks[phase, block][slot]
