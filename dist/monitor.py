"""What is looked at while training: guards, the console line, ``metrics.jsonl``."""

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import msgspec
import numpy as np

from accel import launcher
from dist.comm import Comm, sentence, warn
from dist.lock import still_at
from dist.manifest import Count
from dist.watchdog import Watch
from reference.ops import Ops
from tokenizer.files import replace_durably, writing

SPIKE_MEMORY = 0.98  # of the running mean and variance that a loss is compared with
METRICS = "metrics.jsonl"
COLUMNS = 80  # of a line of the log
SILENT = 20  # times as many steps in a row may be left out for want of a token to be predicted
PEAK_SECONDS = 0.05  # of products of one size, in which the fastest is looked for
BAR = 5  # columns of a terminal that are the bar's


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
        self.patience, self.memory = patience, memory

    def remember(self, best: float | None) -> Memory:
        """Return what a checkpoint keeps."""
        return msgspec.structs.replace(self.memory, best=best)

    @property
    def bad_in_a_row(self) -> int:
        """Steps that were not finite, up to the last."""
        return self.memory.bad_in_a_row

    def look(self, loss: float, finite: bool) -> float | None:
        """Take note of a step and return its z-score, None while there is nothing to compare with.

        Returns None for a step that is not finite, which must not be taken.
        """
        m, change = self.memory, msgspec.structs.replace
        if not finite:
            self.memory = change(m, bad_in_a_row=m.bad_in_a_row + 1)
            return None
        spread, delta = math.sqrt(m.variance), loss - m.mean
        z = delta / spread if m.seen >= 10 and spread > 0 else None
        # a running mean that starts as the plain mean of what there is (Welford's update)
        weight = max(1 / (m.seen + 1), 1 - SPIKE_MEMORY)
        mean = m.mean + weight * delta
        variance = (1 - weight) * (m.variance + weight * delta * delta)
        self.memory = change(m, bad_in_a_row=0, seen=m.seen + 1, mean=mean, variance=variance)
        return z

    def exhausted(self, n_valid: int) -> bool:
        """Whether the run must end, by the tokens that were to be predicted in the last step.

        Of some texts there are none in many a step; that is no fault once others were learned from.
        """
        silent = self.memory.seen and not n_valid
        return self.bad_in_a_row >= self.patience * (SILENT if silent else 1)


class Metrics:
    """The file ``metrics.jsonl``: one JSON object a line, a step or an evaluation."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Read the file; the first record cuts off what lies behind ``resumed_step``."""
        self.path = folder / METRICS
        records = read_metrics(folder) if resumed_step else []
        self._kept = [record for record in records if record["step"] <= resumed_step]
        # whether an evaluation after the step that it goes on from is among them
        self.measured = any(
            record["step"] == resumed_step and "heldout_loss" in record for record in self._kept
        )
        self._file: TextIO | None = None
        self._told = False  # that a record cannot be written

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; a number that is not finite becomes null, which JSON has."""
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        if self._file is None:
            before = "".join(json.dumps(r) + "\n" for r in self._kept)
            replace_durably(self.path, before.encode())
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        try:
            with writing(self.path):
                self._file.write(json.dumps(clean) + "\n")
        except OSError:
            self._told = True
            raise

    def flush(self) -> None:
        """Have every line on the disk, as what they tell of will be.

        Where the file was taken away meanwhile, the lines that follow go to one of its name.
        """
        if self._file is None:
            return
        with writing(self.path):
            os.fsync(self._file.fileno())
            if not still_at(self.path, self._file.fileno()):
                warn(f"{self.path} was removed or moved: another one has what follows")
                self._file.close()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file; that what is left cannot be written is told once."""
        if self._file is not None:
            with contextlib.suppress(*[OSError] * self._told):
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
            raise ValueError(
                f"line {number} of {path} is damaged: {error}; take it out, or move the file away"
            ) from error
        records.append({**record, "step": int(step)})
    return records


# ---- speed ---------------------------------------------------------------------------------------


def measure_peak(ops: Ops, comm: Comm) -> float:
    """Return the floating-point operations per second of all ranks in large matrix products.

    All ranks measure at once, through the backend's own linear layer, because they share the
    machine: it is what a step could reach if it were nothing but products. On a busy machine small
    ones find a moment without others sooner. A device that multiplies matrices of 1,024 rows and
    columns in 0.2 ms, at 10 TFLOP/s, is given ones large enough to fill it.
    """
    fastest = 0.0
    for width in (512, 1024, 8192):
        best = _product_seconds(ops, comm, width)
        fastest = max(fastest, 2.0 * width**3 / best)
        # together: all measure at once
        if width == 1024 and any(comm.all_gather(best > 2e-4)):
            break
    return float(sum(comm.all_gather(fastest)))


def _product_seconds(ops: Ops, comm: Comm, width: int) -> float:
    some = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    square = np.tile(some, (width // 512, width // 512))
    x = ops.from_numpy(square[None], activation=True)
    master = {"weight": ops.from_numpy(square)}
    weight = ops.parameters(master)["weight"]
    best = math.inf
    with ops.step():
        ops.to_numpy(ops.linear_forward(x, weight)[0])
    comm.barrier()
    end = time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < end:
        with ops.step():
            started = time.perf_counter()
            y = ops.linear_forward(x, weight)[0]
            ops.to_numpy(y[:, :1, :1])  # waits for it, where work is asynchronous
            best = min(best, time.perf_counter() - started)
    return best


def filled(text: str) -> str:
    """Return a text as wide as a terminal; lines that begin with a space are commands, say."""
    return "\n".join(
        line
        if line.startswith(" ")
        else textwrap.fill(line, COLUMNS, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


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


def step_line(
    record: dict[str, Any], total_steps: int, eta: float | None, columns: int = COLUMNS
) -> str:
    """Return the line of a step, with what has room there; ``metrics.jsonl`` has more."""
    loss, norm, width = record["loss"], record["norm"], len(str(total_steps))
    parts = [
        f"step {record['step']:>{width}}/{total_steps}",
        f"loss {loss:.4f}" if not abs(loss) >= 1e3 else f"loss {loss:.4g}",
        gradient := f"norm {norm:.3f}" if not abs(norm) >= 1e3 else f"norm {norm:.3g}",
        speed := f"{record['tokens_per_s']:,.0f} tok/s",
        peak := f"{100 * record['utilisation']:.0f}% peak",
        *([] if eta is None else [f"ETA {duration(eta)}"]),
    ]
    for part in (peak, speed, gradient):
        if len("  ".join(parts)) > columns:
            parts.remove(part)
    return "  ".join(parts)


def remark(record: dict[str, Any]) -> str | None:
    """Return a sentence on a step that was not as the others, None of one that was."""
    if record.get("skipped"):
        why = "loss or gradient was not finite"
        if not record["n_valid"]:
            why = "none of its tokens is to be predicted"
        return f"step {record['step']}: SKIPPED, {why}"
    z = record.get("z")
    if z is not None and z > 6:
        return f"step {record['step']}: the loss is a spike, {z:.1f} deviations above its mean"
    return None


class Output:
    """A stream that may be lost without the run: its reader leaves, or the disk is full.

    Then one sentence on stderr says so, and what is written is forgotten; ``metrics.jsonl`` keeps
    every step.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: closed before Python started

    def write(self, text: str) -> int:
        """Write, as long as that works."""
        return self._try(lambda stream: stream.write(text)) or len(text)

    def flush(self) -> None:
        """Flush, as long as that works."""
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether there is a terminal."""
        return bool(self._try(lambda stream: stream.isatty()))

    def _try(self, use: Callable[[TextIO], Any]) -> Any:
        if self._stream is None:
            return None
        try:
            return use(self._stream)
        except OSError as error:
            # what Python still holds of it would fail again at the end
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream = None
            say_lost(error)
            return None


def say_lost(error: OSError) -> None:
    """Say that nothing more can be said on stdout."""
    warn(f"nothing more is said on stdout ({sentence(error)}); training goes on: see {METRICS}")


class Console:
    """Where rank 0 speaks: on a terminal above a bar that moves with every step, else in lines.

    Other ranks have a console that says nothing. Whether there is a terminal our own launcher says
    in ``$MYLLM_TERMINAL``, its width in columns and its name, by which a width that changes is
    known: ranks under mpirun cannot see it, and Open MPI gives them one of its own making even when
    the output goes to a file. Since that passes on whole lines alone, its ranks write to the
    terminal themselves.
    """

    def __init__(self, speaks: bool, total_steps: int, watch: Watch, *, every: int) -> None:
        self.speaks, self._watch = speaks, watch
        self._stream = Output(sys.stdout)
        self._total, self._every = total_steps, every
        self._progress: Any = None
        self._terminal: TextIO | None = None  # where it is not this process's own
        if speaks and launcher.size() > 1:
            with contextlib.suppress(OSError):  # it has gone
                self._terminal = open(_told()[1], "w", encoding="utf-8")
        if self._terminal is not None and "OMPI_COMM_WORLD_SIZE" in os.environ:
            self._stream = Output(self._terminal)
        if speaks and self._columns():
            from rich.console import Console as RichConsole
            from rich.console import ConsoleDimensions
            from rich.progress import BarColumn, Progress, TextColumn

            class Wide(RichConsole):
                """As wide as the terminal is now: a longer line would leave parts of itself."""

                size = property(lambda _: ConsoleDimensions(self._columns() or COLUMNS, 25))

            console = Wide(
                file=cast(TextIO, self._stream),
                force_terminal=True,
                highlight=False,
                emoji=False,
                soft_wrap=True,
            )
            self._progress = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(None), console=console
            )
            self._task = self._progress.add_task("", total=total_steps)

    def _columns(self) -> int:
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):  # it has gone, or is closed
                return os.get_terminal_size(self._terminal.fileno()).columns or _told()[0]
        return terminal_columns(self._stream)

    def say(self, line: str) -> None:
        """Print a line."""
        if not self.speaks:
            return
        with self._watch.speaking():
            if self._progress is not None:
                self._progress.console.print(line, markup=False)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()

    def step(self, record: dict[str, Any], eta: float | None) -> None:
        """Tell of a step: in the bar, or in a line if it is its turn; ``eta`` None: not known."""
        columns = COLUMNS if self._progress is None else min(COLUMNS, self._columns() - BAR)
        line, step = step_line(record, self._total, eta, columns), record["step"]
        if self._progress is not None:
            with self._watch.speaking():  # it waits for a line that is being written
                self._progress.start()  # not before: until then a signal ends the process at once
                self._progress.update(self._task, completed=step, description=line)
        elif step % self._every == 0 or step in (1, self._total):
            self.say(line)
        said = remark(record)
        if said is not None:
            self.say(said)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                self._terminal.close()


def terminal_columns(stream: Output) -> int:
    """Return how wide the terminal is that this process speaks to; 0 where there is none."""
    if launcher.size() > 1:
        # of Open MPI's ranks only the console's own line reaches the terminal as it moves
        return 0 if "OMPI_COMM_WORLD_SIZE" in os.environ else _told()[0]
    return shutil.get_terminal_size().columns if stream.isatty() and not _dumb() else 0


def _dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


def _told() -> tuple[int, str]:
    """Return the columns and the name of the launcher's terminal, as far as it has told them."""
    width, _, name = ("" if _dumb() else os.environ.get("MYLLM_TERMINAL", "")).partition(":")
    return int(width) if width.isdecimal() else 0, name
