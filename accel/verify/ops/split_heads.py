"""Cases of split_heads."""

from typing import Any

import numpy as np

from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values, merge_heads
from reference import ops
from reference.types import Array

HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "heads": (2, 1), "B": 3, "T": 3, "d": 3},
    {"long": False, "heads": (3, 3, 3), "B": 2, "T": 17, "d": 8},
    {"long": False, "heads": (4, 2, 2), "B": 2, "T": 5, "d": 3, "layout": "transposed"},
    {"long": False, "heads": (1, 2), "B": 2, "T": 7, "special": "nan"},
    {"long": True, "heads": (2, 1, 1), "T": 65_537},
    {"long": False, "heads": (6, 3, 3), "T": 33, "d": 17, "layout": "strided"},
)


def generate(draw: Draw) -> Draft:
    heads = draw.pick(
        ((1, 1), (2, 1), (1,), (1, 2), (2, 1, 1), (4, 2, 2), (6, 3, 3), (3, 1, 2, 1), (3, 3, 3)),
        "heads",
    )
    x = draw.values(*merge_heads.shape(draw, sum(heads)))
    return Draft({"x": x}, {"heads": heads})


def magnitude(v: Values, dout: tuple[Array, ...], u: float) -> Magnitudes:
    """Copies: a rounding at most, where a kernel stores bf16."""
    parts, _ = ops.split_heads_forward(np.abs(v["x"]), heads=v["heads"])
    found = {f"out[{i}]": Magnitude(part, 1) for i, part in enumerate(parts)}
    found["dx"] = Magnitude(np.abs(np.concatenate(dout, axis=2)), 1)
    return found
