"""NumPy code run step by step in another precision: every array that a step makes is rounded."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.tolerance import round_bf16
from reference.ops import OPS
from reference.types import Array


class Stepwise(np.ndarray):
    """An array that makes rounded arrays: of the ufuncs, products and sums that NumPy has."""

    how: Callable[[Array], Array] = staticmethod(round_bf16)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Make a step as usual, and round what comes of it."""
        options = {name: _each(_plain, value) for name, value in options.items()}
        made = getattr(ufunc, method)(*map(_plain, inputs), **options)
        for given in options.get("out") or ():
            given[...] = self._rounded(given)
        return _each(self._rounded, made)

    def mean(self, *args: Any, **options: Any) -> Any:
        """Take a mean in one step, as frameworks do: that of equal numbers is one of them."""
        return self._rounded(_plain(self).mean(*args, **options))

    def _rounded(self, made: Any) -> Any:
        if np.asarray(made).dtype.kind != "f":
            return made
        return np.asarray(self.how(made)).view(type(self))


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Change a value, or those of a tuple, a NamedTuple too."""
    if isinstance(value, tuple):
        changed = [_each(change, part) for part in value]
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    return change(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Stepwise) else value


def stepwise(module: Any, op: str, how: Callable[[Array], Array] = round_bf16) -> SimpleNamespace:
    """Return the functions of an op so that each of their steps is rounded, bf16 unless told."""
    kind = type("Stepwise", (Stepwise,), {"how": staticmethod(how)})

    def taken(value: Any) -> Any:
        return value.view(kind) if _is_float(value) else value

    def given(value: Any) -> Any:
        value = _plain(value)
        return np.asarray(how(value)) if _is_float(value) else value

    def forward(*arrays: Any, **options: Any) -> Any:
        options = {name: _each(taken, value) for name, value in options.items()}
        made = getattr(module, OPS[op].forward_name)(*(_each(taken, a) for a in arrays), **options)
        return (_each(given, made[0]), made[1]) if OPS[op].backward else _each(given, made)

    def backward(dout: Any, cache: Any) -> Any:
        return _each(given, getattr(module, f"{op}_backward")(_each(taken, dout), cache))

    return SimpleNamespace(
        DTYPES="bf16", **dict(zip(OPS[op].names, (forward, backward), strict=False))
    )
