"""Cases of softmax."""

from typing import Any

import numpy as np

from accel.tolerance import Unit
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from accel.verify.rounding import bend
from reference import ops

CUTS = "... n"
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "width": 17, "shape": (17,), "x": "large"},
    {"long": False, "width": 65, "shape": (5, 7), "x": "offset", "offset": 1000},
    {"long": False, "width": 1025, "shape": (17,), "x": "normal"},
    {"long": False, "width": 33, "shape": (3, 2, 5), "x": "normal", "special": "nan"},
    {"long": True, "long shape": ((1,), 65_539), "x": "normal"},
    {"long": False, "width": 7, "x": "normal", "special": "-inf"},
    {"long": False, "width": 129, "x": "wide", "layout": "strided"},
    {"long": False, "width": 5, "x": "zero rows", "layout": "transposed"},
    {"long": False, "width": 31, "x": "simple", "special": "inf"},
    {"long": True, "long shape": ((65_539,), 2), "x": "large"},
    {"long": False, "width": 5, "shape": (3,), "x": "apart"},
)


def generate(draw: Draw) -> Draft:
    return Draft({"x": draw.rows(kinds=("large", "offset", "zero rows", "wide", "apart"))}, {})


def magnitude(v: Values, dout: None, u: Unit) -> Magnitudes:
    """As P in attention, the scores being given."""
    top = np.max(np.abs(v["x"]), axis=-1, keepdims=True)
    p = (ops.softmax(v["x"]) + u.least) * bend(top, u, 7)
    return {"out": Magnitude(p, 7, v["x"].shape[-1])}
