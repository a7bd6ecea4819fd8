"""Cases of scale."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference.types import Array

UNMISSED = ("out",)


CUTS = "..."
HARD: tuple[dict[str, Any], ...] = (
    {"factor": 0.3, "long": False, "width": 17, "shape": (5, 7), "x": "wide"},
    {"factor": -1.5, "long": False, "width": 33, "layout": "transposed", "laid": "all"},
    {"factor": 0.3, "long": True, "long shape": ((1,), 65_539)},
    {"factor": 0.3, "long": False, "special": "nan", "where": "x"},
    {"factor": 0.0, "long": False, "special": "nan", "where": "dout"},
    {"factor": 2.0, "long": False, "special": "inf", "where": "x"},
    {"factor": 0.3, "long": True, "long shape": ((65_539,), 2)},
)


def generate(draw: Draw) -> Draft:
    factor = draw.pick((2.0, 0.3, -1.5, 0.0, 1.0), "factor")
    return Draft({"x": draw.rows()}, {"factor": factor})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """The factor is rounded to the working precision, then the product."""
    c = abs(float(v["factor"]))
    return {"out": Magnitude(c * np.abs(v["x"]), 2), "dx": Magnitude(c * np.abs(dout), 2)}


def ratios(case: Case) -> Iterator[tuple[float, str]]:
    if case.options["factor"]:
        yield 1 / case.options["factor"], "the factor is missing"
