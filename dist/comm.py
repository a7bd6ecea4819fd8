"""What ranks say to each other. With one rank nothing is said, and MPI is not even imported.

All ranks call the same methods in the same order. What is small goes to all; the bulk, slices of
flat arrays, goes by levels: among the ranks of a machine, then from machine to machine. What is
made of that is in ``reduction.py``.
"""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from accel import launcher
from accel.system import end_within
from dist import interrupt
from dist.watchdog import LAST_WORDS, Watch, deadline, end_launchers
from reference.types import Array

MESSAGE = 65_536  # elements, a block of float32: 256 KiB
SPIN = 1e-3  # seconds of waiting without a pause: longer than a message takes on one machine
PAUSE = 2e-4  # seconds between two looks at messages after that


class Level(Protocol):
    """Ranks that exchange slices: rank r owns ``flat[bounds[r] : bounds[r + 1]]``."""

    rank: int  # among them
    size: int

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 among them."""

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Return, in the order of ranks, what each has in this rank's slice of ``flat``."""

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Fill every other rank's slice of ``flat`` with what that rank has there."""


class Comm(Protocol):
    """The ranks of a run."""

    rank: int
    size: int
    library: str  # that carries what they say, by its own name
    watch: Watch  # that no rank hangs
    levels: Sequence[Level]  # the innermost first; the product of their sizes is ``size``
    behind: str  # why slices cannot travel while this rank computes; "": they can
    computing: threading.Event  # set while it does: messages are then looked at now and then only

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
    behind = "there is one rank"

    def __init__(self) -> None:
        self.watch = Watch(0, 1)
        self.levels: Sequence[Level] = [self]
        self.computing = threading.Event()

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


class MpiLevel:
    """Some of the ranks, which exchange slices.

    The libraries' own collectives differ in what crosses the network and in what order, and make no
    progress between calls. Here slices travel in messages of 256 KiB, with two to each rank and two
    from each under way. A longer one would fill the connection with what goes one way; the few
    bytes that let the other way begin, or go on, would wait behind it, and both would take turns.

    Parameters
    ----------
    comm : MPI.Comm
        For slices alone.
    computing : threading.Event
        Of ``Comm``.
    """

    def __init__(self, comm: Any, computing: threading.Event) -> None:
        self._comm, self._computing = comm, computing
        self.rank, self.size = comm.rank, comm.size

    def broadcast(self, value: Any) -> Any:
        """Send the value of rank 0 among them to all."""
        return self._comm.bcast(value)

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        """Send each rank its slice; the own one stays where it is."""
        slices = slices_of(flat, bounds)
        mine = slices[self.rank]
        parts = [mine if r == self.rank else np.empty_like(mine) for r in range(self.size)]
        self._all(slices, parts)
        return parts

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        """Send the own slice to all and receive theirs in place."""
        slices = slices_of(flat, bounds)
        self._all([slices[self.rank]] * self.size, slices)

    def _all(self, sent: Sequence[Array], received: Sequence[Array]) -> None:
        """Exchange ``sent[peer]`` for ``received[peer]`` with every other rank, all at once."""
        # each begins with the one after it, so that not all send to the same
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        longest = max(len(array) for array in (*sent, *received))
        before: list[Any] = []
        for low in range(0, longest, MESSAGE):
            here = slice(low, low + MESSAGE)
            now = [self._comm.Irecv(received[p][here], p) for p in peers if len(received[p]) > low]
            now += [self._comm.Isend(sent[p][here], p) for p in peers if len(sent[p]) > low]
            self._wait(before)
            before = now
        self._wait(before)

    def _wait(self, requests: list[Any]) -> None:
        wait(requests, 0.0 if self._computing.is_set() else SPIN)


def wait(requests: list[Any], spin: float = SPIN) -> None:
    """Wait for messages, and soon let others have the core: who computes here, or elsewhere.

    MPI's own waiting spins, for as long as the slowest rank takes.
    """
    from mpi4py import MPI

    spins_until = time.perf_counter() + spin
    while not MPI.Request.Testall(requests):
        if time.perf_counter() > spins_until:
            time.sleep(PAUSE)


class Mpi:
    """The ranks that ``mpirun`` started."""

    def __init__(self) -> None:
        # Open MPI sends messages above this limit after a handshake, and those above 192 KiB in
        # pieces that it asks for one by one: over TCP that stalls what goes the other way
        os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(4 * MESSAGE + 4096))
        # and spins for as long as it waits; MPICH lets others have the core now and then
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        with deadline():
            from mpi4py import MPI  # starts MPI, so not before it is needed

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        said = MPI.Get_library_version().split("\n")[0].split(",")[0]  # Open MPI's is long
        self.library = " ".join(said.rstrip("\0").split())
        self.watch = Watch(self.rank, self.size)
        self.computing = threading.Event()
        # two threads speak, but never at once: the one that trains waits for the other
        enough = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self.behind = "" if enough else f"{self.library} lets one thread speak only"
        with deadline():
            self.levels: Sequence[Level] = self._levels()

    def _levels(self) -> list[Level]:
        """Return the ranks of this machine, and those of the same number on every machine.

        A machine's ranks must be a subtree of the sum: as many on each, in a row. Otherwise, and
        where there is one machine, or one rank on each, all are one level.
        """
        names = self._comm.allgather(socket.gethostname())
        local = names.count(names[0])
        rows = [set(names[first : first + local]) for first in range(0, self.size, local)]
        whole = self.size % local == 0 and local & (local - 1) == 0
        if not whole or len(rows) != len(set(names)) or any(len(row) > 1 for row in rows):
            local = 1
        machine, number = divmod(self.rank, local)
        colours = [(local, machine), (self.size // local, number)]
        parts = [self._comm.Split(colour) for size, colour in colours if size > 1]
        return [MpiLevel(part, self.computing) for part in parts]

    def all_gather(self, value: Any) -> list[Any]:
        """Gather small values."""
        with self.watch.waiting("all_gather"):
            self._meet()
            return self._comm.allgather(value)

    def broadcast(self, value: Any) -> Any:
        """Send rank 0's value to all."""
        with self.watch.waiting("broadcast"):
            self._meet()
            return self._comm.bcast(value)

    def barrier(self) -> None:
        """Wait for all."""
        with self.watch.waiting("barrier"):
            self._meet()

    def _meet(self) -> None:
        """Wait for all; a collective that follows has nobody left to spin for."""
        wait([self._comm.Ibarrier()])

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
        end_launchers(LAST_WORDS)  # should they wait for a machine that cannot be reached, say
        end_within(LAST_WORDS)  # should MPI
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
    interrupt.leave()  # while MPI starts, Python cannot look at signals: they kill then
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


def slices_of(flat: Array, bounds: Sequence[int]) -> list[Array]:
    """Return the ranges of ``flat`` between bounds."""
    return [flat[low:high] for low, high in itertools.pairwise(bounds)]


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
    if isinstance(error, MemoryError):
        return f"not enough memory; {str(error) or 'less data at once may help'}"
    return str(error)


def warn(text: str) -> None:
    """Say something on stderr, where there still is one."""
    with contextlib.suppress(OSError):
        print(f"myllm train: {text}", file=sys.stderr, flush=True)
