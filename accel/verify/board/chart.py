"""The scoreboard as a picture: what each judge caught, and which right kernels it flagged."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

WRONG, RIGHT = ("unseen", "planted", "mutants"), ("float32", "bf16", "tf32")
CAUGHT, FLAGGED = "#2a7f62", "#c44e52"


def require(p: argparse.ArgumentParser) -> None:
    """End with a sentence where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        p.error("--chart needs matplotlib; pip install 'myllm[plot]'")


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw the counts of a run into a PNG or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "board"}):
        _draw(data, path)


def _draw(data: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    counts = {j: c for j, c in data["counts"].items() if "calls" not in j}
    of = sum(counts["verify"].get(c, [0, 0])[1] for c in WRONG)
    judges = [*counts][::-1]
    caught = [sum(counts[j].get(c, [0, 0])[0] for c in WRONG) / max(of, 1) for j in judges]
    flagged = [
        sum(counts[j].get(c, [0, 0])[0] for c in RIGHT)
        / max(sum(counts[j].get(c, [0, 0])[1] for c in RIGHT), 1)
        for j in judges
    ]
    covered = [sum(counts[j].get(c, [0, 0])[1] for c in WRONG) for j in judges]
    own = [
        f"{s:.1%}" + (f", {s * of / n:.0%} in its ops" if 0 < n < of else "")
        for s, n in zip(caught, covered, strict=True)
    ]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 0.9 + 0.42 * len(judges)), layout="constrained", sharey=True
    )
    for axes, shares, labels, colour, title in (
        (left, caught, own, CAUGHT, f"wrong kernels caught, of {of}"),
        (right, flagged, [f"{s:.1%}" for s in flagged], FLAGGED, "right kernels flagged"),
    ):
        bars = axes.barh(judges, [100 * s for s in shares], color=colour)
        axes.bar_label(bars, labels, padding=3, fontsize=9)
        axes.set_xlim(0, 118)
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
