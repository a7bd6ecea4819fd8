"""Cases of gelu_tanh."""

import dataclasses
import math

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Magnitude, Magnitudes, Mistakes, Values, gelu
from reference.types import Array

CUTS = "..."
generate, HARD = gelu.generate, gelu.HARD


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """1 + tanh cancels for negative x, and so does 1 - tanh² in the slope for any large x."""
    x, d = np.abs(v["x"]), np.abs(dout)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    h = np.tanh(inner)
    bend = (1 - h * h) * inner  # of tanh, by the error of its argument
    slope = 1 + h + x * (1 + h * h + 2 * h * bend) * math.sqrt(2 / math.pi)
    slope = slope * (1 + 3 * 0.044715 * x * x) + bend
    return {"out": Magnitude(x * (1 + h + bend), 8), "dx": Magnitude(d * slope, 14)}


def mistakes(case: Case) -> Mistakes:
    yield "is it gelu, the other GELU?", dataclasses.replace(case, op="gelu")
