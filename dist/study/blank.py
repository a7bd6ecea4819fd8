"""An exercise's text: a module of the repository, cut down to one function, which is left blank.

The text is made by its syntax tree from the source that is the solution: what the blank function
and what is given need stays, as it stands there, with its comments; the derivation in the
docstring of the module goes.
"""

import ast
import re
from textwrap import fill

from dist.study.exercise import Exercise, source_of

WIDTH = 100
MARK = "raise NotImplementedError"


def exercise_text(exercise: Exercise, level: int, command: str) -> str:
    """Return what is written for somebody to fill in.

    Parameters
    ----------
    exercise : Exercise
    level : int
        From 1.
    command : str
        What grades it.
    """
    blank, home = exercise.levels[level - 1], exercise.home_of(level)
    about = [f"Exercise {exercise.name}, level {level}: write {blank}.", "", exercise.says.strip()]
    if exercise.cases is not None and not exercise.in_place:
        about += ["", "What it is given stays as it is."]
    # the forward kernel beside a blank backward shows how such a thing is written
    beside = {f"_{exercise.name}_forward"} if home == exercise.kernels else set()
    code = cut(source_of(home), blank, {*wanted(exercise, blank), *beside})
    if home == exercise.kernels:
        told = [says for name, says in KERNEL.items() if re.search(rf"\b{name}\b", code)]
        about += ["", fill(" ".join(told), WIDTH)]
    path = home.replace(".", "/") + ".py"
    about += [
        "",
        "Replace the line that raises, then:",
        "",
        f"    {command}",
        "",
        f"The solution is {path}: for when yours is right, or you are stuck.",
    ]
    text = "\n".join(about).replace("\\", r"\\")  # a command may name a file with backslashes
    return f'"""{text}\n"""\n\n{code}'


# What is said of a kernel's language, by the names that occur in it.
KERNEL = {
    "pointer": "A kernel is compiled by Numba and gets addresses: pointer(x, like) makes something "
    "to index of one, at(p, n) is the same n elements further on.",
    "prange": "prange shares pieces among threads, so no two of them may write to one place.",
    "partial": "Sums over rows go to a row of partial for each piece.",
    "inv": "inv is 1/width.",
    "plus": "plus is the address of what is added to dx, 0 where nothing is.",
    "one": "one is 1 in the element type.",
    "landing": "part, landing, ask, leave and settle take large arrays past the caches where far "
    "says so; a loop that reads and writes its arrays without them is right as well.",
}


def wanted(exercise: Exercise, blank: str) -> set[str]:
    """Return what else stands in an exercise: the other half of an op, helpers, launchers."""
    if exercise.cases is not None:
        return {blank, *exercise.given}
    if blank.startswith("_"):
        return {blank, f"{exercise.name}_forward", f"{exercise.name}_backward"}
    return {"forward", "backward", *exercise.given} if blank in ("forward", "backward") else {blank}


def cut(source: str, blank: str, wanted: set[str]) -> str:
    """Return the imports, constants and functions of ``wanted`` and all they need, one blank.

    Parameters
    ----------
    source : str
    blank : str
        A function, or ``Class.method``; nothing is left blank when it is "".
    wanted : set of str
        Names of functions; a class when a method of it is named.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    nodes = {name: node for node in tree.body for name in _defines(node)}
    function = function_of(tree, blank) if blank else None
    solution = _names(function.body[_given_of(function) :]) if function is not None else set()
    inside = set(map(id, function.body[_given_of(function) :])) if function is not None else set()
    constants = {n for n, node in nodes.items() if isinstance(node, (ast.Assign, ast.AnnAssign))}

    kept: set[str] = set()
    todo = {name.split(".")[0] for name in wanted} | (solution & constants)
    while todo:
        name = todo.pop()
        if name in kept or name not in nodes:
            continue
        kept.add(name)
        todo |= _names([nodes[name]], inside)
    used = {"np"} | solution | {n for name in kept for n in _names([nodes[name]], inside)}

    text, before = _imports(tree, used), ""
    for node in tree.body:
        if kept & set(_defines(node)):
            kind = "constant" if isinstance(node, (ast.Assign, ast.AnnAssign)) else "function"
            gap = 3 if "function" in (kind, before) else 2 - bool(before)
            text += "\n" * gap + _text(node, lines, function)
            before = kind
    return text.replace("@jit(", "@njit(") + "\n"


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        names = [n for target in node.targets for n in ast.walk(target)]
        return [n.id for n in names if isinstance(n, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def function_of(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return the definition of a function, or of ``Class.method``."""
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        (found,) = (
            n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part
        )
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def _given_of(function: ast.FunctionDef) -> int:
    """Return how many statements are given: the docstring, and what a kernel names its arrays."""
    first = function.body[0]
    n = int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))
    if function.decorator_list and function.name.startswith("_"):
        n = next(i for i, s in enumerate(function.body) if isinstance(s, ast.For))
    return n


def _names(nodes: list[ast.stmt], without: set[int] = frozenset()) -> set[str]:  # type: ignore[assignment]
    """Return every name that statements mention, also in quoted annotations."""
    found: set[str] = set()
    stack: list[ast.AST] = list(nodes)
    while stack:
        node = stack.pop()
        if id(node) in without:
            continue
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {word for word in (node.value.split(".")[0],) if word.isidentifier()}
        stack += ast.iter_child_nodes(node)
    return found


def _imports(tree: ast.Module, used: set[str]) -> str:
    """Return the imports of what is used, and of NumPy in any case."""
    groups: list[list[str]] = [[], [], []]  # the standard library, others, ours
    numpy = False
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [a for a in node.names if (a.asname or a.name).split(".")[0] in used]
        if not names:
            continue
        kept = type(node)(**{**vars(node), "names": names})
        line = ast.unparse(kept)
        numpy |= line == "import numpy as np"
        line = line.replace("from accel.jit import jit", "from numba import njit")
        top = line.split()[1].split(".")[0]
        if len(line) > WIDTH:
            inside = "".join(f"    {name},\n" for name in _spelt(names))
            line = f"{line.split(' import ')[0]} import (\n{inside})"
        ours = top in ("reference", "accel", "tokenizer", "dist")
        groups[2 if ours else 1 if top in ("numpy", "numba", "regex") else 0].append(line)
    if not numpy:
        groups[1].append("import numpy as np")
    return "\n\n".join("\n".join(sorted(group)) for group in groups if group)


def _spelt(names: list[ast.alias]) -> list[str]:
    return [f"{a.name} as {a.asname}" if a.asname else a.name for a in names]


def _text(node: ast.stmt, lines: list[str], blank: ast.FunctionDef | None) -> str:
    """Return the lines of a statement, with the blank function's body taken out."""
    first = _first_line(node)
    while first > 1 and lines[first - 2].startswith("#") and "----" not in lines[first - 2]:
        first -= 1
    assert node.end_lineno is not None
    text = lines[first - 1 : node.end_lineno]
    if blank is not None and node.lineno <= blank.lineno and blank.lineno <= node.end_lineno:
        assert blank.end_lineno is not None
        body = blank.body[_given_of(blank) :]
        indent = " " * body[0].col_offset
        head = text[: body[0].lineno - first]
        while head[-1].strip().startswith("#"):  # which speaks of the line that went
            head.pop()
        raising = f'{indent}{MARK}("write {blank.name}")'
        text = [*head, raising, *text[blank.end_lineno - first + 1 :]]
    return "\n".join(text)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    given = function.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
