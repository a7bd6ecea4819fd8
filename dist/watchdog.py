"""Notices a rank that hangs, says which and where, and ends the run on all ranks.

MPI waits for ever for a rank that has stopped, loops, or waits for a disk that does not answer. So
each rank has a thread beside the one that trains. Twice a second it tells the other ranks, in a
datagram and not through MPI, where the training thread is: in which collective, after how many, in
what work at what step. A rank that has been at one place for longer than its limit is judged:

- one that is at work, outside of MPI, judges itself: it loops, or waits for something else;
- one that waits in MPI for others judges those that are not heard of any more: they were stopped,
  or hold Python's interpreter in a call that does not return;
- if all were heard of just now and all wait, it is MPI or the network.

A rank that waits for one that is heard of and at work does nothing: that one knows its own limit.

The limit follows the run: ``FACTOR`` times the longest of the last pieces of work of that kind (a
step, an evaluation, a checkpoint, a sample), but at least ``FLOOR``; ``FIRST`` for the first piece,
in which kernels may be compiled. Time is counted by this thread while it runs, so a machine that
was suspended, or all of whose processes were, has not aged meanwhile.

A launcher cannot reach the machines behind a network that is down, and waits for them. So each rank
that leaves has those above it on its machine ended, should they still be there a little later.

The training thread only writes down where it is: a microsecond for each collective.
"""

import contextlib
import faulthandler
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from accel.system import end_within

TICK = 0.5  # seconds between two datagrams
QUIET = 6 * TICK  # nobody hangs who was heard of so lately: a busy machine lets threads wait
FLOOR = 300.0  # seconds
FACTOR = 20
FIRST = 1800.0  # seconds
REMEMBERED = 16  # pieces of work of a kind
LAST_WORDS = 10  # seconds that a rank has to say what it must
STACKS = "stacks.txt"
# What starts ranks, on the first machine and on others: MPICH's, Intel's, Open MPI's
LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orted"}


class Place(NamedTuple):
    """Where the thread that trains is."""

    work: str  # "start", "step", "evaluation", …
    step: int
    calls: int  # collectives begun
    collective: str  # the last of them
    waiting: bool  # in it still

    def __str__(self) -> str:
        where = "in" if self.waiting else "after"
        return (
            f"step {self.step} ({self.work}), {where} collective {self.calls} ({self.collective})"
        )


class Watch:
    """What a rank knows of its own progress, and of the others'.

    Parameters
    ----------
    rank, size : int
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.place = Place("start", 0, 0, "none", False)
        self.limit = FIRST
        self.unheard: list[int] = []  # ranks whose datagrams do not arrive: nothing is watched
        self._timeout, self._again = 0.0, "the same command"
        self._file = Path(STACKS)
        self._lasted: dict[str, deque[float]] = {}
        self._began = time.monotonic()
        self._speaking = False
        self._others = [r for r in range(size) if r != rank]
        self._all_heard = threading.Event()
        self._stopped = threading.Event()

    # ---- of the thread that trains -----------------------------------------------------------

    def follow(self, out: Path, timeout: float, again: str) -> None:
        """Take the folder for the stacks, ``run.timeout`` and what goes on from a checkpoint.

        A timeout of 0 follows what was measured.
        """
        self._file, self._timeout, self._again = out / STACKS, timeout, again
        self.limit = max(timeout, FIRST)

    def begin(self, work: str, step: int) -> None:
        """Note that a piece of work begins, and with it how long the one before it took."""
        now = time.monotonic()
        self._lasted.setdefault(self.place.work, deque(maxlen=REMEMBERED)).append(now - self._began)
        self._began = now
        lasted = self._lasted.get(work)
        if lasted is None:
            self.limit = max(self._timeout, FIRST)
        else:
            self.limit = self._timeout or max(FLOOR, FACTOR * max(lasted))
        self.place = self.place._replace(work=work, step=step)

    @contextlib.contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Surround a collective."""
        work, step, calls, _, _ = self.place
        self.place = Place(work, step, calls + 1, collective, True)
        try:
            yield
        finally:
            self.place = Place(work, step, calls + 1, collective, False)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Surround what may wait for a reader: who pauses the output may pause the run."""
        self._speaking = True
        try:
            yield
        finally:
            self._speaking = False

    def start(self, all_gather: Callable[[Any], list[Any]]) -> None:
        """Begin to watch. All ranks call this at once, and their datagrams must reach all."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        port = self._socket.getsockname()[1]
        at = [(host, port) for host in addresses()]
        told = all_gather((secrets.token_bytes(16), socket.gethostname(), at))
        self._token: bytes = told[0][0]  # tells our datagrams from a stranger's
        self._machines: list[str] = [machine for _, machine, _ in told]
        self._addresses: list[list[tuple[str, int]]] = [at for _, _, at in told]
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        missing = all_gather([] if self._all_heard.wait(5) else self._missing())
        self.unheard = sorted({r for ranks in missing for r in ranks})
        if self.unheard:
            self.stop()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    # ---- of the thread that watches ----------------------------------------------------------

    def _missing(self) -> list[int]:
        return [r for r in self._others if r not in self._places]

    def _watch(self) -> None:
        self._places: dict[int, Place] = {}
        self._heard = dict.fromkeys(range(self.size), 0.0)
        self._clock = since = 0.0
        place, last = self.place, time.monotonic()
        with self._socket:
            while not self._stopped.is_set():
                self._send(self.place)
                self._receive(TICK)
                now = time.monotonic()
                self._clock += min(now - last, 2 * TICK)
                last = now
                if place != self.place or self._speaking:
                    place, since = self.place, self._clock
                self._judge(place, self._clock - since)

    def _send(self, *message: Any) -> None:
        data = self._token + json.dumps([self.rank, *message]).encode()
        for rank in self._others:
            for address in self._addresses[rank]:
                # a network that is down is silence, which is judged where it matters
                with contextlib.suppress(OSError):
                    self._socket.sendto(data, address)

    def _receive(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
            with contextlib.suppress(OSError):  # of one that was sent to a rank that has ended
                data, address = self._socket.recvfrom(1 << 16)
                if data[:16] == self._token:
                    rank, *message = json.loads(data[16:])
                    self._hear(rank, address, *message)

    def _hear(self, rank: int, address: tuple[str, int], place: list[Any] | None) -> None:
        if place is None:
            self._leave()
        else:
            self._addresses[rank] = [address]  # of those it has, one that works
            self._heard[rank] = self._clock
            self._places[rank] = Place(*place)
            if not self._missing():
                self._all_heard.set()

    def _judge(self, place: Place, seconds: float) -> None:
        limit = self.limit
        if seconds < limit or not self._all_heard.is_set():
            return
        unheard = {r: self._clock - self._heard[r] for r in self._others}
        silent = [r for r in self._others if unheard[r] >= max(limit / 2, QUIET)]
        heard = [r for r in self._others if r not in silent]
        if place.waiting:
            if any(not self._places[r].waiting for r in heard):
                return
            if not silent and any(unheard[r] > 2 * TICK for r in heard):
                return  # one of them may have been stopped
            # of several that wait the first speaks
            if seconds < limit + 2 * TICK * sum(r < self.rank for r in heard):
                return
        if silent:
            culprits = [
                f"rank {r} hangs{self._or_network(r)}: nothing has been heard of it for "
                f"{unheard[r]:.0f} s, since {self._places[r]}"
                for r in silent
            ]
        elif place.waiting:
            culprits = [f"the ranks hang in MPI: all have waited there for {seconds:.0f} s"]
        else:
            culprits = [f"rank {self.rank} hangs: for {seconds:.0f} s it has been at {place}"]
        known = {**self._places, self.rank: place}
        culprits += [
            f"rank {r} waits at {known[r]}"
            for r in sorted(known)
            if known[r].waiting and r not in silent
        ]
        end_within(LAST_WORDS)  # whatever cannot be said or written by then
        self._send(None)
        say = f"myllm train: {'; '.join(culprits)}. The stacks of the ranks that can tell are in "
        say += f"{self._file}. {self._again.capitalize()} goes on from the newest checkpoint; if "
        say += "nothing was wrong, set run.timeout higher\n"
        with contextlib.suppress(OSError):
            sys.stderr.write(say)
            sys.stderr.flush()
        self._leave()

    def _or_network(self, rank: int) -> str:
        machine = self._machines[rank]
        if machine == self._machines[self.rank]:
            return ""
        return f", or the network to its machine {machine} is down"

    def _leave(self) -> None:
        """Write the stacks of all threads and end, with the rank that speaks a little earlier."""
        spoke = end_within(LAST_WORDS)
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank} at {self.place}\n"
        for ident, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame))
            text += f"thread {threads.get(ident, ident)}:\n{stack}"
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.write(file, f"{text}\n".encode())  # in one write: other ranks append, too
        end_launchers(LAST_WORDS)
        # the others are given time for their stacks: mpirun ends all when the first has ended
        time.sleep(1 if spoke else 3)
        os._exit(1)


def end_launchers(seconds: int) -> None:
    """Have the launchers above this process killed that are still there after some seconds."""
    pids = [str(p.pid) for p in psutil.Process().parents() if p.name() in LAUNCHERS]
    if pids:
        # a process of its own: this one, and its group, will have ended by then
        subprocess.Popen(
            ["sh", "-c", f"sleep {seconds}; kill -9 {' '.join(pids)}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """End the process if a call into MPI that lets no other thread run takes as long as FLOOR."""
    faulthandler.dump_traceback_later(FLOOR, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, of which some may be reached from others."""
    found = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
    ]
    return found or ["127.0.0.1"]
