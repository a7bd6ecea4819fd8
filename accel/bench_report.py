"""What ``accel/bench.py`` prints and draws."""

import math
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.threads import threads


class Row(NamedTuple):
    """One line of the table."""

    part: str
    what: str
    bar: float | None  # what the ratio is promised to be at most
    ours: float  # seconds, or bytes
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return None if self.theirs is None else self.ours / self.theirs


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table; the other is PyTorch where nothing else is said."""
    lines = ["| what | ours | other | ratio | bar |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        bar = "" if row.bar is None else f"≤ {row.bar:.2f}"
        ours, theirs = (
            "" if value is None else _quantity(row.part, value) for value in (row.ours, row.theirs)
        )
        lines.append(f"| {row.what} | {ours} | {theirs} | {ratio} | {bar} |")
    return "\n".join(lines)


def _quantity(part: str, value: float) -> str:
    if part == "memory":
        return f"{value / 2**20:.0f} MiB"
    digits = 3 - min(3, max(0, int(math.log10(max(value * 1e3, 1e-9))) + 1))
    return f"{value * 1e3:.{digits}f} ms"


def chart(rows: list[Row], path: Path) -> None:
    """Draw the ratios as bars, with the promise as a mark, into a PNG or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn = [row for row in rows if row.ratio is not None][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.3 * len(drawn)), layout="constrained")
    colours = ["#2a7f62" if r.bar is None or (r.ratio or 0) <= r.bar else "#c44e52" for r in drawn]
    axes.barh([row.what for row in drawn], [row.ratio or 0 for row in drawn], color=colours)
    for y, row in enumerate(drawn):
        if row.bar is not None:
            axes.plot([row.bar, row.bar], [y - 0.45, y + 0.45], color="black", linewidth=2)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("ours / the other; black: the promise")
    axes.margins(y=0.01)
    figure.savefig(path)
    plt.close(figure)


def about() -> str:
    """Return a line that says what the figures were taken on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    torch = sys.modules.get("torch")
    version = f"PyTorch {torch.__version__}" if torch else "no PyTorch"
    return f"{name}, {threads()} threads, NumPy {np.__version__}, {version}"
