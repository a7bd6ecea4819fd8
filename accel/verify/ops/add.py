"""Cases of add."""

from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference import ops
from reference.types import Array

HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "width": 17, "shape": (17,), "cut": "last", "large first": False},
    {"long": False, "width": 17, "shape": (17,), "cut": "last", "large first": True},
    {"long": False, "width": 5, "shape": (3, 2, 5), "cut": "both"},
    {"long": False, "width": 5, "shape": (1, 1), "cut": "both", "kept": False},
    {"long": True, "long shape": ((65_539,), 2), "cut": "last"},
    {"long": True, "long shape": ((1,), 65_539), "cut": "same"},
    {"long": False, "width": 33, "shape": (5, 7), "cut": "leading", "special": "nan"},
    {"long": False, "width": 3, "shape": (3,), "cut": "ones"},
    {"long": True, "long shape": ((4_099,), 3), "cut": "last"},
    {"long": False, "width": 65, "shape": (2, 33), "cut": "same", "layout": "transposed"},
)


def generate(draw: Draw) -> Draft:
    """a + b with every kind of broadcasting."""
    b = draw.rows()
    cut = draw.pick(("same", "last", "leading", "ones", "both"), "cut")
    shape: tuple[int, ...] = b.shape
    if cut == "last":
        shape = shape[-1:]
    elif cut in ("leading", "both"):
        shape = shape[1:]
    if cut in ("ones", "both"):
        shape = tuple(n if draw.pick((True, False), "kept") else 1 for n in shape)
    a = draw.values(*shape)
    return Draft(
        {"a": b, "b": a} if draw.pick((True, False), "large first") else {"a": a, "b": b}, {}
    )


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


def mistakes(case: Case) -> Mistakes:
    dout = np.asarray(case.cotangent, np.float64)
    for name, a in case.arrays.items():
        lead = dout.ndim - a.ndim
        if a.shape == dout.shape or not dout.any():
            continue
        text = f"is d{name} not summed over the axes along which {name} was repeated?"
        yield text, lambda name=name: {f"d{name}": dout}  # type: ignore[misc]
        if 1 in a.shape:
            text = f"is d{name} not summed over the axes of size 1 along which {name} was repeated?"
            rest = np.sum(dout, axis=tuple(range(lead)))
            yield text, lambda name=name, rest=rest: {f"d{name}": rest}  # type: ignore[misc]
