"""How close is close: the rule that fast code is held to.

One tolerance for everything is wrong everywhere: too loose for an addition, too tight for attention
over large scores. A kernel is instead measured by what plain code does in the same precision, as
flash-attention's own tests do (Dao et al. 2022)::

    ‖err‖ ≤ k ‖plain err‖ + c u s        k = 2, for gradients 3

for the whole tensor, for each row along the last axis, and for each piece of some 256 elements of
a row, since a few wrong columns of a wide one hardly show in its norm. err is the kernel against
the float64 reference; plain err is the reference's own in the working precision; u is that
precision's unit roundoff; s is the norm of the same op on absolute values, every minus sign a plus,
which is what one rounding error can be multiplied by; c counts roundings (Higham 2002, sections 3.1
and 4.2).
Without the second term a tiny case fails by luck: the plain code may happen to make no error at
all where a correct kernel makes one.

    c = r + min(n, 4√n)

where r is the number of roundings on the longest path from an input to an output and n the number
of terms that are added up. A sum of n terms in any order is off by at most n u s (Higham 2002,
equation 4.4), and if its roundings are independent and of mean zero by more than 4√n u s only with
a chance below exp(-8) times a small number, even if every rounding goes as badly as it can (Higham
& Mary 2019, theorem 2.4). They are neither where terms are alike, as probabilities over a large
vocabulary are, and there it is r + min(n, max(4√n, 3n/8)): while a running sum stays between two
powers of two, equal terms are rounded alike. Of n equal terms t the i-th rounding is then at most
half the spacing of numbers at i t, u 2^⌊log₂(i t)⌋. Sums up to 2^k come to 2^2k u / 3t, those from
there to τ 2^k to (τ - 1) 2^2k u / t, together (τ - 2/3)/τ² n u s, which is largest, 3/8 n u s, at
τ = 4/3.

The float64 reference rounds too: c u₆₄ s is added, which matters only when the kernel itself works
in float64.

What is rounded to u, and what is not, is the precision's own (``Unit``):

=============  =====================================================================================
float64        everything
float32        everything
bf16, float16  what is kept in memory: inputs, results, whatever plain code writes on the way.
               Products and sums are float32, so there the n terms count with float32's u
tf32           the inputs of matrix products, to 10 explicit bits: two of the r roundings of a
               product. Everything else is float32, and so is an op without matrix products
e4m3, e5m2     nothing: weights and activations hold 8-bit numbers times one float32 for each array,
               so that storing them loses nothing, and all else is as in bf16
=============  =====================================================================================

float16 has less range. A number below 2^-14 is kept to the nearest multiple of 2^-24, an error of
u 2^-14 at most, whatever its own size: where a kernel may store a number p on its way, p + 2^-14
stands for p in s. Beyond 65,504 there is only infinity, so no case comes near it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reference.types import Array


class Unit(float):
    """The unit roundoff u of a precision, and what else of it enters a bound.

    Parameters
    ----------
    u : float
        Of what is rounded.
    sums : float, optional
        The unit roundoff of sums, where that is another.
    least : float
        Numbers below this that are stored on the way have an error of u·least all the same.
    stored : bool
        Whether what is written to memory on the way may be rounded to u.
    """

    def __new__(
        cls, u: float, sums: float | None = None, least: float = 1e-30, stored: bool = False
    ) -> "Unit":
        made = super().__new__(cls, u)
        made.sums, made.least, made.stored = u if sums is None else sums, least, stored
        return made

    sums: float
    # 1e-30: exp of float32 has nothing below 1e-38
    least: float
    stored: bool


_U32 = 2.0**-24
UNIT_ROUNDOFF = {
    "float64": Unit(2.0**-53),
    "float32": Unit(_U32),
    "bf16": Unit(2.0**-8, _U32, stored=True),
    "float16": Unit(2.0**-11, _U32, 2.0**-14, stored=True),
    "tf32": Unit(2.0**-11, _U32),
    "e4m3": Unit(2.0**-8, _U32, stored=True),
    "e5m2": Unit(2.0**-8, _U32, stored=True),
}

# Results smaller than this may be flushed to zero, as GPUs and fast-math kernels do; in float16,
# which is for storage, they are rounded to a multiple of it.
_UNDERFLOW = {
    "float64": float(np.finfo(np.float64).tiny),
    "float16": 2.0**-24,
}
_TINY = float(np.finfo(np.float32).tiny)
_SMALL = 1e-60  # norms of numbers from here to 1/_SMALL need no scaling
_PIECE = 256  # elements of a row that are judged by themselves


class Magnitude(NamedTuple):
    """What the roundings of an op can add up to."""

    s: Array  # the op on absolute values, of the result's shape
    roundings: int  # r
    terms: int = 1  # n
    alike: bool = False  # whether the terms may be nearly equal

    @property
    def sums(self) -> float:
        """What adding up the terms may come to, in units of u s."""
        known = 4 * self.terms**0.5
        return min(self.terms, max(known, 3 / 8 * self.terms) if self.alike else known)


class Closeness(NamedTuple):
    """How far a result is from the float64 reference, and how far it may be."""

    error: float  # ‖err‖ / ‖exact‖ of the whole tensor; ‖err‖ where exact is zero
    bound: float  # what the rule allows, in the same unit
    ratio: float  # the worst ‖err‖ / allowed over the tensor and its rows; above 1 is wrong
    row: tuple[int, ...]  # the row along the last axis with the worst ratio

    @property
    def ok(self) -> bool:
        return self.ratio <= 1


def round_bits(x: Array, bits: int) -> Array:
    """Return x as float32 with so many low bits rounded away, to the nearest, ties to even."""
    x = np.asarray(x, np.float32)
    word = x.view(np.uint32) if x.ndim else x.reshape(1).view(np.uint32).reshape(())
    odd = (word >> np.uint32(bits)) & np.uint32(1)
    kept = (word + np.uint32(2 ** (bits - 1) - 1) + odd) & np.uint32(2**32 - 2**bits)
    return np.where(np.isfinite(x), np.asarray(kept, np.uint32).view(np.float32), x)


def round_bf16(x: Array) -> Array:
    """Return x rounded to the nearest bfloat16 (ties to even), as float32 of x's shape."""
    return round_bits(x, 16)


def round_tf32(x: Array) -> Array:
    """Return x rounded to 10 explicit bits (ties to even), as float32 of x's shape."""
    return round_bits(x, 13)


def round_float16(x: Array) -> Array:
    """Return x rounded to the nearest float16, as float32 of x's shape."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float16).astype(np.float32)


# Micikevicius et al. 2022, "FP8 formats for deep learning", table 1: the explicit bits of the
# mantissa, the exponent of the smallest normal number, the largest number.
FP8 = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}


def round_fp8(x: Array, dtype: str) -> Array:
    """Return x rounded to the nearest e4m3 or e5m2 (ties to even), as float32 of x's shape.

    What is beyond the largest number becomes that one, as ``cvt.rn.satfinite`` makes it.
    """
    bits, least, largest = FP8[dtype]
    x = np.asarray(x, np.float32)
    _, exponent = np.frexp(x)  # x = m 2^exponent with m in [½, 1)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, least) - bits)
    return np.asarray(np.clip(np.round(x / step) * step, -largest, largest), np.float32)


def scaled_fp8(x: Array, dtype: str) -> Array:
    """Return x stored in 8 bits with one scale, its largest magnitude over the largest number.

    Storing the result in the same way gives the same numbers again.
    """
    x = np.asarray(x, np.float32)
    largest = np.float32(FP8[dtype][2])
    top = np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
    if top == 0:
        return x
    scale = np.float32(top / largest)
    return np.where(np.isfinite(x), scale * round_fp8(x / scale, dtype), x).astype(np.float32)


def round_to(x: Array, dtype: str) -> Array:
    """Return x as an array of a precision holds it: float64, or float32 that has such values."""
    if dtype == "float64":
        return np.asarray(x, np.float64)
    rounds: dict[str, Callable[[Array], Array]] = {"bf16": round_bf16, "float16": round_float16}
    if dtype in FP8:
        return scaled_fp8(x, dtype)
    return rounds[dtype](x) if dtype in rounds else np.asarray(x, np.float32)


class Allowed(NamedTuple):
    """What a result may be off by: the rule, before there is a result."""

    exact: Array
    by_row: Array  # ‖err‖ that each piece of a row may have
    total: float  # ‖err‖ that the whole may have
    size: float  # ‖exact‖, 1 where that is zero

    def closeness(self, got: Array) -> Closeness:
        """Hold a result to it."""
        with np.errstate(invalid="ignore"):  # a NaN is found out by ``_ratio``
            err = _norms(np.asarray(got, np.float64) - self.exact)
        error = float(np.linalg.norm(err))
        over = _ratio(np.append(err, error), np.append(self.by_row, self.total))
        by_row, ratio = over[:-1], float(np.max(over))
        rows = np.shape(self.exact)[:-1]
        worst = int(np.argmax(by_row)) // _pieces(np.shape(self.exact)) if len(by_row) else 0
        return Closeness(
            error / self.size,
            self.total / self.size,
            ratio,
            tuple(int(i) for i in np.unravel_index(worst, rows)) if rows and len(by_row) else (),
        )


def allowed(
    exact: Array, plain: Array, magnitude: Magnitude, dtype: str, *, gradient: bool
) -> Allowed:
    """Return what the rule allows.

    Parameters
    ----------
    exact, plain : arrays of one shape
        The float64 reference's result, and the reference's in the working precision.
    magnitude : Magnitude
        s, of the same shape, and the numbers that make c.
    dtype : str
        The working precision, one of ``UNIT_ROUNDOFF``.
    gradient : bool
        Whether k is 3 rather than 2.
    """
    u = UNIT_ROUNDOFF[dtype]
    underflow = 16 * _UNDERFLOW.get(dtype, _TINY)
    c_u = magnitude.roundings * u + magnitude.sums * u.sums
    c_u += (magnitude.roundings + magnitude.sums) * UNIT_ROUNDOFF["float64"]
    k = 3 if gradient else 2

    exact = np.asarray(exact, np.float64)
    width = -(-(exact.shape[-1] if exact.ndim else 1) // _pieces(exact.shape))
    plain_err, s = _norms(np.asarray(plain, np.float64) - exact), _norms(magnitude.s)
    total = k * float(np.linalg.norm(plain_err)) + c_u * float(np.linalg.norm(s))
    return Allowed(
        exact,
        k * plain_err + c_u * s + width * underflow * (s > 0),
        total + exact.size * underflow * bool(np.any(s)),
        float(np.linalg.norm(_norms(exact))) or 1.0,
    )


def compare(
    got: Array, exact: Array, plain: Array, magnitude: Magnitude, dtype: str, *, gradient: bool
) -> Closeness:
    """Hold a result to the rule; the arguments are those of ``allowed``."""
    return allowed(exact, plain, magnitude, dtype, gradient=gradient).closeness(got)


def _pieces(shape: tuple[int, ...]) -> int:
    """Return into how many pieces, alike in width, each row is cut."""
    return max(1, shape[-1] // _PIECE) if shape else 1


def _norms(x: Array) -> Array:
    """Return the norm of each piece of each row."""
    x = np.asarray(x, np.float64)
    pieces, shape = _pieces(x.shape), x.shape or (1,)
    width = -(-shape[-1] // pieces)
    x = x.reshape(math.prod(shape[:-1]), shape[-1])
    if pieces * width > shape[-1]:
        x = np.pad(x, ((0, 0), (0, pieces * width - shape[-1])))
    x = x.reshape(len(x) * pieces, width)
    squares = np.einsum("ij,ij->i", x, x)
    # a row is scaled where its squares would underflow or overflow
    far = ~((squares > _SMALL**2) & (squares < 1 / _SMALL**2))
    if far.any():
        far &= x.any(axis=-1)
    if far.any():
        rows = x[far]
        top = np.maximum(rows.max(axis=-1, initial=0.0), -rows.min(axis=-1, initial=0.0))
        scale = np.where((top > 0) & (top < np.inf), top, 1.0)
        rows = rows / scale[:, None]
        norms = np.sqrt(squares)
        norms[far] = scale * np.sqrt(np.einsum("ij,ij->i", rows, rows))
        return norms
    return np.asarray(np.sqrt(squares))


def _ratio(err: Array, allowed: Array) -> Array:
    """Return err / allowed; nothing over nothing is 0, a NaN is infinitely wrong."""
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.where(err == 0, 0.0, err / allowed)
    return np.asarray(np.where(np.isnan(over), np.inf, over))
