"""What ranks say to each other. With one rank nothing is said, and MPI is not even imported.

All ranks call the same methods in the same order. Slices are given by ``bounds``, W + 1 offsets
into a flat array: rank r owns ``flat[bounds[r] : bounds[r + 1]]``.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from accel import launcher
from dist.watchdog import Watch, deadline
from reference.types import Array


class Comm(Protocol):
    """The ranks of a run."""

    rank: int
    size: int
    library: str  # that carries what they say, by its own name
    watch: Watch  # that no rank hangs

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Return, in the order of ranks, what each has in this rank's slice of ``flat``."""

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Fill every other rank's slice of ``flat`` with what that rank has there."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's small Python value, in the order of ranks."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def finish(self) -> None:
        """Say goodbye: nothing can be said afterwards."""

    def abort(self, status: int) -> NoReturn:
        """End every rank at once."""


class Solo:
    """One rank."""

    rank = 0
    size = 1
    library = "no MPI"

    def __init__(self) -> None:
        self.watch = Watch(0, 1)

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Return ``flat`` itself."""
        return [flat[bounds[0] : bounds[1]]]

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Do nothing."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value

    def barrier(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def abort(self, status: int) -> NoReturn:
        """End the process."""
        sys.exit(status)


class Mpi:
    """The ranks that ``mpirun`` started."""

    def __init__(self) -> None:
        with deadline():
            from mpi4py import MPI  # starts MPI, so not before it is needed

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.library = MPI.Get_library_version().split("\n")[0].rstrip("\0 ")
        self.watch = Watch(self.rank, self.size)

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Send each rank its slice, all to all."""
        mine = bounds[self.rank + 1] - bounds[self.rank]
        received = np.empty((self.size, mine), flat.dtype)
        counts = list(np.diff(bounds))
        with self.watch.waiting("exchange"):
            self._comm.Alltoallv(
                [flat, (counts, list(bounds[:-1]))],
                [received, ([mine] * self.size, [mine * r for r in range(self.size)])],
            )
        return list(received)

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Gather the slices in place."""
        from mpi4py import MPI

        with self.watch.waiting("all_gather_slices"):
            self._comm.Allgatherv(MPI.IN_PLACE, [flat, (list(np.diff(bounds)), list(bounds[:-1]))])

    def all_gather(self, value: Any) -> list[Any]:
        """Gather small values."""
        with self.watch.waiting("all_gather"):
            return self._comm.allgather(value)

    def broadcast(self, value: Any) -> Any:
        """Send rank 0's value to all."""
        with self.watch.waiting("broadcast"):
            return self._comm.bcast(value)

    def barrier(self) -> None:
        """Wait for all."""
        with self.watch.waiting("barrier"):
            self._comm.Barrier()

    def finish(self) -> None:
        """End MPI, when all have come."""
        from mpi4py import MPI

        self.barrier()
        self.watch.stop()
        with deadline():
            MPI.Finalize()

    def abort(self, status: int) -> NoReturn:
        """End every rank: a rank that merely leaves would keep the others waiting for ever."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.5)  # the launcher drops what it has not passed on when it hears of an abort
        self._comm.Abort(status)
        os._exit(status)  # MPICH's Abort can return before the launcher has ended this process


def start() -> Comm:
    """Return the ranks of this run: ``Solo`` unless a launcher started several.

    Raises
    ------
    ImportError
        When mpi4py, or an MPI library for it, is missing.
    ValueError
        When the launcher and the MPI library do not belong together.
    """
    expected = launcher.size()
    if expected == 1:
        return Solo()
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # while MPI starts, Python cannot look at signals; this one kills then, like the others
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        comm = Mpi()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"{expected} ranks were started, but MPI cannot be used here ({error}); install a "
            "library for it: pip install 'myllm[mpi]'"
        ) from error
    if comm.size != expected:
        raise ValueError(
            f"the launcher started {expected} ranks, but the MPI library of mpi4py "
            f"({comm.library}) sees {comm.size}: use the mpirun that belongs to that library, or "
            "srun --mpi=TYPE with a TYPE that both have (srun --mpi=list; pmix, pmi2)"
        )
    with deadline():
        comm.watch.start(comm.all_gather)
    if comm.watch.unheard and comm.rank == 0:
        ranks = ", ".join(map(str, comm.watch.unheard))
        warn(
            f"a rank that hangs will not be noticed, because datagrams of ranks {ranks} do not "
            "arrive at all others: let UDP through between the machines"
        )
    return comm


def bounds_of_slices(n: int, block: int, size: int) -> list[int]:
    """Return W + 1 offsets that divide n elements into ranges of whole blocks, one a rank."""
    blocks = -(-n // block)
    return [min(n, blocks * r // size * block) for r in range(size + 1)]


class AllRanksError(ValueError):
    """A failure that every rank knows of: rank 0 says it once, and all leave in good order."""


def together(comm: Comm, work: Callable[[], Any], only: int | None = None) -> list[Any]:
    """Do ``work`` on every rank (or on one), and return what each returned.

    Raises
    ------
    AllRanksError
        On every rank, when ``work`` raised ValueError, OSError or ImportError on any: a rank that
        raised alone would leave the others waiting for it.
    """
    cause: Exception | None = None
    value = None
    if only is None or comm.rank == only:
        try:
            value = work()
        except (ValueError, OSError, ImportError) as error:
            cause = error
    results = comm.all_gather((value, None if cause is None else sentence(cause)))
    for _, failure in results:
        if failure is not None:
            raise AllRanksError(failure) from cause
    return [value for value, _ in results]


def sentence(error: BaseException) -> str:
    """Return what an error says, without the number of an ``OSError``."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def warn(text: str) -> None:
    """Say something on stderr, where there still is one."""
    with contextlib.suppress(OSError):
        print(f"myllm train: {text}", file=sys.stderr, flush=True)
