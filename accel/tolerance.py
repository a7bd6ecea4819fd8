"""How close is close: the rule that fast code is held to.

One tolerance for everything is wrong everywhere: too loose for an addition, too tight for attention
over large scores. A kernel is instead measured by what plain code does in the same precision, as
flash-attention's own tests do (Dao et al. 2022)::

    ‖err‖ ≤ k ‖plain err‖ + c u s        k = 2, for gradients 3

for the whole tensor and for each row along the last axis. err is the kernel against the float64
reference; plain err is the reference's own in the working precision; u is that precision's unit
roundoff; s is the norm of the same op on absolute values, every minus sign a plus, which is what
one rounding error can be multiplied by; c counts roundings (Higham 2002, sections 3.1 and 4.2).
Without the second term a tiny case fails by luck: the plain code may happen to make no error at
all where a correct kernel makes one.

    c = r + min(n, 4√n)

where r is the number of roundings on the longest path from an input to an output and n the number
of terms that are added up. A sum of n terms in any order is off by at most n u s, and by more
than 4√n u s only with a chance below exp(-8) times a small number even if every rounding goes as
badly as it can (Higham & Mary 2019, theorem 2.4). Sums of bf16 products are kept in float32, so
there the n terms count with float32's u. The float64 reference rounds too: c u₆₄ s is added,
which matters only when the kernel itself works in float64.
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bf16": 2.0**-8}

# Results smaller than this may be flushed to zero, as GPUs and fast-math kernels do.
_UNDERFLOW = {
    "float64": float(np.finfo(np.float64).tiny),
    "float32": float(np.finfo(np.float32).tiny),
    "bf16": float(np.finfo(np.float32).tiny),
}


class Magnitude(NamedTuple):
    """What the roundings of an op can add up to."""

    s: Array  # the op on absolute values, of the result's shape
    roundings: int  # r
    terms: int = 1  # n


class Closeness(NamedTuple):
    """How far a result is from the float64 reference, and how far it may be."""

    error: float  # ‖err‖ / ‖exact‖ of the whole tensor; ‖err‖ where exact is zero
    bound: float  # what the rule allows, in the same unit
    ratio: float  # the worst ‖err‖ / allowed over the tensor and its rows; above 1 is wrong
    row: tuple[int, ...]  # the row along the last axis with the worst ratio

    @property
    def ok(self) -> bool:
        return self.ratio <= 1


def round_bf16(x: Array) -> Array:
    """Return x rounded to the nearest bfloat16 (ties to even), as float32 of x's shape."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32) if x.ndim else x.reshape(1).view(np.uint32).reshape(())
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), np.asarray(kept, np.uint32).view(np.float32), x)


def compare(
    got: Array, exact: Array, plain: Array, magnitude: Magnitude, dtype: str, *, gradient: bool
) -> Closeness:
    """Hold a result to the rule.

    Parameters
    ----------
    got, exact, plain : arrays of one shape
        The kernel's result, the float64 reference's, and the reference's in the working precision.
    magnitude : Magnitude
        s, of the same shape, and the numbers that make c.
    dtype : {"float64", "float32", "bf16"}
        The working precision.
    gradient : bool
        Whether k is 3 rather than 2.
    """
    u = UNIT_ROUNDOFF[dtype]
    sums = min(magnitude.terms, 4 * magnitude.terms**0.5)
    c_u = magnitude.roundings * u + sums * min(u, UNIT_ROUNDOFF["float32"])
    c_u += (magnitude.roundings + sums) * UNIT_ROUNDOFF["float64"]
    k = 3 if gradient else 2

    rows = np.shape(exact)[:-1]
    width = np.shape(exact)[-1] if np.ndim(exact) else 1

    def norms(x: Array) -> Array:
        # scaled, so that squares of small numbers do not underflow
        x = np.abs(np.asarray(x, np.float64).reshape(-1, width))
        top = np.max(x, axis=-1, initial=0.0)
        scale = np.where((top > 0) & np.isfinite(top), top, 1)
        return np.asarray(scale * np.sqrt(np.sum((x / scale[:, None]) ** 2, axis=-1)))

    exact = np.asarray(exact, np.float64)
    with np.errstate(invalid="ignore"):  # a NaN is found out below
        err = norms(np.asarray(got, np.float64) - exact)
    allowed = k * norms(np.asarray(plain, np.float64) - exact) + c_u * norms(magnitude.s)
    allowed = np.where(norms(magnitude.s) > 0, allowed + 16 * width * _UNDERFLOW[dtype], allowed)
    by_row = _ratio(err, allowed)

    total_err = float(np.linalg.norm(err))
    total_allowed = k * float(np.linalg.norm(norms(np.asarray(plain, np.float64) - exact)))
    total_allowed += c_u * float(np.linalg.norm(norms(magnitude.s)))
    total_allowed += 16 * exact.size * _UNDERFLOW[dtype] * bool(np.any(magnitude.s))
    total = float(_ratio(np.array(total_err), np.array(total_allowed)))

    size = float(np.linalg.norm(norms(exact))) or 1.0
    worst = int(np.argmax(by_row)) if len(by_row) else 0
    return Closeness(
        total_err / size,
        total_allowed / size,
        max(total, float(np.max(by_row, initial=0.0))),
        tuple(int(i) for i in np.unravel_index(worst, rows)) if rows and len(by_row) else (),
    )


def _ratio(err: Array, allowed: Array) -> Array:
    """Return err / allowed; nothing over nothing is 0, a NaN is infinitely wrong."""
    over = np.divide(err, allowed, out=np.full(np.shape(err), np.inf), where=allowed > 0)
    over = np.where(err == 0, 0.0, over)
    return np.asarray(np.where(np.isnan(err), np.inf, over))
