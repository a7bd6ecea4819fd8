"""What a run computes by, where run.compute, run.attention or run.products is ``"auto"``.

Each mode that the processor offers multiplies matrices of the model's own widths, forward and
backward, for a second; the faster one is taken. So is the faster of a GPU's paths of attention, at
the run's own shapes (``accel/cuda/paths.py``), and of the algorithms of each of its products
(``accel/cuda/products.py``). Rank 0 finds out, once: what was chosen stands in the run's resolved
file and its checkpoints, and a resumed run keeps it, so that its bits stay the same.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from accel import AUTO, DEFAULT, Products, offered
from accel import load as load_backend
from dist import checkpoint
from dist.config import RunFile, from_tables
from reference.ops import Ops

T = TypeVar("T")
SECONDS = 1.0  # of measuring each mode
ROWS = 1024  # of the left operand, at most


def settled(
    run: RunFile, newest: Path | None, compile_products: Callable[[], None] | None = None
) -> tuple[RunFile, str]:
    """Return the run with its mode chosen, and a sentence on that; "" where nothing was open.

    Parameters
    ----------
    run : RunFile
    newest : Path, optional
        The checkpoint that the run goes on from, whose mode it keeps.
    compile_products : callable, optional
        Returns when what is timed is compiled; in place of ``warm.compile_kernels``.
    """
    if run.run.compute != AUTO:
        return run, ""
    if newest is not None:
        before = checkpoint.read_manifest(newest).config["run"]["compute"]
        return in_mode(run, before), f"compute: {before}, as before"
    seconds = measure(run, compile_products)
    best = min(seconds, key=lambda mode: seconds[mode])
    times = ", ".join(f"{mode} {1e3 * t:.1f} ms" for mode, t in seconds.items())
    only = "" if len(seconds) > 1 else ", the only one here"
    return in_mode(run, best), f"compute: {best}{only} (a product of this model: {times})"


def in_mode(run: RunFile, mode: str) -> RunFile:
    """Return the run in a mode."""
    return dataclasses.replace(run, run=dataclasses.replace(run.run, compute=mode))


def attending(run: RunFile, newest: Path | None) -> tuple[RunFile, str]:
    """Return a run whose mode is settled with its path of attention chosen, and a sentence on that.

    Where a run has but one, as all have that do not compute in bf16 on a GPU, it stays open.

    Parameters
    ----------
    run : RunFile
    newest : Path, optional
        The checkpoint that the run goes on from, whose path it keeps.

    Raises
    ------
    ValueError
        When the run names a path that its mode or its heads do not allow.
    """
    asked = run.run.attention
    if run.run.backend != "cuda":
        return run, ""
    from accel.cuda import attention, paths

    shapes = paths.shapes_of(run.model, run.train.micro_batch, documents=run.data.isolate_documents)
    fast = run.run.compute == "bf16" and shapes.fit
    if asked not in (AUTO, attention.PLAIN) and not fast:
        raise ValueError(
            f"run.attention {asked!r} is for bf16 and heads whose width is a multiple of "
            f"{attention.CHUNK} up to {attention.WIDEST}, and the run has {run.run.compute} and "
            f"{run.model.d_head}: leave run.attention at 'auto'"
        )
    if asked != AUTO or not fast:
        return run, ""
    path = AUTO if newest is None else checkpoint.read_manifest(newest).attention
    said = f"attention: {path}, as before"
    if path == AUTO:
        load_backend(run.run.backend, compute=run.run.compute)
        path, said = paths.choose(shapes)
    return dataclasses.replace(run, run=dataclasses.replace(run.run, attention=path)), said


def multiplying(run: RunFile, newest: Path | None) -> tuple[RunFile, str]:
    """Return a run with its products' algorithms chosen, as ``attending`` does its attention's.

    A run that goes on with another model or micro-batch has products of other shapes: it chooses.
    """
    asked = run.run.products
    if run.run.backend != "cuda" or run.run.compute != "bf16" or asked == DEFAULT:
        return run, ""
    from accel.cuda import products
    from accel.cuda.device import current

    made = run.model, run.train.micro_batch, run.run.recompute
    if asked != AUTO:
        load_backend(run.run.backend, compute=run.run.compute, products=asked)
        named = not current().products.keys().isdisjoint(products.of_step(*made))
        none = "products: run.products names none of this run's: by cuBLAS's own choice"
        return run, "" if named else none
    kept: Products = AUTO
    if newest is not None:
        state = checkpoint.read_manifest(newest)
        before = from_tables(state.config)
        if (before.model, before.train.micro_batch) == (run.model, run.train.micro_batch):
            kept = state.products
    whose = "cuBLAS's own choice" if kept == DEFAULT else "algorithms of cublasLt's"
    said = f"products: by {whose}, as before"
    if kept == AUTO:
        load_backend(run.run.backend, compute=run.run.compute)
        kept, said, _ = products.choose(*made)
    return dataclasses.replace(run, run=dataclasses.replace(run.run, products=kept)), said


def measure(run: RunFile, compile_products: Callable[[], None] | None = None) -> dict[str, float]:
    """Return the seconds that a product takes in each mode that this machine offers.

    The modes take turns, so that what else the machine does meets all of them.
    """
    modes = offered(run.run.backend)
    from dist import warm  # which chooses tasks by what this file offers

    (compile_products or partial(warm.compile_kernels, run))()
    timed = {mode: _product(ops, run) for mode, ops in modes.items()}

    def turn() -> dict[str, float]:
        return {mode: once() for mode, once in timed.items()}

    turns = turns_of(turn, SECONDS * len(timed))
    return {mode: statistics.median(times[mode] for times in turns) for mode in timed}


def _product(ops: Ops, run: RunFile) -> Callable[[], float]:
    """Return what multiplies, forward and backward, and tells how long it took."""
    rng = np.random.default_rng(0)
    rows, width = run.train.micro_batch * run.window, run.model.d_model
    x = ops.from_numpy(rng.standard_normal((min(rows, ROWS), width), np.float32), activation=True)
    master = ops.from_numpy(rng.standard_normal((width, run.model.d_ff), np.float32))
    weight = ops.parameters({"weight": master})["weight"]

    def once() -> float:
        started = time.perf_counter()
        with ops.step():
            out, cache = ops.linear_forward(x, weight)
            ops.to_numpy(ops.linear_backward(out, cache)[1])  # waits, where work is asynchronous
        return time.perf_counter() - started

    return once


def turns_of(timed: Callable[[], T], seconds: float) -> list[T]:
    """Return what ``timed`` gives for so long, at least three times, once it loaded or compiled."""
    timed()
    times: list[T] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        times.append(timed())
    return times
