"""Ops that are bound by memory: the bytes they move a second, beside a copy on the same threads.

An op is judged by what it has to move at least, each array read or written once. Promised is 0.9 of
what a copy moves whose arrays no cache holds. Beside it stands a copy of as many bytes as the op
moves, which finds the same part of them in the caches: where that is all, an op with arithmetic is
no longer bound by memory. A copy is the better of two: in pieces as the kernels here take them, and
in one stretch for each thread.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numba import prange

from accel.bench.cases import BY_BYTES, OpCase, small_ops
from accel.bench.report import Row
from accel.bench.timing import Function, alternate, check, relative_error, settled
from accel.bench.training import PARAMETERS, adamw, adamw_state
from accel.cpu.kernels import MAP, PIECE, address
from accel.cpu.memory import empty
from accel.cpu.simd import pointer
from accel.jit import jit
from accel.threads import threads
from reference.ops import OPS, Ops

BAR = 0.9
ADAMW_BYTES = 28  # of a number: weight, moments and gradient read, all but the last written
FAR = 512e6  # bytes that a copy moves, more than caches hold
VISITS = 3


@jit(**MAP)
def _copy(like: Any, source: int, target: int, n: int, piece: int) -> None:
    x, z = pointer(source, like), pointer(target, like)
    for p in prange((n + piece - 1) // piece):
        for i in range(p * piece, min(n, (p + 1) * piece)):
            z[i] = x[i]


def copies(n_bytes: float) -> dict[str, Function]:
    """Return two ways to copy, each of which moves so many bytes."""
    n = max(int(n_bytes) // 8, 1)
    source, target = empty(n, np.float32), empty(n, np.float32)
    source.fill(1)
    target.fill(2)
    both = np.float32(0), address(source), address(target), n
    ways = {"in pieces": PIECE, "in stretches": -(-n // threads())}

    def copy(piece: int) -> None:
        assert source.size == target.size == n  # which keeps the arrays
        _copy(*both, piece)

    for name, piece in ways.items():
        target.fill(2)
        copy(piece)
        check(f"the copy {name}", relative_error(target, source), 0.0, "what it copies")
    return {name: partial(copy, piece) for name, piece in ways.items()}


def moved(case: OpCase) -> tuple[float, float]:
    """Return the bytes that a forward and a backward have to move."""
    x, size = case.arrays[0], 4.0 * case.arrays[0].size
    if case.op == "embedding":
        table, rows = case.arrays[1], 4.0 * x.size * case.arrays[1].shape[1]
        return 4.0 * x.size + 2 * rows, 4.0 * x.size + rows + table.nbytes
    forward = {"add": 3, "softmax": 2, "relu": 2, "scale": 2, "rmsnorm": 2, "layernorm": 2}
    backward = {"relu": 3, "scale": 2, "rmsnorm": 3, "layernorm": 3}
    return forward[case.op] * size, backward.get(case.op, 0) * size


def calls(ops: Ops, cases: Iterable[OpCase]) -> Iterator[tuple[str, Function, float]]:
    """Yield what to time: its name, a call, and the bytes that it has to move."""
    seen = set()
    for case in cases:
        if case.op not in BY_BYTES:
            continue
        what, (to, fro) = case.what.replace(" forward", ""), moved(case)
        forward = case.forward(ops)
        if what not in seen:
            seen.add(what)
            yield what.replace(" ", " forward ", 1), forward, to
        if case.dout is not None:
            _, cache = forward()
            backward = partial(getattr(ops, f"{case.op}_backward"), case.dout, cache)
            yield what.replace(" ", " backward ", 1), backward, fro
            if OPS[case.op].adds == "backward":
                plus = np.ones_like(case.arrays[0])
                both = partial(backward, plus=plus)
                yield what.replace(" ", " backward, plus ", 1), both, fro + plus.nbytes
    yield "adamw 12.6 M", adamw(ops, adamw_state(PARAMETERS)), float(ADAMW_BYTES * PARAMETERS)


def rows(ops: Ops, *, quick: bool) -> Iterator[Row]:
    """Yield a row for each op: its bytes a second, the copy's, and their ratio.

    Every op is visited VISITS times, all others in between, and the visit with the middle ratio
    counts: memory, and a cache that others share, are slower in one minute than in the next.
    """
    far, found = copies(FAR), defaultdict[str, list[tuple[float, Row]]](list)
    visits = 1 if quick else VISITS
    for visit in range(visits):
        for what, call, n_bytes in calls(ops, small_ops()):
            near = {f"as many {way}": copy for way, copy in copies(n_bytes).items()}
            functions = {"op": call, **far, **near}
            with settled(ops, call):
                times = alternate(functions, sample=0.02, want=3, budget=3, quick=quick)
            rate = n_bytes / times["op"] / 1e9
            copied = FAR / min(times[way] for way in far) / 1e9
            cached = n_bytes / min(times[way] for way in near) / 1e9
            note = f"{times['op'] * 1e3:.3g} ms, {rate / cached:.2f} of a copy of as many"
            row = Row(f"{what} / a copy", rate, copied, BAR, "GB/s", note)
            found[what].append((rate / copied, row))
            if visit == visits - 1:
                yield sorted(found[what], key=itemgetter(0))[visits // 2][1]
