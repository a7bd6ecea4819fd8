"""GELU by tanh, as GPT-2 has it; ``gelu.py`` has the function that it approximates.

Hendrycks & Gimpel 2016, section 2: y = ½ x (1 + h) with h = tanh(c (x + a x³)), c = √(2/π) and
a = 0.044715. tanh' = 1 - tanh², so by the product rule::

    dx = dy (½ (1 + h) + ½ x (1 - h²) c (1 + 3 a x²))
"""

import math

import numpy as np

from reference.types import Array

_C = math.sqrt(2 / math.pi)
_A = 0.044715


def forward(x: Array) -> tuple[Array, Array]:
    """Return y, of x's shape, and x."""
    return 0.5 * x * (1 + np.tanh(_C * (x + _A * x * x * x))), x


def backward(dy: Array, x: Array) -> Array:
    """Return dx."""
    h = np.tanh(_C * (x + _A * x * x * x))
    slope = 0.5 * (1 + h) + 0.5 * x * (1 - h * h) * _C * (1 + 3 * _A * x * x)
    return np.asarray(dy * slope)
