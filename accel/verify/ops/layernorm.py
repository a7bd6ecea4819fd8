"""Cases of layernorm."""

import numpy as np

from accel.tolerance import Unit
from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values, rmsnorm
from accel.verify.ops.rmsnorm import root_mean_square
from accel.verify.rounding import n_rows, sum_rows
from reference.types import Array

CUTS = "... D"
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


def mistakes(case: Case) -> Mistakes:
    (a, dout), eps = case.in_float64(), case.options["eps"]
    x, gain, bias, width = a["x"], a["gain"], a["bias"], a["x"].shape[-1]
    centred = _centred(x)
    rms = root_mean_square(centred)
    yield "is eps left out?", case.but(eps=1e-300)
    yield "is bias left out?", case.but({"bias": 0 * case.arrays["bias"]})
    yield "is eps outside the root?", lambda: {"out": centred / (rms + eps) * gain + bias}
    sample = np.sqrt(rms**2 * width / max(width - 1, 1) + eps)
    if width > 1:
        yield (
            "is the variance divided by D - 1?",
            lambda: {"out": centred / sample * gain + bias},
        )
    yield (
        "is the mean not taken off?",
        lambda: {"out": x / root_mean_square(x, eps) * gain + bias},
    )
    if dout is None:
        return
    rstd = 1 / root_mean_square(centred, eps)
    n, dn = centred * rstd, dout * gain
    along = n * np.mean(dn * n, axis=-1, keepdims=True)
    yield "is the term mean(dn) missing?", lambda: {"dx": rstd * (dn - along)}
    yield "is the term n · mean(dn · n) missing?", lambda: {"dx": rstd * _centred(dn)}
