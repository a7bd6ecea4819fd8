"""What an exercise is: which function of which file is blank, and what people get wrong in it."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from reference.ops import OPS

# The arguments of one call, made anew each time: a function may write into them.
Cases = Callable[[np.random.Generator], Iterator[tuple[Any, ...]]]


class Options(dict[str, Any]):
    """The keyword arguments of a call, at the end of a case."""


class Mistake(NamedTuple):
    """A mistake that learners make, as a change of the solution's text."""

    says: str  # the hint, with what to do
    changes: Mapping[str, str]  # each of these, of which there is one, becomes that


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One exercise.

    One of an op is graded by ``accel.verify``; first its backward is blank, then its forward, then
    its Numba kernel. One of another function is graded by ``cases``.
    """

    name: str  # of the op, when it is one
    home: str  # the module that the solution is in
    says: str  # the three sentences that one needs
    mistakes: tuple[Mistake, ...] = ()
    function: str = ""  # what is blank, "f" or "Class.f"; an op says it by itself
    given: tuple[str, ...] = ()  # helpers of the solution that are not part of the exercise
    kernels: str = ""  # the module with the op's kernels, if they make an exercise
    cases: Cases | None = None
    arguments: int = 0  # of a method; what comes before in a case makes the object
    bits: bool = False  # whether results must be the same to the last bit
    in_place: bool = False  # whether it may write into its arguments
    asks: Callable[..., str] | None = None  # of the arguments after a call: what is missing, or ""
    memory: int = 0  # bytes that a call may hold at once beyond its arguments; 0: any

    @property
    def levels(self) -> list[str]:
        """What is blank, from the first level on."""
        if self.cases is not None:
            return [self.function]
        blanks = ["backward", "forward"] if OPS[self.name].backward else [self.name]
        return blanks + ([f"_{self.name}_backward"] if self.kernels else [])

    def home_of(self, level: int) -> str:
        """Return the module that the solution of a level is in."""
        return self.kernels if self.levels[level - 1].startswith("_") else self.home


def path_of(module: str) -> Path:
    """Return the file of a module, which is not imported."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin)


@cache
def source_of(module: str) -> str:
    """Return the text of a module."""
    return path_of(module).read_text(encoding="utf-8")


def mistaken(exercise: Exercise, mistake: Mistake) -> str:
    """Return the text of the solution's module with a mistake in it.

    Raises
    ------
    ValueError
        When the text has changed so that the mistake no longer applies.
    """
    text = source_of(exercise.home)
    for old, new in mistake.changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{exercise.home} has {old!r} {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


def module_of(text: str, name: str) -> ModuleType:
    """Return a module of the given text."""
    module = ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), vars(module))
    return module
