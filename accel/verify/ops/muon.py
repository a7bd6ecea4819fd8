"""Cases of muon."""

import itertools
import math
from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference.muon import ITERATIONS, RMS, A, B, C
from reference.types import Array

CUTS = "I"
SIDES = (1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 65, 129)
HARD: tuple[dict[str, Any], ...] = (
    {"I": 17, "O": 33, "parts": "two", "grad_scale": True},
    {"I": 33, "O": 17, "parts": "one", "fresh": True},
    {"I": 5, "O": 5, "parts": "one", "momentum": 0.5},
    {"I": 16, "O": 65, "parts": "three", "grad": "wide", "layout": "strided"},
    {"I": 65, "O": 8, "parts": "one", "grad": "tiny", "fresh": True},
    {"I": 7, "O": 16, "parts": "two", "special": "nan", "where": "grad"},
    {"I": 1, "O": 31, "parts": "one"},
    {"I": 64, "O": 1, "parts": "one", "weight_decay": 0.1},
    {"I": 129, "O": 129, "parts": "two", "fresh": True},
    {"I": 3, "O": 7, "parts": "three", "nothing": True},
    {"I": 8, "O": 3, "parts": "one", "special": "inf", "where": "m"},
)


def generate(draw: Draw) -> Draft:
    """Wide, square and tall matrices, alone and side by side; a first step, and none to take."""
    rows, columns = draw.pick(SIDES, "I"), draw.pick(SIDES, "O")
    kind = draw.pick(("one", "two", "three"), "parts")
    count = min(("one", "two", "three").index(kind) + 1, columns)
    grad = draw.values(rows, columns, kinds=("tiny", "wide", "zero rows"), name="grad")
    arrays = {
        "master": draw.values(rows, columns),
        "m": draw.values(rows, columns, kinds=("wide",)),
        "grad": grad,
    }
    if draw.pick((False, True), "fresh"):
        arrays["m"] = 0 * arrays["m"]
    if draw.rarely("nothing"):
        arrays["m"], arrays["grad"] = 0 * arrays["m"], 0 * grad
    options: dict[str, Any] = {
        "lr": draw.pick((0.1, 1e-3), "lr"),
        "momentum": draw.pick((0.95, 0.5), "momentum"),
        "weight_decay": draw.pick((0.1, 0.0), "weight_decay"),
    }
    if count > 1:  # of unequal widths, where there are enough columns
        ends = [columns * n * n // count**2 or n for n in range(1, count)]
        edges = [0, *(max(end, n) for n, end in enumerate(ends, 1)), columns]
        options["parts"] = tuple(b - a for a, b in itertools.pairwise(edges))
    if draw.wants("grad_scale"):
        options["grad_scale"] = draw.pick((0.5, 0.013))
    return Draft(arrays, options)


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """What goes in is a sum; what comes out has its error grown by the polynomial's slopes."""
    scale, mu = float(v.get("grad_scale", 1.0)), v["momentum"]
    grad, m = v["grad"] * scale, v["m"]
    s_m = mu * np.abs(m) + np.abs(grad)
    s_n = mu * s_m + np.abs(grad)
    ahead = mu * (mu * m + grad) + grad
    rows, columns = grad.shape
    s_o = np.zeros_like(grad)
    first = 0
    for width in v.get("parts") or (columns,):
        part = slice(first, first + width)
        first += width
        found = _orthogonalised(ahead[:, part], s_n[:, part])
        s_o[:, part] = RMS * math.sqrt(max(rows, width)) * found
    master = np.abs(v["master"])
    side = max(rows, columns)
    return {
        "master": Magnitude(master + v["lr"] * (s_o + v["weight_decay"] * master), 8, side),
        "m": Magnitude(s_m, 3),
    }


def _orthogonalised(n: Array, s_n: Array) -> Array:
    """Return s of ``orthogonalise``: each step's own s, times what the steps after it make of it.

    A small change E of X changes q(X) = U q(S) Vᵀ by no more than |E| times the steepest chord of
    q, an odd function, between any two of S, -S and 0; |·| the Frobenius norm. With q the steps
    that are left, chords are as steep as 3.4445⁵ at most, near 0. The whole is spread evenly.
    """
    norm = float(np.linalg.norm(n))
    if norm == 0:
        return np.zeros_like(n)
    x = n / norm if n.shape[0] <= n.shape[1] else n.T / norm
    sigma = np.linalg.svd(x, compute_uv=False)
    total = _steepest(sigma, ITERATIONS) * (float(np.linalg.norm(s_n)) / norm + 1)
    for left in reversed(range(ITERATIONS)):
        size = np.abs(x)
        gram, s_gram = x @ x.T, size @ size.T
        p = B * gram + C * gram @ gram
        g = np.abs(gram)
        s_p = -B * s_gram + C * (g @ s_gram + s_gram @ g + g @ g)
        s_x = s_p @ size + np.abs(p) @ size + A * size
        x, sigma = A * x + p @ x, _polynomial(sigma)
        total += _steepest(sigma, left) * float(np.linalg.norm(s_x))
    return np.full(n.shape, total / math.sqrt(n.size))


def _polynomial(s: Array) -> Array:
    return np.asarray(A * s + B * s**3 + C * s**5)


def _steepest(sigma: Array, steps: int) -> float:
    """Return the steepest chord, or slope, of so many steps at singular values."""
    s = np.concatenate([sigma, -sigma, [0.0]])
    q, slope = s, np.ones_like(s)
    for _ in range(steps):
        slope = slope * (A + 3 * B * q**2 + 5 * C * q**4)
        q = _polynomial(q)
    across = np.abs(s[:, None] - s)
    apart = across > 1e-6
    rise = np.abs(q[:, None] - q)
    chords = np.divide(rise, across, out=np.zeros_like(rise), where=apart)
    return float(max(np.max(chords), np.max(np.abs(slope))))


def mistakes(case: Case) -> Mistakes:
    o, columns = case.options, case.arrays["master"].shape[1]
    if o.get("parts"):
        yield "are the matrices side by side orthogonalised as one?", case.but(parts=(columns,))
        yield "are parts taken in another order?", case.but(parts=o["parts"][::-1])
    yield "is weight decay left out?", case.but(weight_decay=0.0)
    yield "is grad_scale ignored?", case.but(grad_scale=1.0)
    yield "is the momentum ignored?", case.but(momentum=0.0)
