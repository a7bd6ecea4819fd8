"""Starting ranks on this machine: what mpirun is told, and what it may end."""

import os
import pty
import signal
import subprocess
from typing import IO, Any

import psutil
import pytest

from dist import launch
from dist.stopping import NOHUP, StopRequest


def test_the_launcher_knows_both_kinds_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    words = launch.command("mpirun", "openmpi", 8, ["train", "x"])
    assert words[:3] == ["mpirun", "-n", "8"] and words[-2:] == ["train", "x"]
    for flag in ("--bind-to", ":OVERSUBSCRIBE", "--allow-run-as-root"):
        assert flag in words
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in launch.command("mpirun", "openmpi", 8, [])
    assert "-bind-to" in launch.command("mpirun", "mpich", 2, [])
    monkeypatch.delenv("MYLLM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert launch.environment(2)["MYLLM_THREADS"] == "4"
    assert launch.environment(16)["MYLLM_THREADS"] == "1"


def test_a_terminal_without_a_name_here_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another namespace, as in a container."""

    def nameless(descriptor: int) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("os.ttyname", nameless)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    monkeypatch.delenv("MYLLM_TERMINAL", raising=False)
    assert launch.environment(1)["MYLLM_TERMINAL"].endswith(":")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", ["mpich", "openmpi"])
def test_the_launcher_leaves_ignored_what_its_caller_ignores(
    monkeypatch: pytest.MonkeyPatch, kind: str, terminal: bool
) -> None:
    """It hears the others before it starts anything, and tells ranks of the terminal."""
    handlers: list[object] = []
    environments: list[Any] = []

    class Process:
        pid = os.getpid()

        def __init__(self, *words: object, **options: object) -> None:
            self.stdout, self.stderr = open(os.devnull, "rb"), open(os.devnull, "rb")
            handlers.extend(signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM))
            environments.append(options["env"])

        def wait(self, timeout: float) -> int:
            return 0

    monkeypatch.delenv("MYLLM_TERMINAL", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(launch, "find_mpirun", lambda: ("mpirun", kind))
    monkeypatch.setattr("subprocess.Popen", Process)
    monkeypatch.setattr(launch, "_kill_all", lambda others: None)  # of the tests' own process
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    reads, screen = pty.openpty()
    with open(reads, "rb"), open(screen, "w", encoding="utf-8") as stdout:
        name = os.ttyname(screen)
        if terminal:
            monkeypatch.setattr("sys.stdout", stdout)
        try:
            assert launch.launch(2, []) == 0
        finally:
            signal.signal(signal.SIGHUP, before)
    assert handlers[0] == signal.SIG_IGN and callable(handlers[1])
    assert environments[0].get("MYLLM_TERMINAL") == (f"80:{name}" if terminal else None)
    # Open MPI's ranks do not inherit it
    assert (NOHUP in environments[0]) == (kind == "openmpi")
    assert NOHUP not in os.environ


def test_what_is_ignored_is_not_heard_but_sigusr1_is() -> None:
    """A run of one rank leaves that ignored, and what its process starts inherits it."""
    ignored = signal.SIGHUP, signal.SIGUSR1
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        assert set(StopRequest.heard()) == set(StopRequest.SIGNALS) - {signal.SIGHUP}
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "exit 9",
            "a rank was ended by SIGKILL (out of memory, perhaps, or somebody's signal); the same",
        ),
        ("exit 137", "a rank was ended by SIGKILL (out of memory, perhaps, or somebody's signal)"),
        ("exit 139", "a rank was ended by SIGSEGV; the same command goes on from the newest"),
        ("exit 1", ""),
        ("exit 2", ""),
    ],
)
def test_what_a_rank_died_of_is_said(
    script: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "find_mpirun", lambda: ("mpirun", "mpich"))
    monkeypatch.setattr(launch, "command", lambda *given: ["sh", "-c", script])
    assert launch.launch(2, []) == int(script.split()[1])
    said = capsys.readouterr().err
    assert says in said and bool(says) == bool(said)
    for words in (["--from", "step-2"], ["--from=step-2"]):
        launch.launch(2, words)
        assert ("the same command without --from goes on" in capsys.readouterr().err) == bool(says)


def test_of_ranks_that_a_signal_ended_nobody_says_that_they_crashed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"trap '' USR1; kill -TERM {os.getpid()}; sleep 0.5; exit 9"
    monkeypatch.setattr(launch, "find_mpirun", lambda: ("mpirun", "mpich"))
    monkeypatch.setattr(launch, "command", lambda *given: ["sh", "-c", script])
    assert launch.launch(2, []) == 128 + signal.SIGTERM
    assert "SIGKILL" not in capsys.readouterr().err


def test_what_ran_before_outlives_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own helpers, say; but not what mpirun leaves behind."""
    before = subprocess.Popen(["sleep", "60"])
    words = ["sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $!"]
    said: list[bytes] = []

    def pass_on(file: IO[bytes], target: int) -> None:
        with file:
            said.append(file.read())

    monkeypatch.setattr(launch, "find_mpirun", lambda: ("mpirun", "mpich"))
    monkeypatch.setattr(launch, "command", lambda *given: words)
    monkeypatch.setattr(launch, "_pass_on", pass_on)
    try:
        assert launch.launch(2, []) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            before.wait(0.2)
    finally:
        before.kill()
        before.wait()
    left = psutil.Process().children()
    assert int(b"".join(said)) not in {p.pid for p in left if p.status() != psutil.STATUS_ZOMBIE}
