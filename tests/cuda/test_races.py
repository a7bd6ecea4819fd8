"""No kernel has a race, whatever the order of threads, nor touches what lies outside its arrays.

The detector is tests/cuda_shim/races.h. That it sees what it should: mistakes planted in toys here,
in every order of threads, and with ``-m slow`` each barrier, wait and fence of the kernels removed.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import attention, decode, ops, ops_bf16, sources
from accel.cuda import device as devices
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice, ShimError, from_bf16, to_bf16
from tests.helpers.cuda_barriers import removal, runs, synchronizations
from tests.helpers.cuda_cases import (
    Case,
    attention_cases,
    cases,
    long_attention_cases,
    rounded,
    run_backend,
)
from tests.helpers.race_programs import ACTIVE, BLOCKS, STEPS, THREADS, has_race, random_program

require.shim()

# ---- toys: `bug` says which mistake is made, 0 for none ------------------------------------------

TOYS = """
// y[i] = x of the neighbour, by way of shared memory
KERNEL lanes(const float* x, float* y, int bug) {
    SHARED(memory);
    float* tile = (float*)memory;
    const int i = threadIdx.x;
    tile[i] = x[i];
    if (bug != 1 && bug != 2) sync_warp();
    if (bug == 2) (void)shuffle_xor(0.0f, 1);  // lanes have met, and it orders nothing
    y[i] = tile[bug == 3 ? i ^ 32 : i ^ 1];    // the other warp's needs more than sync_warp()
    if (bug == 5) sync_warp();
    if (bug != 4 && bug != 5) sync_block();
    if (bug == 6) sync_block();
    tile[i ^ (bug == 6 ? 1 : bug == 5 ? 33 : 0)] = 0.0f;
    if (bug == 6) tile[i] = 1.0f;  // two have written it
}

// y[i] = x[i % 32] by way of a matrix of the warp's own rows
KERNEL matrix(const float* x, float* y, int bug) {
    SHARED(memory);
    const int i = threadIdx.x;
    store16(memory + i * 16, load16(x + i % 16 * 4));
    if (bug != 1) sync_warp();  // or the lane's own row would be the others' too soon
    u32 r[4];
    ldmatrix<false>(r, shared_address(memory) + i * 16);
    if (bug != 2) sync_warp();
    memory[(i ^ (bug == 3 ? 32 : 1)) * 16] = 0;
    y[i] = bits_to_float(r[0]);
}

// y[0] = what device.cuh adds up over the block, one sum after the other
KERNEL sums(const float* x, float* y, int) {
    SHARED(memory);
    float* scratch = (float*)memory;
    const float v = x[threadIdx.x], total = block_sum(v, scratch), top = block_max(v, scratch);
    if (threadIdx.x == 0) y[0] = total + top;
    (void)block_max(block_sum(v, scratch), scratch);
}

// y[row] = 2 x[row]: a block a row
KERNEL rows(const float* x, float* y, int bug) {
    const int n = blockDim.x, row = bug == 1 ? blockIdx.x / 2 : blockIdx.x;
    const float v = bug == 2 ? y[(row + 1) % 4 * n + threadIdx.x] : 0.0f;
    y[row * n + threadIdx.x] = 2.0f * x[blockIdx.x * n + threadIdx.x] + 0.0f * v;
}

// y[i] = x[i], both of 64
KERNEL bounds(const float* x, float* y, int bug) {
    SHARED(memory);
    const int i = threadIdx.x, away[] = {0, 1, -1, 1 << 28};
    float v = x[i + (bug < 4 ? away[bug] : 0)];
    if (bug == 4) v = bits_to_float(load16(x + i / 4 * 4 + 4).w[0]);
    if (bug == 5) v = ((const float*)memory)[i + 1];
    y[bug == 6 ? i + 1 : i] = v;
}

// y[i] = the first of the neighbour's four numbers of x
KERNEL copies(const float* x, float* y, float* z, int bug) {
    SHARED(memory);
    const float* tile = (const float*)memory;
    const int i = threadIdx.x, n = blockDim.x;
    const u32 to = shared_address(memory) + i * 16;
    copy_async(to, (bug == 6 ? z : x) + 4 * i, true);
    copy_commit();
    float v = bug == 1 ? tile[4 * i] : 0.0f;  // its own, but not yet there
    if (bug == 2) sync_block();               // a barrier is no wait
    if (bug == 2) v += tile[4 * ((i + 37) % n)];
    if (bug == 6) sync_block();
    if (bug == 6) z[4 * ((i + 37) % n)] = 0.0f;  // what a copy may still read
    copy_wait<0>();
    if (bug != 3) sync_block();
    v += tile[4 * ((i + 37) % n)];
    if (bug != 4) sync_block();
    if (bug == 5) copy_async(to, x + 4 * i, true);
    copy_async(to, x + 4 * i, true);
    copy_commit();
    copy_wait<0>();
    y[i] = v;
}

// y = x of the neighbour, of 32 and of 32 more, by way of a place that one warp fills and one reads
KERNEL turns(const float* x, float* y, int bug) {
    SHARED(memory);
    float* tile = (float*)memory;
    const int i = threadIdx.x, lane = i % 32;
    if (i < 32) {
        if (bug == 1) barrier_arrive<64>(1);
        tile[lane] = x[lane];
        if (bug == 2) y[lane] = tile[lane ^ 1];
        if (bug != 1) barrier_arrive<64>(1);
        if (bug == 3) y[lane] = tile[lane ^ 1];  // arriving orders nothing for who goes on
        if (bug == 4) barrier_arrive<64>(2);
        else barrier_wait<64>(2);
        tile[bug == 5 ? lane ^ 1 : lane] = x[lane + 32];
        barrier_arrive<64>(bug == 6 ? 3 : 1);
    } else {
        barrier_wait<64>(1);
        if (bug == 7) barrier_arrive<64>(2);
        y[lane] = tile[lane ^ 1];
        if (bug != 7) barrier_arrive<64>(2);
        barrier_wait<64>(bug == 6 ? 3 : 1);
        y[lane + 32] = tile[lane ^ 1];
    }
    if (bug == 5 && i < 32) tile[lane] = 0.0f;
}

// What each thread does, step by step, to a word of either memory: codes (steps, all threads).
KERNEL program(const int* codes, float* global, int steps) {
    SHARED(memory);
    float* shared = (float*)memory;
    for (int s = 0; s < steps; ++s) {
        const int code = codes[(s * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x];
        if (code == 1) *global = 1.0f;
        if (code == 2) *shared = 1.0f;
        if (code == 3 && *global == 7.0f) return;  // which it never is
        if (code == 4 && *shared == 7.0f) return;
        if (code == 5) copy_async4(shared_address(shared), global, true);
        if (code == 5) copy_commit();
        if (code == 6) copy_wait<0>();
        if (code == 7) sync_warp();
        if (code == 8) sync_block();
        if (code < 9) continue;
        const u32 barrier = code / 8;  // of two or three warps
        if (code % 4 == 0) barrier_arrive<64>(barrier);
        if (code % 4 == 1) barrier_wait<64>(barrier);
        if (code % 4 == 2) barrier_arrive<96>(barrier);
        if (code % 4 == 3) barrier_wait<96>(barrier);
    }
}

DEVICE u64 told(u32 address) { return (u64)1 << 62 | (u64)64 << 32 | address >> 4; }

// d = a aᵀ, a (64 × 64), which all threads store to shared memory
KERNEL products(const u16* a, float* d, int bug) {
    SHARED(memory);
    const int i = threadIdx.x, lane = i % 32, top = i / 32 * 16 + lane / 4;
    for (int j = i; j < 2 * 64 * 8; j += 128) {  // twice: the left operand, the right one
        const int row = j / 8, chunk = j % 8;
        const Pack16 eight = load16(a + row % 64 * 64 + chunk * 8);
        store16(memory + row * 128 + ((chunk ^ (row & 7)) << 4), eight);
    }
    if (bug == 2) sync_block();
    if (bug != 1) fence_async();
    if (bug != 2 && bug != 3) sync_block();
    const u32 own = shared_address(memory), tile = own + 64 * 128;
    float acc[8][4], more[8][4] = {};
    u32 left[4] = {};
    wgmma_fence();
    for (int k = 0; k < 4; ++k)
        wgmma_rows(acc, told(own + k * 32), told(tile + k * 32), k > 0);
    wgmma_commit();
    if (bug == 4) memory[64 * 128 + i] = 0;  // what the product reads
    if (bug == 5) d[i] = acc[0][0];
    if (bug == 6) acc[1][2] = 0.0f;
    wgmma_wait<0>();
    memory[i / 32 * 16 * 128 + lane] = 0;  // the warp's own rows, which it alone has multiplied
    if (bug == 7) memory[(i + 37) % 128 / 32 * 16 * 128 + lane] = 0;  // another warp's
    wgmma_fence();
    wgmma_columns(more, left, told(tile));
    wgmma_commit();
    if (bug == 8) left[1] = 1;
    wgmma_wait<0>();
    for (int n = 0; n < 8; ++n)
        for (int e = 0; e < 4; ++e)
            d[(top + e / 2 * 8) * 64 + n * 8 + lane % 4 * 2 + e % 2] = acc[n][e] + more[n][e];
}
"""

RNG = np.random.default_rng(0)
X = RNG.standard_normal(4 * 64).astype(np.float32)
A = to_bf16(RNG.standard_normal((64, 64)).astype(np.float32))


@pytest.fixture(scope="module")
def toys() -> dict[str, ShimDevice]:
    return {order: shim(order) for order in ORDERS}


def shim(order: str, **how: Any) -> ShimDevice:
    extra = {"toys": sources.text_of("warpgroup.cuh") + TOYS}
    return ShimDevice(order, extra=extra, races=True, **how)


def toy(device: ShimDevice, kernel: str, bug: int) -> Array:
    blocks, threads, given = 1, 64, X[:64]
    if kernel == "rows":
        blocks, given = 4, X
    elif kernel == "copies":
        given = X
    elif kernel == "products":
        threads, given = 128, A
    elif bug == 4:
        given = X[:66]  # 16 bytes begin inside
    y = device.empty((64, 64) if kernel == "products" else given.shape, np.float32)
    if kernel not in ("rows", "copies", "products"):
        y = device.empty((64,), np.float32)
    arrays = [device.upload(given), y]
    if kernel == "copies":
        arrays.append(device.upload(X))
    shared = 16384 if kernel == "products" else 1024 if kernel in ("copies", "matrix") else 256
    device.launch(
        "toys", kernel, (blocks, 1, 1), threads, (*arrays, np.int32(bug)), shared=shared, defines={}
    )
    return device.download(y)


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_kernel_has_no_race(order: str, toys: dict[str, ShimDevice]) -> None:
    device = toys[order]
    np.testing.assert_array_equal(toy(device, "lanes", 0), X[:64].reshape(32, 2)[:, ::-1].ravel())
    np.testing.assert_array_equal(toy(device, "rows", 0), 2 * X)
    np.testing.assert_array_equal(toy(device, "matrix", 0), np.tile(X[:32], 2))
    np.testing.assert_allclose(toy(device, "sums", 0)[0], X[:64].sum() + X[:64].max(), rtol=1e-5)
    np.testing.assert_array_equal(toy(device, "bounds", 0), X[:64])
    np.testing.assert_array_equal(toy(device, "copies", 0)[:64], np.roll(X[::4], -37))
    swapped = X[:64].reshape(32, 2)[:, ::-1].ravel()
    np.testing.assert_array_equal(toy(device, "turns", 0), swapped)
    np.testing.assert_array_equal(toy(device, "turns", 6), swapped)  # another barrier will do
    wide = from_bf16(A)
    np.testing.assert_allclose(toy(device, "products", 0), wide @ wide.T, rtol=1e-5, atol=1e-4)


# Which of two accesses comes second is the order's choice.
UNORDERED = r"which (thread \d+ has written|another (lane|warp) has read), with no"
AWAY = "fills that it has not waited for"
BUSY = "while a copy or product reads it that nobody has waited for"
MISTAKES = {
    ("lanes", 1): UNORDERED,
    ("lanes", 2): UNORDERED,
    ("lanes", 3): UNORDERED,
    ("lanes", 4): UNORDERED,
    ("lanes", 5): UNORDERED,
    ("lanes", 6): "writes byte .* which thread .* has written, with no barrier",
    ("matrix", 1): UNORDERED,
    ("matrix", 2): UNORDERED,
    ("matrix", 3): UNORDERED,
    ("rows", 1): "writes byte .* of argument 1, which another block has written",
    ("rows", 2): "of argument 1, which another block has (read|written)",
    ("bounds", 1): "reads 4 bytes outside of every array, up to 4 bytes behind argument 0",
    ("bounds", 2): "reads 4 bytes outside of every array, from 4 bytes before argument 0",
    ("bounds", 3): "reads 4 bytes outside of every array",
    ("bounds", 4): "reads 16 bytes outside of every array, up to 8 bytes behind argument 0",
    ("bounds", 5): "reads 4 bytes outside of every array, up to 4 bytes behind shared memory",
    ("bounds", 6): "writes 4 bytes outside of every array, up to 4 bytes behind argument 1",
    ("copies", 1): AWAY,
    ("copies", 2): AWAY,
    ("copies", 3): f"{UNORDERED}|{AWAY}",
    ("copies", 4): f"{UNORDERED}|{AWAY}",
    ("copies", 5): AWAY,
    ("copies", 6): BUSY,
    ("turns", 1): UNORDERED,
    ("turns", 2): UNORDERED,
    ("turns", 3): UNORDERED,
    ("turns", 4): f"{UNORDERED}|a thread comes twice to barrier 1",
    ("turns", 5): "writes byte .* which (thread .* has written|another warp has read), with no",
    ("turns", 7): UNORDERED,
    ("products", 1): r"multiplies byte .* without fence_async\(\)",
    ("products", 2): r"multiplies byte .* without fence_async\(\) and a barrier since",
    ("products", 3): "multiplies byte .* which thread .* has written, with no barrier",
    ("products", 4): BUSY,
    ("products", 5): "reads an accumulator of a product that it has not waited for",
    ("products", 6): "writes an accumulator of a product that it has not waited for",
    ("products", 7): f"{UNORDERED}|{BUSY}",
    ("products", 8): "changes a left operand of a product that it has not waited for",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kernel", "bug"), MISTAKES)
def test_a_mistake_is_seen_in_any_order(
    kernel: str, bug: int, order: str, toys: dict[str, ShimDevice]
) -> None:
    with pytest.raises(ShimError, match=MISTAKES[kernel, bug]):
        toy(toys[order], kernel, bug)


def test_the_message_says_where(toys: dict[str, ShimDevice]) -> None:
    with pytest.raises(ShimError) as caught:
        toy(toys["forward"], "rows", 1)
    lines = toys["forward"].extra["toys"].splitlines()
    (number,) = re.findall(r", at toys\.cu:(\d+) \(block 1,0,0, thread 0\)$", str(caught.value))
    assert lines[int(number) - 1].strip().startswith("y[row * n + threadIdx.x] = ")


def test_an_array_of_a_step_ends_where_the_next_one_begins(toys: dict[str, ShimDevice]) -> None:
    device = toys["forward"]
    block = device.empty((1024,), np.uint8)
    x, y = (device.piece(block, at, (64,), np.float32, None) for at in (0, 512))

    def launch(bug: int) -> None:
        given = (x, y, np.int32(bug))
        device.launch("toys", "bounds", (1, 1, 1), 64, given, shared=0, defines={})

    launch(0)
    with pytest.raises(ShimError, match="reads 4 bytes outside of every array, up to 4"):
        launch(1)
    with pytest.raises(ShimError, match="writes 4 bytes outside of every array"):
        launch(6)


# ---- programs at random: the detector against the definition -------------------------------------


def test_a_race_is_told_if_and_only_if_there_is_one(toys: dict[str, ShimDevice]) -> None:
    rng = np.random.default_rng(0)
    racing = 0
    for _ in range(200):
        codes = random_program(rng)
        expected = has_race(codes)
        racing += expected
        for device in toys.values():
            word = device.upload(np.zeros(1, np.float32))
            given = (device.upload(codes), word, np.int32(STEPS))
            told = ""
            try:
                device.launch(
                    "toys", "program", (BLOCKS, 1, 1), THREADS, given, shared=4, defines={}
                )
            except ShimError as error:
                told = str(error)
            assert ("a race" in told) == expected, f"{told}\n{codes[:, :, ACTIVE]}"
    assert 40 < racing < 160


# ---- the kernels ---------------------------------------------------------------------------------

SLOW = pytest.mark.slow
QUICK = ("everything", "long causal", "few keys")  # all options, none, and blocks without tiles


@pytest.fixture(scope="module")
def watched() -> ShimDevice:
    return ShimDevice(races=True)


@pytest.fixture(scope="module")
def hopper() -> ShimDevice:
    return ShimDevice(races=True, warpgroups=True)


@pytest.fixture(autouse=True)
def no_device() -> Iterator[None]:
    """Leave no device behind."""
    before = devices.use(None)
    yield
    devices.use(before)


def the_rest(module: Any) -> None:
    """Run the ops that have no backward, at sizes with more than one block."""
    n = 2 * 65_536 + 6
    flat = [module.from_numpy(np.full(n, 0.5, np.float32)) for _ in range(4)]
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    held = module.parameters({"w": flat[0][: n - 2].reshape(4, -1), "gain": flat[0][n - 2 :]})
    module.adamw(*flat, step=1, n_decayed=n // 3, **numbers)
    assert held["w"].size == n - 2
    odd = [x[1:1028] for x in flat]
    module.adamw(*odd, step=1, n_decayed=9, **numbers)
    module.accumulate(*odd[:2])
    module.global_norm(flat[0])
    matrices = [module.from_numpy(np.ones((20, 37), np.float32)) for _ in range(3)]
    module.muon(*matrices, lr=0.1, momentum=0.9, weight_decay=0.1, parts=(2, 35))
    x = module.from_numpy(np.ones((3, 2056), np.float32), activation=True)
    module.softmax(x)
    module.to_numpy(x[:, ::2])
    ids = module.from_numpy(np.where(np.arange(1100) % 2, 3, 5).astype(np.int32)[None])
    out, cache = module.embedding_forward(ids, module.from_numpy(np.ones((130, 40), np.float32)))
    table = devices.zeros((130, 40), np.float32)
    module.embedding_backward(out, cache, out=table, accumulate=True)
    # documents and masks that are views, query heads that share keys: tensor cores in bf16
    q, k = (
        module.from_numpy(np.ones((1, 33, heads, 8), np.float32), activation=True)
        for heads in (4, 2)
    )
    mask, documents = (module.from_numpy(np.ones((1, 66), kind)) for kind in (np.bool_, np.int32))
    out, attended = module.attention_forward(q, k, k, None, mask[:, ::2], documents[:, ::2])
    module.attention_backward(out, attended)
    # a query that two blocks of heads share, to a cache of two parts and a few slots
    q, k = (
        module.from_numpy(np.ones(shape, np.float32), activation=True)
        for shape in ((2, 1, 9, 40), (2, 261, 1, 40))
    )
    positions = module.from_numpy(np.array([259, 4], np.int32))
    decode.write_slots(k[:, :1], k[:, 1:2], k, k, positions)
    slopes = module.from_numpy(np.ones(9, np.float32))
    for window, alibi in ((0, None), (130, slopes)):
        decode.attend(q, k, k, positions, alibi, window)


@pytest.mark.parametrize("module", [ops_bf16, pytest.param(ops, marks=SLOW)], ids=["bf16", "f32"])
def test_no_kernel_has_a_race(module: Any) -> None:
    device = ShimDevice(races=True)
    devices.use(device)
    for op, what, arrays, options in (*cases(), *attention_cases(((5, 7),))):
        run(module, op, what, arrays if module is ops else rounded(arrays), options)
    the_rest(module)
    kernels = {
        kernel
        for source in sources.SOURCES
        for kernel in sources.kernels(sources.text_of(f"{source}.cu"))
    }
    if module is ops_bf16:
        assert kernels <= set(device.launches)


def run(module: Any, op: str, what: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        run_backend(module, op, arrays, options)
    except ShimError as error:
        error.add_note(f"{op}, {what}")
        raise


def tensor_core_cases() -> Iterator[Any]:
    for width in (64, 128):
        widths = ((width, width),)
        for case in (*attention_cases(widths), *long_attention_cases(widths)):
            quick = width == 64 and any(word in case[1] for word in QUICK)
            yield pytest.param(case, id=case[1], marks=[] if quick else [SLOW])


@pytest.mark.parametrize("case", list(tensor_core_cases()))
@pytest.mark.parametrize("which", ["watched", "hopper"])
def test_attention_on_tensor_cores_has_no_race(
    which: str, case: Case, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.use(request.getfixturevalue(which))
    op, what, arrays, options = case
    # blocks of dk and dv walk over a group of query heads in these cases, over one in the others
    whole = any(word in what for word in ("long", "more keys", "few"))
    monkeypatch.setattr(attention, "ENOUGH", 0 if whole else 1025)
    monkeypatch.setattr(attention, "ENOUGH_EQUAL", 0 if whole else 1025)
    run(ops_bf16, op, what, rounded(arrays), options)


# What tells a missing barrier, wait or fence, whatever the order. An index that is read before
# another thread has written it may first lead outside of the arrays.
BROKEN = (
    "a race|outside of every array|without wgmma_fence|asynchronous copies that nobody waited for|"
    "products that its warp has not waited for|comes twice to barrier|wait for each other for ever|"
    "have arrived at barrier"
)


@SLOW
@pytest.mark.parametrize(("file", "place", "users"), list(synchronizations()), ids=str)
def test_every_barrier_is_missed_in_any_order(
    file: str, place: int, users: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, edit = removal(file, place)
    for order in ORDERS:
        how = None
        for source in (*users, *(["toys"] if file == "device.cuh" else [])):
            warpgroups = source == "attention_wgmma"
            device = shim(order, edits={file: [edit]}, warpgroups=warpgroups)
            how = how or missed(device, source, monkeypatch)
        assert how and re.search(BROKEN, how), f"{file}: {line}{order}: {how}"
        print(f"{file}: {line.strip()}: {how}")  # -s shows how


def trouble(run: tuple[Any, str, Case]) -> tuple[bool, int]:
    """Return what puts a case later: that kernels are compiled for its options, and its size."""
    _, _, arrays, options = run[2]
    return len(arrays) > 3 or "dropout_p" in options, sum(x.size for x in arrays[:3])


def missed(device: ShimDevice, source: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return what the detector says of the kernels of a file, or None."""
    devices.use(device)
    try:
        if source == "toys":
            toy(device, "sums", 0)
        elif source in ("decode", "muon", "optimizer"):
            the_rest(ops)
        else:
            for module, dtype, (op, _, arrays, options) in sorted(runs(source), key=trouble):
                given = rounded(arrays) if dtype == "bf16" else arrays
                for enough in (1025, 0):
                    monkeypatch.setattr(attention, "ENOUGH", enough)
                    monkeypatch.setattr(attention, "ENOUGH_EQUAL", enough)
                    run_backend(module, op, given, options)
    except ShimError as error:
        return str(error)
    return None


def test_copies_that_land_at_once_are_not_watched() -> None:
    with pytest.raises(ValueError, match="with races they land late"):
        ShimDevice(early=True, races=True)
