"""Cases of linear."""

from typing import Any

import numpy as np

from accel.tolerance import Unit
from accel.verify.draw import MAX_ELEMENTS, WIDE, WIDTHS
from accel.verify.ops import Draft, Draw, Magnitudes, Values
from accel.verify.rounding import n_rows, sum_rows, summed
from reference import ops
from reference.types import Array

WEIGHT = 1.5
UNMISSED = ("keep_x", "x", "plus")
CUTS = "... I O"


PRODUCTS = FP8 = True
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "width": 17, "shape": (17,), "O": 17, "bias": True},
    {"long": False, "width": 1, "shape": (65,), "O": 33, "x": "wide", "bias": False},
    {"long": False, "width": 33, "shape": (5, 7), "O": 5, "bias": True, "layout": "transposed"},
    {"long": True, "long shape": ((4_099,), 3), "bias": True, "one sign": True},
    {"long": True, "long shape": ((3,), 4_099), "bias": False},
    {"long": False, "width": 65, "shape": (3, 2, 5), "O": 129, "special": "nan", "where": "x"},
    {"long": False, "width": 3, "shape": (129,), "O": 2, "interleaved": True, "out": "out"},
    {"long": False, "width": 129, "shape": (17,), "O": 257, "x": "normal", "bias": True},
    {"long": False, "width": 2, "shape": (3,), "special": "nan", "where": "dout"},
    {"long": False, "width": 17, "shape": (2, 3), "O": 1025, "x": "normal"},
    {"long": True, "long shape": ((1,), 65_539)},
    {"long": False, "width": 7, "shape": (2, 33), "special": "nan", "where": "weight"},
    {"long": True, "long shape": ((65_539,), 2)},
)


def generate(draw: Draw) -> Draft:
    x = draw.rows()
    width, outs = x.shape[-1], [1, 2, 3]
    if x.size <= MAX_ELEMENTS and width <= 257:
        outs = [*WIDE] if max(width, n_rows(x)) <= 33 else [*WIDTHS, 257]
    weight = draw.values(x.shape[-1], draw.pick(outs, "O"))
    bias = draw.values(weight.shape[1]) if draw.wants("bias") else None
    return Draft({"x": x, "weight": weight, "bias": bias}, {})


def magnitude(v: Values, dout: Array, u: Unit) -> Magnitudes:
    """Sums of products; r = 2 is the product's rounding and the bias or the result's."""
    x, weight = np.abs(v["x"]), np.abs(v["weight"])
    bias = None if v.get("bias") is None else np.abs(v["bias"])
    out, cache = ops.linear_forward(x, weight, bias)
    dx, dweight, dbias = ops.linear_backward(np.abs(dout), cache)
    plain, cache = ops.linear_forward(v["x"], v["weight"])
    exact_dx, exact_dweight, _ = ops.linear_backward(dout, cache)
    # y may be stored before the bias joins it
    kept = np.abs(plain) + np.abs(plain + (0 if bias is None else v["bias"]))
    found = {
        "out": summed(out, 3, weight.shape[0], u, kept),
        "dx": summed(dx, 2, weight.shape[1], u, np.abs(exact_dx)),
        "dweight": summed(dweight, 2, n_rows(x), u, np.abs(exact_dweight)),
    }
    if dbias is not None:
        found["dbias"] = summed(dbias, 1, n_rows(x), u, np.abs(sum_rows(dout)))
    return found
