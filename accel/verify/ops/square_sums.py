"""Cases of square_sums."""

from typing import Any

from accel.verify.draw import FLAT, LONG_FLAT
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops

HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "length": 1025, "x": "wide"},
    {"long": True, "length": 131_075, "x": "normal"},
    {"long": True, "length": 65_535},
    {"long": True, "length": 65_536},
    {"long": True, "length": 300_007, "x": "wide"},
    {"long": False, "length": 129, "special": "nan", "where": "x"},
    {"long": True, "length": 65_537, "layout": "strided"},
    {"long": False, "length": 33, "special": "inf", "where": "x"},
)


def generate(draw: Draw) -> Draft:
    """Lengths around the block of 65,536 elements, too, and several blocks."""
    n = draw.flat(FLAT, (*LONG_FLAT, 300_007))
    return Draft({"x": draw.values(n, kinds=("wide",), name="x")}, {})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """Kept in float64 in every precision, so counted in float64's u."""
    return {"out": Magnitude(ops.square_sums(v["x"]), 2, min(len(v["x"]), 65_536))}
