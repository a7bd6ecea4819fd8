"""What came of a sweep: results.json, a table, and a plot, with the spread over seeds."""

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from dist import config as run_file
from dist.config import RunFile
from dist.monitor import COLUMNS, duration, read_metrics
from dist.sweep.pool import LOG, RUN, finished, last_words
from dist.sweep.trials import Budget, Trial, belongs, varied
from dist.use import figure_class, save_figure
from reference.flops import training_flops
from reference.params import decoder_layout

RESULTS = "results.json"
HELDOUT = "data.heldout"  # what a score was measured on
TAIL = 0.1  # of the steps, over which the training loss is averaged
SCORES = {  # the first that all finished runs have is what runs are compared by
    "bits_per_byte": "bits per byte, held out",
    "heldout_loss": "loss, held out (nats a token)",
    "loss": "training loss (nats a token)",
}
ENDED = ("finished", "diverged")  # statuses of runs that took all steps


class Cell(NamedTuple):
    """The runs of one setting."""

    settings: dict[str, Any]
    runs: list[dict[str, Any]]  # those that took all steps
    mean: float | None  # of what runs are compared by; None where one of them has diverged
    spread: float | None  # standard deviation over seeds; of one seed, none is known


def earlier(
    out: Path, trials: Sequence[Trial], budget: Budget
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return outcomes of runs of earlier starts, which are none of the trials.

    Those that can be compared with the trials come first; the others are of other keys, another
    budget or another run file.
    """
    path = out / RESULTS
    if not path.exists():
        return [], []
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        known = [
            (Path(run["folder"]).name, dict(run["settings"]), int(run["seed"]), run)
            for run in [*report["runs"], *report.get("others", [])]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what a sweep writes: move it away") from error
    alike, others = [], []
    hashes = {trial.name.rpartition("-")[2] for trial in trials}
    for name, settings, seed, run in known:
        folder = out / "runs" / name
        if name.rpartition("-")[2] in hashes or not folder.exists():
            continue
        if belongs(name, settings, seed, trials[0], budget):
            settings = {key: settings[key] for key in trials[0].settings}
            alike.append(_anew(folder, settings, seed, run))
        else:
            others.append(_anew(folder, settings, seed, run))
    return alike, others


def _anew(
    folder: Path, settings: dict[str, Any], seed: int, before: dict[str, Any]
) -> dict[str, Any]:
    """Return what is known of an earlier run now, or what was, if its run file is of no use."""
    try:
        run = run_file.load(folder / RUN)
    except (ValueError, OSError):
        return {**before, "settings": settings, "folder": str(folder)}
    return outcome(settings, seed, replace(run, run=replace(run.run, out=str(folder))))


def outcome(settings: dict[str, Any], seed: int, run: RunFile) -> dict[str, Any]:
    """Return what is known of a run, for results.json."""
    records = read_metrics(Path(run.run.out))
    steps = [r for r in records if "lr" in r]
    evals = [r for r in records if "heldout_loss" in r]
    status = "begun" if steps else "not begun"
    if finished(run):
        status = "diverged" if diverged(records) else "finished"
    found: dict[str, Any] = {
        "settings": settings,
        "seed": seed,
        "compute": run.run.compute,
        "folder": run.run.out,
        "status": status,
        "parameters": decoder_layout(run.model).size,
        "flops_per_token": training_flops(run.model, run.window, causal=False),
    }
    if status not in ENDED:
        return {**found, "said": last_words(run)} if (Path(run.run.out) / LOG).exists() else found
    losses = [r["loss"] for r in steps[-max(1, round(TAIL * len(steps))) :]]
    known = [loss for loss in losses if loss is not None]
    last = evals[-1] if evals else {}
    return {
        **found,
        "steps": run.steps,
        "tokens": run.steps * run.tokens_per_step,
        "seconds": sum(r["ms"] for r in steps) / 1e3,
        "ms_per_step": statistics.median(r["ms"] for r in steps),
        "loss": statistics.mean(known) if known else None,
        "heldout_loss": last.get("heldout_loss"),
        "bits_per_byte": last.get("bits_per_byte"),
        "heldout": [[r["step"], r["heldout_loss"]] for r in evals],
    }


def diverged(records: Sequence[dict[str, Any]]) -> bool:
    """Whether a run's last loss, of training or held out, or gradient is not finite."""
    last = (
        next((r for r in reversed(records) if key in r), {key: 0.0})[key]
        for key in ("loss", "norm", "heldout_loss")
    )
    return None in last


def figures(run: RunFile) -> str:
    """Return what a finished run reached, in a few words."""
    records = read_metrics(Path(run.run.out))
    if diverged(records):
        return "diverged: its last loss or gradient is not finite"
    last = [r for r in records if "heldout_loss" in r or "lr" in r][-1]
    name = next(key for key in SCORES if last.get(key) is not None)
    return f"{last[name]:.4f} {SCORES[name].partition(' (')[0]}"


def score_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return the key of SCORES by which finished runs can be compared; with none, the last."""
    good = [r for r in runs if r["status"] == "finished"]
    return next((key for key in SCORES if good and all(r[key] is not None for r in good)), "loss")


def cells(outcomes: Sequence[dict[str, Any]]) -> tuple[str, list[Cell]]:
    """Return what runs are compared by, and the settings of those that took all steps, best first.

    A setting of which a run has diverged has no mean.
    """
    done = [r for r in outcomes if r["status"] in ENDED]
    score = score_of(done)
    grouped: dict[str, list[dict[str, Any]]] = {}
    for run in done:
        grouped.setdefault(json.dumps(run["settings"]), []).append(run)
    found = []
    for runs in grouped.values():
        values = [r[score] for r in runs if r["status"] == "finished"]
        mean = statistics.fmean(values) if len(values) == len(runs) else None
        spread = statistics.stdev(values) if mean is not None and len(values) > 1 else None
        found.append(Cell(runs[0]["settings"], runs, mean, spread))
    return score, sorted(found, key=lambda cell: math.inf if cell.mean is None else cell.mean)


def say(text: str) -> None:
    """Print a sentence in lines of ``COLUMNS``."""
    fill = textwrap.TextWrapper(
        COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ).fill
    print(fill(text), flush=True)


def columns(found: Sequence[Cell]) -> dict[str, list[str]]:
    """Return what the table has beside the settings: by the name of a column, a text a row."""
    counts = ("parameters", "steps", "tokens")
    return {
        "score": ["diverged" if cell.mean is None else f"{cell.mean:.4f}" for cell in found],
        "± std": ["" if cell.spread is None else f"{cell.spread:.4f}" for cell in found],
        "seeds": [f"{len(cell.runs)}" for cell in found],
        **{name: [f"{cell.runs[0][name]:,}" for cell in found] for name in counts},
        "time": [duration(statistics.fmean(run["seconds"] for run in cell.runs)) for cell in found],
    }


def table(
    score: str, found: Sequence[Cell], keys: Sequence[str], rest: dict[str, list[str]]
) -> Table:
    """Return the settings as a table, best first, told apart by ``keys``, beside other columns."""
    shown = Table(title=SCORES[score], min_width=len(SCORES[score]))
    for key in keys:
        shown.add_column(key.partition(".")[2], justify="right", overflow="fold")
    for name in rest:
        shown.add_column(name, justify="right", no_wrap=True)
    for cell, *texts in zip(found, *rest.values(), strict=True):
        shown.add_row(*(f"{cell.settings[key]}" for key in keys), *texts)
    return shown


def print_table(score: str, found: Sequence[Cell], keys: Sequence[str]) -> None:
    """Print the table, as wide as the terminal at most, or ``COLUMNS`` where there is none.

    What is the same in all rows, settings beside ``keys`` too, is said once, below. Where there is
    no room, the last columns are left out, and then keys without which the rows still differ,
    before a setting is broken.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    told = columns(found)
    settings = found[0].settings
    same = {key.partition(".")[2]: f"{settings[key]}" for key in settings if key not in keys}
    same |= {n: texts[0] for n, texts in told.items() if n != "score" and len({*texts}) == 1}
    rest = {name: texts for name, texts in told.items() if name not in same}
    shown, left_out = table(score, found, keys, rest), []
    unbounded = console.options.update(width=1 << 20)
    while console.measure(shown, options=unbounded).maximum > console.width:
        if len(rest) > 1:
            left_out.append(rest.popitem()[0])
        elif spare := _spare(found, keys):
            left_out.append(spare.partition(".")[2])
            keys = [key for key in keys if key != spare]
        else:
            break
        shown = table(score, found, keys, rest)
    console.print(shown)
    said = ", ".join(f"{name} {text}" for name, text in same.items() if text)
    if said:
        say(f"in all rows: {said}")
    if left_out:
        say(f"no room for: {', '.join(left_out)}")
    if HELDOUT in varied([cell.settings for cell in found]) and score != "loss":
        say(f"{HELDOUT} differs: only what was measured on the same text can be compared")


def _spare(found: Sequence[Cell], keys: Sequence[str]) -> str | None:
    """Return the last key without which the settings still differ, if there is one."""
    for spare in reversed(keys):
        others = [key for key in keys if key != spare]
        if len({str([cell.settings[key] for key in others]) for cell in found}) == len(found):
            return spare
    return None


def draw(score: str, found: Sequence[Cell], keys: Sequence[str], out: Path) -> None:
    """Draw the score over the first of ``keys``, a line for each combination of the others.

    The values of keys that go together with the first stand beside its own. Points are runs, lines
    go through the means, bars are standard deviations over seeds.
    """
    found = [cell for cell in found if cell.mean is not None]
    first = keys[0] if keys else ""
    pairs = {key: {f"{[c.settings[first], c.settings[key]]}" for c in found} for key in keys}
    beside = [key for key in keys[1:] if len(pairs[key]) == len(pairs[first])]
    others = [key for key in keys[1:] if key not in beside]
    values = [cell.settings.get(first, "all") for cell in found]
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    ticks: list[Any] = sorted(set(values)) if numeric else list(dict.fromkeys(map(str, values)))
    figure = figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    names = {}
    for value, cell in zip(values, found, strict=True):
        texts = [f"{value}", *(f"{cell.settings[key]}" for key in beside)]
        names[value if numeric else str(value)] = ", ".join(texts)
    lines: dict[str, list[tuple[float, Cell]]] = {}
    for value, cell in zip(values, found, strict=True):
        name = ", ".join(f"{key.partition('.')[2]} {cell.settings[key]}" for key in others)
        lines.setdefault(name, []).append((value if numeric else ticks.index(str(value)), cell))
    for number, name in enumerate(sorted(lines, key=lambda name: (len(name), name))):
        points = sorted(lines[name], key=lambda point: point[0])
        color = f"C{number % 10}"
        axes.errorbar(
            [x for x, _ in points],
            [cell.mean for _, cell in points],
            [math.nan if cell.spread is None else cell.spread for _, cell in points],
            color=color,
            capsize=3,
            label=name or None,
        )
        for x, cell in points:
            axes.plot([x] * len(cell.runs), [r[score] for r in cell.runs], ".", color=color)
    if numeric and ticks and ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        axes.set_xscale("log")
    axes.set_xticks(ticks if numeric else range(len(ticks)), [names[tick] for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(", ".join([first, *beside]))
    axes.set_ylabel(SCORES[score])
    axes.grid(alpha=0.3)
    if others:
        axes.legend(fontsize=8)
    save_figure(figure, out)
