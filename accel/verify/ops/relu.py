"""Cases of relu."""

import numpy as np

from accel.verify.ops import Magnitude, Magnitudes, Values, gelu
from reference.types import Array

CUTS = "..."
generate, HARD = gelu.generate, gelu.HARD


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """Copies."""
    return {"out": Magnitude(np.abs(v["x"]), 1), "dx": Magnitude(np.abs(dout), 1)}
