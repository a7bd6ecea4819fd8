"""What the launcher tells a process of itself, in environment variables.

Hydra (MPICH, Intel), Open MPI and Slurm's ``srun`` each have their own. Slurm's come last: the
daemons of the other two are started by ``srun`` in a Slurm job, and their ranks inherit what was
said to the daemon.
"""

import os
import re

SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
SLURM_SIZES = "SLURM_STEP_TASKS_PER_NODE"  # by machine: "4(x2),3" is 4, 4, 3


def number(name: str) -> int | str:
    """Return an environment variable as a number; as it is where it is none."""
    text = os.environ[name]
    return int(text) if text.isdecimal() and len(text) < 10 else text


def _first(names: tuple[str, ...]) -> int | None:
    values = (number(name) for name in names if name in os.environ)
    return next((value for value in values if isinstance(value, int)), None)


def size() -> int:
    """Return how many ranks were started with this one, itself included; 1 without a launcher."""
    return _first(SIZE) or 1


def local_rank() -> int:
    """Return this process's number among this machine's ranks; 0 without a launcher."""
    return _first(LOCAL_RANK) or 0


def local_size() -> int:
    """Return how many ranks this machine has; 1 without a launcher.

    Raises
    ------
    ValueError
        If the launcher says what is no number of ranks.
    """
    for name in LOCAL_SIZE:
        if os.environ.get(name):
            ranks = number(name)
            break
    else:
        if not os.environ.get(SLURM_SIZES):
            return 1
        name = SLURM_SIZES
        ranks = _of_this_machine(os.environ[name], _first(("SLURM_NODEID",)) or 0)
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"{name} must be the number of ranks here, got {ranks!r}")
    return ranks


def _of_this_machine(text: str, machine: int) -> int | str:
    """Return the entry of a machine in Slurm's list; the list itself where it has none."""
    for item in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        if found is None:
            return text
        machine -= int(found[2] or 1)
        if machine < 0:
            return int(found[1])
    return text
