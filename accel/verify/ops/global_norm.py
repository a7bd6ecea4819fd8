"""Cases of global_norm."""

import numpy as np

from accel.verify.ops import Magnitude, Magnitudes, Values, square_sums
from reference import ops

TABLES = ("square_sums",)
generate, HARD = square_sums.generate, square_sums.HARD


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """The root of those sums, in float64 too."""
    return {"out": Magnitude(np.asarray(ops.global_norm(v["x"])), 4, len(v["x"]))}
