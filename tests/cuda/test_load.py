"""Asking for the backend cuda where something is missing: one sentence that says what."""

import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import accel
from accel.cuda import cupy_device
from accel.cuda.cublas import Cublas, CublasError
from accel.cuda.device import Product
from dist import carriers
from tests.cuda_shim.device import ShimDevice
from tests.helpers import ROOT, fake_nccl


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(ImportError, match=r"needs CuPy, .* pip install 'myllm\[cuda13\]'"):
        accel.load("cuda")


class NoNVRTC:
    """What CuPy's binding does when the library is not found."""

    @staticmethod
    def getVersion() -> tuple[int, int]:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\n  listdir("/usr/lib"):\n    libc.so')


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.cuda.compiler._nvrtc", NoNVRTC)
    with pytest.raises(ImportError, match="NVRTC, whose library was not found") as caught:
        accel.load("cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs CuPy")
def test_without_a_driver_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_backends.cuda.api import runtime

    monkeypatch.setattr(cupy_device, "nvrtc_version", lambda: (13, 0))

    def insufficient() -> int:
        raise runtime.CUDARuntimeError(35)

    monkeypatch.setattr(runtime, "getDeviceCount", insufficient)
    with pytest.raises(ImportError, match=r"needs an NVIDIA GPU and its driver, .* nvidia-smi"):
        accel.load("cuda", compute="bf16")
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(ImportError, match=r"the driver sees none: .* CUDA_VISIBLE_DEVICES"):
        accel.load("cuda")


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs CuPy")
def test_on_a_gpu_that_is_too_old_or_without_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_backends.cuda.api import runtime

    monkeypatch.setattr(cupy_device, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 1)
    asked = []

    def capability(attribute: int, index: int) -> int:
        asked.append(index)
        return 7

    monkeypatch.setattr(runtime, "deviceGetAttribute", capability)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.cublas", None)
    with pytest.raises(ImportError, match="multiplies with cuBLAS, whose library was not found"):
        accel.load("cuda")
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.cublas", sys)
    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    for count in (1, 2, 8):
        monkeypatch.setattr(runtime, "getDeviceCount", lambda count=count: count)
        with pytest.raises(ImportError, match=r"compute capability 8\.0 .* this one has 7\.x"):
            accel.load("cuda")
    assert asked == [0, 1, 3]  # the fourth rank on a machine with so many GPUs


def test_a_warning_of_cupy_s_import_is_shown_and_no_error(tmp_path: Path) -> None:
    """Also where warnings are made errors, as the tests of a GPU are run."""
    warns = "import warnings\nwarnings.warn('several CuPy packages are installed')\n"
    for path, text in {
        "cupy/__init__.py": warns,
        "cupy_backends/__init__.py": warns,
        "cupy_backends/cuda/__init__.py": "",
        "cupy_backends/cuda/libs/__init__.py": "",
        "cupy_backends/cuda/libs/nvrtc.py": "getVersion = lambda: (13, 0)",
        "cupy_backends/cuda/libs/cublas.py": "",
        "cupy_backends/cuda/api/__init__.py": "",
        "cupy_backends/cuda/api/runtime.py": "class CUDARuntimeError(Exception): pass\n"
        "getDeviceCount = lambda: 1\ndeviceGetAttribute = lambda *_: 7",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    code = "import accel\naccel.load('cuda')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        check=False,
    )
    assert done.stderr.count("UserWarning: several CuPy packages are installed") == 2
    assert "ImportError: the backend 'cuda' needs a GPU of compute capability 8.0" in done.stderr


def test_the_shared_memory_of_a_block_is_asked_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(use=lambda: None, compute_capability="89")
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda index: gpu))
    # 97 is cudaDevAttrMaxSharedMemoryPerBlockOptin
    told = {(97, 3): 101_376, (16, 3): 108, (88, 3): 0}
    runtime = SimpleNamespace(deviceGetAttribute=lambda what, index: told[what, index])
    for name, module in {
        "cupy": cupy,
        "cupy_backends": SimpleNamespace(),
        "cupy_backends.cuda": SimpleNamespace(),
        "cupy_backends.cuda.api": SimpleNamespace(driver=None, runtime=runtime),
        "cupy_backends.cuda.libs": SimpleNamespace(cublas=None),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    device = cupy_device.CuPyDevice(3)
    assert (device.shared_limit, device.processors) == (101_376, 108)
    assert device.architecture == "sm_89"


def test_a_gpu_of_another_kind_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product, architecture and driver, and what compiles for it."""
    said = {"name": b"NVIDIA H100", "driver": 13020}
    runtime = SimpleNamespace(
        getDeviceProperties=lambda index: {"name": said["name"], "index": [0, 1, 2][index]},
        driverGetVersion=lambda: said["driver"],
    )
    monkeypatch.setattr(cupy_device, "nvrtc_version", lambda: (13, 5))
    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    device._gpu, device.architecture = SimpleNamespace(id=2), "sm_90a"
    assert device.kind() == "NVIDIA H100 sm_90a (13, 5) 13020"
    if importlib.util.find_spec("cupy_backends") is not None:
        from cupy_backends.cuda.api import runtime as real

        assert all(hasattr(real, name) for name in vars(runtime))


class Recorded:
    """Stands in for cuBLAS: its functions keep the calls, and succeed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            plain = [getattr(x, "_obj", x) for x in given]  # what a reference is to
            self.calls.append((name, [getattr(x, "value", x) for x in plain]))
            return 0

        return call


def with_cublas(monkeypatch: pytest.MonkeyPatch, library: Recorded) -> Any:
    """Return a device without a GPU that multiplies by a library."""
    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    device._cublas, device._use, device.at = Cublas(library), lambda: None, 7
    device.stream = lambda: device.at
    device.empty = np.empty
    device.address = lambda array: array.at if hasattr(array, "at") else array.ctypes.data
    monkeypatch.setattr("accel.cuda.device._device", device)
    return device


def test_cublas_is_forbidden_to_add_up_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorded()
    device = with_cublas(monkeypatch, library)
    a, out = np.zeros((4, 4), np.uint16), np.zeros((4, 4), np.uint16)
    product = Product(False, True, 4, 4, 4, 0.0, True)
    for device.at in (7, 7, 8, 7):
        device.gemm_ex(product, a, a, out, out)
    own = ["cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx"]
    first = ["cublasCreate_v2", "cublasSetMathMode", *own]
    names = [name for name, _ in library.calls]
    assert names == [*first, "cublasGemmEx", *own, *own]  # a new stream forgets the workspace
    assert library.calls[1][1][1] == 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
    assert [given[1] for name, given in library.calls if "Stream" in name] == [7, 8, 7]
    assert library.calls[-1][1][-2:] == [68, -1]  # CUBLAS_COMPUTE_32F


@pytest.mark.parametrize("narrow", [True, False])
def test_cublas_adds_onto_a_copy_of_what_lies_apart(
    narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorded()
    device = with_cublas(monkeypatch, library)

    def lying(at: int) -> Any:
        def copied(source: Any, nbytes: int) -> None:
            library.calls.append(("copied", [at, source, nbytes]))

        data = SimpleNamespace(at=at, copy_from_device_async=copied)
        dtype = np.dtype(np.uint16 if narrow else np.float32)
        return SimpleNamespace(at=at, dtype=dtype, nbytes=32, data=data)

    a, b, c, d = (lying(at) for at in (1, 2, 3, 4))
    device.gemm_ex(Product(False, False, 4, 4, 4, 1.0, narrow, True), a, b, c, d)
    copied, *_, product = library.calls
    assert copied == ("copied", [4, c.data, 32]) and product[0] == "cublasGemmEx"
    assert [product[1][i] for i in (7, 10, 13, 14)] == [1, 2, 1.0, 4]


def test_each_thread_has_a_handle_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorded()
    device = with_cublas(monkeypatch, library)
    a, out = np.zeros((4, 4), np.uint16), np.zeros((4, 4), np.uint16)

    def multiply() -> None:
        device.gemm_ex(Product(False, True, 4, 4, 4, 0.0, True), a, a, out, out)

    for _ in range(2):
        multiply()
    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    assert sum(name == "cublasCreate_v2" for name, _ in library.calls) == 2
    # what was recorded in a thread writes into its workspace when the thread is long gone
    assert len(device._cublas._workspaces) == 2


def test_a_handle_that_could_not_be_made_ready_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Recorded()
    device = with_cublas(monkeypatch, library)
    a = np.zeros((4, 4), np.uint16)

    def multiply() -> None:
        device.gemm_ex(Product(False, True, 4, 4, 4, 0.0, True), a, a, a, a)

    def full(*_: Any) -> None:
        raise OSError("the GPU's memory is full")

    device.empty = full
    with pytest.raises(OSError, match="memory is full"):
        multiply()
    device.empty = np.empty
    multiply()
    assert library.calls[-1][0] == "cublasGemmEx"


class Anything:
    """Stands in for CuPy and libraries: a call of any part of it is told, and gives another."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return Anything(self._tell)

    def __call__(self, *_: Any, **how: Any) -> Any:
        self._tell()
        return Anything(self._tell)

    def __index__(self) -> int:
        return 7

    __int__ = __index__

    def __bool__(self) -> bool:
        return False  # no library's status is an error

    def __enter__(self) -> None:
        self._tell()

    def __exit__(self, *_: Any) -> None:
        self._tell()


ARGUMENTS = [None, None, np.int64(3)]
CALLS: dict[str, Any] = {  # with a device and one of its arrays
    "empty": lambda device, x: device.empty((3,), np.float32),
    "trim": lambda device, x: device.trim(),
    "clear": lambda device, x: device.clear(x),
    "upload": lambda device, x: device.upload(np.zeros(3, np.float32)),
    "write": lambda device, x: device.write(x, np.zeros(3, np.float32)),
    "download": lambda device, x: device.download(x),
    "launch": lambda device, x: device.launch(
        "loss", "softmax", (1, 1, 1), 64, ARGUMENTS, shared=50_000, defines={}
    ),
    "gemm_ex": lambda device, x: device.gemm_ex(
        Product(False, False, 1, 1, 1, 1.0, True, True), x, x, x, x
    ),
    "cublaslt": lambda device, x: device.cublaslt().handle,
    "record": lambda device, x: device.record(lambda: None),
    "replay": lambda device, x: device.recorded(),
    "stream": lambda device, x: device.stream(),
    "memory": lambda device, x: device.memory(),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_thread_takes_the_gpu_before_it_asks_for_anything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, seen = threading.local(), list[int]()
    anything: Any = Anything(lambda: seen.append(getattr(here, "gpu", 0)))
    gpu = SimpleNamespace(use=lambda: setattr(here, "gpu", 3), compute_capability="90", id=3)
    cupy: Any = Anything(anything._tell)
    cupy.cuda = Anything(anything._tell)
    cupy.cuda.Device = lambda index: gpu
    cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    api = SimpleNamespace(driver=anything, runtime=anything)
    for module, value in {
        "cupy": cupy,
        "cupy_backends": SimpleNamespace(),
        "cupy_backends.cuda": SimpleNamespace(),
        "cupy_backends.cuda.api": api,
    }.items():
        monkeypatch.setitem(sys.modules, module, value)  # type: ignore[arg-type]
    monkeypatch.setattr(cupy_device, "cubin_file", lambda *_: "a file")
    device: Any = cupy_device.CuPyDevice(3)
    device._library = lambda name, bound: bound(anything)
    monkeypatch.setattr("accel.cuda.device._device", device)
    device.recorded = device.record(lambda: None)
    x = SimpleNamespace(dtype=np.dtype(np.uint16), nbytes=2, data=anything, set=anything)
    seen.clear()
    thread = threading.Thread(target=CALLS[name], args=(device, x))
    thread.start()
    thread.join()
    assert set(seen) == {3}


class Pool:
    """Stands in for CuPy's pool, which keeps what was freed until it is told, or has no room."""

    def __init__(self) -> None:
        self.total = self.used = 0

    def total_bytes(self) -> int:
        return self.total

    def free_all_blocks(self) -> None:
        self.total = self.used

    def empty(self, shape: tuple[int, ...], dtype: Any) -> None:
        if self.total > 100:
            self.free_all_blocks()
        self.total += shape[0]


def with_pool() -> tuple[Any, Pool]:
    """Return a device without a GPU, and the pool that its memory is from."""
    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    pool = Pool()
    memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    device._cupy = SimpleNamespace(
        empty=pool.empty, get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(memory=memory)
    )
    device.most, device._use = 0, lambda: None
    return device, pool


def test_the_most_memory_is_that_before_some_was_given_back() -> None:
    device, pool = with_pool()
    for _ in range(3):
        device.empty((20,), np.uint8)
    pool.used = 10
    device.trim()
    assert (pool.total, device.memory()) == (10, 60)
    device.empty((100,), np.uint8)
    device.empty((1,), np.uint8)  # by the pool itself, for want of room
    assert (pool.total, device.memory()) == (11, 110)
    device.most = 0  # from here on
    assert device.memory() == 11


@pytest.mark.parametrize("reads", [0, 1])
def test_what_is_written_is_read_before_the_host_goes_on(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the GPU reads the host's pageable memory itself the copy only begins with the call."""
    device, _ = with_pool()
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    device._cupy.cuda.get_current_stream = lambda: stream
    device._reads_host = bool(reads)
    array = SimpleNamespace(set=lambda values: done.append(f"copied {values.tolist()}"))
    device.write(array, np.arange(6, dtype=np.int32)[::2])
    assert done == ["copied [0, 2, 4]", *["waited"] * reads]


class Streams:
    """Stands in for CuPy's stream: tells what was done with it."""

    def __init__(self, error: type[Exception]) -> None:
        self.calls: list[Any] = []
        self._error = error

    def __call__(self, **how: Any) -> "Streams":
        self.calls.append(how)
        return self

    def __enter__(self) -> None:
        self.calls.append("taken")

    def __exit__(self, *_: Any) -> None:
        self.calls.append("left")

    def begin_capture(self) -> None:
        self.calls.append("begins")

    def end_capture(self) -> Any:
        self.calls.append("ends")
        if "wrong" in self.calls:
            raise self._error("the capture is invalid")
        return SimpleNamespace(launch=lambda: self.calls.append("launched"))


def test_calls_are_captured_on_a_stream_of_their_own_and_an_error_is_the_true_one() -> None:
    class CUDAError(Exception):
        pass

    streams = Streams(CUDAError)
    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    device._use = lambda: None
    runtime = SimpleNamespace(CUDARuntimeError=CUDAError)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(Stream=streams, runtime=runtime))
    again = device.record(lambda: streams.calls.append("runs"))
    again()
    how = {"non_blocking": True}  # what others do meanwhile on the usual one does not matter
    assert streams.calls == [how, "taken", "begins", "runs", "ends", "left", "launched"]

    def wrong() -> None:
        streams.calls.append("wrong")
        raise KeyboardInterrupt

    streams.calls.clear()
    with pytest.raises(KeyboardInterrupt):
        device.record(wrong)
    assert streams.calls == [how, "taken", "begins", "wrong", "ends", "left"]


def test_what_cublas_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorded()
    device = with_cublas(monkeypatch, library)
    device._cublas._functions["cublasSetMathMode"] = lambda *_: 7
    device._cublas._says = lambda status: b"an invalid value"
    a = np.zeros((4, 4), np.uint16)
    with pytest.raises(CublasError, match=r"cublasSetMathMode fails: an invalid value \(7\)"):
        device.gemm_ex(Product(False, True, 4, 4, 4, 0.0, True), a, a, a, a)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs CuPy")
def test_a_piece_of_a_block_holds_its_owner_while_a_view_of_it_lives() -> None:
    """CuPy's own arrays, which can be made without a GPU where nothing is allocated."""
    import cupy

    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    device._cupy, device._gpu = cupy, SimpleNamespace(id=0)
    memory = cupy.cuda.UnownedMemory(1 << 20, 4096, None, 0)
    block = cupy.ndarray((4096,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    class Owner:
        pass

    owner = Owner()
    dead = weakref.ref(owner)
    array = device.piece(block, 256, (5, 8), np.dtype(np.uint16), owner=owner)
    del owner
    assert device.address(array) == (1 << 20) + 256 and array.shape == (5, 8)
    assert array.dtype == np.uint16 and array.flags.c_contiguous
    view = array[1:3].reshape(-1)
    assert view.base is array and device.address(view) == device.address(array) + 16
    del array
    assert dead() is not None
    del view
    assert dead() is None


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs CuPy")
def test_cupy_s_binding_of_nccl_has_what_is_called() -> None:
    nccl = carriers._nccl_module()
    if not nccl.available:
        assert carriers._why_not_nccl().startswith("NCCL's library was not found: pip install")
        return
    assert carriers._why_not_nccl() == ""
    assert nccl.NCCL_FLOAT32 == fake_nccl.FLOAT32
    fake = fake_nccl.module(ShimDevice(), fake_nccl.Wires())
    for name in vars(fake):
        assert hasattr(nccl, name)
    for name in ("send", "recv"):
        assert hasattr(nccl.NcclCommunicator, name)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs CuPy")
def test_arrays_are_told_apart_by_where_and_how_they_lie() -> None:
    import cupy

    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    device._cupy, device._gpu = cupy, SimpleNamespace(id=0)
    memory = cupy.cuda.UnownedMemory(1 << 20, 4096, None, 0)
    x = cupy.ndarray((8, 8), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    views = [x, x[:4], x.T, x[1:], x[:, :4], x.view(np.int32), x.reshape(64)]
    assert device.identities([x, x[1:]]) == device.identities((x[:], x[1:]))
    assert len({device.identities([view]) for view in views}) == len(views)
    with pytest.raises(TypeError, match=r"arrays that are on the GPU, got .*ops\.from_numpy"):
        device.identities([x, np.zeros(3)])


def test_importing_the_backend_touches_no_gpu_and_prints_nothing() -> None:
    code = (
        "import sys, accel.cuda.ops, accel.cuda.ops_bf16, accel.cuda.cupy_device\n"
        "assert not any(name.split('.')[0] in ('cupy', 'cupy_backends') for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
