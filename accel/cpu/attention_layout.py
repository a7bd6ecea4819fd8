"""Read reference/study/tiled_attention.py first: here is how its arrays and loops are cut.

Records, scratch memory and tasks, in both compute modes. The sizes are those of
``reference/attention.py``, the rules those of ``reference/visibility.py``. A record is what kernels
take in place of ten parameters: what is added to one reaches every function that reads it.
"""

import functools
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from accel.cpu.simd import at, pad_columns, pointer
from accel.jit import jit
from reference.types import Array
from reference.visibility import Visibility

BLOCK = 64  # queries, and keys, of a tile


# --- records -------------------------------------------------------------------------------------


class View(NamedTuple):
    """Where the rows of an array (batch, position, head, width) lie; strides in elements."""

    address: int
    batch: int
    position: int
    head: int


class Sizes(NamedTuple):
    """The extents of one attention."""

    batch: int  # B
    queries: int  # T
    keys: int  # S
    heads: int  # Hq
    kv_heads: int  # Hkv
    width: int  # d, of queries and keys
    value_width: int  # dv


class Mask(NamedTuple):
    """The rules of ``reference.visibility.Visibility``, the arrays by address; 0: there is none."""

    causal: bool
    window: int
    alibi: int  # address of (Hq,) slopes, of the element type
    key_mask: int  # address of (B, S) uint8
    documents: int  # address of (B, S) int32


class Drawn(NamedTuple):
    """The dropout of probabilities; see ``reference/philox.py`` for the counters."""

    active: bool
    threshold: int  # floor(p · 2³²): a word below it drops
    keep_scale: float  # 1 / (1 - p)
    seed_low: int
    seed_high: int
    step: int
    sample: int  # of batch row 0
    site: int


class Attention(NamedTuple):
    """One attention: the first parameters of every driver, in this order.

    Numba passes flat tuples to the tasks of a ``prange`` and no nested ones, so drivers take the
    fields, and make the record again within a task.
    """

    sizes: Sizes
    q: View  # (B, T, Hq, d)
    k: View  # (B, S, Hkv, d)
    v: View  # (B, S, Hkv, dv)
    out: View  # (B, T, Hq, dv)
    scale: Any  # of the element type
    mask: Mask
    dropout: Drawn


class Tile(NamedTuple):
    """The scores between some queries and some keys of one head."""

    b: int
    h: int
    t0: int  # first query
    n: int  # queries
    width: int  # elements of a row, n padded
    u0: int  # first key
    nk: int  # keys


@jit
def row(view: View, b: int, t: int, h: int, like: Any) -> Any:
    """Return the pointer to element 0 of row (b, t, h)."""
    return at(pointer(view.address, like), b * view.batch + t * view.position + h * view.head)


@jit
def padded(n: int, like: Any) -> int:
    """Return ``n`` rounded up to whole vectors of elements like ``like``."""
    lanes: int = pad_columns(like)
    return (n + lanes - 1) // lanes * lanes


# --- scratch memory ------------------------------------------------------------------------------


class Operands(NamedTuple):
    """How a compute mode keeps the operands of its products in scratch memory."""

    keys: int  # of a forward tile
    side: int  # widths and keys are padded to multiples of it
    pair: int  # numbers to an element
    spare: int  # elements for packing tails


class ForwardRoom(NamedTuple):
    """Where a forward tile's arrays begin in a thread's memory, in elements, and where they end.

    Those marked bf16 are that mode's alone, which also keeps the result transposed.
    """

    spare: int  # bf16
    scaled: int  # (n, d) Q', bf16
    queries_t: int  # (d, width) (Q')ᵀ, an operand
    o: int  # (n, dv)
    s: int  # (nk, width), scores and then probabilities
    p: int  # (nk, width), an operand, bf16
    factors: int  # (nk, width), of dropout
    drawn: int  # (nk + 7, width), behind them
    m: int  # (width,)
    l: int  # (width,)
    shrink: int  # (width,)
    end: int


class BackwardRoom(NamedTuple):
    """As ``ForwardRoom``, for a backward task and its tiles."""

    dkeys: int  # (S, d); of the first five, the keys are there that the task can see
    dvalues: int  # (S, dv)
    keys: int  # (S, d), an operand
    values: int  # (S, dv), an operand
    keys_t: int  # (d, S), an operand, bf16
    spare: int  # bf16
    scaled: int  # (n, d) Q', bf16
    queries_t: int  # (d, width) (Q')ᵀ, an operand
    gradient_t: int  # (dv, width) dOᵀ, an operand
    queries: int  # (n, d) Q, in bf16 Q', an operand
    gradient: int  # (n, dv) dO, an operand
    dq: int  # (n, d)
    s: int  # (nk, width)
    dp: int  # (nk, width)
    p_rows: int  # (nk, n), an operand, bf16
    ds_rows: int  # (nk, n), an operand, bf16
    ds_columns: int  # (nk, width), an operand, bf16
    factors: int  # (nk, width)
    drawn: int  # (nk + 7, width)
    lse2: int  # (width,)
    delta: int  # (width,)
    end: int


@functools.lru_cache(64)
def lay_out(room: type[Any], sizes: Sizes, operands: Operands) -> Any:
    """Return where the arrays that ``room`` names begin, one after the other, and the end."""
    keys, side, pair, spare = operands
    S, d, dv = (-(-n // side) * side for n in (sizes.keys, sizes.width, sizes.value_width))
    forward, bf16 = room is ForwardRoom, int(pair > 1)
    tile = (keys if forward else BLOCK) * BLOCK
    counts = {
        "spare": spare,
        **{"dkeys": S * d, "keys": S * d // pair, "keys_t": bf16 * S * d // pair},
        **{"dvalues": S * dv, "values": S * dv // pair},
        **{"scaled": bf16 * BLOCK * d, "o": BLOCK * dv, "dq": BLOCK * d},
        **dict.fromkeys(("queries", "queries_t"), BLOCK * d // pair),
        **dict.fromkeys(("gradient", "gradient_t"), BLOCK * dv // pair),
        **dict.fromkeys(("s", "dp", "factors"), tile),
        **dict.fromkeys(("p", "p_rows", "ds_rows", "ds_columns"), bf16 * tile // pair),
        "drawn": tile + 7 * BLOCK,
        **dict.fromkeys(("m", "l", "shrink", "lse2", "delta"), BLOCK),
    }
    return room(*accumulate((counts[name] for name in room._fields[:-1]), initial=0))


# --- tasks ---------------------------------------------------------------------------------------

# The backward cuts its work into at least this many tasks where a batch has fewer key/value heads.
# A number of tasks that followed the number of threads would make results depend on it.
TASKS = 16

# What a backward makes: dQ, or dK and dV, or all of them.
DQ, DKV = 1, 2
Passes = list[tuple[Array, int]]


@jit
def forward_tasks(sizes: Sizes) -> int:
    """Return the number of tasks of a forward: one for two query tiles of a head."""
    return sizes.batch * sizes.heads * ((sizes.queries + 2 * BLOCK - 1) // (2 * BLOCK))


@jit
def forward_task(sizes: Sizes, task: int) -> tuple[int, int, int, int, int]:
    """Return (b, h) of a task, its key/value head among all of the batch, and its query tiles.

    These are tile i and tile last - i, which may be one and the same.
    """
    tiles = (sizes.queries + BLOCK - 1) // BLOCK
    pairs = (tiles + 1) // 2
    bh, first = task // pairs, task % pairs
    b, h = bh // sizes.heads, bh % sizes.heads
    kv = b * sizes.kv_heads + h // (sizes.heads // sizes.kv_heads)
    return b, h, kv, first, tiles - 1 - first


@jit
def run_tile(sizes: Sizes, mask: Mask, g: int, place: int) -> tuple[int, int]:
    """Return the head and the query tile of a place in the list of a group; see ``cut_runs``."""
    group = sizes.heads // sizes.kv_heads
    tiles = (sizes.queries + BLOCK - 1) // BLOCK
    if mask.window:
        return g * group + place % group, place // group
    return g * group + place // tiles, place % tiles


def seen(sizes: Sizes, who: Visibility) -> tuple[Array, Array]:
    """Return the range of key tiles that each query tile in the list of a group can see."""
    T, group = sizes.queries, sizes.heads // sizes.kv_heads
    low, end = np.array([who.keys_of(t, min(t + BLOCK, T)) for t in range(0, T, BLOCK)]).T
    in_order = np.repeat if who.window else np.tile
    return in_order(low // BLOCK, group), in_order(-(-end // BLOCK), group)


def cut_runs(sizes: Sizes, who: Visibility, tasks: int = TASKS) -> Array:
    """Cut the query tiles of a group into runs of about equal work, by shapes and window alone.

    The list has the tiles of the group's first head, then those of its second, and so on; under a
    window it has the first tile of every head, then the second ones, so that a run sees few keys.
    The work of a tile is the number of key tiles that it can see.

    Returns
    -------
    runs : (runs, 5) int64
        Of each run its first place in the list and the one past its last, the range of keys that it
        reads and writes: whole tiles under a window, else all keys; and its number.
    """
    S = sizes.keys
    low, end = seen(sizes, who)
    done = np.cumsum(end - low)
    runs = min(len(done), -(-tasks // (sizes.batch * sizes.kv_heads)))
    cuts = np.searchsorted(done, done[-1] * np.arange(1, runs) / runs, side="right")
    table = np.zeros((runs, 5), np.int64)
    table[1:, 0], table[:-1, 1], table[-1, 1], table[:, 3] = cuts, cuts, len(done), S
    table[:, 4] = np.arange(runs)
    if who.window and runs > 1:
        # An empty run takes the range of the tile at its place, so that ranges never step back.
        first = np.minimum(table[:, 0], len(done) - 1)
        last = np.maximum(table[:, 1] - 1, first)
        table[:, 2], table[:, 3] = low[first] * BLOCK, np.minimum(end[last] * BLOCK, S)
    return table


def cut_keys(sizes: Sizes, who: Visibility, runs: Array, pieces: int) -> Array:
    """Cut the keys of each run into pieces of about equal work: (runs · pieces, 5), as ``runs``."""
    low, end = seen(sizes, who)
    table = []
    for first, last, start, stop, number in runs.tolist():
        changes = np.zeros(-(-sizes.keys // BLOCK) + 1, np.int64)
        np.add.at(changes, low[first:last], 1)
        np.add.at(changes, end[first:last], -1)
        tile = start // BLOCK
        done = np.cumsum(np.cumsum(changes)[tile : -(-stop // BLOCK)])  # a query tile for each key
        total = done[-1:].sum()  # 0 where the run sees no key
        cuts = np.searchsorted(done, total * np.arange(1, pieces) / pieces, side="right")
        edges = [start, *np.minimum((tile + cuts) * BLOCK, stop).tolist(), stop]
        table += [(first, last, *keys, number) for keys in pairwise(edges)]
    return np.array(table, np.int64)


@functools.lru_cache(64)
def backward_passes(sizes: Sizes, by_position: Visibility, threads: int) -> tuple[Array, Passes]:
    """Return the runs, and what ``backward`` is called with, one call after the other.

    ``by_position`` has no arrays, which no cut depends on. What is returned is for all who ask.

    One call makes all gradients of a run while its scores are at hand. Where the threads are many
    more than the runs, one makes dK and dV of a piece of a run's keys a task, and another one dQ of
    some query tiles a task. That is seven products in place of five, in the same order for each
    number, so the bits are the same.
    """
    runs = cut_runs(sizes, by_position)
    tasks = sizes.batch * sizes.kv_heads * len(runs)
    tiles = sizes.batch * sizes.heads * -(-sizes.queries // BLOCK)  # of queries: tasks, at most
    if min(threads, tiles) <= 1.5 * tasks:
        return runs, [(runs, DQ | DKV)]
    pieces = cut_keys(sizes, by_position, runs, -(-threads // tasks))
    return runs, [(pieces, DKV), (cut_runs(sizes, by_position, threads), DQ)]
