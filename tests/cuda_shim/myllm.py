"""``myllm`` on a machine that the shim plays the GPU of: python myllm.py NCCL ARGS...

NCCL is ``fake`` (MPI carries its calls) or ``none`` (the library is not installed). SHIM_SECONDS,
where it is set, has for each rank a JSON object: what a training step of attention takes there by
each path that its GPU has, and a product by each algorithm of cublasLt's stand-in, by its number.
"""

import json
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from accel import launcher
from accel.cuda import attention, cupy_device, paths
from accel.cuda import device as devices
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


def clocked(seconds: Mapping[str, float], put: Any = setattr) -> ShimDevice:
    """Return a device with these paths of attention, whose backward takes so long by the clock.

    Where there are numbers among them it has cublasLt, too, with these algorithms.
    """
    now = [0.0]
    numbered = {int(name): each for name, each in seconds.items() if name.isdecimal()}
    device = ShimDevice(warpgroups="wgmma" in seconds)
    if numbered:
        from tests.cuda_shim.cublaslt import WithCublasLt  # needs NVIDIA's headers

        device = WithCublasLt(numbered, warpgroups="wgmma" in seconds)
    backward = attention.attention_backward

    def passes(*given: Any) -> Any:
        now[0] += seconds.get(devices.current().attention, 0.0)
        return backward(*given)

    put(attention, "attention_backward", passes)
    put(paths, "clock", lambda: now[0] + getattr(device, "now", 0.0))
    return device


if __name__ == "__main__":
    by_rank = os.environ.get("SHIM_SECONDS")
    install(
        sys.argv[1], device=clocked(json.loads(by_rank)[launcher.local_rank()]) if by_rank else None
    )
    sys.exit(cli.main(sys.argv[2:]))
