"""Cases of embedding."""

import math
from typing import Any

import numpy as np

from accel.verify.draw import MAX_ELEMENTS, SHAPES, WIDE, WIDTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops
from reference.types import Array

FP8 = True
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "V": 7, "D": 7, "shape": (65,), "ids": "random", "accumulate": "accumulate"},
    {"long": False, "V": 33, "D": 17, "shape": (129,), "ids": "one id"},
    {"long": True, "V D": (70_001, 2), "ids": "ends"},
    {
        "long": False,
        "V": 3,
        "D": 5,
        "shape": (2, 33),
        "ids": "random",
        "special": "nan",
        "where": "table",
    },
    {"long": True, "V D": (33_001, 3), "ids": "random", "layout": "strided", "laid": "ids"},
    {"long": False, "V": 3, "D": 33, "shape": (3, 2, 5), "ids": "ends", "out": "out"},
    {"long": False, "V": 2, "D": 2, "shape": (4_099,), "ids": "random", "one sign": True},
)


def generate(draw: Draw) -> Draft:
    """Ids that repeat, that name the first and the last row, and rows that nobody names.

    Vocabularies beyond what 15 and 16 bits can count.
    """
    if draw.rarely("long"):
        V, D = draw.pick(((33_001, 3), (70_001, 1), (70_001, 2)), "V D")
    else:
        V, D = draw.pick(WIDTHS, "V"), draw.pick(WIDE, "D")
    shape = draw.pick([s for s in (*SHAPES, (4_099,)) if math.prod(s) * D <= MAX_ELEMENTS], "shape")
    ids = draw.rng.integers(0, V, shape)
    kind = draw.pick(("random", "one id", "ends"), "ids")
    if kind == "one id":
        ids[...] = draw.pick((0, 1 % V, V // 2, V - 1), "id")
    elif kind == "ends":
        ids = np.where(draw.rng.random(shape) < 0.5, 0, V - 1)
        ids.reshape(-1)[-1] = V - 1
    return Draft({"ids": ids.astype(np.int32), "table": draw.values(V, D)}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """A copy forward; backward a sum over the positions that share an id."""
    ids, table = v["ids"], np.abs(v["table"])
    out, cache = ops.embedding_forward(ids, table)
    most = int(np.bincount(ids.reshape(-1)).max(initial=1))
    dtable = ops.embedding_backward(np.abs(dout), cache)
    return {"out": Magnitude(out, 1), "dtable": Magnitude(dtable, 2, most)}
