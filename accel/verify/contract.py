"""What there is to check of each op, a case of it, and what the reference makes of the case."""

import collections
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, Magnitude, round_bf16
from accel.verify import cases, cases_decode, magnitudes, magnitudes_decode
from accel.verify.cases import LAYOUTS, Draw
from reference import ops as reference
from reference.config import Config
from reference.types import Array, KVCache

DTYPES = ("float32", "float64", "bf16")


class Spec(NamedTuple):
    """One op of the contract."""

    name: str
    gradients: tuple[str, ...] = ()  # the differentiable arrays, in the order of the backward
    parameters: tuple[str, ...] = ()  # those whose gradient ``out=`` receives
    in_place: tuple[str, ...] = ()  # arguments that it writes into
    float64: bool = False  # results are kept in float64 whatever goes in
    weights: tuple[str, ...] = ()  # arrays that are no activations

    @property
    def forward(self) -> str:
        return f"{self.name}_forward" if self.gradients else self.name

    @property
    def backward(self) -> str:
        return f"{self.name}_backward"

    @property
    def single_out(self) -> bool:
        """Whether ``out=`` is one array rather than a tuple."""
        return len(self.parameters) == 1


SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("add", ("a", "b")),
        Spec("scale", ("x",)),
        Spec("embedding", ("table",), ("table",), weights=("table",)),
        Spec("linear", ("x", "weight", "bias"), ("weight", "bias"), weights=("weight", "bias")),
        Spec("split_heads", ("x",)),
        Spec("merge_heads", ("x",)),
        Spec("rmsnorm", ("x", "gain"), ("gain",), weights=("gain",)),
        Spec("layernorm", ("x", "gain", "bias"), ("gain", "bias"), weights=("gain", "bias")),
        Spec("rope", ("x",)),
        Spec("attention", ("q", "k", "v"), weights=("alibi",)),
        Spec("swiglu", ("x",)),
        Spec("gelu", ("x",)),
        Spec("gelu_tanh", ("x",)),
        Spec("relu", ("x",)),
        Spec("dropout", ("x",)),
        Spec(
            "linear_cross_entropy",
            ("x", "head", "bias"),
            ("head", "bias"),
            weights=("head", "bias"),
        ),
        Spec("softmax"),
        Spec("logits", weights=("head", "bias")),
        Spec("square_sums", float64=True, weights=("x",)),
        Spec("global_norm", float64=True, weights=("x",)),
        Spec("accumulate", in_place=("dst",), weights=("dst", "src")),
        Spec("adamw", in_place=("master", "m", "v"), weights=("master", "m", "v", "grad")),
        Spec("kv_cache"),
        Spec("write_kv", in_place=("cache.k", "cache.v")),
        Spec("decode_step", in_place=("cache.k", "cache.v")),
    )
}
GENERATORS = cases.GENERATORS | {
    f.__name__: f for f in (cases_decode.kv_cache, cases_decode.write_kv, cases_decode.decode_step)
}
MAGNITUDES = magnitudes.MAGNITUDES | {
    f.__name__: f
    for f in (magnitudes_decode.kv_cache, magnitudes_decode.write_kv, magnitudes_decode.decode_step)
}
# These work on the float32 master, whatever the activations are.
MASTER_OPS = ("square_sums", "global_norm", "accumulate", "adamw")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op, and the manner in which it is made."""

    op: str
    dtype: str
    arrays: dict[str, Any]  # the contract's array parameters, or see ``gathered``; None: not given
    options: dict[str, Any]
    cotangent: Any  # dout, in the form of the output; None when no backward is called
    layouts: dict[str, str]  # how inputs and "dout" lie in memory; plain when not named
    out: str = ""  # "" or "out" or "accumulate": gradients go where ``out=`` says
    interleaved: bool = False  # another call is made between this forward and its backward

    @property
    def spec(self) -> Spec:
        return SPECS[self.op]

    @property
    def size(self) -> tuple[int, int]:
        """How much there is to read: features in use, then elements."""
        given = sum(a is not None for a in self.arrays.values()) + len(self.options)
        given += len(self.layouts) + bool(self.out) + self.interleaved
        return sum(np.size(a) for a in self.arrays.values() if a is not None), given

    def describe(self) -> str:
        """Return the case in one line: shapes, options, manner."""
        parts = [
            f"{name} {shape_of(a)}"
            if a.dtype.kind == "f" or a.size > 4
            else f"{name} = {a.tolist()}"
            for name, a in self.arrays.items()
            if a is not None and not name.startswith("params.")  # the config tells those
        ]
        parts += [f"{name} = {_short(value)}" for name, value in self.options.items()]
        kinds = collections.defaultdict(list)
        for name, layout in self.layouts.items():
            kinds[layout].append(name)
        parts += [f"{', '.join(names)} {layout}" for layout, names in kinds.items()]
        if self.out:
            parts.append("out= given" + (", accumulate = True" * (self.out == "accumulate")))
        if self.interleaved:
            parts.append("with another forward in between")
        return f"{self.dtype}: {'; '.join(parts)}"


def _short(value: Any) -> str:
    if isinstance(value, Config):
        fields = dataclasses.fields(value)
        changed = [f.name for f in fields if getattr(value, f.name) != f.default]
        return f"({', '.join(f'{name} = {getattr(value, name)}' for name in changed)})"
    return str(value.tolist()) if isinstance(value, np.ndarray) else repr(value)


def gathered(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with ``cache.k`` and ``cache.v`` as a cache, ``params.*`` as a mapping."""
    found = {name: a for name, a in arrays.items() if "." not in name}
    if "cache.k" in arrays:
        found["cache"] = KVCache(arrays["cache.k"], arrays["cache.v"])
    params = {n.removeprefix("params."): a for n, a in arrays.items() if n.startswith("params.")}
    return found | ({"params": params} if params else {})


def shape_of(a: Any) -> str:
    """Return a shape as people write it: (2, 3)."""
    return f"({', '.join(str(n) for n in np.shape(a))}{',' if np.ndim(a) == 1 else ''})"


def gradient_names(case: Case) -> list[str]:
    """Return the names of the gradients that a backward owes in this case."""
    return [f"d{name}" for name in case.spec.gradients if case.arrays.get(name) is not None]


def draw_case(spec: Spec, draw: Draw, *, has_backward: bool, backward_offers: Any) -> Case:
    """Draw a case: the arguments, the cotangent and the manner of calling."""
    arrays, options = GENERATORS[spec.name](draw)
    cotangent = None
    if has_backward and options.get("need_backward", True):
        out = forward(spec, floats(arrays, np.float64), options)[0]
        cotangent = _cotangent(draw, out)
    layouts: dict[str, str] = {}
    layout = draw.pick(LAYOUTS)
    if layout != "plain":
        # a cache and parameters lie as the module makes them
        names = [name for name, a in arrays.items() if a is not None and "." not in name]
        if cotangent is not None and not isinstance(cotangent, float):
            names.append("dout")
        chosen = draw.pick((*names, "all"))
        layouts = {name: layout for name in (names if chosen == "all" else [chosen])}
    to = ""
    if cotangent is not None and spec.parameters and backward_offers("out"):
        to = draw.pick(("", "out"))
        if to and spec.name == "embedding" and backward_offers("accumulate"):
            to = draw.pick(("out", "accumulate"))
    return Case(
        spec.name, draw.dtype, arrays, options, cotangent, layouts, to, draw.pick((False, True))
    )


def _cotangent(draw: Draw, out: Any) -> Any:
    """Return a random cotangent; ones would let whole classes of error cancel."""
    if hasattr(out, "total"):
        return draw.pick((0.5, -1.75, 1.0))
    if isinstance(out, tuple):
        return tuple(_cotangent(draw, part) for part in out)
    return draw.values(*out.shape, kinds=("zero rows", "wide"))


def other_case(case: Case) -> Case:
    """Return another call of the same shapes: the values turned around, the options changed."""

    def turned(a: Any) -> Any:
        if not isinstance(a, np.ndarray):
            return a
        around = np.ascontiguousarray(a[tuple(slice(None, None, -1) for _ in a.shape)])
        return np.asarray(around * a.dtype.type(0.5)) if a.dtype.kind == "f" else around

    changed: dict[str, Any] = dict(case.options)
    steps = {"start": 2, "eps": 0.25, "factor": 0.5, "scale": 0.25, "base": 50.0}
    for name, by in steps.items():
        if changed.get(name) is not None:
            changed[name] = changed[name] + by
    for name in ("key", "dropout_key"):
        if changed.get(name) is not None:
            changed[name] = changed[name]._replace(seed=changed[name].seed + 1)
    arrays = {name: turned(a) for name, a in case.arrays.items()}
    if case.op == "linear_cross_entropy" and arrays["mask"] is not None:
        # targets turn with their mask, so those that count stay in the vocabulary
        arrays["mask"] = turned(case.arrays["mask"])
    if case.op == "adamw":
        arrays["v"] = np.abs(arrays["v"])
    return dataclasses.replace(case, arrays=arrays, options=changed, cotangent=None, out="")


# ---- what the reference makes of it --------------------------------------------------------------


def floats(value: Any, dtype: Any) -> Any:
    """Return a value with every float array in it converted."""
    if isinstance(value, Mapping):
        return {name: floats(item, dtype) for name, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(floats(item, dtype) for item in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(dtype)
    return value


def forward(
    spec: Spec, arrays: dict[str, Any], options: dict[str, Any], ops: Any = reference
) -> Any:
    """Call a forward with the contract's signature."""
    return getattr(ops, spec.forward)(**gathered(arrays), **options)


def named_parts(out: Any) -> dict[str, Any]:
    """Return the parts of an output by name: out; out[0], …; or total and n_valid of a loss."""
    if hasattr(out, "total"):
        return {"total": np.asarray(out.total), "n_valid": np.asarray(out.n_valid)}
    if isinstance(out, KVCache):
        return {f"out.{name}[{n}]": a for name in "kv" for n, a in enumerate(getattr(out, name))}
    if isinstance(out, tuple):
        return {f"out[{i}]": part for i, part in enumerate(out)}
    return {"out": np.asarray(out)}


def reference_results(case: Case, dtype: Any, ops: Any = reference) -> dict[str, Array]:
    """Return every result of a case by name, computed by the reference in ``dtype``."""
    spec = case.spec
    arrays = floats(case.arrays, dtype)
    if spec.in_place:
        out = forward(spec, arrays, case.options, ops)
        written = {name: arrays[name] for name in spec.in_place}
        return written if out is None else named_parts(out) | written
    if not spec.gradients:
        return named_parts(forward(spec, arrays, case.options, ops))
    out, cache = forward(spec, arrays, case.options, ops)
    results = named_parts(out)
    if case.cotangent is not None:
        gradients = getattr(ops, spec.backward)(floats(case.cotangent, dtype), cache)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        given = [g for g in gradients if g is not None]
        results |= dict(zip(gradient_names(case), given, strict=True))
    return results


class Expected(NamedTuple):
    """What a case should give, and how closely."""

    exact: dict[str, Array]  # the float64 reference
    plain: dict[str, Array]  # the reference in the working precision
    magnitudes: dict[str, Magnitude]


def expected(case: Case) -> Expected:
    """Return the results of a case, exact and plain, and their magnitudes.

    Plain bf16 is the reference in float32 over operands that are bf16 values, its results rounded
    to bf16: products in bf16, sums in float32.
    """
    exact = reference_results(case, np.float64)
    plain = exact
    if case.dtype != "float64":
        plain = reference_results(case, np.float32)
    if case.dtype == "bf16":
        plain = {
            name: round_bf16(value) if np.ndim(value) else value for name, value in plain.items()
        }
    inputs = {**gathered(floats(case.arrays, np.float64)), **case.options}
    inputs.pop("need_backward", None)
    dout = floats(case.cotangent, np.float64)
    if dout is None and case.spec.gradients:  # magnitudes of gradients nobody will look at
        parts = {n: np.zeros_like(np.asarray(e, np.float64)) for n, e in exact.items()}
        dout = 0.0 if "total" in parts else parts.get("out", tuple(parts.values()))
    found = MAGNITUDES[case.op](inputs, dout, UNIT_ROUNDOFF[case.dtype])
    return Expected(exact, plain, found)


def contract_parameters(function: str) -> list[inspect.Parameter]:
    """Return the parameters that the contract gives a function, without self."""
    return list(inspect.signature(getattr(reference, function)).parameters.values())


def accumulated_onto(case: Case) -> Array:
    """Return what stands in ``out`` before ``accumulate=True`` adds onto it."""
    table = case.arrays["table"]
    return np.asarray(np.sin(np.arange(math.prod(table.shape)).reshape(table.shape)), np.float32)


def log_sum_exp(case: Case) -> Array:
    """Return attention's log Σ exp(score) of each query, (B, Hq, T), for a backward alone.

    It is +inf for a query that may attend to nothing, so that exp(score - lse) is zero there.
    """
    arrays = floats(case.arrays, np.float64)
    q, k = arrays["q"], arrays["k"]
    B, T, Hq, d = q.shape
    S, Hkv = k.shape[1:3]
    masks = {n: arrays[n] for n in ("key_mask", "documents")}
    masks["causal"] = case.options.get("causal", True)
    seen = reference.attention_forward(0 * q, k, arrays["v"], **masks)[1].p > 0
    scale = case.options.get("scale") or 1 / math.sqrt(d)
    qh = q.reshape(B, T, Hkv, Hq // Hkv, d).transpose(0, 2, 3, 1, 4)
    s = scale * (qh @ k.transpose(0, 2, 3, 1)[:, :, None])
    if arrays["alibi"] is not None:
        distance = np.arange(S - T, S)[:, None] - np.arange(S)
        s = s - arrays["alibi"].reshape(Hkv, -1, 1, 1) * distance
    top = np.max(np.where(seen, s, -np.inf), axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.sum(np.exp(np.where(seen, s - top, -np.inf)), axis=-1)
    lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + top[..., 0], np.inf)
    return np.asarray(lse.reshape(B, Hq, T), np.float32 if case.dtype == "bf16" else case.dtype)
