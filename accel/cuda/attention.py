"""Read reference/study/tiled_attention.py first: its tables never leave the chip.

Kernels, a path each: ``attention_wgmma.cu`` (Hopper alone) and ``attention_mma.cu`` on tensor
cores, for bf16 with widths up to 128 that are multiples of 8; ``attention.cu``, the plain one, for
all else. ``paths.py`` chooses for a run.
Forward keeps the output and one float a row, log Σ exp of its scores; backward makes the
probabilities again from it, in two kernels, so that no atomics are needed: one whose blocks own
queries (dq), one whose blocks own keys and loop over all query heads that read them (dk, dv). Where
the blocks of keys would be too few to share out evenly, each takes one query head of the group, and
the sums over the heads are a kernel of their own.

A causal T × T head of width d takes 2·T²·d operations forward and 5·T²·d backward (half the full
square), of which the two kernels do 7·T²·d, since both make the scores again. Tiles that causality
or a window hides from a whole block are not walked over.
"""

from collections.abc import Mapping, Set
from typing import Any, NamedTuple, get_args

import numpy as np

from accel import Attention
from accel.cuda.arrays import contiguous, pack, packs, strides, to_dtype
from accel.cuda.device import BF16, F32, THREADS, ceil_div, current, empty, launch, zeros
from accel.cuda.elementwise import drawn_by
from accel.cuda.order import rising, walked
from reference.types import Array, Dropout, DropoutKey
from reference.visibility import Visibility

# of those that a device has it takes the first, unless told
PATHS: tuple[Attention, ...] = get_args(Attention)[1:]
PLAIN = PATHS[-1]
WIDEST, CHUNK = 128, 8  # of heads on tensor cores; the elements that their width is a multiple of

QUERIES, KEYS = 16, 32  # a tile of attention.cu
OWN = 128  # rows of a block on tensor cores, unless its Tiles say otherwise
RESERVED = 1024  # bytes of shared memory that CUDA takes for each block

# As many blocks of keys share out well, a whole group of query heads each: over 132 multiprocessors
# with room for one to 97 % or better. The triangle's shortest blocks fill gaps; those of a window
# are all equal.
ENOUGH, ENOUGH_EQUAL = 256, 1025

RANGE = 32  # positions whose documents are summed up: RANGE in attention.cuh


class Tiles(NamedTuple):
    """How a kernel on tensor cores is cut, and what its blocks keep in shared memory."""

    own: int  # tiles of the block's own rows
    walked: int  # tiles of those that it walks over, all stages together
    rows: int  # of such a tile
    floats: int = 0  # that it keeps beside them
    block: int = OWN  # rows that a block owns
    warps: int = 8  # of a block; of eight, one block fits a multiprocessor's registers
    without: tuple[str, ...] = ()  # options for which it has no registers
    ordered: bool = True  # whether order.py says in which order its blocks come

    @property
    def blocks(self) -> int:
        """Blocks that share a multiprocessor."""
        return 8 // self.warps

    def shared(self, head: int) -> int:
        """Return the bytes of shared memory that a block of heads padded to ``head`` asks for."""
        return 2 * head * (self.own * self.block + self.walked * self.rows) + 4 * self.floats

    def fit(self, head: int, limit: int) -> bool:
        """Return whether its blocks fit where one of them may ask for ``limit`` bytes."""
        return self.blocks * (self.shared(head) + RESERVED) <= limit + RESERVED


OPTIONS = ("ALIBI", "DROPOUT", "MASKED")
CROWDED = OPTIONS[:2]

# Of each kernel the first way is taken that fits the GPU and has registers for the options. GPUs of
# 99 KiB a block have no room for two of dq, or of dk, dv, at a width of 128
MMA = {
    "attention_forward": (
        Tiles(1, 2, 64, warps=4, without=OPTIONS),
        Tiles(1, 2, 32, warps=4, without=("DROPOUT",)),
        Tiles(1, 2, 64),
    ),
    "attention_dq": (
        Tiles(2, 2, 32, 2 * OWN, warps=4, without=("ALIBI",)),
        Tiles(2, 2, 64, 2 * OWN),
    ),
    "attention_dkv": (
        Tiles(2, 4, 32, 4 * 32, block=64, warps=4, ordered=False),
        Tiles(2, 4, 32, 4 * 32, ordered=False),
    ),
}
WGMMA = {
    "attention_forward": (Tiles(1, 6, 128, without=CROWDED), Tiles(1, 6, 64)),
    "attention_dq": (Tiles(2, 8, 64),),
    "attention_dkv": (Tiles(2, 6, 64, 6 * 64, without=CROWDED), Tiles(2, 6, 32, 6 * 32)),
}
TILES: dict[str, dict[str, tuple[Tiles, ...]]] = {"wgmma": WGMMA, "mma": MMA}


def way(path: str, kernel: str, head: int, options: Set[str], limit: int) -> Tiles:
    """Return how a kernel is cut where a block may ask for ``limit`` bytes: the last if none fits.

    ``options`` are those of OPTIONS that it is compiled with.
    """
    *ways, last = TILES[path][kernel]
    return next((t for t in ways if t.fit(head, limit) and options.isdisjoint(t.without)), last)


def offered() -> tuple[Attention, ...]:
    """Return the paths that the device in use has."""
    return PATHS if current().warpgroups else PATHS[1:]


def take(path: Attention) -> None:
    """Let attention take a path on the device in use, where its arrays allow it.

    Raises
    ------
    ImportError
        When the device does not have it.
    """
    if path not in offered():
        raise ImportError(
            f"attention by {path!r} needs a GPU of compute capability 9.0 (H100, H200), and this "
            f"one has {' and '.join(map(repr, offered()))}: run.attention may name another, which "
            "gives other last bits"
        )
    current().attention = path
    current().recordings.clear()  # which go by the path before


class AttentionCache(NamedTuple):
    q: Array  # (B, T, Hq, d)
    k: Array  # (B, S, Hkv, d)
    v: Array  # (B, S, Hkv, dv)
    out: Array  # (B, T, Hq, dv)
    lse: Array  # (B, Hq, T) float32: ln Σ exp of each row's scores; +inf where it sees nothing
    rules: dict[str, Any]  # the kernels' other parameters, by name


def attention_forward(
    q: Array, k: Array, v: Array, who: Visibility, *, scale: float, dropout: Dropout | None
) -> tuple[Array, AttentionCache]:
    """Return o (B, T, Hq, dv), as ``reference.attention.forward``."""
    B, T, Hq, d = q.shape
    _, Hkv, dv = v.shape[1:]
    q, k, v = (_with_rows(x) for x in (q, k, v))
    fast = _tensor_cores(q, k, v)
    rules = {"Hq": Hq, "Hkv": Hkv, "d": d, "dv": dv, "scale": scale}
    rules |= _visible(who, fast) | {"dropping": dropout is not None}
    rules |= drawn_by(dropout or Dropout(0.0, DropoutKey(0, 0, 0, 0)))
    out, lse = empty((B, T, Hq, dv), q.dtype), empty((B, Hq, T), F32)
    given = _strided(q=q, k=k, v=v) | rules | {"out": out, "lse": lse}
    if fast:
        _launch_fast("attention_forward", T, Hq, given)
    else:
        floats = QUERIES * (d + dv + KEYS + 1) + KEYS * (d + 1 + dv)
        _launch("attention_forward", Hq, ceil_div(T, QUERIES), floats, given)
    return out, AttentionCache(q, k, v, out, lse, rules)


def attention_backward(dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v were given.

    Where the shapes allow they are neighbouring views of one (B, T, Hq + 2·Hkv, d) array, which
    ``split_heads_backward`` then returns without a copy.
    """
    q, k, v, out, lse, rules = cache
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    if T == 0:  # nobody asks; the kernel of dk and dv counts on a query
        dq, dk, dvalue = (zeros(x.shape, x.dtype) for x in (q, k, v))
        return dq, dk, dvalue
    dout = _with_rows(dout)
    delta = empty((B, Hq, T), F32)
    common = _strided(dout=dout) | {"delta": delta}
    lanes = min(32, 1 << (ceil_div(dv, pack(q)) - 1).bit_length())  # that share a row
    sizes = {"T": T, "Hq": Hq, "dv": dv, "lanes": lanes}
    grid = (ceil_div(T * Hq, THREADS // lanes), B)
    launch("attention", "attention_delta", grid, out=out, **common, **sizes)
    if T == S and d == dv:
        whole = empty((B, T, Hq + 2 * Hkv, d), q.dtype)
        dq, dk, dvalue = whole[:, :, :Hq], whole[:, :, Hq : Hq + Hkv], whole[:, :, Hq + Hkv :]
    else:
        dq, dk, dvalue = (empty(x.shape, x.dtype) for x in (q, k, v))
    common |= _strided(q=q, k=k, v=v) | rules | {"lse": lse}
    for_queries, for_keys = common | _strided(dq=dq), common | _strided(dk=dk, dvalue=dvalue)
    if _tensor_cores(q, k, v, dout):
        _launch_fast("attention_dq", T, Hq, for_queries)
        _launch_dkv(dk, dvalue, for_keys)
    else:
        floats = QUERIES * (2 * d + dv + KEYS + 1) + KEYS * (d + 1 + dv + 1)
        _launch("attention_dq", Hq, ceil_div(T, QUERIES), floats, for_queries)
        floats = KEYS * (2 * d + 2 * dv + 2) + QUERIES * (d + dv + 2 * (KEYS + 1))
        _launch("attention_dkv", Hkv, ceil_div(S, KEYS), floats, for_keys)
    return dq, dk, dvalue


def _visible(who: Visibility, fast: bool) -> dict[str, Any]:
    """Return who may see whom as the kernels are told."""
    T, S, window = who.queries, who.keys, who.window
    behind = min(window - 1, T + S) if window else T + S  # no distance is T + S
    slopes = None if who.alibi is None else to_dtype(who.alibi, F32)
    arrays = {"alibi": slopes, "key_mask": who.key_mask, "documents": who.documents}
    given = {name: x if x is None else contiguous(x) for name, x in arrays.items()}
    documents = given["documents"]
    given["ranges"] = _ranges(documents) if fast and documents is not None else None
    return {"T": T, "S": S, "behind": behind, "ahead": 0 if who.causal else behind, **given}


def _launch_dkv(dk: Array, dvalue: Array, given: dict[str, Any]) -> None:
    """Run attention_dkv on tensor cores, on a group of query heads a block or on one of them."""
    B, S, Hkv, _ = dk.shape
    Hq, group = given["Hq"], given["Hq"] // Hkv
    tiles = _tiles("attention_dkv", given)
    enough = ENOUGH_EQUAL if given["behind"] < S - 1 else ENOUGH  # a window: equal
    split = group > 1 and ceil_div(S, tiles.block) * Hkv * B < enough * tiles.blocks
    parts = [empty((B, S, Hq, x.shape[3]), F32) if split else None for x in (dk, dvalue)]
    given |= {"heads": 1 if split else group, "dk_parts": parts[0], "dv_parts": parts[1]}
    _launch_fast("attention_dkv", S, Hq if split else Hkv, given)
    for part, to, factor in zip(parts, (dk, dvalue), (given["scale"], 1.0), strict=True):
        if part is not None:
            sizes = {"rows": B * S * Hkv, "S": S, "Hkv": Hkv, "group": group, "factor": factor}
            sizes["width"] = to.shape[3]
            blocks = packs(to, to.size)
            launch("attention", "sum_heads", blocks, part=part, **_strided(to=to), **sizes)


def _launch(kernel: str, heads: int, tiles: int, floats: int, given: dict[str, Any]) -> None:
    """Run a kernel of attention.cu with ``floats`` floats of shared memory."""
    launch("attention", kernel, (heads, len(given["q"]), tiles), 128, 4 * floats, **given)


def _launch_fast(kernel: str, n: int, heads: int, given: dict[str, Any]) -> None:
    """Run a kernel of attention_wgmma.cu or attention_mma.cu, whose blocks own a part of n rows."""
    tiles, head, options = _tiles(kernel, given), _head(given), _options(given)
    keys = _tiles("attention_forward", given).rows  # from which wgmma's dk, dv take theirs
    more = {"HEAD": head, "KEYS": keys, "WARPS": tiles.warps}
    more |= {option: int(option in options) for option in OPTIONS}
    grid = heads, len(given["q"]), ceil_div(n, tiles.block)
    if tiles.ordered:
        lengths = blocks(kernel, tiles.block, tiles.rows, given)
        places = current().processors * tiles.blocks
        more["rising"] = rising(lengths, grid[0] * grid[1], places)
    launch(
        f"attention_{_path()}",
        kernel,
        grid,
        32 * tiles.warps,
        tiles.shared(head),
        **given,
        **more,
    )


def blocks(kernel: str, block: int, rows: int, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tiles of ``rows`` rows that the blocks of a head walk over, the last tile first.

    Of a kernel whose blocks own keys it is the first tile first: under causality the longest.
    """
    T, S, behind, ahead = (int(given[name]) for name in ("T", "S", "behind", "ahead"))
    if kernel == "attention_dkv":
        heads = int(given["heads"])
        return tuple(heads * n for n in walked(S, T, block, rows, ahead, behind))
    return walked(T, S, block, rows, behind, ahead)[::-1]


def _path() -> str:
    return current().attention or offered()[0]


def _head(given: dict[str, Any]) -> int:
    """Return the width to which heads are padded."""
    return 64 if max(given["d"], given["dv"]) <= 64 else 128


def _options(given: dict[str, Any]) -> set[str]:
    """Return what of OPTIONS the rules ask for."""
    asked = {
        "ALIBI": given["alibi"] is not None,
        "MASKED": given["key_mask"] is not None or given["documents"] is not None,
        "DROPOUT": given["dropping"],
    }
    return {option for option, on in asked.items() if on}


def _tiles(kernel: str, given: dict[str, Any]) -> Tiles:
    return way(_path(), kernel, _head(given), _options(given), current().shared_limit)


def _tensor_cores(*arrays: Array) -> bool:
    """Return whether tensor cores are to have the arrays: bf16, narrow enough, 16-byte chunks."""
    return current().attention != PLAIN and all(
        x.dtype == BF16
        and x.shape[3] <= WIDEST
        and x.shape[3] % CHUNK == 0
        and all(s % CHUNK == 0 for s in strides(x)[:3])
        and current().address(x) % 16 == 0
        for x in arrays
    )


def _ranges(documents: Array) -> Array:
    """Return the least and greatest document of each 32 positions, (B, tiles, 2) int32."""
    B, S = documents.shape
    ranges = empty((B, ceil_div(S, RANGE), 2), np.int32)
    given = {"documents": documents, "ranges": ranges, "pairs": ranges.size // 2, "S": S}
    launch("attention", "document_ranges", ceil_div(ranges.size // 2, 256), **given, BF16=1)
    return ranges


def _with_rows(x: Array) -> Array:
    """Return x (B, T, H, d) with its last axis contiguous."""
    return x if x.shape[3] == 1 or strides(x)[3] == 1 else contiguous(x)


def _strided(**arrays: Array) -> dict[str, Any]:
    """Return (B, T, H, d) arrays and their strides in elements: q, q_b, q_t, q_h for ``q``."""
    given: dict[str, Any] = dict(arrays)
    for name, x in arrays.items():
        given |= zip((f"{name}_b", f"{name}_t", f"{name}_h"), strides(x)[:3], strict=True)
    return given
