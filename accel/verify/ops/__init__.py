"""Rooms: all that verify knows of one op stands in the file of its name here.

A room offers ``generate`` and ``magnitude``, and whatever else of ``Room`` its op needs; nothing
outside a room asks for the name of an op. An op that joins the contract is checked as soon as it
has a room.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel.tolerance import Magnitude, Unit
from accel.verify.draw import Draft, Draw
from reference.types import Array

if TYPE_CHECKING:
    from accel.verify.contract import Case

__all__ = ["Draft", "Draw", "Magnitude", "Magnitudes", "Mistakes", "Values", "room"]

Values = Mapping[str, Any]  # arrays in float64 and options, by name
Magnitudes = dict[str, Magnitude]  # of each result
# What people get wrong, in words, and what comes of it: the results of another case, or some of
# this case's results in float64.
Mistakes = Iterator[tuple[str, "Case | Callable[[], Mapping[str, Array]]"]]


@dataclasses.dataclass(frozen=True)
class Room:
    """What a module of this package may say of its op."""

    generate: Callable[[Draw], Draft]  # the arguments of a forward
    # s and c of the error bound (see rounding.py): (values, dout, u)
    magnitude: Callable[[Values, Any, Unit], Magnitudes]
    mistakes: Callable[["Case"], Mistakes] = lambda case: iter(())
    # a constant factor that a result may be off by, and what that means
    ratios: Callable[["Case"], Iterator[tuple[float, str]]] = lambda case: iter(())
    # (what it means, a result, where): said when that result is wrong there and nowhere else
    only: Callable[["Case"], Iterator[tuple[str, str, Array]]] = lambda case: iter(())
    # what a backward without a cache is given beside the forward's arguments and out
    saved: Callable[["Case"], Mapping[str, Array]] = lambda case: {}
    # texts beside this one with more mistakes than the op's own has (``spoiled.py``)
    TABLES: tuple[str, ...] = ()
    CUTS: str = ""  # letters of the axes that may be cut to make a case smaller
    WEIGHT: float = 1  # how many cases it gets: more where there are more ways to go wrong
    # what named choices have to be in the first cases: the hardest first
    HARD: tuple[Mapping[str, Any], ...] = ()
    PRODUCTS: bool = False  # whether it has matrix products, whose inputs TF32 rounds
    FP8: bool = False  # whether it takes arrays that are kept in 8 bits with a scale
    GOLDEN: bool = True  # whether its results prove something to another language
    UNMISSED: tuple[str, ...] = ()  # parameters that save memory, which a kernel may lack


@functools.cache
def room(op: str) -> Room:
    """Return what verify knows of an op of the contract.

    Raises
    ------
    NotImplementedError
        When nobody has written it; the message names the file to write.
    """
    name, found = f"{__name__}.{op}", None
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    fields = [f.name for f in dataclasses.fields(Room)]
    offered = {field: getattr(found, field) for field in fields if hasattr(found, field)}
    if not {"generate", "magnitude"} <= set(offered):
        raise NotImplementedError(
            f"verify has no cases of {op}: write accel/verify/ops/{op}.py with generate(draw) and "
            "magnitude(values, dout, u), as the files beside it do"
        )
    return Room(**offered)
