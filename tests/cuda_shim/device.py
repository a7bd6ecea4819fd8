"""The shim's body of ``accel.cuda.device.Device``: g++ compiles the kernels, fibers run them.

Memory is NumPy's. Every array starts as NaN and lies between two bands that must not change, which
is looked at after each launch. A launch checks its arguments against the types of the kernel's
parameters, and the width of every scalar. ``edits`` change the text of a kernel before it is
compiled: that is how the tests plant bugs. With ``races`` every access of a kernel is looked at
(races.h): two that no barrier orders, or one outside of the launch's arrays, are errors.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from accel.cuda import sources
from accel.cuda.arena import Arena
from accel.cuda.cublaslt import CublasLt
from accel.cuda.device import Argument, Multiply, Product
from reference.types import Array

HERE = Path(__file__).parent
RUNTIME = HERE / "runtime.cpp"
ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2}
BAND = 256  # bytes on either side of an array
FLAGS = ["-O1", "-std=c++17", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off"]
# the compiler's hooks are those of runtime.cpp, so its own library is left out
RACES = ["-DSHIM_RACES", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
RACES += [
    "-fno-threadsafe-statics",
    "-fno-tree-loop-distribute-patterns",
    "-g1",
]
LINKED = ["-nodefaultlibs", "-Wl,-z,defs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"]
SCALARS = {
    np.dtype(np.float32): "f",
    np.dtype(np.float64): "d",
    np.dtype(np.int32): "i",
    np.dtype(np.uint32): "I",
    np.dtype(np.int64): "q",
    np.dtype(np.uint64): "Q",
    np.dtype(np.uint16): "H",
    np.dtype(np.bool_): "?",
}

Edits = Mapping[str, Sequence[tuple[str, str]]]  # source name -> (old text, new text)


class ShimError(Exception):
    """What a kernel or a launch did wrong."""


class ShimDevice:
    """A processor that plays the GPU.

    Parameters
    ----------
    order : str
        In which order threads and blocks take their turns: forward, reverse or shuffled.
    early : bool
        Asynchronous copies land at once instead of at the wait that covers them.
    edits : mapping
        File name -> changes (old text, new text); each old text must occur exactly once.
    extra : mapping
        More kernel sources, name -> text.
    shared_limit : int
        Bytes of shared memory that a block can have: 227 KiB on Hopper, 99 KiB on RTX 30, 40, 50.
    warpgroups : bool
        Whether there is wgmma, as on Hopper.
    races : bool
        Whether kernels are watched for races and accesses outside of arrays. Copies land late.
    """

    def __init__(
        self,
        order: str = "forward",
        *,
        early: bool = False,
        edits: Edits | None = None,
        extra: Mapping[str, str] | None = None,
        shared_limit: int = 227 * 1024,
        warpgroups: bool = False,
        races: bool = False,
    ):
        if races and early:
            raise ValueError("a race is seen whenever copies land, so with races they land late")
        self.order = order
        self.shared_limit = shared_limit
        self.processors = 132
        self.warpgroups = warpgroups
        self.attention = ""
        self.products: dict[Product, Multiply] = {}
        self.early = early
        self.races = races
        self.edits = dict(edits or {})
        self.extra = dict(extra or {})
        self.launches: list[str] = []
        self.arena = Arena(self)
        self.recordings: OrderedDict[Hashable, Any] = OrderedDict()
        self._recorded: list[Callable[[], None]] | None = None  # while something is recorded
        self._libraries: dict[Any, ctypes.CDLL] = {}
        self._bands: weakref.WeakSet[_Memory] = weakref.WeakSet()

    # ---- memory ----------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array of NaN (all bits set) between two bands."""
        memory = _Memory(shape, np.dtype(dtype))
        self._bands.add(memory)
        return np.asarray(memory)

    def piece(
        self, block: Array, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any
    ) -> Array:
        """Return an array of NaN at a byte of a block."""
        array = np.asarray(_Piece(block, start, shape, np.dtype(dtype), owner))
        assert block.ctypes.data <= array.ctypes.data and start % 256 == 0
        assert array.ctypes.data + array.nbytes <= block.ctypes.data + block.nbytes
        array.view(np.uint8)[...] = 0xFF
        return array

    def expired(self, block: Array) -> None:
        """Make NaN of what outlived its step."""
        block[...] = 0xFF

    def trim(self) -> None:
        pass

    def clear(self, array: Array) -> None:
        if self.later(ShimDevice.clear, array):
            return
        assert array.flags.c_contiguous
        array[...] = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what does again what ``run`` asks for; as on a GPU it holds no array."""
        self._recorded = recorded = []
        try:
            run()
        finally:
            self._recorded = None

        def again() -> None:
            for call in recorded:
                call()

        return again

    def later(self, call: Callable[..., None], *given: Any, **how: Any) -> bool:
        """Keep a call for later, while something is recorded."""
        if self._recorded is None:
            return False
        views: dict[int, Array] = {}  # an array that is given twice stays one

        def view(value: Any) -> Any:
            if isinstance(value, list):
                return [view(one) for one in value]
            if isinstance(value, np.ndarray):
                return views.setdefault(id(value), _view(value))
            return value

        self._recorded.append(partial(call, self, *map(view, given), **how))
        return True

    def _now(self) -> None:
        if self._recorded is not None:
            raise ShimError("nothing passes between the GPU and its host while calls are recorded")

    def upload(self, array: Array) -> Array:
        self._now()
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def write(self, array: Array, values: Array) -> None:
        self._now()
        assert array.flags.c_contiguous and array.shape == values.shape
        assert array.dtype == values.dtype
        array[...] = values

    def download(self, array: Array) -> Array:
        self._now()
        return np.array(array)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def stream(self) -> int:
        return 0x5EA

    def name(self) -> str:
        return f"shim {os.getpid()}"  # each rank has a processor of its own

    def kind(self) -> str:
        return "shim"

    def memory(self) -> int:
        return sum(memory.nbytes for memory in self._bands)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are all of one array, as those that a library is given must be."""
        return any(m.first <= address <= m.first + m.nbytes - nbytes for m in self._bands)

    # ---- kernels ---------------------------------------------------------------------------------

    def identities(self, arrays: Iterable[Array]) -> Hashable:
        return tuple((self.address(x), x.shape, x.strides, x.dtype) for x in arrays)

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
        how = {"shared": shared, "defines": defines}
        if self.later(ShimDevice.launch, source, kernel, grid, threads, list(arguments), **how):
            return
        if shared > self.shared_limit:
            raise ShimError(f"{kernel}: a block can have {self.shared_limit} bytes, not {shared}")
        library = self._library(source, defines)
        types = getattr(library, f"shim_types_{kernel}")
        types.restype = ctypes.c_char_p
        expected = types().decode().split()
        if len(expected) != len(arguments):
            raise ShimError(f"{kernel} has {len(expected)} parameters, got {len(arguments)}")
        values = [
            _argument(kernel, i, letter, argument)
            for i, (letter, argument) in enumerate(zip(expected, arguments, strict=True))
        ]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        run = getattr(library, f"shim_launch_{kernel}")
        run.restype = ctypes.c_char_p
        run.argtypes = [ctypes.c_uint] * 4 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_uint]
        run.argtypes += [ctypes.c_int, ctypes.c_void_p]
        if self.races:
            library.shim_forget_arrays()
            library.shim_name_array.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
            for i, argument in enumerate(arguments):
                if isinstance(argument, np.ndarray):
                    library.shim_name_array(*_extent(argument), i)
        self.launches.append(kernel)
        seed = len(self.launches)
        message = run(*grid, threads, shared, ORDERS[self.order], seed, int(self.early), pointers)
        if message is not None:
            raise ShimError(f"{kernel}: {_with_lines(library, message.decode())}")
        for memory in list(self._bands):
            if not memory.intact():
                raise ShimError(f"{kernel} wrote outside an array of {memory.nbytes} bytes")

    def _library(self, source: str, defines: Mapping[str, int]) -> ctypes.CDLL:
        key = (source, tuple(sorted(defines.items())))
        if key not in self._libraries:
            # a planted bug is to be found by what it does, not by a variable that it leaves unused
            ours = not self.edits and source not in self.extra and not self.races
            path = build(self._text(source), source, defines, strict=ours, races=self.races)
            self._libraries[key] = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        return self._libraries[key]

    def _text(self, source: str) -> str:
        """Return the whole text of a kernel file as g++ is given it."""
        if source in self.extra:
            texts = {
                "device.cuh": sources.text_of("device.cuh"),
                f"{source}.cu": self.extra[source],
            }
        else:
            texts = sources.parts(source)
        for name in texts:
            for old, new in self.edits.get(name, ()):
                if texts[name].count(old) != 1:
                    found = texts[name].count(old)
                    raise ValueError(f"{name} has {found} places that read {old!r}, not one")
                texts[name] = texts[name].replace(old, new)
        kernels = sources.kernels(texts[f"{source}.cu"])
        exports = ['#line 1 "exports"', *(f"SHIM_EXPORT({name})" for name in kernels)]
        return "\n".join([sources.join(texts), *exports])

    # ---- dense products --------------------------------------------------------------------------

    def gemm_ex(self, product: Product, a: Array, b: Array, c: Array, d: Array) -> None:
        """D ← op(A) op(B) + beta·C on column-major matrices, as cuBLAS reads its arguments."""
        if self.later(ShimDevice.gemm_ex, product, a, b, c, d):
            return
        self.launches.append("gemm")
        assert product.apart == (c is not d)  # else what lies there already would be copied
        if product.apart:
            np.copyto(d, c)
        assert a.dtype == b.dtype and d.dtype == (np.uint16 if product.narrow else np.float32)
        assert a.dtype == np.uint16 or not product.narrow
        transpose_a, transpose_b, m, n, k, beta, *_ = product
        left = _columns(a, product.lda, *((k, m) if transpose_a else (m, k)))
        right = _columns(b, product.ldb, *((n, k) if transpose_b else (k, n)))
        result = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
        if beta:
            if product.narrow:  # as cuBLAS 13.1 does on an H100
                result = from_bf16(to_bf16(result))
            result = result + np.float32(beta) * _columns(d, m, m, n)
        target = np.lib.stride_tricks.as_strided(
            d, (m, n), (d.itemsize, m * d.itemsize), writeable=True
        )
        target[...] = to_bf16(result) if product.narrow else result

    def cublaslt(self) -> CublasLt:
        raise ImportError("the shim has no cublasLt")


def _columns(array: Array, ld: int, rows: int, columns: int) -> Array:
    """View memory as a column-major matrix, in float32."""
    assert ld >= max(rows, 1) and array.flags.c_contiguous
    assert array.size >= (columns - 1) * ld + rows, "the matrix reaches beyond the array"
    matrix = np.lib.stride_tricks.as_strided(
        array, (rows, columns), (array.itemsize, ld * array.itemsize)
    )
    return from_bf16(matrix) if array.dtype == np.uint16 else matrix


def to_bf16(x: Array) -> Array:
    """Return the bits of float32 values rounded to bfloat16, ties to even."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32) if x.flags.c_contiguous else np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    """Return bfloat16 bits as float32 values."""
    return (np.asarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Memory:
    """The bytes of one array with a band before and behind; NumPy keeps it as the array's base."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = np.full(self.nbytes + 2 * BAND + 256, 0xFF, np.uint8)
        start = -int(raw.ctypes.data) % 256 + BAND
        self.raw, self.start = raw, start
        self.__array_interface__ = {
            "data": (raw.ctypes.data + start, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    @property
    def first(self) -> int:
        return int(self.raw.ctypes.data) + self.start

    def intact(self) -> bool:
        before = self.raw[self.start - BAND : self.start]
        behind = self.raw[self.start + self.nbytes : self.start + self.nbytes + BAND]
        return bool((before == 0xFF).all() and (behind == 0xFF).all())


class _Piece:
    """A part of a block; NumPy keeps it, and so its owner, as the array's base."""

    def __init__(
        self, block: Array, start: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any
    ):
        self.owner = owner
        self.first = int(block.ctypes.data) + start
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.__array_interface__ = {
            "data": (self.first, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }


def _view(array: Array) -> Array:
    """Return an array in the same memory, which it does not keep."""
    described = {
        "data": (array.ctypes.data, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": array.dtype.str,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _extent(array: Array) -> tuple[int, int]:
    """Return address and size of the memory that an array is a view of."""
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    memory = base.base
    if isinstance(memory, _Memory | _Piece):
        return memory.first, memory.nbytes
    low, high = np.lib.array_utils.byte_bounds(base)
    return low, high - low


def _with_lines(library: ctypes.CDLL, message: str) -> str:
    """Put lines of kernel files in place of the addresses that races.h gives."""
    said, mark, rest = message.partition(" @")
    addresses, _, thread = rest.partition(" (")
    if not mark:
        return message
    command = ["addr2line", "-i", "-e", library._name, *addresses.split()]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    kernel = [Path(line).name for line in lines if ".cu" in line]
    return f"{said}, at {' in '.join(kernel[:3])} ({thread}"


def _argument(kernel: str, i: int, letter: str, argument: Argument) -> Any:
    what = f"{kernel}, argument {i}"
    if letter.endswith("*"):
        if argument is None:
            return ctypes.c_void_p(0)
        if not isinstance(argument, np.ndarray):
            raise ShimError(f"{what}: a pointer is wanted, got {type(argument).__name__}")
        if SCALARS.get(argument.dtype) != letter[:-1]:
            raise ShimError(f"{what}: a pointer to {letter[:-1]} is wanted, got {argument.dtype}")
        return ctypes.c_void_p(argument.ctypes.data)
    if not isinstance(argument, np.generic) or SCALARS.get(argument.dtype) != letter:
        raise ShimError(
            f"{what}: a NumPy scalar of type {letter} is wanted, got {type(argument).__name__}"
        )
    return np.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())


# ---- compiling ---------------------------------------------------------------------------------


def missing() -> str | None:
    """Say what keeps the shim from running here, or None."""
    if shutil.which("g++") is None:
        return "the kernels are compiled with g++, which is not installed"
    return None


def cache() -> Path:
    """Return the folder that keeps compiled kernels from one run to the next."""
    path = Path(tempfile.gettempdir(), f"myllm-shim-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else")
    return path


def build(
    text: str, name: str, defines: Mapping[str, int], *, strict: bool = True, races: bool = False
) -> Path:
    """Compile the text of kernels into a shared library and return its path.

    ``strict`` makes an error of every warning. What is not ours, planted bugs among it, or watched
    for races runs once or twice: it is optimised less, since it takes longer to compile than to
    run. ``races`` builds with the hooks of races.h.
    """
    macros = [f"-D{macro}={value}" for macro, value in sorted(defines.items())]
    watched = RACES if races else []
    runtime = _made("runtime", ".o", [*WARNINGS, *watched, "-c"], RUNTIME.read_text("utf-8"))
    how = [*(WARNINGS if strict else ["-w", "-Og"]), *watched, "-shared", "-DMYLLM_SHIM", *macros]
    return _made(name, ".so", how, text, [str(runtime), *(LINKED if races else [])])


def _made(
    name: str, suffix: str, how: Sequence[str], text: str, linked: Sequence[str] = ()
) -> Path:
    """Return what g++ makes of a text, now or earlier."""
    command = ["g++", *FLAGS, *how]
    # not by where the headers lie, so that one clone finds what another has compiled
    hashed = hashlib.sha256("\0".join([*command, text]).encode())
    for header in sorted((*HERE.glob("*.h"), RUNTIME)):
        hashed.update(header.read_bytes())
    path = cache() / f"{name}-{hashed.hexdigest()[:20]}{suffix}"
    if path.exists():
        return path
    with FileLock(path.with_suffix(".lock")):  # of ranks that start together one compiles
        if path.exists():
            return path
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=suffix)
        os.close(handle)
        done = subprocess.run(
            [*command, "-I", HERE, "-x", "c++", "-", "-x", "none", *linked, "-o", partial],
            input=text,
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            Path(partial).unlink(missing_ok=True)  # the linker may have taken it away
            defined = [word for word in how if word.startswith("-D")]
            raise ShimError(f"g++ refuses {name}.cu {defined}:\n{done.stderr[:4000]}")
        os.replace(partial, path)
    return path
