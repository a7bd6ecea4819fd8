"""Cases of linear."""

import numpy as np

from accel.verify.contract import Case
from accel.verify.draw import WIDTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from accel.verify.rounding import n_rows
from reference import ops
from reference.types import Array

WEIGHT = 1.5
UNTRIED = ("keep_x", "x")


def generate(draw: Draw) -> Draft:
    widths = (*WIDTHS, 257)
    x = draw.rows(widths)
    weight = draw.values(x.shape[-1], draw.pick(widths))
    bias = draw.values(weight.shape[1]) if draw.wants("bias") else None
    return Draft({"x": x, "weight": weight, "bias": bias}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """Sums of products; r = 2 is the product's rounding and the bias or the result's."""
    x, weight = np.abs(v["x"]), np.abs(v["weight"])
    bias = None if v.get("bias") is None else np.abs(v["bias"])
    out, cache = ops.linear_forward(x, weight, bias)
    dx, dweight, dbias = ops.linear_backward(np.abs(dout), cache)
    found = {
        "out": Magnitude(out, 3, weight.shape[0]),
        "dx": Magnitude(dx, 2, weight.shape[1]),
        "dweight": Magnitude(dweight, 2, n_rows(x)),
    }
    if dbias is not None:
        found["dbias"] = Magnitude(dbias, 1, n_rows(x))
    return found


def mistakes(case: Case) -> Mistakes:
    a, dout = case.in_float64()
    weight = a["weight"]
    if weight.shape[0] == weight.shape[1]:
        yield "transposed weight?", case.but({"weight": case.arrays["weight"].T.copy()})
        if dout is not None:
            yield "is dx made with the weight untransposed?", lambda: {"dx": dout @ weight}
