"""CuPy's RawKernels are checked as any kernel is; without a GPU, over the shim."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel.verify
from accel.verify import check_module
from accel.verify.load import load_file
from tests.cuda_shim import cupy, require
from tests.cuda_shim.device import ShimError

require.shim()

EXAMPLE = Path(accel.verify.__file__).parent / "examples" / "cupy_kernels.py"


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return load_file(str(path))


def test_the_example_s_kernels_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_module(load(EXAMPLE, monkeypatch), examples=6, partial=True)
    assert {op.op for op in report.ops} == {"rmsnorm"} and set(report.ops[0].results) == {
        "out",
        "dx",
        "dgain",
    }


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("i += 32) squares", "i += 16) squares"),
        ("if (i >= D) return;", ""),  # writes behind the array
        ("part[threadIdx.x + half];\n        __syncthreads();", "part[threadIdx.x + half];"),
    ],
    ids=["stride", "bound", "barrier"],
)
def test_a_mistake_in_a_kernel_s_text_is_caught(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert text.count(right) == 1
    (tmp_path / "wrong.py").write_text(text.replace(right, wrong), encoding="utf-8")
    subject = load(tmp_path / "wrong.py", monkeypatch)
    report = check_module(subject, examples=6, partial=True, shrink=False, raises=False)
    assert not report.ok and report.failures


def test_shared_memory_of_a_launch_s_size_and_shuffles_are_understood() -> None:
    kernel = cupy.RawKernel(
        r"""
extern "C" __global__ void turned(const float* x, float* y) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[31 - threadIdx.x] + __shfl_xor_sync(0xffffffff, x[threadIdx.x], 1);
}
""",
        "turned",
    )
    x = np.arange(32, dtype=np.float32)
    y = cupy.empty(32, np.float32)
    kernel((1,), (32,), (cupy.asarray(x), y), shared_mem=128)
    assert cupy.asnumpy(y).tolist() == (x[::-1] + x.reshape(16, 2)[:, ::-1].ravel()).tolist()
    with pytest.raises(ShimError, match=r"turned: blocks have one axis here, got \(8, 4\)"):
        kernel((1,), (8, 4), (cupy.asarray(x), y), shared_mem=128)
