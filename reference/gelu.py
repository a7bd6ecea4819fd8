"""GELU: weigh each input by the chance that a normal variable lies below it.

Hendrycks & Gimpel 2016: y = x Φ(x), Φ the distribution function of the standard normal. Φ' is its
density φ(x) = exp(-x²/2)/√(2π), so dx = dy (Φ(x) + x φ(x)).

NumPy has no erf, so Φ(x) = erfc(-x/√2)/2 comes from the C library's erfc through ``math.erfc``,
element by element: about 0.1 µs each. Measured against 40-digit arithmetic in float64, Φ is within
7 units in the last place for |x| ≤ 2 and within 1 above. Below, x/√2 is rounded and Φ falls
steeply, so the relative error grows as x² (81 units at -8), while the absolute error stays under
1e-16. The other form, ½(1 + erf(x/√2)), would have no correct digit left at -9.

The tanh form (same paper, section 2; what GPT-2 uses): y = ½ x (1 + h) with
h = tanh(c (x + a x³)), c = √(2/π), a = 0.044715, so::

    dx = dy (½ (1 + h) + ½ x (1 - h²) c (1 + 3 a x²))
"""

import math
from typing import NamedTuple

import numpy as np

from reference.checks import check_dout, check_float
from reference.types import Array


class GELUCache(NamedTuple):
    x: Array  # (...)


def gelu_forward(x: Array) -> tuple[Array, GELUCache]:
    """Return x Φ(x), of x's shape."""
    check_float("gelu", x=x)
    return x * _normal_cdf(x), GELUCache(x)


def gelu_backward(dout: Array, cache: GELUCache) -> Array:
    """Return dx."""
    x = cache.x
    check_dout("gelu", dout, x.shape, x)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return np.asarray(dout * (_normal_cdf(x) + x * density))


_erfc = np.frompyfunc(math.erfc, 1, 1)


def _normal_cdf(x: Array) -> Array:
    return np.asarray(_erfc(-x / math.sqrt(2)), dtype=x.dtype) / 2


_C = math.sqrt(2 / math.pi)

_A = 0.044715


def gelu_tanh_forward(x: Array) -> tuple[Array, GELUCache]:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), of x's shape."""
    check_float("gelu_tanh", x=x)
    return 0.5 * x * (1 + np.tanh(_C * (x + _A * x * x * x))), GELUCache(x)


def gelu_tanh_backward(dout: Array, cache: GELUCache) -> Array:
    """Return dx."""
    x = cache.x
    check_dout("gelu_tanh", dout, x.shape, x)
    h = np.tanh(_C * (x + _A * x * x * x))
    slope = 0.5 * (1 + h) + 0.5 * x * (1 - h * h) * _C * (1 + 3 * _A * x * x)
    return np.asarray(dout * slope)
