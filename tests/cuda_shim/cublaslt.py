"""The shim with a stand-in for cublasLt: ``cublaslt.cpp``, compiled against NVIDIA's own header."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from accel.cuda.cublaslt import CublasLt
from accel.cuda.device import Product
from reference.types import Array
from tests.cuda_shim import device as shim
from tests.cuda_shim.device import HERE, ShimDevice
from tests.cuda_shim.require import cuda_files

# algorithms of the stand-in, by the numbers of cublaslt.cpp
SUMS_BACKWARD, HALVES, DROPS_LAST, REFUSED, IN_BF16, IN_TURN, FAILS, NOT_OURS = range(1, 9)
STAND_IN = HERE / "cublaslt.cpp"
# its functions call each other, not NVIDIA's of the same names, which CuPy may have loaded for all
SHARED = ("-shared", "-fPIC", "-Wl,-Bsymbolic")
VERSION = 130100
OWN = 1.0  # seconds that a product by cuBLAS's own choice takes


def algorithm(number: int) -> bytes:
    """Return the bytes of an algorithm of the stand-in's."""
    return b"".join((number << 8 * i).to_bytes(8, "little") for i in range(8))


def includes() -> list[str]:
    """Return what tells a compiler where NVIDIA's headers are."""
    return [
        f"-I{folder}" for folder in sorted({p.parent for p in cuda_files("c*/include/cublasLt.h")})
    ]


def compiled(source: Path, *how: str) -> Path:
    """Return what g++ makes of a file and NVIDIA's headers, now or earlier."""
    command = ["g++", "-std=c++20", "-O2", "-fno-gnu-unique", *how, *includes(), str(source)]
    hashed = hashlib.sha256("\0".join([*command, source.read_text("utf-8")]).encode())
    path = shim.cache() / f"{source.stem}-{hashed.hexdigest()[:20]}"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            handle, partial = tempfile.mkstemp(dir=path.parent)
            os.close(handle)
            done = subprocess.run(
                [*command, "-o", partial], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            os.replace(partial, path)
    return path


class Recordable(CublasLt):
    """The library, whose products are for later while something is recorded."""

    def __init__(self, library: Any, device: ShimDevice) -> None:
        super().__init__(library)
        self._device = device

    def call(self, name: str, *given: Any) -> None:
        multiply = super().call
        if name == "cublasLtMatmul" and self._device.later(lambda _: multiply(name, *given)):
            return
        multiply(name, *given)


class WithCublasLt(ShimDevice):
    """A device whose products take seconds of a clock of their own.

    Parameters
    ----------
    seconds : mapping
        By an algorithm's number; those that are missing are not listed.
    version : int
        As ``cublasLtGetVersion`` says it.
    """

    def __init__(self, seconds: Mapping[int, float], version: int = VERSION, **how: Any) -> None:
        super().__init__(**how)
        self.library = library = ctypes.CDLL(str(compiled(STAND_IN, *SHARED)))
        library.standin_set.argtypes = [ctypes.c_uint64, ctypes.c_double]
        library.standin_version.argtypes = [ctypes.c_size_t]
        library.standin_clock.restype = ctypes.c_double
        for number in range(1, 9):
            library.standin_set(number, seconds.get(number, 0.0))
        library.standin_version(version)
        self._started, self._own = library.standin_clock(), 0.0
        self._lt = Recordable(library, self)

    def cublaslt(self) -> CublasLt:
        return self._lt

    def gemm_ex(self, product: Product, a: Array, b: Array, c: Array, d: Array) -> None:
        self._own += OWN
        super().gemm_ex(product, a, b, c, d)

    @property
    def now(self) -> float:
        """Seconds that products have taken."""
        return self._own + float(self.library.standin_clock()) - self._started
