"""The processes of a run, found by the run file that they were started with."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from accel.system import cores
from dist.config import RunFile
from tests.helpers import ROOT
from tests.helpers.runs import ENVIRONMENT, save_run_file

STARTED: list[Path] = []  # run files
PATIENCE = 60  # seconds; what is looked for would last longer, or for ever
FAULT = ".fault"  # of a file beside the run file, made at the moment of a fault that was planted
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # where a rank finds its number: MPICH, Open MPI


def run_file(config: RunFile) -> Path:
    """Return where ``start`` writes the run file."""
    return Path(config.run.out).with_suffix(".toml")


class Started(NamedTuple):
    """A run that was started; what it says goes to files, which never fill up as a pipe does."""

    config: RunFile
    process: "subprocess.Popen[bytes]"

    def said(self, stream: str = "out") -> str:
        """Return what it has written so far."""
        return run_file(self.config).with_suffix(f".{stream}").read_text(errors="replace")

    def wait_until_said(self, text: str, stream: str = "out") -> None:
        """Wait until it has written a text."""
        wait_for(lambda: text in self.said(stream))

    def ask(self, whom: str, number: int) -> None:
        """Send a signal to one of its processes."""
        os.kill(of_run(run_file(self.config))[whom], number)

    def since_fault(self) -> float:
        """Return the seconds since a planted fault came."""
        return time.time() - run_file(self.config).with_suffix(FAULT).stat().st_mtime

    def end(self, seconds: float = PATIENCE) -> tuple[int, str, str]:
        """Wait until all its processes have ended; return status, output and errors."""
        status = self.process.wait(seconds)
        wait_until_gone(run_file(self.config), seconds)
        return status, self.said("out"), self.said("err")


def start(config: RunFile, ranks: int, *arguments: str, **environment: str) -> Started:
    """Start ``myllm train``; with ``FAULT``, ``FIRST`` or ``ASK``, which ``failing.py`` reads."""
    planted = environment.keys() & {"FAULT", "FIRST", "ASK"}
    module = "tests.helpers.failing" if planted else "dist"
    path = save_run_file(config, run_file(config))
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "train", str(path), "--ranks", str(ranks), *arguments],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=out,
            stderr=err,
        )
    STARTED.append(path)
    return Started(config, process)


def of_processor(seconds: float) -> float:
    """Return how long it takes here and now what takes so long where no core is shared."""
    return seconds * max(1.0, os.getloadavg()[0] / cores())


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def of_run(path: Path) -> dict[str, int]:
    """Return the processes of a run: "launcher", "mpirun", "rank 0", "rank 1" and so on."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if str(path).encode() not in words:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        numbers = [v.split(b"=")[1] for v in variables if v.split(b"=")[0].decode() in RANK]
        if numbers:
            name = f"rank {int(numbers[0])}"
        elif b"-n" in words:
            name = "mpirun"
        else:
            name = "launcher"
        found[name] = int(folder.name)
    return found


def wait_until_gone(path: Path, seconds: float) -> None:
    """Wait until no process of a run is left.

    Raises
    ------
    TimeoutError
        When some still are; they are killed.
    """
    end = time.monotonic() + seconds
    while left := of_run(path):
        if time.monotonic() > end:
            for process in left.values():
                os.kill(process, 9)
            raise TimeoutError(f"still there after {seconds} s: {', '.join(left)}")
        time.sleep(0.05)
