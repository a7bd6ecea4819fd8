"""accel.load: backends by name, and a sentence where there is none."""

import subprocess
import sys
from types import ModuleType

import pytest

import accel
from reference.boundary import Rules, offer
from reference.ops import OPS


def test_load_returns_modules() -> None:
    assert isinstance(accel.load("reference"), ModuleType)
    assert accel.load("cpu").__name__ == "accel.cpu.ops"


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"backend": "gpu"}, ValueError, "no backend 'gpu'; known: reference, cpu, cuda"),
        ({"backend": "cpu", "compute": "fp8"}, ValueError, "no compute mode 'fp8'; known: float32"),
        ({"backend": "reference", "compute": "bf16"}, ValueError, "leave compute at 'float32'"),
    ],
)
def test_what_is_not_there_is_named(
    arguments: dict[str, str], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        accel.load(**arguments)  # type: ignore[arg-type]


def test_importing_the_backend_compiles_nothing_and_starts_no_thread() -> None:
    code = (
        "import os, threading, accel, accel.cpu.ops, numba\n"
        "from accel.cpu import gemm, norms, decode_kernels\n"
        "assert not gemm._product.signatures and not norms._rmsnorm_forward.signatures\n"
        "assert not decode_kernels.decode_token.signatures\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_backend_that_lacks_a_function_is_named_as_a_broken_installation_is() -> None:
    with pytest.raises(ImportError, match="mine has no function add_forward"):
        offer("mine", OPS.values(), (), Rules({}), {})
