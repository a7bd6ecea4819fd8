"""llm.c's trainer in C beside a training step of ours: GPT-2 small, 4 × 64 tokens, alternating.

Its ``train_gpt2.c`` is compiled as its Makefile does, with OpenMP, and runs in a folder of its own
on files made here: a checkpoint with the weights that ours begins with, and one batch of random
tokens, which both sides see in every step. AdamW's settings are those that its ``main`` has. What
it prints of each step is its loss, to which ours is held, and its time.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accel import load
from accel.bench.report import Row
from accel.bench.timing import check, clocked, rounds
from accel.bench.training import Training
from accel.threads import threads
from reference.config import Config
from reference.presets import GPT2_SMALL
from reference.types import Array

B, T = 4, 64  # as main() has them, like the optimizer's settings
SETTINGS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
FLAGS = ("-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w")
BARS = {"float32": 0.16, "bf16": 0.08}
LIMITS = {"float32": 1e-3, "bf16": 3e-2}  # on the relative difference of losses
STEPS = 5  # of a run; the first touches new memory, and is not counted
# train_gpt2.c reads the last three from here, whatever they hold
CHECKPOINT, TRAIN, HELDOUT = (
    "gpt2_124M.bin",
    "tiny_shakespeare_train.bin",
    "tiny_shakespeare_val.bin",
)
DATA = Path("dev", "data", "tinyshakespeare")
STEP = re.compile(r"step (\d+): train loss (\S+) \(took (\S+) ms\)")


def build(checkout: Path, into: Path) -> Path:
    """Compile ``train_gpt2.c`` and return the program.

    Raises
    ------
    ValueError
        Without a checkout or a compiler, or where it does not compile.
    """
    source = checkout / "train_gpt2.c"
    if not source.is_file():
        raise ValueError(
            f"{checkout} has no train_gpt2.c: give --llmc a checkout of "
            "https://github.com/karpathy/llm.c"
        )
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if compiler is None:
        raise ValueError("there is no C compiler to build llm.c with: install gcc, or set CC")
    program = into / "train_gpt2"
    command = [*compiler.split(), *FLAGS, str(source.resolve()), "-lm", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise ValueError(f"{compiler} did not compile {source}: {done.stderr.strip()[-300:]}")
    return program


def write_checkpoint(path: Path, config: Config, weights: Mapping[str, Array]) -> None:
    """Write weights as ``gpt2_build_from_checkpoint`` reads them, version 3: float32.

    (``dist/convert`` exports checkpoints of ours; this is for weights in memory, and packages
    arrow one way.)
    """
    c, padded = config, -(-config.vocab_size // 128) * 128
    header = np.zeros(256, "<i4")
    header[:8] = (
        20240326,
        3,
        c.context_length,
        c.vocab_size,
        c.n_layers,
        c.n_heads,
        c.d_model,
        padded,
    )
    blocks = [
        *("attention_norm.gain", "attention_norm.bias", "attention.wqkv", "attention.bqkv"),
        *("attention.wo", "attention.bo", "ffn_norm.gain", "ffn_norm.bias"),
        *("ffn.w_up", "ffn.b_up", "ffn.w_down", "ffn.b_down"),
    ]
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(weights["embedding.weight"].tobytes())
        file.write(bytes(4 * c.d_model * (padded - c.vocab_size)))
        file.write(weights["position.weight"].tobytes())
        for name in blocks:
            for layer in range(c.n_layers):
                file.write(weights[f"layers.{layer}.{name}"].T.tobytes())  # theirs are (out, in)
        file.write(weights["final_norm.gain"].tobytes() + weights["final_norm.bias"].tobytes())


def write_inputs(folder: Path, model: Training, tokens: Array) -> None:
    """Write all that the program reads: weights, and one batch as both its texts."""
    write_checkpoint(folder / CHECKPOINT, model.config, model.initial)
    (folder / DATA).mkdir(parents=True)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens.size
    for name in (TRAIN, HELDOUT):
        (folder / DATA / name).write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def steps(program: Path, folder: Path) -> Generator[tuple[float, float], None, None]:
    """Yield the loss and the seconds of each step, and end the program when no more are wanted.

    Raises
    ------
    ValueError
        When it ends by itself.
    """
    ours, theirs = _terminal()
    env = {**os.environ, "OMP_NUM_THREADS": str(threads())}
    with open(ours, encoding="utf-8", errors="replace") as said:
        try:
            process = subprocess.Popen(
                [program], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=theirs,
                stderr=theirs,
            )  # fmt: skip
        finally:
            os.close(theirs)
        last = ""
        try:
            while line := _line(said):
                if found := STEP.search(line):
                    yield float(found[2]), float(found[3]) / 1e3
                last = line.strip() or last
            process.wait()
        finally:
            process.kill()
            process.wait()
    raise ValueError(f"llm.c's trainer ended early (status {process.returncode}): {last}")


def _terminal() -> tuple[int, int]:
    """Return both ends of a terminal: to a pipe C prints only when there is a block of text."""
    if sys.platform == "win32":
        raise ValueError("llm.c's trainer is timed on Linux and macOS")
    return os.openpty()


def _line(terminal: Any) -> str:
    """Return the next line; none when the program has ended, which Linux calls an error."""
    try:
        return str(terminal.readline())
    except OSError:
        return ""


def compare(
    checkout: Path, modes: list[str], *, quick: bool = False, config: Config = GPT2_SMALL
) -> Iterator[Row]:
    """Yield a row for each mode: ours, theirs, and their ratio, medians of alternating runs."""
    wanted = 2 if quick else STEPS
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as at:
        folder = Path(at)
        program = build(checkout, folder)
        models = {mode: Training(load("cpu", compute=mode), config, B, T) for mode in modes}
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, B * T + 1)
        for model in models.values():
            model.settings = SETTINGS
            model.take(*(part.reshape(B, T).astype(np.int32) for part in (tokens[:-1], tokens[1:])))
        write_inputs(folder, next(iter(models.values())), tokens)

        def theirs() -> list[tuple[float, float]]:
            with closing(steps(program, folder)) as run:
                return [next(run) for _ in range(wanted)]

        losses = [loss for loss, _ in theirs()]
        for mode, model in models.items():
            for number, loss in enumerate(losses):
                what = f"our loss of step {number}, {mode},"
                check(what, abs(model.step() / loss - 1), LIMITS[mode], "llm.c's")

        sides: dict[str, Any] = {"llm.c": lambda: [seconds for _, seconds in theirs()[1:]]}
        for mode, model in models.items():
            sides[mode] = partial(lambda step: [clocked(step) for _ in range(wanted)], model.step)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for turn in rounds(sides, 1 if quick else 3):
            for side, seconds in turn.items():
                taken[side] += seconds
    medians = {side: statistics.median(seconds) for side, seconds in taken.items()}
    for mode in modes:
        what = f"a step, {B}·{T} tokens, {mode} / llm.c"
        yield Row(what, medians[mode], medians["llm.c"], BARS[mode])
