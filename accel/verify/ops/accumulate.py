"""Cases of accumulate."""

import numpy as np

from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values

HARD: tuple[dict[str, object], ...] = (
    {"flat": True, "long": False, "length": 33, "layout": "strided", "laid": "dst"},
    {"flat": True, "long": True, "length": 131_075},
    {"flat": True, "long": False, "special": "nan", "where": "src"},
    {"flat": False, "shape": (3, 2, 5), "layout": "transposed", "laid": "all"},
    {"flat": True, "long": True, "length": 65_537},
)


def generate(draw: Draw) -> Draft:
    shape = (draw.flat(),) if draw.pick((True, False), "flat") else draw.shape_for(1)
    return Draft({"dst": draw.values(*shape), "src": draw.values(*shape)}, {})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """One sum."""
    return {"dst": Magnitude(np.abs(v["dst"]) + np.abs(v["src"]), 1)}
