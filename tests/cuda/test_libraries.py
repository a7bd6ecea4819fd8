"""cuBLAS, and NCCL by way of CuPy: what is called is what NVIDIA's headers and libraries have.

No GPU and no driver. The code that calls them, and CuPy's binding of NCCL, run in front of
functions that are compiled from NVIDIA's own declarations and write down what they are given
(``recorded_libraries.cpp``): an argument too many, or one in another place, shows.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.cuda import cublas
from tests.cuda_shim.require import cuda_files
from tests.helpers import ROOT, fake_nccl

HERE = Path(__file__).parent
SOURCE = HERE / "recorded_libraries.cpp"
CALLED = re.findall(r"^(?:\w+_t |const char\* )(\w+)\(", SOURCE.read_text(), re.MULTILINE)


# What the child does: the products of a launcher, and the exchange of a trainer of three ranks.
CHILD = r"""
import ctypes, os
from types import SimpleNamespace
import numpy as np
from accel.cuda import cublas, device as devices
from accel.cuda.device import Product
from dist.carriers import Nccl, _nccl_module, _why_not_nccl

class Address:
    def __init__(self, at, dtype, size=0):
        self.at, self.dtype, self.size = at, np.dtype(dtype), size

devices.use(SimpleNamespace(
    stream=lambda: 7 << 40, address=lambda array: 9 << 40, empty=lambda shape, dtype: None
))
library = cublas.Cublas(ctypes.CDLL(os.environ["LD_PRELOAD"]))
at = [n << 40 | n for n in (1, 2, 3)]
library.gemm_ex(Product(False, True, 2**31 - 1, 12, 13, 1.0, True), *at, bf16=True)
library.gemm_ex(Product(True, False, 21, 22, 23, 0.0, False), *at, bf16=False)
library.gemm_ex(Product(True, True, 31, 32, 33, 0.0, False), *at, bf16=True)

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
    compiled = subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", SOURCE, "-o", library]
        + [f"-I{folder}" for folder in sorted(includes)],
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
    found: dict[str, Any] = {}
    for line in record.read_text().splitlines():
        name, *arguments = line.split()
        found.setdefault(name, []).append([int(x) for x in arguments])
    return found


def test_the_headers_have_the_numbers_that_are_passed(calls: dict[str, Any]) -> None:
    assert calls["cudaDataType"] == [[cublas.CUDA_R_32F, cublas.CUDA_R_16BF]]
    assert calls["cublasOperation_t"] == [[False, True]]
    assert calls["cublasComputeType_t"] == [[cublas.COMPUTE_32F, cublas.COMPUTE_32F_PEDANTIC]]
    assert calls["cublasGemmAlgo_t"] == [[cublas.GEMM_DEFAULT]]
    assert calls["cublasMath_t"] == [[cublas.DISALLOW_REDUCED_PRECISION_REDUCTION]]
    assert calls["ncclDataType_t"] == [[fake_nccl.FLOAT32]]


def test_a_product_arrives_at_cublas_as_it_was_asked_for(calls: dict[str, Any]) -> None:
    handle, at, large = 0x7FFF12345678, [n << 40 | n for n in (1, 2, 3)], 2**31 - 1
    assert calls["cublasSetMathMode"] == [[handle, 16]]
    assert calls["cublasSetStream"] == [[handle, 7 << 40]]
    assert calls["cublasSetWorkspace"] == [[handle, 9 << 40, 32 << 20]]
    assert calls["cublasGemmEx"] == [
        [handle, *sizes, *operands, *result, how, -1]
        for sizes, operands, result, how in (
            (
                (0, 1, large, 12, 13),
                (1, at[0], 14, large, at[1], 14, 12),
                (1, at[2], 14, large),
                68,
            ),
            ((1, 0, 21, 22, 23), (1, at[0], 0, 23, at[1], 0, 23), (0, at[2], 0, 21), 69),
            ((1, 1, 31, 32, 33), (1, at[0], 14, 33, at[1], 14, 32), (0, at[2], 0, 31), 68),
        )
    ]


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
    assert len(CALLED) == 15
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
