"""ALiBi: lower each attention score in proportion to the distance (Press, Smith & Lewis 2022)."""

import math

import numpy as np
import numpy.typing as npt

from reference.types import Array


def alibi_slopes(n_heads: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Return the slopes m_h > 0 of ALiBi, shape (n_heads,).

    The score of a query at t with a key at u gets -m_h (t - u). For a power of two n the slopes are
    the geometric sequence 2^(-8/n), 2^(-16/n), …, 2^(-8) (Press et al. 2022, section 3). For other
    counts, by the authors' code: those of the nearest lower power of two, then every second one of
    the next power's, which interleave. Texts that write the bias as +m (i - j) for key i and query
    j, or with m negative, mean the same penalty.
    """
    if n_heads < 1:
        raise ValueError(f"alibi_slopes: n_heads must be positive, got {n_heads}")
    lower = 2 ** int(math.log2(n_heads))
    slopes = _geometric(lower)
    if lower < n_heads:
        slopes = np.concatenate([slopes, _geometric(2 * lower)[0::2][: n_heads - lower]])
    return slopes.astype(dtype)


def _geometric(n: int) -> Array:
    return np.asarray(2.0 ** (-8.0 * np.arange(1, n + 1) / n))
