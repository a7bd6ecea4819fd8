"""From two files to what is checked: which functions, in which framework, of which shapes."""

import copy
import dataclasses
import difflib
import inspect
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from accel.verify.like import kernelbench
from accel.verify.like.declared import DeclarationError, read
from accel.verify.like.found import declared_by
from accel.verify.like.frameworks import Framework, Torch, framework_of
from accel.verify.like.reference import Reference, parameters_of
from accel.verify.like.run import Pair
from accel.verify.like.subject import LikeSubject
from accel.verify.load import import_file
from accel.verify.subject import RESEMBLES, SubjectError

FORM = 'SHAPES = {"%s": {"x": "B T D", "gain": "D", "eps": 1e-5}}'


def load(like: str, module: str, functions: tuple[str, ...], command: str) -> LikeSubject:
    """Load a reference file and the file that is held to it.

    Parameters
    ----------
    functions : tuple of str
        ``NAME``, or ``REF=NEW`` where the names differ; all of the same name when there are none.

    Raises
    ------
    SubjectError
        When a file does not import, or they have no function in common, or its shapes are unknown.
    """
    theirs, ours = import_file(like), import_file(module)
    name = Path(module).name
    if kernelbench.is_problem(theirs) and not functions:
        return LikeSubject([kernelbench.pair(theirs, ours, like, module)], ours, name, command)
    pairs = []
    names = _names(theirs, ours, like, module, functions)
    often = {ref for ref, count in Counter(ref for ref, _ in names).items() if count > 1}
    for ref, new in names:
        reference = reference_of(theirs, ref, like)
        if ref in often:
            reference = dataclasses.replace(reference, name=f"{ref}={new}")
        framework = framework_of(ours, otherwise=reference.framework)
        backward = getattr(ours, f"{new}_backward", None)
        pairs.append(Pair(reference, getattr(ours, new), framework, backward, name=new))
    subject = LikeSubject(pairs, ours, name, command)
    taken = {n for both in names for n in both}
    for pair in (pair for pair in pairs if pair.backward is None):
        subject.left += [
            f"{other} is not taken; a backward is called {pair.backward_name}"
            for other in _public(ours)
            if other not in taken and _resembles(other, pair)
        ]
    left = [n for n in _public(theirs) if n not in taken and not n.endswith("_backward")]
    if left and not functions:
        subject.notes.add(f"{name} has no {', '.join(left)}, which {Path(like).name} has")
    return subject


def _resembles(name: str, pair: Pair) -> bool:
    """Say whether a function was probably meant to be the backward of another."""
    end = name.removeprefix(pair.name).strip("_").lower()
    close = difflib.SequenceMatcher(None, end, "backward").ratio() >= RESEMBLES
    return name.startswith(pair.name) and (close or end == "bwd")


def _public(module: ModuleType) -> list[str]:
    """Return the functions and modules that a file itself defines."""
    found = []
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) in (module.__name__, None)
        if name.startswith("_") or not callable(value) or name in ("from_numpy", "to_numpy"):
            continue
        if inspect.isclass(value) and not hasattr(value, "forward"):
            continue
        if own or not (inspect.isclass(value) or inspect.isfunction(value)):
            found.append(name)
    return found


def _names(
    theirs: ModuleType, ours: ModuleType, like: str, module: str, functions: tuple[str, ...]
) -> list[tuple[str, str]]:
    if functions:
        pairs = [(f.partition("=")[0], f.partition("=")[2] or f) for f in functions]
        for ref, new in pairs:
            for holder, name, path in ((theirs, ref, like), (ours, new, module)):
                if not callable(getattr(holder, name, None)):
                    raise SubjectError(f"{path} has no function {name}")
        return list(dict.fromkeys(pairs))
    declared = [*_declarations(theirs), *_public(theirs)]
    names = [n for n in dict.fromkeys(declared) if callable(getattr(ours, n, None))]
    names = [n for n in names if callable(getattr(theirs, n, None)) and not n.endswith("_backward")]
    if not names:
        raise SubjectError(
            f"{module} has no function of a name that {like} has ({', '.join(_public(theirs))}); "
            "--function REF=NEW says which is which"
        )
    return [(name, name) for name in names]


def _declarations(module: ModuleType) -> dict[str, Any]:
    return {**getattr(module, "EXAMPLES", {}), **getattr(module, "SHAPES", {})}


def reference_of(module: ModuleType, name: str, path: str) -> Reference:
    """Return a function of the reference file with what it takes.

    Raises
    ------
    SubjectError
        When its shapes are not declared, and there is no example to find them by.
    """
    function = getattr(module, name)
    shapes, examples = getattr(module, "SHAPES", {}), getattr(module, "EXAMPLES", {})
    if name not in shapes and name not in examples:
        raise SubjectError(
            f"{path} does not say what {name} takes: give it {FORM % name}, or "
            f'EXAMPLES = {{"{name}": (x, gain)}}'
        )
    framework = framework_of(module)
    try:
        if name in shapes:
            return make_reference(name, function, framework, shapes[name])
        example = examples[name]
        example = example() if callable(example) else example
        return declared_by(name, function, framework, example)
    except DeclarationError as error:
        raise SubjectError(f"{path}: {name}: {error}") from None


def make_reference(
    name: str, function: Any, framework: Framework, shapes: Mapping[str, Any]
) -> Reference:
    """Return a reference of which the shapes are declared.

    Raises
    ------
    DeclarationError
        When they do not fit the function, or cannot be read.
    """
    declared = read(shapes)
    parameters = parameters_of(function)
    if parameters is not None:
        listed = {
            n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        if len(listed) == len(parameters):
            unknown = [n for n in declared.order if n not in listed]
            if unknown:
                raise DeclarationError(
                    f"{name} takes no {unknown[0]}; it takes {', '.join(listed)}"
                )
            lacking = [
                n for n, p in listed.items() if p.default is p.empty and n not in declared.order
            ]
            if lacking:
                raise DeclarationError(f"{lacking[0]} is not declared, and {name} needs it")
            order = tuple(n for n in listed if n in declared.order)
            declared = dataclasses.replace(declared, order=order)
    return Reference(name, function, framework, declared, maker(function, framework))


def maker(function: Any, framework: Framework) -> Any:
    """Return what makes a module of its arguments; None for a function."""
    if not isinstance(framework, Torch):
        return None
    torch = framework.torch
    if isinstance(function, torch.nn.Module):
        return lambda init: copy.deepcopy(function)  # whose buffers a call may change
    if inspect.isclass(function) and issubclass(function, torch.nn.Module):

        def make(init: tuple[Any, ...]) -> Any:
            torch.manual_seed(0)
            return function(*init)

        return make
    return None
