"""``myllm bench convert``: seconds and memory of export and import, beside copying the same file.

The model has the shape of a preset and weights drawn at random. Each conversion is a process of its
own, as people start it, and takes turns with a copy of what was written (``shutil.copyfile``, then
``fsync``, since exports and imports end when all is on the disk). What is read was read before, so
it comes from the system's cache on both sides. What was written the turn before is removed, and the
system given seconds to hand the memory that held it to whom it pleases (a virtual machine's to its
host), so that all find memory for files in the same state. Medians are taken; memory is the most
that the process had resident, beyond what it had when it began.

A file of fewer bits is shorter than the checkpoint that an export reads all the same. So each
conversion also stands beside a copy of as many bytes as it reads and writes.
"""

import os
import shutil
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
from accel.threads import threads
from dist import config
from dist.commands import add_set
from dist.convert.families import LLM_C
from dist.weights import Part, write_weights
from reference.config import Config
from reference.params import decoder_layout
from reference.types import Array

FORMATS = {
    "safetensors": ("", "float32"),
    "safetensors-bf16": ("", "bf16"),
    "gguf": (".gguf", "float32"),
    "gguf-bf16": (".gguf", "bf16"),
    "gguf-q8_0": (".gguf", "q8_0"),
    "llm.c": (".bin", "float32"),
}
SETTLING = 4.0  # seconds
SLOWEST = 2.0  # times as long as copying the file: at least half of its speed
SPARE = 500e6  # bytes, besides 1.2 times the largest parameter
WORK = """
import sys
from dist import cli
from reference.memory import memory

cli.loaded(sys.argv[1])
before = memory()
status = cli.main(sys.argv[1:])
print("needed", memory() - before)
sys.exit(status)
"""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    about = "Time export and import beside copying the same file, and take their memory."
    p = report.parser("convert", about, "convert myllm-1b --formats safetensors,gguf-q8_0")
    p.add_argument("preset", nargs="?", default="laptop", metavar="PRESET", help="laptop (default)")
    add_set(p)
    p.add_argument("--formats", help=f"of {', '.join(FORMATS)} (all that express the model)")
    p.add_argument("--rounds", type=int, default=3, help="by turns (3)")
    p.add_argument("--folder", type=Path, help="on the disk to be used (the system's for such)")
    given = report.parse(p, argv)
    if given.rounds < 1:
        p.error("--rounds must be at least 1")
    shape = config.load(given.preset, given.overrides).model
    chosen = [name for name in FORMATS if name != "llm.c" or not LLM_C.differs(shape)]
    if given.formats:
        chosen = given.formats.split(",")
    if unknown := [name for name in chosen if name not in FORMATS]:
        p.error(f"no format {unknown[0]!r}; known: {', '.join(FORMATS)}")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        _write(folder / "mine", shape)
        parts = {
            f"{given.preset}, {kind}": partial(_measure, folder, shape, kind, given.rounds)
            for kind in chosen
        }
        size = decoder_layout(shape).size
        about = f"{report.machine('numpy')}, {threads()} threads, {size:,} parameters"
        return report.run(p, given, about, parts)


def _write(path: Path, shape: Config) -> None:
    """Write a checkpoint with weights drawn at random."""
    rng = np.random.default_rng(0)

    def draw(part: Part, out: Array) -> None:
        rng.random(out=out, dtype=np.float32)
        out -= np.float32(0.5)

    write_weights(path, shape, draw, None)


def _measure(folder: Path, shape: Config, kind: str, n: int) -> Iterator[Row]:
    suffix, dtype = FORMATS[kind]
    theirs, again = f"theirs{suffix}", f"again{suffix}"
    sides = {
        "export": partial(_converted, folder, ["export", "mine", again, "--dtype", dtype], again),
        "import": partial(_converted, folder, ["import", theirs, "-o", "back"], "back"),
        "copy": partial(_copied, folder / theirs, folder / "copy"),
    }
    sides["export"]()
    (folder / again).rename(folder / theirs)
    sides["copy"]()  # reads it
    taken = list(rounds(sides, n))
    file = _size(folder / theirs)
    other = {"export": _size(folder / "mine"), "import": _size(folder / "back")}
    _remove(folder / theirs)
    seconds = {k: statistics.median(turn[k].seconds for turn in taken) for k in sides}
    most = max(spec.size for _, spec in decoder_layout(shape).offsets.values())
    for what in ("export", "import"):
        yield Row(f"{kind}: {what} / copying", seconds[what], seconds["copy"], SLOWEST)
        both = (file + other[what]) / (2 * file)  # bytes, to those of a copy
        yield Row(f"{kind}: {what} / copying as many bytes", seconds[what], both * seconds["copy"])
        needed = max(turn[what].memory for turn in taken)
        yield Row(f"{kind}: {what}, memory", needed, bar=1.2 * 4 * most + SPARE, unit="B")


class Taken(NamedTuple):
    """What something took."""

    seconds: float
    memory: int = 0  # bytes


def _converted(folder: Path, words: list[str], made: str) -> Taken:
    _cleared(folder / made)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", WORK, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise ValueError(said[-1])
    return Taken(seconds, int(done.stdout.split("needed ")[1]))


def _copied(source: Path, target: Path) -> Taken:
    _cleared(target)
    began = time.perf_counter()
    target.mkdir()
    for file in _files(source):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("r+b") as copy:
            os.fsync(copy.fileno())
    return Taken(time.perf_counter() - began)


def _files(path: Path) -> list[Path]:
    return [*path.iterdir()] if path.is_dir() else [path]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _cleared(path: Path) -> None:
    """Remove what the turn before wrote, and let the system do with its memory what it does."""
    if path.exists():
        _remove(path)
        time.sleep(SETTLING)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
