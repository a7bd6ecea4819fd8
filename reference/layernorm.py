"""LayerNorm: centre each row, divide by its standard deviation, scale and shift.

Ba, Kiros & Hinton 2016, "Layer normalization", eq. 3 with the gain and bias of section 5.1. The
variance is the population's (divide by D, not D - 1) and ε sits inside the root::

    μ = mean(x)      r = 1/√(mean((x - μ)²) + ε)      n_i = (x_i - μ) r      y_i = n_i g_i + b_i

Backward, with dn_i = dy_i g_i. As in RMSNorm the division takes out the component of dn along n;
the centring also takes out its mean, since adding a constant to x changes nothing::

    dx_i = r (dn_i - mean_j(dn_j) - n_i mean_j(dn_j n_j))
    dg_i = Σ_rows dy_i n_i           db_i = Σ_rows dy_i
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


class LayerNormCache(NamedTuple):
    n: Array  # (..., D) the normalised rows
    gain: Array  # (D,)
    rstd: Array  # (..., 1) reciprocal of the standard deviation


def layernorm_forward(
    x: Array, gain: Array, bias: Array, *, eps: float
) -> tuple[Array, LayerNormCache]:
    """Return (x - mean) / √(var + eps) · gain + bias, shape (..., D).

    Parameters
    ----------
    x : (..., D)
    gain, bias : (D,)
    eps : float

    Raises
    ------
    ValueError
        When gain or bias does not have the width of x or the dtypes differ.
    """
    check_float("layernorm", x=x, gain=gain, bias=bias)
    check_rows("layernorm", x)
    check_number("layernorm", "eps", eps, at_least=0)
    check_shape("layernorm", "gain", gain, x.shape[-1:], f"x {x.shape}")
    check_shape("layernorm", "bias", bias, x.shape[-1:], f"x {x.shape}")
    centred = x - np.mean(x, axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + float(eps))
    n = centred * rstd
    return n * gain + bias, LayerNormCache(n, gain, rstd)


def layernorm_backward(
    dout: Array,
    cache: LayerNormCache,
    *,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dx, dgain, dbias)."""
    n, gain, rstd = cache
    check_dout("layernorm", dout, n.shape, n)
    dn = dout * gain
    along_n = n * np.mean(dn * n, axis=-1, keepdims=True)
    dx = rstd * (dn - np.mean(dn, axis=-1, keepdims=True) - along_n)
    rows = tuple(range(dout.ndim - 1))
    dgain = np.sum(dout * n, axis=rows)
    dbias = np.sum(dout, axis=rows)
    if out is not None:
        write_out(out[0], dgain)
        write_out(out[1], dbias)
    return dx, dgain, dbias
