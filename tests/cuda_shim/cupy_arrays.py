"""The shim with CuPy's own arrays, over memory of the host: what launchers do to them is real.

CuPy's ``ndarray`` needs no GPU to have a shape, to be viewed, sliced and reshaped, and to keep its
memory alive. Whatever would make CuPy itself compute or copy on a GPU raises here, for there is
none. Of ``CuPyDevice`` its own ``piece`` and ``address`` run.
"""

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from accel.cuda.cupy_device import CuPyDevice
from accel.cuda.device import Argument, Product
from reference.types import Array
from tests.cuda_shim.device import ShimDevice, ShimError


def host(array: Any) -> Array:
    """Return NumPy's view of the memory of a CuPy array."""
    if not isinstance(array, cupy.ndarray):
        raise ShimError(f"one of CuPy's arrays is wanted, got {type(array).__name__}")
    described = {
        "data": (int(array.data.ptr), False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": array.dtype.str,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described, owner=array))


class CuPyArrays(ShimDevice):
    """The shim's kernels; arrays are CuPy's."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.real: Any = CuPyDevice.__new__(CuPyDevice)  # without the GPU that it would look for
        self.real._cupy, self.real._gpu = cupy, SimpleNamespace(id=0)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        array = super().empty(shape, dtype)
        address = int(array.ctypes.data)
        memory = cupy.cuda.UnownedMemory(address, max(1, array.nbytes), array, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def piece(
        self, block: Any, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any
    ) -> Any:
        array = self.real.piece(block, start, shape, dtype, owner)
        ctypes.memset(self.address(array), 0xFF, array.nbytes)
        return array

    def expired(self, block: Any) -> None:
        super().expired(host(block))

    def clear(self, array: Any) -> None:
        super().clear(host(array))

    def upload(self, array: Array) -> Any:
        copy = self.empty(array.shape, array.dtype)
        host(copy)[...] = array
        return copy

    def write(self, array: Any, values: Array) -> None:
        super().write(host(array), values)

    def download(self, array: Any) -> Array:
        # of what is strided CuPy would first make a copy by a kernel of its own
        assert array.flags.c_contiguous
        return super().download(host(array))

    def address(self, array: Any) -> int:
        return int(self.real.address(array))

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int,
        defines: Mapping[str, int],
    ) -> None:
        # what CuPy takes: whole numbers of Python's, its own arrays, NumPy's scalars
        assert all(type(n) is int for n in (*grid, threads, shared)), (grid, threads, shared)
        given = [a if a is None or isinstance(a, np.generic) else host(a) for a in arguments]
        super().launch(source, kernel, grid, threads, given, shared=shared, defines=defines)

    def gemm_ex(self, product: Product, a: Any, b: Any, c: Any, d: Any) -> None:
        assert all(type(size) is int for size in product[2:5])
        to = host(d)
        super().gemm_ex(product, host(a), host(b), to if c is d else host(c), to)
