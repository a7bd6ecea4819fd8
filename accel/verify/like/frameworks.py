"""Where a function lives: how NumPy, PyTorch and JAX take arrays, give results, and differentiate.

No framework is imported before a file that is checked has brought it in.
"""

import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from reference.types import Array

Given = Mapping[str, Any]  # arrays of a framework, by the names of a case
Function = Callable[[Given], Any]
# cotangents by the names of results -> gradients by the names of arrays; may be called again
Backward = Callable[[Mapping[str, Any]], dict[str, Any]]


class Framework(ABC):
    """What is asked of a framework."""

    name: str

    @abstractmethod
    def give(self, array: Array, dtype: str) -> Any:
        """Make an array of the framework's; floats in the precision of that name."""

    @abstractmethod
    def take(self, value: Any) -> Array:
        """Make a NumPy array of a result; bf16 and float16 become float32."""

    def dtype_of(self, value: Any) -> str:
        """Return the name of a result's precision."""
        return str(np.asarray(value).dtype)

    def forward(
        self, function: Function, given: Given, wanted: list[str], results: Iterable[str]
    ) -> tuple[Any, Backward]:
        """Return what a function gives, and its backward: the gradients of ⟨cotangents, results⟩.

        Raises
        ------
        NoGradient
            When there is no way to differentiate it; the backward may raise it, too.
        """
        raise NoGradient(f"{self.name} has no automatic differentiation")

    def within(self, dtype: str) -> AbstractContextManager[Any]:
        """Surround calls in a precision: in float64 nothing inside is any narrower."""
        return nullcontext()

    def evaluate(self, function: Function, arrays: Mapping[str, Array], dtype: str) -> Any:
        """Call a function in a precision."""
        with self.within(dtype):
            return function({name: self.give(a, dtype) for name, a in arrays.items()})

    def gradients(
        self,
        function: Function,
        arrays: Mapping[str, Array],
        dtype: str,
        wanted: list[str],
        cotangents: Mapping[str, Array],
    ) -> tuple[Any, dict[str, Any]]:
        """Differentiate a function in a precision."""
        with self.within(dtype):
            given = {name: self.give(a, dtype) for name, a in arrays.items()}
            out, backward = self.forward(function, given, wanted, cotangents)
            return out, backward(cotangents)


class NoGradient(Exception):
    """A function cannot be differentiated; says why."""


def named_parts(out: Any, name: str = "out") -> dict[str, Any]:
    """Return the arrays of a result by name: out; out[0], …; out.key; whatever is no array goes."""
    if isinstance(out, Mapping):
        parts: list[tuple[str, Any]] = [(f".{key}", value) for key, value in out.items()]
    elif hasattr(out, "_fields"):
        parts = [(f".{field}", getattr(out, field)) for field in out._fields]
    elif isinstance(out, (tuple, list)):
        parts = [(f"[{i}]", value) for i, value in enumerate(out)]
    else:
        known = hasattr(out, "__array__") or isinstance(out, (bool, int, float))
        known = known or hasattr(out, "__dlpack__")
        return {name: out} if known else {}
    found: dict[str, Any] = {}
    for suffix, value in parts:
        found |= named_parts(value, name + suffix)
    return found


# ---- NumPy ---------------------------------------------------------------------------------------


class NumPy(Framework):
    """Arrays of NumPy; bf16 numbers travel in float32."""

    name = "numpy"
    _types = {"float64": np.float64, "float16": np.float16}  # noqa: RUF012

    def give(self, array: Array, dtype: str) -> Any:
        if array.dtype.kind != "f":
            return array.copy()
        return array.astype(self._types.get(dtype, np.float32))

    def take(self, value: Any) -> Array:
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype == np.float16 else array


# ---- PyTorch -------------------------------------------------------------------------------------


class Torch(Framework):
    """Tensors of PyTorch, on the CPU unless the module has a ``from_numpy`` of its own."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._types = {
            "float64": torch.float64,
            "float32": torch.float32,
            "bf16": torch.bfloat16,
            "float16": torch.float16,
        }

    def give(self, array: Array, dtype: str) -> Any:
        tensor = self.torch.from_numpy(np.array(array, order="C"))
        return tensor.to(self.type_of(dtype)) if tensor.is_floating_point() else tensor

    def type_of(self, dtype: str) -> Any:
        """Return the type that values of a precision come in."""
        return self._types.get(dtype, self.torch.float32)

    def take(self, value: Any) -> Array:
        if not isinstance(value, self.torch.Tensor):
            return np.asarray(value)
        value = value.detach().cpu()
        if value.dtype in (self.torch.bfloat16, self.torch.float16):
            value = value.float()
        return np.asarray(value.numpy())

    def dtype_of(self, value: Any) -> str:
        if not isinstance(value, self.torch.Tensor):
            return super().dtype_of(value)
        names = {torch: name for name, torch in self._types.items()}
        return names.get(value.dtype, str(value.dtype).removeprefix("torch."))

    def evaluate(self, function: Function, arrays: Mapping[str, Array], dtype: str) -> Any:
        with self.torch.no_grad():
            return super().evaluate(function, arrays, dtype)

    def forward(
        self, function: Function, given: Given, wanted: list[str], results: Iterable[str]
    ) -> tuple[Any, Backward]:
        """Return what a function gives, and its backward by autograd."""
        given = dict(given)
        for name in wanted:
            given[name] = given[name].detach().requires_grad_()
        with self.torch.enable_grad():
            out = function(given)
        parts = named_parts(out)
        tracked = {
            name: parts[name]
            for name in results
            if name in parts and getattr(parts[name], "requires_grad", False)
        }
        if not tracked:
            raise NoGradient("its result does not require a gradient")
        leaves = [given[name] for name in wanted]

        def backward(cotangents: Mapping[str, Any]) -> dict[str, Any]:
            douts = [
                (c if isinstance(c, self.torch.Tensor) else self.torch.from_numpy(np.array(c)))
                for c in (cotangents[name] for name in tracked)
            ]
            douts = [c.to(part) for c, part in zip(douts, tracked.values(), strict=True)]
            try:
                found = self.torch.autograd.grad(
                    list(tracked.values()), leaves, douts, allow_unused=True, retain_graph=True
                )
            except RuntimeError as error:
                says = str(error).splitlines()[0]
                if "no autograd formula" in says or "derivative for" in says:
                    raise NoGradient(says) from error  # none was written; all else is a fault
                raise
            pairs = zip(wanted, found, strict=True)
            return {
                name: self.torch.zeros_like(given[name]) if gradient is None else gradient
                for name, gradient in pairs
            }

        return out, backward

    @contextmanager
    def within(self, dtype: str) -> Iterator[None]:
        """In float64, let what is made or converted inside a function be float64 as well."""
        if dtype != "float64":
            yield
            return
        torch = self.torch
        narrow = {torch.float32, torch.bfloat16, torch.float16}
        calls = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

        class Wide(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                def wide(value: Any) -> Any:
                    return (
                        torch.float64
                        if isinstance(value, torch.dtype) and (value in narrow)
                        else value
                    )

                if func in calls:
                    return args[0].double()
                kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
                return func(*(wide(value) for value in args), **kwargs)

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with Wide():
                yield
        finally:
            torch.set_default_dtype(before)


# ---- JAX -----------------------------------------------------------------------------------------


class Jax(Framework):
    """Arrays of JAX; 64 bits are enabled while the reference runs in float64, and only then."""

    name = "jax"

    def __init__(self) -> None:
        import jax

        self.jax = jax
        jax.config.update("jax_traceback_filtering", "off")  # to see whether JAX itself raised

    def give(self, array: Array, dtype: str) -> Any:
        jnp = self.jax.numpy
        types = {"float64": jnp.float64, "bf16": jnp.bfloat16, "float16": jnp.float16}
        kind = types.get(dtype, jnp.float32) if array.dtype.kind == "f" else None
        return jnp.asarray(array, kind)

    def take(self, value: Any) -> Array:
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array

    def dtype_of(self, value: Any) -> str:
        return super().dtype_of(value).replace("bfloat16", "bf16")

    def forward(
        self, function: Function, given: Given, wanted: list[str], results: Iterable[str]
    ) -> tuple[Any, Backward]:
        """Return what a function gives, and its backward by ``jax.vjp``."""
        jnp = self.jax.numpy

        def of_parts(leaves: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            out = function({**given, **leaves})
            parts = named_parts(out)
            return {name: parts[name] for name in results if name in parts}, out

        with self._ruled():
            leaves = {name: given[name] for name in wanted}
            parts, vjp, out = self.jax.vjp(of_parts, leaves, has_aux=True)

        def backward(cotangents: Mapping[str, Any]) -> dict[str, Any]:
            with self._ruled():
                douts = {n: jnp.asarray(cotangents[n], part.dtype) for n, part in parts.items()}
                (found,) = vjp(douts)
            return dict(found)

        return out, backward

    @contextmanager
    def _ruled(self) -> Iterator[None]:
        """Tell where JAX has no rule to differentiate by.

        It raises NotImplementedError for most of its primitives, the others for loops and integers.
        A rule of the function's own that raises is no such thing, and comes out as it is.
        """
        try:
            yield
        except (NotImplementedError, ValueError, TypeError) as error:
            *_, last = traceback.walk_tb(error.__traceback__)
            if not str(last[0].f_globals.get("__name__", "")).startswith("jax"):
                raise
            raise NoGradient((str(error).splitlines() or [type(error).__name__])[0]) from error

    def within(self, dtype: str) -> AbstractContextManager[Any]:
        if dtype != "float64":
            return nullcontext()
        wide: AbstractContextManager[Any] = self.jax.enable_x64(True)
        return wide


# ---- which it is ---------------------------------------------------------------------------------

FRAMEWORKS: dict[str, Callable[[], Framework]] = {"torch": Torch, "jax": Jax, "numpy": NumPy}


def framework_of(*holders: Any, otherwise: Framework | None = None) -> Framework:
    """Return the framework that a file (or a function's file) names among its globals."""
    for holder in holders:
        names = set()
        for value in list(vars(holder).values()):
            owner = value.__name__ if isinstance(value, ModuleType) else None
            owner = owner or str(getattr(value, "__module__", "") or "")
            names.add(owner.partition(".")[0])
        if "triton" in names:
            names.add("torch")  # whose tensors it takes
        for name in ("torch", "jax"):
            if name in names and name in sys.modules:
                return FRAMEWORKS[name]()
        if "numpy" in names:
            return NumPy()
    return otherwise or NumPy()
