"""Cases of square_sums."""

from accel.verify.draw import FLAT
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops


def generate(draw: Draw) -> Draft:
    """Lengths around the block of 65,536 elements, too."""
    n = draw.pick((*FLAT, 65_535, 65_536, 65_537, 131_075))
    return Draft({"x": draw.values(n, kinds=("wide",))}, {})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """Kept in float64 in every precision, so counted in float64's u."""
    return {"out": Magnitude(ops.square_sums(v["x"]), 2, min(len(v["x"]), 65_536))}
