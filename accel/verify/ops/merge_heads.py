"""Cases of merge_heads."""

import numpy as np

from accel.verify.draw import LENGTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops
from reference.types import Array

CUTS = "B T H d"


def generate(draw: Draw) -> Draft:
    B, T, d = draw.pick((1, 2, 3)), draw.pick(LENGTHS), draw.pick((1, 2, 3, 8, 17, 64))
    return Draft({"x": draw.values(B, T, draw.pick((1, 2, 3, 7)), d)}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """Copies, as in split_heads."""
    out, cache = ops.merge_heads_forward(np.abs(v["x"]))
    dx = ops.merge_heads_backward(np.abs(dout), cache)
    return {"out": Magnitude(out, 1), "dx": Magnitude(dx, 1)}
