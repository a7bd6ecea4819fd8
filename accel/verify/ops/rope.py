"""Cases of rope."""

import math
from typing import Any

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF
from accel.verify.contract import Case
from accel.verify.draw import LENGTHS, LONG_LENGTHS, MAX_ELEMENTS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference.rope import frequencies, stretch
from reference.types import Array, RopeScaling

WEIGHT = 1.5
CUTS = "B T H"


SCALINGS = (
    RopeScaling(8.0, 1.0, 4.0, 8192.0),  # Llama 3.1's
    RopeScaling(32.0, 1.0, 4.0, 64.0),  # of narrow heads too some pairs are in the band
    RopeScaling(2.5, 0.5, 3.0, 16.0),
)
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "B": 2, "T": 17, "H": 3, "d": 8, "start": True, "starts": "far rows"},
    {"long": False, "B": 3, "T": 4, "H": 4, "d": 4, "start": False, "rotate_heads": True},
    {
        "long": False,
        "B": 2,
        "T": 33,
        "H": 2,
        "d": 34,
        "start": True,
        "starts": "far",
        "far": 131_071,
    },
    {"long": False, "B": 1, "T": 129, "H": 1, "d": 64, "base": 500_000.0, "start": False},
    {"long": False, "B": 3, "T": 5, "H": 7, "d": 2, "start": True, "starts": "rows"},
    {"long": True, "T": 4_097, "start": False},
    {"long": False, "B": 2, "T": 7, "H": 3, "d": 6, "special": "nan", "where": "x"},
    {
        "long": False,
        "B": 2,
        "T": 2,
        "H": 2,
        "d": 2,
        "start": True,
        "starts": "far",
        "far": 2**31 - 66,
    },
    {"long": False, "B": 3, "T": 3, "H": 3, "d": 4, "layout": "transposed", "laid": "all"},
    {"long": False, "T": 16, "start": True, "starts": "int", "rotate_heads": True},
    {"long": True, "T": 65_537, "start": True},
    {"long": False, "B": 2, "T": 33, "H": 2, "d": 16, "scaling": True, "scaled": SCALINGS[1]},
)
FAR = (8_000, 32_760, 65_530, 131_071, 2**24 + 1, 2**31 - 66)


def generate(draw: Draw) -> Draft:
    """Positions up to the last that an index of 32 bits has, the first below zero."""
    if draw.rarely("long"):
        B, T, H, d = 1, draw.pick(LONG_LENGTHS, "T"), 1, 2
    else:
        B, T, H = (
            draw.pick((1, 2, 3), "B"),
            draw.pick(LENGTHS, "T"),
            draw.pick((1, 2, 3, 4, 7), "H"),
        )
        widths = (2, 4, 6, 8, 16, 34, 64, 80, 128, 130, 256)
        d = draw.pick([n for n in widths if B * T * H * n <= 2 * MAX_ELEMENTS], "d")
    options: dict[str, Any] = {"base": draw.pick((10_000.0, 500_000.0, 100.0), "base")}
    if draw.wants("start"):
        kind = draw.pick(("int", "rows", "far", "far rows"), "starts")
        options["start"] = draw.pick((1, 3, 77, -5), "near")
        if kind == "rows":
            options["start"] = draw.rng.integers(-20, 200, B).astype(np.int64)
        elif kind == "far":
            options["start"] = draw.pick([n for n in FAR if n + T < 2**31], "far")
        elif kind == "far rows":
            options["start"] = draw.rng.integers(0, 2**31 - T, B).astype(np.int64)
    if draw.wants("rotate_heads"):
        options["rotate_heads"] = draw.pick(range(H + 1), "rotated")
    if draw.wants("scaling"):
        options["scaling"] = draw.pick(SCALINGS, "scaled")
    return Draft({"x": draw.values(B, T, H, d)}, options)


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """cos and sin of an angle that is made in float64 in every precision.

    The angle t ω_j = t base^(-2j/d) is off by |t ω_j| (2 + ln base) u₆₄ when ω is made by way of
    exp and log; in units of the working precision that is divided by its u. Scaling adds what is
    lost where the frequency goes over from one to another: ω' = ω (kept + (1 - kept) / factor).
    """
    x = np.abs(v["x"])
    T, H, d = x.shape[1:]
    rotated = H if v.get("rotate_heads") is None else v["rotate_heads"]
    base = float(v["base"])
    position = np.abs(np.expand_dims(v.get("start", 0), -1) + np.arange(T))
    off = np.full(d // 2, 2 + abs(math.log(base)))
    if v.get("scaling") is not None:
        factor, low, high, original = v["scaling"]
        omega = frequencies(base, d)
        turns, divided = original * omega / (2 * np.pi), stretch(omega, v["scaling"])
        band = (divided > 1) & (divided < factor)
        off = off + 4 + band * divided * (off + 4) * turns / (high - low)
    angle = position[..., None, None] * frequencies(base, d, v.get("scaling")) * off
    angle = 1 + angle * UNIT_ROUNDOFF["float64"] / u

    def turned(a: Array) -> Array:
        s = a.copy()
        both = (a[:, :, :rotated, 0::2] + a[:, :, :rotated, 1::2]) * angle
        s[:, :, :rotated, 0::2] = s[:, :, :rotated, 1::2] = both
        return s

    return {"out": Magnitude(turned(x), 5), "dx": Magnitude(turned(np.abs(dout)), 5)}


def mistakes(case: Case) -> Mistakes:
    start, rotated = case.options.get("start", 0), case.options.get("rotate_heads")
    if np.any(start):
        yield "is start ignored?", case.but(start=0)
    yield "is the option base ignored (10,000 taken instead)?", case.but(base=10_000.0)
    if case.options.get("scaling") is not None:
        yield "is scaling ignored?", case.but(scaling=None)
    if rotated is not None:
        yield "is rotate_heads ignored?", case.but(rotate_heads=None)
