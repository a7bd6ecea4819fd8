"""RMSNorm: divide each row by its root mean square, then scale each coordinate.

Zhang & Sennrich 2019, "Root mean square layer normalization", eq. 4, with ε inside the root as
Llama and others have it (the paper has none)::

    r = 1/√(mean_i(x_i²) + ε)        n_i = x_i r        y_i = n_i g_i

Backward. Write dn_i = dy_i g_i. Every x_i enters n_i directly and all n_j through r:

    ∂r/∂x_i = -½ (mean(x²) + ε)^(-3/2) · 2x_i/D = -r³ x_i / D
    dx_i = dn_i r + Σ_j dn_j x_j ∂r/∂x_i = r dn_i - r³ (x_i/D) Σ_j dn_j x_j
         = r (dn_i - n_i mean_j(dn_j n_j))

so the component of dn along n is taken out: but for ε, growing x does not change the output. (With
it n·n/D = 1 - ε r², so the share ε r² of the component stays.) The gain is met by every row, so
dg_i = Σ_rows dy_i n_i.
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array


class RMSNormCache(NamedTuple):
    x: Array  # (..., D)
    g: Array  # (D,) gain
    r: Array  # (..., 1) reciprocal of the root mean square


def forward(x: Array, g: Array, eps: float) -> tuple[Array, RMSNormCache]:
    """Return y (..., D); ε keeps a row of zeros from dividing by zero, 1e-5 in the models here."""
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    n = x * r
    return n * g, RMSNormCache(x, g, r)


def backward(dy: Array, cache: RMSNormCache) -> tuple[Array, Array]:
    """Return (dx, dg)."""
    x, g, r = cache
    n = x * r
    dn = dy * g
    dx = r * (dn - n * np.mean(dn * n, axis=-1, keepdims=True))
    dg = np.sum(dy * n, axis=tuple(range(dy.ndim - 1)))
    return dx, dg
