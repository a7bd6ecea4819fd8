"""Products: equal to NumPy's at every size, the same bits under every split."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cpu import gemm as module
from accel.cpu import simd
from accel.cpu.gemm import gemm

SIZE = st.sampled_from([1, 2, 5, 6, 7, 15, 16, 17, 31, 63, 64, 65, 97, 130, 191, 193, 511, 513])


def product(
    m: int, n: int, k: int, dtype: Any, ta: bool, tb: bool, pad: int = 0
) -> tuple[Any, Any, Any]:
    """Return operands, and what the product should be; rows are ``pad`` elements further apart."""
    rng = np.random.default_rng(m + 7 * n + 13 * k)

    def array(rows: int, columns: int) -> Any:
        wide = np.full((rows, columns + pad), np.nan, dtype)
        wide[:, :columns] = rng.standard_normal((rows, columns))
        return wide[:, :columns]

    a = array(k, m) if ta else array(m, k)
    b = array(n, k) if tb else array(k, n)
    exact = (a.T if ta else a).astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    return a, b, exact


@given(SIZE, SIZE, SIZE, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 3]))
def test_any_size_and_transposition(
    m: int, n: int, k: int, ta: bool, tb: bool, accumulate: bool, pad: int
) -> None:
    for dtype in (np.float32, np.float64):
        a, b, exact = product(m, n, k, dtype, ta, tb, pad)
        wide = np.full((m, n + pad), np.nan, dtype)
        out = wide[:, :n]
        if accumulate:
            out[...] = 1
            exact = exact + 1
        gemm(a, b, out, ta=ta, tb=tb, accumulate=accumulate)
        magnitude = np.abs(a.T if ta else a) @ np.abs(b.T if tb else b) + 1
        unit = np.finfo(dtype).eps
        assert np.all(np.abs(out - exact) <= 4 * np.sqrt(k) * unit * magnitude)
        assert np.isnan(wide[:, n:]).all()  # nothing beside the product was touched


@pytest.mark.parametrize(("m", "n", "k"), [(1000, 70, 33), (20, 3000, 500), (700, 700, 900)])
@pytest.mark.parametrize(("ta", "tb"), [(False, False), (False, True), (True, False)])
def test_bits_do_not_depend_on_where_tasks_begin(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, ta: bool, tb: bool
) -> None:
    a, b, _ = product(m, n, k, np.float32, ta, tb)
    results = []
    monkeypatch.setattr(module, "_cut", module._cut.__wrapped__)  # not those it remembers
    never = 1 << 40
    cuts = (  # the first three pack all that can be, the others nothing
        *((192, 16, 8, 1 << 20, 0, 0, 0, 12), (6, 1, 1, 30_000, 0, 0, 0, 24)),
        *(
            (192, 16, 8, 1 << 20, never, never, 0, 6),
            (192, 16, 8, 1 << 20, never, never, never, 12),
        ),
        (60, 300, 3, 70_000, never, never, never, 12),
    )
    for rows, tasks, together, packed, narrow, short, held, twelve in cuts:
        monkeypatch.setattr(module, "ROWS", rows)
        monkeypatch.setattr(module, "MIN_TASKS", tasks)
        monkeypatch.setattr(module, "TOGETHER", together)
        monkeypatch.setattr(module, "PACKED", packed)
        monkeypatch.setattr(module, "NARROW", narrow)
        monkeypatch.setattr(module, "SHORT", short)
        monkeypatch.setattr(module, "HELD", held)
        monkeypatch.setattr(module, "HELD_BY_MANY", held)
        monkeypatch.setattr(module, "TWELVE", twelve)
        out = np.empty((m, n), np.float32)
        gemm(a, b, out, ta=ta, tb=tb)
        results.append(out)
    for result in results[1:]:
        assert np.array_equal(results[0], result)


@pytest.mark.parametrize("shape", [(256, 64, 256), (64, 256, 64), (300, 50, 8), (48, 48, 48)])
def test_small_products_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]
) -> None:
    a, b, _ = product(*shape, np.float32, False, False)
    given: list[Any] = []
    monkeypatch.setattr(module, "_product", lambda *numbers: given.append(numbers))
    gemm(a, b, np.empty(shape[:2], np.float32))
    rows, columns = given[0][-2:]
    assert rows * columns >= 2


def test_a_row_s_bits_do_not_depend_on_the_other_rows() -> None:
    a, b, _ = product(500, 210, 400, np.float32, False, False)  # packed, and of few rows not
    whole, part = np.empty((500, 210), np.float32), np.empty((7, 210), np.float32)
    gemm(a, b, whole)
    gemm(a[100:107], b, part)
    assert np.array_equal(whole[100:107], part)


AVX512, AVX2 = (4, 64), (2, 32)  # vectors in a row of the register block, and their bytes


@pytest.mark.parametrize(
    ("block", "m", "n", "k", "ta", "right", "left"),
    [
        (AVX512, 128, 128, 2048, True, 0, 0),  # the gradient of a small model's weight
        (AVX512, 24, 768, 768, False, 0, 0),  # few rows
        (AVX512, 1024, 704, 128, False, 11 * 64 * 128, 0),  # many rows
        (AVX512, 1024, 64, 300, True, 0, 6 * 192 * 304),  # rows of a page
        (AVX512, 48, 2816, 100, True, 44 * 64 * 104, 0),
        (AVX2, 128, 128, 1024, True, 0, 0),  # what a cache can hold
        (AVX2, 128, 128, 1032, True, 8 * 16 * 344, 11 * 12 * 344),
        (AVX2, 24, 768, 768, False, 0, 0),  # few rows
        (AVX2, 48, 768, 768, False, 48 * 16 * 384, 0),
        (AVX2, 24, 1024, 768, False, 64 * 16 * 384, 0),  # its rows would be a page apart
        (AVX2, 24, 160, 768, False, 0, 0),
        (AVX2, 1024, 64, 100, True, 0, 86 * 12 * 104),
        (AVX2, 300, 48, 768, True, 0, 25 * 12 * 384),
        (AVX2, 1024, 704, 128, False, 44 * 16 * 128, 0),
    ],
)
def test_only_what_is_read_often_is_packed(
    monkeypatch: pytest.MonkeyPatch,
    block: tuple[int, int],
    m: int,
    n: int,
    k: int,
    ta: bool,
    right: int,
    left: int,
) -> None:
    monkeypatch.setattr(module, "block_vectors", lambda: block[0])
    monkeypatch.setattr(module, "vector_bytes", lambda: block[1])
    lda = m if ta else k
    sizes, _ = module._cut.__wrapped__(m, n, k, ta, False, lda, n, 4, 2)
    assert sizes == (right, left)


def test_a_thread_alone_packs_smaller_operands_where_a_block_is_one_line_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for (vectors, size), packed in ((AVX2, (8 * 16 * 512, 11 * 12 * 512)), (AVX512, (0, 0))):
        monkeypatch.setattr(module, "block_vectors", lambda vectors=vectors: vectors)
        monkeypatch.setattr(module, "vector_bytes", lambda size=size: size)
        for k, threads, expected in ((1024, 2, (0, 0)), (1024, 1, packed), (256, 1, (0, 0))):
            cut = module._cut.__wrapped__(128, 128, k, True, False, 128, 128, 4, threads)
            assert cut[0] == expected


def test_an_empty_sum_is_zero() -> None:
    out = np.full((3, 4), np.nan, np.float32)
    gemm(np.empty((3, 0), np.float32), np.empty((0, 4), np.float32), out)
    assert np.all(out == 0)


def test_products_ask_nothing_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # which takes longer to answer than a small product takes
    a, b, exact = product(9, 40, 33, np.float32, False, False)
    gemm(a, b, np.empty((9, 40), np.float32))

    def asked() -> None:
        raise AssertionError("what the kernels are compiled for was looked up again")

    monkeypatch.setattr(simd, "target", asked)
    monkeypatch.setattr(simd, "get_host_cpu_features", asked)
    out = np.empty((8, 40), np.float32)
    gemm(a[:8], b, out)
    np.testing.assert_allclose(out, exact[:8], rtol=1e-3, atol=1e-3)
