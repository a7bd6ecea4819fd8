"""Addition with broadcasting: the residual connection, and positions added to a batch.

y = a + b. Each output element is one element of a plus one of b, so the gradient of either is the
sum of dy over every output that it took part in. Without broadcasting that is dy itself: the
residual connection passes its gradient through unchanged (He et al. 2016, "Identity mappings in
deep residual networks", eq. 5), which is what lets deep stacks train.
"""

from typing import NamedTuple

import numpy as np

from reference.types import Array


class AddCache(NamedTuple):
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


def forward(a: Array, b: Array) -> tuple[Array, AddCache]:
    """Return a + b."""
    return a + b, AddCache(a.shape, b.shape)


def backward(dy: Array, cache: AddCache) -> tuple[Array, Array]:
    """Return (da, db), each of its own array's shape."""
    return _sum_to(dy, cache.a_shape), _sum_to(dy, cache.b_shape)


def _sum_to(dy: Array, shape: tuple[int, ...]) -> Array:
    """Sum dy over the axes along which an array of ``shape`` was repeated."""
    new = dy.ndim - len(shape)
    repeated = [i + new for i, n in enumerate(shape) if n == 1 and dy.shape[i + new] != 1]
    return np.asarray(np.sum(dy, axis=(*range(new), *repeated))).reshape(shape)
