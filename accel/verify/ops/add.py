"""Cases of add."""

import numpy as np

from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops
from reference.types import Array


def generate(draw: Draw) -> Draft:
    """a + b with every kind of broadcasting."""
    b = draw.rows()
    cut = draw.pick(("same", "last", "leading", "ones", "both"))
    shape: tuple[int, ...] = b.shape
    if cut == "last":
        shape = shape[-1:]
    elif cut in ("leading", "both"):
        shape = shape[1:]
    if cut in ("ones", "both"):
        shape = tuple(n if draw.pick((True, False)) else 1 for n in shape)
    a = draw.values(*shape)
    return Draft({"a": b, "b": a} if draw.pick((True, False)) else {"a": a, "b": b}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """One rounding forward; the gradient of a repeated element is a sum."""
    a, b, d = np.abs(v["a"]), np.abs(v["b"]), np.abs(dout)
    _, cache = ops.add_forward(a, b)
    da, db = ops.add_backward(d, cache)
    return {
        "out": Magnitude(a + b, 1),
        "da": Magnitude(da, 1, max(1, d.size // max(1, a.size))),
        "db": Magnitude(db, 1, max(1, d.size // max(1, b.size))),
    }
