"""``myllm`` with a fault on one rank: FAULT="RANK WHERE HOW" python -m tests.helpers.failing ARGS.

``FIRST``, in the environment, is how long the first piece of work of a kind, and the start of MPI,
may last, and ``SLOW`` how long one takes that is slow. ``ASK`` is a folder: before each fsync a
file is made there, and what was to be fsynced waits until somebody has removed it.
"""

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dist.train
from dist import cli, comm, launch, monitor, saving, watchdog
from dist.step import Stepper
from reference.types import Loss
from tests.helpers.processes import FAULT

PLACES: dict[str, tuple[Any, str]] = {
    "start": (dist.train.Trainer, "_open"),
    "step": (Stepper, "update"),
    "evaluation": (dist.train, "evaluate"),
    "checkpoint": (saving, "_write_slices"),
    "prune": (saving, "prune"),
    "finish": (comm.Mpi, "finish"),
    "metrics": (monitor.Metrics, "write"),
}


def is_rank(number: int) -> bool:
    """Tell whether this is a rank, and which."""
    return os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == str(number)


def fail(how: str) -> None:
    """Fail in one of many ways; "slow" is none of them."""
    Path(sys.argv[2]).with_suffix(FAULT).touch()
    match how:
        case "raise":
            raise RuntimeError("a fault planted on one rank")
        case "ENOSPC" | "EROFS" | "EIO":
            number = getattr(errno, how)
            raise OSError(number, os.strerror(number), "the-file")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            while True:
                pass
        case "read":
            os.read(os.pipe()[0], 1)
        case "hold":  # the interpreter, in a call that does not return
            ctypes.PyDLL(None).sleep(1000)
        case "slow":
            time.sleep(float(os.environ.get("SLOW", "5")))
        case "late":
            time.sleep(5)
            raise RuntimeError("a fault planted on one rank")


def plant(number: int, where: str, how: str) -> None:
    """Put a fault at the third call of a function, the first where there is no third."""
    owner, name = PLACES[where]
    original: Callable[..., Any] = getattr(owner, name)
    left = 3 if where == "step" else 1

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and is_rank(number):
            fail(how)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def spoil(number: int, where: str, value: float) -> None:
    """Spoil the loss, the gradient or the weights of the third micro-batch of a rank."""
    original, left = Stepper._micro_batch, 3

    def faulty(self: Stepper, batch: Any, leaf: Any, *args: Any) -> Loss:
        nonlocal left
        left -= 1
        mine = left == 0 and is_rank(number)
        if mine and where == "weights":
            self.master[7] = value
        loss = original(self, batch, leaf, *args)
        if mine and where == "gradient":
            leaf[7] = value
        return loss._replace(total=value) if mine and where == "loss" else loss

    Stepper._micro_batch = faulty  # type: ignore[method-assign]


def ask_before_fsync(folder: Path) -> None:
    """Have every fsync wait for somebody who looks at what it finds on the disk."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        asked = folder / f"{os.getpid()}-{threading.get_ident()}"
        asked.touch()
        while asked.exists():
            time.sleep(0.001)
        sync(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


plain = launch.command


def command(*args: Any) -> list[str]:
    """Have the launcher start ranks with the same fault."""
    return [
        word.replace("dist", __spec__.name) if word == "dist" else word for word in plain(*args)
    ]


if __name__ == "__main__":
    launch.command = command
    if "FIRST" in os.environ:
        watchdog.FIRST = watchdog.FLOOR = float(os.environ["FIRST"])
    if "ASK" in os.environ:
        ask_before_fsync(Path(os.environ["ASK"]))
    if "FAULT" in os.environ:
        rank, where, how = os.environ["FAULT"].split()
        if where == "teardown":  # when MPI has ended
            status = cli.main(sys.argv[1:])
            if is_rank(int(rank)):
                fail(how)
            sys.exit(status)
        elif how in ("nan", "inf"):
            spoil(int(rank), where, float(how))
        else:
            plant(int(rank), where, how)
    sys.exit(cli.main(sys.argv[1:]))
