"""``myllm verify``: hold kernels to the reference, from the command line."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from accel.verify.check import Options, cases_of, check_subject, replay
from accel.verify.contract import DTYPES, SPECS
from accel.verify.files import load_failure
from accel.verify.golden import check_results, write_golden
from accel.verify.report import Report, failure_text, show
from accel.verify.subject import Subject, SubjectError, applies, as_subject, load_file

# Every backend in every mode, as accel.load names them.
BACKENDS = (("cpu", "float32"), ("cpu", "bf16"), ("cuda", "float32"), ("cuda", "bf16"))

_EPILOG = """\
examples:
  myllm verify                                the backends of this machine, every op
  myllm verify --module mykernels.py          whatever ops that module offers
  myllm verify --module mykernels.py --op attention --dtype bf16 --seed 7
  myllm verify --module mykernels.py --case verify-failures/attention-dk-float32.npz
  myllm verify --golden vectors               write golden vectors, for any language
  myllm verify --against results              check what another program made of them

A module offers functions named like the contract's (rmsnorm_forward, rmsnorm_backward, softmax, …),
all or some of them; from_numpy and to_numpy if its arrays are not NumPy's; and DTYPES, the
precisions it works in. accel/verify/README.md has a worked example.

exit status: 0 all as the reference, 1 something is not, 2 wrong usage.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="myllm verify",
        description="Hold kernels, in any language, to the reference: values and gradients.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--module", action="append", metavar="FILE.py", help="check this module (may be repeated)")
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="check this backend: reference, cpu, cuda",
    )
    add("--compute", choices=("float32", "bf16"), help="the mode of the backend (default: both)")
    add("--op", action="append", metavar="NAME", help="only this op (may be repeated)")
    add("--dtype", action="append", choices=DTYPES, help="only this precision (may be repeated)")
    add("--seed", type=int, default=0, help="the same seed gives the same cases (default 0)")
    add("--examples", type=int, metavar="N", help="cases of each op in each precision")
    add("--thorough", action="store_true", help="ten times as many cases")
    add("--save", type=Path, default=Path("verify-failures"), metavar="DIR", help="failing cases")
    add("--case", type=Path, metavar="FILE.npz", help="run one saved case again")
    add("--json", action="store_true", help="print the report as JSON on stdout")
    add("--golden", type=Path, metavar="DIR", help="write golden vectors into DIR")
    add("--against", type=Path, metavar="DIR", help="check results computed from golden vectors")
    return parser


def run(argv: list[str]) -> int:
    """Run ``myllm verify`` and return its exit status."""
    arguments = parser().parse_args(argv)
    # a table needs its width where there is no terminal to ask
    out = Console() if sys.stdout.isatty() else Console(width=110)
    err = Console(stderr=True)
    for op in arguments.op or ():
        if op not in SPECS:
            parser().error(f"there is no op {op!r}; known: {', '.join(SPECS)}")
    if arguments.examples is not None and arguments.examples < 1:
        parser().error("--examples must be positive")
    if arguments.golden is not None:
        count = write_golden(arguments.golden, seed=arguments.seed, ops=arguments.op)
        out.print(f"{count} files of golden vectors in {arguments.golden}; its README.md explains")
        return 0
    if arguments.against is not None:
        dtype = arguments.dtype[0] if arguments.dtype else None
        found = check_results(arguments.against, seed=arguments.seed, dtype=dtype)
        if arguments.json:
            print(json.dumps(found.to_dict(), indent=2))
        else:
            found.show(out)
        return 0 if found.ok else 1

    subjects, broken = _subjects(arguments, err)
    if arguments.case is not None:
        return _again(arguments.case, subjects, out) or int(broken)
    reports = []
    for subject, compute in subjects:
        options = Options(
            ops=tuple(arguments.op) if arguments.op else None,
            dtypes=tuple(arguments.dtype) if arguments.dtype else compute,
            seed=arguments.seed,
            examples=arguments.examples,
            thorough=arguments.thorough,
            save=arguments.save,
        )
        try:
            reports.append(_check(subject, options, err))
        except SubjectError as error:
            err.print(f"myllm verify: {error}", highlight=False, soft_wrap=True)
            broken = True
    if arguments.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        for report in reports:
            show(report, out)
    return int(broken or not all(report.ok for report in reports))


def _subjects(
    arguments: argparse.Namespace, err: Console
) -> tuple[list[tuple[Subject, tuple[str, ...] | None]], bool]:
    """Return what is to be checked, with its precisions, and whether something could not load."""
    subjects: list[tuple[Subject, tuple[str, ...] | None]] = []
    broken = False
    for path in arguments.module or ():
        try:
            subjects.append((load_file(path), None))
        except SubjectError as error:
            err.print(f"myllm verify: {error}", highlight=False, soft_wrap=True)
            broken = True
    if arguments.module and not arguments.backend:
        return subjects, broken

    accel = importlib.import_module("accel")
    wanted = [pair for pair in BACKENDS if arguments.compute in (None, pair[1])]
    if arguments.backend:
        wanted = []
        for name in arguments.backend:
            modes = [c for n, c in BACKENDS if n == name] or ["float32"]
            wanted += [(name, c) for c in modes if arguments.compute in (None, c)]
    loaded: list[str] = []
    refusals: dict[tuple[str, str], str] = {}
    for name, compute in wanted:
        try:
            module = accel.load(name, compute=compute)
        except (ImportError, ValueError) as error:
            refusals[name, compute] = str(error)
            continue
        loaded.append(name)
        command = f"--backend {name} --compute {compute}"
        subject = as_subject(module, f"{name} ({compute})", command)
        subjects.append((subject, ("bf16",) if compute == "bf16" else None))
    for (name, compute), why in refusals.items():
        err.print(f"{name} ({compute}) is not here: {why}", highlight=False, soft_wrap=True)
        broken |= bool(arguments.backend) and name not in loaded
    if not subjects and not broken:
        err.print("no fast backend runs here, so the reference checks itself", highlight=False)
        subjects.append(
            (as_subject(accel.load("reference"), "reference", "--backend reference"), None)
        )
    return subjects, broken


def _check(subject: Subject, options: Options, err: Console) -> Report:
    """Check one subject, with a bar on a terminal and a line for each op elsewhere."""
    specs = [s for s in subject.specs() if options.ops is None or s.name in options.ops]
    dtypes = options.dtypes or subject.dtypes()
    plan = [(s.name, d) for s in specs for d in dtypes if applies(s, d)]
    total = sum(cases_of(name, options) for name, _ in plan)
    if not err.is_terminal:

        def line(op: str, dtype: str, done: int, count: int) -> None:
            if done == count:
                at = plan.index((op, dtype)) + 1
                print(f"{at}/{len(plan)} {op} {dtype}", file=sys.stderr)

        return check_subject(subject, options, line)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(subject.name, total=total)
        before = dict(zip(plan, _running([cases_of(n, options) for n, _ in plan]), strict=True))

        def bar(op: str, dtype: str, done: int, count: int) -> None:
            progress.update(task, completed=before[op, dtype] + done, description=f"{op} {dtype}")

        return check_subject(subject, options, bar)


def _running(counts: list[int]) -> list[int]:
    """Return what comes before each of some counts."""
    sums = [0]
    for count in counts[:-1]:
        sums.append(sums[-1] + count)
    return sums[: len(counts)]


def _again(path: Path, subjects: list[tuple[Subject, tuple[str, ...] | None]], out: Console) -> int:
    """Run one saved case on every subject."""
    case = load_failure(path)
    failed = False
    for subject, _ in subjects:
        if not (subject.has(case.spec.forward) or subject.has_backward(case.spec)):
            raise ValueError(f"{subject.name} offers no {case.op}, which {path} is a case of")
        failures = replay(subject, case)
        failed |= bool(failures)
        for failure in failures:
            out.print(failure_text(failure), markup=False, highlight=False, soft_wrap=True)
        if not failures:
            out.print(f"{subject.name}: {case.op} is right in this case", highlight=False)
    return int(failed)
