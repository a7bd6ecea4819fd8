"""The contract as data: what an op takes and gives, and the functions that follow from it.

An op is declared once, as an ``Op`` in ``ops.py``. From the declaration alone follow the signature
of its public functions, the checks of what arrives and their sentences, what ``verify`` knows of
its arrays, what the tests of every backend ask of it, and the table in ``README.md``.
``boundary.py`` makes the public functions of a backend of it.

A shape is a string of letters: ``"B T Hq d"``. A letter has one size throughout a call; ``...``
stands for any leading axes, ``2F`` for an even axis. What a string cannot say is a named function
(``Op.check``).
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from reference.checks import check_position

# activation   a float array in the type that the backend computes in; has a gradient
# parameter    a float array that may be wider than the activations; ``out=`` receives its gradient
# constant     as a parameter, but without a gradient
# master       a float array of the optimizer's, of full precision whatever the activations are
# ids          integers, each below the size of a letter
# mask         bool, True = take part
# documents    integers of which only equality matters
# object       anything else; a named function checks it
Kind = Literal[
    "activation", "parameter", "constant", "master", "ids", "mask", "documents", "object"
]

REQUIRED = object()  # the default of an option that has none
Dims = dict[str, Any]  # letter -> size, and "..." -> the leading shape


class Operand(NamedTuple):
    """An array that an op takes."""

    name: str
    shape: str = ""  # of letters; "" when a named function says it
    kind: Kind = "activation"
    optional: bool = False
    written: bool = False  # in place
    below: str = ""  # ids: the letter that bounds them
    where: str = ""  # ids: the mask beside which they count
    travels: str = ""  # letters that a NaN stays within, if not all of ``shape``; see ``Op.reach``
    kept: bool = False  # may come from a KV cache or ``keep``, in the type that a backend has there
    mixes: bool = False  # written: an element depends on more of the others than its own place

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.kind in ("activation", "parameter", "constant", "master")


class Option(NamedTuple):
    """A keyword of an op, and how a value is taken: checked and made Python's own."""

    name: str
    take: Callable[[str, Any, Dims], Any]  # (op and name, value, dims) -> value
    range: str  # in words, for people
    default: Any = REQUIRED


class Op(NamedTuple):
    """One op of the contract."""

    name: str
    says: str  # what it computes, in a line
    operands: tuple[Operand, ...] = ()
    options: tuple[Option, ...] = ()
    out: str = ""  # the output's shape, or "Loss"; "" when letters cannot say it
    backward: bool = True
    check: Callable[..., Any] | None = None  # (op, dims, *arrays, **options) -> what replaces them
    home: str = ""  # the module of reference/ that it is defined in, if not its own
    needs: tuple[str, ...] = ()  # of fast backends: keep_x, need_backward, out (of the forward)
    accumulates: bool = False  # its backward can add onto ``out``
    # which of its functions can add ``plus`` in the same pass: to the output, or the first gradient
    adds: Literal["", "forward", "backward"] = ""
    wide: bool = False  # the result is float64 whatever goes in

    @property
    def forward_name(self) -> str:
        """Name of the public function, or of the forward when there are two."""
        return f"{self.name}_forward" if self.backward else self.name

    @property
    def backward_name(self) -> str:
        """Name of the public backward."""
        return f"{self.name}_backward"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the public functions."""
        return (self.forward_name, self.backward_name) if self.backward else (self.name,)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The differentiable arrays, in the order in which the backward returns their gradients."""
        kinds = ("activation", "parameter") if self.backward else ()
        return tuple(o.name for o in self.operands if o.kind in kinds)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The arrays whose gradients ``out=`` of the backward receives."""
        kinds = ("parameter",) if self.backward else ()
        return tuple(o.name for o in self.operands if o.kind in kinds)

    @property
    def written(self) -> tuple[str, ...]:
        """The arrays that are written in place."""
        return tuple(o.name for o in self.operands if o.written)

    @property
    def arrays(self) -> tuple[Operand, ...]:
        """The operands that are arrays."""
        return tuple(o for o in self.operands if o.kind != "object")

    @property
    def floats(self) -> tuple[Operand, ...]:
        """The operands that hold floats."""
        return tuple(o for o in self.operands if o.is_float)

    def reach(self, name: str) -> tuple[str, ...]:
        """Return the letters along which a NaN or infinity in an array stays where it is.

        Elements of the output that differ from it in one of these letters are as without it. Among
        the others, each that depends on the element is NaN; none is quietly finite and wrong.
        """
        operand = next(o for o in self.operands if o.name == name)
        letters = (operand.travels or operand.shape).split()
        return tuple(letter for letter in letters if letter in self.out.split())


# ---- operands and options, as ops.py declares them -----------------------------------------------


def _counted(op: str, value: Any, low: float, high: float) -> int:
    try:
        number = operator.index(value) if not isinstance(value, float) else int(value)
        good = np.ndim(value) == 0 and number == value and low <= number <= high
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        span = f">= {low}" if high == math.inf else f"in {low}..{high}"
        raise ValueError(f"{op} must be an integer {span}, got {value!r}")
    return number


def number(
    name: str,
    default: Any = REQUIRED,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Option:
    """Declare a finite number; None passes when it is the default."""
    rule = "a finite number"
    rule += f" >= {at_least:g}" if at_least > -math.inf else ""
    rule += f" > {above:g}" if above > -math.inf else ""
    rule = f"in [{at_least:g}, {below:g})" if below < math.inf else rule

    def take(op: str, value: Any, dims: Dims) -> Any:
        if value is None and default is None:
            return None
        given = value
        if type(value) is not float:
            try:
                value = float(value) if np.ndim(value) == 0 else math.nan
            except (TypeError, ValueError):
                value = math.nan
        if not (math.isfinite(value) and value >= at_least and value > above and value < below):
            verb = "lie" if below < math.inf else "be"
            raise ValueError(f"{op} must {verb} {rule}, got {given!r}")
        return value

    return Option(name, take, rule, default)


def integer(
    name: str, default: Any = REQUIRED, *, at_least: int = 0, at_most: str | float = math.inf
) -> Option:
    """Declare an integer, up to a number or to the size of a letter."""

    def take(op: str, value: Any, dims: Dims) -> Any:
        if value is None and default is None:
            return None
        high = dims[at_most] if isinstance(at_most, str) else at_most
        return _counted(op, value, at_least, high)

    words = f">= {at_least}" if at_most == math.inf else f"in {at_least}..{at_most}"
    return Option(name, take, f"an integer {words}", default)


def positions(name: str, default: Any = REQUIRED) -> Option:
    """Declare a position: an int, or NumPy's integers (B,), one for each row of the batch."""

    def take(op: str, value: Any, dims: Dims) -> Any:
        op_name, option = op.split(": ")
        check_position(op_name, option, value, dims["B"])
        return int(value) if np.ndim(value) == 0 else np.asarray(value)

    return Option(name, take, "an int or (B,) ints", default)


def flag(name: str, default: bool) -> Option:
    """Declare a switch."""
    return Option(name, lambda op, value, dims: bool(value), "true or false", default)


def passed(name: str, words: str, default: Any = REQUIRED) -> Option:
    """Declare an option that the op's named function checks."""
    return Option(name, lambda op, value, dims: value, words, default)


# ---- shapes --------------------------------------------------------------------------------------


class Pattern:
    """A shape string, ready to be held against shapes."""

    def __init__(self, text: str) -> None:
        tokens = text.split()
        self.free = "..." in tokens  # axes of any number, before or after the named ones
        self.trailing = tokens[-1:] == ["..."]
        self.axes = [(t[1:], 2) if t[0] == "2" else (t, 1) for t in tokens if t != "..."]
        self.letters = set(tokens)
        alone = len(tokens) == 1 and not self.free
        self.text = f"({', '.join(tokens)}{',' if alone else ''})"

    def fits(self, shape: tuple[int, ...], dims: Dims) -> bool:
        """Whether a shape has the sizes in ``dims``; letters met for the first time are added."""
        count = len(self.axes)
        if self.free:
            cut = count if self.trailing else len(shape) - count
            free, shape = (
                (shape[cut:], shape[:cut]) if self.trailing else (shape[:cut], shape[cut:])
            )
            if len(shape) != count or dims.setdefault("...", free) != free:
                return False
        elif len(shape) != count:
            return False
        for (letter, times), size in zip(self.axes, shape, strict=True):
            if times == 2:
                if size % 2:
                    return False
                size //= 2
            if dims.setdefault(letter, size) != size:
                return False
        return True

    def sizes(self, dims: Dims) -> tuple[int, ...] | None:
        """Return the shape, if all its letters have sizes."""
        try:
            named = tuple([dims[letter] * times for letter, times in self.axes])
            free = dims["..."] if self.free else ()
        except KeyError:
            return None
        return (*named, *free) if self.trailing else (*free, *named)


def explain_shape(
    op: str,
    name: str,
    pattern: Pattern,
    array: Any,
    dims: Dims,
    met: Mapping[str, tuple[int, ...]],
) -> str:
    """Return the sentence about a shape that does not fit: what must hold, what arrived, the hint.

    ``met`` has the shapes of the arrays before it, which gave ``dims`` their sizes.
    """
    shape, count = tuple(array.shape), len(pattern.axes)
    if pattern.free and len(shape) < count:
        axes = "one axis" if count == 1 else f"{count} axes"
        return f"{op}: {name} must have at least {axes}, as {pattern.text} has, got shape {shape}"
    if not met:
        halved = [letter for letter, times in pattern.axes if times == 2]
        even = f", the last axis even: it holds {halved[0]} pairs or halves" if halved else ""
        flat = "flat, " if pattern.text == "(n,)" else ""
        return f"{op}: {name} must be {flat}{pattern.text}{even}, got shape {shape}"
    match = " and ".join(f"{other} {at}" for other, at in met.items())
    wanted = pattern.sizes(dims)
    if wanted is not None:
        said = f"{op}: {name} must have shape {wanted} to match {match}, got {shape}"
    else:
        known = [f"{letter} = {dims[letter]}" for letter, _ in pattern.axes if letter in dims]
        said = f"{op}: {name} must be {pattern.text} with {', '.join(known)} to match {match}"
        said += f", got {shape}"
    for i, j in itertools.combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        if pattern.fits(tuple(swapped), dict(dims)):
            hint = "is it transposed" if len(shape) == 2 else f"are axes {i} and {j} swapped"
            return f"{said}; {hint}?"
    return said


# ---- for people ----------------------------------------------------------------------------------


def table(ops: Iterable[Op]) -> str:
    """Return the ops as a Markdown table."""
    lines = [
        "| op | computes | takes | options | gives | gradients of | a NaN stays in its own |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for op in ops:
        takes = [
            f"{o.name} {Pattern(o.shape).text if o.shape else ''}".strip() + "?" * o.optional
            for o in op.operands
        ]
        options = [
            f"{o.name}: {o.range}" + ("" if o.default is REQUIRED else f" ({o.default})")
            for o in op.options
        ]
        gives = op.out if op.out == "Loss" or not op.out else Pattern(op.out).text
        reach = [
            f"{o.name}: {' '.join(op.reach(o.name)) or 'nothing'}" for o in op.floats if op.out
        ]
        cells = [op.says.rstrip("."), ", ".join(takes), "; ".join(options), gives]
        cells += [", ".join(op.gradients), "; ".join(reach)]
        lines.append(f"| {op.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
