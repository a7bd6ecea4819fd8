"""One call of the function that an exercise asks for: how it is written, and what comes of it."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from types import GeneratorType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from accel.verify.calls import Raised, changes, difference, short
from dist.study.exercise import Exercise, Options
from reference.study.tiled_attention import peak_bytes

NEAR = 0.01  # of the largest element: what a result of fewer bits may be off
KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # of a number: what may stand for it


class Given(NamedTuple):
    """What one call is given, and what makes the object whose method it is."""

    fields: list[Any]
    plain: list[Any]
    named: dict[str, Any]


def given(exercise: Exercise, case: tuple[Any, ...]) -> Given:
    """Return a case as what its call is given."""
    fields = len(case) - exercise.arguments if "." in exercise.function else 0
    rest = case[fields:]
    named = {k: v for part in rest if isinstance(part, Options) for k, v in part.items()}
    plain = [part for part in rest if not isinstance(part, Options)]
    return Given([*case[:fields]], plain, named)


def written(exercise: Exercise, module: ModuleType, case: tuple[Any, ...]) -> str:
    """Return a call as people write it, with the names that ``module`` has for what is given."""
    fields, plain, named = given(exercise, case)
    *owner, name = exercise.function.split(".")
    if not owner:
        return f"{name}({_named(getattr(module, name), plain, named)})"
    kind = getattr(module, owner[0])
    method = getattr(kind, name).__get__(object())  # without its self
    return f"{owner[0]}({_named(kind, fields, {})}).{name}({_named(method, plain, named)})"


def _named(function: Callable[..., Any], plain: list[Any], named: dict[str, Any]) -> str:
    """Return arguments with their names, without those that are None."""
    bound = inspect.signature(function).bind(*plain, **named).arguments.items()
    return ", ".join(f"{name}={short(x)}" for name, x in bound if x is not None)


def called(exercise: Exercise, module: ModuleType, case: tuple[Any, ...], right: Any = None) -> Any:
    """Call a function, or a method of what the case makes.

    Parameters
    ----------
    exercise : Exercise
    module : module
        With the function.
    case : tuple
        What the function may write into.
    right : object, optional
        The right result; what is nearly that is held to all else that is asked.

    Returns
    -------
    found : object
        The result, or in a ``Raised`` what no call may do.
    """
    before, now = deepcopy(given(exercise, case)), given(exercise, case)
    again = deepcopy(before)
    found = _result(exercise, module, now)
    if not exercise.in_place:
        for says in changes(before.fields + before.plain, now.fields + now.plain):
            return Raised("", f"{says} as it is")
    if right is None or isinstance(found, Raised) or difference(right, found, NEAR):
        return found
    says = unlike(right, found)
    if not says and exercise.asks is not None:
        says = exercise.asks(*now.plain)
    if not says and exercise.memory:
        held = peak_bytes(lambda: _result(exercise, module, again))
        if held > exercise.memory:
            says = f"holds {held / 2**20:.1f} MiB at once, should be {exercise.memory / 2**20:.1f}"
            says += " at most"
    return Raised("", says) if says else found


def _result(exercise: Exercise, module: ModuleType, call: Given) -> Any:
    *owner, name = exercise.function.split(".")
    function: Any = getattr(module, owner[0])(*call.fields) if owner else module
    found = getattr(function, name)(*call.plain, **call.named)
    # copies, as a generator may yield one array again and again
    return [deepcopy(x) for x in found] if isinstance(found, GeneratorType) else found


def unlike(want: Any, got: Any) -> str:
    """Say which part of a result that has the right values has another type, "" where none has."""
    if isinstance(want, Raised):
        return ""
    if isinstance(want, (list, tuple)):
        names = getattr(want, "_fields", [f"item {i}" for i in range(len(want))])
        parts = ((name, unlike(a, b)) for name, a, b in zip(names, want, got, strict=True))
        return next((f"{name} {says}" for name, says in parts if says), "")
    if isinstance(want, np.ndarray):
        if not isinstance(got, np.ndarray):
            return f"is a {type(got).__name__}, should be an array"
        same = got.dtype == want.dtype
        return "" if same else f"has dtype {got.dtype}, should have {want.dtype}"
    kind = np.asarray(want).dtype.kind
    if np.asarray(got).dtype.kind in KINDS.get(kind, np.asarray(got).dtype.kind):
        return ""
    due = {"b": "bool", "i": "int", "f": "float"}[kind]
    return f"is {short(got)}, of type {type(got).__name__}, should be of type {due}"
