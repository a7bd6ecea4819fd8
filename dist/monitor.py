"""What is looked at while training: guards, the console line, ``metrics.jsonl``."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from dist.comm import Comm
from dist.manifest import Count
from reference.ops import Ops

SPIKE_MEMORY = 0.98  # of the running mean and variance that a loss is compared with
METRICS = "metrics.jsonl"


class Memory(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of what was seen of a run."""

    bad_in_a_row: Count = 0  # steps that were not finite
    mean: float = 0.0  # running, of the loss
    variance: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    seen: Count = 0  # losses
    best: float | None = None  # held-out loss


class Guards:
    """Stops a step that is not finite before the optimizer, and the run after too many of them.

    It also compares each loss with those before it: the z-score, logged, shows spikes.
    """

    def __init__(self, patience: int, memory: Memory = Memory()) -> None:  # noqa: B008  (frozen)
        self.patience = patience
        self.bad_in_a_row, self.seen = memory.bad_in_a_row, memory.seen
        self.mean, self.variance = memory.mean, memory.variance

    def remember(self, best: float | None) -> Memory:
        """Return what a checkpoint keeps."""
        return Memory(
            bad_in_a_row=self.bad_in_a_row,
            mean=self.mean,
            variance=self.variance,
            seen=self.seen,
            best=best,
        )

    def look(self, loss: float, finite: bool) -> float | None:
        """Take note of a step and return its z-score, None while there is nothing to compare with.

        Returns None for a step that is not finite, which must not be taken.
        """
        if not finite:
            self.bad_in_a_row += 1
            return None
        self.bad_in_a_row = 0
        spread = math.sqrt(self.variance)
        z = (loss - self.mean) / spread if self.seen >= 10 and spread > 0 else None
        # a running mean that starts as the plain mean of what there is (Welford's update)
        self.seen += 1
        weight = max(1 / self.seen, 1 - SPIKE_MEMORY)
        delta = loss - self.mean
        self.mean += weight * delta
        self.variance = (1 - weight) * (self.variance + weight * delta * delta)
        return z

    @property
    def exhausted(self) -> bool:
        """Whether the run must end."""
        return self.bad_in_a_row >= self.patience


class Metrics:
    """The file ``metrics.jsonl``: one JSON object a line, a step or an evaluation."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Open the file for appending, with what lies behind ``resumed_step`` cut off."""
        self.path = folder / METRICS
        kept = (
            [r for r in read_metrics(folder) if r["step"] <= resumed_step] if resumed_step else []
        )
        part = self.path.with_suffix(".tmp")
        part.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        part.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; a number that is not finite becomes null, which JSON has."""
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        try:
            self._file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def flush(self) -> None:
        """Do nothing: every line is written as it comes."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """The same numbers as event files, for those who look at many runs in TensorBoard."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Begin a file of events; what earlier ones hold behind ``resumed_step`` is void.

        Raises
        ------
        ImportError
            If tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "run.tensorboard needs tensorboardX: pip install 'myllm[tensorboard]', or leave "
                "it false; metrics.jsonl and myllm plot need nothing"
            ) from error
        self._writer = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=resumed_step + 1 if resumed_step else None,
            filename_suffix=f".{resumed_step:08d}",  # two runs may begin in one second
        )

    def write(self, record: dict[str, Any]) -> None:
        """Add every number of a record at its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        """Write what there is: what is in memory is lost when the process is killed."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run; a last line cut short by a crash is left out.

    Raises
    ------
    ValueError
        When another line is damaged.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = msgspec.json.decode(line, type=dict[str, float | bool | None])
            step = record.get("step")
            if step is None or step != int(step):
                raise ValueError("it has no step")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} is damaged: {error}") from error
        records.append({**record, "step": int(step)})
    return records


# ---- speed ---------------------------------------------------------------------------------------


def measure_peak(ops: Ops, comm: Comm, seconds: float = 0.1) -> float:
    """Return the floating-point operations per second of all ranks in large matrix products.

    All ranks measure at once, through the backend's own linear layer, because they share the
    machine: it is what a step could reach if it were nothing but products. A device that multiplies
    matrices of 1,024 rows and columns in 0.2 ms, at 10 TFLOP/s, is given ones large enough to fill
    it.
    """
    fastest = 0.0
    for width in (1024, 8192):
        best = _product_seconds(ops, comm, width, seconds)
        fastest = max(fastest, 2.0 * width**3 / best)
        if any(comm.all_gather(best > 2e-4)):  # together: all measure at once
            break
    return float(sum(comm.all_gather(fastest)))


def _product_seconds(ops: Ops, comm: Comm, width: int, seconds: float) -> float:
    some = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    square = np.tile(some, (width // 1024, width // 1024))
    x = ops.from_numpy(square[None], activation=True)
    master = {"weight": ops.from_numpy(square)}
    weight = ops.parameters(master)["weight"]
    best = math.inf
    with ops.step():
        ops.to_numpy(ops.linear_forward(x, weight)[0])
    comm.barrier()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with ops.step():
            started = time.perf_counter()
            y = ops.linear_forward(x, weight)[0]
            ops.to_numpy(y[:, :1, :1])  # waits for it, where work is asynchronous
            best = min(best, time.perf_counter() - started)
    return best


# ---- the console ---------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return a time as people read it: 59s, 4m07s, 3h02m, 2d05h."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def bytes_text(n: float) -> str:
    """Return a size as people read it, in powers of 1,024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} TiB"


def step_line(record: dict[str, Any], total_steps: int, elapsed: float, eta: float) -> str:
    """Return the one line of a step."""
    width = len(str(total_steps))
    z = record.get("z")
    note = "  SKIPPED: not finite" if record.get("skipped") else ""
    if z is not None and z > 6:
        note += f"  spike: {z:.1f} deviations above the mean"
    return (
        f"step {record['step']:>{width}}/{total_steps}  loss {record['loss']:.4f}  "
        f"norm {record['norm']:.3f}  lr {record['lr']:.2e}  {record['ms']:.0f} ms  "
        f"{record['tokens_per_s']:,.0f} tok/s  {100 * record['utilisation']:.0f}% of peak  "
        f"{bytes_text(record['memory'])}  {duration(elapsed)}  ETA {duration(eta)}{note}"
    )


class Console:
    """Where rank 0 speaks: plain lines, and if ``bar``, a bar below them on a terminal.

    Other ranks have a console that says nothing. Under mpirun there can be no bar: Open MPI gives
    its ranks a terminal of their own making even when the output goes to a file.
    """

    def __init__(self, speaks: bool, total_steps: int, *, bar: bool) -> None:
        self.speaks = speaks
        self._stream = sys.stdout
        self._progress: Any = None
        if speaks and bar and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            console = RichConsole(file=self._stream, highlight=False, soft_wrap=True)
            self._progress = Progress(
                BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), console=console
            )
            self._task = self._progress.add_task("train", total=total_steps)
            self._progress.start()

    def say(self, line: str) -> None:
        """Print a line."""
        if not self.speaks:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False)
        else:
            print(line, file=self._stream, flush=True)

    def at(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
