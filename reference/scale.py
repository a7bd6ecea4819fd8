"""Multiplication by a constant: y = c x, so dx = c dy."""

from reference.types import Array


def forward(x: Array, factor: float) -> tuple[Array, float]:
    """Return y (...) and the factor c."""
    return x * factor, factor


def backward(dy: Array, factor: float) -> Array:
    """Return dx."""
    return dy * factor
