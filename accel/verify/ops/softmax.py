"""Cases of softmax."""

from collections.abc import Iterator

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from accel.verify.rounding import SMALLEST_P, bend
from reference import ops


def generate(draw: Draw) -> Draft:
    return Draft({"x": draw.rows(kinds=("large", "offset", "zero rows", "wide"))}, {})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """As P in attention, the scores being given."""
    top = np.max(np.abs(v["x"]), axis=-1, keepdims=True)
    p = (ops.softmax(v["x"]) + SMALLEST_P) * bend(top, u)
    return {"out": Magnitude(p, 7, v["x"].shape[-1])}


def remarks(case: Case) -> Iterator[str]:
    if float(np.abs(case.arrays["x"]).max(initial=0)) > 80:
        yield "is the maximum taken off first? exp overflows: in float32 beyond 88, float64 709."
