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
    runtime = SimpleNamespace(
        deviceGetAttribute=lambda what, index: {(97, 3): 101_376, (16, 3): 108}[what, index]
    )
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


def test_each_thread_takes_the_gpu_before_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = with_cublas(monkeypatch, Recorded())
    taken: list[bool] = []
    device._use = lambda: taken.append(True)
    a = np.zeros((4, 4), np.uint16)
    device.gemm_ex(Product(False, True, 4, 4, 4, 0.0, True), a, a, a, a)
    assert taken


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
