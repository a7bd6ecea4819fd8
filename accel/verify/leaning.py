"""Errors that lean one way: what no case shows by itself, and many say together.

In 16 bits a right kernel may be off by whatever its roundings come to, and many a mistake makes
less of a difference than that: GELU's slope without its factor 3, or a result 1.02 times as large.
But roundings go either way, and a mistake goes its own. So where every case is near enough, the
errors e of many are held to what a mistake makes of each, d, by least squares::

    a = Σ e·d / Σ d·d

which is 1 where that mistake was made, something else where one like it was, as with another
constant, and near 0 where none was. Elements count as parts of s, by which the bound grows
(``accel/tolerance.py``), and e·d and d·d of a case are means over its elements. Those may be off
together, by the rounding of what they share, but cases are independent of one another. So a is off
by about √Σ(e·d - a d·d)² / Σ d·d, the sum of squares being over cases (Liang & Zeger 1986,
"Longitudinal data analysis using generalized linear models", equation 5).

The mistakes are those that hints know of, and one factor by which all elements are off, or those of
one sign, every other one, or one half.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF
from accel.verify.calling import Judged
from accel.verify.contract import Case, expected
from accel.verify.evidence import Seen
from accel.verify.guesses import ALIKE, Guesses, onto, tried
from reference.types import Array

if TYPE_CHECKING:
    from accel.verify.subject import Subject

COARSE = 2.0**-12  # unit roundoffs from here on hide mistakes
CERTAIN = 10  # times its own error that a is
SHARE = 1 / 3  # of a mistake, or so much of the share: a kernel that rounds down has 0.01 of many
FEWEST = 8  # cases that a is made of, as far as they weigh alike
LEAST = 0.1  # roundings of s that the share of it makes in the mean: less may be a kernel's manner
FACTOR = 4  # roundings that one factor comes to: a kernel that always rounds down makes up to 3
TRIED = 3  # of so many cases one shows which mistakes are worth trying on the rest


class Leaning(NamedTuple):
    """A result whose errors are those of a mistake."""

    name: str
    problem: str  # what they are like, in words
    hints: tuple[str, ...]
    cases: int  # that show it together


class Fit:
    """How much of the errors of many cases is what one mistake makes."""

    def __init__(self) -> None:
        self._cases: list[tuple[float, float]] = []  # e·d and d·d, in the mean of an element

    def add(self, e: Array, d: Array) -> None:
        """Count a case, unless the mistake shows nowhere in it."""
        if d.any():
            self._cases.append((float(np.vdot(e, d)) / d.size, float(np.vdot(d, d)) / d.size))

    def __len__(self) -> int:
        return len(self._cases)

    @property
    def _sums(self) -> tuple[Array, Array]:
        ed, dd = np.array(self._cases).T
        return ed, dd

    @property
    def share(self) -> float:
        """Return a."""
        ed, dd = self._sums
        return float(ed.sum() / dd.sum())

    @property
    def spread(self) -> float:
        """Return what a may be off by, as one standard deviation."""
        ed, dd = self._sums
        return float(np.linalg.norm(ed - self.share * dd) / dd.sum())

    @property
    def certain(self) -> bool:
        """Whether a is no chance, nor that of a few cases."""
        if not self._cases:
            return False
        _, dd = self._sums
        many = dd.sum() ** 2 / np.vdot(dd, dd) >= FEWEST
        return bool(many and abs(self.share) > CERTAIN * self.spread)

    @property
    def lean(self) -> float:
        """Return what the share of the mistake makes in the mean of an element."""
        _, dd = self._sums
        return abs(self.share) * math.sqrt(dd.mean())

    @property
    def explained(self) -> float:
        """Return by how much less the squares of the errors are without that share of it."""
        ed, _ = self._sums
        return self.share * float(ed.sum())


def leanings(
    subject: "Subject", dtype: str, seen: Sequence[Seen], known: Collection[str] = ()
) -> Iterator[Leaning]:
    """Yield the results whose errors lean one way in cases that are right, each by itself.

    Parameters
    ----------
    seen : sequence of Seen
        The cases of an op in a precision.
    known : collection of str
        Results that are wrong in other cases, of which no more is said.
    """
    u = UNIT_ROUNDOFF[dtype]
    if u < COARSE or len(seen) < FEWEST:
        return
    factors = _factors(seen)
    mistakes = _mistakes(subject, seen, u)
    for name in dict.fromkeys(j.name for s in seen for j in s.judged if j.name not in known):
        off = {
            part: fit
            for (of, part), fit in factors.items()
            if of == name and fit.certain and abs(fit.share) > FACTOR * u
        }
        if off:
            most = max(abs(fit.share) for fit in off.values())
            part, fit = next(found for found in off.items() if abs(found[1].share) > 0.8 * most)
            beside = _beside_plain(subject, seen, name, part)
            if beside.certain and abs(beside.share) > FACTOR * u:
                times = f"{1 + fit.share:.4g} ± {fit.spread:.1g} times what it should be{part}"
                yield Leaning(name, _says(name, f"it is {times}", fit), (), len(fit))
                continue
        likely = {text: fit for (of, text), fit in mistakes.items() if of == name}
        if likely:
            text, fit = _best(likely)
            share = f"{fit.share:.2f} ± {fit.spread:.1g} times"
            hint = f"{text} The errors of {len(fit)} cases together go that way, {share} as far."
            yield Leaning(name, _says(name, "its errors go one way", fit), (hint,), len(fit))


def _says(name: str, what: str, fit: Fit) -> str:
    return f"{name} is near enough in each case, but {what}, over {len(fit)} cases"


def _first(judged: Sequence[Judged]) -> dict[str, Judged]:
    """Return the results of a first call."""
    return {j.name: j for j in reversed(judged) if j.closeness is not None}


def _compared(judged: Judged) -> tuple[Array, Array, Array] | None:
    """Return got - exact and exact, zero where one of them is no number, and where they are."""
    got, exact = np.asarray(judged.got, np.float64), np.asarray(judged.known, np.float64)
    there = np.isfinite(got) & np.isfinite(exact)
    if not there.any() or np.asarray(judged.got).dtype.kind != "f":
        return None
    exact = np.where(there, exact, 0.0)
    return np.where(there, got, 0.0) - exact, exact, there


# ---- a factor ------------------------------------------------------------------------------------


def _even(x: Array) -> Array:
    return np.arange(x.shape[-1] if x.ndim else 1) % 2 == 0


def _second_half(x: Array) -> Array:
    n = x.shape[-1] if x.ndim else 1
    return np.arange(n) >= n / 2


PARTS: dict[str, Callable[[Array], Any]] = {
    "": lambda x: True,
    " where that is above zero": lambda x: x > 0,
    " where that is below zero": lambda x: x < 0,
    " at even indices of the last axis": _even,
    " at odd indices of the last axis": lambda x: ~_even(x),
    " in the first half of the last axis": lambda x: ~_second_half(x),
    " in the second half of the last axis": _second_half,
}


def _factors(seen: Sequence[Seen]) -> dict[tuple[str, str], Fit]:
    """Return of each result, and of parts of it, how the errors go with what is due."""
    fits: dict[tuple[str, str], Fit] = {}
    for _, judged in seen:
        for name, each in _first(judged).items():
            if compared := _compared(each):
                error, exact, _ = compared
                for part in PARTS:
                    _add_factor(fits.setdefault((name, part), Fit()), error, exact, part)
    return fits


def _add_factor(fit: Fit, error: Array, exact: Array, part: str) -> None:
    """Count a case, all of which weigh alike."""
    due = np.where(PARTS[part](exact), exact, 0.0)
    size = float(np.linalg.norm(due)) / math.sqrt(max(due.size, 1))
    if 0 < size < np.inf:
        fit.add(error / size, due / size)


def _beside_plain(subject: "Subject", seen: Sequence[Seen], name: str, part: str) -> Fit:
    """Return how what separates a result from that of plain code goes with what is due.

    Plain code may lean, too, by a constant that is rounded or by numbers that underflow.
    """
    fit = Fit()
    for case, judged in seen:
        each = _first(judged).get(name)
        if each is not None and (compared := _compared(each)):
            error, exact, there = compared
            plain = np.asarray(onto(subject.plain(case)[name], case, each), np.float64)
            off = np.where(there & np.isfinite(plain), plain - exact, 0.0)
            _add_factor(fit, error - off, exact, part)
    return fit


# ---- mistakes that people make -------------------------------------------------------------------


def _best(likely: Mapping[str, Fit]) -> tuple[str, Fit]:
    """Return what was made as a whole, of those that explain about as much as any does."""
    most = 0.9 * max(fit.explained for fit in likely.values())
    return min(
        ((text, fit) for text, fit in likely.items() if fit.explained >= most),
        key=lambda found: abs(found[1].share - 1),
    )


def _mistakes(subject: "Subject", seen: Sequence[Seen], u: float) -> dict[tuple[str, str], Fit]:
    """Return the mistakes that explain the errors of a result: first of few cases, then of all."""
    guesses = subject.mistakes
    if guesses is None:
        return {}
    fits: dict[tuple[str, str, int], Fit] = {}
    _try(seen[::TRIED], guesses, fits, None)

    def likely(part: float) -> dict[tuple[str, str, int], Fit]:
        return {
            key: fit
            for key, fit in fits.items()
            if len(fit)
            and part * SHARE < abs(fit.share) < 1 / (part * SHARE)
            and fit.lean > part * LEAST * u
        }

    fits = likely(0.5)
    if fits:
        rest = [s for at, s in enumerate(seen) if at % TRIED]
        _try(rest, guesses, fits, frozenset(text for _, text, _ in fits))
    return {(name, text): fit for (name, text, _), fit in likely(1).items() if fit.certain}


def _try(
    seen: Sequence[Seen],
    guesses: Guesses,
    fits: dict[tuple[str, str, int], Fit],
    wanted: frozenset[str] | None,
) -> None:
    """Add cases to what is known of mistakes: of all, or of those that are there already."""
    for case, judged in seen:
        results = _first(judged)
        compared = {
            name: (parts, s)
            for name, s in _scales(case).items()
            if name in results and (parts := _compared(results[name])) is not None
        }
        told: Counter[str] = Counter()  # several mistakes may have the same words
        for text, wrong in tried(case, guesses, np.dtype(np.float64), wanted):
            told[text] += 1
            if text.startswith(ALIKE):
                continue
            for name, ((error, exact, there), s) in compared.items():
                key = name, text, told[text]
                if name not in wrong or (wanted is not None and key not in fits):
                    continue
                made = np.asarray(onto(wrong[name], case, results[name]))
                if made.shape == exact.shape and made.dtype.kind == "f":
                    d = np.where(there, made - exact, 0.0) / s
                    if np.isfinite(d).all():
                        fits.setdefault(key, Fit()).add(error / s, d)


def _scales(case: Case) -> dict[str, Array]:
    """Return s of each result, infinite where nothing can be off."""
    found = {}
    for name, magnitude in expected(case).magnitudes.items():
        s = np.asarray(magnitude.s, np.float64)
        found[name] = np.where((s > 0) & np.isfinite(s), s, np.inf)
    return found
