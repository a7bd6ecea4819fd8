"""Cases of swiglu."""

import numpy as np

from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values, gelu
from reference.types import Array

CUTS = "..."
HARD = gelu.HARD


def generate(draw: Draw) -> Draft:
    return Draft({"x": draw.rows(times=2, kinds=("large", "wide", "zero rows"))}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """σ of |g| stands for σ(g), and 1 + |g| (1 + σ) for the slope."""
    gate, up = np.split(np.abs(v["x"]), 2, axis=-1)
    sigma, d = 1 / (1 + np.exp(-gate)), np.abs(dout)
    dgate = d * up * sigma * (1 + gate * (1 + sigma))
    return {
        "out": Magnitude(gate * sigma * up, 8),
        "dx": Magnitude(np.concatenate([dgate, d * gate * sigma], axis=-1), 12),
    }
