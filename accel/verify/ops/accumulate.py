"""Cases of accumulate."""

import numpy as np

from accel.verify.draw import FLAT
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values


def generate(draw: Draw) -> Draft:
    shape = (draw.pick(FLAT),) if draw.pick((True, False)) else draw.shape_for(1)
    return Draft({"dst": draw.values(*shape), "src": draw.values(*shape)}, {})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """One sum."""
    return {"dst": Magnitude(np.abs(v["dst"]) + np.abs(v["src"]), 1)}
