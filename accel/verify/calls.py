"""Functions that are no ops of the contract, held to a right one by calling both.

A guess at a mistake is a function too: one that gives what was got, in every call that is wrong,
is a hint.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from types import FunctionType, GeneratorType
from typing import Any, NamedTuple

import numpy as np

from accel.verify.report import first_difference
from accel.verify.subject import first_line, line_of
from accel.verify.travel import element
from reference.types import Array

SHOWN = 300  # characters of an argument or a result


class Call(NamedTuple):
    """One call: how it is written, and what makes it."""

    text: str
    make: Callable[[], Any]


class Raised(NamedTuple):
    """What came of a call that raised, or did what no call may."""

    kind: str  # of the error; "": it did not raise
    says: str
    where: str = ""  # " (FILE.py:LINE)", where it is known


class Verdict(NamedTuple):
    """What was found."""

    right: bool
    calls: int
    text: str  # of what is wrong, with hints


def outcome(make: Callable[[], Any], path: str = "") -> Any:
    """Return what a call gives: its result, or what it raised, and where in the file ``path``."""
    try:
        with np.errstate(all="ignore"):
            found = make()
            # copies, as a generator may yield one array again and again
            return [deepcopy(x) for x in found] if isinstance(found, GeneratorType) else found
    except (Exception, SystemExit) as error:
        return Raised(type(error).__name__, first_line(error), line_of(error, path))


def judge(
    name: str,
    calls: Sequence[Call],
    right: Sequence[Sequence[Any]],
    mistakes: Iterable[tuple[str, Callable[[], Sequence[Any]]]],
    close: float,
    path: str = "",
) -> Verdict:
    """Make the calls and compare.

    Parameters
    ----------
    name : str
        Of what is judged.
    calls : sequence of Call
    right : sequence of sequences
        For each call every result that is right.
    mistakes : iterable of (str, callable)
        A hint, and what gives the results that the mistake makes of all calls.
    close : float
        How far a float may be off, of the largest element; 0: not by a bit.
    path : str
        The file that is judged, whose lines are named where it raises.
    """
    got = [outcome(call.make, path) for call in calls]
    wrong: dict[int, str] = {}
    nearest = [min(each, key=partial(_far, have)) for each, have in zip(right, got, strict=True)]
    for i, (each, have) in enumerate(zip(right, got, strict=True)):
        if all(difference(want, have, close) for want in each):
            wrong[i] = difference(nearest[i], have, close)
    if not wrong:
        return Verdict(True, len(calls), "")
    least = min(wrong, key=lambda i: len(calls[i].text))
    lines = [
        f"FAIL {name}: wrong in {len(wrong)} of {len(calls)} calls",
        f"  smallest: {calls[least].text}",
        f"    {wrong[least]}",
        f"    expected {short(nearest[least])}",
    ]
    if not isinstance(got[least], Raised) or got[least].kind:  # else it is said already
        lines.append(f"    got      {short(got[least])}")
    hints: dict[str, None] = {}
    for says, results in mistakes:
        guessed = results()
        if all(_explains(guessed[i], got[i], nearest[i], close) for i in wrong):
            hints[f"  hint: {says}"] = None
    return Verdict(False, len(calls), "\n".join([*lines, *hints]))


def _far(got: Any, right: Any) -> float:
    """Return how far numbers are from right ones, or infinity where they are of no such kind."""
    found, wanted = _numbers(got), _numbers(right)
    if found is None or wanted is None or found.shape != wanted.shape:
        return np.inf
    with np.errstate(all="ignore"):
        return float(np.nan_to_num(np.linalg.norm(found - wanted), nan=np.inf))


def _explains(guess: Any, got: Any, right: Any, close: float) -> bool:
    """Whether a guess gives what was got, or nearly all of what separates that from the right."""
    if not difference(guess, got, close):
        return True
    if not close:
        return False
    guesses, found, wanted = (_numbers(x) for x in (guess, got, right))
    if guesses is None or found is None or wanted is None:
        return False
    if not guesses.shape == found.shape == wanted.shape:
        return False
    with np.errstate(invalid="ignore"):
        off = float(np.linalg.norm(found - wanted))
        return 0 < off < np.inf and float(np.linalg.norm(found - guesses)) <= 0.1 * off


def _numbers(value: Any) -> Array | None:
    """Return the floats of a result in one array; None where it is made of other things."""
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not parts or not all(isinstance(p, (np.ndarray, np.generic, float)) for p in parts):
        return None
    arrays = [np.asarray(part).reshape(-1) for part in parts]
    return np.concatenate(arrays) if all(a.dtype.kind == "f" for a in arrays) else None


def difference(want: Any, got: Any, close: float) -> str:
    """Say in what a result differs, "" when it does not."""
    if isinstance(want, Raised) or isinstance(got, Raised):
        if isinstance(want, Raised) and isinstance(got, Raised):
            same = want.kind == got.kind
            return "" if same else f"{_raises(got)}; should raise {want.kind}"
        if isinstance(want, Raised):
            return f"returns, but should raise {want.kind}: {want.says}"
        return _raises(got)
    if got is None and want is not None:
        return "returns None: is there a return?"
    if isinstance(want, (np.ndarray, np.generic, float)):
        return _array_difference(np.asarray(want), got, close)
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            n = f"{len(got)} items" if isinstance(got, (list, tuple)) else type(got).__name__
            return f"returns {n}, should be {len(want)} items"
        names = getattr(want, "_fields", [f"item {i}" for i in range(len(want))])
        for name, a, b in zip(names, want, got, strict=True):
            part = difference(a, b, close)
            if part:
                return f"{name}: {part}"
        return ""
    array = isinstance(got, np.ndarray) and got.ndim > 0  # which is not equal or unequal as a whole
    return "" if not array and want == got else f"is {short(got)}, should be {short(want)}"


def changes(before: Iterable[Any], after: Iterable[Any]) -> Iterator[str]:
    """Say of each argument that is not as it was before the call what became of it."""
    for i, (old, new) in enumerate(zip(before, after, strict=True), 1):
        if difference(old, new, 0.0):
            yield f"changes its argument {i}, {short(old)}, to {short(new)}: it is to stay"


def _raises(got: Raised) -> str:
    return f"raises {got.kind}{got.where}: {got.says}" if got.kind else got.says


def _array_difference(want: Array, got: Any, close: float) -> str:
    try:
        have = np.asarray(got)
    except (ValueError, TypeError, RuntimeError):
        have = np.empty(0, object)
    if have.dtype.kind not in "fiub":
        return f"returns a {type(got).__name__} that is no array of numbers"
    if have.shape != want.shape:
        return f"has shape {have.shape}, should have {want.shape}"
    if want.dtype.kind == "f" and want.dtype != np.float64:
        if have.dtype != want.dtype:
            return f"has dtype {have.dtype}, should have {want.dtype}"
        close = close and max(close, 4 * float(np.finfo(want.dtype).eps))
    if want.dtype.kind != "f" or not close:
        if np.array_equal(want, have, equal_nan=want.dtype.kind == have.dtype.kind == "f"):
            return ""
    else:
        room = close * float(np.abs(want[np.isfinite(want)]).max(initial=0))
        with np.errstate(invalid="ignore"):
            near = (want == have) | (np.isnan(want) & np.isnan(have)) | (abs(want - have) <= room)
        if np.all(near):
            return ""
    if want.dtype.kind == have.dtype.kind == "b":
        at = np.argwhere(want != have)[0]
        is_, due = have[tuple(at)], want[tuple(at)]
        return f"first difference: {element('the result', at)} is {is_}, should be {due}"
    return first_difference("the result", have, want)


def short(value: Any) -> str:
    """Return an argument or a result as people read it, cut where it gets long."""
    if isinstance(value, Raised):
        return f"{value.kind}: {value.says}" if value.kind else value.says
    if isinstance(value, np.ndarray):
        text = np.array2string(value, precision=6, separator=", ", threshold=30)
        text = " ".join(text.split())
    elif isinstance(value, (list, tuple)) and any(isinstance(v, np.ndarray) for v in value):
        text = f"[{', '.join(short(v) for v in value)}]"
    elif isinstance(value, (type, FunctionType)) or hasattr(value, "__file__"):
        text = value.__name__.rpartition(".")[2]
    else:
        text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
