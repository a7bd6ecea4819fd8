"""Adding one array onto another in place: how micro-batch gradients meet."""

from reference.checks import check_float, check_writable
from reference.types import Array


def accumulate(dst: Array, src: Array) -> None:
    """Add ``src`` onto ``dst`` in place; the shapes must be equal.

    Raises
    ------
    ValueError
        When the shapes or dtypes differ, or ``dst`` is read-only.
    """
    check_float("accumulate", dst=dst, src=src)
    if dst.shape != src.shape:
        raise ValueError(f"accumulate: src must have dst's shape {dst.shape}, got {src.shape}")
    check_writable("accumulate", dst=dst)
    dst += src
