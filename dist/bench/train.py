"""``myllm bench train``: what the trainer itself costs, at the size of the demo.

Every measurement is a whole ``myllm train`` in processes of its own, on ids drawn at random, since
speed does not depend on what the text says. One rank with all threads and two ranks with half of
them each run in turn; the first round also loads or compiles the kernels and is not counted.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.bench import report
from accel.bench.report import Row
from accel.bench.timing import rounds
from accel.system import cores
from dist import config
from dist.monitor import read_metrics
from dist.writer import ShardWriter

STEPS_BEFORE = 5  # of each run, not counted


class Run(NamedTuple):
    """What one run showed, or the medians of several."""

    first_step: float  # seconds from the start of the process to the line of step 1
    step_ms: float  # median
    own_share: float  # of a step: neither backend nor communication
    tokens_per_s: float

    def row(self, what: str) -> Row:
        """Return it as a line of the table."""
        speed = f"{self.tokens_per_s:,.0f} tokens/s"
        note = f"{speed}, own share {self.own_share:.2%}, first step after {self.first_step:.2f} s"
        return Row(what, self.step_ms / 1e3, note=note)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    about = "Measure start-up, the trainer's own time, and ranks against threads."
    p = report.parser("train", about, "train --rounds 5")
    p.add_argument("--rounds", type=int, default=5, help="by turns (5)")
    p.add_argument("--steps", type=int, default=60, help="steps of each run (default 60)")
    p.add_argument("--threads", type=int, default=cores(), help="in all (all cores)")
    given = report.parse(p, argv)
    if given.rounds < 1 or given.steps <= STEPS_BEFORE:
        p.error(f"--rounds must be at least 1, --steps more than {STEPS_BEFORE}")
    if given.threads < 2:
        p.error("two ranks need two threads at least")
    title = f"{report.machine('numpy', 'mpi4py')}, {given.threads} threads: `myllm demo`'s model"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        measure = partial(_measure, Path(folder), given.rounds, given.steps, given.threads)
        return report.run(p, given, title, {"train": measure})


def _measure(folder: Path, n: int, steps: int, threads: int) -> Iterator[Row]:
    """Yield every counted run, then what they come to."""
    model = config.load("demo").model
    writer = ShardWriter(folder / "data", model.vocab_size, 1 << 20)
    windows = steps * config.load("demo").train.global_batch
    ids = np.random.default_rng(0).integers(4, model.vocab_size, windows * model.context_length)
    writer.write(ids.astype(np.int32), None)
    writer.finish(
        vocab_size=model.vocab_size, eos=2, window=None, documents=1, tokenizer_sha256=None
    )
    sides = {
        "one rank": partial(_run, folder, 1, steps, threads),
        f"two ranks of {threads // 2}": partial(_run, folder, 2, steps, threads // 2),
    }
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for k, taken in enumerate(rounds(sides, n + 1)):
        for name, run in taken.items():
            if k:
                runs[name].append(run)
                yield run.row(f"a step, {name}, round {k}")
    yield from summary(runs)


def _run(folder: Path, ranks: int, steps: int, threads: int) -> Run:
    """Train, and read off how fast."""
    data, out = folder / "data", Path(tempfile.mkdtemp(dir=folder))
    settings = [f"data.train={str(data)!r}", "data.heldout=''", f"run.out={str(out)!r}"]
    settings += [
        f"train.steps={steps}",
        "train.warmup_steps=0",
        "run.eval_every=0",
        "run.checkpoint_every=0",
    ]
    command = [sys.executable, "-m", "dist", "train", "demo", "--ranks", str(ranks)]
    command += [word for setting in settings for word in ("--set", setting)]
    env = os.environ | {"MYLLM_THREADS": str(threads)}
    started = time.perf_counter()
    first_step = None
    said = []
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if first_step is None and line.startswith("step "):
                first_step = time.perf_counter() - started
    if process.returncode or first_step is None:
        raise ValueError(f"training with {ranks} ranks failed: {''.join(said[-5:]).strip()}")
    steps_seen = [record for record in read_metrics(out) if "ms" in record][STEPS_BEFORE:]
    return Run(
        first_step,
        statistics.median(record["ms"] for record in steps_seen),
        statistics.median(record["own_ms"] / record["ms"] for record in steps_seen),
        statistics.median(record["tokens_per_s"] for record in steps_seen),
    )


def summary(runs: dict[str, list[Run]]) -> Iterator[Row]:
    """Yield the medians of one rank and of two, and what is promised of them."""
    medians = {name: Run(*map(statistics.median, zip(*r, strict=True))) for name, r in runs.items()}
    for name, median in medians.items():
        yield median.row(f"a step, {name}, median")
    one, two = medians.values()
    yield Row("start to first step, one rank", one.first_step, bar=3.0)
    own = max(one.own_share, two.own_share)
    yield Row("trainer's own share of a step", own, bar=0.02, unit="%")
    speeds = two.tokens_per_s, one.tokens_per_s
    yield Row("tokens of two ranks / of one", *speeds, 0.9, "tokens/s")
