"""What launchers say, as each of them was seen, or is documented, to say it."""

import os

import pytest

from accel import launcher

SLURM_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "11",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = {**SLURM_JOB, "SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
DAEMON = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "PMI", "MPI_", "OMPI_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("said", "size", "local_rank", "local_size"),
    [
        ({}, 1, 0, 1),
        (HYDRA, 8, 1, 4),
        (OPEN_MPI, 8, 1, 4),
        (SLURM_JOB, 1, 0, 1),  # a job's script, which starts the ranks
        ({**STEP, "SLURM_LOCALID": "3"}, 11, 3, 4),
        ({**STEP, "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}, 11, 2, 4),
        ({**STEP, "SLURM_NODEID": "2", "SLURM_LOCALID": "2", "PMIX_RANK": "10"}, 11, 2, 3),
        ({**DAEMON, **HYDRA}, 8, 1, 4),
        ({**DAEMON, **OPEN_MPI}, 8, 1, 4),
    ],
)
def test_every_launcher_is_understood(
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, str],
    size: int,
    local_rank: int,
    local_size: int,
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert (launcher.size(), launcher.local_rank(), launcher.local_size()) == (
        size,
        local_rank,
        local_size,
    )


@pytest.mark.parametrize("text", ["x", "4(x2", "4(x2),3", "0", "9" * 5000])
def test_a_list_that_does_not_say_it_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", text)
    monkeypatch.setenv("SLURM_NODEID", "3")
    if text == "0":
        monkeypatch.setenv("SLURM_NODEID", "0")
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE must be the number of ranks"):
        launcher.local_size()
