"""What a launcher asks of a machine: memory, copies, launches, dense products.

There are two bodies of ``Device``: ``cupy_device.CuPyDevice`` on a GPU, and the tests' own, which
runs the same kernels on a processor. One is in use at a time, and arrays are that device's: CuPy's
or NumPy's. Both have ``shape``, ``strides``, ``dtype``, ``reshape`` and slicing, and the launchers
use nothing else.

A bfloat16 array is one of dtype uint16 that holds the bits: CuPy has no complete type for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from accel.cuda.arena import Arena
from accel.cuda.sources import signature
from reference.types import Array

if TYPE_CHECKING:
    from accel.cuda.cublaslt import CublasLt

Argument = Array | np.generic | None

BF16 = np.dtype(np.uint16)
F32 = np.dtype(np.float32)
NAMES = {F32: "float32", BF16: "bf16"}
THREADS = 256  # of a block, where a launcher does not say otherwise
SCRATCH = 32 * 4  # bytes of shared memory for a sum over a block: one float a warp
MAX_GRID_X, MAX_GRID_Y = 2**31 - 1, 65_535  # blocks of a grid; as many along z as along y


class Product(NamedTuple):
    """D ← op(A) op(B) + beta·C by the rules of cuBLAS: columns are contiguous.

    op(A) is m × k, op(B) k × n. A and B share a type, C and D have it too or are float32. Columns
    of C and D follow one another without a gap. C is D itself, unless it lies ``apart``. Sums are
    in float32, and rounded once; where C is bf16, cuBLAS may round a product before it adds C, and
    its sum again.
    """

    transpose_a: bool
    transpose_b: bool
    m: int
    n: int
    k: int
    beta: float
    narrow: bool  # C and D are bf16
    apart: bool = False

    @property
    def lda(self) -> int:
        """The distance between columns of A."""
        return self.k if self.transpose_a else self.m

    @property
    def ldb(self) -> int:
        """The distance between columns of B."""
        return self.n if self.transpose_b else self.k


Multiply = Callable[[Product, Array, Array, Array, Array], None]  # the product, A, B, C and D


class Device(Protocol):
    """A machine that kernels run on."""

    arena: Arena  # of its steps
    shared_limit: int  # bytes of shared memory that a block can have
    processors: int  # its multiprocessors
    warpgroups: bool  # whether it multiplies by wgmma: Hopper alone
    attention: str  # the path that attention takes, of those in attention.py; "": the first it has
    products: dict[Product, Multiply]  # those of bf16 that go another way than gemm_ex's
    recordings: OrderedDict[Hashable, Any]  # of recorded.py, that asked least recently first

    def __hash__(self) -> int:
        """Tell one device from another."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised C-contiguous array in fresh memory, aligned to 256 bytes."""

    def piece(
        self, block: Array, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any
    ) -> Array:
        """Return an array at a byte of a block (bytes), which holds ``owner`` while it lives."""

    def expired(self, block: Array) -> None:
        """Take note that all arrays in a block are dead."""

    def trim(self) -> None:
        """Give memory that no array holds back to the machine."""

    def clear(self, array: Array) -> None:
        """Set every byte of a contiguous array to zero."""

    def upload(self, array: Array) -> Array:
        """Return a device array that holds a NumPy array's values, C-contiguous."""

    def write(self, array: Array, values: Array) -> None:
        """Copy a NumPy array's values into a contiguous device array of its shape and dtype."""

    def download(self, array: Array) -> Array:
        """Wait for the device and return its array's values as a NumPy array."""

    def address(self, array: Array) -> int:
        """Return the address of the array's first element."""

    def identities(self, arrays: Iterable[Array]) -> Hashable:
        """Return addresses, shapes, strides and types of arrays."""

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
        """Run a kernel of ``source``.cu, compiled with ``defines``, after all work before it.

        ``arguments`` are device arrays, None for a null pointer, or NumPy scalars of the
        parameter's own width; ``shared`` is the block's dynamic shared memory in bytes.
        """

    def gemm_ex(self, product: Product, a: Array, b: Array, c: Array, d: Array) -> None:
        """D ← op(A) op(B) + beta·C by an algorithm that cuBLAS picks, after a copy of C apart."""

    def cublaslt(self) -> "CublasLt":
        """Return the library that lets its caller pick.

        Raises
        ------
        ImportError
            When it is missing.
        """

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what does again, as one, all that ``run`` asks of the device.

        ``run`` itself does nothing then. It asks for launches, products and clearings alone, of
        kernels that have run before, and the memory that they work on has to outlive what is
        returned.
        """

    def stream(self) -> int:
        """Return the handle of the queue that launches go to, for libraries that add to it."""

    def name(self) -> str:
        """Return what tells this device from all others of the machine."""

    def kind(self) -> str:
        """Return what decides how fast its kernels are, the same on all devices of this kind."""

    def memory(self) -> int:
        """Return the most bytes of the device's memory that this process has held."""


_device: Device | None = None


def use(device: Device | None) -> Device | None:
    """Take ``device`` for all calls from now on and return the one before it."""
    global _device
    before, _device = _device, device
    return before


def current() -> Device:
    """Return the device in use.

    Raises
    ------
    RuntimeError
        When none has been chosen.
    """
    if _device is None:
        raise RuntimeError("no CUDA device is in use: get the backend by accel.load('cuda')")
    return _device


def memory() -> int:
    """Return the most bytes of the memory of the device in use that this process has held."""
    return current().memory()


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array of the device in use, from its arena within a step."""
    return current().arena.empty(tuple(int(n) for n in shape), dtype)


def zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an array of zeros."""
    array = empty(shape, dtype)
    if array.size:
        current().clear(array)
    return array


def launch(
    source: str,
    kernel: str,
    grid: int | tuple[int, ...],
    threads: int = THREADS,
    shared: int = 0,
    /,
    **given: Any,
) -> None:
    """Run a kernel on the device in use; a grid without blocks does nothing.

    ``given`` are the kernel's parameters by the names that ``source``.cu gives them, arrays or
    plain numbers, and macros that it is compiled with; BF16 follows from the activations.
    """
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    if not x * y * z:
        return
    if x > MAX_GRID_X or max(y, z) > MAX_GRID_Y:
        raise ValueError(
            f"{kernel} needs {x:,} x {y:,} x {z:,} blocks at this size, and a GPU takes at most "
            f"{MAX_GRID_X:,} x {MAX_GRID_Y:,} x {MAX_GRID_Y:,}: take fewer rows, or shorter ones, "
            "at a time"
        )
    parameters, elem, macros = signature(source, kernel)
    try:
        arguments = [
            given[name] if make is None else make(given[name]) for name, make in parameters
        ]
    except KeyError as missing:
        raise TypeError(f"{source}.cu: {kernel} has a parameter {missing}, got none") from None
    defines = {"BF16": int(elem is not None and given[elem].dtype == BF16)}
    if len(given) != len(parameters):
        defines |= {name: given[name] for name in macros if name in given}
        surplus = given.keys() - defines.keys() - {name for name, _ in parameters}
        if surplus:
            raise TypeError(f"{source}.cu: {kernel} has no parameter or macro {sorted(surplus)}")
    device = current()
    if shared > device.shared_limit:
        raise ValueError(
            f"{kernel} needs {shared:,} bytes of shared memory a block at these widths, and this "
            f"GPU has {device.shared_limit:,}: take narrower heads or rows, or another GPU"
        )
    device.launch(source, kernel, (x, y, z), threads, arguments, shared=shared, defines=defines)


def ceil_div(a: int, b: int) -> int:
    """Return the number of pieces of b elements that cover a."""
    return -(-a // b)


def is_contiguous(array: Array) -> bool:
    """Return whether the elements lie one after the other in C order."""
    return bool(array.flags.c_contiguous)
