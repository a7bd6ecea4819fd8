"""Work is cut for many cores: tasks are counted for 64 threads, as Numba would hand them out."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.bench.cpu import LARGE
from accel.bench.training import SMALL
from accel.cpu import attention, bf16, bf16_gemm, bf16_muon, bf16_packing, gemm, loss
from accel.cpu.attention_layout import (
    BLOCK,
    Sizes,
    backward_passes,
    forward_tasks,
    seen,
)
from accel.cpu.embedding import COLUMNS, PIECES
from accel.cpu.kernels import PIECE, ROW_PIECE, SUM_PIECE
from accel.threads import set_threads, threads
from reference.config import Config
from reference.global_norm import SUM_BLOCK
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B
from reference.visibility import Visibility

THREADS = 64
MODELS = {
    "12.6 M": (SMALL, 8, 512),
    "35 M": (LARGE, 4, 1024),
    "GPT-2": (GPT2_SMALL, 8, 1024),
    "MyLLM-1B": (MYLLM_1B, 1, 8192),
}
Product = tuple[int, int, int, bool, bool]  # m, n, k, ta, tb


def share(tasks: Any, threads: int = THREADS) -> float:
    """Return the threads' working time over what they have until the last is done."""
    work = np.asarray(tasks, np.float64)
    edges = np.arange(threads + 1) * len(work) // threads
    longest = max(work[low:high].sum() for low, high in itertools.pairwise(edges))
    return float(work.sum() / threads / longest)


def parts(n: int, count: int) -> Any:
    """Return the sizes of ``count`` parts of ``n``."""
    return np.diff(n * np.arange(count + 1) // count)


def blocks(rows: int, columns: int, *, alone: bool = False) -> Any:
    """Return the blocks of each task of a product in bf16, of so many panels either way.

    ``alone``: where each packs what only it multiplies.
    """
    row_parts, column_parts = bf16_gemm.cut(rows, columns)
    if alone:
        row_parts, column_parts = 1, bf16_gemm.cut_columns(columns)
    return np.multiply.outer(parts(columns, column_parts), parts(rows, row_parts)).ravel()


def products(config: Config, rows: int, chunk_rows: int) -> Iterator[Product]:
    """Yield the products of a step: forward, to the input, to the weight; last the head's."""
    width, heads = config.d_model, config.n_heads * config.d_head
    wide = config.d_ff * (2 if config.ffn == "swiglu" else 1)
    fused = heads + 2 * config.n_kv_heads * config.d_head
    chunk = min(loss.chunk_of(config.vocab_size, chunk_rows), rows)
    for m, k, n in (
        *((rows, width, fused), (rows, heads, width), (rows, width, wide)),
        *((rows, config.d_ff, width), (chunk, config.vocab_size, width)),
    ):
        yield m, n, k, False, False
        yield m, k, n, False, True
        yield k, n, m, True, False


def groups(n: int, group: int) -> list[int]:
    """Return the sizes of parts of ``n`` that have ``group`` but for the last."""
    return [min(group, n - start) for start in range(0, n, group)]


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    before = threads()
    yield
    set_threads(before)


def cut_for(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    set_threads(min(n, threads()))  # no more of them than scratch is made for
    for module in (gemm, bf16, bf16_gemm, bf16_packing, attention):
        monkeypatch.setattr(module, "team", lambda: n)


@pytest.mark.parametrize("name", MODELS)
def test_products_in_float32_keep_64_threads_at_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(gemm, "_product", lambda *numbers: given.append(numbers))
    cut_for(monkeypatch, THREADS)
    config, batch, length = MODELS[name]
    for m, n, k, ta, tb in products(config, batch * length, loss.CHUNK_ROWS):
        a, b, out = (
            np.empty(shape, np.float32)
            for shape in ((k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n))
        )
        gemm.gemm(a, b, out, ta=ta, tb=tb)
        high, wide, _, row_tasks, column_tasks = given[-1][-5:]
        width = gemm.block_vectors() * gemm.vector_bytes() // 4
        done = needed = 0.0
        # all threads wait for each other after a pass
        for top, left in itertools.product(range(0, m, high), range(0, n, wide)):
            sixes = -(-min(high, m - top) // gemm.SIX)
            panels = -(-min(wide, n - left) // width)
            tasks = np.multiply.outer(parts(sixes, row_tasks), parts(panels, column_tasks))
            done, needed = done + tasks.sum(), needed + tasks.sum() / share(tasks.ravel())
        assert done / needed >= 0.75, (m, n, k, ta, tb)


@pytest.mark.parametrize("count, least", [(2, 0.9), (THREADS, 0.75)])
@pytest.mark.parametrize("name", MODELS)
def test_products_in_bf16_keep_threads_at_work(
    name: str, count: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_for(monkeypatch, count)
    config, batch, length = MODELS[name]
    for m, n, k, _, _ in products(config, batch * length, bf16.CHUNK_ROWS):
        rows, columns = bf16_packing.panels(m), bf16_packing.panels(n)
        for alone in (False, True)[: 1 + bf16_gemm.meets_few(m, n)]:  # operands given in float32
            assert share(blocks(rows, columns, alone=alone), count) >= least, (m, n, k, alone)


@pytest.mark.parametrize("count, least", [(2, 0.9), (THREADS, 0.75)])
@pytest.mark.parametrize("name", MODELS)
def test_muon_in_bf16_keeps_threads_at_work(
    name: str, count: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all matrices: those of 128 columns are 16 blocks, and have no more tasks."""
    cut_for(monkeypatch, count)
    done = needed = 0.0
    for _, spec in decoder_layout(MODELS[name][0]).offsets.values():
        for width in spec.parts:
            side, long = sorted(map(bf16_packing.panels, (spec.shape[0], width)))
            for rows, columns, depth in (
                (side, side, long),
                (side, side, side),
                (long, side, side),
            ):
                tasks = blocks(rows, columns)
                work = tasks.sum() * depth
                done, needed = done + work, needed + work / share(tasks, count)
    assert done / needed >= least


def test_what_a_task_packs_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (768, 2304, 3072, 50257)
    cut_for(monkeypatch, 2)
    assert all(bf16_gemm.meets_few(256, n) for n in widths)
    assert not any(bf16_gemm.meets_few(m, n) for m, n in ((1024, 768), (32, 64)))
    # each task packs its rows, where these are many: one part of the columns is once
    assert [bf16_gemm.cut(8, columns) for columns in (24, 72, 96, 1571)] == [(2, 1)] * 4
    cut_for(monkeypatch, THREADS)
    assert [bf16_gemm.meets_few(256, n) for n in widths] == [False, False, False, True]


@pytest.mark.parametrize("m, n, k", [(900, 300, 70), (70, 900, 600), (2100, 64, 33)])
def test_a_product_s_bits_are_those_of_few_threads(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int
) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    results: dict[int, list[Any]] = {}
    for count in (2, 11, THREADS):
        cut_for(monkeypatch, count)
        plain, rounded, packed, given = (np.full((m, n), np.nan, np.float32) for _ in range(4))
        gemm.gemm(a, b, plain)
        right = bf16_packing.pack(b, bf16_packing.B, transposed=False)
        bf16_gemm.multiply_rows(a, right, rounded)
        bf16_gemm.multiply(bf16_packing.pack(a, bf16_packing.A, transposed=False), right, packed)
        bf16_gemm.multiply_rows(a, b, given)
        assert np.array_equal(given, rounded)
        results[count] = [plain, rounded, packed]
    for count in (11, THREADS):
        for ours, few in zip(results[count], results[2], strict=True):
            assert np.array_equal(ours, few)


@pytest.mark.parametrize("long, side", [(700, 101), (65, 33), (1, 1)])
def test_muon_s_bits_in_bf16_are_those_of_few_threads(
    monkeypatch: pytest.MonkeyPatch, long: int, side: int
) -> None:
    x = np.random.default_rng(0).standard_normal((long, side), np.float32)
    results = []
    for count in (1, 2, 11, THREADS):
        cut_for(monkeypatch, count)
        results.append(np.array(bf16_muon.orthogonalise(x.copy())))
    for ours in results[1:]:
        assert np.array_equal(ours, results[0])


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_in_bf16_keeps_64_threads_at_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = MODELS[name][0].vocab_size
    rows = loss.chunk_of(vocabulary, bf16.CHUNK_ROWS)
    down, across = bf16_packing.panels(rows), bf16_packing.panels(vocabulary)
    cut_for(monkeypatch, THREADS)
    height, pieces = bf16.cut(down, across)
    assert share(groups(rows, height)) >= 0.75
    assert share([*parts(across, pieces)] * down) >= 0.75
    cut_for(monkeypatch, 2)  # packed by those that have the rows in their cache
    assert bf16.cut(down, across) == (bf16.SIDE, 0)


@pytest.mark.parametrize("spoilt", [False, True])  # a NaN stays in the gradient of its row
@pytest.mark.parametrize("rows, vocabulary", [(70, 1000), (300, 77), (1, 31)])
def test_the_bits_of_the_loss_in_bf16_are_those_of_few_threads(
    monkeypatch: pytest.MonkeyPatch, rows: int, vocabulary: int, spoilt: bool
) -> None:
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal((n, 40), dtype=np.float32) for n in (rows, vocabulary))
    targets = rng.integers(0, vocabulary, rows)
    mask = rng.random(rows) < 0.9
    if spoilt:
        x[rows // 2], mask[rows // 2] = np.nan, True
    results = []
    for count in (1, 11, THREADS):
        monkeypatch.setattr(bf16, "team", lambda n=count: n)
        found, cache = bf16.linear_cross_entropy_forward(
            x, head, targets, mask, None, need_backward=True
        )
        dx, dhead, _ = loss.linear_cross_entropy_backward(1.0, cache, out=(None, None))
        results.append([np.array(array) for array in (found.total, dx, dhead)])
    assert np.isnan(results[0][1]).any(axis=1).sum() == spoilt
    for found in results[1:]:
        for ours, few in zip(found, results[0], strict=True):
            assert np.array_equal(ours, few, equal_nan=True)


@pytest.mark.parametrize("name", MODELS)
def test_all_else_has_work_for_64_threads(name: str) -> None:
    config, batch, length = MODELS[name]
    rows, width = batch * length, config.d_model
    tasks = {
        "elements": [*groups(rows * width, PIECE)],
        "rows": groups(rows, ROW_PIECE),
        "sums over rows": groups(rows, SUM_PIECE),
        "the loss": [1] * loss.CHUNK_ROWS,
        "the embedding": [1] * (PIECES * -(-width // COLUMNS)),
        "AdamW": groups(decoder_layout(config).size, PIECE),
        "the norm": groups(decoder_layout(config).size, SUM_BLOCK),
        "attention": [1] * forward_tasks(sizes_of(name)),
    }
    for what, of in tasks.items():
        assert len(of) >= THREADS and share(of) >= 0.75, (what, len(of), share(of))


def sizes_of(name: str) -> Sizes:
    config, batch, length = MODELS[name]
    return Sizes(
        batch, length, length, config.n_heads, config.n_kv_heads, config.d_head, config.d_head
    )


@pytest.mark.parametrize("name, runs", [("12.6 M", 16), ("GPT-2", 96), ("MyLLM-1B", 16)])
def test_attention_backward_keeps_64_threads_at_work(name: str, runs: int) -> None:
    """The bits depend on the runs alone, so these are the same for any number of threads."""
    sizes = sizes_of(name)
    who = Visibility(sizes.queries, sizes.keys)
    heads = sizes.batch * sizes.kv_heads
    cut, passes = backward_passes(sizes, who, 2)
    assert heads * len(cut) == runs and len(passes) == 1
    low, end = seen(sizes, who)
    _, passes = backward_passes(sizes, who, THREADS)
    assert len(passes) == (1 if runs >= THREADS else 2)
    for table, _ in passes:
        met = [
            np.minimum(end[a:b], -(-stop // BLOCK)) - np.maximum(low[a:b], start // BLOCK)
            for a, b, start, stop, _ in table.tolist()
        ]
        tasks = [int(np.maximum(tiles, 0).sum()) for tiles in met] * heads
        assert sum(tasks) == heads * int((end - low).sum())
        assert len(tasks) >= THREADS and share(tasks) >= 0.75
