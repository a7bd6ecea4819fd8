"""Addition with broadcasting: the residual connection, and positions added to a batch.

y = a + b. Each output element is one element of a plus one of b, so the gradient of either is the
sum of dy over every output that it took part in. Without broadcasting that is dy itself: the
residual connection passes its gradient through unchanged (He et al. 2016, "Identity mappings in
deep residual networks", eq. 5), which is what lets deep stacks train.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import check_float, check_shape
from reference.types import Array


class AddCache(NamedTuple):
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


def add_forward(a: Array, b: Array) -> tuple[Array, AddCache]:
    """Return a + b.

    Raises
    ------
    ValueError
        When the dtypes differ or the shapes do not broadcast.
    """
    check_float("add", a=a, b=b)
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(f"add: shapes {a.shape} and {b.shape} do not broadcast") from None
    return a + b, AddCache(a.shape, b.shape)


def add_backward(dout: Array, cache: AddCache) -> tuple[Array, Array]:
    """Return (da, db), each of its own array's shape."""
    shape = np.broadcast_shapes(cache.a_shape, cache.b_shape)
    check_shape("add_backward", "dout", dout, shape, "the output")
    check_float("add_backward", dout=dout)
    return _sum_to(dout, cache.a_shape), _sum_to(dout, cache.b_shape)


def _sum_to(dout: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``dout`` over the axes along which an array of ``shape`` was repeated."""
    new = dout.ndim - len(shape)
    repeated = [i + new for i, n in enumerate(shape) if n == 1 and dout.shape[i + new] != 1]
    return np.asarray(np.sum(dout, axis=(*range(new), *repeated))).reshape(shape)
