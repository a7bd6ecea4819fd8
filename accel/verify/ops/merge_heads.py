"""Cases of merge_heads."""

from typing import Any

import numpy as np

from accel.verify.draw import LENGTHS, LONG_LENGTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops
from reference.types import Array

CUTS = "B T H d"


HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "B": 3, "T": 3, "H": 3, "d": 3},
    {"long": False, "B": 2, "T": 7, "H": 7, "d": 8},
    {"long": False, "B": 2, "T": 17, "H": 3, "d": 8, "special": "nan"},
    {"long": True, "T": 65_537, "H": 1},
    {"long": False, "B": 1, "T": 33, "H": 7, "d": 17, "layout": "transposed"},
    {"long": True, "T": 513, "layout": "strided"},
)


def shape(draw: Draw, heads: int) -> tuple[int, int, int, int]:
    """Return (B, T, H, d), equal sizes among them; now and then a long T."""
    if draw.rarely("long"):
        long = [T for T in LONG_LENGTHS if T * heads <= 200_000]
        return 1, draw.pick(long, "T"), heads, 2 if heads == 1 else 1
    B, T = draw.pick((1, 2, 3), "B"), draw.pick(LENGTHS, "T")
    return B, T, heads, draw.pick((1, 2, 3, 8, 17, 64), "d")


def generate(draw: Draw) -> Draft:
    return Draft({"x": draw.values(*shape(draw, draw.pick((1, 2, 3, 7), "H")))}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """Copies, as in split_heads."""
    out, cache = ops.merge_heads_forward(np.abs(v["x"]))
    dx = ops.merge_heads_backward(np.abs(dout), cache)
    return {"out": Magnitude(out, 1), "dx": Magnitude(dx, 1)}
