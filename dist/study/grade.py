"""Somebody's file held to the reference: ops by ``accel.verify``, other functions by calls.

A function is called with the same arguments as the solution, and so is each mistake that learners
make in it: one that gives what the file gives, in every call that is wrong, is named.
"""

import ast
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from accel.system import end_with_parent, out_of_reach
from accel.verify import check
from accel.verify.apart import Source, check_apart
from accel.verify.calls import Call, Verdict, difference, judge, outcome
from accel.verify.load import import_file
from accel.verify.report import failure_text
from dist.study.blank import MARK, function_of, parameters
from dist.study.call import NEAR, called, written
from dist.study.exercise import Exercise, Mistake, mistaken, module_of, source_of
from dist.study.tracks import EXERCISES

SEED = 0
# cases of an op in each precision, by the op where None: what is right in float64 may leave float32
DTYPES = {"float64": None, "float32": 20}
TIMEOUT = 60.0  # seconds without an answer
CLOSE = 1e-9  # of the largest element: float64, in any order of summation


def grade(exercise: Exercise, path: Path, *, timeout: float = TIMEOUT) -> Verdict:
    """Hold a file to the reference.

    Raises
    ------
    ValueError
        When the file is no attempt at this exercise: missing, unfinished, of another one.
    """
    check_file(exercise, path)
    return (_grade_function if exercise.cases else _grade_op)(exercise, path, timeout)


def home_of(exercise: Exercise, path: Path) -> str:
    """Return the module that holds the solution of the level that a file is of."""
    kernels = f"def _{exercise.name}_" in path.read_text(encoding="utf-8")
    return exercise.kernels if exercise.kernels and kernels else exercise.home


def absent(name: str, path: Path) -> str:
    """Say of a path that is no file's what to do."""
    if path.is_dir():
        return f"{path} is a folder; name a file"
    word = shlex.quote(path.as_posix())
    return f"there is no file {path}; myllm study {name} -o {word} writes it"


def check_file(exercise: Exercise, path: Path) -> None:
    """Raise unless a file can be an attempt at an exercise, with a sentence on what to do."""
    name, again = exercise.name, f"myllm study {exercise.name} -o ANOTHER.py"
    word = shlex.quote(path.as_posix())
    if not path.is_file():
        raise ValueError(absent(name, path))
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        says = getattr(error, "msg", error)  # which alone names no line again
        raise ValueError(f"{path}{where}: this is no Python: {says}") from None
    first = (ast.get_docstring(tree) or "").split("\n")[0]
    of = first.removeprefix("Exercise ").split(",")[0] if first.startswith("Exercise ") else name
    if of != name:
        raise ValueError(f"{path} is of the exercise {of}: myllm study {of} --check {word}")
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    wanted = [exercise.function] if exercise.cases else exercise.levels[:2]
    home = home_of(exercise, path)
    if home == exercise.kernels:
        wanted = [f"_{name}_forward", f"_{name}_backward"]
    for function in wanted:
        short = function.split(".")[-1]
        if short not in functions:
            raise ValueError(
                f"{path} has no function {short}: was it overwritten? {again} writes the exercise "
                "anew"
            )
        now = parameters(function_of(ast.parse(source_of(home)), function))
        own = parameters(functions[short])
        if len(own) != len(now) or (own != now and sorted(own) == sorted(now)):
            raise ValueError(
                f"{path}: {short} takes {', '.join(own) or 'nothing'}, but it is to take "
                f"{', '.join(now)}: changed by hand, or written by an earlier version? {again} "
                "writes the exercise as it is now"
            )
    for function, node in functions.items():
        last = node.body[-1]
        if MARK in ast.unparse(last) and f"write {function}" in ast.unparse(last):
            raise ValueError(f"{path}, line {last.lineno}: {function} is still blank; write it")


# ---- an op ---------------------------------------------------------------------------------------


def _grade_op(exercise: Exercise, path: Path, timeout: float) -> Verdict:
    source, calls = Source(module=str(path), op=exercise.name), 0
    for dtype, examples in DTYPES.items():
        options = check.Options((exercise.name,), (dtype,), SEED, examples, short=True)
        report = check_apart(source, options, timeout=timeout)
        calls += report.cases
        texts = []
        for failure in report.failures:
            failure.rerun = failure.file = ""
            texts.append(failure_text(failure))
        if not report.ok:
            return Verdict(False, calls, "\n\n".join(texts))
    return Verdict(True, calls, "")


# ---- a function ----------------------------------------------------------------------------------


def _grade_function(exercise: Exercise, path: Path, timeout: float) -> Verdict:
    """Grade in a process of its own, which may crash or never come back."""
    with tempfile.TemporaryDirectory(prefix="myllm-study-") as folder:
        answer = Path(folder) / "answer.json"
        code = f"import sys; sys.path[:] = {sys.path!r}; from dist.study.grade import work; work()"
        words = [sys.executable, "-c", code, exercise.name, str(path), str(answer)]
        try:
            done = subprocess.run(words, timeout=timeout, stdout=2, check=False, **out_of_reach())
        except subprocess.TimeoutExpired:
            return Verdict(False, 0, f"FAIL {exercise.name}: no answer within {timeout:g} s")
        if not answer.exists():
            how = f"ended the process with status {done.returncode}"
            return Verdict(False, 0, f"FAIL {exercise.name}: {exercise.function} {how}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "refused" in found:
        raise ValueError(found["refused"])
    return Verdict(**found)


def work() -> None:
    """Grade the file that the command line names, and write what was found, in the process."""
    name, path, answer = sys.argv[1:]
    end_with_parent()
    with redirect_stdout(sys.stderr):
        try:
            module = import_file(path)
            found: dict[str, Any] = grade_module(EXERCISES[name], module)._asdict()
        except ValueError as error:
            found = {"refused": str(error)}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def grade_module(exercise: Exercise, module: ModuleType) -> Verdict:
    """Grade a module with the function of an exercise."""
    solution = module_of(source_of(exercise.home), "solution")
    right = [outcome(partial(called, exercise, solution, case)) for case in _cases(exercise)]

    def calls(module: ModuleType, wanted: list[Any]) -> list[Callable[[], Any]]:
        cases = zip(_cases(exercise), wanted, strict=True)
        return [partial(called, exercise, module, case, want) for case, want in cases]

    # only what is otherwise right is held to all else that is asked
    found = [outcome(make) for make in calls(module, [None] * len(right))]
    near = not any(difference(want, got, NEAR) for want, got in zip(right, found, strict=True))
    wanted = right if near else [None] * len(right)

    def results(mistake: Mistake) -> list[Any]:
        wrong = module_of(mistaken(exercise, mistake), "mistaken")
        return [outcome(make) for make in calls(wrong, wanted)]

    texts = [written(exercise, solution, case) for case in _cases(exercise)]
    return judge(
        exercise.name,
        [Call(text, make) for text, make in zip(texts, calls(module, wanted), strict=True)],
        [[result] for result in right],
        [(m.says, partial(results, m)) for m in exercise.mistakes],
        0.0 if exercise.bits else CLOSE,
        getattr(module, "__file__", ""),
    )


def _cases(exercise: Exercise) -> Iterator[tuple[Any, ...]]:
    assert exercise.cases is not None
    return exercise.cases(np.random.default_rng(SEED))
