"""Asking for the backend cuda where something is missing: one sentence that says what."""

import importlib.util
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import accel
from accel.cuda import cupy_device
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
    with pytest.raises(ImportError, match=r"compute capability 8\.0 .* this one has 7\.x"):
        accel.load("cuda")
    assert asked == [0]  # the fourth rank on a machine with one GPU


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


def test_the_rank_on_this_machine_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert cupy_device.local_rank() == 0
    monkeypatch.setenv("SLURM_LOCALID", "5")
    assert cupy_device.local_rank() == 5
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    assert cupy_device.local_rank() == 2


def test_importing_the_backend_touches_no_gpu_and_prints_nothing() -> None:
    code = (
        "import sys, accel.cuda.ops, accel.cuda.ops_bf16, accel.cuda.cupy_device\n"
        "assert not any(name.split('.')[0] in ('cupy', 'cupy_backends') for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
