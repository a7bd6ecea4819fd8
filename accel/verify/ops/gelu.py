"""Cases of gelu."""

import dataclasses
import math

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference.types import Array


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
