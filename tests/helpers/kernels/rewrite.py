"""The reference with its source changed: where to change it is said by structure, not by text.

A pattern is Python in which a name that ends in ``_`` stands for any expression, one in ``__`` for
any name, and the same one twice for equal expressions: ``r_ * (d_ - n_ * m_)`` fits the line
``rstd * (dn - n * np.mean(dn * n, axis=-1))`` whatever its variables are called. A pattern must fit
exactly one place, or planting it fails in words.
"""

import ast
import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import reference

FOLDER = Path(reference.__path__[0])
Function = ast.FunctionDef


# ---- places --------------------------------------------------------------------------------------


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the reference, by the module's name."""
    return {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(FOLDER.glob("*.py"))
        if path.stem != "ops"  # which declares the ops, and computes nothing
    }


def functions_of(module: str) -> dict[str, Function]:
    """Return the functions of a module, and the methods of its classes."""
    found = [n for n in ast.walk(trees()[module]) if isinstance(n, Function)]
    return {function.name: function for function in found}


def place(op: str, where: str) -> tuple[str, Function]:
    """Return the module and the function that a place of an op means.

    ``forward`` and ``backward`` are the op's own. Another name is a function of the op's module, or
    the only one of that name.
    """
    home = home_of(op)
    for name in (f"{op}_{where}", where):
        if name in functions_of(home):
            return home, functions_of(home)[name]
    found = [(m, functions_of(m)[where]) for m in trees() if where in functions_of(m)]
    assert len(found) == 1, f"{op}: {where} is a function of {[m for m, _ in found]}, not of one"
    return found[0]


def home_of(op: str) -> str:
    """Return the module that an op is in."""
    if op in trees():
        return op
    (home,) = (m for m in trees() if functions_of(m).keys() & {f"{op}_forward", op})
    return home


# ---- patterns ------------------------------------------------------------------------------------


def parse(pattern: str) -> ast.AST:
    """Return the expression, or the statement, that a pattern is."""
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def fits(pattern: Any, node: Any, bound: dict[str, ast.AST]) -> bool:
    """Say whether a node has the form of a pattern; its wildcards are bound on the way."""
    if isinstance(pattern, ast.Name) and pattern.id.endswith("_"):
        if pattern.id in bound:
            return fits(bound[pattern.id], node, {})
        bound[pattern.id] = node
        return isinstance(node, ast.Name if pattern.id.endswith("__") else ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        both = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(fits(p, n, bound) for p, n in both)
    if isinstance(pattern, ast.AST):
        names = [name for name in pattern._fields if name not in ("ctx", "kind", "type_comment")]
        return all(fits(getattr(pattern, n), getattr(node, n), bound) for n in names)
    return bool(pattern == node)


class _Fill(ast.NodeTransformer):
    """Put what wildcards are bound to in their places."""

    def __init__(self, bound: dict[str, ast.AST]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.bound:
            return node
        filled = copy.deepcopy(self.bound[node.id])
        if hasattr(filled, "ctx"):
            filled.ctx = node.ctx
        return filled


class _Swap(ast.NodeTransformer):
    """Put another node in one node's place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def statements(function: Function) -> list[ast.stmt]:
    """Return what a function does: no docstring, and no statement that checks or may refuse."""
    return [s for s in function.body if not _checks(s)]


def _checks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
        return call.func.id.startswith("check_")
    return any(isinstance(node, ast.Raise) for node in ast.walk(statement))


def found(pattern: str, function: Function) -> Iterator[tuple[ast.AST, dict[str, ast.AST]]]:
    """Yield every node of a function that a pattern fits, and what it binds."""
    wanted = parse(pattern)
    for statement in statements(function):
        for node in ast.walk(statement):
            bound: dict[str, ast.AST] = {}
            if fits(wanted, node, bound):
                yield node, bound


def swapped(module: str, old: ast.AST, new: ast.AST) -> ast.Module:
    """Return a module's tree with one node in another's place."""
    memo = {id(old): old}  # the copy keeps this very node, so that it can be found
    changed = _Swap(old, new).visit(copy.deepcopy(trees()[module], memo))
    return ast.fix_missing_locations(changed)


def rewritten(op: str, where: str, old: str, new: str, title: str) -> ModuleType:
    """Return the reference with the one place that ``old`` fits made into ``new``."""
    module, function = place(op, where)
    places = list(found(old, function))
    assert len(places) == 1, (
        f"{title}: {old!r} must fit one place of {module}.{function.name}, it fits {len(places)}; "
        "was the line rewritten?"
    )
    node, bound = places[0]
    return with_module(module, swapped(module, node, _Fill(bound).visit(parse(new))))


# ---- another copy of the reference ---------------------------------------------------------------


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, f"<changed {self.name}>", "exec"), module.__dict__)


@functools.cache
def dependents(module: str) -> set[str]:
    """Return a module, ``ops``, and what imports them, directly or not."""
    imports = {
        name: {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        for name, tree in trees().items()
    }
    reached, before = {module, "ops"}, 0
    while len(reached) > before:
        before = len(reached)
        of = {f"reference.{name}" for name in reached}
        reached |= {name for name, used in imports.items() if used & of}
    return reached


def with_module(module: str, tree: ast.Module) -> ModuleType:
    """Return another ``reference.ops``, for which one module was made from a tree."""
    kept, attributes = dict(sys.modules), dict(vars(reference))  # importing sets both
    names = {f"reference.{name}" for name in dependents(module)}
    finder = _Changed(f"reference.{module}", tree)
    try:
        for name in names & kept.keys():
            del sys.modules[name]
        sys.meta_path.insert(0, finder)
        return importlib.import_module("reference.ops")
    finally:
        sys.meta_path.remove(finder)
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update({name: kept[name] for name in names & kept.keys()})
        vars(reference).update(attributes)


def kernel_of(op: str, module: Any, title: str, **functions: Any) -> Any:
    """Return the functions of one op of a module, some replaced, as a kernel to check."""
    names = [f"{op}_forward", f"{op}_backward", op]
    base = {n: getattr(module, n) for n in names if hasattr(module, n)}
    return SimpleNamespace(__name__=title, **{**base, **functions})
