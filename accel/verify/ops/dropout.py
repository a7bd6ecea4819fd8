"""Cases of dropout."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference.types import Array

TABLES = ("philox",)
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "p": 0.5, "seed": 2**40 + 3, "step": 70_001, "sample": 3, "site": 300},
    {"long": False, "p": 0.1, "seed": 2**64 - 1, "step": 2**32 - 1, "site": 2**32 - 1},
    {"long": False, "p": 0.9, "sample": 2**31 + 1, "site": 70_003, "shape": (3, 2, 5)},
    {"long": True, "long shape": ((3,), 4_099), "p": 0.5},
    {"long": True, "long shape": ((1,), 65_539), "p": 0.5},
    {"long": False, "p": 0.1, "special": "nan", "where": "x"},
    {"long": False, "p": 0.5, "seed": 2**63 + 5, "step": 2**31 + 7, "sample": 40_000},
    {"long": False, "p": 0.5, "shape": (5, 7), "layout": "strided", "laid": "all"},
    {"long": True, "long shape": ((65_539,), 2), "p": 0.1},
)


def generate(draw: Draw) -> Draft:
    p = draw.pick((0.5, 0.1, 0.9, 0.0), "p")
    x = draw.rows()
    return Draft({"x": x}, {"p": p, "key": draw.key(len(x))})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """1/(1 - p) is rounded, or divided by."""
    grown = 1 / (1 - float(v["p"]))
    return {
        "out": Magnitude(np.abs(v["x"]) * grown, 4),
        "dx": Magnitude(np.abs(dout) * grown, 4),
    }


def ratios(case: Case) -> Iterator[tuple[float, str]]:
    yield 1 - case.options["p"], "the 1/(1 - p) of dropout is missing"
