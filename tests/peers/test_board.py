"""PyTorch's own layer norm, GELU, softmax and the like are right, and verify says so."""

import pytest

from accel.verify.board.bench import framework_kernels, verify
from reference.ops import OPS

pytest.importorskip("torch")


@pytest.mark.parametrize("op", ["layernorm", "gelu", "softmax", "swiglu"])
def test_right_kernels_of_pytorch_raise_no_alarm(op: str) -> None:
    kernels = [kernel for kernel in framework_kernels(op) if kernel.corpus == "torch"]
    assert len(kernels) == 1 and op in OPS
    for kernel in kernels:
        assert verify(kernel, quick=True) == ("", 8)
