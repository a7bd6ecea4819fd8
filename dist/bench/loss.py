"""``myllm bench loss``: minutes on the x-axis, bits per byte on the y-axis, ours beside PyTorch's.

The contenders train one after the other, each in processes of its own with all cores, on the same
text. Ours are ``myllm train``; PyTorch's is a trainer like nanoGPT's (``nanogpt.py``) with the
hyper-parameters that nanoGPT publishes. The same held-out windows are looked at, outside of the
time that counts: the sum of the steps' own. What is promised is how soon ours has learned as much
as any of PyTorch's at its end. A contender that has finished is not run again.
"""

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from accel import COMPUTE, offered
from accel.bench import report
from accel.bench.report import Row
from accel.help import minutes
from accel.system import cores
from dist import config as run_file
from dist import sizing, warm
from dist.bench import nanogpt
from dist.bench.loss_data import Text, prepare
from dist.config import RunFile
from dist.data import held_out
from dist.lock import locked
from dist.monitor import read_metrics
from dist.sizing import Size
from dist.stopping import StopRequest
from dist.sweep.pool import finished, last_words, train_all
from dist.use import figure_class, save_figure
from reference.params import decoder_layout
from tokenizer.files import replace_durably
from tokenizer.read import Source

BAR, GOAL = 0.40, 0.25  # of PyTorch's time
PROBE_STEPS = 60  # that tell how many steps the minutes have
PROBE_SKIPPED = 20  # while memory is found, and the processor's clock rises
EVALUATIONS = 20
EVAL_TOKENS = 32_768
PLAN = "plan.json"


class Setting(NamedTuple):
    """What is learned from, by a model of which shape."""

    about: str
    vocab_size: int  # 0: the characters of the text
    size: Size | None  # None: the size that the minutes and this machine's speed allow
    steps: int  # of every contender; 0: as many as its minutes have
    minutes: float


def _size(
    D: int, L: int, heads: int, F: int, T: int, windows: int, lr: float, V: int, embedding: float
) -> Size:
    return Size(0.0, D, L, heads, heads, D // heads, F, T, windows, lr, V, embedding)


SETTINGS = {
    "shakespeare": Setting(
        "nanoGPT's recipe for a processor: characters, 4 layers of 128, 12 windows of 64",
        0,
        _size(128, 4, 4, 352, 64, 12, 4e-3, 0, 3.0)._replace(kind="muon", qkv_bias=True),
        2000,
        0.0,
    ),
    "demo": Setting(
        "the demo's corpus, by the model that the demo takes for these minutes here",
        4096,
        None,
        0,
        5.0,
    ),
    "wide": Setting(
        "4 layers of 512, windows of 256, 10,000 ids: the shape of cs336's TinyStories",
        10_000,
        _size(512, 4, 16, 1344, 256, 8, 5e-4, 10_000, 32.0),  # dist/sweep/rates
        0,
        30.0,
    ),
}

# What nanoGPT publishes for models of this size (config/train_shakespeare_char.py and train.py).
NANOGPT = [
    "optim.kind=adamw",
    'model.norm="layernorm"',
    'model.ffn="gelu"',
    'model.position="learned"',
    "model.qkv_bias=false",
    "train.lr=1e-3",
    "optim.beta2=0.99",
    "optim.embedding_rate=1.0",
    "optim.weight_decay=0.1",
]
NANOGPT_WARMUP = 100
MUON_RATE = 4 / 3  # times that of AdamW: dist/sweep/muon


class Contender(NamedTuple):
    """A trainer, and how it is asked to train."""

    who: str  # ours, or PyTorch
    how: str  # ours: the optimizer; PyTorch: eager or compiled
    compute: str
    share: float = 1.0  # of the time that the others have

    @property
    def name(self) -> str:
        """What people call it."""
        share = "" if self.share == 1 else f", planned for {self.share:g} of the time"
        return f"{self.who}, {self.how}, {self.compute}{share}"

    @property
    def folder(self) -> str:
        """The name of its folder."""
        share = "" if self.share == 1 else f"-{self.share:g}"
        return f"{self.who.lower()}-{self.how}-{self.compute}{share}"

    @property
    def command(self) -> list[str]:
        """The words behind ``myllm`` that train it."""
        return ["train"] if self.who == "ours" else ["bench", "loss", "--work", self.how]

    def run(self, plan: "Plan") -> RunFile:
        """Return its run; steps and evaluations are said by ``timed``."""
        size, out = plan.size, plan.out / self.folder
        if self.who == "ours":
            words = [f"optim.kind={self.how}"]
            if self.how != size.kind:
                times = MUON_RATE if self.how == "muon" else 1 / MUON_RATE
                words.append(f"train.lr={times * size.lr}")
                # the embedding has the same rate beside both
                words.append(f"optim.embedding_rate={max(1.0, size.embedding_rate / times)}")
        else:
            full = [f"model.n_kv_heads={size.n_heads}", f"model.d_ff={4 * size.d_model}"]
            words = [*full, *NANOGPT]
        return run_file.load(
            "demo",
            [
                *size.overrides(1),
                f"train.micro_batch={size.global_batch}",
                f"model.vocab_size={plan.vocab_size}",
                *words,
                f"data.train={json.dumps(str(plan.text.train))}",
                f"data.heldout={json.dumps(str(plan.text.heldout))}",
                f"run.out={json.dumps(str(out))}",
                f"run.compute={self.compute}",
                "run.checkpoint_every=0",
                f"run.eval_windows={max(1, EVAL_TOKENS // size.context_length)}",
            ],
        )

    def timed(self, run: RunFile, steps: int) -> RunFile:
        """Return the run with so many steps."""
        warmup = NANOGPT_WARMUP if self.who == "PyTorch" else run.train.warmup_steps
        train = replace(run.train, steps=steps, warmup_steps=min(warmup, steps // 10))
        every = max(1, steps // EVALUATIONS)
        return replace(run, train=train, run=replace(run.run, eval_every=every))


class Plan(NamedTuple):
    """What all contenders have in common."""

    out: Path
    text: Text
    size: Size
    vocab_size: int
    steps: int  # of a contender; 0: of its minutes
    minutes: float


class Curve(NamedTuple):
    """What a contender has learned."""

    seconds: list[float]  # of training, at each evaluation
    bits: list[float]  # per byte, held out
    steps: int
    parameters: int

    def reaches(self, bits: float) -> float:
        """Return the seconds after which it has come down to so many bits; infinity: never.

        Between two evaluations a straight line is drawn, unless the first was no number.
        """
        if self.bits[0] <= bits:
            return self.seconds[0]
        for i in range(1, len(self.bits)):
            before, here = self.bits[i - 1], self.bits[i]
            if here <= bits:
                part = (before - bits) / (before - here) if math.isfinite(before) else 1.0
                return self.seconds[i - 1] + part * (self.seconds[i] - self.seconds[i - 1])
        return math.inf


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, print a table, write curves and a picture."""
    if argv[:1] == ["--work"]:  # in the process of a contender
        return nanogpt.train(Path(argv[2]), argv[1])
    p = report.parser(
        "loss",
        "Train on the same text with ours and with a trainer like nanoGPT's in PyTorch, and say "
        "when ours has learned as much as any of PyTorch's at its end. Given again, it goes on: a "
        "contender that has finished is not run again.",
        "loss demo --minutes 5\n  myllm bench loss shakespeare --text input.txt",
    )
    about = "; ".join(f"{name}: {setting.about}" for name, setting in SETTINGS.items())
    p.add_argument("setting", choices=SETTINGS, help=about)
    p.add_argument("--text", nargs="+", default=[], metavar="PATH", help="texts to learn from")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=minutes, help="of each contender (5; wide: 30)")
    budget.add_argument("--steps", type=int, help="of each contender (shakespeare: 2,000)")
    p.add_argument(
        "--only", nargs="+", metavar="NAME", help="some contenders, such as ours-muon-float32"
    )
    p.add_argument("-o", "--out", type=Path, help="a folder (bench-loss-SETTING)")
    given = report.parse(p, argv)
    if given.steps is not None and given.steps < 1:
        p.error("--steps must be at least 1")
    known = {contender.folder: contender for contender in contenders()}
    if not set(given.only or []) <= set(known):
        p.error(f"--only takes some of {', '.join(known)}")
    chosen = [known[name] for name in given.only or known]
    setting = SETTINGS[given.setting]
    out = given.out or Path(f"bench-loss-{given.setting}")
    chart, given.chart = given.chart or out / "loss.png", None
    stop = StopRequest()
    stop.learned = True
    with locked(out, "benchmark"), stop.listening():
        plan = planned(out, given.setting, given.text, given.steps, given.minutes)
        bench = Bench(plan, chosen, stop)
        parts: dict[str, Callable[[], Iterator[Row]]] = {
            contender.name: partial(bench.measure, contender) for contender in chosen
        }
        parts["time to loss"] = bench.compare
        title = f"{report.machine('numpy', 'torch')}, {cores()} cores; {setting.about}"
        status = report.run(p, given, title, parts)
        bench.write(title, chart)
    return status


def contenders() -> list[Contender]:
    """Return all that can train here, PyTorch's first."""
    computes = list(offered("cpu"))
    theirs = itertools.product(nanogpt.HOW, computes) if find_spec("torch") else ()
    kinds = "adamw", "muon"
    ours = itertools.product(kinds, computes)
    shares = itertools.product(kinds, computes, (BAR, GOAL))
    return [
        *(Contender("PyTorch", how, compute) for how, compute in theirs),
        *(Contender("ours", how, compute) for how, compute in ours),
        *(Contender("ours", *planned) for planned in shares),
    ]


def planned(
    out: Path, name: str, texts: list[str], steps: int | None, minutes: float | None
) -> Plan:
    """Return what the contenders have in common, as it was when the measurement began.

    Raises
    ------
    ValueError
        When another measurement was begun in this folder.
    """
    setting = SETTINGS[name]
    if steps is None and minutes is None:
        steps, minutes = setting.steps, setting.minutes
    asked = {
        "setting": name,
        "texts": [str(Path(text).resolve()) for text in texts],
        "bytes": Source(texts).total_bytes if texts else 0,
        "steps": steps or 0,
        "minutes": minutes or 0.0,
    }
    path = out / PLAN
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["asked"] != asked:
            raise ValueError(
                f"{out} holds a measurement that was asked for otherwise, or of a text that has "
                f"changed ({known['asked']}): choose another --out"
            )
    text = prepare(out, texts, setting.vocab_size)
    if path.exists():
        size = Size(*known["size"])
    else:
        size = setting.size or sizing.SIZES[0]
        if setting.size is None and minutes:
            speed = sizing.measured_speed(COMPUTE[0])
            choice = sizing.choice_for(60 * minutes, speed)
            print(choice, flush=True)
            size = choice.size
        replace_durably(path, json.dumps({"asked": asked, "size": size}).encode())
    return Plan(out, text, size, max(setting.vocab_size, text.vocab_size), steps or 0, minutes or 0)


def _median(folder: Path) -> float:
    """Return how many milliseconds a step of a run took."""
    return statistics.median([r["ms"] for r in read_metrics(folder) if "ms" in r][PROBE_SKIPPED:])


class Bench:
    """A measurement in progress."""

    def __init__(self, plan: Plan, chosen: Sequence[Contender], stop: StopRequest) -> None:
        self.plan, self.chosen, self.stop = plan, chosen, stop
        self.curves: dict[Contender, Curve] = {}

    def measure(self, contender: Contender) -> Iterator[Row]:
        """Train a contender, unless that was done, and yield what it came to."""
        run = contender.run(self.plan)
        there = Path(run.run.out) / "run.toml"
        if there.exists():
            run = run_file.load(there)
        else:
            run = contender.timed(run, self._steps(contender, run))
        if not finished(run):
            self._train(contender, run)
        curve = self.curves[contender] = self._curve(run)
        yield Row(
            contender.name,
            curve.bits[-1],
            unit="bits",
            note=f"{curve.bits[-1]:.3f} per byte after {curve.seconds[-1]:,.0f} s, "
            f"{curve.steps:,} steps of {run.tokens_per_step:,} tokens, "
            f"{curve.parameters:,} parameters",
        )

    def _steps(self, contender: Contender, run: RunFile) -> int:
        """Return the steps of a contender, by a run of it for another share, or by a few steps."""
        plan, seconds = self.plan, 60 * contender.share * self.plan.minutes
        if plan.steps:
            return max(1, round(contender.share * plan.steps))
        for share in (1.0, BAR, GOAL):
            there = plan.out / contender._replace(share=share).folder
            if (there / "run.toml").exists() and finished(run_file.load(there / "run.toml")):
                return max(1, round(1e3 * seconds / _median(there)))
        where = replace(run.run, out=str(plan.out / "probes" / contender.folder), eval_windows=1)
        probe = contender.timed(replace(run, run=where), PROBE_STEPS)
        if not finished(probe):
            self._train(contender, probe)
        return max(1, round(1e3 * seconds / _median(Path(where.out))))

    def _train(self, contender: Contender, run: RunFile) -> None:
        if contender.who == "ours":
            warm.compile_kernels(run)
        print(f"{contender.name}: {run.steps:,} steps", file=sys.stderr, flush=True)
        train_all([run], 1, self.stop, lambda ended, under_way: None, contender.command)
        if self.stop.signal is not None:
            raise KeyboardInterrupt
        if not finished(run):
            raise ValueError(f"{contender.name} failed: {last_words(run)}")

    def _curve(self, run: RunFile) -> Curve:
        (heldout,) = held_out(run)
        factor = self.plan.text.bits_per_nat(heldout, run.run.eval_windows)
        seconds, at, bits = 0.0, [], []
        for record in read_metrics(Path(run.run.out)):
            seconds += record.get("ms", 0.0) / 1e3
            if "heldout_loss" in record:
                at.append(seconds)
                loss = record["heldout_loss"]
                bits.append(math.inf if loss is None else factor * loss)
        return Curve(at, bits, run.steps, decoder_layout(run.model).size)

    def soonest(self, bits: float) -> float:
        """Return the seconds after which the first of ours has come down to so many bits."""
        ours = (curve for c, curve in self.curves.items() if c.who == "ours")
        return min((curve.reaches(bits) for curve in ours), default=math.inf)

    def hardest(self) -> tuple[Contender, Curve] | None:
        """Return that of PyTorch's of whose time ours needs most to learn as much.

        That is not always the best: one that is better by a thousandth may take twice as long.
        """

        def needed(found: tuple[Contender, Curve]) -> tuple[float, float]:
            seconds, bits = found[1].seconds[-1], found[1].bits[-1]
            return self.soonest(bits) / seconds, -bits

        theirs = [(c, curve) for c, curve in self.curves.items() if c.who == "PyTorch"]
        return max(theirs, key=needed, default=None)

    def compare(self) -> Iterator[Row]:
        """Yield when each of ours has learned as much as the hardest of PyTorch's at its end."""
        found = self.hardest()
        if found is None:
            return
        hardest, theirs = found
        end, bits = theirs.seconds[-1], theirs.bits[-1]
        reached = {c: v.reaches(bits) for c, v in self.curves.items() if c.who == "ours"}
        for contender, seconds in sorted(reached.items(), key=lambda pair: pair[1]):
            first = seconds == self.soonest(bits)
            yield Row(
                f"time to {bits:.3f} bits: {contender.name}",
                seconds,
                end,
                BAR if first else None,
                note=f"{hardest.name} at its end; goal {GOAL}" if first else "",
            )

    def write(self, title: str, chart: Path) -> None:
        """Write results.json and draw the curves."""
        found = self.hardest()
        report: dict[str, Any] = {
            "about": title,
            "steps": self.plan.steps,
            "minutes": self.plan.minutes,
            "hardest_of_pytorch": found[0].folder if found else None,
            "contenders": {c.folder: curve._asdict() for c, curve in self.curves.items()},
        }
        replace_durably(self.plan.out / "results.json", (json.dumps(report) + "\n").encode())
        if not self.curves:
            return
        try:
            self._draw(chart, found)
            print(f"{self.plan.out / 'results.json'}, {chart}")
        except ImportError as error:
            print(f"{self.plan.out / 'results.json'}; not drawn: {error}")

    def _draw(self, path: Path, found: tuple[Contender, Curve] | None) -> None:
        figure = figure_class()(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for contender, curve in self.curves.items():
            style = "-" if contender.who == "ours" else "--"
            minutes = [seconds / 60 for seconds in curve.seconds]
            axes.plot(minutes, curve.bits, style, marker=".", markersize=4, label=contender.name)
        if found is not None:
            end, bits = found[1].seconds[-1], found[1].bits[-1]
            reached = self.soonest(bits)
            axes.axhline(bits, color="grey", linewidth=0.8)
            if math.isfinite(reached):
                axes.plot([reached / 60], [bits], "o", color="black", zorder=5)
                axes.annotate(
                    f"{reached / end:.2f} of PyTorch's time",
                    (reached / 60, bits),
                    xytext=(4, 6),
                    textcoords="offset points",
                )
        axes.set_xlabel("minutes of training")
        axes.set_ylabel("bits per byte, held out")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        save_figure(figure, path)
