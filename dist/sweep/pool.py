"""Runs side by side, each a ``myllm train`` in a process of its own with a share of the cores."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accel import system
from dist.checkpoint import CHECKPOINTS, folder_name, pointed
from dist.config import RunFile
from dist.launch import environment
from dist.monitor import METRICS, read_metrics
from dist.stopping import StopRequest
from tokenizer.files import replace_durably

RUN, LOG = "run.toml", "log.txt"  # what a run was told, and what it said
EVERY = 0.2  # seconds between two looks at the processes


def finished(run: RunFile) -> bool:
    """Whether a run has taken its last step and saved it."""
    out = Path(run.run.out)
    saved = any(r["step"] == run.steps and "save_ms" in r for r in read_metrics(out))
    last = out / CHECKPOINTS / folder_name(run.steps)
    return saved or pointed(last.parent) == last


def last_words(run: RunFile) -> str:
    """Return the last line that a run said."""
    log = Path(run.run.out) / LOG
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def train_all(
    runs: Sequence[RunFile],
    at_once: int,
    stop: StopRequest,
    tell: Callable[[RunFile | None, list[RunFile]], None],
    command: Sequence[str] = ("train",),
) -> None:
    """Train runs, so many at once, until all have ended or a signal came.

    ``tell`` is given a run that has ended, or None now and then, and those under way. ``command``
    is what trains them: the words between ``myllm`` and the run file.
    """
    waiting = list(runs)
    under_way: list[tuple[RunFile, subprocess.Popen[bytes]]] = []
    asked = False
    while waiting or under_way:
        if stop.signal is not None and not asked:
            asked, waiting = True, []
            for _, process in under_way:
                system.ask_to_end(process)
        while waiting and len(under_way) < at_once:
            run = waiting.pop(0)
            under_way.append((run, _start(run, at_once, command)))
        time.sleep(EVERY)
        for run, process in list(under_way):
            if process.poll() is not None:
                if process.returncode < 0:  # it could not say so itself
                    number = -process.returncode
                    with (Path(run.run.out) / LOG).open("a") as log:
                        log.write(f"ended by signal {number} ({signal.strsignal(number)})\n")
                under_way.remove((run, process))
                tell(run, [r for r, _ in under_way])
        tell(None, [r for r, _ in under_way])


def _start(run: RunFile, at_once: int, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    out = Path(run.run.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / RUN
    replace_durably(path, run.to_toml().encode())
    with (out / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dist", *command, str(path)],
            env=environment(at_once),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            **system.out_of_reach(),  # Ctrl-C is handed on, once
            **system.ends_with_us(),
        )


def progress(run: RunFile) -> int:
    """Return the newest step of a run, from the last lines of its metrics, whole or not at all."""
    path = Path(run.run.out) / METRICS
    try:
        lines = path.read_bytes()[-4096:].splitlines()
    except FileNotFoundError:
        return 0
    newest = 0
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            newest = max(newest, int(json.loads(line)["step"]))
    return newest
