"""Wrong kernels: the reference with one mistake in it.

``verify_patches.py`` lists mistakes that people make, as changes of the reference's text;
``WRITTEN`` are those that need more than a line; ``mutants`` makes many more by rule. Each comes
with the op and the result that has to be named as wrong.
"""

import ast
import copy
import linecache
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import reference
from reference import ops
from reference.types import Array
from tests.helpers.kernels.patches import Patch

REFERENCE = Path(reference.__path__[0])


def load(file: str, source: str, name: str) -> ModuleType:
    """Return a file of the reference with another text as a module of its own."""
    module = ModuleType(name)
    path = f"<{name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


HOME = {  # where an op lives
    "split_heads": "heads",
    "merge_heads": "heads",
    "gelu_tanh": "gelu",
    "logits": "linear",
    "write_kv": "kv",
    "kv_cache": "kv",
    "square_sums": "global_norm",
}


def kernel_of(op: str, file: str, source: str, title: str) -> Any:
    """Return a module with the op's functions, made with one file changed."""
    changed = load(file, source, title)
    home = HOME.get(op, op)
    module = changed
    if file != home:  # the op's own file, with what it imports from the changed one replaced
        module = load(home, (REFERENCE / f"{home}.py").read_text(encoding="utf-8"), title)
        for name, value in vars(changed).items():
            if callable(value) and hasattr(module, name) and not isinstance(value, type):
                setattr(module, name, value)
    functions = [f"{op}_forward", f"{op}_backward", op]
    found = {n: getattr(module, n) for n in functions if hasattr(module, n)}
    return SimpleNamespace(__name__=title, **found)


def patched(patch: Patch) -> Any:
    """Return the kernel with this mistake."""
    source = (REFERENCE / f"{patch.file}.py").read_text(encoding="utf-8")
    assert source.count(patch.old) == 1, f"{patch.title}: {patch.old!r} must occur once"
    changed = source.replace(patch.old, patch.new)
    return kernel_of(patch.op, patch.file, changed, patch.title)


# ---- mistakes that need more than a line ---------------------------------------------------------


class Written(NamedTuple):
    title: str
    op: str
    wrong: str
    kernel: Any
    dtype: str = "float32"


def _of(op: str, **functions: Any) -> Any:
    """Return the reference's op with some functions replaced."""
    names = [f"{op}_forward", f"{op}_backward", op]
    base = {n: getattr(ops, n) for n in names if hasattr(ops, n)}
    return SimpleNamespace(**{**base, **functions})


def _stale_cache() -> Any:
    """The statistics of the last forward, whichever that was."""
    kept: dict[str, Any] = {}

    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Any:
        out, kept["cache"] = ops.rmsnorm_forward(x, gain, eps=eps)
        return out, None

    def rmsnorm_backward(dout: Array, cache: Any, *, out: Any = None) -> Any:
        return ops.rmsnorm_backward(dout, kept["cache"], out=out)

    return _of("rmsnorm", rmsnorm_forward=rmsnorm_forward, rmsnorm_backward=rmsnorm_backward)


def _table_by_shape() -> Any:
    """A table of angles kept by shape, whatever start and base."""
    tables: dict[Any, Any] = {}

    def rope_forward(x: Array, *, base: float, start: Any = 0, rotate_heads: Any = None) -> Any:
        _, cache = ops.rope_forward(x, base=base, start=start, rotate_heads=rotate_heads)
        cache = tables.setdefault((x.shape, x.dtype, rotate_heads), cache)
        return ops.rope_backward(x, cache._replace(sin=-cache.sin)), cache

    return _of("rope", rope_forward=rope_forward)


def _one_buffer() -> Any:
    """Every result in one and the same buffer."""
    buffers: dict[Any, Array] = {}

    def gelu_forward(x: Array) -> Any:
        out, cache = ops.gelu_forward(x)
        buffer = buffers.setdefault((x.shape, x.dtype), np.empty_like(out))
        buffer[...] = out
        return buffer, cache

    return _of("gelu", gelu_forward=gelu_forward)


def _strides_ignored() -> Any:
    """Reads memory as if it were contiguous."""

    def raw(x: Array) -> Array:
        if x.flags.c_contiguous or x.base is None:
            return x
        flat = x.base.reshape(-1)[: x.size]
        return flat.reshape(x.shape) if flat.size == x.size else np.ascontiguousarray(x)

    def relu_forward(x: Array) -> Any:
        return ops.relu_forward(raw(x))

    return _of("relu", relu_forward=relu_forward)


def _writes_its_argument() -> Any:
    def swiglu_backward(dout: Array, cache: Any) -> Array:
        result = ops.swiglu_backward(dout, cache)
        dout *= 2
        return result

    return _of("swiglu", swiglu_backward=swiglu_backward)


def _spends_its_cache() -> Any:
    def attention_backward(dout: Array, cache: Any) -> Any:
        result = ops.attention_backward(dout, cache)
        cache.p[...] *= 0.5
        return result

    return _of("attention", attention_backward=attention_backward)


def _tile(size: int, what: str) -> Any:
    """The keys of the last, partial tile are lost."""

    def attention_forward(q: Array, k: Array, v: Array, *rest: Any, **options: Any) -> Any:
        out, cache = ops.attention_forward(q, k, v, *rest, **options)
        S = k.shape[1]
        if what == "forward" and S > size and S % size:
            out = out.copy()
            out[:, -(S % size) :] = 0
        return out, cache

    def attention_backward(dout: Array, cache: Any) -> Any:
        dq, dk, dv = ops.attention_backward(dout, cache)
        S = dk.shape[1]
        if what == "backward" and S > size and S % size:
            dk = dk.copy()
            dk[:, -(S % size) :] *= 0.5
        return dq, dk, dv

    return _of(
        "attention", attention_forward=attention_forward, attention_backward=attention_backward
    )


def _only_with_groups() -> Any:
    def attention_backward(dout: Array, cache: Any) -> Any:
        dq, dk, dv = ops.attention_backward(dout, cache)
        G = cache.q.shape[2]
        return dq, dk, dv if G < 5 else dv * (4 / G)

    return _of("attention", attention_backward=attention_backward)


def _only_with_mask_and_groups() -> Any:
    def attention_forward(
        q: Array,
        k: Array,
        v: Array,
        alibi: Any = None,
        key_mask: Any = None,
        documents: Any = None,
        **options: Any,
    ) -> Any:
        if key_mask is not None and q.shape[2] > k.shape[2] > 1:
            key_mask = np.ones_like(key_mask)
        return ops.attention_forward(q, k, v, alibi, key_mask, documents, **options)

    return _of("attention", attention_forward=attention_forward)


def _half_precision() -> Any:
    def linear_forward(x: Array, weight: Array, bias: Any = None) -> Any:
        out, cache = ops.linear_forward(x, weight, bias)
        out = (x.astype(np.float16) @ weight.astype(np.float16)).astype(x.dtype)
        return (out if bias is None else out + bias), cache

    return _of("linear", linear_forward=linear_forward)


def _single_precision() -> Any:
    def softmax(x: Array) -> Array:
        return ops.softmax(x.astype(np.float32)).astype(x.dtype)

    return SimpleNamespace(softmax=softmax)


def _promotes() -> Any:
    def scale_forward(x: Array, *, factor: float) -> Any:
        return x * np.float64(factor), ops.scale_forward(x, factor=factor)[1]

    return _of("scale", scale_forward=scale_forward)


def _behind_the_end() -> Any:
    def layernorm_backward(dout: Array, cache: Any, *, out: Any = None) -> Any:
        result = ops.layernorm_backward(dout, cache, out=out)
        if out is not None and out[0] is not None and out[0].base is not None:
            flat = out[0].base
            flat[len(flat) - 4] = 0  # one past the last element
        return result

    return _of("layernorm", layernorm_backward=layernorm_backward)


def _targets_read_where_masked() -> Any:
    def linear_cross_entropy_forward(
        x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None, **options: Any
    ) -> Any:
        if (targets < 0).any():
            raise IndexError("target out of bounds")
        return ops.linear_cross_entropy_forward(x, head, targets, mask, bias, **options)

    return _of("linear_cross_entropy", linear_cross_entropy_forward=linear_cross_entropy_forward)


def _rope_halves() -> Any:
    def turn(f: Any, x: Array, *args: Any, **options: Any) -> Any:
        d = x.shape[-1]
        order = np.arange(d).reshape(2, d // 2).T.reshape(-1)
        result = f(x[..., order], *args, **options)
        back = np.argsort(order)
        if isinstance(result, tuple):
            return result[0][..., back], result[1]
        return result[..., back]

    def rope_forward(x: Array, **options: Any) -> Any:
        return turn(ops.rope_forward, x, **options)

    def rope_backward(dout: Array, cache: Any) -> Any:
        return turn(ops.rope_backward, dout, cache)

    return _of("rope", rope_forward=rope_forward, rope_backward=rope_backward)


WRITTEN = [
    Written("stale cache", "rmsnorm", "dx", _stale_cache()),
    Written("table of angles kept by shape", "rope", "out", _table_by_shape()),
    Written("one buffer for every result", "gelu", "out", _one_buffer()),
    Written("strides ignored", "relu", "out", _strides_ignored()),
    Written("dout written into", "swiglu", "dout", _writes_its_argument()),
    Written("cache written into", "attention", "dq", _spends_its_cache()),
    Written("last tile of 16 lost", "attention", "out", _tile(16, "forward")),
    Written("last tile of 64 lost", "attention", "out", _tile(64, "forward")),
    Written("last tile of 128 lost in dk", "attention", "dk", _tile(128, "backward")),
    Written("dv wrong for groups of five", "attention", "dv", _only_with_groups()),
    Written("mask lost with groups", "attention", "out", _only_with_mask_and_groups()),
    Written("float16 inside", "linear", "out", _half_precision()),
    Written("float32 inside", "softmax", "out", _single_precision(), "float64"),
    Written("promotes to float64", "scale", "out", _promotes()),
    Written("written behind the end", "layernorm", "dgain", _behind_the_end()),
    Written("masked targets read", "linear_cross_entropy", "", _targets_read_where_masked()),
    Written("pairs j with j + d/2", "rope", "out", _rope_halves()),
]


# ---- by rule -------------------------------------------------------------------------------------

_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
    ast.RShift: ast.LShift,
}
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_NAMES = {"minimum": "maximum", "maximum": "minimum", "sum": "mean", "mean": "sum", "sin": "cos"}


class Mutant(NamedTuple):
    op: str
    title: str
    kernel: Any


def mutants(op: str, file: str, only: set[str]) -> Iterator[Mutant]:
    """Yield an op with one node of a file changed: an operator, a comparison, a number, a bound.

    ``only`` names the functions in which to change something. Checks of arguments (``raise`` and
    what decides about it) are left alone.
    """
    source = (REFERENCE / f"{file}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    spots = []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in only:
            for statement in function.body:
                refuses = any(isinstance(n, ast.Raise) for n in ast.walk(statement))
                docstring = isinstance(statement, ast.Expr) and isinstance(
                    statement.value, ast.Constant
                )
                if not refuses and not docstring:
                    spots += list(ast.walk(statement))
    for at in range(len(spots)):
        for kind in ("operator", "number", "bound", "swap"):
            copied = copy.deepcopy(tree)
            node = _same_node(tree, copied, spots[at])
            before = ast.unparse(node) if isinstance(node, ast.expr) else ""
            if not _change(node, kind):
                continue
            after = ast.unparse(node) if isinstance(node, ast.expr) else ""
            title = f"{file}:{getattr(node, 'lineno', 0)} {before} -> {after}"
            ast.fix_missing_locations(copied)
            yield Mutant(op, title, kernel_of(op, file, ast.unparse(copied), title))


def _same_node(tree: ast.AST, copied: ast.AST, node: ast.AST) -> Any:
    pairs = zip(ast.walk(tree), ast.walk(copied), strict=True)
    return next(b for a, b in pairs if a is node)


def _change(node: Any, kind: str) -> bool:
    """Change one node in place; say whether there was something to change."""
    if kind == "operator":
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            node.op = _OPERATORS[type(node.op)]()
            return True
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            node.ops[0] = _COMPARISONS[type(node.ops[0])]()
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


# op -> the file and the functions that mutants are made of
MUTATED: dict[str, list[tuple[str, set[str]]]] = {
    "add": [("add", {"add_forward", "add_backward", "_sum_to"})],
    "scale": [("scale", {"scale_forward", "scale_backward"})],
    "embedding": [("embedding", {"embedding_forward", "embedding_backward"})],
    "linear": [("linear", {"linear_forward", "linear_backward"})],
    "split_heads": [("heads", {"split_heads_forward", "split_heads_backward"})],
    "merge_heads": [("heads", {"merge_heads_forward", "merge_heads_backward"})],
    "rmsnorm": [("rmsnorm", {"rmsnorm_forward", "rmsnorm_backward"})],
    "layernorm": [("layernorm", {"layernorm_forward", "layernorm_backward"})],
    "rope": [("rope", {"rope_forward", "rope_backward", "_rotate"})],
    "attention": [
        ("attention", {"attention_forward", "attention_backward", "_distance", "_allowed"}),
        ("softmax", {"softmax_backward"}),
    ],
    "swiglu": [("swiglu", {"swiglu_forward", "swiglu_backward", "_sigmoid"})],
    "gelu": [("gelu", {"gelu_forward", "gelu_backward", "_normal_cdf"})],
    "gelu_tanh": [("gelu", {"gelu_tanh_forward", "gelu_tanh_backward"})],
    "relu": [("relu", {"relu_forward", "relu_backward"})],
    "dropout": [
        ("dropout", {"dropout_forward", "dropout_backward"}),
        ("philox", {"keep_mask"}),
    ],
    "linear_cross_entropy": [
        (
            "linear_cross_entropy",
            {"linear_cross_entropy_forward", "linear_cross_entropy_backward", "_chunks"},
        ),
        ("cross_entropy", {"nll", "dlogits"}),
    ],
    "softmax": [("softmax", {"softmax"})],
    "logits": [("linear", {"logits"})],
    "square_sums": [("global_norm", {"square_sums"})],
    "global_norm": [("global_norm", {"global_norm", "square_sums"})],
    "accumulate": [("accumulate", {"accumulate"})],
    "adamw": [("adamw", {"adamw"})],
    "kv_cache": [("kv", {"kv_cache", "empty_cache", "slots"})],
    "write_kv": [("kv", {"write_kv", "check_write", "writes"})],
}
