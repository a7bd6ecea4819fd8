"""The linear layer: y = x W + b, rows of x in, rows of y out.

With y_no = Σ_i x_ni W_io + b_o and dy the gradient of the loss with respect to y::

    dx_ni = Σ_o dy_no ∂y_no/∂x_ni = Σ_o dy_no W_io      dx = dy Wᵀ
    dW_io = Σ_n dy_no x_ni                              dW = xᵀ dy
    db_o  = Σ_n dy_no                                   db = Σ_n dy_n

The head of a language model is a linear layer whose weight is stored as (V, D), the shape of the
embedding table it may be tied to; ``logits`` applies it.
"""

from typing import NamedTuple

import numpy as np

from reference.checks import (
    check_dout,
    check_float,
    check_rows,
    check_shape,
    given_again,
    write_out,
)
from reference.types import Array


class LinearCache(NamedTuple):
    x: Array | None  # (..., I); None when the backward is to be given it again
    weight: Array  # (I, O)
    has_bias: bool
    x_shape: tuple[int, ...]


def linear_forward(
    x: Array, weight: Array, bias: Array | None = None, *, keep_x: bool = True
) -> tuple[Array, LinearCache]:
    """Return x W + b, shape (..., O).

    Parameters
    ----------
    x : (..., I)
    weight : (I, O)
    bias : (O,), optional
    keep_x : bool
        False leaves x out of the cache, for callers that make it again in the backward.

    Raises
    ------
    ValueError
        When the widths do not fit or the dtypes differ.
    """
    check_float("linear", x=x, weight=weight, bias=bias)
    check_linear(x, weight, bias)
    out = x @ weight
    if bias is not None:
        out = out + bias
    return out, LinearCache(x if keep_x else None, weight, bias is not None, x.shape)


def linear_backward(
    dout: Array,
    cache: LinearCache,
    *,
    x: Array | None = None,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dweight, dbias); dbias is None when the forward had no bias.

    Raises
    ------
    ValueError
        When x is given although the forward kept it, or not given although it did not.
    """
    kept, weight, has_bias, x_shape = cache
    x = given_again("linear", kept, x, x_shape)
    check_dout("linear", dout, (*x_shape[:-1], weight.shape[1]), weight)
    rows = dout.reshape(-1, weight.shape[1])
    dx = dout @ weight.T
    dweight = x.reshape(-1, weight.shape[0]).T @ rows
    dbias = np.sum(rows, axis=0) if has_bias else None
    if out is not None:
        write_out(out[0], dweight)
        if dbias is not None:
            write_out(out[1], dbias)
    return dx, dweight, dbias


def logits(x: Array, head: Array, bias: Array | None = None) -> Array:
    """Return x headᵀ + bias, shape (..., V): one score for each entry of the vocabulary.

    Parameters
    ----------
    x : (..., D)
    head : (V, D)
    bias : (V,), optional
    """
    check_float("logits", x=x, head=head, bias=bias)
    check_head("logits", x, head, bias)
    out = x @ head.T
    if bias is not None:
        out = out + bias
    return out


def check_linear(x: Array, weight: Array, bias: Array | None) -> None:
    """Raise unless x (..., I), weight (I, O) and bias (O,) fit together."""
    check_rows("linear", x)
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        hint = "; is it transposed?" if weight.ndim == 2 and weight.shape[1] == x.shape[-1] else ""
        raise ValueError(
            f"linear: weight must be (in, out) with in = {x.shape[-1]}, the last axis of x "
            f"{x.shape}, got {weight.shape}{hint}"
        )
    if bias is not None:
        check_shape("linear", "bias", bias, weight.shape[1:], f"weight {weight.shape}")


def check_head(op: str, x: Array, head: Array, bias: Array | None) -> None:
    """Raise unless x (..., D), head (V, D) and bias (V,) fit together."""
    check_rows(op, x)
    if head.ndim != 2 or head.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: head must be (V, {x.shape[-1]}) to match x {x.shape}, got {head.shape}"
        )
    if bias is not None:
        check_shape(op, "bias", bias, head.shape[:1], f"head {head.shape}")
