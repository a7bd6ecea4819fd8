"""NCCL without GPUs: the calls of ``cupy.cuda.nccl`` of the trainer, carried out and checked.

As the library does, it takes sends and receives only within a group, and hands a group's calls on
together when it ends; each send must meet a receive of its length. Stricter than the library, it
refuses memory that is not one array of the device's, another type than float32 and another queue.
"""

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from reference.types import Array
from tests.cuda_shim.device import ShimDevice

FLOAT32 = 7


class Call(NamedTuple):
    kind: str  # send or recv
    address: int
    count: int
    peer: int


class NcclError(RuntimeError):
    """What the library raises."""


Carry = Callable[[int, list[Call]], None]  # (rank, the calls of a group)


def memory(call: Call) -> Array:
    """Return the floats that a call sends or receives."""
    return np.ctypeslib.as_array((ctypes.c_float * call.count).from_address(call.address))


def module(device: ShimDevice, carry: Carry) -> Any:
    """Return what stands in for ``cupy.cuda.nccl``; ``carry`` is given each group."""
    group: list[tuple[int, Call]] = []
    is_open = False

    def start() -> None:
        nonlocal is_open
        assert not is_open, "a group within a group"
        is_open = True

    def end() -> None:
        nonlocal is_open
        assert is_open, "no group to end"
        is_open = False
        ranks = {rank for rank, _ in group}
        assert len(ranks) <= 1
        for rank in ranks:
            carry(rank, [call for _, call in group])
        group.clear()

    class Communicator:
        def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
            assert commId == identity and 0 <= rank < ndev
            self.ndev, self.rank = ndev, rank

        def send(self, *arguments: int) -> None:
            self._note("send", *arguments)

        def recv(self, *arguments: int) -> None:
            self._note("recv", *arguments)

        def _note(
            self, kind: str, address: int, count: int, datatype: int, peer: int, stream: int
        ) -> None:
            assert is_open, "outside of a group a rank would wait for one that waits for it"
            assert datatype == FLOAT32 and stream == device.stream()
            assert 0 <= peer < self.ndev and peer != self.rank and count > 0
            assert device.holds(address, 4 * count), "not within one array of the device"
            group.append((self.rank, Call(kind, address, count, peer)))

    identity = bytes(range(128))
    return SimpleNamespace(
        available=True,
        NCCL_FLOAT32=FLOAT32,
        NcclError=NcclError,
        NcclCommunicator=Communicator,
        get_unique_id=lambda: identity,
        get_version=lambda: 23203,
        groupStart=start,
        groupEnd=end,
    )


class Wires:
    """Carries groups between ranks of one process, late: when all have handed theirs in."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Call]] = {}

    def __call__(self, rank: int, calls: list[Call]) -> None:
        assert rank not in self.groups
        self.groups[rank] = calls

    def deliver(self) -> None:
        """Carry out all groups handed in."""
        sent: dict[tuple[int, int], deque[Array]] = defaultdict(deque)
        for rank, calls in self.groups.items():
            for call in calls:
                if call.kind == "send":
                    sent[rank, call.peer].append(memory(call).copy())
        for rank, calls in self.groups.items():
            for call in calls:
                if call.kind == "recv":
                    values = sent[call.peer, rank].popleft()
                    assert len(values) == call.count
                    memory(call)[:] = values
        assert not any(sent.values()), "something was sent that nobody received"
        self.groups.clear()


def over_mpi(rank: int, calls: list[Call]) -> None:
    """Carry a group by MPI, whose ranks are those of NCCL."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    assert comm.rank == rank
    requests, lengths = [], []
    for call in calls:
        if call.kind == "send":
            requests.append(comm.Isend(memory(call), call.peer))
        else:
            requests.append(comm.Irecv(memory(call), call.peer))
            lengths.append((requests[-1], call.count))
    statuses = [MPI.Status() for _ in requests]
    MPI.Request.Waitall(requests, statuses)
    for status, call in zip(statuses, calls, strict=True):
        assert call.kind == "send" or status.Get_count(MPI.FLOAT) == call.count
