"""Wrong kernels by rule: the reference with one operator, number, term or bound changed.

A mutant that gives what the reference gives on every call by which the corpus shows its own
mistakes is taken for equivalent and left out, as is one that raises on any of them.
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from accel.verify.board.outcome import Call, differs
from accel.verify.spoiled import home_of, swapped, tree_of, with_file


class Mutant(NamedTuple):
    """One of them."""

    op: str
    name: str  # file, line, what stood there and what stands there now
    kernel: Any


# op -> the functions that are changed: of the op's own file, or ``file.function``
MUTATED: dict[str, tuple[str, ...]] = {
    **{
        op: ("forward", "backward")
        for op in ("scale", "relu", "gelu_tanh", "linear", "rmsnorm", "layernorm", "embedding")
    },
    "add": ("forward", "backward", "_sum_to"),
    "gelu": ("forward", "backward", "_normal_cdf"),
    "swiglu": ("forward", "backward", "_sigmoid"),
    "rope": ("forward", "backward", "_rotate", "frequencies"),
    "attention": (
        "forward",
        "backward",
        "softmax.softmax_backward",
        "visibility.allowed",
        "visibility.distance",
    ),
    "linear_cross_entropy": (
        "forward",
        "backward",
        "_chunks",
        "cross_entropy.nll",
        "cross_entropy.dlogits",
    ),
    "dropout": ("forward", "backward", "philox.keep_mask"),
    "softmax": ("softmax",),
    "logits": ("logits",),
    "square_sums": ("square_sums",),
    "global_norm": ("global_norm", "square_sums"),
    "adamw": ("adamw",),
    "muon": ("muon", "orthogonalise"),
    "write_kv": ("write_kv", "writes"),
    "kv_cache": ("slots", "empty_cache"),
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.RShift: ast.LShift,
}
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_NAMES = {
    "minimum": "maximum",
    "maximum": "minimum",
    "sum": "mean",
    "mean": "sum",
    "sin": "cos",
    "cos": "sin",
    "max": "min",
    "min": "max",
}


def mutants(op: str, calls: list[Call]) -> Iterator[Mutant]:
    """Yield an op's mutants that are wrong in float64 on one of the calls and raise on none."""
    for where in MUTATED[op]:
        file, _, name = where.rpartition(".")
        file = file or home_of(op)
        tree = tree_of(file)
        function = next(
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name
        )
        for node in _nodes(function):
            for changed in _changes(node):
                title = f"{file}.py:{node.lineno} {ast.unparse(node)} -> {ast.unparse(changed)}"
                kernel = with_file(op, file, swapped(tree, node, changed))
                if _wrong(kernel, calls):
                    yield Mutant(op, title, kernel)


def _wrong(kernel: Any, calls: list[Call]) -> bool:
    try:
        return any([bool(differs(kernel, call, "float64")) for call in calls])
    except Exception:  # whatever a changed line may raise: it would give itself away
        return False


def _nodes(function: ast.FunctionDef) -> list[Any]:
    body = function.body[1:] if isinstance(function.body[0], ast.Expr) else function.body
    return [n for s in body for n in ast.walk(s) if hasattr(n, "lineno")]


def _changes(node: Any) -> Iterator[Any]:
    """Yield a node in every other form that a rule makes of it."""

    def other(**fields: Any) -> Any:
        new = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    if isinstance(node, ast.BinOp):
        if type(node.op) in OPERATORS:
            yield other(op=OPERATORS[type(node.op)]())
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            yield node.left  # the other term, or factor, is forgotten
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield other(ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield other(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield other(value=node.value + 1)
    if isinstance(node, ast.Slice) and node.upper is not None:
        yield other(upper=ast.BinOp(node.upper, ast.Sub(), ast.Constant(1)))
    if isinstance(node, ast.Slice) and node.lower is not None:
        yield other(lower=ast.BinOp(node.lower, ast.Add(), ast.Constant(1)))
    if isinstance(node, ast.Attribute) and node.attr in _NAMES:
        yield other(attr=_NAMES[node.attr])
    if isinstance(node, ast.IfExp):
        yield other(body=node.orelse, orelse=node.body)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.where":
        yield other(args=[node.args[0], node.args[2], node.args[1]])
    if isinstance(node, ast.AugAssign):
        yield ast.copy_location(ast.Assign([node.target], node.value), node)
