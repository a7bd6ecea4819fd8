"""What there is to check of each op, a case of it, and what the reference makes of the case."""

import collections
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import FP8, UNIT_ROUNDOFF, Allowed, Magnitude, round_tf32, round_to
from accel.verify.draw import LAYOUTS, REPEATED, SPECIAL, Draw
from accel.verify.layouts import in_layout
from accel.verify.ops import room
from accel.verify.travel import Travels, element, other_value, special_at, tamed, travels
from reference import ops as reference
from reference.config import Config
from reference.contract import Dims, Op, Pattern
from reference.ops import OPS
from reference.types import Array, KVCache

DTYPES = ("float32", "float64", "bf16", "float16", "tf32", *FP8)
LARGEST_FLOAT16 = 2.0**14  # of a result; what is written on the way to it is not much larger


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
    def spec(self) -> Op:
        return OPS[self.op]

    @property
    def written(self) -> list[str]:
        """Arrays that the op writes into; a KV cache is given to be extended."""
        return [n for n in self.arrays if n in self.spec.written or n.startswith("cache.")]

    @property
    def size(self) -> tuple[int, int]:
        """How much there is to read: features in use, then elements."""
        given = sum(a is not None for a in self.arrays.values()) + len(self.options)
        given += len(self.layouts) + bool(self.out) + self.interleaved
        return sum(np.size(a) for a in self.arrays.values() if a is not None), given

    def but(self, arrays: Mapping[str, Any] | None = None, **options: Any) -> "Case":
        """Return the case with other arguments."""
        arrays, options = {**self.arrays, **(arrays or {})}, {**self.options, **options}
        return dataclasses.replace(self, arrays=arrays, options=options)

    def optional(self) -> list[str]:
        """Return the names of what is given and need not be, in the contract's order."""
        parameters = contract_parameters(self.spec.forward_name)
        names = [p.name for p in parameters if p.default is not p.empty]
        return [n for n in names if self.arrays.get(n) is not None or n in self.options]

    def without(self, name: str) -> "Case":
        """Return the case with an optional argument left out; dropout goes with its key."""
        if name in self.arrays:
            return self.but({name: None})
        gone = {name, "dropout_key"} if name == "dropout_p" else {name}
        options = {n: value for n, value in self.options.items() if n not in gone}
        return dataclasses.replace(self, options=options)

    def in_float64(self) -> tuple[dict[str, Any], Any]:
        """Return (arrays, dout) in float64; dout is None when no backward is called."""
        return floats(self.arrays, np.float64), floats(self.cotangent, np.float64)

    def values(self) -> dict[str, Any]:
        """Return the arguments of the forward, arrays in float64."""
        return {**gathered(self.in_float64()[0]), **self.options}

    def exact(self) -> dict[str, Array]:
        """Return the right results by name, as far as they are known without the subject."""
        return expected(self).exact

    def about(self) -> dict[str, Any]:
        """Return what a saved case has to say beside its arrays, options and manner."""
        return {}

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
        place = special_at(self)
        if place is not None:
            parts.append(f"{place.value} at {element(place.name, place.at)}")
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


def applies(spec: Op, dtype: str) -> bool:
    """Say whether an op has cases of its own in a precision."""
    if dtype in FP8:
        return room(spec.name).FP8
    if dtype == "tf32":
        return room(spec.name).PRODUCTS
    return dtype in ("float32", "float64") or any(o.kind != "master" for o in spec.operands)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the type of the arrays that values of a precision come in."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def storable(case: Case) -> bool:
    """Say whether a case holds values of its precision: a part of an array has another scale."""
    given = [*case.arrays.values(), case.cotangent]
    floating = [a for a in given if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    return case.dtype not in FP8 or all(
        np.array_equal(round_to(a, case.dtype), a) for a in floating
    )


def draw_case(spec: Op, draw: Draw, *, has_backward: bool, backward_offers: Any) -> Case:
    """Draw a case: the arguments, the cotangent and the manner of calling."""
    arrays, options = room(spec.name).generate(draw)
    cotangent = None
    if has_backward and options.get("need_backward", True):
        cotangent = _cotangent(draw, _out_like(spec, arrays, options))
        if spec.parameters and draw.rarely("one sign", 16):  # long sums do not stay small by chance
            floating = {o.name for o in spec.floats if o.name in spec.gradients}
            arrays = {n: _positive(a) if n in floating else a for n, a in arrays.items()}
            cotangent = _positive(cotangent)
    if draw.dtype == "float16":
        arrays, cotangent = _in_range(spec, arrays, options, cotangent)
    special = draw.pick((*[""] * 37, *SPECIAL), "special")
    if special and draw.dtype not in FP8:  # whose scale is the largest of all elements
        arrays, cotangent = _with_special(spec, draw, special, arrays, cotangent)
    layouts: dict[str, str] = {}
    layout = draw.pick(LAYOUTS, "layout")
    if layout != "plain":
        # a cache and parameters lie as the module makes them
        names = [name for name, a in arrays.items() if a is not None and "." not in name]
        if cotangent is not None and not isinstance(cotangent, float):
            names.append("dout")
        chosen = draw.pick((*names, "all"), "laid")
        layouts = {name: layout for name in (names if chosen == "all" else [chosen])}
    to = ""
    if cotangent is not None and spec.parameters and backward_offers("out"):
        to = draw.pick(("", "out"), "out")
        if to and spec.accumulates and backward_offers("accumulate"):
            to = draw.pick(("out", "accumulate"), "accumulate")
    again = draw.rarely("interleaved", 3)
    if isinstance(cotangent, np.ndarray) and cotangent.size and not special:
        if draw.rarely("one dout", 12):  # as it comes of a sum
            cotangent = np.full_like(cotangent, cotangent.reshape(-1)[0])
            layouts = {**layouts, "dout": REPEATED}
    return Case(spec.name, draw.dtype, arrays, options, cotangent, layouts, to, again)


def _positive(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(np.abs, value))
    return None if value is None else np.abs(value)


def _out_like(spec: Op, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return something of the output's shape: by the letters of the declaration, where they do."""
    dims: Dims = {}
    known = [(o, arrays.get(o.name)) for o in spec.operands if o.shape]
    if spec.out and all(a is None or Pattern(o.shape).fits(a.shape, dims) for o, a in known):
        shape = None if spec.out == "Loss" else Pattern(spec.out).sizes(dims)
        if shape is not None:
            return np.empty(shape)
    return forward(spec, floats(arrays, np.float64), options)[0]


def _cotangent(draw: Draw, out: Any) -> Any:
    """Return a random cotangent; ones would let whole classes of error cancel."""
    if hasattr(out, "total"):
        return draw.pick((0.5, -1.75, 1.0), "dout")
    if isinstance(out, tuple):
        return tuple(_cotangent(draw, part) for part in out)
    return draw.values(*out.shape, kinds=("zero rows", "wide"), name="dout")


def _in_range(
    spec: Op, arrays: dict[str, Any], options: dict[str, Any], cotangent: Any
) -> tuple[dict[str, Any], Any]:
    """Halve what goes in until no result leaves the range of float16."""
    for _ in range(40):
        case = Case(spec.name, "float16", arrays, options, cotangent, {})
        results = reference_results(case, np.float64).values()
        if max(float(np.max(np.abs(r), initial=0)) for r in results) < LARGEST_FLOAT16:
            break
        constant = {o.name for o in spec.operands if o.kind == "constant"}
        half = {n: a if n in constant else _halved(a) for n, a in arrays.items()}
        arrays, cotangent = half, cotangent if np.ndim(cotangent) == 0 else _halved(cotangent)
    return arrays, cotangent


def _halved(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_halved(part) for part in value)
    floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return round_to(value / 2, "float16") if floating else value


def _with_special(
    spec: Op, draw: Draw, special: str, arrays: dict[str, Any], cotangent: Any
) -> tuple[dict[str, Any], Any]:
    """Put NaN or an infinity into one element of one input."""
    names = [o.name for o in spec.floats if arrays.get(o.name) is not None]
    if isinstance(cotangent, np.ndarray):
        names.append("dout")
    if not names:
        return arrays, cotangent
    name = draw.pick(names, "where")
    a = np.array(cotangent if name == "dout" else arrays[name])
    if a.size:
        a.reshape(-1)[int(draw.rng.integers(a.size))] = SPECIAL[special]
    return (arrays, a) if name == "dout" else ({**arrays, name: a}, cotangent)


def other_case(case: Case) -> Case:
    """Return another call of the same shapes: the values turned around, the options changed."""

    def turned(a: Any) -> Any:
        if not isinstance(a, np.ndarray):
            return a
        around = np.ascontiguousarray(a[tuple(slice(None, None, -1) for _ in a.shape)])
        return np.asarray(around * a.dtype.type(0.5)) if a.dtype.kind == "f" else around

    changed: dict[str, Any] = dict(case.options)
    steps = {"start": 2, "window": 3, "eps": 0.25, "factor": 0.5, "scale": 0.25, "base": 50.0}
    for name, by in steps.items():
        if changed.get(name) is not None:
            changed[name] = changed[name] + by
    if changed.get("scaling") is not None:
        changed["scaling"] = changed["scaling"]._replace(factor=changed["scaling"].factor + 1)
    for name in ("key", "dropout_key"):
        if changed.get(name) is not None:
            changed[name] = changed[name]._replace(seed=changed[name].seed ^ 1)
    arrays = {name: turned(a) for name, a in case.arrays.items()}
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


def forward(spec: Op, arrays: dict[str, Any], options: dict[str, Any], ops: Any = reference) -> Any:
    """Call a forward with the contract's signature."""
    return getattr(ops, spec.forward_name)(**gathered(arrays), **options)


def named_parts(out: Any) -> dict[str, Any]:
    """Return the parts of an output by name: out; out[0], …; or total and n_valid of a loss."""
    if hasattr(out, "total"):
        return {"total": np.asarray(out.total), "n_valid": np.asarray(out.n_valid)}
    if isinstance(out, KVCache):
        return {f"out.{name}[{n}]": a for name in "kv" for n, a in enumerate(getattr(out, name))}
    if isinstance(out, tuple):
        return {f"out[{i}]": part for i, part in enumerate(out)}
    return {"out": np.asarray(out)}


@np.errstate(all="ignore")  # what comes of NaN and infinity is told by the results
def reference_results(
    case: Case, dtype: Any, ops: Any = reference, *, laid: bool = False
) -> dict[str, Array]:
    """Return every result of a case by name, computed by the reference in ``dtype``.

    Parameters
    ----------
    laid : bool
        Whether arrays lie in memory as those of the case do, which decides the order of sums.
    """
    spec = case.spec
    arrays, cotangent = floats(case.arrays, dtype), floats(case.cotangent, dtype)
    for name, layout in case.layouts.items() if laid else ():
        if name == "dout":
            cotangent = in_layout(cotangent, layout)
        else:
            arrays[name] = in_layout(arrays[name], layout)
    out, cache = forward(spec, arrays, case.options, ops), None
    if spec.backward:
        out, cache = out
    results = {} if out is None else named_parts(out)
    results |= {name: arrays[name] for name in case.written}
    if spec.backward and case.cotangent is not None:
        gradients = getattr(ops, spec.backward_name)(cotangent, cache)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        given = [g for g in gradients if g is not None]
        results |= dict(zip(gradient_names(case), given, strict=True))
    return results


class Expected(NamedTuple):
    """What a case should give, and how closely."""

    exact: dict[str, Array]  # the float64 reference
    plain: dict[str, Array]  # the reference in the working precision
    magnitudes: dict[str, Magnitude]
    rules: dict[str, Allowed]  # what follows of these; filled when a result is judged
    travels: Mapping[str, Travels] = MappingProxyType({})  # of a NaN or infinity that is put in

    def negated(self, names: Iterable[str]) -> "Expected":
        """Return what the opposite cotangent gives, in which these results are linear."""
        exact, plain = ({n: -np.asarray(r[n]) for n in names} for r in (self.exact, self.plain))
        travels = {n: t.negated() for n, t in self.travels.items()}
        rules = {n: r._replace(exact=-r.exact) for n, r in self.rules.items() if n in exact}
        return Expected(exact, plain, self.magnitudes, rules, travels)

    def shifted(self, name: str, base: Array) -> "Expected":
        """Return what is due of a result that was added to something: one more rounding."""
        magnitude = self.magnitudes[name]
        plain = np.asarray(self.plain[name])
        return self._replace(
            exact={**self.exact, name: self.exact[name] + base.astype(np.float64)},
            plain={**self.plain, name: (plain + base).astype(plain.dtype)},
            magnitudes={
                **self.magnitudes,
                name: magnitude._replace(
                    s=magnitude.s + np.abs(base), roundings=magnitude.roundings + 1
                ),
            },
            travels={n: t.shifted(base) if n == name else t for n, t in self.travels.items()},
            rules={},
        )


def plain_results(case: Case) -> dict[str, Array]:
    """Return what plain code gives in the working precision.

    It is the reference in float32, on arrays that lie in memory as those of the case do, its
    results rounded to 16 bits where those are for storage: the operands have such values already.
    In TF32 its operands are rounded, as far as they are multiplied.
    """
    if case.dtype == "tf32":
        factors = [o.name for o in case.spec.floats if len(o.shape.split()) > 1]
        given = {n: round_tf32(a) for n, a in case.arrays.items() if n in factors and a is not None}
        dout = case.cotangent
        case = case.but(given)
        if isinstance(dout, np.ndarray):
            case = dataclasses.replace(case, cotangent=round_tf32(dout))
    plain = reference_results(case, numpy_dtype(case.dtype), laid=True)
    if UNIT_ROUNDOFF[case.dtype].stored:
        kept = "float16" if case.dtype == "float16" else "bf16"
        plain = {n: round_to(r, kept) if np.ndim(r) else r for n, r in plain.items()}
    return plain


@np.errstate(all="ignore")
def expected(case: Case) -> Expected:
    """Return the results of a case, exact and plain, and their magnitudes.

    Where NaN or an infinity was put in, those of the case with a number in its place, and where
    that must not stay a number.
    """
    place = special_at(case)
    if place is not None:
        want = expected(tamed(case, place, 1.5))
        moved = reference_results(tamed(case, place, other_value(place)), np.float64)
        given = reference_results(case, np.float64)
        want = want._replace(travels=travels(case, place, want.exact, moved, given), rules={})
        if math.isinf(place.value) and UNIT_ROUNDOFF[case.dtype].stored:
            # beside a score of -∞ P is another than beside a number
            limits = _magnitudes(case, want.exact)
            want = want._replace(
                magnitudes={
                    n: m._replace(
                        s=np.where(np.isfinite(limits[n].s), np.fmax(m.s, limits[n].s), m.s)
                    )
                    for n, m in want.magnitudes.items()
                }
            )
        return want
    exact = reference_results(case, np.float64)
    plain = exact if case.dtype == "float64" and not case.layouts else plain_results(case)
    return Expected(exact, plain, _magnitudes(case, exact), {})


def _magnitudes(case: Case, exact: Mapping[str, Array]) -> dict[str, Magnitude]:
    _, dout = case.in_float64()
    if dout is None and case.spec.gradients:  # magnitudes of gradients nobody will look at
        parts = {n: np.zeros_like(np.asarray(e, np.float64)) for n, e in exact.items()}
        dout = 0.0 if "total" in parts else parts.get("out", tuple(parts.values()))
    return room(case.op).magnitude(case.values(), dout, UNIT_ROUNDOFF[case.dtype])


@functools.cache
def contract_parameters(function: str) -> list[inspect.Parameter]:
    """Return the parameters that the contract gives a function."""
    return list(inspect.signature(getattr(reference, function)).parameters.values())


def accumulated_onto(case: Case) -> Array:
    """Return what stands in ``out`` before ``accumulate=True`` adds onto it."""
    return _sines(case.arrays[case.spec.parameters[0]].shape)


def plus_of(dtype: str, shape: tuple[int, ...]) -> Array:
    """Return the ``plus`` that is added to a result: numbers that an activation can hold."""
    return round_to(_sines(shape), dtype)


def _sines(shape: tuple[int, ...]) -> Array:
    return np.asarray(np.sin(np.arange(math.prod(shape)).reshape(shape)), np.float32)
