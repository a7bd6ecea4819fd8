"""The shim itself: it computes what CUDA would, and mistakes in a kernel do not pass unseen."""

from collections.abc import Callable

import numpy as np
import pytest

from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice, ShimError, from_bf16, to_bf16

require.shim()

TOY = """
// y[i] = x[n - 1 - i] within each block, through shared memory
KERNEL reverse(const float* x, float* y, int n) {
    SHARED(memory);
    float* tile = (float*)memory;
    const int i = threadIdx.x;
    tile[i] = x[blockIdx.x * n + i];
    sync_block();  // filled
    y[blockIdx.x * n + i] = tile[n - 1 - i];
}

// y = running sums of x over rounds, the tile used again in each round
KERNEL rounds(const float* x, float* y, int n_rounds) {
    SHARED(memory);
    float* tile = (float*)memory;
    const int i = threadIdx.x, n = blockDim.x;
    float total = 0.0f;
    for (int r = 0; r < n_rounds; ++r) {
        tile[i] = x[r * n + i];
        sync_block();  // filled
        total += tile[(i + 37) % n];
        sync_block();  // read
    }
    y[i] = total;
}

// The same with asynchronous copies into two tiles.
KERNEL pipeline(const float* x, float* y, int n_rounds) {
    SHARED(memory);
    const float* tile = (const float*)memory;
    const int i = threadIdx.x, n = blockDim.x;
    const u32 base = shared_address(memory);
    float total[4] = {};
    copy_async(base + i * 16, x + i * 4, true);
    copy_commit();
    for (int r = 0; r < n_rounds; ++r) {
        if (r + 1 < n_rounds)
            copy_async(base + ((r + 1) % 2 * n + i) * 16, x + ((r + 1) * n + i) * 4, true);
        copy_commit();
        copy_wait<1>();
        sync_block();  // landed
        for (int k = 0; k < 4; ++k) total[k] += tile[(r % 2 * n + (i + 37) % n) * 4 + k];
        sync_block();  // read
    }
    copy_wait<0>();  // the last, empty group
    for (int k = 0; k < 4; ++k) y[i * 4 + k] = total[k];
}

KERNEL sums(const float* x, float* y) {
    SHARED(memory);
    float* scratch = (float*)memory;
    const float total = block_sum(x[threadIdx.x], scratch);
    const float top = block_max(x[threadIdx.x], scratch);
    if (threadIdx.x == 0) {
        y[0] = total;
        y[1] = top;
    }
}

// d (16, 8) = a (16, 16) b (16, 8), b given as (8, 16): one warp
KERNEL product(const u16* a, const u16* bt, float* d) {
    SHARED(memory);
    u16* tile = (u16*)memory;
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) tile[i] = a[i];
    for (int i = lane; i < 128; i += 32) tile[256 + i] = bt[i];
    sync_block();
    const u32 base = shared_address(memory);
    u32 fa[4], fb[4];
    ldmatrix<false>(fa, base + (lane % 16 * 16 + lane / 16 * 8) * 2);
    ldmatrix<false>(fb, base + (256 + lane % 8 * 16 + lane / 8 % 2 * 8) * 2);
    const u32 b[2] = {fb[0], fb[1]};
    float c[4] = {};
    mma_bf16(c, fa, b);
    const int row = lane / 4, column = lane % 4 * 2;
    d[row * 8 + column] = c[0];
    d[row * 8 + column + 1] = c[1];
    d[(row + 8) * 8 + column] = c[2];
    d[(row + 8) * 8 + column + 1] = c[3];
}

// The same with b given as (16, 8) and turned by ldmatrix.
KERNEL product_turned(const u16* a, const u16* b, float* d) {
    SHARED(memory);
    u16* tile = (u16*)memory;
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) tile[i] = a[i];
    for (int i = lane; i < 128; i += 32) tile[256 + i] = b[i];
    sync_block();
    const u32 base = shared_address(memory);
    u32 fa[4], fb[4];
    ldmatrix<false>(fa, base + (lane % 16 * 16 + lane / 16 * 8) * 2);
    ldmatrix<true>(fb, base + (256 + lane % 16 * 8) * 2);
    const u32 turned[2] = {fb[0], fb[1]};
    float c[4] = {};
    mma_bf16(c, fa, turned);
    const int row = lane / 4, column = lane % 4 * 2;
    d[row * 8 + column] = c[0];
    d[row * 8 + column + 1] = c[1];
    d[(row + 8) * 8 + column] = c[2];
    d[(row + 8) * 8 + column + 1] = c[3];
}

KERNEL round_trip(const float* x, u16* y, int n) {
    if ((int)threadIdx.x < n) y[threadIdx.x] = to_bf16(x[threadIdx.x]);
}
"""

BODIES = {
    "divergent_shuffle": "if (threadIdx.x % 2) y[0] = shuffle_xor(x[0], 1);"
    " else if (ballot(true)) y[1] = 0;",
    "lonely_shuffle": "if (threadIdx.x < 7) y[0] = shuffle_xor(x[0], 1);",
    "divergent_barrier": "if (threadIdx.x < 32) { sync_block(); }\n else { sync_block(); }",
    "strange_barrier": "shim::come_to_some(16, 64, true);",
    "barrier_of_two_sizes": "shim::come_to_some(1, threadIdx.x < 32 ? 64 : 96, true);",
    "barrier_of_half_a_warp": "if (threadIdx.x % 2) shim::come_to_some(1, 32, true);",
    "arrival_for_nobody": "shim::come_to_some(1, 96, false);",
    "arrival_twice": "shim::come_to_some(1, 96, false); shim::come_to_some(1, 96, false);",
    "wait_for_nobody": "shim::come_to_some(1, 96, true);",
    "lonely_barrier": "if (threadIdx.x < 32) sync_block();",
    "global_overrun": "y[threadIdx.x + 1] = x[threadIdx.x];",
    "global_underrun": "y[(int)threadIdx.x - 1] = x[threadIdx.x];",
    "shared_overrun": "SHARED(memory); ((float*)memory)[threadIdx.x + 1] = x[threadIdx.x];",
    "forgotten_copy": "SHARED(m); copy_async(shared_address(m), x, true); copy_commit();",
    "copy_beyond": "SHARED(m); copy_async(shared_address(m) + 256, x, true); copy_wait<0>();",
    "crooked_load": "store16(y, load16(x + 1));",
    "crooked_store": "store16(y + 1, load16(x));",
    "crooked_matrix": "SHARED(m); u32 r[4]; ldmatrix<false>(r, shared_address(m) + 8); "
    "y[0] = r[0];",
}
for _name, _body in BODIES.items():
    TOY += f"\nKERNEL {_name}(const float* x, float* y) {{ (void)x; (void)y; {_body} }}\n"

DEVICES = [(order, early) for order in ORDERS for early in (False, True)]
X = np.random.default_rng(0).standard_normal(64 * 4 * 5).astype(np.float32)


def toy(
    order: str = "forward", early: bool = False, edit: tuple[str, str] | None = None
) -> ShimDevice:
    edits = {"toy.cu": [edit]} if edit else {}
    return ShimDevice(order, early=early, edits=edits, extra={"toy": TOY})


def run(
    device: ShimDevice, kernel: str, x: Array, out: int, *more: np.generic, **how: int
) -> Array:
    y = device.empty((out,), np.float32)
    grid, threads, shared = how.get("grid", 1), how.get("threads", 64), how.get("shared", 0)
    arguments = (device.upload(x), y, *more)
    device.launch("toy", kernel, (grid, 1, 1), threads, arguments, shared=shared, defines={})
    return device.download(y)


def run_reverse(device: ShimDevice) -> None:
    got = run(device, "reverse", X[:192], 192, np.int32(64), grid=3, shared=256)
    np.testing.assert_array_equal(got, X[:192].reshape(3, 64)[:, ::-1].reshape(-1))


def run_rounds(device: ShimDevice) -> None:
    rows = X.reshape(-1, 64)
    got = run(device, "rounds", X, 64, np.int32(len(rows)), shared=256)
    np.testing.assert_allclose(got, np.roll(rows, -37, axis=1).sum(0), rtol=1e-4, atol=1e-5)


def run_pipeline(device: ShimDevice) -> None:
    rows = X.reshape(5, 64, 4)
    got = run(device, "pipeline", X, 256, np.int32(5), shared=2 * 64 * 16)
    expected = np.roll(rows, -37, axis=1).sum(0).reshape(-1)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def run_sums(device: ShimDevice) -> None:
    got = run(device, "sums", X[:96], 2, threads=96, shared=128)
    np.testing.assert_allclose(got, [X[:96].sum(), X[:96].max()], rtol=1e-5)


def _run_product(device: ShimDevice, kernel: str) -> None:
    a, b = to_bf16(X[:256].reshape(16, 16)), to_bf16(X[256:384].reshape(16, 8))
    d = device.empty((16, 8), np.float32)
    given = b if kernel == "product_turned" else np.ascontiguousarray(b.T)
    arguments = (device.upload(a), device.upload(given), d)
    device.launch("toy", kernel, (1, 1, 1), 32, arguments, shared=768 + 128, defines={})
    np.testing.assert_allclose(d, from_bf16(a) @ from_bf16(b), rtol=1e-5, atol=1e-5)


def run_product(device: ShimDevice) -> None:
    _run_product(device, "product")


def run_product_turned(device: ShimDevice) -> None:
    _run_product(device, "product_turned")


RUNS = [run_reverse, run_rounds, run_pipeline, run_sums, run_product, run_product_turned]


@pytest.mark.parametrize("how", DEVICES, ids=str)
@pytest.mark.parametrize("check", RUNS)
def test_a_right_kernel_gives_the_right_answer(
    check: Callable[[ShimDevice], None], how: tuple[str, bool]
) -> None:
    check(toy(*how))


BUGS: list[tuple[Callable[[ShimDevice], None], str, str]] = [
    (run_reverse, "    sync_block();  // filled\n    y[", "    y["),
    (
        run_rounds,
        "sync_block();  // filled\n        total += tile[(i + 37)",
        "total += tile[(i + 37)",
    ),
    (
        run_rounds,
        "        sync_block();  // read\n    }\n    y[i] = total;",
        "    }\n    y[i] = total;",
    ),
    (run_pipeline, "copy_wait<1>()", "copy_wait<2>()"),
    (run_pipeline, "        copy_wait<1>();\n", ""),
    (run_pipeline, "        sync_block();  // landed\n", ""),
    (run_pipeline, "        sync_block();  // read\n    }\n    copy_wait", "    }\n    copy_wait"),
    (run_pipeline, "copy_async(base + ((r + 1) % 2 * n", "copy_async(base + (r % 2 * n"),
    (run_pipeline, "copy_wait<0>();  // the last, empty group", ""),
    (
        run_product,
        "(lane % 16 * 16 + lane / 16 * 8) * 2);\n    ldmatrix<false>(fb",
        "(lane / 2 * 16 + lane % 2 * 8) * 2);\n    ldmatrix<false>(fb",
    ),
    (run_product, "lane / 8 % 2 * 8", "0"),
    (run_product_turned, "ldmatrix<true>", "ldmatrix<false>"),
]


@pytest.mark.parametrize(
    ("check", "old", "new"), BUGS, ids=[f"{c.__name__}{i}" for i, (c, _, _) in enumerate(BUGS)]
)
def test_a_planted_bug_is_caught(check: Callable[[ShimDevice], None], old: str, new: str) -> None:
    caught = []
    for how in DEVICES:
        try:
            check(toy(*how, edit=(old, new)))
        except (ShimError, AssertionError) as error:
            caught.append(str(error))
    assert caught


def test_a_bug_in_what_kernels_share_is_caught() -> None:
    # block_max without its first barrier: fast warps overwrite the sums that slow ones still read
    edit = ("x = warp_max(x);\n    sync_block();\n", "x = warp_max(x);\n")
    wrong = 0
    for order in ORDERS:
        device = ShimDevice(order, edits={"device.cuh": [edit]}, extra={"toy": TOY})
        got = run(device, "sums", X[:96], 2, threads=96, shared=128)
        wrong += not np.allclose(got, [X[:96].sum(), X[:96].max()], rtol=1e-5)
    assert wrong


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divergent_shuffle", "different collectives"),
        ("lonely_shuffle", "wait for each other for ever"),
        ("divergent_barrier", "barriers of lines"),
        ("strange_barrier", "barriers of some warps are 1 to 15, not 16"),
        ("barrier_of_two_sizes", "barrier 1 is said to be of 64 and of 96 threads"),
        ("barrier_of_half_a_warp", "barrier 1 is over before all lanes of a warp have come"),
        ("arrival_for_nobody", "64 threads have arrived at barrier 1, where nobody waits for them"),
        ("arrival_twice", "a thread comes twice to barrier 1 before it is over"),
        ("wait_for_nobody", "wait for each other for ever"),
        ("lonely_barrier", "a thread ends while others wait|after .* threads have left"),
        ("global_overrun", "wrote outside an array of 256 bytes"),
        ("global_underrun", "wrote outside an array of 256 bytes"),
        ("shared_overrun", "wrote behind the 256 bytes"),
        ("forgotten_copy", "copies that nobody waited for"),
        ("copy_beyond", "lies outside the 256 bytes"),
        ("crooked_load", "a 16-byte load"),
        ("crooked_store", "a 16-byte store"),
        ("crooked_matrix", "shared address 8 is not a multiple"),
    ],
)
def test_what_cuda_leaves_undefined_is_an_error(kernel: str, message: str) -> None:
    with pytest.raises(ShimError, match=f"{kernel}.*({message})"):
        run(toy(), kernel, X[:64], 64, shared=256)


def test_arguments_are_held_to_the_kernel_s_types() -> None:
    device = toy()
    x, y = device.upload(X[:64]), device.empty((64,), np.float32)

    def launch(*arguments: object) -> None:
        device.launch("toy", "reverse", (1, 1, 1), 64, arguments, shared=256, defines={})  # type: ignore[arg-type]

    launch(x, y, np.int32(64))
    with pytest.raises(ShimError, match="argument 2: a NumPy scalar of type i is wanted, got int"):
        launch(x, y, 64)
    with pytest.raises(ShimError, match="scalar of type i is wanted, got int64"):
        launch(x, y, np.int64(64))
    with pytest.raises(ShimError, match="argument 1: a pointer is wanted, got float32"):
        launch(x, np.float32(1), np.int32(64))
    with pytest.raises(ShimError, match="a pointer to f is wanted, got uint16"):
        launch(x, to_bf16(y), np.int32(64))
    with pytest.raises(ShimError, match="has 3 parameters, got 2"):
        launch(x, y)


def test_a_grid_or_block_that_cuda_refuses_is_refused() -> None:
    for grid, threads in (((1, 65536, 1), 64), ((1, 1, 1), 48), ((1, 1, 1), 2048)):
        with pytest.raises(ShimError, match=r"blocks along y|threads must be"):
            toy().launch("toy", "reverse", grid, threads, (X, X, np.int32(1)), shared=0, defines={})
    with pytest.raises(ShimError, match="a block can have 232448 bytes"):
        toy().launch(
            "toy", "reverse", (1, 1, 1), 32, (X, X, np.int32(1)), shared=1 << 20, defines={}
        )


def test_bf16_rounds_to_nearest_even() -> None:
    device = toy()
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000000, 0x7FC00000], np.uint32
    )
    y = device.empty((6,), np.uint16)
    arguments = (device.upload(bits.view(np.float32)), y, np.int32(6))
    device.launch("toy", "round_trip", (1, 1, 1), 32, arguments, shared=0, defines={})
    assert [hex(v) for v in y] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x8000", "0x7fff"]
    np.testing.assert_array_equal(y, to_bf16(bits.view(np.float32)))


def test_new_memory_holds_nan() -> None:
    device = toy()
    assert np.isnan(device.empty((3,), np.float32)).all()
    assert np.isnan(from_bf16(device.empty((3,), np.uint16))).all()


def test_an_edit_must_fit_its_source_once() -> None:
    with pytest.raises(ValueError, match="0 places"):
        run_reverse(toy(edit=("no such text", "")))
