"""Nobody reads what a run says, or the disk takes no more of it: the run goes on."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.runs import ENVIRONMENT, losses, prepare, save_run_file

pytestmark = pytest.mark.mpi

STEPS = 40


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, "closed"),
        (2, "reader left"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "reader left"), (1, "full"), (2, "full"), (2, "closed"))
        ),
    ],
)
def test_a_run_that_cannot_speak_goes_on(tmp_path: Path, ranks: int, how: str) -> None:
    config = prepare(tmp_path, train__steps=STEPS)
    words = [sys.executable, "-m", "dist", "train", str(save_run_file(config, tmp_path / "c.toml"))]
    words += ["--ranks", str(ranks)]
    if how == "closed":
        words = ["bash", "-c", '"$@" >&-', "bash", *words]
        out = None
    elif how == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, out = os.pipe()
        os.close(reading)
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    if out is not None:
        os.close(out)
    assert done.returncode == 0, done.stderr
    assert len(losses(config)) == STEPS
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    said = done.stderr.count("nothing more is said on stdout")
    assert said == 1 or (how == "closed" and not done.stderr)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_terminal_that_goes_away_leaves_a_checkpoint(tmp_path: Path, ranks: int) -> None:
    """The bar is drawn by a thread of its own, which must not fail aloud either."""
    config = prepare(tmp_path, train__steps=100_000)
    path = save_run_file(config, tmp_path / "c.toml")
    words = [sys.executable, "-m", "dist", "train", str(path), "--ranks", str(ranks)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        with (tmp_path / "err").open("wb") as err:
            os.dup2(err.fileno(), 2)
        os.execve(sys.executable, words, {**os.environ, **ENVIRONMENT, "TERM": "xterm"})
    said = b""
    while not any(int(step) >= 5 for step in re.findall(rb"step +(\d+)/100000", said)):
        said += os.read(terminal, 4096)
    os.close(terminal)  # the kernel sends SIGHUP
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert (Path(config.run.out) / "checkpoints" / "latest").exists()
    assert "Traceback" not in (tmp_path / "err").read_text()
