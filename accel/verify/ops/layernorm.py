"""Cases of layernorm."""

import numpy as np

from accel.tolerance import Unit
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values, rmsnorm
from accel.verify.ops.rmsnorm import root_mean_square
from accel.verify.rounding import n_rows, sum_rows
from reference.types import Array

CUTS = "... D"
UNMISSED = ("plus",)
HARD = rmsnorm.HARD


def generate(draw: Draw) -> Draft:
    arrays, options = rmsnorm.generate(draw)
    return Draft({**arrays, "bias": draw.values(arrays["x"].shape[-1])}, options)


def magnitude(v: Values, dout: Array, u: Unit) -> Magnitudes:
    """x - μ cancels: an offset in x costs every digit that it has more than the deviations."""
    x, gain, d = v["x"], np.abs(v["gain"]), np.abs(dout)
    rstd = 1 / root_mean_square(_centred(x), v["eps"])
    n = np.abs(_centred(x) * rstd)
    centred = rstd * (np.abs(x) + np.mean(np.abs(x), axis=-1, keepdims=True))
    relative = 1 + np.mean(n * centred, axis=-1, keepdims=True)  # of rstd, through the variance
    s_n = centred + n * relative + u.least
    dn = d * gain + u.least
    along = np.mean(dn * n, axis=-1, keepdims=True)
    dx = rstd * (
        relative * (dn + np.mean(dn, axis=-1, keepdims=True) + n * along)
        + s_n * along
        + n * np.mean(dn * s_n, axis=-1, keepdims=True)
    )
    width, rows = x.shape[-1], n_rows(x)
    return {
        "out": Magnitude(s_n * gain + np.abs(v["bias"]), 8, width),
        "dx": Magnitude(dx, 11, 2 * width),
        "dgain": Magnitude(sum_rows(d * s_n), 8, rows + width),
        "dbias": Magnitude(sum_rows(d), 1, rows),
    }


def _centred(x: Array) -> Array:
    return np.asarray(x - np.mean(x, axis=-1, keepdims=True))
