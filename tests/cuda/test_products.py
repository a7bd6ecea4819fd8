"""Products go by algorithms of cublasLt: bound as NVIDIA's header says, checked, chosen and kept.

No GPU and no driver. A stand-in for the library multiplies matrices in the host's memory, compiled
against NVIDIA's own header; the real library is called where it asks for no GPU.
"""

import ctypes
import errno
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import accel
from accel import DEFAULT
from accel.bench import cuda as bench
from accel.bench.training import Training
from accel.cuda import cublaslt, cupy_device, linear, ops_bf16, paths, products
from accel.cuda import device as devices
from accel.cuda.cublas import CublasError
from accel.cuda.cublaslt import ByAlgorithm, CublasLt
from accel.cuda.device import BF16, F32, Product
from reference.model import loss_backward, loss_forward
from reference.presets import MYLLM_1B
from reference.types import DropoutKey
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice, from_bf16, to_bf16

require.shim()
require.cuda_files("c*/include/cublasLt.h")

from tests.cuda_shim.cublaslt import (  # noqa: E402
    DROPS_LAST,
    FAILS,
    HALVES,
    IN_BF16,
    IN_TURN,
    NOT_OURS,
    OWN,
    REFUSED,
    STAND_IN,
    SUMS_BACKWARD,
    VERSION,
    WithCublasLt,
    algorithm,
    compiled,
)
from tests.helpers import ROOT  # noqa: E402
from tests.helpers.models import toy  # noqa: E402

HERE = Path(__file__).parent

SHAPES = [
    Product(a, b, 24, 16, 40, beta, narrow)
    for a in (False, True)
    for b in (False, True)
    for beta, narrow in ((0.0, True), (0.0, False), (1.0, False), (1.0, True))
]
SHAPES += [p._replace(apart=True) for p in SHAPES if p.beta]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("accel.cuda.device._device", None)  # to be set, and forgotten
    yield tmp_path / "cache" / "kernels" / "cuda"


def device_of(put: Any = None, version: int = VERSION, **numbered: float) -> WithCublasLt:
    """Return a device in use whose products take so long by algorithms 1, 2 and so on."""
    device = WithCublasLt({int(name[1:]): each for name, each in numbered.items()}, version)
    if put is not None:
        put(paths, "clock", lambda: device.now)
    devices.use(device)
    return device


# ---- as the header says --------------------------------------------------------------------------


def test_functions_structures_and_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    functions = ",".join(cublaslt.FUNCTIONS)
    done = subprocess.run(
        [compiled(HERE / "cublaslt_header.cpp", str(STAND_IN), f"-DFUNCTIONS={functions}")],
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())

    def width(kind: Any) -> str:
        """Return what the header's program says of a type."""
        if kind in (ctypes.c_void_p, ctypes.c_char_p):
            return "pointer"
        return str(ctypes.sizeof(kind)) + ("u" if kind(-1).value > 0 else "")

    for name, (result, arguments) in cublaslt.FUNCTIONS.items():
        assert said.pop(name).split() == [width(kind) for kind in (result, *arguments)], name
    sizes = {
        "cublasLtMatmulAlgo_t": ctypes.sizeof(cublaslt.Algorithm),
        "cublasLtMatmulHeuristicResult_t": ctypes.sizeof(cublaslt.Heuristic),
        **{
            f"offset.{of}": getattr(cublaslt.Heuristic, of).offset
            for of in ("algo", "workspace", "state", "waves", "reserved")
        },
    }
    numbers = {
        "CUDA_R_32F": cublaslt.CUDA_R_32F,
        "CUDA_R_16BF": cublaslt.CUDA_R_16BF,
        "CUBLAS_COMPUTE_32F": cublaslt.COMPUTE_32F,
        "CUBLAS_OP_N": False,
        "CUBLAS_OP_T": True,
        "CUBLASLT_MATMUL_DESC_TRANSA": cublaslt.DESC_TRANSA,
        "CUBLASLT_MATMUL_DESC_TRANSB": cublaslt.DESC_TRANSB,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cublaslt.PREF_MAX_WORKSPACE_BYTES,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": cublaslt.PREF_REDUCTION_SCHEME_MASK,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": cublaslt.REDUCTION_SCHEME_COMPUTE_TYPE,
        "CUBLAS_STATUS_SUCCESS": 0,
        "CUBLAS_STATUS_NOT_SUPPORTED": cublaslt.NOT_SUPPORTED,
        "CUBLASLT_POINTER_MODE_HOST": 0,
        "CUBLASLT_ORDER_COL": 0,
        **{
            f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{of}_BYTES": number
            for of, number in zip("ABCD", cublaslt.PREF_MIN_ALIGNMENTS, strict=True)
        },
    }
    assert {name: int(value) for name, value in said.items()} == sizes | numbers


def test_the_real_library_takes_what_it_is_told() -> None:
    """Without a driver: descriptors, layouts and preferences, read back as its header has them."""
    (path,) = require.cuda_files("c*/lib/libcublasLt.so.*")[:1]
    real = ctypes.CDLL(str(path))
    library = CublasLt(real)
    assert re.fullmatch(r"1[23]\.\d+\.\d+", library.version)

    def read(name: str, at: Any, attribute: int, kind: Any) -> int:
        value, written = kind(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(kind))
        assert (
            getattr(real, name)(at, attribute, ctypes.byref(value), size, ctypes.byref(written))
            == 0
        )
        assert written.value == ctypes.sizeof(kind)
        return int(value.value)

    for product in SHAPES:
        done, *lie = library.described(product)
        for attribute, wanted in ((0, 68), (1, 0), (2, 0), (3, product[0]), (4, product[1])):
            assert read("cublasLtMatmulDescGetAttribute", done, attribute, ctypes.c_int32) == wanted
        a, b, m, n, k, _, narrow, _ = product
        stored = [(14, *((k, m) if a else (m, k))), (14, *((n, k) if b else (k, n)))]
        stored.append((14 if narrow else 0, m, n))
        for at, (kind, rows, columns) in zip(lie, stored, strict=True):
            # type, order, rows, columns, leading dimension, batch
            for attribute, width, wanted in (
                (0, ctypes.c_uint32, kind),
                (1, ctypes.c_int32, 0),
                (2, ctypes.c_uint64, rows),
                (3, ctypes.c_uint64, columns),
                (4, ctypes.c_int64, rows),
                (5, ctypes.c_int32, 1),
            ):
                found = read("cublasLtMatrixLayoutGetAttribute", at, attribute, width)
                assert found == wanted, (product, attribute)
    wish = library.wish
    assert library.wish is wish
    for attribute, width, wanted in (
        (1, ctypes.c_uint64, 32 << 20),
        (3, ctypes.c_uint32, 2),
        *((i, ctypes.c_uint32, 16) for i in (5, 6, 7, 8)),
    ):
        found = read("cublasLtMatmulPreferenceGetAttribute", wish, attribute, width)
        assert found == wanted, attribute
    with pytest.raises(CublasError, match=r"cublasLtMatmulDescSetAttribute fails: .+ \(7\)"):
        library.put("cublasLtMatmulDescSetAttribute", done, 3, ctypes.c_int64(1))


def test_the_library_by_its_name_is_the_one_that_cupy_s_cublas_has_loaded() -> None:
    code = (
        "from types import SimpleNamespace\n"
        "from cupy_backends.cuda.libs import cublas\n"
        "from accel.cuda.cupy_device import CuPyDevice\n"
        "cublas.gemmEx\n"
        "device = CuPyDevice.__new__(CuPyDevice)\n"
        "cuda = SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: 13000))\n"
        "device._cupy, device._cublaslt = SimpleNamespace(cuda=cuda), None\n"
        "device._use = lambda: None\n"
        "maps = '/proc/self/maps'\n"
        "files = lambda: {line.split()[-1] for line in open(maps) if 'cublas' in line}\n"
        "before = files()\n"
        "assert any('libcublasLt' in name for name in before), before\n"
        "device.cublaslt()\n"
        "assert files() == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- right ---------------------------------------------------------------------------------------


def operands(product: Product, at: int = 0) -> list[Any]:
    """Return A, B, C and D on the device in use, of drawn numbers, so many elements off alignment.

    Where C does not lie apart, D is C.
    """
    rng, out = np.random.default_rng(1), []
    for size, narrow in ((product.m * product.k, True), (product.k * product.n, True),
                         *[(product.m * product.n, product.narrow)] * 2):  # fmt: skip
        values = rng.standard_normal(size + at).astype(np.float32)
        on_device = devices.current().upload(to_bf16(values) if narrow else values)
        out.append(on_device[at:])
    return out if product.apart else [*out[:3], out[2]]


def exact(product: Product, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the product in float64, (m, n), of what the columns of cuBLAS hold."""
    p = product
    wide = [from_bf16(x).astype(np.float64) if x.dtype == BF16 else np.array(x, np.float64)
            for x in (a, b, c)]  # fmt: skip
    left = wide[0].reshape((p.m, p.k) if p.transpose_a else (p.k, p.m))
    right = wide[1].reshape((p.k, p.n) if p.transpose_b else (p.n, p.k))
    whole = (left if p.transpose_a else left.T) @ (right if p.transpose_b else right.T)
    return whole + p.beta * wide[2].reshape(p.n, p.m).T


@pytest.mark.parametrize("number", [SUMS_BACKWARD, HALVES])
@pytest.mark.parametrize("product", SHAPES, ids=products.name)
def test_a_product_by_an_algorithm_is_the_product(product: Product, number: int) -> None:
    device = device_of(s1=1.0, s2=1.0)
    given = operands(product)
    wanted = exact(product, *given)
    own = operands(product)
    device.gemm_ex(product, *own)
    ByAlgorithm(device.cublaslt(), product, algorithm(number))(product, *given)
    if product.apart:
        np.testing.assert_array_equal(given[2], operands(product)[2])
        np.testing.assert_array_equal(own[2], given[2])
    once = (2.0**-8 if product.narrow else 1e-6) * np.abs(wanted) + 40 * 1e-6
    before = 2.0**-8 * np.abs(exact(product._replace(beta=0.0), *given)) * product.narrow
    for got, allowed in ((given[3], once), (own[3], once + before)):  # cuBLAS rounds before C, too
        got = from_bf16(got) if product.narrow else got
        assert (np.abs(got.reshape(product.n, product.m).T - wanted) <= allowed).all()
    assert device.now == OWN + 1.0


def test_what_was_recorded_by_other_products_is_forgotten() -> None:
    device = ShimDevice()
    before = devices.use(device)
    device.recordings["a kind"] = object()
    products.take(DEFAULT)
    assert not device.recordings
    devices.use(before)


def test_an_algorithm_that_wants_more_workspace_than_there_is_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was chosen on another GPU: here its check asks for more."""
    product, device = SHAPES[0], device_of(s1=1.0, s2=1.0)
    wanted = 8 * product.m * product.n
    monkeypatch.setattr(cublaslt, "WORKSPACE", wanted)
    ByAlgorithm(device.cublaslt(), product, algorithm(HALVES))
    monkeypatch.setattr(cublaslt, "WORKSPACE", wanted - 1)
    ByAlgorithm(device.cublaslt(), product, algorithm(SUMS_BACKWARD))
    said = rf"asks for {wanted:,} bytes of workspace here, and products have {wanted - 1:,}"
    with pytest.raises(CublasError, match=said):
        ByAlgorithm(device.cublaslt(), product, algorithm(HALVES))
    line = f"{products.name(product)}: {algorithm(HALVES).hex()}"
    with pytest.raises(ImportError, match=rf"does not take the algorithm .*{said}.*'default'"):
        products.take(("cuBLAS 13.1.0", line))


def test_arrays_that_lie_askew_go_to_cublas() -> None:
    product = SHAPES[-1]
    device = device_of(s1=1.0)
    way = ByAlgorithm(device.cublaslt(), product, algorithm(SUMS_BACKWARD))
    for moved in range(4):
        given = operands(product)
        given[moved] = operands(product, at=4)[moved]  # by 8 bytes
        way(product, *given)
    assert device.now == 4 * OWN
    way(product, *operands(product, at=8))
    assert device.now == 4 * OWN + 1.0


def test_only_algorithms_that_add_up_in_float32_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = device_of(**{f"s{i}": 1.0 for i in range(1, 9)})

    def listed(most: int = 8) -> list[int]:
        return [one[0] for one in CublasLt(device.library).algorithms(SHAPES[0], most)]

    others = [SUMS_BACKWARD, HALVES, DROPS_LAST, REFUSED, IN_TURN, FAILS]
    assert listed() == others and listed(2) == others[:2]  # of another state: not one of ours
    monkeypatch.setattr(cublaslt, "REDUCTION_SCHEME_COMPUTE_TYPE", 7)
    assert IN_BF16 in listed()
    monkeypatch.setattr(cublaslt, "REDUCTION_SCHEME_COMPUTE_TYPE", 0)
    assert HALVES not in listed()
    monkeypatch.setattr(cublaslt, "REDUCTION_SCHEME_COMPUTE_TYPE", 2)
    monkeypatch.setattr(cublaslt, "WORKSPACE", 100)
    assert listed() == [one for one in others if one != HALVES]
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 256)  # it has none, and says so by its status
    assert listed() == []


@pytest.mark.parametrize("product", SHAPES, ids=products.name)
def test_what_is_wrong_or_is_not_the_same_twice_is_left_out(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "REDUCTION_SCHEME_COMPUTE_TYPE", 7)  # and if it were not heard
    device = device_of(**{f"s{i}": 1.0 for i in range(1, 9)})
    ways, wrong = products.check(device.cublaslt(), product)
    right = [algorithm(number).hex() for number in (SUMS_BACKWARD, HALVES)]
    assert list(ways) == [DEFAULT, *right]
    assert wrong == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p._replace(transpose_a=not p.transpose_a),
        lambda p: p._replace(transpose_b=not p.transpose_b),
        lambda p: p._replace(beta=1 - p.beta, apart=False),
    ],
    ids=["A transposed", "B transposed", "beta"],
)
@pytest.mark.parametrize(
    "product", [p._replace(n=24, k=24) for p in (*SHAPES[:4], SHAPES[-1])], ids=products.name
)
def test_a_product_that_is_another_is_not_alike(product: Product, change: Any) -> None:
    device_of()
    given = products._drawn(product, whole=True)
    wanted = products._result(product, devices.current().gemm_ex, given)
    assert products._alike(wanted, wanted.copy())
    other = products._result(change(product), devices.current().gemm_ex, given)
    assert not products._alike(other, wanted)
    other = wanted.copy()
    other[-1] = np.nan if other.dtype == F32 else 0x7FC0
    assert not products._alike(other, wanted) and not products._alike(wanted, other)


@pytest.mark.parametrize("k", [1, 7, 1000, 2**17])
def test_sums_of_the_whole_numbers_are_exact_in_any_order(k: int) -> None:
    device_of()
    a, b, c = products._drawn(Product(True, False, 2, 2, k, 1.0, True), whole=True)
    x, y = (from_bf16(v).reshape(2, k) for v in (a, b))
    assert (np.abs(x) @ np.abs(y).T + np.abs(from_bf16(c)).max()).max() <= 2**24
    assert (x == np.round(x)).all() and (y == np.round(y)).all() and len(set(x.ravel())) > min(k, 3)


def test_a_large_matrix_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    device_of()
    monkeypatch.setattr(products, "DRAWN", 7)
    for narrow in (False, True):
        _, _, c = products._drawn(Product(False, False, 5, 11, 3, 0.0, narrow), whole=False)
        np.testing.assert_array_equal(c, np.resize(c[:7], 55))


# ---- chosen --------------------------------------------------------------------------------------

SMALL = toy(MYLLM_1B)


@pytest.mark.parametrize("dropped", [{}, {"dropout_residual": 0.1}, {"dropout_attention": 0.1}])
def test_a_step_s_products_are_those_that_it_makes(dropped: dict[str, float]) -> None:
    """Counted by launchers that compute nothing, and on a device that multiplies."""
    config, device = toy(MYLLM_1B, n_layers=2, **dropped), device_of()
    made: Counter[Product] = Counter()
    multiply = device.gemm_ex

    def counted(product: Product, *given: Any) -> None:
        made[product] += 1
        multiply(product, *given)

    device.gemm_ex = counted  # type: ignore[method-assign]
    training = Training(ops_bf16, config, 3, config.context_length)
    given = training.params, config, training.ids, training.ids
    with ops_bf16.step():
        _, state = loss_forward(ops_bf16, *given, dropout_key=DropoutKey(0, 1, 0, 0))
        loss_backward(1.0, state, training.layout.views(training.grad))
        del state
    assert made == products.of_step(config, 3) and devices.current() is device
    assert sum(products.of_step(config, 3, "block").values()) > sum(made.values())


def test_the_fastest_right_algorithm_of_each_product_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = {"s3": 0.01, "s4": 0.01, "s5": 0.01, "s6": 0.01, "s7": 0.01, "s8": 0.01}
    device_of(monkeypatch.setattr, s1=0.5, s2=0.25, **fast)
    choice = products.choose(SMALL, 2)
    n, made = (f(products.of_step(SMALL, 2).values()) for f in (len, sum))
    version, *lines = choice.products
    assert version == "cuBLAS 13.1.0" and len(lines) == n
    assert all(line.endswith(f": {algorithm(HALVES).hex()}") for line in lines)
    said = f"products: {n} of {n} by algorithms of cublasLt's ({250 * made:.2f} ms of a "
    said += f"micro-batch, {1000 * made:.2f} by cuBLAS's own choice; {2 * n} algorithms are "
    assert choice.said == said + "left out, whose results differ)"
    assert devices.current().products == {}  # what was tried is not what is taken
    products.take(choice.products)
    assert len(devices.current().products) == n
    rows = list(bench.product_rows(choice))
    assert len(rows) == n and {(row.ours, row.theirs) for row in rows} == {(0.25, OWN)}
    assert rows[0].what == f"product {lines[0].split(':')[0]}"
    assert rows[0].note.endswith("2 algorithms beside cuBLAS's")


@pytest.mark.parametrize(("seconds", "taken"), [(0.97, True), (0.99, False), (1.5, False)])
def test_what_is_hardly_faster_is_not_taken(
    seconds: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_of(monkeypatch.setattr, s1=seconds, s2=1.2)
    choice = products.choose(SMALL, 2)
    assert (choice.products != DEFAULT) == taken
    assert taken or choice.said.startswith("products: 0 of ")


def test_times_are_kept_and_spare_the_timing_not_the_check(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_of(monkeypatch.setattr, s1=0.5, s2=0.25)
    first = products.choose(SMALL, 2)
    monkeypatch.setattr(products, "_measure", lambda *_: pytest.fail("it was timed before"))
    checked = []
    check = products.check
    monkeypatch.setattr(products, "check", lambda *given: checked.append(1) or check(*given))
    again = products.choose(SMALL, 2)
    assert again.products == first.products and ", timed here before)" in again.said
    assert len(checked) == len(products.of_step(SMALL, 2)) == len([*cache.glob("product-*")])
    for version, numbered in ((130101, {"s1": 0.5, "s2": 0.25}), (VERSION, {"s1": 0.5})):
        device_of(monkeypatch.setattr, version, **numbered)
        if version == VERSION:  # what is wrong now is not taken for its times of before
            assert set(products.choose(SMALL, 2).products[1:]) == {
                line.split(":")[0] + f": {algorithm(1).hex()}" for line in first.products[1:]
            }
        else:
            with pytest.raises(pytest.fail.Exception):
                products.choose(SMALL, 2)


def test_what_cannot_be_tried_goes_by_cublas_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU without memory for the check, and a library that refuses what it is told."""
    device_of(monkeypatch.setattr, s1=0.5)
    n, drawn = len(products.of_step(SMALL, 2)), products._drawn
    largest = max(p.m * p.n for p in products.of_step(SMALL, 2))
    memory = OSError(errno.ENOMEM, "the GPU's memory is full")

    def full(product: Product, **how: Any) -> Any:
        if product.m * product.n == largest:
            raise memory
        return drawn(product, **how)

    monkeypatch.setattr(products, "_drawn", full)
    choice = products.choose(SMALL, 2)
    left = n - len(choice.timed)
    assert 0 < left < n and len(choice.products) == 1 + n - left
    assert choice.said.startswith(f"products: {n - left} of {n} by ")
    assert f"; {left} go by cuBLAS's own choice untried: no memory to try them)" in choice.said
    monkeypatch.setattr(products, "_drawn", drawn)
    with pytest.MonkeyPatch.context() as patched:  # what fails when it is timed
        for error, why in ((memory, "no memory to try them"), (CublasError("no", 14), "no")):
            patched.setattr(products, "_measure", Mock(side_effect=error))
            choice = products.choose(SMALL, 2, remember=False)
            assert choice == (DEFAULT, f"products: by cuBLAS's own choice ({why})", ())
    for function in ("GetHeuristic", "Check"):
        library = device_of(monkeypatch.setattr, s1=0.5, s2=0.5).cublaslt()
        library._functions[f"cublasLtMatmulAlgo{function}"] = lambda *_: 7  # an invalid value
        choice = products.choose(SMALL, 2)
        refused = f"cublasLtMatmulAlgo{function} fails: the stand-in refuses (7)"
        assert choice == (DEFAULT, f"products: by cuBLAS's own choice ({refused})", ())


def test_without_the_library_products_are_cublas_s_and_it_is_said() -> None:
    devices.use(ShimDevice())
    assert products.choose(SMALL, 2) == (
        DEFAULT,
        "products: by cuBLAS's own choice (the shim has no cublasLt)",
        (),
    )


def test_a_gpu_s_library_is_that_of_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    runtime, library = SimpleNamespace(runtimeGetVersion=lambda: 12090), device_of().library
    device._cupy, device._cublaslt = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), None
    device._use = lambda: None
    asked = []

    def load(name: str) -> Any:
        asked.append(name)
        if len(asked) == 1:
            raise OSError(f"{name}: cannot open shared object file\nmore")
        return library

    monkeypatch.setattr(cupy_device.ctypes, "CDLL", load)
    with pytest.raises(ImportError, match=r"libcublasLt.so.12, .* be used \(.*object file\)$"):
        device.cublaslt()
    assert device.cublaslt() is device.cublaslt() and len(asked) == 2


def test_what_was_chosen_is_taken_only_as_it_was_written() -> None:
    device = device_of(s1=0.5)
    line = f"{products.name(SHAPES[1])}: {algorithm(SUMS_BACKWARD).hex()}"
    products.take(("cuBLAS 13.1.0", line))
    assert set(device.products) == {SHAPES[1]}
    for product in SHAPES:
        products.take(("cuBLAS 13.1.0", f"{products.name(product)}: {line.split()[-1]}"))
        assert set(device.products) == {product}
    products.take(("cuBLAS 13.1.0", line))
    for wrong in ("fast", (), ("cuBLAS 13", line), (line,), ("cuBLAS 13.1.0", line[:-1])):
        with pytest.raises(ValueError, match=r"run.products must be 'auto', 'default', or what a"):
            products.take(wrong)
    with pytest.raises(ImportError, match=r"of cuBLAS 13.0.2, which cuBLAS 13.1.0, installed here"):
        products.take(("cuBLAS 13.0.2", line))
    refused = line.replace(line.split()[-1], algorithm(REFUSED).hex())
    with pytest.raises(ImportError, match=r"NN 24x16x40 float32 \(cublasLtMatmulAlgoCheck fails"):
        products.take(("cuBLAS 13.1.0", line, refused))
    assert set(device.products) == {SHAPES[1]}  # all or none
    products.take(DEFAULT)
    assert device.products == {}
    with pytest.raises(ValueError, match="products are chosen on GPUs, and the backend 'cpu' has"):
        accel.load("cpu", products=("cuBLAS 13.1.0", line))


def test_other_products_go_as_they_always_did() -> None:
    """Those of float32 and those of other shapes; and what was chosen by its algorithm."""
    device = device_of(s1=1.0)
    x, w = (np.ones(shape, np.float32) for shape in ((16, 40), (40, 24)))
    product = Product(False, False, 24, 16, 40, 0.0, False)
    products.take(("cuBLAS 13.1.0", f"{products.name(product)}: {algorithm(SUMS_BACKWARD).hex()}"))
    out = np.zeros((16, 24), np.float32)
    bf16 = to_bf16(x), to_bf16(w)
    for a, b, by_algorithm in ((x, w, 0), (bf16[0][:8], bf16[1], 0), (*bf16, 1)):
        device.launches.clear()
        got = linear.matmul(device.upload(a), device.upload(b), device.upload(out[: len(a)]))
        assert (got == 40).all() and device.launches == ["gemm"] * (1 - by_algorithm)


# ---- on CuPy's own arrays ------------------------------------------------------------------------


def test_on_cupy_s_arrays_the_same_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    require.nvrtc()
    from tests.cuda_shim.cupy_arrays import CuPyArrays

    class Both(WithCublasLt, CuPyArrays):
        """CuPy's arrays, and the stand-in."""

    device = Both({SUMS_BACKWARD: 0.5, HALVES: 0.25, DROPS_LAST: 0.1, IN_TURN: 0.1, NOT_OURS: 0.1})
    devices.use(device)
    monkeypatch.setattr(paths, "clock", lambda: device.now)
    choice = products.choose(SMALL, 2)
    assert all(line.endswith(algorithm(HALVES).hex()) for line in choice.products[1:])
    products.take(choice.products)
    before = len(device.launches)
    Training(ops_bf16, SMALL, 2, SMALL.context_length).loss()
    assert "gemm" not in device.launches[before:]
