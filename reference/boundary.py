"""The public functions of a backend: checks around what computes, made from the declarations.

Three layers, from the inside out::

    mathematics   reference/<op>.py: forward and backward, the derivation and nothing else
    needs         of fast backends: gradients written where ``out=`` says, an input that is not
                  kept, a loss without a backward, a sum in the same pass. ``plain`` adds them to
                  the mathematics
    boundary      ``offer`` wraps the functions of any backend: it checks every argument, and hands
                  numbers on as Python's own, since NumPy's float64 would widen float32 arrays

An implementation is called with its arrays by position and its options by name, all of them given
and checked. One of a backward gets ``dout``, what its forward returned as cache and, where the op
has parameters, ``out``: a tuple with the array that each parameter's gradient goes to, or None.
Arrays may be strided and read-only. A cache may hold the arrays that went in and the one that came
out: nobody writes into those before the backward.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from reference.checks import check_array, check_ids, check_writable
from reference.contract import REQUIRED, Dims, Op, Operand, Pattern, explain_shape

Function = Callable[..., Any]
FEW = 65_536  # bytes of all arrays of a call


class Rules(NamedTuple):
    """The arrays that a backend takes."""

    floats: Mapping[Any, str]  # dtype -> its name, for people
    hint: str = "convert with .astype"
    masters: tuple[Any, ...] = ()  # the dtypes of the optimizer's arrays, if not all of ``floats``
    mixed: bool = False  # parameters may be float32 beside activations of another type
    kept: tuple[Any, ...] = ()  # dtypes of a KV cache, or of ``keep``, if not those of activations
    host: bool = True  # arrays are NumPy's: ids and read-only flags can be looked at
    # how to run a function on arrays of few bytes, where threads would cost more than they give
    few: Callable[[Function], Function] = lambda function: function

    def name(self, dtype: Any) -> str:
        """Return a dtype's name for people."""
        return self.floats.get(dtype, str(dtype))


class Saved(NamedTuple):
    """What a public forward hands to its backward; opaque to callers."""

    cache: Any  # the backend's own
    out: Any  # shape and dtype of the output, or a list of them for its parts; None of a loss
    dims: Dims
    dtypes: tuple[Any, ...]  # of the parameters; None for one that was not given
    few: bool  # whether the arrays that went in have few bytes
    needs: dict[str, Any]  # what the forward was told of the backward


# What a call's shapes, dtypes and options come to: sizes, options as taken, dtypes of parameters,
# and whether the arrays have few bytes.
Accepted = tuple[Dims, dict[str, Any], tuple[Any, ...], bool]
REMEMBERED = 1000  # accepted calls of an op

# What fast backends need of a forward, and the default of each.
NEEDS = {
    "keep_x": True,  # False leaves x out of the cache: the backward must be given it again
    "need_backward": True,  # False promises that no backward follows
    "out": None,  # receives the result, and may be x itself
    "plus": None,  # is added to the result
}


class Boundary:
    """The public functions of one op on one backend."""

    def __init__(self, op: Op, rules: Rules) -> None:
        self.op, self.rules = op, rules
        self.operands = [(o, Pattern(o.shape) if o.shape else None) for o in op.operands]
        self.floats = [i for i, o in enumerate(op.operands) if o.is_float]
        self.parameters = [i for i, o in enumerate(op.operands) if o.name in op.parameters]
        looked_at = (i for i, o in enumerate(op.operands) if o.below or o.written)
        self.looked_at = tuple(looked_at) if rules.host else ()
        self.known: dict[Any, Accepted] = {}
        # these may be wider than the activations that they meet
        weights = [o.name for o in op.operands if o.kind in ("parameter", "constant")]
        self.master = any(o.kind == "master" for o in op.operands)
        meets = any(o.kind == "activation" for o in op.operands)
        self.weights = tuple(weights) if rules.mixed and meets else ()
        self.kept = tuple(o.name for o in op.operands if o.kept)

    # ---- checks ----------------------------------------------------------------------------------

    def accept(self, arrays: tuple[Any, ...], given: tuple[Any, ...]) -> Accepted:
        """Check what shapes, dtypes and options tell; what was accepted once is remembered."""
        try:
            key = (*[None if a is None else (a.shape, a.dtype) for a in arrays], *given)
            known = self.known.get(key)
        except (AttributeError, TypeError):  # no array, or no option that can be looked up
            key, known = (), None
        if known is None:
            dims = self.check_arrays(arrays)
            options = {
                option.name: option.take(f"{self.op.name}: {option.name}", value, dims)
                for option, value in zip(self.op.options, given, strict=True)
            }
            own = [arrays[i] for i in self.parameters]
            dtypes = tuple(None if a is None else a.dtype for a in own)
            few = bool(key) and sum(a.nbytes for a in arrays if a is not None) <= FEW
            known = dims, options, dtypes, few
            if key:
                if len(self.known) >= REMEMBERED:
                    self.known.clear()
                self.known[key] = known
        return known

    def check_arrays(self, values: tuple[Any, ...]) -> Dims:
        """Raise unless every array is of its kind and shape; return the sizes of the letters."""
        op, dims = self.op.name, Dims()
        for (operand, _), value in zip(self.operands, values, strict=True):
            kind = operand.kind
            if kind == "object" or (value is None and operand.optional):
                continue
            check_array(op, operand.name, value)
            if kind == "mask" and value.dtype.kind != "b":
                raise ValueError(
                    f"{op}: {operand.name} must be bool, True = take part, got {value.dtype}"
                )
            integers = value.dtype.kind in "iu" if self.rules.host else value.dtype == np.int32
            if kind in ("ids", "documents") and not integers:
                raise ValueError(
                    f"{op}: {operand.name} must be integers (int32), got {value.dtype}"
                )
        self.check_dtypes(op, values)
        for i, (_, pattern) in enumerate(self.operands):
            if pattern is not None and values[i] is not None:
                if not pattern.fits(values[i].shape, dims):
                    raise ValueError(self.explain(i, values))
        return dims

    def look_at(self, operand: Operand, values: tuple[Any, ...], dims: Dims) -> None:
        """Raise unless an array may be written to, or its ids name entries that there are."""
        named = {o.name: value for (o, _), value in zip(self.operands, values, strict=True)}
        array, mask = named[operand.name], named.get(operand.where)
        if operand.written:
            check_writable(self.op.name, **{operand.name: array})
            return
        if mask is not None:
            array = np.where(mask, array, 0)
        what = "vocabulary" if operand.where else "table"
        check_ids(self.op.name, operand.name, array, dims[operand.below], what)

    def check_dtypes(self, op: str, values: tuple[Any, ...]) -> None:
        """Raise unless the float arrays share one dtype that the backend computes in."""
        given = [values[i] for i in self.floats if values[i] is not None]
        if not given:
            return
        first = given[0].dtype
        floats = self.rules.masters if self.master and self.rules.masters else self.rules.floats
        if first in floats and all(a.dtype == first for a in given):
            return
        names = {self.op.operands[i].name: values[i] for i in self.floats}
        named = {name: a.dtype for name, a in names.items() if a is not None}
        free = {name for name in self.weights if named.get(name) == np.float32}
        free |= {name for name in self.kept if named.get(name) in self.rules.kept}
        bound = {dtype for name, dtype in named.items() if name not in free}
        if len(bound) <= 1 and all(dtype in floats for dtype in bound):
            return
        found = ", ".join(f"{name} is {self.rules.name(dtype)}" for name, dtype in named.items())
        types = " or ".join(self.rules.name(dtype) for dtype in floats)
        raise ValueError(
            f"{op}: arrays must share one dtype, {types}, but {found}; {self.rules.hint}"
        )

    def explain(self, i: int, values: tuple[Any, ...]) -> str:
        """Return the sentence about the shape of operand i, with the arrays that it must match."""
        dims: Dims = {}
        met: dict[str, tuple[int, ...]] = {}
        wanted = Pattern(self.op.operands[i].shape)
        for (operand, pattern), value in zip(self.operands[:i], values[:i], strict=True):
            if pattern is not None and value is not None:
                pattern.fits(value.shape, dims)
                if pattern.letters & wanted.letters:
                    met[operand.name] = tuple(value.shape)
        return explain_shape(self.op.name, self.op.operands[i].name, wanted, values[i], dims, met)

    def check_receiver(self, out: Any, x: Any) -> None:
        """Raise unless a forward's ``out`` can receive an array like x as it lies."""
        op = self.op.name
        self.check_like(op, "out", out, x.shape, x.dtype, "x")
        if not out.flags.c_contiguous:
            raise ValueError(f"{op}: out must be contiguous, got strides {out.strides}")
        if self.rules.host:
            check_writable(op, out=out)

    def check_like(
        self, op: str, name: str, array: Any, shape: tuple[int, ...] | None, dtype: Any, what: str
    ) -> None:
        """Raise unless an array has a shape and a dtype, those of ``what``."""
        check_array(op, name, array)
        if array.shape != shape:
            raise ValueError(
                f"{op}: {name} must have shape {shape} to match {what}, got {array.shape}"
            )
        if array.dtype != dtype:
            wanted, found = self.rules.name(dtype), self.rules.name(array.dtype)
            raise ValueError(
                f"{op}: {name} must be {wanted}, the dtype of {what}, got {found}; "
                f"{self.rules.hint}"
            )

    def check_dout(self, dout: Any, saved: Saved) -> None:
        """Raise unless the cotangent is like the output: an array, one for each part, a number."""
        op = self.op.backward_name
        if saved.out is None:
            if np.ndim(dout) != 0:  # whatever its value: NaN has to travel
                raise ValueError(f"{op}: dloss must be a number, got {dout!r}")
        elif isinstance(saved.out, list):
            if len(dout) != len(saved.out):
                raise ValueError(f"{op}: the output has {len(saved.out)} parts, got {len(dout)}")
            for part, (shape, dtype) in zip(dout, saved.out, strict=True):
                self.check_like(op, "dout", part, shape, dtype, "its part of the output")
        else:
            self.check_like(op, "dout", dout, saved.out[0], saved.out[1], "the output")

    def receivers(self, out: Any, saved: Saved) -> tuple[Any, ...]:
        """Return where the gradients of the parameters go, None for each that is not asked for."""
        if out is None:
            return (None,) * len(self.parameters)
        given = (out,) if len(self.parameters) == 1 else tuple(out)
        op = self.op.backward_name
        for i, receiver, dtype in zip(self.parameters, given, saved.dtypes, strict=True):
            pattern = self.operands[i][1]
            if receiver is not None and dtype is not None and pattern is not None:
                wanted = np.dtype(np.float32) if self.rules.mixed else dtype
                shape = pattern.sizes(saved.dims)
                self.check_like(op, "out", receiver, shape, wanted, "the gradient")
                if self.rules.host:
                    check_writable(op, out=receiver)
        return given

    def check_given_again(self, x: Any, saved: Saved) -> None:
        """Raise unless x is given when, and only when, the forward did not keep it."""
        op, kept = self.op.backward_name, saved.needs["keep_x"]
        if kept == (x is not None):
            told = "to keep x: do not give it" if kept else "not to keep x, which must be given"
            raise ValueError(f"{op}: the forward was told {told}")
        pattern = self.operands[0][1]
        if x is not None and pattern is not None:
            shape = pattern.sizes(saved.dims)
            self.check_like(op, "x", x, shape, saved.out[1], "the forward's x")

    def check_plus(self, plus: Any, dims: Dims, dtype: Any) -> None:
        """Raise unless ``plus`` can be added to the output, or to the first gradient."""
        op, first = self.op, self.op.operands[0]
        name, shape, what = op.backward_name, first.shape, f"the gradient of {first.name}"
        if op.adds == "forward":
            name, shape, what = op.forward_name, op.out, "the output"
        self.check_like(name, "plus", plus, Pattern(shape).sizes(dims), dtype, what)

    # ---- the public functions --------------------------------------------------------------------

    def forward(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        """Return the public forward, or only function, around an implementation."""
        op, check = self.op, self.op.check
        needs = (*op.needs, *["plus"] * (op.adds == "forward"))
        count, end = len(op.operands), len(op.operands) + len(op.options)
        run = (implementation, self.rules.few(implementation))

        def call(*values: Any) -> Any:
            arrays = values[:count]
            dims, options, dtypes, few = self.accept(arrays, values[count:end])
            for i in self.looked_at:
                self.look_at(self.op.operands[i], arrays, dims)
            told: dict[str, Any] = {}
            if needs:
                told = dict(zip(needs, values[end:], strict=True))
                options = options | told
                if told.pop("out", None) is not None:
                    self.check_receiver(options["out"], arrays[0])
                if told.pop("plus", None) is not None:
                    self.check_plus(options["plus"], dims, arrays[0].dtype)
            if check is not None:
                replaced = check(op.name, dims, *arrays, **options)
                if replaced is not None:
                    arrays, options = replaced
            if not op.backward:
                return run[few](*arrays, **options)
            out, cache = run[few](*arrays, **options)
            return out, Saved(cache, _described(out), dims, dtypes, few, told)

        operands = [(o.name, None if o.optional else REQUIRED) for o in op.operands]
        keywords = [(o.name, o.default) for o in op.options] + [(n, NEEDS[n]) for n in needs]
        return _function(op.forward_name, op.says, operands, keywords, call)

    def backward(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        """Return the public backward around an implementation."""
        op = self.op
        keywords: list[tuple[str, Any]] = [("x", None)] if "keep_x" in op.needs else []
        keywords += [("out", None)] if op.parameters else []
        keywords += [("accumulate", False)] if op.accumulates else []
        keywords += [("plus", None)] if op.adds == "backward" else []

        names = [name for name, _ in keywords]
        run = (implementation, self.rules.few(implementation))

        def call(dout: Any, saved: Saved, *values: Any) -> Any:
            if not isinstance(saved, Saved):
                raise ValueError(
                    f"{op.backward_name}: cache must be what {op.forward_name} returned, "
                    f"got {type(saved).__name__}"
                )
            if not saved.needs.get("need_backward", True):
                raise ValueError(
                    f"{op.backward_name}: the forward was told need_backward=False, so it kept "
                    "nothing to go back through; leave that option out"
                )
            if saved.out != (getattr(dout, "shape", None), getattr(dout, "dtype", None)):
                self.check_dout(dout, saved)
            if not names:
                return run[saved.few](dout, saved.cache)
            asked = dict(zip(names, values, strict=True))
            if asked.get("accumulate") and asked["out"] is None:
                raise ValueError(f"{op.name}: accumulate=True adds onto out, so out must be given")
            if "x" in asked:
                self.check_given_again(asked["x"], saved)
            if asked.get("plus") is not None:
                self.check_plus(asked["plus"], saved.dims, saved.out[1])
            if "out" in asked:
                asked["out"] = self.receivers(asked["out"], saved)
            return run[saved.few](dout, saved.cache, **asked)

        says = f"Return the gradients of {', '.join(op.gradients)}."
        cotangent = "dloss" if op.out == "Loss" else "dout"
        operands = [(cotangent, REQUIRED), ("cache", REQUIRED)]
        return _function(op.backward_name, says, operands, keywords, call)


def _described(out: Any) -> Any:
    """Return shape and dtype of an output, of each of its parts, or None of a loss."""
    if hasattr(out, "dtype"):
        return out.shape, out.dtype
    return None if hasattr(out, "total") else [_described(part) for part in out]


def _function(
    name: str,
    says: str,
    operands: list[tuple[str, Any]],
    keywords: list[tuple[str, Any]],
    call: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function of this signature that hands all its arguments to ``call`` by position."""
    both = (*operands, *keywords)
    scope: dict[str, Any] = {"_call": call} | {f"_{key}": default for key, default in both}

    def declared(pairs: list[tuple[str, Any]]) -> list[str]:
        return [key if default is REQUIRED else f"{key}=_{key}" for key, default in pairs]

    signature = ", ".join(declared(operands) + (["*", *declared(keywords)] if keywords else []))
    order = ", ".join(key for key, _ in both)
    exec(f"def {name}({signature}):\n    return _call({order})", scope)
    function: Callable[..., Any] = scope[name]
    function.__doc__ = says
    return function


# ---- implementations -----------------------------------------------------------------------------


def plain(op: Op, module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions of an op from its mathematics, with what fast backends need added."""
    if not op.backward:
        return {op.name: getattr(module, op.name)}

    def forward(*arrays: Any, **options: Any) -> Any:
        needs = {name: options.pop(name) for name in op.needs}
        plus = options.pop("plus", None)
        out, cache = module.forward(*arrays, **options)
        out = out if plus is None else out + plus
        if not needs.get("keep_x", True):
            cache = cache._replace(x=None)
        if needs.get("out") is not None:
            needs["out"][...] = out
            out = needs["out"]
        return out, cache

    def backward(dout: Any, cache: Any, **asked: Any) -> Any:
        if asked.get("x") is not None:
            cache = cache._replace(x=asked["x"])
        gradients = module.backward(dout, cache)
        if "out" not in asked:
            return gradients
        single = not isinstance(gradients, tuple)
        found = dict(zip(op.gradients, (gradients,) if single else gradients, strict=True))
        if asked.get("plus") is not None:
            found[op.gradients[0]] = found[op.gradients[0]] + asked["plus"]
        for name, receiver in zip(op.parameters, asked["out"], strict=True):
            # what has another shape is somebody's mistake, and is judged as it is
            if receiver is not None and np.shape(found[name]) == receiver.shape:
                if asked.get("accumulate"):
                    found[name] = found[name] + receiver
                receiver[...] = found[name]
        return found[op.gradients[0]] if single else tuple(found.values())

    return {op.forward_name: forward, op.backward_name: backward}


def mathematics(ops: Iterable[Op]) -> dict[str, Callable[..., Any]]:
    """Return the implementations of the reference: the files of this folder, by the ops' names."""
    found: dict[str, Callable[..., Any]] = {}
    for op in ops:
        if op.home != "model":  # composed of the other ops
            found |= plain(op, importlib.import_module(f"reference.{op.home or op.name}"))
    return found


def offer(
    backend: str,
    ops: Iterable[Op],
    services: Iterable[str],
    rules: Rules,
    *sources: Mapping[str, Any],
) -> dict[str, Callable[..., Any]]:
    """Return the public functions of a backend: its own, with the boundary around each op.

    Parameters
    ----------
    backend : str
        Its name, for people.
    ops : iterable of Op
    services : iterable of str
        Functions that are passed on as they are.
    rules : Rules
        What the backend's arrays are like.
    *sources : mappings
        Name -> function, as ``vars(module)`` has them; the first that has a name gives it.

    Raises
    ------
    ImportError
        When no source has a function of the contract; it is named.
    """

    def own(name: str) -> Callable[..., Any]:
        for source in sources:
            if name in source:
                found: Callable[..., Any] = source[name]
                return found
        raise ImportError(
            f"{backend} has no function {name}, which reference.ops declares: write it in one of "
            "the files that this backend is made of"
        )

    offered = {name: own(name) for name in services}
    for op in ops:
        boundary = Boundary(op, rules)
        for name in op.names:
            backward = op.backward and name == op.backward_name
            offered[name] = (boundary.backward if backward else boundary.forward)(own(name))
    return offered
