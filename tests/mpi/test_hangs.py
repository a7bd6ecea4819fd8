"""A rank that hangs is noticed, named and ended with all others; one that is slow is left alone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist import launch
from dist.config import RunFile
from dist.watchdog import LAST_WORDS
from tests.helpers import ROOT
from tests.helpers.processes import (
    of_processor,
    of_run,
    run_file,
    start,
    wait_for,
    wait_until_gone,
)
from tests.helpers.runs import ENVIRONMENT, digest, losses, prepare, save_run_file, with_run

pytestmark = pytest.mark.mpi

QUICK = {"run__timeout": 2.0, "train__steps": 100_000}


def stacks(config: RunFile) -> str:
    return (Path(config.run.out) / "stacks.txt").read_text()


@pytest.mark.parametrize(
    ("rank", "where", "how", "ranks"),
    [
        (0, "step", "stop", 2),
        (1, "evaluation", "spin", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, "step", "stop", 4),
                (1, "step", "spin", 2),
                (0, "step", "read", 2),
                (1, "step", "hold", 2),
                (1, "start", "spin", 2),
                (1, "evaluation", "stop", 2),
                (0, "checkpoint", "read", 2),
                (1, "finish", "stop", 2),
            )
        ),
    ],
)
def test_a_rank_that_hangs_is_named_and_all_end(
    tmp_path: Path, rank: int, where: str, how: str, ranks: int
) -> None:
    steps = 6 if where == "finish" else QUICK["train__steps"]
    config = prepare(
        tmp_path,
        **{**QUICK, "train__steps": steps},
        run__eval_every=4,
        run__checkpoint_every=6,
    )
    run = start(config, ranks, FAULT=f"{rank} {where} {how}", FIRST="2")
    status, out, err = run.end()
    assert run.since_fault() < of_processor(config.run.timeout + LAST_WORDS)
    assert status != 0
    assert err.count("hangs: ") == 1, err
    assert re.search(rf"rank {rank} hangs: .* step \d+ \(\w+\), \w+ collective \d+ \(\w+\)", err)
    other = next(r for r in range(ranks) if r != rank)
    assert re.search(rf"rank {other} waits at step \d+ \(\w+\), in collective \d+ \(\w+\)", err)
    assert str(Path(config.run.out) / "stacks.txt") in err
    said = stacks(config)
    for r in range(ranks):
        tells = r != rank or how in ("spin", "read")
        assert f"rank {r} at " in said or not tells  # Open MPI wakes the stopped before it kills
    if how in ("spin", "read"):
        assert "failing.py" in said
    assert "Traceback" not in out + err


def test_a_stopped_mpirun_is_ended_with_its_ranks(tmp_path: Path) -> None:
    config = prepare(tmp_path, **QUICK)
    run = start(config, 2)
    wait_for(lambda: len(losses(config)) >= 3)
    run.ask("mpirun", signal.SIGSTOP)
    status, _, err = run.end()
    assert status == 1
    assert err.count("mpirun (process") == 1 and "has been stopped for 2 s" in err


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_all_is_done_is_ended(tmp_path: Path) -> None:
    """Then nobody watches, and mpirun waits for it."""
    config = prepare(tmp_path, run__timeout=2.0)
    whole = with_run(config, out=str(tmp_path / "whole"))
    assert start(whole, 2).end()[0] == 0
    status, _, err = start(config, 2, FAULT="1 teardown stop").end()
    assert status == 1
    assert re.search(r"1 of 2 ranks ended \d+ s ago, .* waits for .*process \d+, stopped", err)
    assert digest(config) == digest(whole)


@pytest.mark.slow
def test_a_launcher_that_cannot_end_is_ended_by_the_rank_that_fails(tmp_path: Path) -> None:
    """Open MPI's and MPICH's wait for machines that do not answer; here mpirun is stopped."""
    config = prepare(tmp_path)
    path = save_run_file(config, run_file(config))
    words = launch.command(*launch.find_mpirun(), 2, [])[:-1]
    run = subprocess.Popen(
        [*words, "tests.helpers.failing", "train", str(path)],
        cwd=ROOT,
        env={**launch.environment(2), **ENVIRONMENT, "FAULT": "1 checkpoint late"},
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: len(losses(config)) >= 6)
    run.send_signal(signal.SIGSTOP)
    assert run.wait(60) == -signal.SIGKILL
    wait_until_gone(path, 30)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "where",
    ["prune", *(pytest.param(w, marks=SLOW) for w in ("start", "evaluation", "checkpoint"))],
)
def test_a_slow_first_time_is_no_hang(tmp_path: Path, where: str) -> None:
    """It takes three seconds where two are allowed, as compiling kernels may."""
    config = prepare(tmp_path, run__timeout=2.0, run__eval_every=4, run__checkpoint_every=6)
    status, _, err = start(config, 2, FAULT=f"0 {where} slow", SLOW="3").end()
    assert status == 0, err


def test_a_run_that_was_suspended_goes_on(tmp_path: Path) -> None:
    config = prepare(tmp_path, **QUICK)
    run = start(config, 2, FIRST="2")
    wait_for(lambda: len(losses(config)) >= 3)
    ranks = [pid for name, pid in of_run(run_file(config)).items() if name.startswith("rank")]
    for _ in range(2):
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    seen = len(losses(config))
    wait_for(lambda: len(losses(config)) >= seen + 20)
    run.ask("launcher", signal.SIGTERM)
    assert run.end()[0] == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_reader_may_pause_the_run(tmp_path: Path) -> None:
    """What it says fills all pipes on the way; nothing is wrong with the rank that waits then."""
    config = prepare(tmp_path, **{**QUICK, "train__steps": 6000})
    words = [sys.executable, "-m", "dist", "train", str(save_run_file(config, run_file(config)))]
    run = subprocess.Popen(
        [*words, "--ranks", "2"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
    )
    wait_for(lambda: len(losses(config)) >= 3)
    seen = -1
    while seen != len(losses(config)):
        seen = len(losses(config))
        time.sleep(2)
    time.sleep(4)
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert b"step 6000/6000" in out
    assert seen < 6000 or launch.find_mpirun()[1] == "openmpi"  # which keeps what nobody reads
