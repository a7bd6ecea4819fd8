"""The cuda backend on a real GPU: the same cases as on the shim, and what the shim cannot show.

All GPU checks and the benchmark in one go::

    pip install -e ".[cuda13,test]" && python -m tests.gpu
"""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import accel
from accel.bench.training import Training
from accel.cuda import attention, decode, paths, products
from accel.cuda import device as devices
from accel.cuda.device import Product
from accel.tolerance import round_bf16
from accel.verify import check_module
from reference import model
from reference.params import decoder_layout
from reference.types import Array
from tests.helpers.cuda_cases import (
    attention_by_the_rule,
    attention_cases,
    by_the_rule,
    cases,
    cases_of_no_rows,
    check_nothing,
    long_attention_cases,
    relative_error,
    rounded,
    run_backend,
    run_reference,
)
from tests.helpers.cuda_decoding import Text, attended, exact, ids_of
from tests.helpers.cuda_models import batch, bf16_weights, parameters, train
from tests.helpers.models import MODELS

try:
    accel.load("cuda")
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

STRICT_CASES = [*cases(), *attention_cases(((5, 7), (16, 16), (64, 64)))]
EMPTY = [*cases_of_no_rows()]
WIDTHS = ((64, 64), (128, 128), (16, 40), (128, 72))
MMA_CASES = [*attention_cases(WIDTHS), *long_attention_cases(((64, 64), (128, 128)))]


@pytest.fixture
def strict() -> Iterator[Any]:
    """Load the backend in float32."""
    yield accel.load("cuda")
    devices.use(None)


@pytest.fixture
def bf16() -> Iterator[Any]:
    """Load the backend in bf16."""
    yield accel.load("cuda", compute="bf16")
    devices.use(None)


@pytest.mark.parametrize("case", STRICT_CASES, ids=[f"{c[0]}: {c[1]}" for c in STRICT_CASES])
def test_float32_equals_the_reference(case: Any, strict: Any) -> None:
    op, _, arrays, options = case
    exact = run_reference(op, arrays, options, np.float64)
    for got, expected in zip(run_backend(strict, op, arrays, options), exact, strict=True):
        assert relative_error(got, expected) <= 1e-5


@pytest.mark.parametrize("case", [*cases()], ids=[f"{c[0]}: {c[1]}" for c in cases()])
def test_bf16_keeps_to_the_rule(case: Any, bf16: Any) -> None:
    for name, closeness in by_the_rule(bf16, case, "bf16").items():
        assert closeness.ok, (name, closeness)


@pytest.mark.parametrize("mode", ["strict", "bf16"])
@pytest.mark.parametrize("case", EMPTY, ids=[f"{c[0]}: {c[1]}" for c in EMPTY])
def test_of_no_rows_there_is_nothing_and_its_sums_are_zero(
    case: Any, mode: str, request: pytest.FixtureRequest
) -> None:
    check_nothing(request.getfixturevalue(mode), case)


@pytest.mark.parametrize("path", attention.TILES)
@pytest.mark.parametrize("whole", [False, True], ids=["one head a block", "whole groups"])
@pytest.mark.parametrize("case", MMA_CASES, ids=[what for _, what, _, _ in MMA_CASES])
def test_attention_on_tensor_cores(
    case: Any, whole: bool, path: str, bf16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path not in attention.offered():
        pytest.skip(f"this GPU has no {path}")
    attention.take(path)
    op, _, arrays, options = case
    if whole:  # the blocks of dk and dv walk over a group of heads, as where there are many
        monkeypatch.setattr(attention, "ENOUGH", 0)
        monkeypatch.setattr(attention, "ENOUGH_EQUAL", 0)
    first, second = (run_backend(bf16, op, rounded(arrays), options) for _ in range(2))
    for name, closeness in attention_by_the_rule(case, first).items():
        assert closeness.ok, (name, closeness)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_first_call_of_a_thread_may_be_a_launch(strict: Any) -> None:
    to, array = (strict.from_numpy(np.ones(8, np.float32)) for _ in range(2))
    thread = threading.Thread(target=strict.accumulate, args=(to, array))
    thread.start()
    thread.join()
    assert strict.to_numpy(to).tolist() == [2.0] * 8


@pytest.mark.parametrize("path", attention.TILES)
def test_as_many_blocks_share_a_multiprocessor_as_attention_is_cut_for(
    path: str, bf16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_backends.cuda.api import driver

    if path not in attention.offered():
        pytest.skip(f"this GPU has no {path}")
    attention.take(path)
    device = devices.current()
    launch, asked = device.launch, []

    def launched(
        source: str, kernel: str, grid: Any, threads: int, *given: Any, **more: Any
    ) -> None:
        launch(source, kernel, grid, threads, *given, **more)
        key = (source, kernel, *more["defines"].items())
        asked.append((kernel, key, threads, more["shared"]))

    monkeypatch.setattr(device, "launch", launched)
    x = np.ones((1, 256, 1, 128), np.float32)
    run_backend(bf16, "attention", rounded((x, x, x)), {})
    asked = [one for one in asked if one[1][0] == f"attention_{path}"]
    assert {kernel for kernel, *_ in asked} == attention.TILES[path].keys()
    for kernel, key, threads, shared in asked:
        loaded = device._kernels[key].address
        fit = driver.occupancyMaxActiveBlocksPerMultiprocessor(loaded, threads, shared)
        cut = attention.way(path, kernel, 128, set(), device.shared_limit)
        assert fit >= cut.blocks, (kernel, fit, cut)


@pytest.mark.parametrize("options", [{}, {"window": 700}, {"documents": True}, {"dropout": 0.1}])
def test_attention_s_paths_agree_with_the_plain_kernel_and_one_is_chosen(
    options: dict[str, Any], bf16: Any
) -> None:
    shapes = paths.Shapes(1, 2048, 14, 2, 128)._replace(**options)
    fast = [path for path in attention.offered() if path != attention.PLAIN]
    for path, results in paths.check(shapes, fast).items():
        for name, closeness in results.items():
            assert closeness.ok, (path, name, closeness)
    path, said = paths.choose(shapes, remember=False)
    print(said)
    assert path in fast and "left out" not in said


# of MyLLM-1B's products, each way round; C of float32, and added onto
PRODUCTS = [
    Product(False, False, 2304, 4096, 1792, 0.0, True),
    Product(True, False, 1792, 4096, 9728, 0.0, True),
    Product(False, True, 9728, 1792, 4096, 0.0, False),
    Product(False, True, 1792, 8192, 4096, 1.0, False),
    Product(True, False, 1000, 72, 136, 0.0, True),
    Product(False, False, 1792, 4096, 4864, 1.0, True, True),
]


@pytest.mark.parametrize("product", PRODUCTS, ids=products.name)
def test_cublas_lt_s_algorithms_give_the_product_and_the_same_bits(
    product: Product, bf16: Any
) -> None:
    library = devices.current().cublaslt()
    p, rng = product, np.random.default_rng(0)
    a, b, c = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((p.m, p.k)[:: -1 if not p.transpose_a else 1],
                      (p.k, p.n)[:: -1 if not p.transpose_b else 1], (p.n, p.m))
    )  # fmt: skip
    given = [bf16.from_numpy(a, activation=True), bf16.from_numpy(b, activation=True)]
    given.append(bf16.from_numpy(c, activation=p.narrow))
    wide = [bf16.to_numpy(x).astype(np.float64) for x in given]
    left = wide[0] if p.transpose_a else wide[0].T
    right = wide[1] if p.transpose_b else wide[1].T
    cut = p.k / 8 * 2.0**-24  # where a tensor core cuts sums of eight off, and does not round them
    some = slice(None, None, 97)  # of the columns of C, its rows here
    exact = (left @ right[:, some]).T + p.beta * wide[2][some]
    found = library.algorithms(product, products.TRIED)
    print(f"cuBLAS {library.version}: {len(found)} algorithms")
    ways, wrong = products.check(library, product)
    assert not wrong and len(ways) > 1
    for name, way in ways.items():
        results = [bf16.to_numpy(products._result(p, way, tuple(given))) for _ in range(2)]
        np.testing.assert_array_equal(*results)
        assert relative_error(results[0][some], exact) < cut + (0.004 if p.narrow else 0), name


def test_products_are_chosen_and_taken_as_they_were_written(bf16: Any) -> None:
    config = MODELS["myllm"]
    choice = products.choose(config, 2, remember=False)
    print(choice.said)
    assert "left out" not in choice.said and len(choice.timed) > 5
    library = devices.current().cublaslt()
    listed = {one: library.algorithms(one, 1) for one, *_ in choice.timed}
    lines = [f"{products.name(one)}: {some[0].hex()}" for one, some in listed.items() if some]
    found = []
    for _ in range(2):
        products.take((f"cuBLAS {library.version}", *lines))
        assert len(devices.current().products) == len(lines) > 5
        training = Training(bf16, config, 2, config.context_length)
        found.append(([training.step() for _ in range(3)], bf16.to_numpy(training.master)))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_any_case_that_is_drawn_keeps_to_the_rule(compute: str) -> None:
    report = check_module(
        accel.load("cuda", compute=compute), dtypes=(compute,), examples=40, raises=False
    )
    devices.use(None)
    # rows so wide that a norm's backward cannot keep its sums are refused in a sentence
    wide = "bytes of shared memory a block at these widths, and this GPU has"
    wrong = [f for op in report.ops for f in op.failures if wide not in f.judged.problem]
    assert not wrong, report.text()
    assert {f.op for op in report.ops for f in op.failures} <= {"rmsnorm", "layernorm"}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float32_equals_the_reference(name: str, strict: Any) -> None:
    config = MODELS[name]
    flat, data = parameters(config), batch(config)
    exact = train(reference_ops(), config, flat.astype(np.float64), data, 1)
    mine = train(strict, config, flat, data, 1)
    assert mine[0] == pytest.approx(exact[0], rel=1e-5)
    assert relative_error(mine[1], exact[1]) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_two_runs_in_bf16_give_the_same_bits(name: str, bf16: Any) -> None:
    config = MODELS[name]
    flat = bf16_weights(config, parameters(config))
    one, two = (train(bf16, config, flat, batch(config), 3) for _ in range(2))
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1], two[1])
    np.testing.assert_array_equal(one[2], two[2])
    assert decoder_layout(config).size == one[2].size


@pytest.mark.parametrize("mode", ["strict", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_tokens_equal_single_launches_and_the_reference(
    name: str, mode: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, config = request.getfixturevalue(mode), MODELS[name]
    flat, ids = bf16_weights(config, parameters(config)), ids_of(config)
    recorded = Text(module, config, flat, ids).steps(8)
    monkeypatch.setattr(decode, "kept", lambda make, *_: make(devices.current()))
    single = Text(module, config, flat, ids).steps(8)
    for got, same, want in zip(recorded, single, exact(config, flat, ids, 8), strict=True):
        np.testing.assert_array_equal(got, same)
        assert relative_error(got, want) <= (1e-5 if mode == "strict" else 0.03)


@pytest.mark.parametrize("mode", ["strict", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_gradients_have_the_bits_of_single_launches(
    name: str, mode: str, request: pytest.FixtureRequest
) -> None:
    module, config = request.getfixturevalue(mode), MODELS[name]
    layout, flat = decoder_layout(config), bf16_weights(config, parameters(config))
    params = module.parameters(layout.views(module.from_numpy(flat)))
    leaf = module.from_numpy(np.full_like(flat, np.nan))
    for seed in range(4):
        given = [module.from_numpy(x) for x in batch(config, seed).values()]
        results = []
        for gradient in (module.gradient, partial(model.gradient, module)):
            loss = gradient(params, config, *given, None, layout.views(leaf))
            results.append((loss, module.to_numpy(leaf)))
        assert results[0][0] == results[1][0]
        np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("Hq", "Hkv", "d"), [(14, 2, 128), (12, 12, 64), (9, 1, 72)])
def test_attention_to_a_long_cache(Hq: int, Hkv: int, d: int, bf16: Any) -> None:
    rng = np.random.default_rng(0)
    positions = np.array([8191, 700, 3], np.int32)
    arrays = [
        round_bf16(rng.standard_normal((3, n, H, d)).astype(np.float32))
        for n, H in ((1, Hq), (8192, Hkv), (8192, Hkv))
    ]
    given = [bf16.from_numpy(x, activation=True) for x in arrays]
    got = bf16.to_numpy(decode.attend(*given, bf16.from_numpy(positions), None, 0))
    assert relative_error(got, attended(*arrays, positions, None, 0)) <= 0.004


def test_a_long_sequence_equals_slices_of_float64(bf16: Any) -> None:
    """8,192 tokens, 128 wide: rows of the output against float64 for a few queries."""
    rng = np.random.default_rng(0)
    T, d = 8192, 128
    q, k, v = (rng.standard_normal((1, T, h, d)).astype(np.float32) for h in (2, 1, 1))
    given = [bf16.from_numpy(x, activation=True) for x in (q, k, v)]
    out = bf16.to_numpy(bf16.attention_forward(*given)[0])
    q, k, v = (bf16.to_numpy(x).astype(np.float64) for x in given)
    for t in (0, 63, 64, 127, 128, 4000, T - 1):
        scores = k[0, : t + 1, 0] @ q[0, t].T / np.sqrt(d)  # (t + 1, 2)
        p = np.exp(scores - scores.max(0))
        expected: Array = (p / p.sum(0)).T @ v[0, : t + 1, 0]
        assert relative_error(out[0, t], expected) < 0.01, t


def reference_ops() -> Any:
    """Return the reference as a module."""
    return accel.load("reference")
