"""Is this backward right? Compare it with a difference quotient of its forward.

A backward computes Jᵀu, J the Jacobian of the forward and u the gradient that arrives (the
cotangent). For any direction v, ⟨v, Jᵀu⟩ = ⟨Jv, u⟩, and Jv is a directional derivative, which
needs only forwards. One random direction touches every element of the gradient, so the check costs
a handful of forwards at any size; a random cotangent keeps errors from cancelling as they do under
a cotangent of ones (a softmax backward that returned zeros would pass that).

The derivative is the central difference D(h) = (f(x + hv) - f(x - hv))/2h with its leading error
term, in h², removed by Richardson's extrapolation: (4 D(h/2) - D(h))/3 is off by O(h⁴). Which h is
best depends on the curvature against the rounding, so the best of three is taken. In float64 a
right backward agrees to about 1e-10; the bar is 1e-7. Where a gradient almost vanishes (RMSNorm of
a single coordinate, say, is its sign), the rounding of f alone makes up the quotient, so what
rounding can account for, about ε Σ|f ∘ u|/h with ε the rounding of a number near 1, is never held
against the backward.

The method is that of HIPS/autograd's ``check_vjp``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from reference.types import Array

STEPS = (1e-4, 1e-5, 1e-6)


class DirectionCheck(NamedTuple):
    """The comparison for one input."""

    name: str
    analytic: float  # ⟨v, Jᵀu⟩, by the backward
    numeric: float  # ⟨Jv, u⟩, by differences of the forward
    error: float  # |analytic - numeric| / max(|analytic|, ‖Jᵀu‖, rounding / tolerance)


class GradientError(AssertionError):
    """A backward disagrees with its forward."""


def check_vjp(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[[Any, Any], Any],
    arrays: Mapping[str, Array],
    *,
    seed: int = 0,
    tolerance: float = 1e-7,
    steps: tuple[float, ...] = STEPS,
    smooth: Callable[[str, Array, Array], bool] | None = None,
) -> list[DirectionCheck]:
    """Check the gradient of each input along one random direction.

    Parameters
    ----------
    forward : callable
        ``forward(**arrays) -> (out, cache)``, out an array, a tuple of arrays, or a ``Loss``.
        Options and arrays without a gradient are bound beforehand, with ``functools.partial``.
    backward : callable
        ``backward(dout, cache) -> gradients`` in the order of ``arrays``: one array or a tuple.
    arrays : mapping of str to float64 array
        The differentiable inputs by parameter name.
    seed : int
        Draws the cotangent and the directions.
    tolerance : float
        Largest allowed error: 1e-7 suits an op, 1e-6 a whole model.
    steps : tuple of float
        The h to choose from. v is drawn from the standard normal distribution, so h is about how
        far each element moves.
    smooth : callable, optional
        ``smooth(name, behind, ahead)`` says whether the forward is smooth between two values of an
        input. A model with ReLU is not where a pre-activation changes its sign; a step across such
        a kink measures the kink and is left out.

    Returns
    -------
    list of DirectionCheck
        One for each input, when all are within the tolerance.

    Raises
    ------
    GradientError
        When an input's gradient is off, missing, misshapen or not finite, or no step is smooth.
        The message gives both numbers for each offender.
    ValueError
        When an input is not float64: differences in float32 cannot decide at this tolerance.
    """
    if not arrays or not all(array.size for array in arrays.values()):
        raise ValueError("check_vjp needs inputs with at least one element: nothing to move")
    for name, array in arrays.items():
        if array.dtype != np.float64:
            raise ValueError(f"check_vjp works in float64, but {name} is {array.dtype}")
    rng = np.random.default_rng(seed)
    out, cache = forward(**arrays)
    u = [rng.standard_normal(part.shape) for part in _parts(out)]
    gradients = backward(_like(out, u), cache)
    gradients = tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,)
    # a None behind the last input stands for an array that was not given: a bias, say
    if len(gradients) < len(arrays) or any(g is not None for g in gradients[len(arrays) :]):
        raise GradientError(f"{len(arrays)} inputs, but the backward returned {len(gradients)}")

    # what rounding alone makes of a difference quotient at the widest step
    size_of_terms = sum(float(np.sum(np.abs(f * w))) for f, w in zip(_parts(out), u, strict=True))
    rounding = 4 * float(np.finfo(np.float64).eps) * size_of_terms / max(steps)
    checks = []
    for (name, array), gradient in zip(arrays.items(), gradients, strict=False):
        if gradient is None or np.shape(gradient) != array.shape:
            found = "no gradient" if gradient is None else f"shape {np.shape(gradient)}"
            raise GradientError(f"{name} has shape {array.shape}, but its gradient has {found}")
        if not np.isfinite(gradient).all():
            raise GradientError(f"the gradient of {name} is not finite")
        v = rng.standard_normal(array.shape)

        def along(h: float, name: str = name, v: Array = v) -> float:
            ahead = _parts(forward(**{**arrays, name: arrays[name] + h * v})[0])
            behind = _parts(forward(**{**arrays, name: arrays[name] - h * v})[0])
            # the difference first, element by element: it is small, ⟨f, u⟩ need not be
            pairs = zip(ahead, behind, u, strict=True)
            return sum(float(np.sum((a - b) * w)) for a, b, w in pairs) / (2 * h)

        usable = [h for h in steps if smooth is None or smooth(name, array - h * v, array + h * v)]
        if not usable:
            raise GradientError(f"every step along the direction of {name} crosses a kink; reseed")
        analytic = float(np.sum(gradient * v))
        numerics = [(4 * along(h / 2) - along(h)) / 3 for h in usable]
        numeric = min(numerics, key=lambda c: abs(analytic - c))
        size = max(abs(analytic), float(np.linalg.norm(gradient)), rounding / tolerance)
        gap = abs(analytic - numeric)
        error = gap / size if size else (math.inf if gap else 0.0)
        checks.append(DirectionCheck(name, analytic, numeric, error))

    wrong = [check for check in checks if not check.error <= tolerance]
    if wrong:
        raise GradientError(
            "; ".join(
                f"gradient of {check.name}: the backward says {check.analytic:.12g} along a random "
                f"direction, differences of the forward say {check.numeric:.12g} "
                f"(relative error {check.error:.1e}, allowed {tolerance:.0e})"
                for check in wrong
            )
        )
    return checks


def _parts(out: Any) -> list[Array]:
    """Return an op's differentiable outputs as arrays: of a ``Loss``, the total."""
    if hasattr(out, "total"):
        return [np.asarray(out.total)]
    return list(out) if isinstance(out, tuple) else [out]


def _like(out: Any, u: list[Array]) -> Any:
    """Return the cotangents in the form that the backward takes them."""
    if hasattr(out, "total"):
        return float(u[0])
    return tuple(u) if isinstance(out, tuple) else u[0]
