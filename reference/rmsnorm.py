"""RMSNorm: divide each row by its root mean square, then scale each coordinate.

Zhang & Sennrich 2019, "Root mean square layer normalization", eq. 4, with ε inside the root as
Llama and others have it (the paper has none)::

    r = 1/√(mean_i(x_i²) + ε)        n_i = x_i r        y_i = n_i g_i

Backward. Write dn_i = dy_i g_i. Every x_i enters n_i directly and all n_j through r:

    ∂r/∂x_i = -½ (mean(x²) + ε)^(-3/2) · 2x_i/D = -r³ x_i / D
    dx_i = dn_i r + Σ_j dn_j x_j ∂r/∂x_i = r dn_i - r³ (x_i/D) Σ_j dn_j x_j
         = r (dn_i - n_i mean_j(dn_j n_j))

so the component of dn along n is taken out: growing x does not change the output. The gain is met
by every row, so dg_i = Σ_rows dy_i n_i.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import (
    check_dout,
    check_float,
    check_number,
    check_rows,
    check_shape,
    write_out,
)
from reference.types import Array


class RMSNormCache(NamedTuple):
    x: Array  # (..., D)
    gain: Array  # (D,)
    rstd: Array  # (..., 1) reciprocal of the root mean square


def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> tuple[Array, RMSNormCache]:
    """Return x / √(mean(x²) + eps) · gain, shape (..., D).

    Parameters
    ----------
    x : (..., D)
    gain : (D,)
    eps : float
        Keeps a row of zeros from dividing by zero; 1e-5 in the models here.

    Raises
    ------
    ValueError
        When gain does not have the width of x or the dtypes differ.
    """
    check_float("rmsnorm", x=x, gain=gain)
    check_rows("rmsnorm", x)
    check_number("rmsnorm", "eps", eps, at_least=0)
    check_shape("rmsnorm", "gain", gain, x.shape[-1:], f"x {x.shape}")
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + float(eps))
    return x * rstd * gain, RMSNormCache(x, gain, rstd)


def rmsnorm_backward(
    dout: Array, cache: RMSNormCache, *, out: Array | None = None
) -> tuple[Array, Array]:
    """Return (dx, dgain)."""
    x, gain, rstd = cache
    check_dout("rmsnorm", dout, x.shape, x)
    n = x * rstd
    dn = dout * gain
    dx = rstd * (dn - n * np.mean(dn * n, axis=-1, keepdims=True))
    dgain = np.sum(dout * n, axis=tuple(range(dout.ndim - 1)))
    write_out(out, dgain)
    return dx, dgain
