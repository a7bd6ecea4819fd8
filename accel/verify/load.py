"""From a file, or any object with functions, to a subject that can be checked."""

import importlib.util
import inspect
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from accel.verify.subject import OTHERS, Subject, SubjectError, first_line
from reference.boundary import Boundary, plain
from reference.contract import Op
from reference.ops import HOST, OPS


def load_file(path: str | Path) -> Subject:
    """Load a module from a file.

    Raises
    ------
    SubjectError
        When there is no such file, it does not import, or it offers no op of the contract.
    """
    module = import_file(path)
    return as_subject(module, Path(path).name, f"--module {shlex.quote(str(path))}")


def load_op(path: str | Path, op: str) -> Subject:
    """Load a file that holds one op as a file of ``reference/`` or ``accel/cpu/`` does.

    Raises
    ------
    SubjectError
        When there is no such file, it does not import, or lacks a function.
    """
    module, spec = import_file(path), OPS[op]
    functions = functions_of(op, module)
    if not _has_kernels(spec, module):
        for name, function in functions.items():
            _without_what_is_added(spec, name, function)
    offered = SimpleNamespace(**functions, __file__=module.__file__)
    return as_subject(offered, Path(path).name, f"--module {shlex.quote(str(path))}")


def _has_kernels(spec: Op, module: Any) -> bool:
    """Tell functions that are named after the op from its mathematics."""
    return all(hasattr(module, name) for name in spec.names)


def _without_what_is_added(spec: Op, name: str, function: Any) -> None:
    """Have a function of somebody's mathematics take what it says, and not what is added to it."""
    signature = inspect.signature(function)
    added = {p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    if name != spec.backward_name:
        added &= {*spec.needs, "plus"}
    taken = [p for p in signature.parameters.values() if p.name not in added]
    function.__signature__ = signature.replace(parameters=taken)


def functions_of(op: str, module: Any) -> dict[str, Callable[..., Any]]:
    """Return the public functions of an op from a module with its mathematics or its kernels.

    The former are ``forward`` and ``backward`` as in ``reference/``, the latter named after the op.

    Raises
    ------
    SubjectError
        When one is missing.
    """
    spec = OPS[op]
    plainly = ("forward", "backward") if spec.backward else spec.names
    named = _has_kernels(spec, module)
    missing = [] if named else [name for name in plainly if not hasattr(module, name)]
    if missing:
        where = getattr(module, "__file__", "the module")
        raise SubjectError(f"there is no function {' and no '.join(missing)} in {where}")
    if named:
        own = {name: getattr(module, name) for name in spec.names}
    else:
        own = plain(spec, _counted(spec, module))
    boundary = Boundary(spec, HOST)
    return {
        name: boundary.backward(function)
        if spec.backward and name == spec.backward_name
        else boundary.forward(function)
        for name, function in own.items()
    }


def _counted(spec: Op, module: Any) -> Any:
    """Return the mathematics of an op with a word on what it returns, where that is not enough."""
    if not spec.backward:
        return module

    def forward(*arrays: Any, **options: Any) -> Any:
        found = module.forward(*arrays, **options)
        if not isinstance(found, (list, tuple)) or len(found) != 2:
            raise TypeError(f"forward must return (out, cache), but returned {_kind(found)}")
        return found

    def backward(dout: Any, cache: Any) -> Any:
        found = module.backward(dout, cache)
        found = tuple(found) if isinstance(found, list) else found
        owed = [f"d{name}" for name in spec.gradients]
        given = len(found) if isinstance(found, tuple) else int(found is not None)
        if given != len(owed):
            raise TypeError(
                f"backward must return {', '.join(owed)} (None for what was not given), "
                f"but returned {_kind(found)}"
            )
        return found

    return SimpleNamespace(forward=forward, backward=backward)


def _kind(value: Any) -> str:
    if value is None:
        return "None: is there a return?"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"one {type(value).__name__}"


def import_file(path: str | Path) -> ModuleType:
    """Import a file.

    Raises
    ------
    SubjectError
        When there is no such file or it does not import.
    """
    path = Path(path)
    if not path.is_file():
        raise SubjectError(f"there is no file {path}; give the path of a Python module")
    spec = importlib.util.spec_from_file_location(f"verified_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path} is no Python module; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)  # so that it may import its neighbours, now and when called
    sys.modules[spec.name] = module
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        line = ""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == spec.origin]
        if frames:
            line = f" (line {frames[-1].lineno})"
        raise SubjectError(
            f"{path} does not import: {type(error).__name__}: {first_line(error)}{line}"
        ) from error
    return module


def as_subject(
    module: Any, name: str | None = None, command: str | None = None, *, alone: bool = False
) -> Subject:
    """Wrap a module, or any object that has the functions as attributes; see ``Subject``.

    Raises
    ------
    SubjectError
        When it offers nothing to check.
    """
    if isinstance(module, (str, Path)):
        return load_file(module)
    name = name or getattr(module, "__name__", type(module).__name__)
    if command is None:
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        command = f"--module {shlex.quote(str(file))}" if file else str(name)
    subject = Subject(module, str(name), command, alone=alone)
    if not subject.specs():
        near = [n for n in dir(module) if n.endswith(("_forward", "_backward"))]
        raise SubjectError(
            f"{name} has no function named like an op of the contract (rmsnorm_forward, "
            f"attention_backward, …)" + (f"; it has {', '.join(near[:4])}" if near else "") + OTHERS
        )
    return subject
