"""As much of CuPy as a module with RawKernels needs, over the shim: CUDA C++ without a GPU.

Blocks have one axis. What CUDA C++ writes otherwise than ``device.cuh`` is put in its words:
``__syncthreads``, shuffles by exclusive or, and shared memory, static or of the launch's size.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.types import Array
from tests.cuda_shim.device import ShimDevice, ShimError

WORDS = """
#define __syncthreads() sync_block()
#define __shfl_xor_sync(mask, value, lanes) shuffle_xor(value, lanes)
#define __shared__ static
"""
device = ShimDevice()


def asarray(array: npt.ArrayLike) -> Array:
    return device.upload(np.asarray(array))


def asnumpy(array: Array) -> Array:
    return device.download(array)


def ascontiguousarray(array: Array) -> Array:
    return array if array.flags.c_contiguous else device.upload(array)


def empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    return device.empty(shape if isinstance(shape, tuple) else (shape,), dtype)


class RawKernel:
    """A kernel of CUDA C++, launched as CuPy's is: ``kernel(grid, block, arguments)``."""

    def __init__(self, code: str, name: str) -> None:
        code = re.sub(r'extern\s+"C"\s+__global__\s+void\s+', "KERNEL ", code)
        asked = r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\]"
        code = re.sub(asked, r"\1* const \2 = (\1*)shim::shared", code)
        self.name = name
        self.source = f"raw_{name}_{len(device.extra)}"
        device.extra[self.source] = WORDS + code

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        *,
        shared_mem: int = 0,
    ) -> None:
        if any(n != 1 for n in block[1:]):
            raise ShimError(f"{self.name}: blocks have one axis here, got {tuple(block)}")
        blocks = (*grid, 1, 1)[:3]
        device.launch(
            self.source, self.name, blocks, block[0], arguments, shared=shared_mem, defines={}
        )
