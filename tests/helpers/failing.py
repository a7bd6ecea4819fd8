"""``myllm`` with a rank that fails in the middle of a step: python failing.py RANK HOW ARGS..."""

import errno
import os
import signal
import sys
from typing import Any

from dist import cli, monitor
from dist.step import Stepper

rank, how = int(sys.argv[1]), sys.argv[2]
original = Stepper.update


def update(self: Stepper, *args: Any, **kwargs: Any) -> None:
    """Fail on one rank before its third update."""
    if self.comm.rank == rank and self.updates == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a fault planted on one rank")
    original(self, *args, **kwargs)


def write(self: monitor.Metrics, record: dict[str, Any]) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


if how == "disk":
    monitor.Metrics.write = write  # type: ignore[method-assign]
else:
    Stepper.update = update  # type: ignore[method-assign]
sys.exit(cli.main(sys.argv[3:]))
