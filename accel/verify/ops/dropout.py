"""Cases of dropout."""

from collections.abc import Iterator

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference.types import Array


def generate(draw: Draw) -> Draft:
    p = draw.pick((0.5, 0.1, 0.9, 0.0))
    return Draft({"x": draw.rows()}, {"p": p, "key": draw.key()})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """1/(1 - p) is rounded, or divided by."""
    grown = 1 / (1 - float(v["p"]))
    return {
        "out": Magnitude(np.abs(v["x"]) * grown, 4),
        "dx": Magnitude(np.abs(dout) * grown, 4),
    }


def ratios(case: Case) -> Iterator[tuple[float, str]]:
    yield 1 - case.options["p"], "the 1/(1 - p) of dropout is missing"
