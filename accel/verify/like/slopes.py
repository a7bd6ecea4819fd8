"""Gradients of a function without automatic differentiation: differences in float64.

    D(h) = Σ dout (f(x + h) - f(x - h)) / 2h = g + a h² + b h⁴ + …
    R(h, k) = (D(k) h² - D(h) k²) / (h² - k²)                         without a
    g ≈ (R(h/2, h/7) h² - R(h, h/2) (h/7)²) / (h² - (h/7)²)           without b (Romberg 1955)

What is cut off is less than the two R differ by, and float64's own rounding leaves 2^-53/h of what
is differenced. Seven has no factor in common with two, so that a wave that passes whole periods in
one step does not in the other. Differences are taken for each element of the result before they are
added, so that what does not depend on x cancels entirely. Where D of the two sides do not approach
each other as h shrinks the function has a kink, and any slope between the two is right. Where D
settles on neither f bends within h, and nothing is known.

What plain code is off by in a gradient is not to be had. Its terms may be far larger than their sum
(1 - n² in a norm of one element). A part f of the result that has x for a factor has a slope f/x
for a term, so that the size of the terms is taken to be ‖dout f‖/rms(x), over the results that
depend on x, with the root mean square of x in its row, and at least that of all. Of an array of up
to 64 elements every one is tried, of a larger one a few, the first and the last among them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from reference.types import Array

SMALL = 64  # elements of an input of which each is tried
TRIED = 6  # elements of a larger one, beside its first and its last
STEP = 2.0**-15  # times the size of x
NOISE = 2.0**-34  # 2^-53 over the smallest h, and a factor for the sum


class Slopes(NamedTuple):
    """The gradient of one input; NaN where it was not tried."""

    value: Array
    low: Array  # what is right where there is a kink, else value
    high: Array
    terms: Array  # how large what is added up on the way to it may be
    error: Array  # of the differences


def slopes(
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    inputs: Mapping[str, Array],
    wanted: list[str],
    cotangents: Mapping[str, Array],
    rng: np.random.Generator,
) -> dict[str, Slopes]:
    """Return the gradients of ⟨cotangents, run(inputs)⟩ by name, at some elements."""
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in inputs.items()}
    here = run(wide)

    def change(name: str, at: int, step: float) -> tuple[float, float]:
        moved = wide[name].copy()
        moved.reshape(-1)[at] += step
        there = run({**wide, name: moved})
        with np.errstate(all="ignore"):
            parts = [(dout, there[out] - here[out], here[out]) for out, dout in cotangents.items()]
            total = sum(float(np.sum(dout * by, where=dout != 0)) for dout, by, _ in parts)
            size = sum(float(np.sum((dout * f) ** 2, where=by != 0)) for dout, by, f in parts)
            return total, size**0.5

    with np.errstate(all="ignore"):
        sums = [float(np.sum(np.square(dout * here[out]))) for out, dout in cotangents.items()]
    given = sum(sums) ** 0.5

    found: dict[str, Slopes] = {}
    for name in wanted:
        x = wide[name]
        parts = [np.full(x.shape, np.nan) for _ in range(5)]
        if x.size:
            rms = float(np.sqrt(np.mean(x**2))) or 1.0
            inside = rng.permutation(x.size)[: TRIED if x.size > SMALL else SMALL]
            for at in {0, x.size - 1, *inside.tolist()}:
                row = x.reshape(-1, x.shape[-1])[at // x.shape[-1]] if x.ndim else x
                own = float(np.sqrt(np.mean(row**2))) or rms
                h = STEP * max(abs(float(x.reshape(-1)[at])), own)
                steps = [h, h / 2, h / 7]
                ups = [change(name, at, step) for step in steps]
                up = [by / step for (by, _), step in zip(ups, steps, strict=True)]
                down = [change(name, at, -step)[0] / -step for step in steps]
                d = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
                coarse, fine = _without(d[0], d[1], 4), _without(d[1], d[2], 49 / 4)
                value = _without(coarse, fine, 49)
                gaps = [abs(a - b) for a, b in zip(up, down, strict=True)]
                terms = ups[0][1] / own
                terms = max(terms, given * max(1.0, 1 / rms) / x.size**0.5)
                noise = NOISE * (abs(value) + terms)
                kink = gaps[2] > 0.75 * gaps[1] and (
                    gaps[2] > 16 * noise + 1e-6 * max(abs(up[2]), abs(down[2]))
                )
                least = 64 * noise + 1e-6 * max(abs(up[2]), abs(down[2]))
                settles = all(
                    abs(a[2] - a[1]) <= max(0.9 * abs(a[1] - a[0]), least)
                    for a in ((up, down) if kink else (d,))
                )
                if not settles or (not kink and abs(fine - coarse) > abs(value) / 8 + least):
                    continue  # f bends within h
                ends = (*up, *down) if kink else (value,)
                error = abs(fine - coarse) + noise
                here_found = (value, min(ends), max(ends), terms, error)
                for part, number in zip(parts, here_found, strict=True):
                    part.reshape(-1)[at] = number
        found[name] = Slopes(*parts)
    return found


def _without(coarse: float, fine: float, ratio: float) -> float:
    """Return what two estimates come to whose errors have this ratio."""
    return (ratio * fine - coarse) / (ratio - 1)
