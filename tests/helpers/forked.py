"""Interpreters that have imported something already: forks of one that does nothing else.

A test of processes starts many, and most of the time of each goes into importing others' packages.
Here they are imported once, by an interpreter that forks whenever it is asked to. Nothing of ours
is imported before the fork, so what our modules do when they are imported, and what they read from
the environment, is that of a new process. What another's package reads from the environment when it
is imported is not, such as Numba's ``NUMBA_…`` and the threads of BLAS.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import types
from typing import IO, Any, NamedTuple

# as an array's first kernel of a process finds Numba: with the tables of what it knows
NUMBA = """
import numba.np.ufunc.parallel
from numba.core.registry import cpu_target
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
"""
PATIENCE = 300  # seconds, then a process is ended by SIGALRM


class Forked(NamedTuple):
    """A process that was started; what it says goes to files."""

    out: IO[str]
    err: IO[str]
    told: IO[str]

    def end(self) -> "subprocess.CompletedProcess[str]":
        """Wait until it has ended."""
        with self.told, self.out, self.err:
            status = int(self.told.read())
            self.out.seek(0)
            self.err.seek(0)
            return subprocess.CompletedProcess([], status, self.out.read(), self.err.read())


@functools.cache
def _server(imports: str) -> socket.socket:
    """Return how to speak to an interpreter that has run ``imports``; it ends with this process."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(its.fileno()), imports],
            env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "NUMBA_"))},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def start(imports: str, code: str, *arguments: str, **process: Any) -> Forked:
    """Run code as ``python -c`` does, in a fork of an interpreter that has run ``imports``.

    ``env`` and ``cwd`` are those of ``subprocess.Popen``.
    """
    words = ["-c", *arguments]
    order = {"code": code, "words": words, "env": {**os.environ}, "cwd": os.getcwd(), **process}
    out, err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))
    given, ordering = os.pipe()
    ended, ending = os.pipe()
    socket.send_fds(_server(imports), [b"!"], [given, out.fileno(), err.fileno(), ending])
    os.close(given)
    os.close(ending)
    with open(ordering, "w", encoding="utf-8") as file:
        json.dump({**order, "cwd": str(order["cwd"])}, file)
    return Forked(out, err, open(ended, encoding="utf-8"))


def run(
    imports: str, code: str, *arguments: str, **process: Any
) -> "subprocess.CompletedProcess[str]":
    """Run code to its end; see ``start``."""
    return start(imports, code, *arguments, **process).end()


def serve(orders: socket.socket) -> dict[str, Any]:
    """Fork at every order, and return it in the fork."""
    while True:
        asked, files, _, _ = socket.recv_fds(orders, 1, 4)
        if not asked:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
        os.waitpid(-1, os.WNOHANG)
    orders.close()
    given, out, err, told = files
    if (process := os.fork()) > 0:  # this one only waits for the other
        for file in (given, out, err):
            os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.write(told, str(status).encode())
        os._exit(0)
    os.close(told)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in (out, err):
        os.close(file)
    signal.alarm(PATIENCE)
    with open(given, encoding="utf-8") as file:
        return json.load(file)


def become(order: dict[str, Any]) -> dict[str, Any]:
    """Make this the process that was ordered; return the names of its ``__main__``."""
    environment = order["env"]
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = order["words"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(sys.modules["__main__"])


if __name__ == "__main__":
    exec(sys.argv[2])
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    exec(compile(order["code"], "<string>", "exec"), become(order))
