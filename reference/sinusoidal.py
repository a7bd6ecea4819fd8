"""Sinusoidal positions: a constant table that is added to the embedding.

Vaswani et al. 2017, "Attention is all you need", section 3.5.

The other ways to tell a model where a token stands are ``rope.py``, ``alibi.py`` and a learned
table, which is an embedding of positions.
"""

import numpy as np
import numpy.typing as npt

from reference.types import Array


def sinusoidal_table(length: int, width: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Return PE (length, width): PE[p, 2i] = sin(p / 10000^(2i/width)), PE[p, 2i+1] the cosine.

    p is the position and i counts pairs of coordinates, from fast waves to slow ones.

    The paper multiplies the embedding by √D before adding this; the models here do not.
    """
    if width % 2:
        raise ValueError(f"sinusoidal_table: width must be even, got {width}")
    angle = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width).astype(dtype)
