"""Cases of rmsnorm."""

from typing import Any

import numpy as np

from accel.tolerance import Unit
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from accel.verify.rounding import n_rows, sum_rows
from reference.types import Array

CUTS = "... D"
UNMISSED = ("plus",)
HARD: tuple[dict[str, Any], ...] = (
    {"long": True, "long shape": ((4_099,), 3), "x": "normal", "one sign": True},
    {
        "long": False,
        "width": 17,
        "shape": (17,),
        "x": "offset",
        "offset": 1000,
        "eps": 1e-6,
        "gain": "normal",
    },
    {"long": False, "width": 7, "shape": (3, 2, 5), "x": "tiny", "eps": 1e-5, "gain": "normal"},
    {"long": False, "width": 33, "shape": (65,), "x": "zero rows", "eps": 1e-6, "gain": "normal"},
    {"long": False, "width": 65, "shape": (5, 7), "x": "normal", "special": "nan", "where": "x"},
    {"long": True, "long shape": ((4_099,), 3), "x": "normal"},
    {"long": False, "width": 1025, "shape": (17,), "x": "wide", "layout": "strided"},
    {"long": True, "long shape": ((3,), 4_099), "x": "offset", "offset": 8, "layout": "plain"},
    {"long": False, "width": 5, "shape": (2, 33), "out": "out", "layout": "transposed"},
    {"long": False, "width": 17, "shape": (5, 7), "x": "normal", "special": "inf", "where": "x"},
    {"long": False, "width": 8, "shape": (17,), "special": "nan", "where": "dout"},
    {"long": False, "width": 1, "eps": 0.5},
    {"long": True, "long shape": ((65_539,), 2), "x": "normal"},
    {"long": True, "long shape": ((1,), 65_539), "x": "normal"},
)


def generate(draw: Draw) -> Draft:
    """Rows so small that ε decides, too; none of equal numbers where it is zero."""
    x = draw.rows(kinds=("tiny", "zero rows", "offset", "wide"))
    spread = np.all(np.max(x, axis=-1) > np.min(x, axis=-1))
    eps = draw.pick((1e-5, 0.5, 1e-6, 0.0) if spread else (1e-5, 0.5, 1e-6), "eps")
    return Draft({"x": x, "gain": draw.values(x.shape[-1], name="gain")}, {"eps": eps})


def magnitude(v: Values, dout: Array, u: Unit) -> Magnitudes:
    """Squares do not cancel, so r is right to a few u: r = 4 for it, then x r g and the result."""
    x, gain = np.abs(v["x"]), np.abs(v["gain"])
    rstd = 1 / root_mean_square(x, v["eps"])
    n, dn = x * rstd + u.least, np.abs(dout) * gain + u.least
    dx = rstd * (dn + n * np.mean(dn * n, axis=-1, keepdims=True))
    width = x.shape[-1]
    return {
        "out": Magnitude(n * gain, 7, width),
        "dx": Magnitude(dx, 10, 2 * width),
        "dgain": Magnitude(sum_rows(np.abs(dout) * n), 7, n_rows(x) + width),
    }


def root_mean_square(x: Array, eps: float = 0.0) -> Array:
    return np.asarray(np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))
