"""The SIMD toolkit of the CPU kernels: exponentials and products of tiles."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit, prange

from accel.cpu import simd
from accel.cpu.kernels import MAP, address
from accel.cpu.simd import at, pointer

FLOATS = [np.float32, np.float64]


@njit
def exp_of(x, out):
    for i in range(x.size):
        out[i] = simd.exp(x[i])


@njit
def exp_below_of(x, out):
    for i in range(x.size):
        out[i] = simd.exp_below(x[i])


@njit
def exp2_of(x, out):
    for i in range(x.size):
        out[i] = simd.exp2(x[i])


@njit
def product(a, a_row, a_col, b, b_row, c, c_row, sizes, accumulate):
    simd.tile_gemm(
        sizes[0],
        sizes[1],
        sizes[2],
        simd.start(a),
        a_row,
        a_col,
        simd.start(b),
        b_row,
        simd.start(c),
        c_row,
        accumulate,
    )


KERNELS = [(exp_of, np.exp, np.log(2.0)), (exp2_of, np.exp2, 1.0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("kernel", "exact", "binade"), KERNELS)
def test_exponentials_are_accurate_to_one_unit_in_the_last_place(kernel, exact, binade, dtype):
    x = np.linspace(-125.5 * binade, 127.4 * binade, 500_001).astype(dtype)
    out = np.empty_like(x)
    kernel(x, out)
    want = exact(x.astype(np.longdouble))
    assert np.max(np.abs(out / want - 1)) <= np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("kernel", "exact", "binade"), KERNELS)
def test_exponentials_at_the_ends_of_the_range(kernel, exact, binade, dtype):
    x = np.array([0.0, -0.0, -1e30, -np.inf, 1e30, np.inf, np.nan, -5000.0], dtype)
    out = np.full_like(x, 7)
    kernel(x, out)
    np.testing.assert_array_equal(out, np.array([1, 1, 0, 0, np.inf, np.inf, np.nan, 0], dtype))


@pytest.mark.parametrize(("kernel", "exact", "binade"), KERNELS)
def test_exponentials_below_the_normal_range_are_zero(kernel, exact, binade):
    x = np.linspace(-160 * binade, -126.51 * binade, 10_001).astype(np.float32)
    out = np.full_like(x, 7)
    kernel(x, out)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponentials_of_what_is_below_have_the_same_bits(dtype):
    ends = [128 * np.log(2.0), 0.0, -0.0, -1e30, -np.inf, np.nan]
    x = np.append(np.linspace(-130, 88.7, 200_003), ends).astype(dtype)
    out, below = np.empty_like(x), np.empty_like(x)
    exp_of(x, out)
    exp_below_of(x, below)
    assert out.tobytes() == below.tobytes()
    assert simd.exp_below(-1.5) == np.exp(-1.5)


@pytest.mark.parametrize(("kernel", "exact", "binade"), KERNELS)
def test_exponentials_in_python_are_numpy_s(kernel, exact, binade):
    function = simd.exp if exact is np.exp else simd.exp2
    assert function(1.5) == exact(1.5)


@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 140), st.integers(1, 40)),
    dtype=st.sampled_from(FLOATS),
    transposed=st.booleans(),
    accumulate=st.booleans(),
    gap=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_tile_gemm_is_the_product_and_touches_nothing_else(
    sizes, dtype, transposed, accumulate, gap, seed
):
    rows, columns, k = sizes
    rng = np.random.default_rng(seed)
    # Small integers: sums are exact, whatever their order.
    a = rng.integers(-8, 9, (k, rows + gap) if transposed else (rows, k + gap)).astype(dtype)
    b = rng.integers(-8, 9, (k, columns + gap)).astype(dtype)
    c = rng.integers(-8, 9, (rows + 1, columns + gap)).astype(dtype)
    want = c.copy()
    plain = (a[:, :rows].T if transposed else a[:, :k]) @ b[:, :columns]
    want[:rows, :columns] = plain + (c[:rows, :columns] if accumulate else 0)
    a_row, a_col = (1, rows + gap) if transposed else (k + gap, 1)
    strides = columns + gap
    product(a, a_row, a_col, b, strides, c, strides, sizes, accumulate)
    np.testing.assert_array_equal(c, want)


def test_tile_gemm_rounds_like_one_sum():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 128)), rng.standard_normal((128, 80))
    c = np.empty((64, 80), np.float32)
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    product(a32, 128, 1, b32, 80, c, 80, (64, 80, 128), False)
    exact = a32.astype(np.float64) @ b32.astype(np.float64)
    # Each of 128 additions rounds to half a unit of at most the sum of absolute values.
    bound = 128 * np.finfo(np.float32).eps / 2 * (np.abs(a) @ np.abs(b))
    assert np.all(np.abs(c - exact) <= bound)


@njit(**MAP)
def double(like, source, target, n):
    x, z = pointer(source, like), at(pointer(target, like), 0)
    for i in prange(n):
        z[i] = x[i] + x[i]


def test_a_loop_of_one_store_through_a_pointer_is_kept():
    x, z = np.arange(5.0), np.zeros(5)
    double(np.float64(0), address(x), address(z), 5)
    assert np.array_equal(z, 2 * x)


@pytest.mark.parametrize(
    "features",
    ["+avx,+avx2,+fma,+bmi2,+sse4.2", pytest.param("+sse4.2", marks=pytest.mark.slow)],
)
def test_narrower_processors_get_a_register_block_that_fits(features, tmp_path):
    """The same tests on code for a processor with AVX2, and for one with SSE alone."""
    import llvmlite.binding

    has = llvmlite.binding.get_host_cpu_features()
    if not all(has.get(name[1:]) for name in features.split(",")):
        pytest.skip(f"this processor cannot run code for {features}")
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell" if "+avx2" in features else "x86-64",
        "NUMBA_CPU_FEATURES": features,
        "MYLLM_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", "tile_gemm or exponentials"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
