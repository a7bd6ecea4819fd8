"""Cases of rope."""

import math
from typing import Any

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF
from accel.verify.contract import Case
from accel.verify.draw import LENGTHS, MAX_ELEMENTS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference import ops
from reference.types import Array

WEIGHT = 2
CUTS = "B T H"


def generate(draw: Draw) -> Draft:
    B, T, H = draw.pick((1, 2, 3)), draw.pick(LENGTHS), draw.pick((1, 2, 3, 4, 7))
    d = draw.pick([n for n in (2, 4, 6, 8, 16, 34, 64, 128) if B * T * H * n <= 2 * MAX_ELEMENTS])
    options: dict[str, Any] = {"base": draw.pick((10_000.0, 500_000.0, 100.0))}
    if draw.wants("start"):
        kind = draw.pick(("int", "rows", "far"))
        options["start"] = draw.pick((1, 3, 77, -5))
        if kind == "rows":
            options["start"] = draw.rng.integers(-20, 200, B).astype(np.int64)
        elif kind == "far":
            options["start"] = 8_000
    if draw.wants("rotate_heads"):
        options["rotate_heads"] = draw.pick(range(H + 1))
    return Draft({"x": draw.values(B, T, H, d)}, options)


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """cos and sin of an angle that is made in float64 in every precision.

    The angle t ω_j = t base^(-2j/d) is off by |t ω_j| (2 + ln base) u₆₄ when ω is made by way of
    exp and log; in units of the working precision that is divided by its u.
    """
    x = np.abs(v["x"])
    T, H, d = x.shape[1:]
    rotated = H if v.get("rotate_heads") is None else v["rotate_heads"]
    base = float(v["base"])
    position = np.abs(np.expand_dims(v.get("start", 0), -1) + np.arange(T))
    omega = base ** (-np.arange(0, d, 2) / d)
    angle = position[..., None, None] * omega * (2 + abs(math.log(base)))
    angle = 1 + angle * UNIT_ROUNDOFF["float64"] / u

    def turned(a: Array) -> Array:
        s = a.copy()
        both = (a[:, :, :rotated, 0::2] + a[:, :, :rotated, 1::2]) * angle
        s[:, :, :rotated, 0::2] = s[:, :, :rotated, 1::2] = both
        return s

    return {"out": Magnitude(turned(x), 5), "dx": Magnitude(turned(np.abs(dout)), 5)}


def mistakes(case: Case) -> Mistakes:
    (a, dout), o = case.in_float64(), case.options
    x, start, rotated = a["x"], o.get("start", 0), o.get("rotate_heads")
    if np.any(start):
        yield "is start ignored?", case.but(start=0)
    yield "positions off by one?", case.but(start=np.asarray(start) + 1)
    if rotated is not None:
        yield "is rotate_heads ignored?", case.but(rotate_heads=None)

    def by_halves() -> dict[str, Array]:
        """Pair coordinate j with j + d/2, as Hugging Face's Llama does."""
        half = x.shape[-1] // 2
        order = np.arange(2 * half).reshape(2, half).T.reshape(-1)
        out = ops.rope_forward(x[..., order], **o)[0][..., np.argsort(order)]
        if rotated is not None:
            out[:, :, rotated:] = x[:, :, rotated:]
        return {"out": out}

    yield "wrong pairs? it pairs j with j + d/2 rather than 2j with 2j + 1.", by_halves
    yield (
        "is the rotation the other way round?",
        lambda: {"out": ops.rope_backward(x, ops.rope_forward(x, **o)[1])},
    )
    if dout is not None:
        yield (
            "does the backward turn the same way as the forward?",
            lambda: {"dx": ops.rope_forward(dout, **o)[0]},
        )
