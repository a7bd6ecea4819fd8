"""``myllm study``: the ladder, rung by rung, and exercises that are graded."""

import argparse
import ast
import math
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from textwrap import fill

from threadpoolctl import threadpool_limits

from accel.help import Wrapped
from dist.study.blank import exercise_text
from dist.study.exercise import Exercise, path_of, source_of
from dist.study.grade import TIMEOUT, absent, grade, home_of
from dist.study.tracks import EXERCISES, TRACKS
from reference.study import LADDER

FLAGS = {"--level", "--out", "--force", "--check"}  # that ask for an exercise, as -o does
LINES = 10  # of what a file prints while it is graded
_EPILOG = """\
examples:
  myllm study                            the rungs, and the exercises by track
  myllm study losses                     run a rung of the ladder
  myllm study classroom --text poem.txt  with what it takes: see its own --help
  myllm study rmsnorm                    write study_rmsnorm.py, backward blank
  myllm study rmsnorm --check study_rmsnorm.py
  myllm study rmsnorm --level 2          its forward; level 3: its Numba kernel
  myllm study attention --level 1        the exercise of a rung's name

exit status: 0 right, 1 not yet, 2 wrong usage.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="myllm study",
        description="Run a rung of the ladder, or write an exercise and have it graded.",
        epilog=_EPILOG,
        formatter_class=Wrapped,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        metavar="NAME",
        help="an exercise, or a rung, which gets all that follows (none: list both)",
    )
    add("--level", type=int, metavar="N", help="of an exercise: what is blank, see the list")
    add("-o", "--out", type=Path, metavar="FILE.py", help="where the exercise is written")
    add("--force", action="store_true", help="replace a file that is there")
    add("--check", type=Path, metavar="FILE.py", help="grade this file")
    add(
        "--timeout",
        type=seconds,
        metavar="S",
        help="of --check: seconds after which a call without an answer is given up (default "
        f"{TIMEOUT:g})",
    )
    return parser


def seconds(word: str) -> float:
    given = float(word)
    if not 0 < given < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {word}")
    return given


def run(argv: Sequence[str]) -> int:
    """Run ``myllm study`` and return its exit status."""
    rungs = {_rung(module): module for module in LADDER}
    asked = any(word.startswith("-o") or word.split("=")[0] in FLAGS for word in argv)
    if argv and argv[0] in rungs and not asked:
        return _run_rung(rungs[argv[0]], list(argv[1:]), argv[0])
    arguments = parser().parse_args(argv)
    name = arguments.name
    if name is None:
        if asked or arguments.timeout is not None:
            parser().error("say of which exercise; myllm study lists them")
        print(listing())
        return 0
    if name not in EXERCISES:
        if name in rungs:
            parser().error(f"{name} is a rung, not an exercise: myllm study {name} runs it")
        parser().error(f"there is no rung and no exercise {name!r}; myllm study lists them")
    exercise = EXERCISES[name]
    if arguments.check is not None:
        writing = {"--level": arguments.level, "-o": arguments.out, "--force": arguments.force}
        given = [word for word, value in writing.items() if value not in (None, False)]
        if given:
            parser().error(
                f"{' and '.join(given)} is for an exercise that is written; --check grades a file "
                "as it is, of whatever level: leave out one or the other"
            )
        return _check(exercise, arguments.check, arguments.timeout or TIMEOUT)
    if arguments.timeout is not None:
        parser().error("--timeout is for --check")
    level = 1 if arguments.level is None else arguments.level
    if not 1 <= level <= len(exercise.levels):
        if len(exercise.levels) == 1:
            parser().error(f"{name} has one level; leave out --level")
        parser().error(f"{name} has levels {_levels(exercise)}")
    out = arguments.out or Path(f"study_{name}{f'_{level}' * (level > 1)}.py")
    return _write(exercise, level, out, arguments.force)


# ---- the list ------------------------------------------------------------------------------------


def listing() -> str:
    """Return the rungs in order, and the exercises by track."""
    lines = ["The ladder: myllm study NAME runs a rung.", ""]
    width = max(len(_rung(module)) for module in LADDER)
    for module in LADDER:
        about = (ast.get_docstring(ast.parse(source_of(module))) or "").split("\n")[0]
        hanging = " " * (width + 4)
        lines.append(fill(f"  {_rung(module):<{width}}  {about}", 80, subsequent_indent=hanging))
    lines += ["", "Exercises: myllm study NAME writes one, --check FILE grades it.", ""]
    width = max(map(len, EXERCISES))
    for track, exercises in TRACKS.items():
        lines.append(f"  {track}")
        lines += [f"    {e.name:<{width}}  {_levels(e)}" for e in exercises]
        lines.append("")
    lines.append("Experiments: myllm study ablations tries positions, norms and heads.")
    return "\n".join(lines)


def _rung(module: str) -> str:
    """Return what a rung is called."""
    return module.removeprefix("reference.study.")


def _levels(exercise: Exercise) -> str:
    blanks = [f"{n} {blank}" for n, blank in enumerate(exercise.levels, 1)]
    return blanks[0][2:] if len(blanks) == 1 else ", ".join(blanks)


# ---- what is done --------------------------------------------------------------------------------


def _run_rung(module: str, rest: list[str], name: str) -> int:
    source = source_of(module)
    if rest and "import argparse" not in source:
        if not {"-h", "--help"} & set(rest):
            parser().error(f"{name} is a rung that takes no arguments, but {shlex.join(rest)} came")
        print(f"usage: myllm study {name}\n\n{ast.get_docstring(ast.parse(source))}")
        return 0
    before, sys.argv = sys.argv, [f"myllm study {name}", *rest]
    try:
        # by its path, as it may be imported already, where an exercise is made of it
        # more threads of BLAS only wait for each other in small products
        with threadpool_limits(1, "blas"):
            runpy.run_path(str(path_of(module)), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        raise ValueError(end.code) from None
    finally:
        sys.argv = before
    if name in EXERCISES:
        print(f"\n(the exercise of that name: myllm study {name} --level 1)")
    return 0


def _write(exercise: Exercise, level: int, out: Path, force: bool) -> int:
    check = f"myllm study {exercise.name} --check {shlex.quote(out.as_posix())}"
    text = exercise_text(exercise, level, check)
    if out.is_dir():
        parser().error(f"{out} is a folder; name a file")
    try:
        with open(out, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        parser().error(
            f"{out} is there already and stays as it is: {check} grades it, -o FILE.py writes "
            "elsewhere, --force replaces it"
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        parser().error(f"{out} cannot be written: {error.strerror}")
    print(f"{out}: write {exercise.levels[level - 1]}, then {check}")
    return 0


def _check(exercise: Exercise, path: Path, timeout: float) -> int:
    if not path.is_file():
        parser().error(absent(exercise.name, path))
    with _first_lines():
        found = grade(exercise, path, timeout=timeout)
    if not found.right:
        print(found.text)
        return 1
    home = home_of(exercise, path).replace(".", "/") + ".py"
    print(f"{exercise.name}: right in {found.calls} cases. Compare yours with {home}.")
    return 0


@contextmanager
def _first_lines() -> Iterator[None]:
    """Show of what is printed meanwhile, by other processes too, the first lines alone."""
    with tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            for line in islice(kept, LINES):
                print(line.decode(errors="replace").rstrip("\r\n"), file=sys.stderr)
            more = sum(1 for _ in kept)
            if more:
                print(f"({more} more lines that it printed)", file=sys.stderr)
