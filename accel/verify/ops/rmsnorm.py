"""Cases of rmsnorm."""

from collections.abc import Callable

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from accel.verify.rounding import n_rows, sum_rows
from reference.types import Array


def generate(draw: Draw) -> Draft:
    """Rows so small that ε decides, too."""
    eps = draw.pick((1e-5, 0.5, 1e-6))
    x = draw.rows(kinds=("tiny", "zero rows", "offset", "wide"))
    return Draft({"x": x, "gain": draw.values(x.shape[-1])}, {"eps": eps})


def magnitude(v: Values, dout: Array, u: float) -> Magnitudes:
    """Squares do not cancel, so r is right to a few u: r = 4 for it, then x r g and the result."""
    x, gain = np.abs(v["x"]), np.abs(v["gain"])
    rstd = 1 / root_mean_square(x, v["eps"])
    n, dn = x * rstd, np.abs(dout) * gain
    dx = rstd * (dn + n * np.mean(dn * n, axis=-1, keepdims=True))
    width = x.shape[-1]
    return {
        "out": Magnitude(n * gain, 7, width),
        "dx": Magnitude(dx, 10, 2 * width),
        "dgain": Magnitude(sum_rows(np.abs(dout) * n), 7, n_rows(x) + width),
    }


def root_mean_square(x: Array, eps: float = 0.0) -> Array:
    return np.asarray(np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def mistakes(case: Case) -> Mistakes:
    (a, dout), eps = case.in_float64(), case.options["eps"]
    x, gain = a["x"], a["gain"]

    def normed(root: Callable[[], Array]) -> Callable[[], dict[str, Array]]:
        return lambda: {"out": x / root() * gain}

    yield "is eps left out?", case.but(eps=1e-300)
    yield "is eps outside the root?", normed(lambda: root_mean_square(x) + eps)
    centred = x - np.mean(x, axis=-1, keepdims=True)
    yield (
        "is the mean taken off, as in LayerNorm?",
        lambda: {"out": centred / root_mean_square(centred) * gain},
    )
    width = x.shape[-1]
    yield "sum for mean of squares?", normed(lambda: width**0.5 * root_mean_square(x, eps / width))
    if dout is not None:
        yield (
            "is the term n · mean(dn · n) missing?",
            lambda: {"dx": dout * gain / root_mean_square(x, eps)},
        )
        yield "is dgain made of dout alone?", lambda: {"dgain": sum_rows(dout)}
