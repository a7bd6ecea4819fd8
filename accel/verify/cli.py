"""``myllm verify``: hold kernels to the reference, from the command line."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from accel.help import Wrapped
from accel.verify.apart import TIMEOUT, Plan, ProgressOfAll, Source, check_all, replay_apart
from accel.verify.check import Options
from accel.verify.contract import DTYPES
from accel.verify.files import case_command, load_failure
from accel.verify.formats import format_of, to_json, write_reports
from accel.verify.golden import GoldenReport, check_results, write_golden
from accel.verify.report import AnyReport, Report, failure_text, show
from accel.verify.subject import OTHERS, SubjectError
from reference.ops import OPS

if TYPE_CHECKING:  # needs what `--adapters` alone needs
    from accel.verify.adapters import Found

R = TypeVar("R", bound=AnyReport)

# Every backend in every mode, as accel.load names them.
BACKENDS = (("cpu", "float32"), ("cpu", "bf16"), ("cuda", "float32"), ("cuda", "bf16"))

UNTRIED = 3  # the exit status when all that was tried is right, but not all was tried

_EPILOG = """\
examples:
  myllm verify                                the machine's backends, every op
  myllm verify --module mykernels.py          whatever ops that module offers
  myllm verify --module mykernels.py --op attention --dtype bf16 --seed 7
  myllm verify --module mykernels.py \\
    --case verify-failures/mykernels/attention-dk-float32.npz
  myllm verify --like ref.py --module new.py  beside a reference of your own
  myllm verify --adapters adapters.py         run_rmsnorm, … of a course
  myllm verify --golden vectors               golden vectors, for any language
  myllm verify --against results              what another program made of them

A module offers functions named like the contract's (rmsnorm_forward, rmsnorm_backward, softmax, …),
all or some of them; from_numpy and to_numpy if its arrays are not NumPy's; and DTYPES, the
precisions it works in. accel/verify/README.md has a worked example.

exit status:
  0  all as the reference
  1  something is not, or could not be checked at all
  2  wrong usage
  3  what was tried is right, but not all that is offered, or that a case is of,
     was (--partial: 0), or a folder of results has files of no golden vector
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="myllm verify",
        description="Hold kernels, in any language, to the reference: values and gradients.",
        epilog=_EPILOG,
        formatter_class=Wrapped,
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
    add(
        "--budget",
        type=float,
        metavar="S",
        help="seconds in which to try cases; fewer are tried where they run out",
    )
    add("--jobs", type=int, metavar="N", help="processes at once (default: the cores, at most 4)")
    add(
        "--partial",
        action="store_true",
        help="status 0 although something that the module offers was not tried",
    )
    add(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help="seconds after which an import or a case is given up (default %(default)g)",
    )
    add("--save", type=Path, default=Path("verify-failures"), metavar="DIR", help="failing cases")
    add("--case", type=Path, metavar="FILE.npz", help="run one saved case again")
    add("--adapters", type=Path, metavar="FILE.py", help="check the adapters of a course exercise")
    add(
        "--like",
        metavar="REF.py",
        help="hold --module's functions to those of this file, in any framework",
    )
    add(
        "--function",
        action="append",
        metavar="NAME",
        help="only this function of --like (REF=NEW where the names differ; may be repeated)",
    )
    add("--json", action="store_true", help="print the report as JSON on stdout")
    add(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the report as .json, .xml (JUnit) or .md (may be repeated)",
    )
    add("--golden", type=Path, metavar="DIR", help="write golden vectors into DIR")
    add("--against", type=Path, metavar="DIR", help="check results computed from golden vectors")
    return parser


def run(argv: list[str]) -> int:
    """Run ``myllm verify`` and return its exit status."""
    arguments = parser().parse_args(argv)
    # a table needs its width where there is no terminal to ask
    out = Console() if sys.stdout and sys.stdout.isatty() else Console(width=110)
    err = Console(stderr=True)
    for op in arguments.op or ():
        if op not in OPS and not arguments.like:
            parser().error(f"there is no op {op!r}; known: {', '.join(OPS)}{OTHERS}")
    for option in ("examples", "timeout", "budget", "jobs"):
        if (given := getattr(arguments, option)) is not None and not given > 0:
            parser().error(f"--{option} must be positive")
    if arguments.like and not arguments.module:
        parser().error("--like REF.py needs --module NEW.py, the file that is held to it")
    if arguments.function and not arguments.like:
        parser().error("--function goes with --like; an op of the contract is named by --op")
    try:
        for path in arguments.report:
            format_of(path)
    except ValueError as error:
        parser().error(str(error))
    for option in ("json", "report"):
        if arguments.golden is not None and getattr(arguments, option):
            parser().error(f"--golden makes no report: leave out --{option}")
    if arguments.golden is not None:
        count = write_golden(arguments.golden, seed=arguments.seed, ops=arguments.op)
        out.print(
            f"{count} files of golden vectors in {arguments.golden}; its README.md explains",
            markup=False,
        )
        return 0
    if arguments.against is not None:
        return _told([_results(arguments, err)], arguments, lambda found: found.show(out))
    if arguments.adapters is not None:
        from accel.verify import adapters

        found = _adapters(arguments, err if arguments.json else out, err)
        return _told([found], arguments, partial(adapters.show, out=out))
    if arguments.case is not None:
        return _told(_again(arguments, err), arguments, partial(_show_case, out=out))
    return _told(_reports(arguments, err), arguments, partial(show, console=out))


def _told(reports: Sequence[R], arguments: argparse.Namespace, tell: Callable[[R], None]) -> int:
    """Print and write reports, and return the exit status."""
    if arguments.json:
        print(to_json(reports), end="")
    else:
        for report in reports:
            if not report.error:
                tell(report)
    for path in arguments.report:  # which may fail: what was found has been told by then
        write_reports(path, reports)
    if not all(report.right for report in reports):
        return 1
    return 0 if all(report.ok for report in reports) else UNTRIED


def _results(arguments: argparse.Namespace, err: Console) -> GoldenReport:
    """Check results that were computed from golden vectors."""
    dtype = arguments.dtype[0] if arguments.dtype else None
    try:
        return check_results(
            arguments.against, seed=arguments.seed, dtype=dtype, partial=arguments.partial
        )
    except ValueError as error:
        return GoldenReport(str(arguments.against), error=_says(error, err))


def _adapters(arguments: argparse.Namespace, out: Console, err: Console) -> "Found":
    """Check the adapters of a course."""
    from accel.verify.adapters import Found, check_file

    path, options = arguments.adapters, Options(seed=arguments.seed, examples=arguments.examples)
    try:
        return check_file(path, options, arguments.timeout, out)
    except SubjectError as error:
        return Found(path.name, arguments.seed, error=_says(error, err))


def _reports(arguments: argparse.Namespace, err: Console) -> list[Report]:
    """Check all that was asked for; what cannot be checked is said."""
    sources, reports = _sources(arguments), list[Report]()
    for source, found in zip(sources, _check(sources, arguments, err), strict=True):
        if isinstance(found, Report):
            reports.append(found)
        elif source.module or isinstance(found, SubjectError):
            reports.append(_broken(source, found, err))
        else:
            missing = _broken(source, found, err)
            # a backend that was named has to be there in one mode at least
            last = source == [s for s in sources if s.backend == source.backend][-1]
            here = [r for r in reports if r.subject.startswith(f"{source.backend} (")]
            if arguments.backend and last and not here:
                reports.append(missing)
    if not reports:
        err.print("no fast backend runs here, so the reference checks itself", highlight=False)
        (found,) = _check([Source(backend="reference")], arguments, err)
        if isinstance(found, Exception):
            raise found
        reports.append(found)
    return reports


def _broken(source: Source, error: Exception, err: Console) -> Report:
    """Say why a subject cannot be checked, and return that as its report."""
    absent = source.backend and isinstance(error, ImportError)
    who = f"{source.name} is not here" if absent else "myllm verify"
    return Report(source.name, None, error=_says(error, err, who))


def _says(error: Exception, err: Console, who: str = "myllm verify") -> str:
    """Say why something cannot be checked, and return that."""
    err.print(f"{who}: {error}", markup=False, highlight=False, soft_wrap=True)
    return str(error)


def _sources(arguments: argparse.Namespace) -> list[Source]:
    """Return what is to be checked: modules, and backends when named or when there is no module."""
    functions = tuple(arguments.function or ())
    sources = [
        Source(module=path, like=arguments.like or "", functions=functions)
        for path in arguments.module or ()
    ]
    if arguments.module and not arguments.backend:
        return sources
    wanted = list(BACKENDS)
    if arguments.backend:
        wanted = []
        for name in arguments.backend:
            modes = [c for n, c in BACKENDS if n == name] or ["float32"]
            wanted += [(name, c) for c in modes]
    return sources + [
        Source(backend=name, compute=c) for name, c in wanted if arguments.compute in (None, c)
    ]


def _check(
    sources: Sequence[Source], arguments: argparse.Namespace, err: Console
) -> list[Report | Exception]:
    """Check the subjects, with a bar on a terminal and a line for each op elsewhere."""
    options = Options(
        ops=tuple(arguments.op) if arguments.op else None,
        dtypes=tuple(arguments.dtype) if arguments.dtype else None,
        seed=arguments.seed,
        examples=arguments.examples,
        thorough=arguments.thorough,
        save=arguments.save,
        partial=arguments.partial,
        budget=arguments.budget,
    )
    in_bf16 = dataclasses.replace(options, dtypes=options.dtypes or ("bf16",))
    asked = [(s, in_bf16 if s.backend and s.compute == "bf16" else options) for s in sources]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)

    def begin(plans: list[Plan]) -> ProgressOfAll:
        cases = {(i, op, dtype): n for i, plan in enumerate(plans) for op, dtype, n in plan}
        done = dict.fromkeys(cases, 0)
        task = bars.add_task("", total=sum(cases.values()))

        def tell(i: int, op: str, dtype: str, tried: int, count: int) -> None:
            unit = i, op, dtype
            if done[unit] == cases[unit]:
                return
            done[unit] = cases[unit] if tried == count else tried
            name = f"{op} {dtype}" if len(sources) == 1 else f"{sources[i].name}: {op} {dtype}"
            bars.update(task, completed=sum(done.values()), description=name)
            if tried == count and not err.is_terminal:
                through = sum(done[unit] == cases[unit] for unit in cases)
                print(f"{through}/{len(cases)} {name}", file=sys.stderr)

        return tell

    with bars:
        return check_all(asked, begin=begin, timeout=arguments.timeout, jobs=arguments.jobs)


def _again(arguments: argparse.Namespace, err: Console) -> list[Report]:
    """Run one saved case on every subject."""
    case, sources = load_failure(arguments.case), [Source(backend="cpu")]
    if arguments.module or arguments.backend:
        sources = _sources(arguments)
    reports = []
    for source in sources:
        try:
            report = replay_apart(source, case, timeout=arguments.timeout)
        except (ImportError, ValueError) as error:
            report = _broken(source, error, err)
        report.partial = arguments.partial
        for failure in report.failures:
            failure.rerun = case_command(source.command, arguments.case)
        reports.append(report)
    return reports


def _show_case(report: Report, out: Console) -> None:
    """Print what became of one case."""
    lines = [failure_text(failure) for failure in report.failures]
    if report.right:
        far = ", as far as it was tried" if report.untried else ""
        lines.append(f"{report.subject}: {report.ops[0].op} is right in this case{far}")
    for line in (*lines, *(f"not tried: {sentence}" for sentence in report.untried)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
