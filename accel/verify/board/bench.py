"""``myllm bench verify``: what each way to judge kernels catches of wrong ones, and of right ones.

The wrong kernels are those of ``corpus/wrong.py``, mutants by rule (``mutants.py``) and, with
``--also``, those of any module that has ``corpus(op)``. The right ones are those of
``corpus/right.py``. Each is judged by ``verify`` with its default budget, by the rules of others as
their authors set them (``rules.py``), and by their tolerances on the calls that verify makes.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from accel.bench.report import machine
from accel.help import Wrapped
from accel.verify.board import chart
from accel.verify.board.corpus import calls
from accel.verify.board.corpus.build import build
from accel.verify.board.corpus.right import all_right
from accel.verify.board.corpus.wrong import LATER, WRONG
from accel.verify.board.mutants import MUTATED, mutants
from accel.verify.board.outcome import Call, copied, flat
from accel.verify.board.rules import RULES, Judge, Rule
from accel.verify.check import check_module
from reference import ops
from reference.ops import OPS

VERIFY, OURS = "verify", "on verify's calls"
STEPS = (4, 24, None)  # cases of verify: a kernel that fails among the first need not meet the rest
RECORDED = 40  # cases whose calls are handed to the tolerances of others
MUTANTS = 20  # of an op, spread evenly over all that there are
QUICK = 20  # with --quick, every so-manieth kernel


class Kernel(NamedTuple):
    """A kernel to be judged."""

    corpus: str  # where it comes from; right kernels say their precision
    op: str
    name: str
    module: Any
    precisions: tuple[str, ...] = ("float32", "float64")


class Verdict(NamedTuple):
    """What one judge said of one kernel."""

    judge: str
    corpus: str
    op: str
    name: str
    why: str  # "" for nothing found


# ---- kernels -------------------------------------------------------------------------------------


def wrong_kernels(op: str, also: str | None) -> Iterator[Kernel]:
    """Yield the wrong kernels of an op."""
    for w in WRONG:
        if w.op == op:
            yield Kernel("planted" if op in LATER else "unseen", op, w.name, build(w))
    if also:
        for name, module, precision in importlib.import_module(also).corpus(op):
            yield Kernel("planted", op, name, module, (precision,))
    if op in MUTATED:
        shown = [calls.read(w.witness) for w in WRONG if w.op == op]
        made = [*mutants(op, shown)]
        for mutant in made[:: -(-len(made) // MUTANTS) or 1]:
            yield Kernel("mutants", op, mutant.name, mutant.kernel)


def right_kernels(op: str) -> Iterator[Kernel]:
    """Yield the right kernels of an op, by the precision that they are right in."""
    for name, kind, module in all_right(op):
        corpus = kind if kind in ("bf16", "tf32") else "float32"
        precisions = ("float32", "float64") if corpus == "float32" else (corpus,)
        yield Kernel(corpus, op, name, module, precisions)


def framework_kernels(op: str) -> Iterator[Kernel]:
    """Yield the right kernels of an op in the frameworks that are installed."""
    for framework in ("torch", "jax"):
        if importlib.util.find_spec(framework) is not None:
            module = importlib.import_module(f"accel.verify.board.corpus.right_{framework}")
            if hasattr(module, OPS[op].forward_name):
                yield Kernel(framework, op, framework, module, module.DTYPES)


def chosen(op: str, also: str | None, every: int) -> list[Kernel]:
    """Return every so-manieth kernel of an op from each corpus, the first of each at least."""
    counts: Counter[str] = Counter()
    kept = []
    for kernel in (*right_kernels(op), *wrong_kernels(op, also)):
        if counts[kernel.corpus] % every == 0:
            kept.append(kernel)
        counts[kernel.corpus] += 1
    return kept


# ---- judging -------------------------------------------------------------------------------------


def _checked(kernel: Kernel, seed: int, examples: int | None) -> tuple[str, int]:
    """Return what is wrong in so many cases, or "", and how many were tried."""
    report = check_module(
        kernel.module,
        ops=[kernel.op],
        dtypes=kernel.precisions,
        examples=examples,
        seed=seed,
        shrink=False,
        raises=False,
        partial=True,
    )
    failures = report.failures
    return f"{failures[0].where} {failures[0].kind}" if failures else "", report.cases


def verify(kernel: Kernel, seed: int = 0, quick: bool = False) -> tuple[str, int]:
    """Return what verify finds wrong, or "", and how many cases it tried."""
    for examples in STEPS[:1] if quick else STEPS:
        why, cases = _checked(kernel, seed, examples)
        if why:
            break
    return why, cases


def recorded(op: str) -> list[Call]:
    """Return the calls that verify makes of an op in float32, as it makes them of the reference."""
    made: list[Call] = []
    spec = OPS[op]
    inner = getattr(ops, spec.forward_name)

    @wraps(inner)
    def forward(*arrays: Any, **options: Any) -> Any:
        kept = tuple(copied(a) for a in arrays)
        made.append(Call(op, kept, {name: copied(value) for name, value in options.items()}))
        return inner(*arrays, **options)

    functions = {name: getattr(ops, name) for name in spec.names} | {spec.forward_name: forward}
    module = SimpleNamespace(__name__="recorder", **functions)
    check_module(
        module, ops=[op], dtypes=["float32"], examples=RECORDED, shrink=False, raises=False
    )
    needs = ("out", "keep_x", "need_backward")
    plain = [
        c._replace(options={n: v for n, v in c.options.items() if n not in needs}) for c in made
    ]
    return [call for call in plain if _finite(call)]


def _finite(call: Call) -> bool:
    """Say whether NaN and infinity are absent, which others' rules were not made for."""
    floats = [a for a in flat([*call.arrays, *call.options.values()]) if a.dtype.kind == "f"]
    return all(bool(np.isfinite(a).all()) for a in floats)


def judge_op(op: str, also: str | None, every: int, quick: bool) -> list[Verdict]:
    """Judge the kernels of an op by all rules."""
    np.seterr(all="ignore")
    kernels = chosen(op, also, every)
    few = 2 if quick else None
    rules = [Judge(r, partial(_first, r, few)) for r in RULES if r.calls(op)]
    ours = [] if quick else _on_our_calls(op, rules)
    return [v for kernel in kernels for v in _verdicts(kernel, rules, ours, quick)]


def _first(rule: Rule, few: int | None, op: str) -> list[Call]:
    return rule.calls(op)[:few]


def _on_our_calls(op: str, rules: Iterable[Judge]) -> list[Judge]:
    made = recorded(op)
    return [Judge(judge.rule, lambda _: made) for judge in rules]


def _verdicts(
    kernel: Kernel, rules: Iterable[Judge], ours: Iterable[Judge], quick: bool
) -> Iterator[Verdict]:
    of = (kernel.corpus, kernel.op, kernel.name)
    yield Verdict(VERIFY, *of, verify(kernel, quick=quick)[0])
    for judge in rules:
        if runs := _precisions(judge.rule, kernel):
            yield Verdict(judge.rule.name, *of, judge.catches(kernel.op, kernel.module, runs))
    for judge in ours:
        if runs := _precisions(judge.rule, kernel):
            why = judge.catches(kernel.op, kernel.module, runs)
            yield Verdict(f"{judge.rule.name} {OURS}", *of, why)


def _precisions(rule: Rule, kernel: Kernel) -> tuple[str, ...]:
    """Return the precisions that a rule looks at a kernel in."""
    if kernel.corpus in ("float32", "tf32"):  # right: in its own precision, where the rule has one
        return (kernel.corpus,) if "float32" in rule.precisions else ()
    if kernel.corpus == "bf16":
        return ("bf16",) if "bf16" in rule.precisions else ()
    return rule.precisions


# ---- the table -----------------------------------------------------------------------------------

RIGHT = ("float32", "bf16", "tf32")


def tallied(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the counts: of each judge and corpus how many were flagged, and of how many judged."""
    flagged: Counter[tuple[str, str]] = Counter()
    judged: Counter[tuple[str, str]] = Counter()
    for v in verdicts:
        judged[v.judge, v.corpus] += 1
        flagged[v.judge, v.corpus] += bool(v.why)
    judges = list(dict.fromkeys([VERIFY, *(r.name for r in RULES), *(v.judge for v in verdicts)]))
    return {
        judge: {c: [flagged[judge, c], n] for (j, c), n in judged.items() if j == judge}
        for judge in judges
    }


def missed(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Return what verify passed of the wrong kernels, and flagged of the right ones."""
    found: dict[str, list[str]] = {}
    for v in verdicts:
        if v.judge == VERIFY and bool(v.why) == (v.corpus in RIGHT):
            found.setdefault(v.corpus, []).append(f"{v.op}: {v.name}")
    return found


def added(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of runs over different ops as those of one."""
    counts: dict[str, dict[str, list[int]]] = {}
    passed: dict[str, list[str]] = {}
    machines: list[str] = []
    every: dict[str, int] = {}
    for run in runs:
        machines.append(run["machine"])
        every |= run["every"]
        for judge, of in run["counts"].items():
            for corpus, (flagged, judged) in of.items():
                so_far = counts.setdefault(judge, {}).setdefault(corpus, [0, 0])
                so_far[:] = so_far[0] + flagged, so_far[1] + judged
            counts.setdefault(judge, {})
        for corpus, names in run["missed"].items():
            passed.setdefault(corpus, []).extend(names)
    return {
        "machine": "; ".join(dict.fromkeys(machines)),
        "every": every,
        "counts": counts,
        "missed": passed,
    }


def table(data: dict[str, Any]) -> str:
    """Return the scoreboard in Markdown."""
    counts = data["counts"]
    corpora = [c for c in ("unseen", "planted", "mutants") if c in counts[VERIFY]]
    sizes = {c: counts[VERIFY][c][1] for c in corpora}
    head = [f"{c} ({sizes[c]})" for c in corpora]
    lines = [
        f"Wrong kernels caught, and right ones flagged, in {len(data['every'])} ops; "
        f"{data['machine']}. {_parts(data['every'])}",
        "",
        "| judge | " + " | ".join(head) + " | on verify's calls | false alarms: float32 | bf16 "
        "| TF32 |",
        "| --- |" + " ---: |" * (len(head) + 4),
    ]
    for judge in [VERIFY, *(r.name for r in RULES)]:
        mine = counts.get(judge, {})
        cells = [_share(mine.get(c, [0, 0]), sizes[c]) for c in corpora]
        ours = counts.get(f"{judge} {OURS}", {})
        both = [sum(ours.get(c, [0, 0])[0] for c in corpora), sum(sizes.values())]
        cells.append(_share(both, both[1]) if ours else "")
        cells += ["–" if c not in mine else f"{mine[c][0]} of {mine[c][1]}" for c in RIGHT]
        lines.append(f"| {judge} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parts(every: dict[str, int]) -> str:
    """Say of which ops only a part of the kernels was judged."""
    parts = [f"{op} (one in {n})" for op, n in every.items() if n > 1]
    return f"A part of the kernels of {', '.join(parts)}." if parts else "All of their kernels."


def _share(count: Sequence[int], of: int) -> str:
    """Return a share of all, and of those of the ops that a judge has tests for."""
    caught, judged = count
    text = f"{caught / of:.1%}" if of else "–"
    return text if judged in (of, 0) else f"{text} ({caught / judged:.0%} of {judged})"


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``myllm bench verify``."""
    given = _parse(argv)
    if given.seeds:
        return _seeds(given)
    if given.read:
        data = added(json.loads(path.read_text(encoding="utf-8")) for path in given.read)
    else:
        data = _measure(given)
    print(table(data))
    for corpus, names in data["missed"].items():
        what = "flagged by verify, and right" if corpus in RIGHT else "not caught by verify"
        print(f"\n{what}, {corpus}: {'; '.join(names)}")
    if given.json:
        given.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if given.chart:
        chart.draw(data, given.chart)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="myllm bench verify",
        description="Judge wrong and right kernels by verify and by the published rules of others.",
        formatter_class=Wrapped,
        epilog="examples:\n  myllm bench verify --quick\n"
        "  myllm bench verify --also tests.helpers.kernels.corpus --json board.json\n"
        "  myllm bench verify --read board.json  print the table again\n"
        "  myllm bench verify --seeds 50         false alarms of verify alone, by seed",
    )
    p.add_argument(
        "--quick",
        action="store_true",
        help="few kernels and cases, to see in a minute or two that it runs",
    )
    p.add_argument("--every", type=int, default=1, help="judge every so-manieth kernel of each op")
    p.add_argument(
        "--op",
        action="append",
        choices=[*OPS],
        metavar="NAME",
        help="only this op; may be repeated",
    )
    p.add_argument("--also", metavar="MODULE", help="more wrong kernels: corpus(op) of a module")
    p.add_argument("--seeds", type=int, default=0, help="judge the right kernels in so many seeds")
    p.add_argument("--examples", type=int, help="with --seeds: cases of a kernel in one precision")
    p.add_argument("--processes", type=int, default=os.cpu_count(), help="as many at once")
    p.add_argument("--json", type=Path, help="a file for the counts")
    p.add_argument(
        "--read", type=Path, nargs="+", help="counts of earlier runs, added up, for a new one"
    )
    p.add_argument("--chart", type=Path, help="a PNG or SVG file")
    given = p.parse_args(argv)
    given.every = max(given.every, QUICK if given.quick else 1)
    for path in (given.json, given.chart):
        if path is not None and not path.resolve().parent.is_dir():
            p.error(f"there is no folder {path.parent} to write to")
    if given.chart is not None:
        chart.require(p)
    return given


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    verdicts: list[Verdict] = []
    for found in _over_ops(judge_op, given, given.also, given.every, given.quick):
        verdicts += found
    return {
        "machine": f"{machine('numpy')}, {os.cpu_count()} cores",
        "every": {op: given.every for op in given.op or OPS},
        "counts": tallied(verdicts),
        "missed": missed(verdicts),
    }


def _over_ops(function: Any, given: argparse.Namespace, *arguments: Any) -> Iterator[Any]:
    """Yield what a function gives for each op, several at once."""
    chosen = given.op or [*OPS]
    if given.processes == 1 or len(chosen) == 1:
        for op in chosen:
            yield function(op, *arguments)
        return
    with ProcessPoolExecutor(given.processes) as pool:
        waiting = {op: pool.submit(function, op, *arguments) for op in chosen}
        for op, future in waiting.items():
            yield future.result()
            print(f"{op} judged", file=sys.stderr, flush=True)


def seeds_of(
    op: str, seeds: int, every: int, examples: int | None = None
) -> tuple[int, int, list[str]]:
    """Return (right kernels, cases, alarms) of an op over many seeds."""
    np.seterr(all="ignore")
    kernels = [*right_kernels(op), *framework_kernels(op)][::every]
    cases, alarms = 0, list[str]()
    for kernel in kernels:
        for seed in range(seeds):
            why, tried = _checked(kernel, seed, examples)
            cases += tried
            if why:
                alarms.append(f"{op}: {kernel.name} ({kernel.corpus}), seed {seed}: {why}")
    return len(kernels), cases, alarms


def _seeds(given: argparse.Namespace) -> int:
    kernels, cases, alarms = 0, 0, list[str]()
    for count, tried, found in _over_ops(seeds_of, given, given.seeds, given.every, given.examples):
        kernels, cases, alarms = kernels + count, cases + tried, [*alarms, *found]
        for alarm in found:
            print(f"false alarm: {alarm}", flush=True)
    print(
        f"{len(alarms)} false alarms: {kernels} right kernels, {given.seeds} seeds, "
        f"{cases:,} cases, {machine('numpy')}"
    )
    return 1 if alarms else 0
