"""``myllm study ablations``: run the experiments and write one page."""

import html
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path

from accel.help import parser
from dist.monitor import duration
from dist.study.ablations import heads, norm_placement, positions
from dist.study.ablations.lab import Finding, Lab, Plot
from dist.use import figure_class
from tokenizer.files import replace_durably

EXPERIMENTS = {"positions": positions, "norm_placement": norm_placement, "heads": heads}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  background: #fff; color: #1b2028; }
svg { width: 100%; height: auto; } table { border-collapse: collapse; margin: .5rem 0; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #d8dce2;
  vertical-align: top; }
.yes { color: #2b8a3e; } .no { color: #c92a2a; } .scroll { overflow-x: auto; }
"""


def run(argv: Sequence[str]) -> int:
    """``myllm study ablations``."""
    args = parser(
        "study ablations",
        "Train small models that differ in one choice, on the sources of Python's own library, and "
        "write one page of plots: positions beyond the trained length, where the norm stands, "
        "key/value heads and feed-forward. Each claim of the literature that it can speak of is "
        "said to hold here or not.",
        "myllm study ablations -o ablations",
    )
    args.add_argument("-o", "--out", type=Path, default=Path("ablations"), help="a folder")
    args.add_argument(
        "--only", action="append", choices=EXPERIMENTS, help="this one (may be repeated)"
    )
    args.add_argument(
        "--share", type=float, default=1.0, help="of the steps: less is faster, and shows less"
    )
    given = args.parse_args(argv)
    if not 0 < given.share <= 10:
        args.error("--share must be in (0, 10]")
    figure_class()  # now rather than after a quarter of an hour
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{duration(time.monotonic() - started)}] {line}", flush=True)

    lab = Lab.of_the_library(say)
    findings: dict[str, Finding] = {}
    for name, experiment in EXPERIMENTS.items():
        if given.only is None or name in given.only:
            findings[name] = experiment.run(lab, given.share)
            # after each, so that what was done is kept when a later one fails or is interrupted
            took = duration(time.monotonic() - started)
            data = json.dumps(findings, indent=1).encode()
            replace_durably(given.out / "ablations.json", data)
            replace_durably(given.out / "ablations.html", page(findings, took).encode())
    for finding in findings.values():
        for claim in finding.claims:
            verdict = "seen here" if claim.holds else "NOT seen here"
            print(f"{verdict}: {claim.says} ({claim.source}) {claim.seen}")
    print(f"{given.out / 'ablations.html'}, {took}")
    return 0


def page(findings: dict[str, Finding], took: str) -> str:
    """Return the page: plots, tables and claims of each experiment."""
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Ablations</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>Ablations</h1><p>Models of bytes on the sources of Python's library, in {took}. "
        "One seed: differences of a few hundredths of a nat may be chance.</p>"
    ]
    for name, finding in findings.items():
        title, _, about = (EXPERIMENTS[name].__doc__ or "").partition("\n\n")
        parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(about.replace('``', ''))}</p>")
        parts.append(draw(finding.plots))
        parts.append(_table(finding.table))
        rows = [
            [claim.says, claim.source, claim.seen, "seen" if claim.holds else "not seen"]
            for claim in finding.claims
        ]
        parts.append(_table([["claim", "source", "here", ""], *rows]))
    return "\n".join(parts)


def _table(rows: list[list[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        kinds = {"seen": ' class="yes"', "not seen": ' class="no"'}
        cells = (f"<{tag}{kinds.get(c, '')}>{html.escape(c)}</{tag}>" for c in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def draw(plots: list[Plot]) -> str:
    """Return plots side by side, as SVG."""
    figure = figure_class()(figsize=(5.2 * max(len(plots), 1.5), 4), layout="constrained")
    for number, plot in enumerate(plots):
        axes = figure.add_subplot(1, len(plots), number + 1)
        for i, curve in enumerate(plot.curves):
            style = "-" if "post" not in curve.label else "--"
            color = f"C{i // 2 if any('post' in c.label for c in plot.curves) else i}"
            axes.plot(curve.x, curve.y, style, color=color, label=curve.label)
        if plot.mark is not None:
            axes.axvline(plot.mark, color="grey", linewidth=0.8, linestyle=":")
        if plot.log:
            axes.set_yscale("log")
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
