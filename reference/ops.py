"""The op contract: every public op, declared once.

A backend is a module that offers the functions of ``OPS`` below: same names, same parameters, same
results. This module is itself one (the reference), ``accel.load`` returns the fast ones, and the
models in ``model.py`` and ``encoder_decoder.py`` are written once and take such a module.

The rules that all ops obey::

    op_forward(arrays..., *, options) -> (out, cache)
    op_backward(dout, cache)          -> the gradients of the forward's differentiable arrays, in
                                         order: one array, or a tuple with None for those not given

* The cache is opaque to callers. A backend keeps in it what its own backward needs.
* dtype in = dtype out; float arrays that meet in one op have one dtype. A KV cache may have
  another, and so may k and v that come from it.
* Differentiable ops never write into their arguments. ``out=`` of a backward is where parameter
  gradients go: views of the flat gradient, overwritten (``embedding_backward`` adds instead when
  ``accumulate`` is set). ``accumulate``, ``adamw``, ``muon`` and ``write_kv`` write into what they
  are given.
* ``plus=`` is what comes along the residual stream, to be added in the same pass: of a linear
  layer the stream itself, whose gradient is dout; of a norm's backward the gradient that x receives
  otherwise. What is returned is the sum.
* A size may be 0: what has no elements is returned empty, and a sum over nothing is 0. A mean or a
  softmax over nothing is refused, and so is attention without a key, or of no width.
* Token ids are int32 and 0-based, masks are bool with True = take part. ``start`` and ``position``
  are ints or, row by row, NumPy integer arrays (B,) in host memory.
* A returned array stays valid while it is referenced, except inside ``with ops.step():``, where a
  backend may reuse memory: all arrays but parameters and ``out=`` die when that block ends.

Letters: B batch, T queries, S keys, D width, V vocabulary, Hq/Hkv query/key-value heads, d head
width, F feed-forward width. The mathematics is in the file that each op is named after, the
machinery in ``contract.py``; ``python -m reference.ops`` prints the table of ops.

Dropout sites (``DropoutKey.site``): 0 is the embedding, 1 an encoder's embedding, and block n has
the eight sites from 8·(n + 1); see ``block_site``. An encoder's blocks are numbered after the
decoder's.
"""

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reference.boundary import Rules, mathematics, offer
from reference.contract import (
    Dims,
    Op,
    Operand,
    Option,
    flag,
    integer,
    number,
    passed,
    positions,
    table,
)
from reference.memory import memory as memory
from reference.philox import check_counters
from reference.types import Array, Dropout, DropoutKey, RopeScaling
from reference.visibility import Visibility

EMBEDDING_SITE = 0
ENCODER_EMBEDDING_SITE = 1
ATTENTION_PROBABILITIES, ATTENTION_BRANCH, CROSS_PROBABILITIES, CROSS_BRANCH, FFN_BRANCH = range(5)


def block_site(block: int, kind: int) -> int:
    """Return the dropout site of one kind (``FFN_BRANCH``, …) in one block."""
    return 8 * (block + 1) + kind


class Ops(Protocol):
    """What a backend is: something with the functions of ``OPS`` and ``SERVICES`` by name."""

    def __getattr__(self, name: str, /) -> Any: ...


# ---- what a string of letters cannot say ---------------------------------------------------------


def _broadcast(op: str, dims: Dims, a: Array, b: Array) -> None:
    if a.shape == b.shape:
        return
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(f"{op}: shapes {a.shape} and {b.shape} do not broadcast") from None


def _parts(op: str, dims: Dims, x: Array, *, heads: Any) -> Any:
    """Return the heads of each part as Python's integers; they must add up to x's."""
    heads = tuple(heads)
    if not all(n == int(n) >= 1 for n in heads) or sum(heads) != dims["H"]:
        raise ValueError(
            f"{op}: heads {heads} must add up to the head axis of x (B, T, H, d), got x {x.shape}"
        )
    return (x,), {"heads": tuple(int(n) for n in heads)}


def _some(op: str, dims: Dims, x: Array, *others: Array, **options: Any) -> None:
    if not x.shape[-1]:
        raise ValueError(f"{op}: there must be something along the last axis, got x {x.shape}")


def _scaling(op: str, value: Any, dims: Dims) -> RopeScaling | None:
    """Return RoPE's scaling as Python's numbers; they must make sense together."""
    if value is None:
        return None
    try:
        taken = RopeScaling(*map(float, value))
    except (TypeError, ValueError):
        taken = RopeScaling(*[math.nan] * 4)
    factor, low, high, original = taken
    if not (1 <= factor < math.inf and 0 < low < high < math.inf and 0 < original < math.inf):
        raise ValueError(
            f"{op} must be (factor >= 1, low_freq_factor > 0, high_freq_factor above that, "
            f"original_context > 0), or None, got {value!r}"
        )
    return taken


def _columns(op: str, dims: Dims, *arrays: Array, parts: Any, **options: Any) -> Any:
    """Return the widths of each matrix as Python's integers; they must add up to the columns."""
    widths = (dims["O"],) if parts is None else tuple(parts)
    if not all(n == int(n) >= 1 for n in widths) or sum(widths) != dims["O"]:
        raise ValueError(
            f"{op}: parts {widths} must add up to the columns of master (I, O), got master "
            f"{arrays[0].shape}"
        )
    return arrays, {**options, "parts": tuple(int(n) for n in widths)}


def _dropout(op: str, dims: Dims, x: Array, *, p: float, key: DropoutKey | None) -> Any:
    return (x,), {"dropout": _drawn(p, key, x.shape[0] if x.ndim else 0, x.shape)}


def _drawn(p: float, key: DropoutKey | None, batch: int, shape: tuple[int, ...]) -> Dropout | None:
    """Return by what a mask of this shape is drawn; None when nothing is dropped."""
    if p > 0 and key is None:
        raise ValueError(f"dropout: p = {p} needs a key (seed, step, sample, site) to draw bits by")
    if p == 0 or key is None:
        return None
    key = check_counters(batch, math.prod(shape[1:]), key)
    return None if 0 in shape else Dropout(p, key)


def _attention(
    op: str,
    dims: Dims,
    q: Array,
    k: Array,
    v: Array,
    alibi: Array | None,
    key_mask: Array | None,
    documents: Array | None,
    *,
    causal: bool,
    window: int,
    scale: float | None,
    dropout_p: float,
    dropout_key: DropoutKey | None,
) -> Any:
    """Gather who may see whom into one record, after checking heads and lengths."""
    B, T, S, Hq, Hkv = (dims[letter] for letter in ("B", "T", "S", "Hq", "Hkv"))
    if not (S and Hkv and dims["d"]):
        raise ValueError(f"{op}: there must be a key, a key head and a width, got k {k.shape}")
    if Hq % Hkv:
        raise ValueError(f"{op}: query heads ({Hq}) must be a multiple of key/value heads ({Hkv})")
    if documents is not None and S < T:
        raise ValueError(
            f"{op}: documents need the queries to be the last T of the S positions, "
            f"but T = {T} > S = {S}"
        )
    options = {
        "scale": 1 / math.sqrt(dims["d"]) if scale is None else scale,
        "dropout": _drawn(dropout_p, dropout_key, B, (B, Hq, T, S)),
    }
    return (q, k, v, Visibility(T, S, causal, window, alibi, key_mask, documents)), options


# ---- the declarations ----------------------------------------------------------------------------


def _x(shape: str, travels: str = "", *, kept: bool = False) -> Operand:
    return Operand("x", shape, travels=travels, kept=kept)


def _parameter(name: str, shape: str, *, optional: bool = False) -> Operand:
    return Operand(name, shape, "parameter", optional)


def _master(name: str, shape: str = "n", *, written: bool = False, mixes: bool = False) -> Operand:
    return Operand(name, shape, "master", written=written, mixes=mixes)


def _object(name: str) -> Operand:
    return Operand(name, kind="object")


_KEY = "a DropoutKey where p > 0"
_MASK = Operand("mask", "...", "mask", optional=True)
_TARGETS = Operand("targets", "...", "ids", below="V", where="mask")

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "add",
            "a + b, with NumPy's broadcasting.",
            (Operand("a"), Operand("b")),
            check=_broadcast,
        ),
        Op(
            "scale",
            "factor · x; ``out`` receives it and may be x itself.",
            (_x("..."),),
            (number("factor"),),
            "...",
            needs=("out",),
        ),
        Op(
            "embedding",
            "table[ids]; with ``accumulate`` the gradient is added onto ``out``.",
            (Operand("ids", "...", "ids", below="V"), _parameter("table", "V D")),
            out="... D",
            accumulates=True,
        ),
        Op(
            "linear",
            "x W + b; its forward adds ``plus``.",
            (_x("... I"), _parameter("weight", "I O"), _parameter("bias", "O", optional=True)),
            out="... O",
            needs=("keep_x",),
            adds="forward",
        ),
        Op(
            "split_heads",
            "x cut along its heads into parts of ``heads`` heads each.",
            (_x("B T H d"),),
            (passed("heads", "integers, H in all"),),
            check=_parts,
        ),
        Op("merge_heads", "The heads of a token side by side.", (_x("B T H d"),), out="B T H·d"),
        Op(
            "rmsnorm",
            "x / √(mean(x²) + eps) · gain; its backward adds ``plus`` to dx.",
            (_x("... D", travels="..."), _parameter("gain", "D")),
            (number("eps", at_least=0),),
            "... D",
            check=_some,
            adds="backward",
        ),
        Op(
            "layernorm",
            "(x - mean) / √(var + eps) · gain + bias; its backward adds ``plus`` to dx.",
            (_x("... D", travels="..."), _parameter("gain", "D"), _parameter("bias", "D")),
            (number("eps", at_least=0),),
            "... D",
            check=_some,
            adds="backward",
        ),
        Op(
            "rope",
            "Pairs (2j, 2j+1) of x turned at positions start + t; all heads, or the first "
            "``rotate_heads``.",
            (_x("B T H 2j", travels="B T H"),),
            (
                number("base", above=0),
                positions("start", 0),
                integer("rotate_heads", None, at_most="H"),
                Option("scaling", _scaling, "a RopeScaling (Llama 3's) or None", None),
            ),
            "B T H 2j",
        ),
        Op(
            "attention",
            "Scaled dot-product attention: softmax(scale · q kᵀ + bias) v, head by head.",
            (
                Operand("q", "B T Hq d"),
                Operand("k", "B S Hkv d", kept=True),
                Operand("v", "B S Hkv dv", kept=True),
                Operand("alibi", "Hq", "constant", optional=True),
                Operand("key_mask", "B S", "mask", optional=True),
                Operand("documents", "B S", "documents", optional=True),
            ),
            (
                flag("causal", True),
                integer("window", 0),
                number("scale", None),
                number("dropout_p", 0.0, at_least=0, below=1),
                passed("dropout_key", _KEY, None),
            ),
            "B T Hq dv",
            check=_attention,
        ),
        Op(
            "swiglu",
            "silu(gate) · up: x holds the gate, then the up.",
            (_x("... 2F", kept=True),),
            out="... F",
        ),
        Op("gelu", "x Φ(x), exact.", (_x("...", kept=True),), out="..."),
        Op("gelu_tanh", "GELU by its tanh approximation.", (_x("...", kept=True),), out="..."),
        Op("relu", "max(x, 0).", (_x("...", kept=True),), out="..."),
        Op(
            "dropout",
            "x / (1 - p) where kept, else 0; row b belongs to sample ``key.sample + b``.",
            (_x("B ..."),),
            (number("p", at_least=0, below=1), passed("key", _KEY, None)),
            "B ...",
            check=_dropout,
        ),
        Op(
            "linear_cross_entropy",
            "Loss of the logits x headᵀ + bias, summed over the targets where ``mask`` is True.",
            (
                _x("... D"),
                _parameter("head", "V D"),
                _TARGETS,
                _MASK,
                _parameter("bias", "V", optional=True),
            ),
            out="Loss",
            needs=("need_backward",),
        ),
        Op(
            "softmax",
            "Softmax over the last axis.",
            (_x("... n", travels="..."),),
            out="... n",
            backward=False,
            check=_some,
        ),
        Op(
            "logits",
            "x headᵀ + bias.",
            (_x("... D"), _parameter("head", "V D"), _parameter("bias", "V", optional=True)),
            out="... V",
            backward=False,
        ),
        Op(
            "square_sums",
            "Σx² of each block of ``SUM_BLOCK`` elements of a flat x, in float64.",
            (_master("x"),),
            backward=False,
            home="global_norm",
            wide=True,
        ),
        Op(
            "global_norm",
            "√Σx² of a flat x, by way of ``square_sums``.",
            (_master("x"),),
            backward=False,
            wide=True,
        ),
        Op(
            "accumulate",
            "dst += src, in place.",
            (Operand("dst", "...", "master", written=True), Operand("src", "...", "master")),
            backward=False,
        ),
        Op(
            "adamw",
            "One AdamW step on flat arrays, in place; the first ``n_decayed`` elements decay.",
            (
                _master("master", written=True),
                _master("m", written=True),
                _master("v", written=True),
                _master("grad"),
            ),
            (
                integer("step", at_least=1),
                number("lr", at_least=0),
                number("beta1", at_least=0, below=1),
                number("beta2", at_least=0, below=1),
                number("eps", at_least=0),
                number("weight_decay", at_least=0),
                integer("n_decayed", at_most="n"),
                number("grad_scale", 1.0),
            ),
            backward=False,
        ),
        Op(
            "muon",
            "One Muon step on a matrix, in place; ``parts`` are the widths of those side by side.",
            (
                _master("master", "I O", written=True, mixes=True),
                _master("m", "I O", written=True),
                _master("grad", "I O"),
            ),
            (
                number("lr", at_least=0),
                number("momentum", at_least=0, below=1),
                number("weight_decay", at_least=0),
                passed("parts", "integers, O in all", None),
                number("grad_scale", 1.0),
            ),
            backward=False,
            check=_columns,
        ),
        Op(
            "kv_cache",
            "An empty cache with room for ``length`` tokens of each of ``batch`` rows.",
            tuple(_object(name) for name in ("params", "config", "batch", "length")),
            backward=False,
            home="kv",
        ),
        Op(
            "write_kv",
            "Write k and v of one layer at position, position + 1, … of each row.",
            (
                _object("cache"),
                Operand("k", "B T Hkv d", kept=True),
                Operand("v", "B T Hkv d", kept=True),
            ),
            (passed("layer", "a layer"), positions("position")),
            backward=False,
            home="kv",
        ),
        Op(
            "decode_step",
            "Logits (B, V) after ``token`` (B,) at ``position``; extends the cache.",
            tuple(_object(n) for n in ("params", "config", "token", "cache", "position")),
            backward=False,
            home="model",
        ),
    )
}

# What a backend offers besides its ops: arrays in and out, weights, scope, memory, a micro-batch.
SERVICES = (
    "from_numpy",
    "to_numpy",
    "parameters",
    "step",
    "memory",
    "recompute",
    "keep",
    "gradient",
)
NAMES = (*(name for op in OPS.values() for name in op.names), *SERVICES)
HOST = Rules({np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"})


# ---- the reference as a backend: arrays are NumPy's ----------------------------------------------


def from_numpy(array: Array, *, activation: bool = False) -> Array:
    """Take an array over; as an ``activation``, floats become the backend's activation type."""
    del activation
    return array


def to_numpy(array: Array) -> Array:
    """Give an array back as NumPy's; an activation type NumPy lacks comes as float32."""
    return array


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Make, once after each optimizer step, the weights that the ops read.

    The identity here; low-precision copies or packed tiles elsewhere. Ops accept plain weights too.
    """
    return dict(master)


def step() -> AbstractContextManager[None]:
    """Open a scope in which the backend may reuse memory for activations and gradients."""
    return nullcontext()


def recompute(config: Any, tokens: int) -> str:
    """Say what the backward of so many tokens had better make again than keep.

    One of ``reference.blocks.Recompute``, of which no other choice changes a bit; here nothing.
    """
    del config, tokens
    return "none"


def keep(x: Array) -> Array:
    """Return what an activation is to read of x, and a step keeps until its backward.

    x itself, or x rounded where a backend's products read rounded numbers; gradients are as x's.
    """
    return x


def composed(module: str, name: str) -> Callable[..., Any]:
    """Return a function of ``model.py``, of a backend's ops, for one without a faster way."""

    def function(*arguments: Any, **options: Any) -> Any:
        from reference import model  # here, as model.py reads the sites above

        return getattr(model, name)(sys.modules[module], *arguments, **options)

    return function


def backend(module: str, rules: Rules, *sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module has to hold to be a backend: the public functions, and their names.

    Parameters
    ----------
    module : str
        Its ``__name__``.
    rules : Rules
        What its arrays are like.
    *sources : mappings
        The implementations by name, as ``vars(module)`` has them; the first that has one gives it.
    """
    compose = {name: composed(module, name) for name in ("decode_step", "gradient")}
    default = {**compose, "recompute": recompute, "keep": keep}
    offered = offer(module, OPS.values(), SERVICES, rules, *sources, default)
    return {**offered, "__all__": [*NAMES]}


globals().update(backend(__name__, HOST, dict(globals()), mathematics(OPS.values())))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


if __name__ == "__main__":
    print(table(OPS.values()))
