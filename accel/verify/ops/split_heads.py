"""Cases of split_heads."""

import numpy as np

from accel.verify.draw import LENGTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values
from reference import ops
from reference.types import Array


def generate(draw: Draw) -> Draft:
    heads = draw.pick(((1, 1), (2, 1), (1,), (1, 2), (2, 1, 1), (4, 2, 2), (6, 3, 3), (3, 1, 2, 1)))
    B, T, d = draw.pick((1, 2, 3)), draw.pick(LENGTHS), draw.pick((1, 2, 3, 8, 17, 64))
    return Draft({"x": draw.values(B, T, sum(heads), d)}, {"heads": heads})


def magnitude(v: Values, dout: tuple[Array, ...], u: float) -> Magnitudes:
    """Copies: a rounding at most, where a kernel stores bf16."""
    parts, _ = ops.split_heads_forward(np.abs(v["x"]), heads=v["heads"])
    found = {f"out[{i}]": Magnitude(part, 1) for i, part in enumerate(parts)}
    found["dx"] = Magnitude(np.abs(np.concatenate(dout, axis=2)), 1)
    return found
