"""What one result of a reference comes to at many points: what it should be, and how closely.

``bound.py`` says why, and evaluates the points.
"""

from typing import NamedTuple

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, Closeness, Magnitude, compare
from reference.types import Array

ROUNDINGS = 6  # r
NOISE = 2.0**-48  # what float64 itself is off by, of the result and its spread
JUMP = 64  # times what it should move by
NARROW = 16  # elements of a row that stands for itself
TINY = 1e-300
KNOWN = 8  # times what is not known must be less than what is


class Truth(NamedTuple):
    """What a result should be, and how closely."""

    exact: Array
    plain: Array  # exact with the error of plain code on top
    magnitude: Magnitude
    jumps: Array  # bool: where the function jumps, and one of ``seen`` will do
    seen: tuple[Array, ...]  # what it gives at x and around it
    judged: Array  # bool: where digits are known
    finite: Array  # bool: where a number is due, whichever


class Scales(NamedTuple):
    """What the bound of one result needs beside the result at many points."""

    terms: int  # n
    floor: float  # under s
    u: float  # of the precision that plain code was run in
    ratio: float  # the u of the case over that one


def truth_of(
    exact: Array,
    plain: list[tuple[Array, Array]],
    steps: list[tuple[Array, Array]],
    far: list[tuple[Array, float]],
    ties: list[tuple[Array, Array]],
    scales: Scales,
    due: Array | None = None,
    near_top: Array | None = None,
    *,
    lost: bool = False,
) -> Truth:
    """Put together what one result came to at all the points."""
    around = [value for pair in (*steps, *plain) for value in pair]
    around += [value for value, _ in far]
    around = [value for value in around if value.shape == exact.shape]
    none = np.zeros(exact.shape, bool)
    if exact.dtype.kind != "f":
        return Truth(
            exact, exact, Magnitude(none.astype(float), 0), ~none, (exact, *around), ~none, ~none
        )
    with np.errstate(all="ignore"):
        moves = [np.abs(there - exact) for there, _ in steps]
        spread = np.sqrt(np.mean([move**2 for move in moves], axis=0))
        size = np.abs(exact) + spread / scales.u + scales.floor
        errors = np.array([np.abs(p - e) for p, e in plain])
        # where f or plain code has none at one of the points, a kernel need not have one here
        points = [exact, *(value for pair in plain for value in pair)]
        finite = np.all([np.isfinite(value) for value in points], axis=0)
        if near_top is not None and near_top.shape == exact.shape:
            finite &= np.isfinite(near_top)
        error = np.where(np.isfinite(errors), errors, 0)
        worst = np.max(error, axis=0)
        due = none if due is None else due & ~np.isfinite(exact)
        # float64 cancels what plain code cancels, with its own u
        noise = NOISE * size + 16 * _row_top(worst) * 2.0**-53 / scales.u
        moved = ~(KNOWN * spread <= np.abs(exact)) & (spread > noise) & ~due
        finite &= ~_mostly(moved)
        judged = finite & ~(KNOWN * worst > size) & (not lost) | due
        jumps = none
        moves += [np.abs(there - exact) for there, _ in ties]
        for move, (_, nearer) in zip(moves, [*steps, *ties], strict=True):
            less = np.abs(nearer - exact)
            before = (4 * less > move) & (less > noise)
            beyond = move > 1024 * np.maximum(less, noise)
            jumps = jumps | ((move > noise) & (before | beyond))
        for value, by in far:
            jumps = jumps | (np.abs(value - exact) > JUMP * by * size)
        calm = judged & np.isfinite(exact) & ~jumps
        worst = np.where(calm, worst, 0)
        variance = np.where(calm, np.mean(error**2, axis=0), 0)
        rows = as_rows(variance)
        fourth = np.sum(rows**2, axis=-1, keepdims=True)
        freedom = len(errors) * np.sum(rows, axis=-1, keepdims=True) ** 2
        few = 1 + 20 * np.divide(fourth, freedom, out=np.zeros_like(fourth), where=freedom > 0)
        error = scales.ratio * (as_rows(worst) * few).reshape(exact.shape)
    return Truth(
        exact,
        exact + np.where(calm, error, 0),
        Magnitude(np.where(calm & np.isfinite(size), size, 0), ROUNDINGS, scales.terms),
        jumps & judged & np.isfinite(exact),
        (exact, *around),
        judged,
        finite,
    )


def _row_top(x: Array) -> Array:
    """Return the largest of each row in all its places."""
    rows = as_rows(x)
    return np.broadcast_to(np.max(rows, axis=-1, keepdims=True, initial=0.0), rows.shape).reshape(
        x.shape
    )


def _mostly(x: Array) -> Array:
    """Return which rows have something in more than half of their places, in all of these.

    A single number is no row: of those that stand alone all are one.
    """
    rows = as_rows(x, 2)
    share = np.mean(rows, axis=-1, keepdims=True) if rows.size else rows
    return np.broadcast_to(share > 0.5, rows.shape).reshape(x.shape)


def as_rows(x: Array, least: int = NARROW) -> Array:
    """Return x as rows along the last axis, of several where that is narrower than the least."""
    axis = x.ndim
    width = 1
    while axis > 0 and width < least:
        axis -= 1
        width *= x.shape[axis]
    return x.reshape(-1, width) if width else x.reshape(1, 0)


def close(got: Array, truth: Truth, dtype: str, *, gradient: bool) -> Closeness:
    """Hold a result to what it should be; ``got`` has the shape of the exact one."""
    exact = truth.exact
    if exact.dtype.kind != "f":
        right = np.any([got == value for value in truth.seen], axis=0)
        off = float(np.mean(~right)) if right.size else 0.0
        worst = tuple(int(i) for i in np.argwhere(~right)[0][:-1]) if off and right.ndim else ()
        return Closeness(off, 0.0, np.inf if off else 0.0, worst)
    got = np.asarray(got, np.float64)
    if truth.jumps.any():
        with np.errstate(all="ignore"):
            low, high = (f(truth.seen, axis=0) for f in (np.fmin.reduce, np.fmax.reduce))
            outside = got - np.clip(got, low, high)
            # what lies on one side is rounded too
            room = ROUNDINGS * UNIT_ROUNDOFF[dtype] * np.maximum(np.abs(low), np.abs(high))
            outside = np.where(np.abs(outside) <= room, 0, outside)
        got = np.where(truth.jumps, exact + outside, got)
    same = (np.isnan(got) & np.isnan(exact)) | (got == exact)
    got = np.where(truth.judged & ~(same & ~np.isfinite(exact)), got, 0)
    settled = ~truth.judged | (same & ~np.isfinite(exact))
    wrong = ~np.isfinite(exact) & ~settled  # infinity or NaN is due, and something else came
    exact = np.where(settled | wrong, 0, exact)
    plain = np.where(settled | wrong, 0, truth.plain)
    got = np.where(wrong, np.nan, got)
    got, exact, plain, s = (as_rows(a) for a in (got, exact, plain, truth.magnitude.s))
    magnitude = truth.magnitude._replace(s=s)
    return compare(got, exact, plain, magnitude, dtype, gradient=gradient)


def with_equals(truth: Truth, x: Array) -> Truth:
    """Let what holds for one of several equal inputs, where there is a kink, hold for all."""
    if not truth.jumps.any():
        return truth
    alike = truth.judged & np.isin(x, x[truth.jumps])
    with np.errstate(all="ignore"):
        low = float(np.fmin.reduce([np.fmin.reduce(a[alike]) for a in truth.seen]))
        high = float(np.fmax.reduce([np.fmax.reduce(a[alike]) for a in truth.seen]))
    ends = tuple(np.where(alike, end, truth.exact) for end in (low, high))
    calm = ~alike
    return truth._replace(
        jumps=truth.jumps | alike,
        seen=(*truth.seen, *ends),
        plain=np.where(calm, truth.plain, truth.exact),
        magnitude=truth.magnitude._replace(s=np.where(calm, truth.magnitude.s, 0)),
    )
