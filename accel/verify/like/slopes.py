"""Gradients of a function without automatic differentiation: differences in float64.

    D(h) = Σ dout (f(x + h) - f(x - h)) / 2h,      R(h) = (4 D(h/2) - D(h)) / 3
    g ≈ (16 R(h/2) - R(h)) / 15                                       (Romberg 1955)

What is cut off is less than R(h/2) - R(h), and float64's own rounding leaves 2^-53/h of what is
differenced. Differences are taken for each element of the result before they are added, so that
what does not depend on x cancels entirely. Where D of the two sides do not approach each other as h
is halved the function has a kink, and any slope between the two is right.

What plain code is off by in a gradient is not to be had. Its terms may be far larger than their sum
(1 - n² in a norm of one element). A part f of the result that has x for a factor has a slope f/x
for a term, so that the size of the terms is taken to be ‖dout f‖/rms(x), over the results that
depend on x, with the root mean square of x in its row. In large arrays some elements are tried, the
first and the last among them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from reference.types import Array

TRIED = 6  # elements of an input
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

    found: dict[str, Slopes] = {}
    for name in wanted:
        x = wide[name]
        parts = [np.full(x.shape, np.nan) for _ in range(5)]
        if x.size:
            rms = float(np.sqrt(np.mean(x**2))) or 1.0
            inside = rng.permutation(x.size)[:TRIED]
            for at in {0, x.size - 1, *inside.tolist()}:
                h = STEP * max(abs(float(x.reshape(-1)[at])), rms)
                steps = [h, h / 2, h / 4]
                ups = [change(name, at, step) for step in steps]
                up = [by / step for (by, _), step in zip(ups, steps, strict=True)]
                down = [change(name, at, -step)[0] / -step for step in steps]
                d = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
                coarse, fine = (4 * d[1] - d[0]) / 3, (4 * d[2] - d[1]) / 3
                value = (16 * fine - coarse) / 15
                gaps = [abs(a - b) for a, b in zip(up, down, strict=True)]
                row = x.reshape(-1, x.shape[-1])[at // x.shape[-1]] if x.ndim else x
                terms = ups[0][1] / (float(np.sqrt(np.mean(row**2))) or rms)
                noise = NOISE * (abs(value) + terms)
                kink = gaps[2] > 0.75 * gaps[1] and (
                    gaps[2] > 16 * noise + 1e-6 * max(abs(up[2]), abs(down[2]))
                )
                ends = (*up, *down) if kink else (value,)
                error = abs(fine - coarse) + noise
                here_found = (value, min(ends), max(ends), terms, error)
                for part, number in zip(parts, here_found, strict=True):
                    part.reshape(-1)[at] = number
        found[name] = Slopes(*parts)
    return found
