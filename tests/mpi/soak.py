"""Random faults at random moments of a small run, each followed by a resume.

    python -m tests.mpi.soak --minutes 10 --seed 1
    python -m tests.mpi.soak --minutes 10 --seed 1 --mpi openmpi    needs an environment with it

Each run goes to its end through as many faults as it takes, on two or four ranks after each. Then
its weights, moments and state are compared with those of a run on one rank that nothing disturbed.
A hang is a fault after which some process was still there, and nothing was learned, for ``HUNG``
seconds: some faults come with the end of a run, and a busy machine is slow. Lost are
checkpoints that were there before a fault and are not after it, and steps behind the checkpoint of
a run that was asked to stop and did.
"""

import argparse
import collections
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dist import checkpoint
from dist.config import RunFile
from dist.launch import find_mpirun
from dist.monitor import METRICS
from tests.helpers.processes import Started, of_run, run_file, start
from tests.helpers.runs import digest, losses, prepare, with_run

HUNG = 150  # on a machine with other things to do
PLACES = ("start", "step", "evaluation", "checkpoint", "prune", "finish")
FAULTS = (
    *("kill rank", "kill mpirun", "kill launcher", "kill all"),
    *("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"),
    *("stop rank", "stop mpirun", "exception", "no room", "damage"),
)


class Soak:
    """Counts what faults do.

    Parameters
    ----------
    folder : Path
    seed : int
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        config = prepare(folder, train__steps=300, run__eval_every=45, run__checkpoint_every=5)
        self.config = with_run(config, timeout=3.0, keep=3)
        assert start(self.config, 1).end(600)[0] == 0
        self.whole = digest(self.config)
        self.injections: collections.Counter[str] = collections.Counter()
        self.hangs = self.lost = self.differing = self.runs = 0

    def run(self, number: int, end: float) -> None:
        """Take one run to its end, through faults while there is time."""
        config = with_run(self.config, out=f"{self.config.run.out}{number}")
        begin: tuple[str, ...] = ()
        while True:
            fault = self.random.choice(FAULTS) if time.monotonic() < end else "none"
            if fault == "damage":
                begin = begin or self.damage(config)  # what is damaged already is known by one file
                continue
            ranks = self.random.choice((2, 2, 4))
            before = checkpoint.pointed(Path(config.run.out) / "checkpoints")
            environment = {"FIRST": "10", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
            if fault == "exception":
                rank = self.random.randrange(ranks)
                environment["FAULT"] = f"{rank} {self.random.choice(PLACES)} raise"
                self.injections[fault] += 1
            run = start(config, ranks, *begin, **environment)
            if fault not in ("none", "exception"):
                if self.random.random() < 0.3:  # while it starts
                    time.sleep(self.random.uniform(0.3, 4))
                else:
                    self.wait(run, steps=1)
                    time.sleep(self.random.uniform(0, 2))
                self.inject(run, fault)
            try:
                self.wait(run)
                status, out, err = run.end(30)
            except (subprocess.TimeoutExpired, TimeoutError) as error:
                self.say(f"HANG {number} {fault}: {error}\n{run.said('err')[-2000:]}")
                self.say(run.said()[-500:])
                self.hangs += 1
                run.process.kill()
                run.process.wait()
                continue
            after = checkpoint.pointed(Path(config.run.out) / "checkpoints")
            # a run that is set back may end between where it began and where it was
            least = begin[-1] if begin else before.name if before else ""
            if after != before:
                begin = ()
            if least and (after is None or after.name < least):
                self.lost += 1
                self.say(f"LOST {number} {fault}: {least} -> {after}")
            if "stopped after step" in out or "stopped by" in out:
                steps = len(losses(config))
                if after is None or after.name != checkpoint.folder_name(steps):
                    self.lost += 1
                    self.say(f"LOST {number} {fault}: step {steps}, but {after}")
            if status == 0 and after and after.name == checkpoint.folder_name(config.steps):
                break
            if fault == "none":
                self.say(f"FAILED {number}: {status} {err}")
                self.lost += 1
                return
        self.runs += 1
        if digest(config) != self.whole:
            self.differing += 1
            self.say(f"DIFFERENT {number}")

    def wait(self, run: Started, steps: int = 1_000_000) -> None:
        """Wait until a run has ended or learned some steps, for as long as it learns."""

        def size() -> int:
            return metrics.stat().st_size if metrics.exists() else 0

        metrics = Path(run.config.run.out) / METRICS
        seen, since = size(), time.monotonic()
        while steps and run.process.poll() is None and time.monotonic() < since + HUNG:
            time.sleep(0.1)
            if size() != seen:
                seen, since, steps = size(), time.monotonic(), steps - 1

    def inject(self, run: Started, fault: str) -> None:
        """Do one thing to one process of the run, or to all."""
        there, end = of_run(run_file(run.config)), time.monotonic() + 20
        while not any(name.startswith("rank") for name in there):  # a busy machine is slow
            if run.process.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.1)
            there = of_run(run_file(run.config))
        ranks = [name for name in there if name.startswith("rank")]
        verb, _, whom = fault.partition(" ")
        if fault in ("no room", "stop rank", "kill rank"):
            targets = [self.random.choice(ranks)] if ranks else []
        elif fault == "kill all":
            targets = list(there)
        elif whom:
            targets = [whom] if whom in there else []
        else:
            targets = [self.random.choice(["launcher", *ranks])]
        if targets:
            self.injections[fault] += 1
        for target in targets:
            try:
                if fault == "no room":
                    resource.prlimit(there[target], resource.RLIMIT_FSIZE, (2000, 2000))
                elif verb == "kill":
                    os.kill(there[target], signal.SIGKILL)
                elif verb == "stop":
                    os.kill(there[target], signal.SIGSTOP)
                else:
                    os.kill(there[target], signal.Signals[fault])
            except (ProcessLookupError, KeyError):
                pass  # it has just ended

    def damage(self, config: RunFile) -> tuple[str, ...]:
        """Flip a bit of the newest checkpoint; return the words that choose the one before."""
        folder = Path(config.run.out) / "checkpoints"
        newest = checkpoint.pointed(folder)
        older = [
            s for s in checkpoint.steps(folder) if newest and folder / f"step-{s:08d}" < newest
        ]
        if newest is None or not older:
            return ()
        path = newest / self.random.choice(["master.bin", "m.bin", "v.bin", "manifest.json"])
        data = bytearray(path.read_bytes())
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        path.write_bytes(data)
        self.injections["damage"] += 1
        status, _, err = start(config, 2).end()
        if status != 1 or str(path) not in err or "Traceback" in err:
            self.differing += 1
            self.say(f"ACCEPTED {path}: {status} {err}")
        return ("--from", checkpoint.folder_name(older[-1]))

    def say(self, text: str) -> None:
        """Print at once."""
        print(text, flush=True)

    def summary(self) -> str:
        """Return the figures."""
        each = ", ".join(f"{fault} {n}" for fault, n in sorted(self.injections.items()))
        return (
            f"{sum(self.injections.values())} injections ({each}) in {self.runs} runs: "
            f"{self.hangs} hangs, {self.lost} lost, {self.differing} differing"
        )


def main() -> int:
    """Soak until the time is up."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--minutes", type=float, default=10)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--mpi", choices=("mpich", "openmpi"), help="must be what is installed")
    given = args.parse_args()
    kind = find_mpirun()[1]
    if given.mpi not in (None, kind):
        args.error(f"this environment has {kind}")
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.seed)
        number = 0
        while time.monotonic() < end:
            number += 1
            soak.run(number, end)
            soak.say(f"{kind} seed {given.seed}: {soak.summary()}")
    return 1 if soak.hangs or soak.lost or soak.differing else 0


if __name__ == "__main__":
    sys.exit(main())
