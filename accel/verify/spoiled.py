"""The reference with a mistake in it, to be tried where a kernel gives wrong results.

A mistake is a change of the text of an op's file in ``reference/``: what stands there becomes
something else. Those that people make often are listed in words beside the op's room
(``ops/*.txt``); the others come by rule: each term, factor, sign, axis, bound and name of the op,
changed one at a time.
"""

import ast
import copy
import functools
import importlib
import importlib.resources
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from accel.verify.load import functions_of
from accel.verify.ops import room
from reference.ops import OPS

Tree = TypeVar("Tree", bound=ast.AST)
HELPERS = ("softmax", "cross_entropy", "visibility")  # files of reference/ that ops lean on


class Mistake(NamedTuple):
    """One change of the reference, in words and as text."""

    says: str
    file: str  # of reference/
    changes: tuple[tuple[str, str], ...]  # what stands there, and what becomes of it


@functools.cache
def listed(op: str) -> list[Mistake]:
    """Return the mistakes of an op that people make often, from the tables of its room.

    A table is a text beside the room. A block has a line in words, then pairs of indented lines:
    what stands in the op's file, and what becomes of it. Words that begin with ``file:`` mean
    another file of ``reference/``, and ``~`` what loses digits, some way or other.
    """
    folder = importlib.resources.files("accel.verify.ops")
    found = []
    for table in (op, *room(op).TABLES):
        path = folder / f"{table}.txt"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for block in filter(None, re.split(r"\n\s*\n", text.strip())):
            says, *lines = block.splitlines()
            file, colon, rest = says.partition(": ")
            named = bool(colon) and " " not in file
            pairs = tuple(zip(lines[::2], lines[1::2], strict=True))
            changes = tuple((old.strip(), new.strip()) for old, new in pairs)
            found.append(Mistake(rest if named else says, file if named else home_of(op), changes))
    return found


def home_of(op: str) -> str:
    """Return the file of ``reference/`` that an op is in."""
    return OPS[op].home or op


@functools.cache
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a file of ``reference/``."""
    return ast.parse(inspect.getsource(importlib.import_module(f"reference.{file}")))


@functools.cache
def spoiled(op: str, mistake: Mistake) -> Any:
    """Return the public functions of an op with a mistake in it.

    Raises
    ------
    ValueError
        When the reference has changed so that the mistake no longer applies.
    """
    text = ast.unparse(tree_of(mistake.file))
    for old, new in mistake.changes:
        old = ast.unparse(ast.parse(old))  # in the same spelling
        if old not in text:
            raise ValueError(f"{op}, {mistake.says!r}: reference/{mistake.file}.py has no {old!r}")
        text = text.replace(old, new)
    return with_file(op, mistake.file, text)


def with_file(op: str, file: str, source: str | ast.Module) -> Any:
    """Return the functions of an op, one file of ``reference/`` having another source."""
    changed = ModuleType(f"reference.{file}")
    exec(compile(source, f"<spoiled {file}>", "exec"), vars(changed))
    return _offered(op, file, vars(changed))


def _with_function(op: str, file: str, function: ast.FunctionDef) -> Any:
    """Return the functions of an op, one function of a file being another."""
    names = _rebound(file)
    tree = ast.fix_missing_locations(ast.Module([function], []))
    exec(compile(tree, f"<spoiled {file}>", "exec"), names)
    return _offered(op, file, names)


def _offered(op: str, file: str, changed: dict[str, Any]) -> Any:
    home = home_of(op)
    if file == home:
        return SimpleNamespace(**functions_of(op, SimpleNamespace(**changed)))
    names, original = _rebound(home), f"reference.{file}"
    for name, value in list(names.items()):
        if getattr(value, "__module__", "") == original and name in changed:
            names[name] = changed[name]
    if "forward" in names:
        real = names["forward"]

        def again(a: Any) -> Any:
            """Make anew what is handed over as an object of that file."""
            kind = changed.get(type(a).__name__)
            theirs = isinstance(a, tuple) and type(a).__module__ == original and kind is not None
            return kind(*a) if theirs and kind is not None else a

        def forward(*args: Any, **options: Any) -> Any:
            return real(*map(again, args), **options)

        names["forward"] = forward
    return SimpleNamespace(**functions_of(op, SimpleNamespace(**names)))


def _rebound(file: str) -> dict[str, Any]:
    """Return the names of a file, its functions bound to these names and not to the file's."""
    original = importlib.import_module(f"reference.{file}")
    names = dict(vars(original))
    for name, value in vars(original).items():
        if isinstance(value, FunctionType) and value.__module__ == original.__name__:
            names[name] = FunctionType(value.__code__, names, name, value.__defaults__)
            names[name].__kwdefaults__ = value.__kwdefaults__
    return names


# ---- by rule -------------------------------------------------------------------------------------


@functools.cache
def by_rule(op: str) -> list[tuple[str, Callable[[], Any]]]:
    """Return changes of one place each: in words, and what makes the op with it."""
    found: list[tuple[str, Callable[[], Any]]] = []
    for file, function, method in _functions(op):
        where = f"{function.name} in reference/{file}.py"
        for says, node, new in _edits(function):
            make = functools.partial(_made, op, file, None if method else function, node, new)
            found.append((f"{says} ({where})", functools.cache(make)))
    return found


def _made(op: str, file: str, function: ast.FunctionDef | None, node: ast.AST, new: ast.AST) -> Any:
    if function is not None:
        return _with_function(op, file, swapped(function, node, new))
    return with_file(op, file, swapped(tree_of(file), node, new))


def _functions(op: str) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Yield the functions that an op is made of, its own first, and whether it is a method."""
    home = home_of(op)
    if home == "model":
        return  # a composition: the mistakes are those of the ops in it
    own = {name: f for f in _defined(home) if (name := f.name)}
    wanted = list(own) if home == op else [op]
    for name in wanted:  # which grows by what is called
        for n in ast.walk(own[name]):
            if isinstance(n, ast.Name) and n.id in own and n.id not in wanted:
                wanted.append(n.id)
    yield from ((home, own[name], False) for name in wanted)
    for node in tree_of(home).body:
        file = (getattr(node, "module", "") or "").removeprefix("reference.")
        if isinstance(node, ast.ImportFrom) and file in HELPERS:
            names = {alias.name for alias in node.names}
            for top in tree_of(file).body:
                if getattr(top, "name", "") in names:
                    for f in (n for n in ast.walk(top) if isinstance(n, ast.FunctionDef)):
                        if f is top or f.name in ("distance", "allowed"):
                            yield file, f, f is not top


def _defined(file: str) -> list[ast.FunctionDef]:
    return [node for node in tree_of(file).body if isinstance(node, ast.FunctionDef)]


def swapped(tree: Tree, old: ast.AST, new: ast.AST) -> Tree:
    """Return a tree with one node in the place of another."""
    # deepcopy takes what its memo holds for a node's copy
    return ast.fix_missing_locations(copy.deepcopy(tree, {id(old): new}))


Edit = tuple[str, ast.AST, ast.AST]

_OTHERS = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "sin": "cos", "cos": "sin"}
_OTHERS |= {"maximum": "minimum", "minimum": "maximum", "exp": "exp2", "log": "log2"}
_SIGNS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.GtE, ast.LtE, ast.NotEq),
    ast.NotEq: (ast.Eq,),
}


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return f"`{text}`" if len(text) <= 60 else f"`{text[:60]}…`"


def _edits(function: ast.FunctionDef) -> Iterator[Edit]:
    """Yield what may be wrong in a function, the likeliest first."""
    body = [s for s in function.body if not _checks(s)]
    nodes = [n for statement in body for n in ast.walk(statement)]
    along = [
        k.value for n in nodes if isinstance(n, ast.Call) for k in n.keywords if k.arg == "axis"
    ]
    inside = {id(n) for axis in along for n in ast.walk(axis)}  # axes are changed as a whole
    nodes = [n for n in nodes if id(n) not in inside]
    for node in nodes:
        if isinstance(node, ast.BinOp):
            yield from _of_operator(node)
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Attribute) and node.attr == "T":
            yield f"is the transposition {_short(node)} missing?", node, node.value
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield f"is the minus of {_short(node)} missing?", node, node.operand
        elif isinstance(node, ast.IfExp):
            yield f"is it always {_short(node.body)}?", node, node.body
            yield f"is it always {_short(node.orelse)}?", node, node.orelse
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SIGNS:
            for sign in _SIGNS[type(node.ops[0])]:
                new = ast.Compare(node.left, [sign()], node.comparators)
                yield f"{_short(new)} for {_short(node)}?", node, new
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            yield from _of_statement(node)
        elif isinstance(node, ast.Slice):
            yield from _of_slice(node)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            number: int | float = node.value  # type: ignore[assignment]
            for value in dict.fromkeys((number + 1, number - 1, number * 2, number / 2)):
                if value != number and (type(value) is int or type(number) is float):
                    yield f"{value} for {number}?", node, ast.Constant(value)
    yield from _of_names(function, nodes)


def _checks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    return any(isinstance(node, ast.Raise) for node in ast.walk(statement))


def _of_operator(node: ast.BinOp) -> Iterator[Edit]:
    a, b, op = node.left, node.right, type(node.op)
    whole = _short(node)
    if op in (ast.Add, ast.Sub):
        yield f"is the term {_short(b)} missing?", node, a
        yield (
            f"is the term {_short(a)} missing?",
            node,
            (b if op is ast.Add else ast.UnaryOp(ast.USub(), b)),
        )
        other = ast.Sub() if op is ast.Add else ast.Add()
        yield f"is the sign of {_short(b)} flipped?", node, ast.BinOp(a, other, b)
    elif op is ast.Mult:
        yield f"is the factor {_short(b)} missing?", node, a
        yield f"is the factor {_short(a)} missing?", node, b
        yield f"is it divided by {_short(b)}?", node, ast.BinOp(a, ast.Div(), b)
        yield f"is the factor {_short(b)} there twice?", node, ast.BinOp(node, ast.Mult(), b)
        yield f"is the factor {_short(a)} there twice?", node, ast.BinOp(a, ast.Mult(), node)
    elif op is ast.Div:
        yield f"is the division by {_short(b)} missing?", node, a
        yield f"is it multiplied by {_short(b)}?", node, ast.BinOp(a, ast.Mult(), b)
        yield f"is it divided by {_short(b)} twice?", node, ast.BinOp(node, ast.Div(), b)
    elif op is ast.MatMult:
        for old in (a, b):
            call = ast.Attribute(old, "swapaxes", ast.Load())
            turned = ast.Call(call, [ast.Constant(-1), ast.Constant(-2)], [])
            new = ast.BinOp(turned, op(), b) if old is a else ast.BinOp(a, op(), turned)
            yield f"is {_short(old)} transposed in {whole}?", node, new
    elif op is ast.Pow:
        yield f"is the power of {whole} missing?", node, a
    elif op is ast.FloorDiv:
        yield f"% for // in {whole}?", node, ast.BinOp(a, ast.Mod(), b)
    elif op is ast.Mod:
        yield f"// for % in {whole}?", node, ast.BinOp(a, ast.FloorDiv(), b)
    elif op is ast.BitAnd:
        yield f"is {_short(b)} left out?", node, a
        yield f"is {_short(a)} left out?", node, b
        inverted = ast.UnaryOp(ast.Invert(), b)
        yield f"is {_short(b)} turned around?", node, ast.BinOp(a, op(), inverted)


def _of_call(node: ast.Call) -> Iterator[Edit]:
    if not isinstance(node.func, ast.Attribute):
        return
    name, of = node.func.attr, node.func.value
    own = isinstance(of, ast.Name) and of.id in ("np", "math")
    if own and name in _OTHERS:
        new = ast.Call(ast.Attribute(of, _OTHERS[name], ast.Load()), node.args, node.keywords)
        yield f"{_OTHERS[name]} for {name} in {_short(node)}?", node, new
    if own and name in ("sqrt", "abs", "tanh", "exp", "log", "sum", "mean") and node.args:
        yield f"is the {name} of {_short(node)} missing?", node, node.args[0]
    if own and name == "where" and len(node.args) == 3:
        test, a, b = node.args
        yield f"is it {_short(a)} everywhere in {_short(node)}?", node, a
        yield f"is it {_short(b)} everywhere in {_short(node)}?", node, b
        yield f"are the two of {_short(node)} swapped?", node, ast.Call(node.func, [test, b, a], [])
    if not own and name in ("swapaxes", "transpose"):
        yield f"is the transposition {_short(node)} missing?", node, of
    for keyword in node.keywords:
        if keyword.arg == "axis":
            for axis in ("0", "-1", "-2", "None"):
                value = ast.parse(axis, mode="eval").body
                if ast.unparse(value) != ast.unparse(keyword.value):
                    rest = [k for k in node.keywords if k is not keyword]
                    new = ast.Call(node.func, node.args, [*rest, ast.keyword("axis", value)])
                    along = "all axes" if axis == "None" else f"axis {axis}"
                    yield f"is {_short(node)} taken over {along}?", node, new


def _of_statement(node: ast.Assign | ast.AugAssign) -> Iterator[Edit]:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    again = isinstance(node, ast.AugAssign) or (
        isinstance(target, ast.Name)
        and any(isinstance(n, ast.Name) and n.id == target.id for n in ast.walk(node.value))
    )
    if again:
        yield f"is {_short(node)} missing?", node, ast.Pass()
    if isinstance(node, ast.AugAssign):
        if isinstance(target, ast.Name):  # in place, as the array is the caller's
            target = ast.Subscript(ast.Name(target.id, ast.Load()), ast.Slice(), ast.Store())
        new = ast.Assign([target], node.value)
        yield f"is it assigned rather than added in {_short(node)}?", node, new


def _of_slice(node: ast.Slice) -> Iterator[Edit]:
    for part in ("lower", "upper"):
        bound = getattr(node, part)
        if bound is None:
            continue
        for sign, word in ((ast.Add(), "many"), (ast.Sub(), "few")):
            new = copy.copy(node)
            setattr(new, part, ast.BinOp(bound, sign, ast.Constant(1)))
            yield f"off by one? {_short(new)} for {_short(node)}, one too {word}.", node, new
        new = copy.copy(node)
        setattr(new, part, None)
        yield f"is the bound of {_short(node)} missing?", node, new


def _of_names(function: ast.FunctionDef, nodes: list[ast.AST]) -> Iterator[Edit]:
    """Yield one variable of a function taken for another."""
    own = {a.arg for a in function.args.args}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in own:
            for other in sorted(own - {node.id}):
                yield f"`{other}` for `{node.id}`?", node, ast.Name(other, ast.Load())
