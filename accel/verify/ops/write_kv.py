"""Cases of write_kv, and where in a cache tokens are written."""

from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from accel.verify.ops.kv_cache import LENGTHS, LONG_LENGTHS
from reference import ops
from reference.types import Array, KVCache

CUTS = "L B S T Hkv d"
FP8 = True
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "B": 3, "L": 2, "Hkv": 3, "d": 3, "S": 33, "T": 3, "position": "rows"},
    {"long": False, "B": 2, "L": 2, "Hkv": 2, "d": 2, "S": 2, "T": 2},
    {"long": True, "B": 2, "S": 4_099, "T": 1, "position": "last"},
    {"long": True, "B": 1, "L": 1, "Hkv": 1, "S": 65_539, "T": 1, "position": "last"},
    {"long": False, "B": 3, "L": 3, "Hkv": 1, "d": 8, "S": 65, "T": 16, "position": "ends"},
    {"long": True, "B": 3, "S": 513, "T": 7, "position": "rows"},
    {"long": False, "S": 17, "T": 7, "special": "nan", "where": "k"},
    {"long": False, "S": 129, "T": 1, "position": "first", "layout": "transposed"},
)
MAX_CACHE = 20_000  # elements of k


def places(draw: Draw, batch: int, room: int, length: int) -> int | Array:
    """Return where to write ``length`` tokens: the first places, the last, some, or by row."""
    last = room - length
    kind = draw.pick(("last", "first", "any", "rows", "ends"), "position")
    if kind == "rows":
        return np.asarray(draw.rng.integers(0, last + 1, batch), np.int64)
    if kind == "ends":
        return np.asarray(np.where(np.arange(batch) % 2, last, 0), np.int64)
    if kind == "any":
        return int(draw.rng.integers(0, last + 1))
    return last if kind == "last" else 0


def generate(draw: Draw) -> Draft:
    """One token and several, at the same place of each row and not, over what stands there."""
    B, L, heads = draw.pick((1, 2, 3), "B"), draw.pick((1, 2, 3), "L"), draw.pick((1, 2, 3), "Hkv")
    d, room = draw.pick((1, 2, 3, 8, 17, 64), "d"), draw.pick(LENGTHS, "S")
    if draw.rarely("long"):
        d, room = 1, draw.pick((*LONG_LENGTHS, 65_539), "S")
    T = draw.pick([n for n in (1, 2, 3, 7, 16, 17, room) if n <= room], "T")
    while L * B * room * heads * d > MAX_CACHE and d > 1:
        d = max(1, d // 2)
    arrays = {
        "cache.k": draw.normal(L, B, room, heads, d),
        "cache.v": draw.normal(L, B, room, heads, d),
        "k": draw.values(B, T, heads, d),
        "v": draw.values(B, T, heads, d),
    }
    position = places(draw, B, room, T)
    return Draft(arrays, {"layer": draw.pick(range(L), "layer"), "position": position})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """Copies; what lies elsewhere stays as it is, exactly."""
    cache = KVCache(*(np.zeros_like(a) for a in v["cache"]))
    ops.write_kv(cache, np.abs(v["k"]), np.abs(v["v"]), layer=v["layer"], position=v["position"])
    return {f"cache.{n}": Magnitude(np.asarray(getattr(cache, n)), 1) for n in "kv"}


def misplaced(case: Case) -> Mistakes:
    position = case.options["position"]
    yield "position off by one? it looks like one too far.", case.but(position=position + 1)
    yield "position off by one? it looks like one too few.", case.but(position=position - 1)
    if np.ndim(position):
        text = "is the first row's position taken for all rows?"
        yield text, case.but(position=int(position[0]))


def mistakes(case: Case) -> Mistakes:
    yield from misplaced(case)
    yield "k and v swapped?", case.but({"k": case.arrays["v"], "v": case.arrays["k"]})
    yield "is layer ignored?", case.but(layer=0)
