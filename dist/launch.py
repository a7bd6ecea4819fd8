"""Starts ranks on this machine: ``--ranks N`` without having to know any mpirun's flags."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, cast

import psutil

from accel import system
from accel.system import ENDING, HANDED_ON, cores
from dist.comm import warn
from dist.monitor import say_lost
from dist.stopping import NOHUP, StopRequest, same_command
from dist.watchdog import FLOOR, LAST_WORDS, LAUNCHERS

# What a rank dies of, by number: a system has most of them.
CRASHES = {
    number.value: name
    for name in ("SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV")
    if (number := getattr(signal, name, None)) is not None
}


def find_mpirun() -> tuple[str, str]:
    """Return the path of ``mpirun`` and which it is: "openmpi" or "mpich".

    The one installed beside this Python goes before others on the PATH, because it belongs to the
    library that mpi4py finds there.

    Raises
    ------
    ImportError
        When there is none.
    """
    if HANDED_ON is None:
        raise ImportError(
            "on Windows ranks are not started for you: start them with Microsoft's MPI, "
            "mpiexec -n RANKS python -m dist train RUN.toml, or train on one rank"
        )
    here = str(Path(sys.executable).parent)
    path = shutil.which("mpirun", path=here) or shutil.which("mpirun")
    if path is None:
        raise ImportError(
            "several ranks need an MPI, and there is no mpirun here; install one: "
            "pip install 'myllm[mpi]'"
        )
    done = subprocess.run([path, "--version"], capture_output=True, encoding="utf-8", check=False)
    said = done.stdout + done.stderr
    if re.search(r"Open MPI|OpenRTE|PRRTE", said):
        return path, "openmpi"
    if re.search(r"HYDRA|MPICH|Intel", said):
        return path, "mpich"
    raise ImportError(f"{path} is neither Open MPI's nor MPICH's; start the ranks by hand")


def command(mpirun: str, kind: str, ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs ``myllm ARGUMENTS`` on ``ranks`` ranks of this machine.

    It is named, because in a job of Slurm's mpirun would take all machines of the job.
    """
    start = [mpirun, "-n", str(ranks)]
    if kind == "openmpi":
        # Open MPI binds each rank to one core, so that all its threads would share that core, and
        # refuses more ranks than cores
        start += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--host", f"localhost:{ranks}"]
        if sys.platform != "win32" and os.geteuid() == 0:
            start.append("--allow-run-as-root")
    else:
        start += ["-bind-to", "none", "-launcher", "fork", "-hosts", "localhost"]
    # -P: what lies in the folder the ranks are started in is not what they import
    return [*start, sys.executable, "-P", "-m", "dist", *arguments]


def environment(ranks: int) -> dict[str, str]:
    """Return the environment of the ranks: the processor's cores divided among them."""
    env = dict(os.environ)
    threads = str(max(1, cores() // ranks))
    for name in ("MYLLM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        env.setdefault(name, threads)
    # the ranks import this very package, wherever they are started
    root = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    if sys.stdout is not None and sys.stdout.isatty():
        name = ""
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # another namespace's, that has no name here
                name = os.ttyname(sys.stdout.fileno())
        env.setdefault("MYLLM_TERMINAL", f"{shutil.get_terminal_size().columns}:{name}")
    if ranks > cores():
        # more ranks than cores: one that waits must leave the core to those that work, at once
        env.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")
    return env


def launch(ranks: int, arguments: Sequence[str], timeout: float = 0.0) -> int:
    """Run ``myllm ARGUMENTS`` on ``ranks`` ranks and return the exit status.

    mpirun passes SIGTERM and SIGINT on and kills the ranks about a second later, too early for a
    step and a checkpoint. So it runs in a session of its own, out of reach of the terminal's
    Ctrl-C, and is sent SIGUSR1 instead, which it passes on and nothing more. It is sent again every
    second, because mpirun forgets one that comes before its ranks have started. What the ranks say
    passes through here, because mpirun ends them when it cannot write. What never ends by itself,
    ``Started`` says, is ended after ``timeout`` seconds, or ``FLOOR``.
    """
    mpirun, kind = find_mpirun()
    env = environment(ranks)
    heard = StopRequest.heard()
    if kind == "openmpi" and "SIGHUP" in (n.name for n in ENDING if n not in heard):
        env[NOHUP] = "1"  # it gives its ranks the system's own answer to SIGHUP
    handed_on = cast(signal.Signals, HANDED_ON)  # where there is an mpirun
    again = same_command(set_back=any(w.partition("=")[0] == "--from" for w in arguments))
    received: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        # asked a third time: no more patience
        received.append(number)
        for process in processes:
            process.send_signal(handed_on if len(received) < 3 else signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in heard}
    try:
        system.adopt()  # what mpirun leaves behind
        others = set(psutil.Process().children(recursive=True))
        process = subprocess.Popen(
            command(mpirun, kind, ranks, arguments),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **system.out_of_reach(),
            **system.ends_with_us(),  # and mpirun ends its ranks
        )
        processes.append(process)
        streams = ((process.stdout, 1), (process.stderr, 2))
        passing = [threading.Thread(target=_pass_on, args=pair, daemon=True) for pair in streams]
        for thread in passing:
            thread.start()
        started = Started(ranks, timeout or FLOOR)
        while (status := _wait(process)) is None:
            if received:
                process.send_signal(handed_on)
            complaint = started.turn()
            if complaint is not None:
                warn(f"{complaint}; {again} goes on from the newest checkpoint")
                _kill_all(others)
                return 1
        _kill_all(others)  # an mpirun that was itself killed has left its ranks
        for thread in passing:
            thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status < 0:
        status = 128 - status
    crash = CRASHES.get(status % 128)  # a shell's way and Open MPI's, or MPICH's
    if crash and not received:
        why = {
            "SIGKILL": " (out of memory, perhaps, or somebody's signal)",
            "SIGBUS": " (/dev/shm is full, perhaps, or a file was cut short)",
        }.get(crash, "")
        warn(f"a rank was ended by {crash}{why}; {again} goes on from the newest checkpoint")
    # a rank fails with 1; whatever else comes after a signal came of it, before a step was taken
    if received and status != 1:
        if status in (128 + handed_on, handed_on):  # a shell's way, and MPICH's
            name = signal.Signals(received[0]).name
            warn(f"stopped by {name} before the first step was finished: nothing to save")
        return 128 + received[0]
    return status


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    """Return the status of a process when it has ended, None after a second in which it has not."""
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        return None


def _pass_on(source: IO[bytes], target: int) -> None:
    """Copy all that comes; when it cannot be written any more, forget it."""
    lost = False
    with source:
        while said := os.read(source.fileno(), 1 << 16):
            try:
                while said and not lost:
                    said = said[os.write(target, said) :]
            except OSError as error:
                lost = True
                if target == 1:
                    say_lost(error)


class Started:
    """What this process has started, looked at now and then for what never ends by itself.

    The ranks watch each other while they train (``watchdog.py``), and mpirun ends the others when
    one fails. That leaves an mpirun that is itself stopped, and one that waits although a rank has
    ended: for a rank that was stopped when it had nothing more to say, or for nothing at all.

    Parameters
    ----------
    ranks : int
    limit : float
        Seconds that something may be so. Those are counted in which this process ran.
    """

    def __init__(self, ranks: int, limit: float) -> None:
        self._ranks, self._limit = ranks, limit
        self._every = max(1, int(limit / 10))  # seconds: a look takes some milliseconds
        self._turns = 0
        self._complete = False  # all ranks have been seen
        self._stopped = self._fewer = 0.0  # seconds

    def turn(self) -> str | None:
        """Return, called every second, what is wrong, or None."""
        self._turns += 1
        if self._turns % self._every:
            return None
        stopped, there = self._look()
        self._complete = self._complete or len(there) >= self._ranks
        fewer = self._complete and len(there) < self._ranks
        self._stopped = self._stopped + self._every if stopped else 0.0
        self._fewer = self._fewer + self._every if fewer else 0.0
        if self._stopped >= self._limit:
            return (
                f"mpirun (process {stopped[0]}) has been stopped for {self._stopped:.0f} s: it and "
                "its ranks are ended"
            )
        if self._fewer >= max(self._limit, 2 * LAST_WORDS):
            left = ", ".join(f"process {pid}, {status}" for pid, status in there) or "none"
            return (
                f"{self._ranks - len(there)} of {self._ranks} ranks ended {self._fewer:.0f} s ago, "
                f"and mpirun still waits for the others ({left}): all are ended"
            )
        return None

    def _look(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Return the launchers that are stopped, and all ranks."""
        launchers, others = {}, []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                status = process.status()
                if process.name() in LAUNCHERS:
                    launchers[process.pid] = status
                elif status != psutil.STATUS_ZOMBIE:
                    others.append((process.ppid(), process.pid, status))
        stopped = [pid for pid, status in launchers.items() if status == psutil.STATUS_STOPPED]
        return stopped, [(pid, status) for parent, pid, status in others if parent in launchers]


def _kill_all(others: set[psutil.Process]) -> None:
    """Kill all that was started here, but others; MPICH gives each a session of its own."""
    for process in reversed(psutil.Process().children(recursive=True)):
        if process in others:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
