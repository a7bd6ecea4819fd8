"""How far code may be from the exact result, given how far plain code of its precision is."""

import numpy as np

from reference.types import Array


def excess(theirs: Array, plain: Array, exact: Array, *, factor: float, c: float) -> float:
    """Return the largest error as a multiple of what the rule allows: at most 1 is close enough."""
    u = float(np.finfo(np.float32).eps) / 2
    worst = 0.0
    for axis in (None, -1):  # the tensor, then each row
        error = np.linalg.norm(np.asarray(theirs - exact).reshape(-1, exact.shape[-1]), axis=axis)
        own = np.linalg.norm(np.asarray(plain - exact).reshape(-1, exact.shape[-1]), axis=axis)
        size = np.linalg.norm(exact.reshape(-1, exact.shape[-1]), axis=axis)
        allowed = factor * own + c * u * size
        worst = max(worst, float(np.max(error / np.where(allowed > 0, allowed, 1e-300))))
    return worst
