"""The shim's wgmma: descriptors read as the PTX ISA has them, and no misuse passes unseen."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from accel.cuda import sources
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice, ShimError, from_bf16, to_bf16

require.shim()

# Tiles of 64 and 128 columns in panels of 64, rows of 128 bytes, chunks swizzled, as in
# attention_tiles.cuh; a block is one warpgroup. `bug` says which mistake is made, 0 for none.
TOY = """
DEVICE u32 place(int rows, int row, int chunk, int bug) {
    const int swizzled = bug == 1 ? chunk % 8 : chunk % 8 ^ (row & 7);
    return chunk / 8 * rows * 128 + row * 128 + (swizzled << 4);
}
DEVICE u64 told(u32 address, u32 panels, int bug) {
    const u64 layout = (u64)(bug == 2 ? 2 : 1) << 62 | (u64)(bug == 3 ? 8 : 64) << 32;
    return layout | (u64)(panels >> 4) << 16 |
           (address + (bug == 4 ? threadIdx.x % 2 * 16 : bug == 5 ? 16384 : 0)) >> 4;
}
DEVICE void fill(u32 tile, const u16* from, int rows, int columns, int bug) {
    for (int i = threadIdx.x; i < rows * columns / 8; i += 128) {
        const int row = i / (columns / 8), chunk = i % (columns / 8);
        copy_async(tile + place(rows, row, chunk, bug), from + row * columns + chunk * 8, true);
    }
    copy_commit();
}
DEVICE void landed(int bug) {
    if (bug == 6) fence_async();
    copy_wait<0>();
    if (bug != 6 && bug != 7) fence_async();
    if (bug != 8) sync_block();
}
template <int N> DEVICE void finish(float* to, const float (&d)[N][4], int bug) {
    if (bug != 9) wgmma_commit();
    if (bug != 10 && bug != 11) wgmma_wait<0>();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < 4; ++i)
            to[(row + i / 2 * 8) * 8 * N + n * 8 + lane % 4 * 2 + i % 2] = d[n][i];
    if (bug == 11) wgmma_wait<0>();
}

// d (64 × 64) = a (64 × 128) bᵀ, b (64 × 128)
KERNEL by_columns(const u16* a, const u16* b, float* d, int bug) {
    SHARED(memory);
    const u32 ta = shared_address(memory), tb = ta + 64 * 256;
    fill(ta, a, 64, 128, bug);
    fill(tb, b, 64, 128, bug);
    landed(bug);
    float acc[8][4];
    if (bug != 12) wgmma_fence();
    for (int k = 0; k < 8; ++k)
        wgmma_rows(acc, told(ta + k / 4 * 64 * 128 + k % 4 * 32, 0, bug),
                   told(tb + k / 4 * 64 * 128 + k % 4 * 32, 0, bug), k > 0);
    finish(d, acc, bug);
}

// d (64 × 128) = a (64 × 32) b, b (32 × 128): a from registers
KERNEL by_rows(const u16* a, const u16* b, float* d, int bug) {
    SHARED(memory);
    const u32 tb = shared_address(memory);
    fill(tb, b, 32, 128, bug);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    u32 left[2][4];
    for (int k = 0; k < 2; ++k)
        for (int i = 0; i < 4; ++i) {
            const u16* at = a + (row + i % 2 * 8) * 32 + k * 16 + lane % 4 * 2 + i / 2 * 8;
            left[k][i] = at[0] | (u32)at[1] << 16;
        }
    float acc[16][4];
    for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
    landed(bug);
    if (bug != 12) wgmma_fence();
    for (int k = 0; k < 2; ++k)
        wgmma_columns(acc, left[k],
                      told(tb + k * (bug == 13 ? 32 : 16) * 128, (bug == 14 ? 16 : 32) * 128, bug));
    if (bug == 15)
        for (int i = 0; i < 4; ++i) left[0][i] = 0;
    finish(d, acc, bug);
}
"""
rng = np.random.default_rng(0)
A, B = (to_bf16(rng.standard_normal((64, 128)).astype(np.float32)) for _ in range(2))


def run(kernel: str, a: Array, b: Array, expected: Array, bug: int, how: tuple[str, bool]) -> None:
    extra = {"toy": sources.text_of("warpgroup.cuh") + TOY}
    device = ShimDevice(how[0], early=how[1], extra=extra, warpgroups=True)
    d = device.empty(expected.shape, np.float32)
    given = (device.upload(a), device.upload(b), d, np.int32(bug))
    device.launch("toy", kernel, (1, 1, 1), 128, given, shared=32768, defines={})
    np.testing.assert_allclose(device.download(d), expected, rtol=1e-5, atol=1e-4)


def by_columns(bug: int, how: tuple[str, bool]) -> None:
    run("by_columns", A, B, from_bf16(A) @ from_bf16(B).T, bug, how)


def by_rows(bug: int, how: tuple[str, bool]) -> None:
    left, right = np.ascontiguousarray(A[:, :32]), np.ascontiguousarray(B[:32])
    run("by_rows", left, right, from_bf16(left) @ from_bf16(right), bug, how)


DEVICES = [(order, early) for order in ORDERS for early in (False, True)]
Product = Callable[[int, tuple[str, bool]], None]


@pytest.mark.parametrize("how", DEVICES, ids=str)
@pytest.mark.parametrize("product", [by_columns, by_rows])
def test_a_right_kernel_gives_the_right_answer(product: Product, how: tuple[str, bool]) -> None:
    product(0, how)


MISUSES = {
    1: "Not equal",  # tiles that are not swizzled
    2: "another swizzle than 128 bytes",
    3: "Not equal",  # groups of eight rows elsewhere
    4: "lanes of a warp give different descriptors",
    5: "lies outside",
    6: r"has filled without fence_async\(\)",  # a fence before the copies have landed
    7: r"has filled without fence_async\(\)",  # none
    8: "Not equal",  # no barrier
    9: "products that are not committed are waited for",
    10: "products that its warp has not waited for",
    11: "Not equal",  # accumulators read before the wait
    12: r"without wgmma_fence\(\)",
    13: "Not equal|lies outside",  # another step through the rows
    14: "Not equal",  # panels elsewhere
    15: "registers changed before",
}


@pytest.mark.parametrize("bug", MISUSES)
def test_a_misuse_is_caught(bug: int) -> None:
    caught = []
    for product in (by_columns, by_rows)[bug > 12 :]:
        for how in DEVICES:
            try:
                product(bug, how)
            except (ShimError, AssertionError) as error:
                caught.append(str(error))
    assert any(re.search(MISUSES[bug], text) for text in caught), caught
