"""What rounding errors can add up to: how each room finds its s and c (see ``accel/tolerance.py``).

``magnitude`` takes the inputs of an op in float64 and returns a ``Magnitude`` for each result: the
reference's formula with every minus sign a plus and every factor its absolute value, the number r
of roundings on the longest path, and the number n of terms of its longest sum. Written in the
letters of the reference file of the same name.

Where a function bends, its slope enters s: exp(z) turns an absolute error u|z| of its argument
into a relative one, so a probability whose scores have magnitude A is off by about (1 + 2A) u, and
by u for each rounding more (``bend``). All else is first order in u.

r counts, for each op: one rounding for a product or a sum; two for a division, root, exp, log,
tanh or erf (fast ones are right to two units in the last place); one for each result that a bf16
kernel may store on the way (n in a norm, P and ds in attention, the logits).
"""

import math

import numpy as np

from accel.tolerance import Magnitude, Unit
from reference.types import Array


def n_rows(x: Array) -> int:
    return math.prod(x.shape[:-1])


def sum_rows(x: Array) -> Array:
    return np.asarray(np.sum(x, axis=tuple(range(x.ndim - 1))))


def summed(s: Array, roundings: int, terms: int, u: Unit, stored: Array) -> Magnitude:
    """Return the magnitude of sums of products, of which 16 bits round ``stored`` alone.

    Products of 16-bit numbers are exact in float32, and their sums float32's. What is rounded to u
    is what comes of them, which may be much less than the terms: a kernel that adds up in 16 bits
    is off by more.
    """
    found = Magnitude(s, roundings, terms)
    if not u.stored:
        return found
    return Magnitude(stored + (roundings + found.sums) * u.sums / u * s, 1)


def bend(top: Array, u: float, roundings: int = 1) -> Array:
    """Return what a rounding of a probability grows by when its scores have magnitude top.

    exp(z (1 + u) - lse (1 + u)) is off by a factor of up to exp(2u·top): 1 + 2·top roundings where
    u·top is small, and more where a bf16 kernel keeps large scores in bf16. Where it is rounded
    several times one of them alone grows, and what is returned is the mean.
    """
    return np.asarray(1 + np.expm1(np.minimum(2 * u * top, 40)) / u / roundings)
