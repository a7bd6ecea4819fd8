"""``myllm`` on a machine that the shim plays the GPU of: python myllm.py NCCL ARGS...

NCCL is ``fake`` (MPI carries its calls) or ``none`` (the library is not installed).
"""

import sys
from types import SimpleNamespace
from typing import Any

from accel.cuda import cupy_device
from dist import carriers, cli
from tests.cuda_shim.device import ShimDevice
from tests.helpers import fake_nccl


def install(nccl: str, put: Any = setattr, device: ShimDevice | None = None) -> ShimDevice:
    """Let ``accel.load("cuda")`` find the shim; ``put`` sets an attribute of a module."""
    device = device or ShimDevice()
    put(cupy_device, "find_gpu", lambda: 0)
    put(cupy_device, "CuPyDevice", lambda index: device)
    none = SimpleNamespace(available=False)
    fake = fake_nccl.module(device, fake_nccl.over_mpi)
    put(carriers, "_nccl_module", lambda: fake if nccl == "fake" else none)
    return device


if __name__ == "__main__":
    install(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
