"""Cases of gelu."""

import dataclasses
import math
from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference.types import Array

CUTS = "..."
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "x": "large", "width": 17},
    {"long": False, "x": "wide", "width": 129, "shape": (17,), "layout": "transposed"},
    {"long": False, "x": "normal", "width": 33, "special": "nan", "where": "x"},
    {"long": True, "long shape": ((1,), 65_539), "x": "normal"},
    {"long": False, "x": "normal", "special": "inf", "where": "x"},
    {"long": False, "x": "simple", "special": "nan", "where": "dout", "width": 7},
    {"long": False, "x": "wide", "width": 1025, "shape": (17,), "layout": "strided"},
    {"long": False, "x": "large", "special": "-inf", "where": "x"},
    {"long": True, "long shape": ((65_539,), 2)},
)


def generate(draw: Draw) -> Draft:
    """Inputs far into both tails, and exact zeros."""
    return Draft({"x": draw.rows(kinds=("large", "wide", "zero rows"))}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """Φ(|x|): ½(1 + erf) cancels for negative x and is a common way to write it."""
    x, d = np.abs(v["x"]), np.abs(dout)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    # the density is off by the rounding of x²/2
    return {"out": Magnitude(x, 8), "dx": Magnitude(d * (1 + x * density * (1 + x * x / 2)), 10)}


def mistakes(case: Case) -> Mistakes:
    yield "is it gelu_tanh, the other GELU?", dataclasses.replace(case, op="gelu_tanh")
