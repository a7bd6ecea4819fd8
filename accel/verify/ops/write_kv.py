"""Cases of write_kv, and where in a cache tokens are written."""

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from accel.verify.ops.kv_cache import LENGTHS
from reference import ops
from reference.types import Array, KVCache

CUTS = "L B S T Hkv d"
MAX_CACHE = 20_000  # elements of k


def places(draw: Draw, batch: int, room: int, length: int) -> int | Array:
    """Return where to write ``length`` tokens: the first places, the last, some, or by row."""
    last = room - length
    kind = draw.pick(("last", "first", "any", "rows", "ends"))
    if kind == "rows":
        return np.asarray(draw.rng.integers(0, last + 1, batch), np.int64)
    if kind == "ends":
        return np.asarray(np.where(np.arange(batch) % 2, last, 0), np.int64)
    if kind == "any":
        return draw.pick(range(last + 1))
    return last if kind == "last" else 0


def generate(draw: Draw) -> Draft:
    """One token and several, at the same place of each row and not, over what stands there."""
    B, L, heads = draw.pick((1, 2, 3)), draw.pick((1, 2, 3)), draw.pick((1, 2, 3))
    d, room = draw.pick((1, 2, 3, 8, 17, 64)), draw.pick(LENGTHS)
    T = draw.pick([n for n in (1, 2, 3, 7, 16, 17, room) if n <= room])
    while L * B * room * heads * d > MAX_CACHE:
        d = max(1, d // 2)
    arrays = {
        "cache.k": draw.normal(L, B, room, heads, d),
        "cache.v": draw.normal(L, B, room, heads, d),
        "k": draw.values(B, T, heads, d),
        "v": draw.values(B, T, heads, d),
    }
    position = places(draw, B, room, T)
    return Draft(arrays, {"layer": draw.pick(range(L)), "position": position})


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
