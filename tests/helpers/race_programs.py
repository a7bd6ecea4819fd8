"""Programs of threads at random, and which of them have a race, by the definition.

The kernel ``program`` among the toys of ``tests/cuda/test_races.py`` runs them.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reference.types import Array

BLOCKS, THREADS, STEPS = 2, 96, 20
ACTIVE = (0, 1, 32, 64)  # the threads of a block that do more than pass barriers
WRITE_GLOBAL, WRITE, READ_GLOBAL, READ, COPY, WAIT, SYNC_WARP, SYNC_BLOCK = range(1, 9)
ACTS = (WRITE, READ, READ, READ_GLOBAL, COPY, WAIT, WRITE_GLOBAL)


def random_program(rng: np.random.Generator) -> Array:
    """Return codes (STEPS, BLOCKS, THREADS) of ``program``: with no race, or one at its end."""
    codes = np.zeros((STEPS, BLOCKS, THREADS), np.int32)
    codes[-1] = WAIT
    barriers = [1] * BLOCKS  # the greatest number of one that has been used
    for step in range(STEPS - 1):
        for block in range(BLOCKS):
            sync, own = rng.random() < 0.4, codes[step, block]
            if own.any():
                continue
            if sync and rng.random() < 0.2:
                own[:] = SYNC_BLOCK
            elif sync and rng.random() < 0.4:
                first = 32 * int(rng.integers(3))
                own[first : first + 32] = SYNC_WARP
            elif sync:  # some warps arrive at a barrier, and later others wait there
                free = [s for s in range(step + 1, STEPS - 1) if not codes[s, block].any()]
                warps = rng.permutation(3)[: rng.integers(2, 4)]
                if free and barriers[block] < 15:
                    barriers[block] += 1
                    code = 8 * barriers[block] + 2 * (len(warps) == 3)
                    later, arriving = rng.choice(free), rng.integers(1, len(warps))
                    for i, warp in enumerate(warps):
                        at, waits = (step, 0) if i < arriving else (later, 1)
                        codes[at, block, 32 * warp : 32 * warp + 32] = code + waits
            else:
                own[rng.choice(ACTIVE)] = rng.choice(ACTS)
                if has_race(codes):
                    if rng.random() < 0.1:
                        return codes
                    own[:] = 0
    return codes


class Access(NamedTuple):
    """What a thread does to memory from one step to another."""

    where: int  # the block whose shared memory it is, or -1
    writes: bool
    block: int
    thread: int
    first: int
    last: int


def accesses_of(codes: Array) -> Iterator[Access]:
    for block, thread in itertools.product(range(BLOCKS), ACTIVE):
        copies: list[int] = []  # when those under way began
        for step, code in enumerate(codes[:, block, thread].tolist()):
            if code == COPY:
                copies.append(step)
            elif code == WAIT:
                for first in copies:
                    yield Access(block, True, block, thread, first, step)
                    yield Access(-1, False, block, thread, first, step)
                copies = []
            elif WRITE_GLOBAL <= code <= READ:
                where = -1 if code in (WRITE_GLOBAL, READ_GLOBAL) else block
                yield Access(where, code in (WRITE_GLOBAL, WRITE), block, thread, step, step)


Known = dict[int, int]  # thread -> how many steps of it


def known_before(codes: Array, block: int) -> list[dict[int, Known]]:
    """Return for each step: thread -> what is done before it, of itself and of the others."""
    known = {thread: dict.fromkeys(ACTIVE, 0) for thread in ACTIVE}
    told: dict[tuple[int, int], Known] = {}  # barrier -> what those that have come to it know
    found = []
    for step, own in enumerate(codes[:, block].tolist()):
        for thread in ACTIVE:
            known[thread][thread] = step
        found.append({thread: dict(of) for thread, of in known.items()})
        waiting: dict[tuple[int, int], list[int]] = {}
        for thread in ACTIVE:
            code = own[thread]
            if code < SYNC_WARP:
                continue
            at = (code // 8, thread // 32 if code == SYNC_WARP else 0)
            brought = known[thread] | {thread: step + 1}
            before = told.get(at, brought)
            told[at] = {other: max(before[other], brought[other]) for other in ACTIVE}
            if code in (SYNC_WARP, SYNC_BLOCK) or code % 2:
                waiting.setdefault(at, []).append(thread)
        for at, threads in waiting.items():
            of_all = told.pop(at)
            for thread in threads:
                known[thread] = {u: max(n, of_all[u]) for u, n in known[thread].items()}
    return found


def has_race(codes: Array) -> bool:
    known = [known_before(codes, block) for block in range(BLOCKS)]

    def before(a: Access, b: Access) -> bool:
        """Return whether all of a is done before anything of b begins."""
        return a.block == b.block and known[b.block][b.first][b.thread][a.thread] > a.last

    return any(
        a.where == b.where and (a.writes or b.writes) and not before(a, b) and not before(b, a)
        for a, b in itertools.combinations(accesses_of(codes), 2)
    )
