"""Shapes in words: ``{"x": "B T D", "gain": "D", "eps": 1e-5}``, read and given sizes.

An array is a string: its axes, then what it holds, then what its sizes keep to.

=====================  =============================================================================
``"B T D"``            floats; a letter (or a name) has one size throughout a call
``"B T 3"``            the last axis has three
``"B T 2*F"``          or an expression of letters, ``+ - * // %``
``"... D"``            any leading axes
``"B T int < V"``      integers from 0 to V - 1; ``int >= 1 <= 9`` has another range
``"B T bool"``         a mask
``"B T > 1e-6"``       floats in a range
``"B T D, D % 8"``     D is a multiple of 8
``"T, T <= 4096"``     T is no more than 4,096
=====================  =============================================================================

``2F`` is ``2*F``; but ``1e-6`` is a number, and so is ``2E+1``: with a letter E write ``2*E+1``.

Anything else is passed as it is: ``1e-5``, ``True``, ``None``. A list holds the values to choose
from: ``[True, False]``, ``["mean", "sum"]``; a tuple may hold letters: ``("B", "T", -1)``. One that
stands there alone gets a size if it is a single capital: ``"init": ("D", "F")``; other words stay.
"""

import ast
import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from accel.tolerance import round_to
from accel.verify.draw import MAX_ELEMENTS, USUAL, USUAL_SHAPES, Draw
from reference.types import Array

MAX_WORK = 200_000  # the product of all sizes
NEAR = 256  # how far from a usual size one may be that keeps to the conditions
Sizes = dict[str, Any]  # letter -> size, and "..." -> the leading shape

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_BOUNDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_COMPARISON = re.compile(r"(<=|>=|<|>)\s*([^\s<>=]+)")


class DeclarationError(ValueError):
    """A declaration of shapes cannot be read."""


# 2F, which is 2*F; but 1e-6 and 1_000 are numbers, as in Python
_FACTOR = re.compile(r"\b(\d+)(?!_\d|[eE][+-]?\d)([A-Za-z_]\w*)")

_CAPITAL = re.compile(r"[A-Z]\d*")


@functools.cache
def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(_FACTOR.sub(r"\1*\2", text), mode="eval").body
    except SyntaxError:
        raise DeclarationError(f"{text!r} is no expression of sizes") from None


def value_of(text: str, sizes: Mapping[str, Any]) -> Any:
    """Return what an expression of letters comes to: a size, or whether a condition holds."""

    def of(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
            sides = [of(side) for side in (node.left, *node.comparators)]
            return all(
                _OPERATORS[type(op)](a, b)
                for op, a, b in zip(node.ops, sides, sides[1:], strict=False)
            )
        raise DeclarationError(f"{text!r} is no expression of sizes; it may use + - * // % and <")

    return of(_parsed(text))


@functools.cache
def letters_in(text: str) -> tuple[str, ...]:
    """Return the letters of an expression."""
    names = [node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)]
    return tuple(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class ArrayOf:
    """One array of a declaration."""

    axes: tuple[str, ...]
    kind: str = "float"  # or "int" or "bool"
    bounds: tuple[tuple[str, str], ...] = ()  # what its values keep to: ("<", "V")

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        shape: list[int] = []
        for axis in self.axes:
            shape += sizes["..."] if axis == "..." else [value_of(axis, sizes)]
        return tuple(shape)

    def values(self, draw: Draw, sizes: Sizes, *, calm: bool = False, name: str = "") -> Array:
        """Draw values: those that hurt, or ``calm`` ones, within the bounds."""
        shape = self.shape(sizes)
        if self.kind == "bool":
            return np.asarray(draw.rng.random(shape) < draw.pick((0.5, 1.0, 0.1, 0.9)))
        low, high = self._range(sizes)
        if self.kind == "int":
            low, high = int(max(low, 0) if low == -math.inf else low), high
            top = low + 2 if high == math.inf else max(int(high), low)
            return np.asarray(draw.rng.integers(low, top + 1, shape))
        x = floats(draw, shape, calm=calm, name=name)
        if math.isfinite(low) and math.isfinite(high):
            x = low + (high - low) * np.asarray(draw.rng.random(shape), x.dtype)
        elif math.isfinite(low):
            x = low + np.abs(x) + np.asarray(2.0**-10 * (x == 0), x.dtype)
        elif math.isfinite(high):
            x = high - np.abs(x) - np.asarray(2.0**-10 * (x == 0), x.dtype)
        return self._kept(draw.rounded(x), draw, sizes)

    def keeps(self, x: Array, sizes: Sizes) -> Array:
        """Say which elements keep to the bounds."""
        kept, x = np.ones(x.shape, np.bool_), x.astype(np.float64)
        for sign, text in self.bounds:
            kept &= _BOUNDS[sign](x, value_of(text, sizes))
        return kept

    def _kept(self, x: Array, draw: Draw, sizes: Sizes) -> Array:
        """Return floats of which those that rounding took beyond the bounds are brought back."""
        kept = self.keeps(x, sizes)
        if kept.all():
            return x
        inner = x[kept] if kept.any() else self._one(draw, sizes)
        return np.where(kept, x, np.clip(x, inner.min(), inner.max()))

    def _one(self, draw: Draw, sizes: Sizes) -> Array:
        """Return one number of the precision that keeps to the bounds.

        Raises
        ------
        DeclarationError
            When there is none.
        """
        low, high = self._range(sizes)
        if math.isfinite(low) and math.isfinite(high):
            tried = low + (high - low) * np.linspace(0, 1, 65)
        else:
            end, sign = (low, 1) if math.isfinite(low) else (high, -1)
            tried = end + sign * max(1, abs(end)) * np.logspace(-10, 3, 14, base=2)
        for one in tried:
            x = draw.rounded(np.full(1, one))
            if self.keeps(x, sizes).all():
                return x
        bounds = " ".join(f"{sign} {text}" for sign, text in self.bounds)
        raise DeclarationError(f"no number of {draw.dtype} is {bounds}; declare a wider range")

    def within(self, ids: Array, sizes: Sizes) -> Array:
        """Return integers brought back into the range that they have at these sizes."""
        low, high = self._range(sizes)
        return np.asarray(np.clip(ids, max(low, 0), max(high, 0)), ids.dtype)

    def _range(self, sizes: Sizes) -> tuple[float, float]:
        low, high = -math.inf, math.inf
        for sign, text in self.bounds:
            bound = value_of(text, sizes)
            step = self.kind == "int" and sign in "<>"
            if sign[0] == "<":
                high = min(high, bound - step)
            else:
                low = max(low, bound + step)
        return low, high


# of values: those that come first, of each array in turn
HARD = ("offset", "equal rows", "large", "huge", "minute")


def floats(draw: Draw, shape: tuple[int, ...], *, calm: bool = False, name: str = "") -> Array:
    """Draw floats of the kinds that hurt, or of those that no function is stretched by."""
    kinds = ("zero rows",) if calm else ("wide", "faint", "tiny", "zero rows", *HARD)
    return draw.values(*(shape or (1,)), kinds=kinds, name=name).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a function takes."""

    arrays: dict[str, ArrayOf]
    options: dict[str, tuple[Any, ...]]  # the values to choose from
    order: tuple[str, ...]  # of all arguments
    where: tuple[str, ...] = ()  # conditions on sizes
    init: tuple[Any, ...] = ()  # of a module: what it is made with, letters as strings
    known: tuple[tuple[str, tuple[int, ...]], ...] = ()  # letters whose sizes were found by trying
    small: Sizes = dataclasses.field(default_factory=dict)  # of these letters, which surely do

    @functools.cached_property
    def letters(self) -> tuple[str, ...]:
        """Every letter, in the order in which they stand."""
        found: dict[str, None] = {}
        for array in self.arrays.values():
            for axis in array.axes:
                found |= dict.fromkeys(("...",) if axis == "..." else letters_in(axis))
            for _, text in array.bounds:
                found |= dict.fromkeys(letters_in(text))
        for text in self.where:
            found |= dict.fromkeys(letters_in(text))
        tuples = [v for each in self.options.values() for v in each if isinstance(v, tuple)]
        for value in (self.init, *tuples):
            found |= dict.fromkeys(n for n in _letters_of(value) if _CAPITAL.fullmatch(n))
        return tuple(found | dict.fromkeys(letter for letter, _ in self.known))

    def fits(self, sizes: Sizes) -> bool:
        """Say whether sizes, perhaps not all of them yet, keep to what is declared."""
        return self._keeps(sizes) and self._small(sizes)

    def _keeps(self, sizes: Sizes) -> bool:
        for text in self.where:
            if all(letter in sizes for letter in letters_in(text)) and not _holds(text, sizes):
                return False
        return True

    @functools.cached_property
    def _least(self) -> Sizes:
        """The smallest size of each letter, as far as it depends on no other."""
        least: Sizes = {}
        for letter in self.letters:
            ends = (n for n in range(1, 1025) if self._keeps({letter: n}))
            least[letter] = (1,) if letter == "..." else next(ends, 1)
        return least

    def _small(self, sizes: Sizes) -> bool:
        guess = self._least | sizes
        shapes = [array.shape(guess) for array in self.arrays.values()]
        if len(guess) == len(sizes) and any(n < 1 for shape in shapes for n in shape):
            return False
        work = math.prod(math.prod(n) if isinstance(n, tuple) else n for n in guess.values())
        return max([math.prod(s) for s in shapes], default=0) <= MAX_ELEMENTS and work <= MAX_WORK

    def sizes(self, draw: Draw) -> Sizes:
        """Draw a size for every letter; any letter may be the one that gets to be long."""
        letters = self.letters
        found = dict(self.known)
        first = draw.pick(range(len(letters))) if len(letters) > 1 else 0
        sizes: Sizes = {}
        # now and then two are of one size, and not by chance
        pairs = list(itertools.combinations([n for n in letters if n != "..."], 2))
        neither = [()] * max(6, len(pairs)) if pairs else [()]
        twins: tuple[str, ...] = draw.pick([*neither, *pairs])
        for letter in (*letters[first:], *letters[:first]):
            if letter == "...":
                options: list[Any] = [
                    s for s in ((), *USUAL_SHAPES) if self.fits(sizes | {"...": s})
                ]
            elif letter in found:
                options = [n for n in found[letter] if self.fits(sizes | {letter: n})]
            else:
                options = self._options(letter, sizes)
            options = [n for n in options if self._completes(sizes | {letter: n})]
            if not options:
                raise self._impossible()
            if letter in twins:
                there = {sizes[twin] for twin in twins if twin in sizes}
                options = [n for n in options if n in there or (not there and n > 1)] or options
            sizes[letter] = draw.pick(options)
        return {letter: sizes[letter] for letter in letters}

    def brought_back(
        self, arrays: Mapping[str, Array], case: Mapping[str, Array], sizes: Sizes, dtype: str
    ) -> dict[str, Array]:
        """Return arrays whose elements beyond the bounds are those of a case.

        Those which rounding to a precision takes there are the nearest that stay within.
        """
        found = dict(arrays)
        for name, declared in self.arrays.items():
            if name in found and found[name].shape == case[name].shape:
                kept = declared.keeps(found[name], sizes)
                x = np.where(kept, found[name], case[name].astype(found[name].dtype))
                there = round_to(x, dtype) if x.dtype.kind == "f" else x
                kept = declared.keeps(there, sizes)
                if kept.any() and not kept.all():
                    x = np.where(kept, x, np.clip(x, there[kept].min(), there[kept].max()))
                found[name] = x
        return found

    def check(self) -> None:
        """See that there are sizes.

        Raises
        ------
        DeclarationError
            When none keep to the conditions.
        """
        if not self._completes({}):
            raise self._impossible()

    def _impossible(self) -> DeclarationError:
        keep = f"keep to {', '.join(self.where)} and " if self.where else ""
        return DeclarationError(
            f"no sizes {keep}leave every array at most {MAX_ELEMENTS:,} elements, and all sizes "
            f"a product of at most {MAX_WORK:,}; loosen a condition, or a size that is fixed"
        )

    def _completes(self, sizes: Sizes) -> bool:
        """Say whether the letters with conditions that are left have sizes beside these."""
        left = [letter for text in self.where for letter in letters_in(text)]
        letter = next((letter for letter in left if letter not in sizes), None)
        if letter is None:
            return self.fits(sizes)
        return any(self._completes(sizes | {letter: n}) for n in self._options(letter, sizes))

    def _options(self, letter: str, sizes: Sizes) -> list[int]:
        """Return the usual sizes, each moved to the next that keeps to the conditions."""
        bound = [text for text in self.where if letter in letters_in(text)]
        beside = {name for text in bound for name in letters_in(text)} & set(sizes)
        near = self._near(letter, tuple((name, sizes[name]) for name in sorted(beside)))
        return [n for n in near if self._small(sizes | {letter: n})]

    def _near(self, letter: str, beside: tuple[tuple[str, int], ...]) -> list[int]:
        if (letter, beside) not in self._known_near:
            sizes = dict(beside)
            kept = [n for n in range(1, USUAL[-1] + NEAR + 1) if self._keeps(sizes | {letter: n})]
            below = [max((m for m in kept if n - NEAR <= m <= n), default=0) for n in USUAL]
            above = [min((m for m in kept if n <= m <= n + NEAR), default=0) for n in USUAL]
            self._known_near[letter, beside] = sorted({*below, *above} - {0})
        return self._known_near[letter, beside]

    @functools.cached_property
    def _known_near(self) -> dict[tuple[str, tuple[tuple[str, int], ...]], list[int]]:
        return {}

    def words(self, value: Any, sizes: Sizes) -> Any:
        """Return an option or an argument of a module with sizes for letters."""
        if isinstance(value, tuple):
            return tuple(self.words(part, sizes) for part in value)
        inside = _letters_of(value)
        return value_of(value, sizes) if inside and set(inside) <= set(sizes) else value


def _letters_of(value: Any) -> tuple[str, ...]:
    """Return the letters of an option, or of an argument of a module."""
    if isinstance(value, tuple):
        return tuple(letter for part in value for letter in _letters_of(part))
    try:
        return letters_in(value) if isinstance(value, str) else ()
    except DeclarationError:
        return ()  # a word


def _holds(text: str, sizes: Sizes) -> bool:
    found = value_of(text, sizes)
    return bool(found) if isinstance(_parsed(text), ast.Compare) else found == 0


def read(declared: Mapping[str, Any]) -> Declared:
    """Read a declaration.

    Raises
    ------
    DeclarationError
        When it cannot be read; the message says what and why.
    """
    arrays: dict[str, ArrayOf] = {}
    options: dict[str, tuple[Any, ...]] = {}
    where: list[str] = []
    init: tuple[Any, ...] = ()
    for name, value in declared.items():
        if name == "init":
            init = value if isinstance(value, tuple) else (value,)
        elif isinstance(value, str):
            arrays[name], conditions = _array(name, value)
            where += conditions
            for condition in conditions:
                letters_in(condition)
        else:
            options[name] = tuple(value) if isinstance(value, list) else (value,)
    refuse_cotangents(arrays)
    order = tuple(name for name in declared if name != "init")
    if not arrays:
        raise DeclarationError(
            f"no array among {', '.join(order) or 'nothing'}: write 'x': 'B T D'"
        )
    found = Declared(arrays, options, order, tuple(where), init)
    found.check()
    return found


def refuse_cotangents(names: Iterable[str]) -> None:
    """See that no input is taken for a cotangent.

    Raises
    ------
    DeclarationError
        When one is named like it.
    """
    for name in names:
        if name.startswith("dout"):
            raise DeclarationError(
                f"{name} is the name of what gradients are taken with; call that input something "
                "else, such as grad"
            )


def _array(name: str, text: str) -> tuple[ArrayOf, Sequence[str]]:
    first, *conditions = (part.strip() for part in text.split(","))
    bounds = tuple(_COMPARISON.findall(first))
    words = _COMPARISON.sub("", first).split()
    kind = "float"
    if words and words[-1] in ("float", "int", "bool"):
        kind = words.pop()
    for word in words:
        if word != "...":
            try:
                size = value_of(word, dict.fromkeys(letters_in(word), 2))
            except (DeclarationError, ZeroDivisionError):
                size = None
            if type(size) is not int:
                raise DeclarationError(
                    f"{name}: {text!r} has {word!r} where an axis should stand, such as B, 3 or 2*F"
                )
    for _, bound in bounds:
        letters_in(bound)
    return ArrayOf(tuple(words), kind, bounds), conditions
