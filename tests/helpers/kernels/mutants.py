"""Wrong kernels by rule: each operator, comparison, number and bound of the reference, changed."""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from accel.verify.board.mutants import COMPARISONS, OPERATORS
from tests.helpers.kernels.rewrite import (
    found,
    kernel_of,
    place,
    statements,
    swapped,
    with_module,
)

_OPERATORS = {**OPERATORS, ast.BitXor: ast.BitAnd}
_NAMES = {"minimum": "maximum", "maximum": "minimum", "sum": "mean", "mean": "sum", "sin": "cos"}


class Mutant(NamedTuple):
    op: str
    title: str
    kernel: Any


# op -> the functions that mutants are made of
MUTATED: dict[str, tuple[str, ...]] = {
    **{op: ("forward", "backward") for op in ("scale", "relu", "linear", "rmsnorm", "layernorm")},
    "add": ("forward", "backward", "_sum_to"),
    "swiglu": ("forward", "backward", "_sigmoid"),
    "rope": ("forward", "backward", "_rotate", "frequencies"),
    "attention": ("forward", "backward", "softmax_backward", "allowed", "distance"),
    "linear_cross_entropy": ("forward", "backward", "_chunks", "nll", "dlogits"),
    "softmax": ("softmax",),
    "adamw": ("adamw",),
    "write_kv": ("write_kv", "writes"),
}
# What ``no_`` stands for in these can be changed without a mistake: everywhere, or in one function.
HARMLESS: dict[str, tuple[str, ...]] = {
    # any negative size is the one that is left
    "": ("x_.reshape(-no_, n_)", "x_.reshape(-no_)", "x_.reshape(a_, b_, c_, d_, -no_)"),
    # where nothing is allowed e is 0, whatever is taken off the scores and whatever divides it
    "forward": ("np.where(m_ == -np.inf, no_, m_)", "np.where(l_ == 0, no_, l_)"),
    # logits are (rows, V) here, so that the last axis is axis 1
    "nll": (
        "np.max(z_, axis=no_, keepdims=True)",
        "np.sum(e_, axis=no_)",
        "np.take_along_axis(z_, t_, axis=no_)",
    ),
    "writes": ("alike = no_",),  # rows at one place are written together, or one by one
    "dlogits": (
        "np.put_along_axis(p_, t_, v_, axis=no_)",
        "np.take_along_axis(p_, t_, axis=no_)",
    ),
}


def mutants(op: str) -> Iterator[Mutant]:
    """Yield an op with one node of its functions changed. What checks arguments is left alone."""
    for where in MUTATED[op]:
        module, function = place(op, where)
        patterns = (*HARMLESS[""], *HARMLESS.get(where, ()))
        spared = [bound["no_"] for p in patterns for _, bound in found(p, function)]
        harmless = [node for top in spared for node in ast.walk(top)]
        for node in [n for s in statements(function) for n in ast.walk(s) if n not in harmless]:
            for kind in ("operator", "number", "bound", "swap"):
                changed = copy.deepcopy(node)
                if not _change(changed, kind):
                    continue
                line = getattr(node, "lineno", function.lineno)
                title = f"{module}:{line} {ast.unparse(node)} -> {ast.unparse(changed)}"
                kernel = kernel_of(op, with_module(module, swapped(module, node, changed)), title)
                yield Mutant(op, title, kernel)


def _change(node: Any, kind: str) -> bool:
    """Change one node in place; say whether there was something to change."""
    if kind == "operator":
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            node.op = _OPERATORS[type(node.op)]()
            return True
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node.op = ast.UAdd()
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return False
    if kind == "number" and isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = node.value + 1
        return True
    if kind == "bound" and isinstance(node, ast.Slice):
        if node.upper is not None:
            node.upper = ast.BinOp(node.upper, ast.Sub(), ast.Constant(1))
            return True
        if node.lower is not None:
            node.lower = ast.BinOp(node.lower, ast.Add(), ast.Constant(1))
            return True
    if kind == "swap":
        if isinstance(node, ast.Attribute) and node.attr in _NAMES:
            node.attr = _NAMES[node.attr]
            return True
        where = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if where and node.func.attr == "where" and len(node.args) == 3:
            node.args[1], node.args[2] = node.args[2], node.args[1]
            return True
        if isinstance(node, ast.IfExp):
            node.body, node.orelse = node.orelse, node.body
            return True
    return False
