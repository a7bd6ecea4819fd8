"""Adding one array onto another in place: how micro-batch gradients meet."""

from reference.types import Array


def accumulate(dst: Array, src: Array) -> None:
    """Add ``src`` onto ``dst``."""
    dst += src
