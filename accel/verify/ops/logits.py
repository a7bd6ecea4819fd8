"""Cases of logits."""

import numpy as np

from accel.verify.draw import WIDTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops


def generate(draw: Draw) -> Draft:
    x = draw.rows(WIDTHS)
    V = draw.pick((*WIDTHS, 257))
    bias = draw.values(V) if draw.wants("bias") else None
    return Draft({"x": x, "head": draw.values(V, x.shape[-1]), "bias": bias}, {})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """A linear layer."""
    bias = None if v.get("bias") is None else np.abs(v["bias"])
    out = ops.logits(np.abs(v["x"]), np.abs(v["head"]), bias)
    return {"out": Magnitude(out, 3, v["head"].shape[1])}
