"""What every benchmark prints, writes and draws: rows, each the moment it is measured."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import math
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accel.help import parser as command_parser

HEAD = ("what", "ours", "other", "ratio", "bar", "")
WIDTHS = (61, 10, 10, 6, 14, 0)


class Row(NamedTuple):
    """One line of the table."""

    what: str
    ours: float
    theirs: float | None = None
    bar: float | None = None  # promised of the ratio, or of ours where there is no other
    unit: str = "s"  # s, B, % (of fractions), or what is printed as it is
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return None if self.theirs is None else self.ours / self.theirs

    @property
    def met(self) -> bool:
        """Whether the promise is kept: at least the bar by a rate, at most by anything else."""
        if self.bar is None:
            return True
        value = self.ours if self.ratio is None else self.ratio
        return value >= self.bar if "/s" in self.unit else value <= self.bar

    def __str__(self) -> str:
        def quantity(value: float | None) -> str:
            return "" if value is None else _quantity(value, self.unit)

        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        bar = ""
        if self.bar is not None:
            promised = f"{self.bar:.2f}" if self.ratio is not None else quantity(self.bar)
            sign = "≥" if "/s" in self.unit else "≤"
            bar = f"{sign} {promised} {'met' if self.met else 'MISSED'}"
        return _line(self.what, quantity(self.ours), quantity(self.theirs), ratio, bar, self.note)


def _quantity(value: float, unit: str) -> str:
    """Return a value in three digits or more; infinity stands for what never came."""
    if math.isinf(value):
        return "never"
    scales = {"s": (1e3, "ms"), "B": (2**-20, "MiB"), "%": (100, "%")}
    scale, unit = (1, unit) if unit == "s" and value >= 10 else scales.get(unit, (1, unit))
    value *= scale
    digits = 3 - min(3, max(0, int(math.log10(max(value, 1e-9))) + 1))
    return f"{value:,.{0 if unit == 'MiB' else digits}f} {unit}"


def _line(*cells: str) -> str:
    """Return a line of a Markdown table, padded to be read as it is."""
    padded = [
        f"{cell:<{width}}" if i in (0, 5) else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def machine(*packages: str) -> str:
    """Return a line that says what the figures are taken on, with the versions of packages."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            s for s in info.read_text(encoding="utf-8").splitlines() if s.startswith("model name")
        ]
        name = models[0].split(":")[1].strip() if models else name
    versions = [
        f"{package} {importlib.metadata.version(package)}"
        if importlib.util.find_spec(package)
        else f"no {package}"
        for package in packages
    ]
    return ", ".join([name, *versions])


def parser(name: str, about: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark: with ``--table`` and ``--chart``."""
    p = command_parser(f"bench {name}", about, f"myllm bench {example}")
    p.add_argument("--table", type=Path, help="a file for the table, in Markdown; it grows")
    p.add_argument("--chart", type=Path, help="a PNG or SVG file for a bar chart of the ratios")
    return p


def parse(p: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments, once what they name can be written."""
    given = p.parse_args(argv)
    for path in (given.table, given.chart):
        if path is not None and not path.resolve().parent.is_dir():
            p.error(f"there is no folder {path.parent} to write to")
    if given.chart is not None:
        if given.chart.suffix not in (".png", ".svg"):
            p.error("--chart takes a .png or .svg file")
        if importlib.util.find_spec("matplotlib") is None:
            p.error("--chart needs matplotlib; pip install 'myllm[plot]'")
    return given


def run(
    p: argparse.ArgumentParser,
    given: argparse.Namespace,
    about: str,
    parts: Mapping[str, Callable[[], Iterable[Row]]],
) -> int:
    """Measure part after part and return the exit status.

    A row is printed, and written to ``--table``, the moment it is there. A part that raises a
    ``ValueError`` ends, the others are measured; an interruption ends the run and keeps all rows.
    """
    rows: list[Row] = []
    status = 0
    with contextlib.ExitStack() as stack:
        files = [sys.stdout]
        if given.table is not None:
            files.append(stack.enter_context(given.table.open("w", encoding="utf-8")))

        def say(line: str) -> None:
            for file in files:
                print(line, file=file, flush=True)

        say(f"{about}\n\n{_line(*HEAD)}")
        say(
            "|"
            + "|".join("-" * (width + 1) + "-:"[0 < i < 5] for i, width in enumerate(WIDTHS))
            + "|"
        )
        try:
            for part, measure in parts.items():
                print(f"measuring {part} …", file=sys.stderr, flush=True)
                try:
                    for row in measure():
                        rows.append(row)
                        say(str(row))
                except ValueError as error:
                    print(f"{p.prog}: {error}", file=sys.stderr)
                    status = 1
        except KeyboardInterrupt:
            count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
            kept = "" if given.table is None or not rows else f", which {given.table} keeps"
            print(f"\n{p.prog}: interrupted after {count}{kept}", file=sys.stderr)
            status = 130
    if given.chart is not None:
        chart(rows, given.chart)
    return status


def chart(rows: list[Row], path: Path) -> None:
    """Draw the ratios as bars, with the promise as a mark, into a PNG or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn = [row for row in rows if row.ratio is not None][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.3 * len(drawn)), layout="constrained")
    colours = ["#2a7f62" if row.met else "#c44e52" for row in drawn]
    axes.barh([row.what for row in drawn], [row.ratio or 0 for row in drawn], color=colours)
    for y, row in enumerate(drawn):
        if row.bar is not None:
            axes.plot([row.bar, row.bar], [y - 0.45, y + 0.45], color="black", linewidth=2)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("ours / the other; black: the promise")
    axes.margins(y=0.01)
    figure.savefig(path)
    plt.close(figure)
