"""Asked to stop, by whichever signal and whichever process is asked: soon, in order, no orphans."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dist import checkpoint, launch
from tests.helpers import ROOT
from tests.helpers.processes import (
    PATIENCE,
    STARTED,
    of_processor,
    of_run,
    run_file,
    start,
    wait_for,
    wait_until_gone,
)
from tests.helpers.runs import ENVIRONMENT, losses, prepare, save_run_file

pytestmark = pytest.mark.mpi

CASES = [
    (1, "launcher", signal.SIGTERM),
    (2, "launcher", signal.SIGINT),
    (2, "launcher", signal.SIGUSR1),
    (2, "rank 1", signal.SIGHUP),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (1, "launcher", signal.SIGHUP),
            (1, "launcher", signal.SIGUSR1),
            (2, "launcher", signal.SIGHUP),
            (2, "rank 0", signal.SIGTERM),
            (2, "rank 0", signal.SIGHUP),
            (2, "rank 1", signal.SIGINT),
            (2, "rank 1", signal.SIGUSR1),
        )
    ),
]
LONG = 100_000  # steps: the run ends because it is stopped
SOON = 10  # seconds that are promised


@pytest.mark.parametrize(("ranks", "whom", "number"), CASES)
def test_a_signal_is_answered_with_a_checkpoint(
    tmp_path: Path, ranks: int, whom: str, number: int
) -> None:
    config = prepare(tmp_path, train__steps=LONG)
    run = start(config, ranks)
    wait_for(lambda: len(losses(config)) >= 3)
    asked = time.monotonic()
    run.ask(whom, number)
    status, out, err = run.end()
    assert time.monotonic() - asked < of_processor(SOON)
    assert status == (128 + number if whom == "launcher" else 0), err
    assert "Traceback" not in out + err
    stopped = re.search(r"stopped.* after step (\d+)", out)
    assert stopped is not None
    saved = Path(config.run.out) / "checkpoints" / f"step-{int(stopped[1]):08d}"
    assert (saved / "manifest.json").exists()


def test_an_mpirun_of_one_s_own_hands_sigusr1_on(tmp_path: Path) -> None:
    config = prepare(tmp_path, train__steps=LONG)
    path = save_run_file(config, run_file(config))
    run = subprocess.Popen(
        launch.command(*launch.find_mpirun(), 2, ["train", str(path)]),
        cwd=ROOT,
        env={**launch.environment(2), **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
    )
    STARTED.append(path)
    wait_for(lambda: len(losses(config)) >= 3)
    asked = time.monotonic()
    run.send_signal(signal.SIGUSR1)
    out, _ = run.communicate(timeout=PATIENCE)
    assert time.monotonic() - asked < of_processor(SOON)
    wait_until_gone(path, PATIENCE)
    assert run.returncode == 0 and "stopped after step" in out
    assert checkpoint.steps(Path(config.run.out) / "checkpoints") == [len(losses(config))]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path, ranks: int) -> None:
    config = prepare(tmp_path, train__steps=LONG)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = start(config, ranks)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: len(losses(config)) >= 3)
    for whom in ("launcher", "rank 0", "rank 1")[: ranks * 2 - 1]:
        run.ask(whom, signal.SIGHUP)
    seen = len(losses(config))
    wait_for(lambda: len(losses(config)) >= seen + 20)
    run.ask("launcher", signal.SIGTERM)
    assert run.end()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(("ranks", "whom", "number"), CASES)
def test_a_signal_while_kernels_are_compiled_ends_the_run_at_once(
    tmp_path: Path, ranks: int, whom: str, number: int
) -> None:
    """One rank compiles, the other waits for it in MPI or at the lock of the kernel cache."""
    config = prepare(tmp_path, train__steps=LONG, run__backend="cpu")
    run = start(config, ranks, MYLLM_CACHE_DIR=str(tmp_path / "cold"))
    run.wait_until_said("compiling kernels", "err")
    time.sleep(number / 15)  # other moments of the compilation, which takes over a minute
    asked = time.monotonic()
    run.ask(whom, number)
    status, out, err = run.end()
    assert time.monotonic() - asked < of_processor(SOON)
    assert status == 128 + number
    assert "Traceback" not in out + err
    said = f"stopped by {signal.Signals(number).name} before the first step was finished"
    assert err.count(said) == (0 if whom != "launcher" and number == signal.SIGUSR1 else 1)
    assert not (Path(config.run.out) / "checkpoints").exists()


@pytest.mark.parametrize(
    "moment", [0.6, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.0, 0.3, 1.2))]
)
def test_a_signal_while_ranks_are_started_ends_the_run(tmp_path: Path, moment: float) -> None:
    config = prepare(tmp_path, train__steps=LONG)
    run = start(config, 2)
    wait_for(lambda: "mpirun" in of_run(run_file(config)))
    time.sleep(moment)
    asked = time.monotonic()
    run.ask("launcher", signal.SIGTERM)
    status, out, err = run.end()
    assert time.monotonic() - asked < of_processor(SOON)
    assert status == 128 + signal.SIGTERM
    assert "Traceback" not in out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, 0.3),
        *(
            pytest.param(number, moment, marks=pytest.mark.slow)
            for number in (signal.SIGTERM, signal.SIGHUP)
            for moment in (0.0, 0.1, 0.2, 0.4, 0.6)
        ),
    ],
)
def test_a_signal_to_a_rank_that_is_starting_ends_all(
    tmp_path: Path, number: int, moment: float
) -> None:
    config = prepare(tmp_path, train__steps=LONG)
    run = start(config, 2)
    wait_for(lambda: "rank 1" in of_run(run_file(config)))
    time.sleep(moment)
    run.ask("rank 1", number)
    status, out, err = run.end()
    assert status and "Traceback" not in out + err
    assert "out of memory" not in err or "somebody's signal" in err


def test_a_compilation_that_was_stopped_leaves_a_cache_that_works(tmp_path: Path) -> None:
    cold = {"MYLLM_CACHE_DIR": str(tmp_path / "cold")}
    for seconds in (0, 2, 5, 9):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        run = start(prepare(folder, train__steps=LONG, run__backend="cpu"), 2, **cold)
        run.wait_until_said("compiling kernels", "err")
        time.sleep(seconds)
        run.ask("rank 1", signal.SIGTERM)
        status, out, err = run.end()
        # a processor that has compiled all by then has begun to train, and saves
        assert status == (0 if "stopped by SIGTERM after" in out else 128 + signal.SIGTERM), err
    run = start(prepare(tmp_path, train__steps=2, run__backend="cpu"), 2, **cold)
    status, _, err = run.end(600)
    assert status == 0, err
    assert "damaged" not in err
