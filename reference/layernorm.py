"""LayerNorm: centre each row, divide by its standard deviation, scale and shift.

Ba, Kiros & Hinton 2016, "Layer normalization", eq. 3 with the gain and bias of section 5.1. The
variance is the population's (divide by D, not D - 1) and ε sits inside the root::

    μ = mean_i(x_i)   c_i = x_i - μ   r = 1/√(mean_i(c_i²) + ε)   n_i = c_i r   y_i = n_i g_i + b_i

Backward. Write dn_i = dy_i g_i. From c to n it is RMSNorm (``rmsnorm.py``), so::

    dc_i = r (dn_i - n_i mean_j(dn_j n_j))

Every x_i enters c_i directly and all c_j through μ, ∂μ/∂x_i = 1/D, so dx_i = dc_i - mean_j(dc_j).
The mean of the second term of dc vanishes, as mean_i(n_i) = r mean_i(c_i) = 0, which leaves::

    dx_i = r (dn_i - mean_j(dn_j) - n_i mean_j(dn_j n_j))

The division takes out the component of dn along n (but for ε), the centring its mean: neither
growing x nor adding a constant to it changes the output. Gain and bias are met by every row::

    dg_i = Σ_rows dy_i n_i           db_i = Σ_rows dy_i
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array


class LayerNormCache(NamedTuple):
    n: Array  # (..., D) the normalised rows
    g: Array  # (D,) gain
    r: Array  # (..., 1) reciprocal of the standard deviation


def forward(x: Array, g: Array, b: Array, eps: float) -> tuple[Array, LayerNormCache]:
    """Return y (..., D)."""
    c = x - np.mean(x, axis=-1, keepdims=True)
    r = 1 / np.sqrt(np.mean(c * c, axis=-1, keepdims=True) + eps)
    n = c * r
    return n * g + b, LayerNormCache(n, g, r)


def backward(dy: Array, cache: LayerNormCache) -> tuple[Array, Array, Array]:
    """Return (dx, dg, db)."""
    n, g, r = cache
    dn = dy * g
    along_n = n * np.mean(dn * n, axis=-1, keepdims=True)
    dx = r * (dn - np.mean(dn, axis=-1, keepdims=True) - along_n)
    rows = tuple(range(dy.ndim - 1))
    dg = np.sum(dy * n, axis=rows)
    db = np.sum(dy, axis=rows)
    return dx, dg, db
