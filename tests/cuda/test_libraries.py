"""cuBLAS and NCCL by way of CuPy: what is called is what NVIDIA's headers and libraries have.

No GPU and no driver. The code that calls CuPy's bindings, and these themselves, run in front of
functions that are compiled from NVIDIA's own declarations and write down what they are given
(``recorded_libraries.cpp``): an argument too many, or one in another place, shows. CuPy's
``gemmEx`` alone asks the driver for a stream first: what it is given is held against the names of
its own arguments, and these against those of the header.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.cuda import cupy_device
from tests.cuda_shim.require import cuda_files
from tests.helpers import ROOT, fake_nccl

HERE = Path(__file__).parent
SOURCE = HERE / "recorded_libraries.cpp"
CALLED = ("cublasGemmEx", *re.findall(r"^\w+_t (\w+)\(", SOURCE.read_text(), re.MULTILINE))


# What the child does: the products of a launcher, and the exchange of a trainer of three ranks.
CHILD = r"""
import json, re
from types import SimpleNamespace
import numpy as np
from cupy_backends.cuda.libs import cublas
from accel.cuda.cupy_device import CuPyDevice
from accel.cuda.device import Product
from dist.carriers import Nccl, _nccl_module, _why_not_nccl

class Address:
    def __init__(self, at, dtype, size=0):
        self.at, self.dtype, self.size = at, np.dtype(dtype), size

device = CuPyDevice.__new__(CuPyDevice)
handle = SimpleNamespace(get_cublas_handle=lambda: 0x7fff12345678)
device._cupy = SimpleNamespace(cuda=SimpleNamespace(device=handle))
def product(*given):
    types = re.findall(r"(\w+) (\w+)[,)]", cublas.gemmEx.__doc__.split("\n")[0])
    print(json.dumps([[kind, name, x] for (kind, name), x in zip(types, given, strict=True)]))

device._cublas = SimpleNamespace(
    setPointerMode=cublas.setPointerMode, setMathMode=cublas.setMathMode, gemmEx=product
)
device._numbers = {x: np.array([x], np.float32) for x in (0.0, 1.0)}
device.address = lambda array: array.at
bf16, f32 = ([Address(n << 40 | n, t) for n in (1, 2, 3)] for t in (np.uint16, np.float32))
a, b, c = bf16
device.gemm_ex(Product(False, True, 2**31 - 1, 12, 13, 1.0, True), a, b, c, c)
a, b, c = f32
device.gemm_ex(Product(True, False, 21, 22, 23, 0.0, False), a, b, c, c)

assert _why_not_nccl() == "" and _nccl_module().get_version() == 23456
here = SimpleNamespace(
    upload=lambda array: Address(5 << 40, np.float32, len(array)),
    empty=lambda shape, dtype: Address(6 << 40, dtype, *shape),
    address=lambda array: array.at,
    stream=lambda: 7 << 40,
)
level = SimpleNamespace(size=3, rank=1, broadcast=lambda identity: nccl.get_unique_id())
nccl = _nccl_module()
Address.__getitem__ = lambda self, s: Address(self.at + 4 * s.start, self.dtype, s.stop - s.start)
ranks = Nccl(level, here, nccl)
ranks.all_gather_slices(Address(8 << 40, np.float32), [0, 9, 2**33, 2**33 + 10])
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return function -> the arguments of each call, as the functions of the headers saw them."""
    folder = tmp_path_factory.mktemp("libraries")
    includes = {path.parent for path in cuda_files("c*/include/cublas_v2.h")}
    includes |= {path.parent for path in cuda_files("nccl/include/nccl.h")}
    library, record = folder / "recorded.so", folder / "calls"
    # CuPy's binding asks for the symbols of cuBLAS by the library's version
    versions = folder / "versions"
    names = "".join(f"{name};" for name in CALLED if name.startswith("cublas"))
    versions.write_text(f"libcublas.so.13 {{ {names} }};\n")
    compiled = subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", SOURCE, "-o", library]
        + [f"-I{folder}" for folder in sorted(includes)]
        + [f"-Wl,--version-script={versions}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    environment = {"LD_PRELOAD": str(library), "MYLLM_CALLS": str(record), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {"gemmEx": [json.loads(line) for line in done.stdout.splitlines()]}
    for line in record.read_text().splitlines():
        name, *arguments = line.split()
        found.setdefault(name, []).append([int(x) for x in arguments])
    return found


def test_the_headers_have_the_numbers_that_are_passed(calls: dict[str, Any]) -> None:
    d = cupy_device
    assert calls["cudaDataType"] == [[d.CUDA_R_32F, d.CUDA_R_16BF]]
    assert calls["cublasOperation_t"] == [[False, True]]
    assert calls["cublasComputeType_t"] == [[d.COMPUTE_32F, d.COMPUTE_32F_PEDANTIC]]
    assert calls["cublasGemmAlgo_t"] == [[d.GEMM_DEFAULT]]
    assert calls["cublasPointerMode_t"] == [[d.POINTER_MODE_HOST]]
    assert calls["cublasMath_t"] == [[d.DISALLOW_REDUCED_PRECISION_REDUCTION]]
    assert calls["ncclDataType_t"] == [[fake_nccl.FLOAT32]]


def test_a_product_arrives_at_cublas_as_it_was_asked_for(calls: dict[str, Any]) -> None:
    handle, at = 0x7FFF12345678, [n << 40 | n for n in (1, 2, 3)]
    assert calls["cublasSetPointerMode"] == [[handle, 0]] * 2
    assert calls["cublasSetMathMode"] == [[handle, 16]] * 2
    (header,) = cuda_files("c*/include/cublas_api.h")
    declared = re.search(r"cublasGemmEx\(([^;]*)\)", header.read_text())
    assert declared
    names = [re.findall(r"\w+", one)[-1] for one in declared[1].split(",")]
    wide = ["*" in one or "Handle" in one for one in declared[1].split(",")]
    large = 2**31 - 1
    expected = [
        [handle, 0, 1, large, 12, 13, 1, at[0], 14, large, at[1], 14, 12, 1, at[2], 14, large, 68],
        [handle, 1, 0, 21, 22, 23, 1, at[0], 0, 23, at[1], 0, 23, 0, at[2], 0, 21, 69],
    ]
    for call, values in zip(calls["gemmEx"], expected, strict=True):
        assert [name for _, name, _ in call] == names
        assert [kind != "int" for kind, _, _ in call] == wide
        for (_, name, got), value in zip(call, [*values, -1], strict=True):
            assert got == value or name in ("alpha", "beta"), name


def test_an_exchange_arrives_at_nccl_as_it_was_asked_for(calls: dict[str, Any]) -> None:
    comm, stream, at = 0x123456789ABC, 7 << 40, 8 << 40
    # the whole identity of 128 bytes; no settings, so NCCL's own
    assert calls["ncclCommInitRankConfig"] == [[3, 1, 1, 0]]
    assert calls["ncclUniqueId"] == [[128]]
    assert len(calls["ncclGroupStart"]) == len(calls["ncclGroupEnd"]) == 2
    own = [at + 36, 2**33 - 9, 7]
    assert calls["ncclSend"][-2:] == [[*own, peer, comm, stream] for peer in (0, 2)]
    assert calls["ncclRecv"][-2:] == [
        [at, 9, 7, 0, comm, stream],
        [at + 4 * 2**33, 10, 7, 2, comm, stream],
    ]


def test_the_libraries_have_what_is_called() -> None:
    libraries = {
        "cublas": [*cuda_files("c*/lib/libcublasLt.so.*"), *cuda_files("c*/lib/libcublas.so.*")],
        "nccl": cuda_files("nccl/lib/libnccl.so.*"),
    }
    assert len(CALLED) == 11
    for name, files in libraries.items():
        library = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in files][-1]
        for function in CALLED:
            assert not function.startswith(name) or hasattr(library, function), function
        version = ctypes.c_int()
        if name == "nccl":  # asks no driver
            assert library.ncclGetVersion(ctypes.byref(version)) == 0
        else:
            assert library.cublasGetProperty(0, ctypes.byref(version)) == 0  # MAJOR_VERSION
        assert version.value >= (22000 if name == "nccl" else 12)
