"""Cases of embedding."""

import numpy as np

from accel.verify.contract import Case
from accel.verify.draw import WIDTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from reference import ops
from reference.types import Array


def generate(draw: Draw) -> Draft:
    """Ids that repeat, that name the first and the last row, and rows that nobody names."""
    V, D = draw.pick(WIDTHS), draw.pick(WIDTHS)
    shape = draw.shape_for(D)
    ids = draw.rng.integers(0, V, shape)
    kind = draw.pick(("random", "one id", "ends"))
    if kind == "one id":
        ids[...] = draw.pick(range(V))
    elif kind == "ends":
        ids = np.where(draw.rng.random(shape) < 0.5, 0, V - 1)
    return Draft({"ids": ids.astype(np.int32), "table": draw.values(V, D)}, {})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """A copy forward; backward a sum over the positions that share an id."""
    ids, table = v["ids"], np.abs(v["table"])
    out, cache = ops.embedding_forward(ids, table)
    most = int(np.bincount(ids.reshape(-1)).max(initial=1))
    dtable = ops.embedding_backward(np.abs(dout), cache)
    return {"out": Magnitude(out, 1), "dtable": Magnitude(dtable, 2, most)}


def mistakes(case: Case) -> Mistakes:
    a, dout = case.in_float64()

    def last_wins() -> dict[str, Array]:
        table: Array = np.zeros_like(a["table"])
        table[a["ids"].reshape(-1)] = dout.reshape(-1, table.shape[1])
        return {"dtable": table}

    if dout is not None:
        yield "is the gradient of a repeated id overwritten rather than added?", last_wins
