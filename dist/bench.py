"""``myllm bench train``: what the trainer itself costs, at the size of the demo.

Every measurement is a whole ``myllm train`` in processes of its own, on ids drawn at random, since
speed does not depend on what the text says. One rank with all threads and two ranks with half of
them each run in turn; the first round also loads or compiles the kernels and is not counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist import config, launch
from dist.monitor import read_metrics
from dist.writer import ShardWriter

STEPS_BEFORE = 5  # of each run, not counted
BARS = {  # what is promised: (limit, whether less is better)
    "start to first step, one rank, s": (3.0, True),
    "trainer's own share of a step": (0.02, True),
    "tokens/s, two ranks / one": (0.9, False),
}


class Run(NamedTuple):
    """What one run showed."""

    first_step: float  # seconds from the start of the process to the line of step 1
    step_ms: float  # median
    own_share: float  # of a step: neither backend nor communication
    tokens_per_s: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(
        prog="myllm bench train",
        description="Measure start-up, the trainer's own time, and ranks against threads.",
        epilog="example: myllm bench train --rounds 5",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default 60)")
    parser.add_argument("--threads", type=int, default=launch.cores(), help="in all (all cores)")
    given = parser.parse_args(argv)
    if given.rounds < 1 or given.steps <= STEPS_BEFORE:
        parser.error(f"--rounds must be at least 1, --steps more than {STEPS_BEFORE}")
    if given.threads < 2:
        parser.error("two ranks need two threads at least")
    with tempfile.TemporaryDirectory() as folder:
        one, two = _measure(Path(folder), given.rounds, given.steps, given.threads)
    _print_table(one, two, given.threads)
    return 0


def _measure(folder: Path, rounds: int, steps: int, threads: int) -> tuple[list[Run], list[Run]]:
    """Return the counted runs of one rank and of two."""
    model = config.load("demo").model
    writer = ShardWriter(folder / "data", model.vocab_size, 1 << 20)
    windows = steps * config.load("demo").train.global_batch
    ids = np.random.default_rng(0).integers(4, model.vocab_size, windows * model.context_length)
    writer.write(ids.astype(np.int32), None)
    writer.finish(
        vocab_size=model.vocab_size, eos=2, window=None, documents=1, tokenizer_sha256="none"
    )
    runs: dict[int, list[Run]] = {1: [], 2: []}
    for k in range(rounds + 1):
        for ranks in (1, 2) if k % 2 == 0 else (2, 1):
            out = folder / f"run-{ranks}-{k}"
            runs[ranks].append(_run(folder / "data", out, ranks, steps, threads // ranks))
    return runs[1][1:], runs[2][1:]


def _run(data: Path, out: Path, ranks: int, steps: int, threads: int) -> Run:
    """Train, and read off how fast."""
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
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


def _print_table(one: list[Run], two: list[Run], threads: int) -> None:
    print(f"the model of `myllm demo`, {threads} threads; medians of {len(one)} runs\n")
    print(f"{'':26}{'ms a step':>12}{'tokens/s':>12}{'own share':>12}{'first step':>12}")
    for name, runs in (("one rank", one), (f"two ranks of {threads // 2}", two)):
        ms, speed, own, first = (
            statistics.median(getattr(run, field) for run in runs)
            for field in ("step_ms", "tokens_per_s", "own_share", "first_step")
        )
        print(f"{name:26}{ms:12.1f}{speed:12,.0f}{own:12.2%}{first:10.2f} s")
    print(f"\n{'against the bars':34}{'is':>10}{'bar':>10}")
    for name, value in _figures(one, two).items():
        limit, less = BARS[name]
        met = value <= limit if less else value >= limit
        bar = f"{'<=' if less else '>='} {limit:g}"
        print(f"{name:34}{value:10.3g}{bar:>10}  {'met' if met else 'MISSED'}")


def _figures(one: list[Run], two: list[Run]) -> dict[str, float]:
    return {
        "start to first step, one rank, s": statistics.median(run.first_step for run in one),
        "trainer's own share of a step": max(
            statistics.median(run.own_share for run in runs) for runs in (one, two)
        ),
        "tokens/s, two ranks / one": statistics.median(
            b.tokens_per_s / a.tokens_per_s for a, b in zip(one, two, strict=True)
        ),
    }
