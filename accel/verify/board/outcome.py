"""One call of a kernel, all that comes out of it, and whether that is what the reference gives.

This knows nothing of how ``accel.verify`` judges: the reference in float64 on the same numbers is
the truth, and a result is wrong when it is off by more than 20 times what the reference itself
loses in the kernel's precision and by more than 20 roundings of the largest element.
"""

import inspect
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import round_bf16
from accel.verify.contract import numpy_dtype
from reference import ops
from reference.contract import Op
from reference.ops import OPS
from reference.types import Array, KVCache, Loss

MARGIN = 20


class Call(NamedTuple):
    """How a kernel is called."""

    op: str
    arrays: tuple[Any, ...]  # by position
    options: dict[str, Any]  # by name; optional arrays too
    receivers: str = ""  # "out" or "accumulate": gradients go where out= says
    times: int = 1  # how often it is called; each must be right
    again: str = ""  # "new values": the same buffers with new numbers, called once more
    forward_only: bool = False
    dout_order: str = "C"
    then: Any = None  # another Call, made right after by the same kernel
    dloss: float = 0.7
    half: bool = False  # whether the cotangent holds bf16 values, whatever its type


class Result(NamedTuple):
    """One array that came out."""

    name: str  # out, d<name>, or state for what was written in place
    value: Array

    @property
    def gradient(self) -> bool:
        """Whether it is a gradient."""
        return self.name.startswith("d")


def rng(seed: int = 0) -> np.random.Generator:
    """Return a generator of numbers."""
    return np.random.default_rng(seed)


def normal(
    shape: Any, size: float = 1.0, seed: int = 0, dtype: Any = np.float32, shift: float = 0.0
) -> Array:
    """Return normal numbers."""
    return np.asarray(rng(seed).standard_normal(shape) * size + shift, dtype)


def outcome(module: Any, call: Call, dtype: str | None = None, given: Any = None) -> list[Result]:
    """Return everything that a call gives: outputs, gradients, what was written in place.

    Parameters
    ----------
    dtype : {"float32", "float64", "bf16", "tf32"}, optional
        The floats that go in; those of the call when None. bf16 is float32 that holds bf16 values,
        tf32 is float32.
    given : tuple of arrays, optional
        The very buffers to pass; copies of the call's arrays when None.
    """
    op = OPS[call.op]
    options = {name: copied(value, dtype) for name, value in call.options.items()}
    arrays = tuple(copied(a, dtype) for a in call.arrays) if given is None else given
    before = [copied(a) for a in arrays]
    out, cache = getattr(module, op.forward_name)(*arrays, **options), None
    has_backward = hasattr(module, op.backward_name)
    if op.backward and (has_backward or (isinstance(out, tuple) and len(out) == 2)):
        out, cache = out
    results = _named("out", flat(out))
    if op.written or op.name in ("write_kv", "decode_step"):
        kept = arrays[3:4] if op.name == "decode_step" else arrays
        results += _named("state", flat(list(kept)))
    if op.name == "kv_cache":
        pairs = zip(out.k, out.v, strict=True)
        shared = any(np.shares_memory(k, v) for k, v in pairs)
        results.append(Result("shared", np.array(float(shared))))
    if has_backward and not call.forward_only:
        results += _gradients(module, op, call, out, cache, arrays, dtype)
    if not op.written and op.name not in ("write_kv", "decode_step"):
        pairs = zip(flat(before), flat(list(arrays)), strict=True)
        changed = not all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)
        results.append(Result("written into an argument", np.array(float(changed))))
    return [r._replace(value=round_bf16(r.value)) if _half(dtype, r) else r for r in results]


def _named(name: str, arrays: list[Array]) -> list[Result]:
    alone = len(arrays) == 1
    return [Result(name if alone else f"{name}[{i}]", a) for i, a in enumerate(arrays)]


def suits(module: Any, call: Call) -> bool:
    """Say whether a kernel takes what a call gives it: some offer fewer options than the op has."""
    function = getattr(module, OPS[call.op].forward_name)
    parameters = inspect.signature(function).parameters.values()
    anything = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    return anything or set(call.options) <= {p.name for p in parameters}


def _half(dtype: str | None, result: Result) -> bool:
    return dtype == "bf16" and result.value.dtype == np.float32


def copied(value: Any, dtype: str | None = None) -> Any:
    """Return a copy that lies in memory as the original does, its floats of another type."""
    if isinstance(value, np.ndarray):
        base = value.base
        if value.flags.forc or base is None or base.shape[-1:] != (2 * value.shape[-1],):
            new = value.copy(order="K")
        else:
            new = np.asarray(base).copy()[..., ::2]  # every other element of a buffer
        if dtype is None or value.dtype.kind != "f":
            return new
        return round_bf16(new) if dtype == "bf16" else new.astype(numpy_dtype(dtype))
    if isinstance(value, KVCache):
        return KVCache([copied(a, dtype) for a in value.k], [copied(a, dtype) for a in value.v])
    if isinstance(value, dict):
        return {name: copied(a, dtype) for name, a in value.items()}
    return value


def flat(value: Any) -> list[Array]:
    """Return the arrays of a result, however it is made."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, KVCache):
        return [*value.k, *value.v]
    if isinstance(value, Loss):
        return [np.array(value.total), np.array(value.n_valid)]
    if isinstance(value, tuple | list):
        return [a for part in value for a in flat(part)]
    if isinstance(value, dict) or value is None or hasattr(value, "vocab_size"):
        return []
    return [np.asarray(value)]


def _gradients(
    module: Any, op: Op, call: Call, out: Any, cache: Any, arrays: Any, dtype: str | None
) -> list[Result]:
    like = next(a.dtype for a in flat(list(arrays)) if a.dtype.kind == "f")
    half = call.half or dtype == "bf16"
    if op.out == "Loss":
        dout: Any = call.dloss
    elif isinstance(out, tuple | list):
        dout = tuple(_cotangent(p, like, i, half) for i, p in enumerate(out))
    else:
        dout = np.asarray(_cotangent(out, like, 0, half), order=call.dout_order)  # type: ignore[call-overload]
    named = dict(zip([o.name for o in op.operands], arrays, strict=False)) | call.options
    asked: dict[str, Any] = {}
    receivers: list[Array | None] = []
    if call.receivers:
        receivers = [
            None if named.get(name) is None else normal(named[name].shape, 1, 40 + i, like)
            for i, name in enumerate(op.parameters)
        ]
        asked["out"] = receivers[0] if len(receivers) == 1 else tuple(receivers)
        if call.receivers == "accumulate":
            asked["accumulate"] = True
    found = getattr(module, op.backward_name)(dout, cache, **asked)
    found = found if isinstance(found, tuple | list) else (found,)
    gradients = dict(zip(op.gradients, found, strict=False))
    if call.receivers:  # they hold the truth
        gradients |= dict(zip(op.parameters, receivers, strict=True))
    return [Result(f"d{name}", g) for name, g in gradients.items() if g is not None]


def _cotangent(part: Array, like: Any, seed: int, half: bool) -> Array:
    dout = normal(part.shape, 1, 31 + seed)
    return np.asarray(round_bf16(dout) if half else dout, like)


def differs(module: Any, call: Call, dtype: str | None = None) -> str:
    """Return why what a kernel gives is not what the reference gives, or "" when it is."""
    for _ in range(call.times):
        if why := _differs(module, call, None, dtype):
            return why
    if call.again:
        given = tuple(copied(a) for a in call.arrays)
        first = outcome(module, call, given=given)
        kept = [r.value.copy() for r in first]
        for a in given:
            if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                a[...] = normal(a.shape, 1, 77)
        if why := _differs(module, call, given, dtype):
            return f"called again with new numbers: {why}"
        pairs = zip(first, kept, strict=True)
        if not all(np.array_equal(r.value, b, equal_nan=True) for r, b in pairs):
            return "an earlier result changed"
    return differs(module, call.then, dtype) if call.then else ""


def _differs(module: Any, call: Call, given: Any, dtype: str | None) -> str:
    with np.errstate(all="ignore"):
        call = call._replace(arrays=given or call.arrays)
        truth = outcome(ops, call, "float64")
        plain = outcome(ops, call, dtype)
        found = outcome(module, call, dtype, given=given)
    if len(found) != len(truth):
        return f"{len(found)} results instead of {len(truth)}"
    for exact, own, got in zip(truth, plain, found, strict=True):
        if why := _off(exact.value, own.value, got.value):
            return f"{exact.name} {why}"
    return ""


def _off(t: Array, p: Array, f: Array) -> str:
    if f.shape != p.shape:
        return f"has shape {f.shape}, not {p.shape}"
    if f.dtype != p.dtype:
        return f"is {f.dtype}, not {p.dtype}"
    if not np.array_equal(np.isnan(t), np.isnan(f)):
        return "has NaN elsewhere"
    with np.errstate(all="ignore"):
        error = np.where((t == f) | np.isnan(t), 0, np.abs(f - t))
        own = np.where((t == p) | np.isnan(t), 0, np.abs(p - t))
    largest = float(np.max(np.abs(t[np.isfinite(t)]), initial=0.0))
    unit = float(np.finfo(p.dtype).eps) if p.dtype.kind == "f" else 0.0
    allowed = MARGIN * max(float(own.max(initial=0)), unit * largest)
    worst = float(error.max(initial=0))
    return "" if worst <= allowed else f"is off by {worst:.3g} of {largest:.3g}"
