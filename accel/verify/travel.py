"""NaN travels: what one NaN, or one infinity, in an input must do to each result.

The contract says it in words (``Op.reach``): results that differ from the element in a letter that
the op keeps apart are as without it; of the others, each that depends on the element is NaN, and
none is quietly finite and wrong. Here that becomes four kinds of elements of a result:

apart     as without it, finite and right
must      depends on a NaN: is NaN. Depends on an infinity: is not finite, unless the output has a
          finite limit there, which may be given instead
may       does not depend on it, but a correct kernel may meet 0 · NaN on its way: NaN, or right
unknown   depends on it by less than rounding, or is the gradient at an infinity: anything

What depends on the element is found by the reference in float64, with two numbers in its place.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reference.contract import Op
from reference.types import Array

if TYPE_CHECKING:
    from accel.verify.contract import Case

WEAK = 1e-5  # relative: what depends by less may be lost in rounding
FAR = 1e30  # stands for infinity where a limit is looked for
LIMIT = 1e25  # results beyond this have none


def element(name: str, at: Iterable[int]) -> str:
    """Return how an element is written: x[0, 1], or x where it has no axes."""
    index = ", ".join(str(int(i)) for i in at)
    return f"{name}[{index}]" if index else name


class Place(NamedTuple):
    """The one element that is not finite."""

    name: str  # of an input, or "dout"
    at: tuple[int, ...]
    value: float

    @property
    def text(self) -> str:
        """Say where it is."""
        what = "NaN" if math.isnan(self.value) else f"{self.value:+}"
        return f"the {what} at {element(self.name, self.at)}"


class Travels(NamedTuple):
    """What becomes of one result."""

    place: Place
    value: Array  # what is right, wherever the result is finite
    must: Array
    may: Array
    unknown: Array

    def lost(self, name: str, got: Array) -> str:
        """Say which element should not be finite and is; "" when there is none."""
        lost = self.must & np.isfinite(got)
        if not lost.any():
            return ""
        at = tuple(int(i) for i in np.argwhere(lost)[0])
        should = "NaN" if math.isnan(self.place.value) else "NaN or infinite"
        given = f"{element(name, at)} is {got[at]:.9g}"
        return f"{given}, but depends on {self.place.text}: it must be {should}"

    def settled(self, got: Array) -> Array:
        """Return a result with what may be NaN, and what nobody knows, made right."""
        fine = self.unknown | ((self.must | self.may) & ~np.isfinite(got))
        return np.where(fine, self.value, got)

    def shown(self) -> Array:
        """Return the right result as people should see it."""
        return np.where(self.must, self.place.value * math.nan, self.value)

    def negated(self) -> "Travels":
        """Return what becomes of the negative of the result."""
        return self._replace(value=-self.value)

    def shifted(self, by: Array) -> "Travels":
        """Return what becomes of the result when something is added to it."""
        return self._replace(value=self.value + by)


def special_at(case: "Case") -> Place | None:
    """Return the first element of a case that is not finite."""
    floating = {o.name for o in case.spec.floats}
    given = {n: a for n, a in case.arrays.items() if n in floating}
    for name, a in [*given.items(), ("dout", case.cotangent)]:
        if isinstance(a, np.ndarray) and not np.isfinite(a).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(a))[0])
            return Place(name, at, float(a[at]))
    return None


def tamed(case: "Case", place: Place, value: float) -> "Case":
    """Return the case with a number in that place."""
    a = np.array(case.cotangent if place.name == "dout" else case.arrays[place.name])
    a[place.at] = value
    if place.name == "dout":
        return dataclasses.replace(case, cotangent=a)
    return case.but({place.name: a})


def other_value(place: Place) -> float:
    """Return a second number for the place: another, or one near the infinity."""
    return 2.5 if math.isnan(place.value) else math.copysign(FAR, place.value)


def travels(
    case: "Case",
    place: Place,
    before: Mapping[str, Array],
    moved: Mapping[str, Array],
    given: Mapping[str, Array],
) -> dict[str, Travels]:
    """Return what becomes of each result.

    ``before`` and ``moved`` are the results with a number in the place, ``given`` those of the case
    itself, in float64.
    """
    return {
        name: _of_result(case.spec, place, name, *(np.asarray(r[name], np.float64) for r in three))
        for name in before
        for three in [(before, moved, given)]
    }


def _of_result(spec: Op, place: Place, name: str, a: Array, b: Array, own: Array) -> Travels:
    gradient = name[:1] == "d" and name[1:] in spec.gradients
    infinite = math.isinf(place.value)
    with np.errstate(invalid="ignore"):
        differ = ~(a == b)
        strong = ~(np.abs(a - b) <= WEAK * (np.abs(a) + np.abs(b)) + 1e-20)
    apart = _apart(spec, place, name, np.shape(a))
    apart = ~differ if apart is None else apart & ~differ
    unknown = differ & ~strong
    must, value = strong, a
    if infinite:
        finite = np.isfinite(own)
        limited = np.isfinite(b) & (np.abs(b) < LIMIT)
        must = strong & ~finite & ~limited
        value = np.where(finite, own, np.where(limited & strong, b, a))
        unknown = np.asarray(unknown | (differ & gradient))
    # NaN is neither above nor below zero: what the slope is there is anybody's guess
    unknown = np.asarray(unknown | (np.isfinite(own) & ~(own == value)))
    may = ~apart & ~must
    return Travels(place, np.where(apart, a, value), must & ~unknown, may, unknown & ~apart)


def _apart(spec: Op, place: Place, name: str, shape: tuple[int, ...]) -> Array | None:
    """Return which elements lie elsewhere in a letter that the op keeps apart.

    None where the declaration has no letters for it; then what does not depend is apart.
    """
    operands = {o.name: o for o in spec.operands}
    gradient = name[:1] == "d" and name[1:] in spec.gradients
    if place.name == "dout" and not gradient:
        return np.ones(shape, np.bool_)
    result = spec.out if name == "out" else ""
    letters: tuple[str, ...] = ()
    if name in spec.written:
        result = operands[name].shape
        mixed = operands[name].mixes and name != place.name
        letters = () if mixed else tuple(result.split())
    elif gradient and spec.out:
        result = operands[name[1:]].shape
        letters = spec.reach(name[1:])
    elif name == "out" and spec.out:
        letters = spec.reach(place.name)
    source = spec.out if place.name == "dout" else operands[place.name].shape
    if place.name != "dout" and name not in spec.written:
        letters = tuple(n for n in letters if n in spec.reach(place.name))
    if not result or not source:
        return np.zeros(shape, np.bool_) if spec.out == "Loss" else None
    apart = np.zeros(shape, np.bool_)
    axes = expanded(result, len(shape))
    for letter, index in zip(expanded(source, len(place.at)), place.at, strict=True):
        if letter.rstrip("0123456789") in letters and letter in axes:
            axis = axes.index(letter)
            line: Any = np.arange(shape[axis]) != index
            apart |= line.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return apart


def expanded(text: str, ndim: int) -> list[str]:
    """Return a letter for each axis; leading axes are ...0, ...1 and so on."""
    tokens = text.split()
    free = ndim - len(tokens) + 1
    each = [[f"...{i}" for i in range(free)] if t == "..." else [t] for t in tokens]
    return [letter for letters in each for letter in letters]
