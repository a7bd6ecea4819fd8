"""cuBLAS's product, bound by ctypes: CuPy's own binding refuses while launches are recorded.

What is here is also how ``cublaslt.py`` calls its part of the library. Names and numbers are those
of ``cublas_v2.h``; https://docs.nvidia.com/cuda/cublas, "Using the cuBLAS API".
"""

import ctypes
import threading
from collections.abc import Mapping
from ctypes import byref, c_float, c_int, c_size_t
from ctypes import c_void_p as pointer
from typing import Any

import numpy as np

from accel.cuda.device import Product, current
from reference.types import Array

# cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t
CUDA_R_32F, CUDA_R_16BF = 0, 14
COMPUTE_32F, COMPUTE_32F_PEDANTIC = 68, 69
GEMM_DEFAULT = -1
# partial sums of a product keep the type that it is computed in, float32, where cuBLAS would
# otherwise be free to add them up in the type of the result, bf16
DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # cublasMath_t

WORKSPACE = 32 << 20  # bytes, as many as cuBLAS takes by itself on Hopper

Functions = Mapping[str, tuple[Any, tuple[Any, ...]]]  # what each returns and takes

FUNCTIONS: Functions = {
    "cublasGetStatusString": (ctypes.c_char_p, (c_int,)),
    "cublasCreate_v2": (c_int, (pointer,)),
    "cublasSetMathMode": (c_int, (pointer, c_int)),
    "cublasSetStream_v2": (c_int, (pointer, pointer)),
    "cublasSetWorkspace_v2": (c_int, (pointer, pointer, c_size_t)),
    "cublasGemmEx": (
        c_int,
        (pointer, *(c_int,) * 5, pointer)  # handle, op(A), op(B), m, n, k, alpha
        + (pointer, c_int, c_int) * 2  # A, B
        + (pointer, pointer, c_int, c_int)  # beta, C
        + (c_int, c_int),  # computed in, algorithm
    ),
}


class CublasError(OSError):
    """The library refused what it was asked for.

    Attributes
    ----------
    status : int
        cublasStatus_t.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Bound:
    """Functions of a library that return a status.

    Parameters
    ----------
    library : ctypes.CDLL
    functions : mapping
        The first says what a status means.
    """

    def __init__(self, library: Any, functions: Functions) -> None:
        self._functions = {}
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self._says = self._functions[next(iter(functions))]

    def call(self, name: str, *given: Any) -> None:
        """Call a function.

        Raises
        ------
        CublasError
            When it returns anything but success.
        """
        status = self._functions[name](*given)
        if status:
            said = (self._says(status) or b"").decode()
            raise CublasError(f"{name} fails: {said} ({status})", status)

    def made(self, name: str, *given: Any) -> Any:
        """Return what a function writes behind its first argument, a pointer."""
        at = pointer()
        self.call(name, byref(at), *given)
        return at


class Cublas(Bound):
    """The library, on the device in use."""

    def __init__(self, library: Any) -> None:
        super().__init__(library, FUNCTIONS)
        self._numbers = {x: c_float(x) for x in (0.0, 1.0)}  # alpha and beta
        self._own = threading.local()  # a thread's handle, its workspace, and the stream it is for
        self._workspaces: list[Array] = []  # for good: what was recorded may outlive its thread

    def handle(self) -> Any:
        """Return this thread's handle, for the device's current stream.

        It works in memory of its own: what cuBLAS takes by itself may be another's at the time when
        a recorded product is run.
        """
        own, stream = self._own, current().stream()
        if not hasattr(own, "handle"):
            handle = self.made("cublasCreate_v2")
            self.call("cublasSetMathMode", handle, DISALLOW_REDUCED_PRECISION_REDUCTION)
            own.workspace, own.stream = current().empty((WORKSPACE,), np.uint8), None
            self._workspaces.append(own.workspace)
            own.handle = handle  # last: what fails before is tried again
        if own.stream != stream:
            self.call("cublasSetStream_v2", own.handle, stream)
            at = current().address(own.workspace)  # a new stream forgets it
            self.call("cublasSetWorkspace_v2", own.handle, at, WORKSPACE)
            own.stream = stream
        return own.handle

    def gemm_ex(self, product: Product, a: int, b: int, d: int, *, bf16: bool) -> None:
        """D ← op(A) op(B) + beta·D, of arrays at these addresses, A and B of float32 or bf16.

        In float32 without shortcuts for float32 operands.
        """
        kind = CUDA_R_16BF if bf16 else CUDA_R_32F
        self.call(
            "cublasGemmEx",
            self.handle(),
            int(product.transpose_a),
            int(product.transpose_b),
            product.m,
            product.n,
            product.k,
            byref(self._numbers[1.0]),
            *(a, kind, product.lda),
            *(b, kind, product.ldb),
            byref(self._numbers[product.beta]),
            *(d, CUDA_R_16BF if product.narrow else CUDA_R_32F, product.m),
            COMPUTE_32F if bf16 else COMPUTE_32F_PEDANTIC,
            GEMM_DEFAULT,
        )
