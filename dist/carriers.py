"""How the arrays of a GPU travel between ranks; MPI's own way with arrays in memory is ``comm.py``.

The bulk of what ranks exchange, gradients and weights, lies on the GPUs. NCCL moves it from one to
the other without a detour. Where it cannot, the arrays are copied to host memory, sent by MPI and
copied back, which is slow but correct. Everything small (losses, norms, signals) is sent by MPI,
since only that can also carry Python's objects and end a rank that hangs.

Both move bytes and compute nothing, so they give the same bits. The sums are ``step.py``'s.
"""

import copy
import warnings
from collections.abc import Sequence
from socket import gethostname
from types import ModuleType
from typing import Any

import numpy as np

from accel.cuda import device as devices
from accel.cuda.device import Device
from dist.comm import AllRanksError, Comm, Level, slices_of, together
from dist.config import Carrier
from reference.types import Array


def carried(control: Comm, levels: Sequence[Level]) -> Comm:
    """Return the ranks of a run as MPI knows them, whose bulk is moved by ``levels``."""
    ranks = copy.copy(control)
    ranks.levels, ranks.behind = levels, "gradients lie on a GPU"
    return ranks


class OnDevice:
    """Ranks that exchange slices of a device's arrays.

    Parameters
    ----------
    level : Level
        The same ranks as MPI knows them.
    device : Device
    """

    def __init__(self, level: Level, device: Device) -> None:
        self.level, self.device = level, device
        self.rank, self.size = level.rank, level.size

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 among them."""
        return self.level.broadcast(value)


class Staged(OnDevice):
    """By MPI, through host memory."""

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Send each rank its slice, all to all."""
        parts = self.level.exchange(self.device.download(flat), bounds)
        return [self.device.upload(part) for part in parts]

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Send the own slice to all, and write what the others sent."""
        low, high = bounds[self.rank], bounds[self.rank + 1]
        host = np.empty(flat.shape, flat.dtype)
        host[low:high] = self.device.download(flat[low:high])
        self.level.all_gather_slices(host, bounds)
        for first, last in ((bounds[0], low), (high, bounds[-1])):
            if last > first:
                self.device.write(flat[first:last], host[first:last])


class Nccl(OnDevice):
    """By NCCL, from GPU to GPU.

    Each call is one group of sends and receives, added to the device's queue behind the kernels
    that make what is sent; those that read what arrives come after it in the same queue. Slices are
    whole blocks and so of unequal length, which NCCL's own collectives do not take.
    """

    def __init__(self, level: Level, device: Device, nccl: Any) -> None:
        super().__init__(level, device)
        self._nccl = nccl
        try:
            identity = level.broadcast(nccl.get_unique_id() if level.rank == 0 else None)
            self._ranks = nccl.NcclCommunicator(level.size, identity, level.rank)
        except nccl.NcclError as error:  # the others may wait within NCCL: nothing to agree on
            raise ValueError(
                f"NCCL could not start ({error}): NCCL_DEBUG=INFO in the environment makes it say "
                "why; run.comm = 'mpi' goes without it"
            ) from error
        # NCCL opens its connections, and takes memory for them, when it first needs them: now,
        # before this process has filled the GPU
        one = device.upload(np.zeros(level.size, np.float32))
        self.exchange(one, range(level.size + 1))

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Send each rank its slice, all to all; the own one stays where it is."""
        low, high = bounds[self.rank], bounds[self.rank + 1]
        parts = [
            flat[low:high] if peer == self.rank else self.device.empty((high - low,), flat.dtype)
            for peer in range(self.size)
        ]
        self._group(slices_of(flat, bounds), parts)
        return parts

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Send the own slice to all and receive theirs in place."""
        slices = slices_of(flat, bounds)
        self._group([slices[self.rank]] * self.size, slices)

    def _group(self, sent: Sequence[Array], received: Sequence[Array]) -> None:
        """Exchange ``sent[peer]`` for ``received[peer]`` with every other rank, all at once."""
        try:
            self._all(sent, received)
        except self._nccl.NcclError as error:
            raise ValueError(
                f"NCCL could not move the arrays between GPUs ({error}): the GPU's memory may be "
                "full, then take a smaller train.micro_batch; NCCL_DEBUG=INFO in the environment "
                "makes it say more; run.comm = 'mpi' goes without it"
            ) from error

    def _all(self, sent: Sequence[Array], received: Sequence[Array]) -> None:
        stream, kind = self.device.stream(), self._nccl.NCCL_FLOAT32
        self._nccl.groupStart()
        for peer in range(self.size):
            if peer == self.rank:
                continue
            for array, call in (
                (sent[peer], self._ranks.send),
                (received[peer], self._ranks.recv),
            ):
                assert array.dtype == np.float32
                if array.size:
                    call(self.device.address(array), array.size, kind, peer, stream)
        self._nccl.groupEnd()


# ---- the choice ----------------------------------------------------------------------------------


def carrier(comm: Comm, backend: str, how: Carrier) -> tuple[Comm, str]:
    """Return the ranks with a carrier for a backend's arrays, and a sentence that names it.

    Parameters
    ----------
    comm : Comm
        The ranks as MPI knows them.
    backend : str
        Only ``"cuda"`` has arrays that MPI cannot read.
    how : str
        ``run.comm``.

    Raises
    ------
    AllRanksError
        When NCCL was asked for and some rank cannot use it.
    """
    if backend != "cuda" or comm.size == 1:
        return comm, ""
    device = devices.current()
    staged = carried(comm, [Staged(level, device) for level in comm.levels])
    if how == "mpi":
        return staged, "gradients and weights go by MPI through host memory"

    def ask() -> tuple[str, str]:
        return f"{gethostname()} {device.name()}", _why_not_nccl()

    answers = together(comm, ask)
    reason = next((why for _, why in answers if why), "")
    gpus = [gpu for gpu, _ in answers]
    if not reason and len(set(gpus)) < len(gpus):
        reason = (
            f"NCCL wants a GPU for each rank and {len(gpus)} ranks share {len(set(gpus))}: start "
            "as many ranks as there are GPUs"
        )
    if reason and how == "nccl":
        raise AllRanksError(f"run.comm is 'nccl', but {reason}, or set run.comm to 'auto'")
    if reason:
        return staged, f"gradients and weights go by MPI through host memory: {reason}"
    nccl = _nccl_module()
    version = nccl.get_version()
    said = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    with comm.watch.waiting("start of NCCL"):
        levels = [Nccl(level, device, nccl) for level in comm.levels]
    return carried(comm, levels), f"gradients and weights go by NCCL {said}"


def _nccl_module() -> ModuleType:
    """Return CuPy's binding of NCCL."""
    with warnings.catch_warnings():  # about a missing library, which _why_not_nccl explains
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl

    return nccl


def _why_not_nccl() -> str:
    if _nccl_module().available:
        return ""
    return (
        "NCCL's library was not found: pip install nvidia-nccl-cu13 (or -cu12, as CuPy is), or "
        "install NVIDIA's libnccl2"
    )
