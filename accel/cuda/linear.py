"""The linear layer and the reshaping of heads: dense products go to cuBLAS.

A product of M × K by K × N takes 2·M·N·K floating-point operations; backward is two of them. In
bf16 the operands are bf16, sums are float32, and weight gradients stay float32.
"""

from typing import NamedTuple

from accel.cuda.arrays import (
    check_out,
    column_sums,
    contiguous,
    copy,
    packs,
    to_dtype,
)
from accel.cuda.device import BF16, F32, MAX_GRID_Y, Product, current, empty, is_contiguous, launch
from reference.types import Array


class LinearCache(NamedTuple):
    x: Array | None  # (..., I); None when the backward is to be given x
    weight: Array  # (I, O), of x's dtype
    has_bias: bool


def matmul(
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    plus: Array | None = None,
) -> Array:
    """Write op(a) op(b) + plus into ``out`` (M, N) and return it; all are row-major.

    ``plus`` may be ``out`` itself, and is None where nothing is to be added.
    cuBLAS reads memory by columns, so it sees aᵀ, bᵀ and outᵀ, and outᵀ = op(b)ᵀ op(a)ᵀ: the
    operands change places, and each is transposed for cuBLAS exactly when it is for us, since
    op(x)ᵀ read by columns is op(x) read by rows. A leading dimension is our row length. A product
    of bf16 goes by the algorithm that was chosen for it (``products.py``), if one was.
    """
    M, N = out.shape
    K = a.shape[0] if transpose_a else a.shape[1]
    assert (b.shape == (N, K)) if transpose_b else (b.shape == (K, N))
    assert (a.shape == (K, M)) if transpose_a else (a.shape == (M, K))
    assert is_contiguous(a) and is_contiguous(b) and is_contiguous(out)
    c = out if plus is None else plus
    assert c.shape == out.shape and c.dtype == out.dtype and is_contiguous(c)
    if not M * N * K:
        if plus is None and out.size:
            current().clear(out)
        elif c is not out:
            copy(out, c)
        return out
    device, sizes, narrow = current(), (N, M, K), out.dtype == BF16
    beta = float(plus is not None)
    product = Product(transpose_b, transpose_a, *sizes, beta, narrow, apart=c is not out)
    chosen = device.products.get(product) if a.dtype == BF16 else None
    (chosen or device.gemm_ex)(product, b, a, c, out)
    return out


def rows_of(x: Array) -> Array:
    """Return x (..., n) as a contiguous (N, n)."""
    return contiguous(x).reshape(-1, x.shape[-1])


# ---- linear --------------------------------------------------------------------------------------


def linear_forward(
    x: Array, weight: Array, bias: Array | None, *, keep_x: bool, plus: Array | None
) -> tuple[Array, LinearCache]:
    """Return x W + plus + b, shape (..., O); the bias is added to what is in memory by then."""
    weight = to_dtype(weight, x.dtype)
    rows, plus = rows_of(x), None if plus is None else rows_of(plus)
    out = matmul(rows, weight, empty((rows.shape[0], weight.shape[1]), x.dtype), plus=plus)
    if bias is not None:
        add_bias(out, bias)
    cache = LinearCache(x if keep_x else None, weight, bias is not None)
    return out.reshape(*x.shape[:-1], weight.shape[1]), cache


def linear_backward(
    dout: Array, cache: LinearCache, *, x: Array | None, out: tuple[Array | None, Array | None]
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dweight, dbias); the last two are float32."""
    kept, weight, has_bias = cache
    x = kept if x is None else x
    assert x is not None
    to_weight, to_bias = out
    rows, drows = rows_of(x), rows_of(dout)
    dweight = check_out(to_weight, weight.shape)
    dx = matmul(drows, weight, empty(rows.shape, x.dtype), transpose_b=True)
    matmul(rows, drows, dweight, transpose_a=True)
    dbias = None
    if has_bias:
        dbias = check_out(to_bias, weight.shape[1:])
        column_sums(drows, dbias)
    return dx.reshape(x.shape), dweight, dbias


def add_bias(out: Array, bias: Array) -> None:
    """Add bias (O,) to every row of out (N, O), in place."""
    N, O = out.shape  # noqa: E741
    grid = (packs(out, O), min(N, MAX_GRID_Y))
    launch("elementwise", "add_bias", grid, y=out, bias=to_dtype(bias, F32), N=N, O=O)


def logits(x: Array, head: Array, bias: Array | None) -> Array:
    """Return x headᵀ + bias, shape (..., V)."""
    rows = rows_of(x)
    out = empty((rows.shape[0], head.shape[0]), x.dtype)
    matmul(rows, to_dtype(head, x.dtype), out, transpose_b=True)
    if bias is not None:
        add_bias(out, bias)
    return out.reshape(*x.shape[:-1], head.shape[0])


# ---- heads ---------------------------------------------------------------------------------------


def split_heads_forward(
    x: Array, *, heads: tuple[int, ...]
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """Return views of x (B, T, H, d) with ``heads`` heads each, in order, and the shape of x."""
    parts, first = [], 0
    for n in heads:
        parts.append(x[:, :, first : first + n])
        first += n
    return tuple(parts), x.shape


def split_heads_backward(dout: tuple[Array, ...], x_shape: tuple[int, ...]) -> Array:
    """Return dx (B, T, H, d). Neighbouring views of one array are not copied."""
    whole = _whole(dout)
    if whole is not None:
        return whole
    dx = empty(x_shape, dout[0].dtype)
    first = 0
    for part in dout:
        copy(dx[:, :, first : first + part.shape[2]], part)
        first += part.shape[2]
    return dx


def _whole(parts: tuple[Array, ...]) -> Array | None:
    """Return the array that ``parts`` cut along axis 2, when they are views of exactly that."""
    base = parts[0].base
    B, T, _, d = parts[0].shape
    n_heads = sum(part.shape[2] for part in parts)
    if base is None or getattr(base, "shape", None) != (B, T, n_heads, d):
        return None
    address = current().address(base)
    for part in parts:
        if current().address(part) != address or part.strides != base.strides:
            return None
        address += part.shape[2] * part.strides[2]
    return base


def merge_heads_forward(x: Array) -> tuple[Array, tuple[int, ...]]:
    """Return x (B, T, H, d) as (B, T, H·d), and the shape of x."""
    batch, length, n_heads, d_head = x.shape
    return contiguous(x).reshape(batch, length, n_heads * d_head), x.shape


def merge_heads_backward(dout: Array, x_shape: tuple[int, ...]) -> Array:
    """Return dx (B, T, H, d)."""
    return dout.reshape(x_shape)
