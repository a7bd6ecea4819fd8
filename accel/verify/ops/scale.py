"""Cases of scale."""

from collections.abc import Iterator

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference.types import Array

UNTRIED = ("out",)


def generate(draw: Draw) -> Draft:
    factor = draw.pick((2.0, 0.3, -1.5, 0.0, 1.0))
    return Draft({"x": draw.rows()}, {"factor": factor})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """The factor is rounded to the working precision, then the product."""
    c = abs(float(v["factor"]))
    return {"out": Magnitude(c * np.abs(v["x"]), 2), "dx": Magnitude(c * np.abs(dout), 2)}


def ratios(case: Case) -> Iterator[tuple[float, str]]:
    if case.options["factor"]:
        yield 1 / case.options["factor"], "the factor is missing"
