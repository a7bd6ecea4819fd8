"""The op contract: every public op with its full signature.

A backend is a module that offers the functions of ``Ops`` below: same names, same parameters, same
results. This module is itself one (the reference), ``accel.load`` returns the fast ones, and the
models in ``model.py`` and ``encoder_decoder.py`` are written once and take such a module.

The rules that all ops obey::

    op_forward(arrays..., *, options) -> (out, cache)
    op_backward(dout, cache)          -> the gradients of the forward's differentiable arrays, in
                                         order: one array, or a tuple with None for those not given

* The cache is opaque to callers. A backend keeps in it what its own backward needs.
* dtype in = dtype out; float arrays that meet in one op have one dtype.
* Differentiable ops never write into their arguments. ``out=`` of a backward is where parameter
  gradients go: views of the flat gradient, overwritten (``embedding_backward`` adds instead when
  ``accumulate`` is set). ``accumulate``, ``adamw`` and ``write_kv`` write into what they are given.
* Token ids are int32 and 0-based, masks are bool with True = take part. ``start`` and ``position``
  are ints or, row by row, NumPy integer arrays (B,) in host memory.
* A returned array stays valid while it is referenced, except inside ``with ops.step():``, where a
  backend may reuse memory: all arrays but parameters and ``out=`` die when that block ends.

Letters: B batch, T queries, S keys, D width, V vocabulary, Hq/Hkv query/key-value heads, d head
width, F feed-forward width. The mathematics is in the file that each op is defined in.

Dropout sites (``DropoutKey.site``): 0 is the embedding, 1 an encoder's embedding, and block n has
the eight sites from 8·(n + 1); see ``block_site``. An encoder's blocks are numbered after the
decoder's.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from reference.accumulate import accumulate
from reference.adamw import adamw
from reference.add import add_backward, add_forward
from reference.attention import attention_backward, attention_forward
from reference.config import Config
from reference.dropout import dropout_backward, dropout_forward
from reference.embedding import embedding_backward, embedding_forward
from reference.gelu import gelu_backward, gelu_forward, gelu_tanh_backward, gelu_tanh_forward
from reference.global_norm import global_norm, square_sums
from reference.heads import (
    merge_heads_backward,
    merge_heads_forward,
    split_heads_backward,
    split_heads_forward,
)
from reference.kv import kv_cache, write_kv
from reference.layernorm import layernorm_backward, layernorm_forward
from reference.linear import linear_backward, linear_forward, logits
from reference.linear_cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from reference.relu import relu_backward, relu_forward
from reference.rmsnorm import rmsnorm_backward, rmsnorm_forward
from reference.rope import rope_backward, rope_forward
from reference.scale import scale_backward, scale_forward
from reference.softmax import softmax
from reference.swiglu import swiglu_backward, swiglu_forward
from reference.types import Array, DropoutKey, KVCache, Loss

__all__ = [
    "ATTENTION_BRANCH",
    "ATTENTION_PROBABILITIES",
    "CROSS_BRANCH",
    "CROSS_PROBABILITIES",
    "EMBEDDING_SITE",
    "ENCODER_EMBEDDING_SITE",
    "FFN_BRANCH",
    "Ops",
    "accumulate",
    "adamw",
    "add_backward",
    "add_forward",
    "attention_backward",
    "attention_forward",
    "block_site",
    "decode_step",
    "dropout_backward",
    "dropout_forward",
    "embedding_backward",
    "embedding_forward",
    "from_numpy",
    "gelu_backward",
    "gelu_forward",
    "gelu_tanh_backward",
    "gelu_tanh_forward",
    "global_norm",
    "kv_cache",
    "layernorm_backward",
    "layernorm_forward",
    "linear_backward",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_forward",
    "linear_forward",
    "logits",
    "merge_heads_backward",
    "merge_heads_forward",
    "parameters",
    "relu_backward",
    "relu_forward",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "rope_backward",
    "rope_forward",
    "scale_backward",
    "scale_forward",
    "softmax",
    "split_heads_backward",
    "split_heads_forward",
    "square_sums",
    "step",
    "swiglu_backward",
    "swiglu_forward",
    "to_numpy",
    "write_kv",
]

EMBEDDING_SITE = 0
ENCODER_EMBEDDING_SITE = 1
ATTENTION_PROBABILITIES, ATTENTION_BRANCH, CROSS_PROBABILITIES, CROSS_BRANCH, FFN_BRANCH = range(5)


def block_site(block: int, kind: int) -> int:
    """Return the dropout site of one kind (``FFN_BRANCH``, …) in one block."""
    return 8 * (block + 1) + kind


class Ops(Protocol):
    """The functions that a backend module offers."""

    # ---- arrays in and out -------------------------------------------------------------------

    def from_numpy(self, array: Array, *, activation: bool = False) -> Array:
        """Take an array over; as an ``activation``, floats become the backend's activation type."""

    def to_numpy(self, array: Array) -> Array:
        """Give an array back as NumPy's; an activation type NumPy lacks comes as float32."""

    def parameters(self, master: Mapping[str, Array]) -> dict[str, Array]:
        """Make, once after each optimizer step, the weights that the ops read.

        The identity here; low-precision copies or packed tiles elsewhere. Ops accept plain weights
        too.
        """

    def step(self) -> AbstractContextManager[None]:
        """Open a scope in which the backend may reuse memory for activations and gradients."""

    # ---- differentiable ops ------------------------------------------------------------------

    def add_forward(self, a: Array, b: Array) -> tuple[Array, Any]:
        """a + b, with NumPy's broadcasting."""

    def add_backward(self, dout: Array, cache: Any) -> tuple[Array, Array]:
        """(da, db)."""

    def scale_forward(
        self, x: Array, *, factor: float, out: Array | None = None
    ) -> tuple[Array, Any]:
        """factor · x; ``out`` receives it and may be x itself."""

    def scale_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def embedding_forward(self, ids: Array, table: Array) -> tuple[Array, Any]:
        """table[ids]: ids (...) int32, table (V, D) -> (..., D)."""

    def embedding_backward(
        self, dout: Array, cache: Any, *, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        """dtable (V, D); with ``accumulate`` it is added onto ``out``."""

    def linear_forward(
        self, x: Array, weight: Array, bias: Array | None = None, *, keep_x: bool = True
    ) -> tuple[Array, Any]:
        """x W + b: x (..., I), weight (I, O), bias (O,) -> (..., O).

        ``keep_x=False`` leaves x out of the cache: the backward must be given it again.
        """

    def linear_backward(
        self,
        dout: Array,
        cache: Any,
        *,
        x: Array | None = None,
        out: tuple[Array | None, Array | None] | None = None,
    ) -> tuple[Array, Array, Array | None]:
        """(dx, dweight, dbias); ``out`` receives (dweight, dbias).

        ``x`` is the forward's, given when and only when that was told not to keep it.
        """

    def split_heads_forward(
        self, x: Array, *, heads: tuple[int, ...]
    ) -> tuple[tuple[Array, ...], Any]:
        """(B, T, sum of heads, d) -> one (B, T, H, d) for each H in ``heads``."""

    def split_heads_backward(self, dout: tuple[Array, ...], cache: Any) -> Array:
        """dx."""

    def merge_heads_forward(self, x: Array) -> tuple[Array, Any]:
        """(B, T, H, d) -> (B, T, H·d)."""

    def merge_heads_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def rmsnorm_forward(self, x: Array, gain: Array, *, eps: float) -> tuple[Array, Any]:
        """x / √(mean(x²) + eps) · gain: x (..., D), gain (D,)."""

    def rmsnorm_backward(
        self, dout: Array, cache: Any, *, out: Array | None = None
    ) -> tuple[Array, Array]:
        """(dx, dgain); ``out`` receives dgain."""

    def layernorm_forward(
        self, x: Array, gain: Array, bias: Array, *, eps: float
    ) -> tuple[Array, Any]:
        """(x - mean) / √(var + eps) · gain + bias: x (..., D), gain and bias (D,)."""

    def layernorm_backward(
        self, dout: Array, cache: Any, *, out: tuple[Array | None, Array | None] | None = None
    ) -> tuple[Array, Array, Array]:
        """(dx, dgain, dbias); ``out`` receives (dgain, dbias)."""

    def rope_forward(
        self,
        x: Array,
        *,
        base: float,
        start: int | Array = 0,
        rotate_heads: int | None = None,
    ) -> tuple[Array, Any]:
        """Rotate pairs (2j, 2j+1) of x (B, T, H, d) at positions start + t; start int or (B,).

        Only the first ``rotate_heads`` heads turn (all, when None); the others pass unchanged.
        """

    def rope_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def attention_forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        alibi: Array | None = None,
        key_mask: Array | None = None,
        documents: Array | None = None,
        *,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        dropout_p: float = 0.0,
        dropout_key: DropoutKey | None = None,
    ) -> tuple[Array, Any]:
        """Scaled dot-product attention: q (B, T, Hq, d), k (B, S, Hkv, d), v (B, S, Hkv, dv).

        alibi (Hq,) slopes, key_mask (B, S) bool, documents (B, S) int32 -> (B, T, Hq, dv).
        """

    def attention_backward(self, dout: Array, cache: Any) -> tuple[Array, Array, Array]:
        """(dq, dk, dv)."""

    def swiglu_forward(self, x: Array) -> tuple[Array, Any]:
        """silu(gate) · up: x (..., 2F) holds the gate, then the up -> (..., F)."""

    def swiglu_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def gelu_forward(self, x: Array) -> tuple[Array, Any]:
        """x Φ(x), exact."""

    def gelu_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def gelu_tanh_forward(self, x: Array) -> tuple[Array, Any]:
        """GELU by its tanh approximation."""

    def gelu_tanh_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def relu_forward(self, x: Array) -> tuple[Array, Any]:
        """max(x, 0)."""

    def relu_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def dropout_forward(
        self, x: Array, *, p: float, key: DropoutKey | None = None
    ) -> tuple[Array, Any]:
        """x / (1 - p) where kept, else 0; x (B, ...), row b of sample ``key.sample + b``."""

    def dropout_backward(self, dout: Array, cache: Any) -> Array:
        """dx."""

    def linear_cross_entropy_forward(
        self,
        x: Array,
        head: Array,
        targets: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        *,
        need_backward: bool = True,
    ) -> tuple[Loss, Any]:
        """Loss of the logits x headᵀ + bias: x (..., D), head (V, D), targets (...) int32.

        Only targets where ``mask`` (...) is True count. ``need_backward=False`` promises that no
        backward follows.
        """

    def linear_cross_entropy_backward(
        self,
        dloss: float,
        cache: Any,
        *,
        out: tuple[Array | None, Array | None] | None = None,
    ) -> tuple[Array, Array, Array | None]:
        """(dx, dhead, dbias) of dloss · total; ``out`` receives (dhead, dbias)."""

    # ---- without a backward ------------------------------------------------------------------

    def softmax(self, x: Array) -> Array:
        """Softmax over the last axis."""

    def logits(self, x: Array, head: Array, bias: Array | None = None) -> Array:
        """x headᵀ + bias: x (..., D), head (V, D), bias (V,) -> (..., V)."""

    def square_sums(self, x: Array) -> Array:
        """Return Σx² of each block of ``SUM_BLOCK`` elements of a flat x, in float64."""

    def global_norm(self, x: Array) -> float:
        """√Σx² of a flat x, by way of ``square_sums``."""

    def accumulate(self, dst: Array, src: Array) -> None:
        """dst += src, in place."""

    def adamw(
        self,
        master: Array,
        m: Array,
        v: Array,
        grad: Array,
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        n_decayed: int,
        grad_scale: float = 1.0,
    ) -> None:
        """One AdamW step on flat arrays, in place; the first ``n_decayed`` elements decay."""

    def kv_cache(
        self, params: Mapping[str, Array], config: Config, batch: int, length: int
    ) -> KVCache:
        """Make an empty cache with room for ``length`` tokens of each of ``batch`` rows."""

    def write_kv(
        self, cache: KVCache, k: Array, v: Array, *, layer: int, position: int | Array
    ) -> None:
        """Write k, v (B, T, Hkv, d) of one layer at position, position + 1, …; int or (B,)."""

    def decode_step(
        self,
        params: Mapping[str, Array],
        config: Config,
        token: Array,
        cache: KVCache,
        position: int | Array,
    ) -> Array:
        """Logits (B, V) after ``token`` (B,) at ``position`` (int or (B,)); extends the cache."""


# ---- the reference as a backend: arrays are NumPy's, and the rest is imported above ------------


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Return the array itself."""
    del activation
    return array


def to_numpy(array: Array) -> Array:
    """Return the array itself."""
    return array


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters themselves: the reference reads the master."""
    return dict(master)


def step() -> AbstractContextManager[None]:
    """Return a scope that reuses nothing."""
    return nullcontext()


def decode_step(
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return ``model.decode_step`` composed of this module's ops."""
    from reference.model import decode_step as compose  # here, as model.py reads the sites above

    return compose(sys.modules[__name__], params, config, token, cache, position)
