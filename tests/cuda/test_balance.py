"""Attention's blocks keep all multiprocessors of a GPU busy to the end: arithmetic, not a time.

A GPU hands its blocks out in the order x, y, z, each as soon as a multiprocessor has room. With
causal attention some blocks walk over 64 times as many tiles as others, so that order decides how
long the last of them runs alone. The grids here are those that the launchers ask for, and the tiles
of each block are counted by the kernels' own functions.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from accel.bench.predict import Launch, tiles_of_blocks
from accel.cuda import attention, ops_bf16, sources
from accel.cuda import device as devices
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice

require.shim()

PROBE = """
// work[i] = the tiles that block i walks over, i the block's number in the order of the hardware
KERNEL tiles_of_blocks(int* work, int own, int tile, int T, int S, int behind, int ahead,
                       int by_keys) {
    Rules rules = {};
    rules.T = T, rules.S = S, rules.behind = behind, rules.ahead = ahead;
    const int first = (by_keys ? key_tile() : query_tile()) * own;
    const int n = by_keys ? S : T, end = first + own < n ? first + own : n;
    const int from = by_keys ? rules.query_begin(first) : rules.key_begin(first);
    const int to = by_keys ? rules.query_end(end) : rules.key_end(end);
    if (threadIdx.x == 0)
        work[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] =
            to > from ? (to + tile - 1) / tile - from / tile : 0;
}
"""
SMS = 132  # of an H100 or H200; at width 128 one block fits each
T, HQ, HKV, D = 8192, 14, 2, 128  # of MyLLM-1B


class Asked(ShimDevice):
    """A device that keeps what it is asked to launch, on memory that nobody touches."""

    def __init__(self, warpgroups: bool) -> None:
        super().__init__(warpgroups=warpgroups)
        self.grids: dict[str, tuple[int, int, int]] = {}

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.empty(shape, dtype)

    def launch(
        self, source: str, kernel: str, grid: tuple[int, int, int], *_: Any, **__: Any
    ) -> None:
        self.grids[kernel] = grid


def grids(B: int, warpgroups: bool, **options: Any) -> dict[str, tuple[int, int, int]]:
    """Return the grids of attention, forward and backward, on B sequences of the model."""
    device = Asked(warpgroups)
    before = devices.use(device)
    try:
        q, k, v = (np.empty((B, T, heads, D), np.uint16) for heads in (HQ, HKV, HKV))
        out, cache = ops_bf16.attention_forward(q, k, v, **options)
        ops_bf16.attention_backward(out, cache)
    finally:
        devices.use(before)
    return device.grids


def work_of_blocks(kernel: str, tile: int, grid: tuple[int, int, int], window: int | None) -> Array:
    """Return the tiles of each block of a grid, in the order in which they are handed out."""
    probe = sources.text_of("attention.cuh") + PROBE
    device = ShimDevice(extra={"probe": probe})
    by_keys = kernel == "attention_dkv"
    work = device.upload(np.zeros(int(np.prod(grid)), np.int32))
    numbers = (attention.OWN, tile, T, T, window - 1 if window else 2 * T, 0, int(by_keys))
    arguments = (work, *(np.int32(n) for n in numbers))
    device.launch("probe", "tiles_of_blocks", grid, 32, arguments, shared=0, defines={})
    heads = HQ // grid[0] if by_keys else 1  # that a block walks over, one after the other
    return device.download(work) * heads


def efficiency(work: Sequence[int]) -> float:
    """Return the share of the multiprocessors' time that is used until the last block ends."""
    free = [0] * SMS
    for tiles in work:
        heapq.heapreplace(free, free[0] + int(tiles))
    return sum(work) / SMS / max(free)


def test_blocks_handed_out_one_by_one_are_counted_as_the_hardware_would() -> None:
    assert efficiency([3] * SMS) == 1
    assert efficiency([1] * SMS + [1]) == pytest.approx((SMS + 1) / SMS / 2)
    assert efficiency([SMS - 1] + [1] * (SMS - 1)) == pytest.approx(2 / SMS)


PATHS = pytest.mark.parametrize("warpgroups", [False, True], ids=["mma", "wgmma"])


def table(warpgroups: bool) -> dict[str, int]:
    """Return the rows of a tile that the blocks of each kernel walk over."""
    tiles = attention.WGMMA if warpgroups else attention.MMA
    return {kernel: of.rows[0] for kernel, of in tiles.items()}


@PATHS
@pytest.mark.parametrize("B", [1, 2, 4, 8])
def test_causal_attention_keeps_the_multiprocessors_busy(B: int, warpgroups: bool) -> None:
    for kernel, tile in table(warpgroups).items():
        work = work_of_blocks(kernel, tile, grids(B, warpgroups)[kernel], None)
        tiles = T // attention.OWN
        each = attention.OWN // tile
        assert sum(work) == B * HQ * each * tiles * (tiles + 1) // 2  # all of the triangle, once
        assert efficiency(work) >= 0.97, kernel
        assert predicted(kernel, tile, grids(B, warpgroups)[kernel], None) == sorted(work)[::-1]


def predicted(kernel: str, tile: int, grid: tuple[int, int, int], window: int | None) -> list[int]:
    """Return the tiles of each block by the arithmetic of ``myllm bench cuda --model``."""
    given = {"T": T, "S": T, "behind": window - 1 if window else 2 * T, "ahead": 0}
    if kernel == "attention_dkv":
        given["heads"] = HQ // grid[0]
    return tiles_of_blocks(Launch("", kernel, grid, 256, given, {}), tile)


@PATHS
@pytest.mark.parametrize(("B", "window"), [(2, 512), (2, 1024), (4, 2048), (8, 1024), (1, 4096)])
def test_attention_in_a_window_keeps_the_multiprocessors_busy(
    B: int, window: int, warpgroups: bool
) -> None:
    for kernel, tile in table(warpgroups).items():
        grid = grids(B, warpgroups, window=window)[kernel]
        work = work_of_blocks(kernel, tile, grid, window)
        assert efficiency(work) >= 0.97, kernel
        assert predicted(kernel, tile, grid, window) == sorted(work)[::-1]


def test_kernels_learn_their_tile_from_where_it_is_counted_here() -> None:
    for source in ("attention", "attention_mma", "attention_wgmma"):
        text = sources.text_of(f"{source}.cu")
        assert "blockIdx.z" not in text and "gridDim" not in text
        assert text.count("query_tile()") == 2 and text.count("key_tile()") == 1
