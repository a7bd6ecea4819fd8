"""Cases of logits."""

from typing import Any

import numpy as np

from accel.tolerance import Unit
from accel.verify.draw import MAX_ELEMENTS, WIDTHS
from accel.verify.ops import Draft, Draw, Magnitudes, Values
from accel.verify.rounding import summed
from reference import ops

PRODUCTS = FP8 = True
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "width": 17, "shape": (17,), "V": 17, "bias": True},
    {"long": False, "width": 5, "shape": (2, 33), "V": 129, "x": "wide", "bias": True},
    {"vast": True, "V": 70_001, "D": 2, "bias": True},
    {"long": False, "width": 33, "shape": (5, 7), "V": 3, "special": "nan", "where": "x"},
    {"long": True, "long shape": ((4_099,), 3)},
    {"long": False, "width": 65, "shape": (17,), "V": 257, "layout": "strided"},
    {"vast": True, "V": 33_001, "D": 3, "bias": False},
)


def generate(draw: Draw) -> Draft:
    """Vocabularies beyond what 15 and 16 bits can count, too."""
    if draw.rarely("vast"):
        x = draw.values(3, draw.pick((1, 2, 3), "D"), name="x")
        V = draw.pick((33_001, 70_001), "V")
    else:
        x = draw.rows(WIDTHS)
        few = (1, 2, 3) if x.size > MAX_ELEMENTS or x.shape[-1] > 257 else (*WIDTHS, 257)
        V = draw.pick(few, "V")
    bias = draw.values(V) if draw.wants("bias") else None
    return Draft({"x": x, "head": draw.values(V, x.shape[-1]), "bias": bias}, {})


def magnitude(v: Values, dout: None, u: Unit) -> Magnitudes:
    """A linear layer."""
    bias = None if v.get("bias") is None else np.abs(v["bias"])
    out = ops.logits(np.abs(v["x"]), np.abs(v["head"]), bias)
    plain = ops.logits(v["x"], v["head"])
    kept = np.abs(plain) + np.abs(plain + (0 if bias is None else v["bias"]))
    return {"out": summed(out, 3, v["head"].shape[1], u, kept)}
