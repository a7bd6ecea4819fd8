"""A GPU as the launchers' device: memory, launches and cuBLAS by way of CuPy.

CuPy compiles nothing here, so that no CUDA headers are needed: kernels are loaded as the machine
code that ``compiler.py`` made, and array operations are limited to copies and memsets.
"""

import contextlib
import ctypes
import errno
import importlib
import math
import operator
import struct
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from accel import AUTO, Attention, Products, launcher
from accel.cuda import attention, products
from accel.cuda import device as devices
from accel.cuda.arena import Arena
from accel.cuda.compiler import cubin_file, first_line, nvrtc_version
from accel.cuda.cublas import Cublas
from accel.cuda.cublaslt import CublasLt
from accel.cuda.device import BF16, Argument, Multiply, Product
from accel.cuda.sources import Signature, signature
from reference.ops import Ops
from reference.types import Array

T = TypeVar("T")
IDENTITY = operator.attrgetter("data.ptr", "shape", "strides", "dtype")  # of CuPy's arrays

# cudaDeviceAttr
MULTIPROCESSORS, COMPUTE_CAPABILITY_MAJOR, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 16, 75, 97
PAGEABLE_MEMORY_ACCESS = 88

STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel has without asking
# what cuLaunchKernel's `extra` is made of, names and values of cuda.h
LAUNCH_PARAM_END, LAUNCH_PARAM_BUFFER_POINTER, LAUNCH_PARAM_BUFFER_SIZE = 0, 1, 2


def backend(compute: str, path: Attention = AUTO, chosen: Products = AUTO) -> Ops:
    """Return the backend's module for ``compute``, with this process's GPU in use.

    Raises
    ------
    ImportError
        When CuPy, NVRTC, cuBLAS, the driver, a GPU, its path of attention or the version of cuBLAS
        that products were chosen with is missing; the message says which, and what to do.
    """
    devices.use(CuPyDevice(find_gpu()))
    if path != AUTO:
        attention.take(path)
    products.take(chosen)
    name = "accel.cuda.ops_bf16" if compute == "bf16" else "accel.cuda.ops"
    return cast(Ops, importlib.import_module(name))


def find_gpu() -> int:
    """Return the index of this process's GPU: by its rank on this machine, in turn."""
    # what CuPy and NumPy warn of at import is shown even where warnings are made errors: it is no
    # reason not to start
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return _find_gpu()


def _find_gpu() -> int:
    nvrtc_version()  # says so when CuPy or NVRTC is missing
    from cupy_backends.cuda.api import runtime

    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise ImportError(
            "the backend 'cuda' needs an NVIDIA GPU and its driver, and CUDA cannot reach one "
            f"({first_line(error)}): install the driver (580 or later for CUDA 13, 525 for CUDA "
            "12) and see that nvidia-smi lists the GPU; without a GPU use the backend 'cpu'"
        ) from error
    if count == 0:
        raise ImportError(
            "the backend 'cuda' needs an NVIDIA GPU and the driver sees none: look at nvidia-smi "
            "and at CUDA_VISIBLE_DEVICES, or use the backend 'cpu'"
        )
    try:
        importlib.import_module("cupy_backends.cuda.libs.cublas")
        importlib.import_module("cupy")
    except (ImportError, OSError) as error:
        raise ImportError(
            "the backend 'cuda' multiplies with cuBLAS, whose library was not found: pip install "
            f"nvidia-cublas, or install the CUDA toolkit ({first_line(error)})"
        ) from error
    index = launcher.local_rank() % count
    major = int(runtime.deviceGetAttribute(COMPUTE_CAPABILITY_MAJOR, index))
    if major < 8:
        raise ImportError(
            "the backend 'cuda' needs a GPU of compute capability 8.0 (A100, RTX 30) or later for "
            f"bf16, and this one has {major}.x; use the backend 'cpu'"
        )
    return index


class Loaded:
    """A kernel in a GPU's memory, and where its parameters are put together for a launch.

    One buffer serves all launches, since the driver has copied it when a launch returns. CuPy's own
    way of calling looks at each argument's type, which takes longer than many of these kernels do.

    Parameters
    ----------
    function : cupy.RawKernel
    parameters : Signature
    """

    def __init__(self, function: Any, parameters: Signature) -> None:
        self._function = function  # keeps the machine code where it is
        self.address = function.kernel.ptr
        kinds = ("P" if make is None else make(0).dtype.char for _, make in parameters.parameters)
        self._packing = struct.Struct("".join(kinds))  # as C aligns them
        self._buffer = ctypes.create_string_buffer(self._packing.size)
        self._size = ctypes.c_size_t(self._packing.size)
        self._extra = (ctypes.c_void_p * 5)(
            *(LAUNCH_PARAM_BUFFER_POINTER, ctypes.addressof(self._buffer)),
            *(LAUNCH_PARAM_BUFFER_SIZE, ctypes.addressof(self._size)),
            LAUNCH_PARAM_END,
        )
        self._at = ctypes.addressof(self._extra)
        self._shared = STATIC_SHARED  # bytes that a block may ask for

    def given(self, arguments: Sequence[Any]) -> int:
        """Write down the parameters; return the address of what tells the driver where they are."""
        self._packing.pack_into(self._buffer, 0, *arguments)
        return self._at

    def allow(self, shared: int) -> None:
        """Let a block ask for so much shared memory."""
        if shared > self._shared:
            self._function.max_dynamic_shared_size_bytes = shared
            self._shared = shared


class CuPyDevice:
    """One GPU.

    Each thread takes the GPU when it first asks for something. One at a time may compute: the
    arena's steps, and what is being recorded, are the device's. Each that multiplies keeps a handle
    of cuBLAS and 32 MiB that it works in.

    Parameters
    ----------
    index : int
        Which.

    Attributes
    ----------
    most : int
        Bytes that CuPy's pool has held after an array was made; 0 begins anew.
    """

    def __init__(self, index: int):
        import cupy
        from cupy_backends.cuda.api import driver, runtime

        self._cupy: Any = cupy
        self._driver: Any = driver
        self._gpu = cupy.cuda.Device(index)
        self._gpu.use()
        self.shared_limit = int(
            runtime.deviceGetAttribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, index)
        )
        self.processors = int(runtime.deviceGetAttribute(MULTIPROCESSORS, index))
        self._reads_host = bool(runtime.deviceGetAttribute(PAGEABLE_MEMORY_ACCESS, index))
        capability = self._gpu.compute_capability  # "90", say
        self.warpgroups = capability == "90"
        self.attention = ""
        self.products: dict[Product, Multiply] = {}
        self.recordings: OrderedDict[Hashable, Any] = OrderedDict()
        self.most = 0
        self._cublas: Cublas | None = None
        self._cublaslt: CublasLt | None = None
        # sm_90a has Hopper's own instructions, which sm_90 lacks
        self.architecture = f"sm_{capability}{'a' if self.warpgroups else ''}"
        self._kernels: dict[Any, Loaded] = {}
        self._launching = threading.Lock()  # of one thread at a time: a kernel has one buffer
        self._seen = threading.local()  # whether it has taken the GPU
        self.arena = Arena(self)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return uninitialised memory from CuPy's pool."""
        self._use()
        try:
            array = cast(Array, self._cupy.empty(shape, dtype))
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise OSError(
                errno.ENOMEM,
                f"the GPU's memory is full ({first_line(error)}): take a smaller "
                "train.micro_batch, or run.recompute = 'norms' or 'block'",
            ) from error
        self.most = self.memory()
        return array

    def piece(
        self, block: Array, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any
    ) -> Array:
        """Return an array at a byte of a block."""
        cuda = self._cupy.cuda
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = cuda.UnownedMemory(self.address(block) + start, nbytes, owner, self._gpu.id)
        return cast(Array, self._cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0)))

    def expired(self, block: Array) -> None:
        """Do nothing: a dead array holds the next step's numbers."""

    def trim(self) -> None:
        """Give the pool's free memory back, so that one large block can be had."""
        self._use()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def clear(self, array: Array) -> None:
        """Set every byte to zero."""
        self._use()
        array.data.memset_async(0, array.nbytes)  # type: ignore[attr-defined]

    def upload(self, array: Array) -> Array:
        """Copy a NumPy array to the GPU."""
        out = self.empty(array.shape, array.dtype)
        self.write(out, array)
        return out

    def write(self, array: Array, values: Array) -> None:
        """Copy a NumPy array into a GPU array, after all work before it."""
        self._use()
        array.set(np.ascontiguousarray(values))  # type: ignore[attr-defined]
        if self._reads_host:  # by itself, maybe after the copy of values is gone
            self._cupy.cuda.get_current_stream().synchronize()

    def download(self, array: Array) -> Array:
        """Copy a GPU array to NumPy, after all work before it."""
        self._use()
        return cast(Array, self._cupy.asnumpy(array))

    def address(self, array: Array) -> int:
        """Return the address of the first element.

        Raises
        ------
        TypeError
            When it is no array of CuPy's.
        """
        try:
            return cast(int, array.data.ptr)  # type: ignore[attr-defined]
        except AttributeError:
            raise TypeError(
                f"the backend 'cuda' computes on arrays that are on the GPU, got {type(array)}: "
                "send it there by ops.from_numpy"
            ) from None

    def identities(self, arrays: Iterable[Array]) -> Hashable:
        """Return addresses, shapes, strides and types."""
        arrays = tuple(arrays)
        try:
            return tuple(map(IDENTITY, arrays))
        except AttributeError:
            for x in arrays:
                self.address(x)  # says which is none of CuPy's
            raise

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
        """Run a kernel on the current stream, compiling its file when it is first wanted."""
        self._use()
        key = (source, kernel, *defines.items())
        loaded = self._kernels.get(key)
        if loaded is None:
            path = cubin_file(source, self.architecture, defines)
            function = self._cupy.RawModule(path=str(path)).get_function(kernel)
            loaded = self._kernels[key] = Loaded(function, signature(source, kernel))
        given = [
            0 if a is None else a if isinstance(a, np.generic) else self.address(a)
            for a in arguments
        ]
        block = threads, 1, 1
        with self._launching:
            loaded.allow(shared)
            at = loaded.given(given)
            self._driver.launchKernel(loaded.address, *grid, *block, shared, self.stream(), 0, at)

    def _use(self) -> None:
        """Take the GPU in this thread, as the driver and cuBLAS want it in each."""
        if not hasattr(self._seen, "thread"):
            self._gpu.use()
            self._seen.thread = True

    def gemm_ex(self, product: Product, a: Array, b: Array, c: Array, d: Array) -> None:
        """D ← op(A) op(B) + beta·C by cuBLAS."""
        self._use()
        if product.apart:
            d.data.copy_from_device_async(c.data, c.nbytes)  # type: ignore[attr-defined]
        if self._cublas is None:
            self._cublas = self._library("cublas", Cublas)
        self._cublas.gemm_ex(product, *map(self.address, (a, b, d)), bf16=a.dtype == BF16)

    def cublaslt(self) -> CublasLt:
        """Return the library that cuBLAS itself has loaded, of the same version of CUDA."""
        self._use()  # as the library's context, made next, is for one GPU
        if self._cublaslt is None:
            self._cublaslt = self._library("cublasLt", CublasLt)
        return self._cublaslt

    def _library(self, name: str, bound: Callable[[ctypes.CDLL], T]) -> T:
        major = self._cupy.cuda.runtime.runtimeGetVersion() // 1000
        file = f"{name}64_{major}.dll" if sys.platform == "win32" else f"lib{name}.so.{major}"
        try:
            return bound(ctypes.CDLL(file))
        except (OSError, AttributeError) as error:
            raise ImportError(
                f"{file}, a part of cuBLAS, cannot be used ({first_line(error)})"
            ) from error

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return the launch of a CUDA graph of what ``run`` asks for."""
        self._use()
        stream = self._cupy.cuda.Stream(non_blocking=True)  # the usual one cannot be captured
        with stream:
            stream.begin_capture()
            try:
                run()
            except BaseException:
                # what was captured is dropped, and may be said to be incomplete
                with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):
                    stream.end_capture()
                raise
            graph = stream.end_capture()

        def again() -> None:
            self._use()
            graph.launch()

        return again

    def stream(self) -> int:
        """Return the handle of the current stream."""
        self._use()
        return int(self._cupy.cuda.get_current_stream().ptr)

    def name(self) -> str:
        """Return the GPU's address on the bus, which no CUDA_VISIBLE_DEVICES changes."""
        return str(self._gpu.pci_bus_id)

    def kind(self) -> str:
        """Return the GPU's product name and architecture, and the versions of NVRTC and driver."""
        runtime = self._cupy.cuda.runtime
        name = runtime.getDeviceProperties(self._gpu.id)["name"].decode()
        return f"{name} {self.architecture} {nvrtc_version()} {runtime.driverGetVersion()}"

    def memory(self) -> int:
        """Return the most bytes of CuPy's pool, which gives some back when the arena grows."""
        self._use()
        return max(self.most, int(self._cupy.get_default_memory_pool().total_bytes()))
