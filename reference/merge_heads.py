"""From heads back to one row: the heads of a token lie side by side, and so do their gradients."""

from reference.types import Array


def forward(x: Array) -> tuple[Array, tuple[int, ...]]:
    """Return x (B, T, H, d) as (B, T, H·d), and the shape of x."""
    B, T, H, d = x.shape
    return x.reshape(B, T, H * d), x.shape


def backward(dy: Array, shape: tuple[int, ...]) -> Array:
    """Return dx (B, T, H, d)."""
    return dy.reshape(shape)
