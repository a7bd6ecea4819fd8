"""The ops that compute differently in the bf16 mode: products, the loss, and what they read.

The residual stream, gradients and master weights stay float32 in memory, and so do norms, softmax,
residual sums and the optimizer (of Muon all but its products: ``bf16_muon.py``). What a product
reads is rounded to bfloat16 as it is packed into tiles: a weight by each product, an activation
when it is first multiplied. A linear layer keeps its input for the backward only in that form, at
half the size, and attention its q, k and v. So is rounded what SwiGLU and its like read (``keep``),
as autocast does in PyTorch.

The weight gradient xᵀ dy is a sum over tokens of products of bfloat16 numbers, added in float32 in
one order that follows from the shapes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from accel.cpu import bf16_attention, bf16_tiles
from accel.cpu.attention import (
    AttentionCache,
    tiled_backward,
    tiled_forward,
    view,
)
from accel.cpu.bf16_gemm import meets_few, multiply, multiply_rows
from accel.cpu.bf16_packing import A, B, pack, pack_part, pack_pieces, pack_right, panels
from accel.cpu.bf16_portable import SIDE, STEP
from accel.cpu.decode import decode, is_table
from accel.cpu.halves import BF16, to_bf16, to_float32
from accel.cpu.kernels import (
    FEW_THREADS,
    SUM,
    address,
    as_rows,
    contiguous,
    delivered,
    receiver,
    sum_rows,
)
from accel.cpu.loss import (
    Arguments,
    Gradients,
    LinearCrossEntropyCache,
    in_chunks,
    row_cross_entropy,
)
from accel.cpu.memory import empty, lasting
from accel.cpu.packing import room
from accel.cpu.simd import at, pointer
from accel.jit import jit
from accel.threads import team
from accel.transpose import transpose
from reference import kv
from reference.config import Config
from reference.types import Array, Dropout, KVCache, Loss
from reference.visibility import Visibility

CHUNK_ROWS = 256  # a chunk is a multiple of it: whole tasks of a product
AT_HAND = 2 << 20  # logits that are float32 at a time


# --- weights -------------------------------------------------------------------------------------


class Weight(np.ndarray):
    """A view of a weight in the float32 master, with the bfloat16 form that was made of it.

    To every other op it is the float32 array that it is. A product packs what it reads each time:
    to keep that would take half of the master's memory for each of two forms, and little time is
    won where a step multiplies each form once, or by many rows.
    """

    halves: Array  # uint16, the rounded weight as decoding reads it: (V, D) or (out, in)
    made: int  # after how many calls of ``parameters``

    def __array_finalize__(self, obj: object) -> None:
        self.made = -1


_latest = 0  # calls of ``parameters``


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return what the ops read: matrices as views that keep their bfloat16 form for decoding.

    To be called after each optimizer step; whoever still holds a former result gets forms of the
    present weights, as from the master itself.
    """
    global _latest
    _latest += 1
    return {
        name: array.view(Weight) if array.ndim == 2 else array for name, array in master.items()
    }


# --- decoding ------------------------------------------------------------------------------------


def to_numpy(array: Array) -> Array:
    """Return the array itself; what a KV cache keeps comes as float32."""
    return to_float32(array)


def kv_cache(params: Mapping[str, Array], config: Config, batch: int, length: int) -> KVCache:
    """Return an empty cache with room for ``length`` tokens of each of ``batch`` rows, in bf16."""
    del params
    return kv.empty_cache(config, batch, length, partial(np.zeros, dtype=BF16))


def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array) -> None:
    """Write k, v (B, T, Hkv, d) of one layer at position, position + 1, …; int or (B,).

    They are rounded to the cache's bfloat16, unless they come from a cache.
    """
    if cache.k[0].dtype == BF16:
        k, v = (x if x.dtype == BF16 else to_bf16(x) for x in (k, v))
    kv.write_kv(cache, k, v, layer=layer, position=position)


def decode_step(
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return the logits (B, V) after one more token of each row; matrices are read in bfloat16."""
    matrices = {}
    for name, weight in params.items():
        if weight.ndim == 2:
            kept = weight if isinstance(weight, Weight) else weight.view(Weight)
            if kept.made != _latest:
                halves = to_bf16(weight)
                if not is_table(name):
                    halves = transpose(halves, lasting(halves.shape[::-1], BF16))
                kept.halves, kept.made = halves, _latest
            matrices[name] = kept.halves
    return decode(params, matrices, config, token, cache, position)


def as_kept(weight: Array, rows: int, columns: int) -> Array | None:
    """Return what decoding keeps of a weight, if a product of few rows can read that instead.

    It has half of the bytes, which are what such a product waits for, as of a prompt.
    """
    if isinstance(weight, Weight) and weight.made == _latest and meets_few(rows, columns):
        return weight.halves
    return None


# --- linear --------------------------------------------------------------------------------------


class LinearCache(NamedTuple):
    x: Array | None  # xᵀ packed, left operand of the weight gradient; None: x is given
    weight: Array  # (I, O)
    x_shape: tuple[int, ...]
    has_bias: bool


def linear_forward(
    x: Array, weight: Array, bias: Array | None, *, keep_x: bool, plus: Array | None
) -> tuple[Array, LinearCache]:
    """Return x W + b + plus, shape (..., O)."""
    plus = None if plus is None else as_rows(plus)
    rows = as_rows(x)
    out = empty((len(rows), weight.shape[1]), x.dtype)
    also = A if keep_x else None
    operand = as_kept(weight, *out.shape)
    operand = contiguous(weight) if operand is None else operand.T
    packed = multiply_rows(rows, operand, out, bias=bias, plus=plus, also=also)
    out = out.reshape(*x.shape[:-1], weight.shape[1])
    return out, LinearCache(packed, weight, x.shape, bias is not None)


def linear_backward(
    dout: Array, cache: LinearCache, *, x: Array | None, out: tuple[Array | None, Array | None]
) -> tuple[Array, Array, Array | None]:
    """Return (dx, dweight, dbias); dbias is None when the forward had no bias."""
    packed, weight, x_shape, has_bias = cache
    if x is not None:
        packed = pack(as_rows(x), A, transposed=True)
    assert packed is not None
    rows = as_rows(dout)
    weight_out, bias_out = out
    dx = empty((len(rows), weight.shape[0]), dout.dtype)
    gradient = multiply_rows(rows, contiguous(weight).T, dx, also=B)
    assert gradient is not None
    dweight, elsewhere = receiver(weight_out, weight.shape, dout.dtype)
    multiply(packed, gradient, dweight)
    dweight = delivered(dweight, elsewhere)
    dbias = None
    if has_bias:
        dbias, elsewhere = receiver(bias_out, weight.shape[1:], dout.dtype)
        sum_rows(rows, dbias)
        dbias = delivered(dbias, elsewhere)
    return dx.reshape(x_shape), dweight, dbias


def keep(x: Array) -> Array:
    """Return x rounded, half as large."""
    return to_bf16(x)


# --- attention -----------------------------------------------------------------------------------


def attention_forward(
    q: Array, k: Array, v: Array, who: Visibility, *, scale: float, dropout: Dropout | None
) -> tuple[Array, AttentionCache]:
    """Return o (B, T, Hq, dv).

    Scores, softmax and sums are float32; q, k, v, the probabilities and their gradients are
    bfloat16 where they are multiplied. k and v may come from a KV cache.
    """
    bf16_tiles.enable()
    k, v = to_float32(k), to_float32(v)
    out, cache = tiled_forward(bf16_attention, q, k, v, who, scale=scale, dropout=dropout)
    q = _kept(cache.q, np.float32(scale) * bf16_attention.LOG2_E_32)
    return out, cache._replace(q=q, k=_kept(cache.k), v=_kept(cache.v))


def _kept(x: Array, factor: Any = 1) -> Array:
    """Return factor · x (B, T, H, d) as the backward reads it."""
    out = empty(x.shape, BF16)
    if out.size:
        bf16_attention.keep(view(x), np.float32(factor), address(out), *x.shape)
    return out


def attention_backward(dout: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), shaped as q, k and v."""
    return tiled_backward(bf16_attention, dout, cache)


# --- the head ------------------------------------------------------------------------------------


def logits(x: Array, head: Array, bias: Array | None) -> Array:
    """Return x headᵀ + bias, shape (..., V)."""
    rows = as_rows(x)
    out = empty((len(rows), len(head)), x.dtype)
    operand = as_kept(head, *out.shape)
    operand = contiguous(head) if operand is None else operand
    multiply_rows(rows, operand.T, out, bias=bias)
    return out.reshape(*x.shape[:-1], len(head))


def linear_cross_entropy_forward(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array | None,
    bias: Array | None,
    *,
    need_backward: bool,
) -> tuple[Loss, LinearCrossEntropyCache]:
    """Return the summed loss of the logits x headᵀ + bias, and the number of valid targets.

    As in ``loss.py``, the gradients are made while a chunk's logits are at hand. The kernel that
    turns logits into their gradient packs it for both products at once, 32 rows at a time; where
    that is too few tasks for the threads, the gradient is packed when it is complete.

    dhead is a sum over the rows of a chunk, so one of its operands is packed for all of them; the
    logits themselves, and the operand of dx, are at hand for some rows at a time. The head is
    packed once for all of these.
    """
    head = contiguous(head)
    packs: dict[bool, Array] = {}

    def right(some: Array, *, turned: bool) -> Array:
        """Return the head, or its transpose, for a product with some of the rows, or with all."""
        given = head.T if turned else head
        if len(some) == targets.size:
            return given
        if turned not in packs:
            packs[turned] = pack_right(given)
        return packs[turned]

    def step(
        rows: Array, z: Array, start: int, arguments: Arguments, gradients: Gradients
    ) -> Callable[[Array], None]:
        down, across = panels(len(rows)), panels(len(head))
        left = turned = np.empty(0, np.uint32)
        if gradients is not None:
            turned = empty((across, down, STEP), np.uint32)
            left = empty((panels(len(z)), across, STEP), np.uint32)
        for first in range(0, len(rows), len(z)):
            some = rows[first : first + len(z)]
            logits = z[: len(some)]
            multiply_rows(some, right(some, turned=True), logits, bias=bias)
            given, here = arguments(start + first, logits), panels(len(some))
            height, pieces = cut(here, across)
            packed = address(left), address(turned) + first // SIDE * STEP * 4, down
            _cross_entropy(*(*given, *packed, height))
            if gradients is not None:
                if pieces:
                    pack_pieces(*(*given[:2], *given[5:7], pieces, down, *packed[:2], 0, 0))
                dx = gradients[0][first : first + len(z)]
                multiply(left[:here], right(some, turned=False), dx)

        def make(dhead: Array) -> None:
            x_packed = pack(rows, B, transposed=False)
            multiply(turned, x_packed, dhead, accumulate=start > 0)

        if gradients is not None and gradients[1] is not None:
            make(gradients[1])
        return make

    at_hand = None  # many threads need larger products
    if team() <= FEW_THREADS:
        at_hand = max(AT_HAND // max(len(head), 1) // CHUNK_ROWS, 1) * CHUNK_ROWS
    return in_chunks(step, CHUNK_ROWS, x, head, targets, mask, bias, need_backward, at_hand)


def cut(down: int, across: int) -> tuple[int, int]:
    """Return the rows of a task of the loss, and the tasks that pack 32 rows of its gradient.

    0 of these: the rows of a task are packed by itself. Neither decides any bits.
    """
    threads = team()
    return (SIDE, 0) if down >= threads else (1, min(across, -(-2 * threads // down)))


@jit(**SUM)
def _cross_entropy(
    one: Any,
    logits: int,
    targets: int,
    mask: int,
    losses: int,
    rows: int,
    width: int,
    need_backward: bool,
    left: int,
    turned: int,
    down: int,
    height: int,
) -> None:
    """Write the loss of each row in float64, and turn the logits into their gradient.

    A task has ``height`` rows. If these are 32, of 4 V bytes each (up to V = 16,384 or so they fit
    the second-level cache), the gradient is packed as well.
    """
    target_ids, valid = pointer(targets, np.int32(0)), pointer(mask, np.uint8(0))
    all_losses = pointer(losses, np.float64(0))
    for task in prange((rows + height - 1) // height):
        spare = room(np.float32(0))
        first = task * height
        count = min(height, rows - first)
        z = at(pointer(logits, one), first * width)
        for i in range(count):
            row_cross_entropy(
                one, at(z, i * width), target_ids[first + i], valid[first + i] != 0,
                at(all_losses, first + i), width, need_backward,
            )  # fmt: skip
        if need_backward and height == SIDE:
            whole = pointer(logits, one)
            pack_part(whole, width, task, count, 0, width, down, left, turned, 0, 0, spare)
