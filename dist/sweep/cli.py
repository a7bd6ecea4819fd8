"""``myllm sweep``."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel import AUTO, COMPUTE
from accel import load as load_backend
from accel.bench.report import machine
from accel.help import minutes, parser
from accel.system import cores
from dist import config as run_file
from dist import mode, monitor, warm
from dist.commands import add_set
from dist.config import RunFile
from dist.lock import locked
from dist.stopping import StopRequest
from dist.sweep import results
from dist.sweep.pool import RUN, finished, last_words, progress, train_all
from dist.sweep.trials import Budget, Trial, parse_axis, trials_of, varied
from dist.use import figure_class
from tokenizer.files import check_folder, replace_durably

PROBE_STEPS = 10  # that tell how long a step takes
LENGTHS = ("steps", "warmup_steps", "decay_steps")  # of [train]: what a budget sets
BUDGETS = {
    "steps": "optimizer steps of each run",
    "tokens": "tokens that each run reads",
    "flops": "floating-point operations of each run's training, as `myllm plan` counts them",
    "minutes": "minutes of each run, by the speed of a few steps beside the other runs",
}


def main(argv: Sequence[str]) -> int:
    """``myllm sweep``."""
    args = parser(
        "sweep",
        "Train small runs that differ in a few keys of a run file, several at once, and compare "
        "them. Given again, it goes on: finished runs are kept, more values or seeds add to them.",
        "myllm sweep laptop --grid train.lr=5e-4,1e-3,2e-3 --seeds 3 --minutes 2 -o lr\n"
        "  myllm sweep laptop --grid model.d_model=192,384 model.d_ff=512,1024 \\\n    --grid "
        "train.lr=1e-3,2e-3 --tokens 2e6",
    )
    args.add_argument("config", metavar="CONFIG", help="a TOML run file, or a preset's name")
    args.add_argument(
        "--grid",
        action="append",
        nargs="+",
        default=[],
        metavar="TABLE.KEY=VALUE,VALUE",
        help="values to try; the keys of one --grid go together, several are combined",
    )
    args.add_argument("--seeds", type=int, default=1, help="runs of each setting (default 1)")
    budget = args.add_mutually_exclusive_group()
    for kind, about in BUDGETS.items():
        kind_of = minutes if kind == "minutes" else float
        budget.add_argument(f"--{kind}", type=kind_of, metavar="N", help=about)
    args.add_argument(
        "--jobs", type=int, default=cores(), help="runs at once, which share the cores (all cores)"
    )
    args.add_argument("-o", "--out", type=Path, default=Path("sweep"), help="a folder (sweep)")
    add_set(args)
    given = args.parse_args(argv)
    if given.seeds < 1 or given.jobs < 1:
        args.error("--seeds and --jobs must be at least 1")
    limit = Budget()
    for kind in BUDGETS:
        amount = getattr(given, kind)
        if amount is not None:
            if not 0 < amount < math.inf or (kind == "steps" and amount != int(amount)):
                what = "a whole number" if kind == "steps" else "a number"
                args.error(f"--{kind} must be {what} above 0")
            limit = Budget(kind, amount)
    check_folder(given.out)
    axes = [parse_axis(words) for words in given.grid]
    overrides = [*given.overrides, *_settled(given.config, given.overrides, given.out)]
    trials = trials_of(given.config, overrides, axes, given.seeds, limit, given.out)
    _prepare(trials)
    stop = StopRequest()
    stop.learned = True  # it waits until each run has saved what there is
    with locked(given.out, "sweep"), stop.listening():
        return Sweep(trials, given.jobs, limit, given.out).run(stop)


def _settled(path: str, overrides: Sequence[str], out: Path) -> list[str]:
    """Return what settles ``run.compute = "auto"`` for all runs, those of earlier starts too."""
    run = run_file.load(path, overrides)
    if run.run.compute != AUTO:
        return []
    kept = out / "compute"
    if kept.exists():
        found = kept.read_text(encoding="utf-8", errors="replace").strip()
        if found not in COMPUTE:
            raise ValueError(f"{kept} must hold one of {', '.join(COMPUTE)}, got {found!r:.40}")
        said = f"compute: {found}, as before"
    else:
        run, said = mode.settled(run, None)
        found = run.run.compute
        out.mkdir(parents=True, exist_ok=True)
        replace_durably(kept, f"{found}\n".encode())
    print(said)
    return [f"run.compute={found}"]


def _prepare(trials: Sequence[Trial]) -> None:
    """Find out what is missing here, and compile, before any run starts."""
    figure_class()  # now rather than when all have ended
    kinds = {repr((replace(t.run.run, out="-"), t.run.model)): t.run for t in trials}
    for run in kinds.values():
        r = run.run
        load_backend(r.backend, compute=r.compute, attention=r.attention, products=r.products)
        warm.compile_kernels(run)


def cost(run: RunFile) -> str:
    """Return all that decides how long a step of a run takes."""
    train, r = run.train, run.run
    batch = (train.global_batch, train.micro_batch, run.data.isolate_documents)
    how = (r.backend, r.compute, r.attention, r.products, r.recompute, run.optim.kind)
    return repr((run.model, batch, how))


class Sweep:
    """A sweep in progress."""

    def __init__(self, trials: list[Trial], jobs: int, limit: Budget, out: Path) -> None:
        self.trials, self.jobs, self.limit, self.out = trials, jobs, limit, out
        self.labels = {trial.run.run.out: trial.label for trial in trials}
        self.earlier, self.others = results.earlier(out, trials, limit)
        self.left_out: dict[str, str] = {}  # folder -> why the run is not begun
        self.ended = 0
        self.columns = monitor.terminal_columns(monitor.Output(sys.stdout))

    def run(self, stop: StopRequest) -> int:
        """Do what is left to do, and show what came of all."""
        if self.limit.kind == "minutes":
            self._measure(stop)
        left = [
            t.run for t in self.trials if not finished(t.run) and t.run.run.out not in self.left_out
        ]
        self.ended = len(self.trials) - len(left)
        before = self.ended - len(self.left_out)
        results.say(
            f"{len(self.trials)} runs in {self.out}, {before} of them finished before; "
            f"{self.jobs} at once, each on {max(1, cores() // self.jobs)} of {cores()} cores"
        )
        self._write()  # so that no run is forgotten if this process is killed
        if stop.signal is None:
            train_all(left, self.jobs, stop, self._tell)
        return self._report(stop)

    def _measure(self, stop: StopRequest) -> None:
        """Let each setting take a few steps, and give its runs the steps of the minutes.

        Settings whose steps cost the same get as many, by the steps of all of them. One of which a
        run was begun keeps that one's steps, and so do those that cost what it does.
        """
        probes: dict[str, RunFile] = {}
        begun = self._begun()
        lengths = [begun.get(json.dumps(t.settings)) or begun.get(cost(t.run)) for t in self.trials]
        for trial, known in zip(self.trials, lengths, strict=True):
            run, name = trial.run, json.dumps(trial.settings)
            if name not in probes and known is None:
                out = str(self.out / "probes" / trial.name)
                train = replace(run.train, steps=PROBE_STEPS, warmup_steps=0, decay_steps=1)
                where = replace(run.run, out=out, eval_every=0, eval_windows=1, sample_every=0)
                probes[name] = replace(run, train=train, run=where)
        left = [run for run in probes.values() if not finished(run)]
        if left:
            print(f"speed: {len(left)} settings take {PROBE_STEPS} steps each", flush=True)
        train_all(left, self.jobs, stop, lambda ended, under_way: None)
        if stop.signal is not None:
            return
        took: dict[str, list[float]] = {}  # of steps that cost the same, in ms
        for probe in filter(finished, probes.values()):
            steps = [r["ms"] for r in monitor.read_metrics(Path(probe.run.out)) if "ms" in r]
            took.setdefault(cost(probe), []).extend(steps[2:])
        for number, (trial, known) in enumerate(zip(self.trials, lengths, strict=True)):
            run = trial.run
            if known is not None:
                train = replace(run.train, **known)
                self.trials[number] = trial._replace(run=replace(run, train=train))
                continue
            probe = probes[json.dumps(trial.settings)]
            if not finished(probe):
                self.left_out[trial.run.run.out] = last_words(probe)
                results.say(
                    f"{trial.label}: NOT begun, as its first steps failed: {last_words(probe)}"
                )
                continue
            seconds = statistics.median(took[cost(probe)]) / 1e3
            self.trials[number] = trial._replace(run=self.limit.apply(run, seconds))

    def _begun(self) -> dict[str, dict[str, Any]]:
        """Return how long runs are that were begun, by their settings and by what a step costs."""
        found = {}
        runs = [(run["settings"], run["folder"]) for run in self.earlier]
        for settings, folder in [*runs, *((t.settings, t.run.run.out) for t in self.trials)]:
            path = Path(folder) / RUN
            if path.exists():
                run = run_file.load(path)
                found[json.dumps(settings)] = {key: getattr(run.train, key) for key in LENGTHS}
                found.setdefault(cost(run), found[json.dumps(settings)])
        return found

    def _tell(self, ended: RunFile | None, under_way: list[RunFile]) -> None:
        if ended is not None:
            self._show("")
            self.ended += 1
            good = finished(ended)
            said = results.figures(ended) if good else f"NOT finished: {last_words(ended)}"
            results.say(f"{self.ended}/{len(self.labels)} {self.labels[ended.run.out]}: {said}")
        if self.columns:
            parts = (f"{self.labels[r.run.out]}: {progress(r)}/{r.steps}" for r in under_way)
            self._show(" | ".join(parts))

    def _show(self, line: str) -> None:
        """Replace the line on the terminal that tells of the runs under way."""
        if self.columns:
            print(f"\r\x1b[K{line[: self.columns - 1]}", end="", flush=True)

    def _write(self) -> tuple[list[dict[str, Any]], str, list[results.Cell]]:
        """Write results.json, and return the outcomes of the trials, the score and all settings."""
        outcomes = [results.outcome(t.settings, t.seed, t.run) for t in self.trials]
        for outcome in outcomes:
            if outcome["folder"] in self.left_out:
                outcome["said"] = self.left_out[outcome["folder"]]
        score, found = results.cells([*outcomes, *self.earlier])
        report = {
            "score": score,
            "budget": self.limit._asdict(),
            "jobs": self.jobs,
            "machine": machine(),
            "settings": [{**cell._asdict(), "runs": len(cell.runs)} for cell in found],
            "runs": [*outcomes, *self.earlier],
            "others": self.others,
        }
        path = self.out / results.RESULTS
        replace_durably(path, (json.dumps(report, indent=1) + "\n").encode())
        return outcomes, score, found

    def _report(self, stop: StopRequest) -> int:
        outcomes, score, found = self._write()
        done = sum(r["status"] == "finished" for r in outcomes)
        written = [self.out / results.RESULTS]
        if found:
            keys = varied([cell.settings for cell in found])
            results.print_table(score, found, keys)
            results.draw(score, found, keys, self.out / "sweep.png")
            written.append(self.out / "sweep.png")
            if self.others:
                results.say(
                    f"not in the table: {len(self.others)} of the earlier runs, with other keys, "
                    "budget, texts, first weights, run file or --set (in results.json under "
                    '"others")'
                )
        earlier = sum(r["status"] == "finished" for r in self.earlier)
        beside = f", beside {earlier} earlier ones" if earlier else ""
        print(f"{done} of {len(outcomes)} runs finished{beside}: {', '.join(map(str, written))}")
        if stop.signal is not None:
            print("stopped; the same command goes on from there")
            return 128 + stop.signal
        return 0 if done == len(outcomes) else 1
