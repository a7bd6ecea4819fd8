"""cublasLt, the part of cuBLAS that lets its caller choose, and that CuPy has not.

It lists algorithms for a product of bf16 operands, by its own expectation the best first, and
multiplies by one of them. Of algorithms that cut the sums of k terms into parts, only those are
asked for that keep the parts in float32 in a workspace and add them up in a step of their own: no
sum is ever in bf16, and the bits do not depend on which part is ready first. An algorithm is 64
bytes, which NVIDIA's header says may be kept for the same version of the library.

Names and numbers are those of ``cublasLt.h``; https://docs.nvidia.com/cuda/cublas, "Using the
cuBLASLt API".
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from functools import cached_property
from typing import Any

import numpy as np

from accel.cuda.cublas import (
    COMPUTE_32F,
    CUDA_R_16BF,
    CUDA_R_32F,
    WORKSPACE,
    Bound,
    CublasError,
    Functions,
)
from accel.cuda.device import Product, current
from reference.types import Array

# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasLtReductionScheme_t,
# cublasStatus_t
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
PREF_MIN_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D, in bytes
REDUCTION_SCHEME_COMPUTE_TYPE = 2
NOT_SUPPORTED = 15

ALIGNMENT = 16  # bytes, of operands that are multiplied so; others go to cuBLAS


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


FUNCTIONS: Functions = {
    "cublasLtGetStatusString": (ctypes.c_char_p, (c_int,)),
    "cublasLtGetVersion": (c_size_t, ()),
    "cublasLtCreate": (c_int, (pointer,)),
    "cublasLtMatmulDescCreate": (c_int, (pointer, c_int, c_int)),
    "cublasLtMatmulDescSetAttribute": (c_int, (pointer, c_int, pointer, c_size_t)),
    "cublasLtMatrixLayoutCreate": (c_int, (pointer, c_int, c_uint64, c_uint64, c_int64)),
    "cublasLtMatmulPreferenceCreate": (c_int, (pointer,)),
    "cublasLtMatmulPreferenceSetAttribute": (c_int, (pointer, c_int, pointer, c_size_t)),
    "cublasLtMatmulAlgoGetHeuristic": (c_int, (*(pointer,) * 7, c_int, pointer, pointer)),
    "cublasLtMatmulAlgoCheck": (c_int, (pointer,) * 8),
    "cublasLtMatmul": (c_int, (*(pointer,) * 14, c_size_t, pointer)),
}


class CublasLt(Bound):
    """The library, on the device in use.

    Parameters
    ----------
    library : ctypes.CDLL

    Attributes
    ----------
    version : str
        ``"13.1.0"``, say.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library, FUNCTIONS)
        number = int(library.cublasLtGetVersion())
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        self._described: dict[Product, tuple[Any, ...]] = {}
        self._workspace: Array | None = None

    def put(self, name: str, at: Any, attribute: int, value: Any) -> None:
        """Set an attribute of what was made."""
        self.call(name, at, attribute, byref(value), ctypes.sizeof(value))

    @cached_property
    def handle(self) -> Any:
        """The library's context, made when it is first wanted."""
        return self.made("cublasLtCreate")

    def described(self, product: Product) -> tuple[Any, ...]:
        """Return the descriptors of a product: what is done, and how A, B, and C and D lie."""
        if product not in self._described:
            p = product
            done = self.made("cublasLtMatmulDescCreate", COMPUTE_32F, CUDA_R_32F)
            for attribute, transpose in zip((DESC_TRANSA, DESC_TRANSB), p[:2], strict=True):
                self.put("cublasLtMatmulDescSetAttribute", done, attribute, c_int32(transpose))
            out = CUDA_R_16BF if p.narrow else CUDA_R_32F
            a, b, c = (
                self.made("cublasLtMatrixLayoutCreate", kind, rows, columns, ld)
                for kind, rows, columns, ld in (
                    (CUDA_R_16BF, *((p.k, p.m) if p.transpose_a else (p.m, p.k)), p.lda),
                    (CUDA_R_16BF, *((p.n, p.k) if p.transpose_b else (p.k, p.n)), p.ldb),
                    (out, p.m, p.n, p.m),
                )
            )
            self._described[product] = done, a, b, c
        return self._described[product]

    @cached_property
    def wish(self) -> Any:
        """What an algorithm must keep to."""
        wish = self.made("cublasLtMatmulPreferenceCreate")
        settings = {
            PREF_MAX_WORKSPACE_BYTES: c_uint64(WORKSPACE),
            PREF_REDUCTION_SCHEME_MASK: c_uint32(REDUCTION_SCHEME_COMPUTE_TYPE),
            **dict.fromkeys(PREF_MIN_ALIGNMENTS, c_uint32(ALIGNMENT)),
        }
        for attribute, value in settings.items():
            self.put("cublasLtMatmulPreferenceSetAttribute", wish, attribute, value)
        return wish

    def algorithms(self, product: Product, most: int) -> list[bytes]:
        """Return algorithms for a product, at most so many; none where the library has none."""
        found, n = (Heuristic * most)(), c_int()
        done, a, b, c = self.described(product)
        given = self.handle, done, a, b, c, c, self.wish, most, found, byref(n)
        try:
            self.call("cublasLtMatmulAlgoGetHeuristic", *given)
        except CublasError as error:
            if error.status != NOT_SUPPORTED:  # else: it has no rule for such a product
                raise
            return []
        return [bytes(one.algo) for one in found[: n.value] if one.state == 0]

    def room(self) -> int:
        """Return the address of a workspace for all products, which stays where it is."""
        if self._workspace is None:
            self._workspace = current().empty((WORKSPACE,), np.uint8)
        return current().address(self._workspace)


class ByAlgorithm:
    """A product by one algorithm, which reads C apart as it adds it; called as ``gemm_ex`` is.

    Raises
    ------
    CublasError
        When the algorithm is not for this product, or not for this GPU.
    """

    def __init__(self, library: CublasLt, product: Product, algorithm: bytes) -> None:
        self._library, self._described = library, library.described(product)
        done, a, b, c = self._described
        self._algorithm = Algorithm.from_buffer_copy(algorithm)
        found = Heuristic()
        given = library.handle, done, a, b, c, c, byref(self._algorithm), byref(found)
        library.call("cublasLtMatmulAlgoCheck", *given)
        self._workspace = int(found.workspace)
        if self._workspace > WORKSPACE:
            raise CublasError(
                f"the algorithm asks for {self._workspace:,} bytes of workspace here, and products "
                f"have {WORKSPACE:,}",
                NOT_SUPPORTED,
            )
        self._one, self._beta = c_float(1), c_float(product.beta)

    def __call__(self, product: Product, a: Array, b: Array, c: Array, d: Array) -> None:
        """D ← op(A) op(B) + beta·C."""
        device = current()
        at, bt, ct, dt = (device.address(x) for x in (a, b, c, d))
        if (at | bt | ct | dt) % ALIGNMENT:
            return device.gemm_ex(product, a, b, c, d)
        done, a_lies, b_lies, c_lies = self._described
        self._library.call(
            "cublasLtMatmul",
            self._library.handle,
            done,
            byref(self._one),
            *(at, a_lies, bt, b_lies),
            byref(self._beta),
            *(ct, c_lies, dt, c_lies),
            byref(self._algorithm),
            self._library.room() if self._workspace else 0,
            self._workspace,
            device.stream(),
        )
