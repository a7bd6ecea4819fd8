"""Subtle mistakes: right nearly always, wrong only where few tests look.

Each is the reference with something done to its arguments or its results under one condition.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.tolerance import round_bf16
from reference import ops
from reference.model import decode_step as compose
from reference.types import Array, KVCache, Loss
from tests.helpers.kernels.rewrite import kernel_of
from tests.helpers.kernels.wrong import Written

SUBTLE: list[Written] = []


def changed(op: str, **functions: Callable[..., Any]) -> Any:
    """Return an op of the reference with functions replaced."""
    return kernel_of(op, ops, op, **functions)


def after(title: str, op: str, wrong: str, dtype: str = "float32") -> Any:
    """Register a change of what a backward returns: f(gradients, dout, arguments) in place.

    The arguments are the forward's, by name: what a cache holds is the reference's own affair.
    """
    real = getattr(ops, f"{op}_forward")

    def forward(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(real).bind(*args, **options)
        bound.apply_defaults()
        out, cache = real(*args, **options)
        return out, (cache, SimpleNamespace(**bound.arguments))

    forward.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]

    def register(spoil: Callable[[list[Array], Any, Any], None]) -> None:
        def backward(dout: Any, cache: Any, **options: Any) -> Any:
            result = getattr(ops, f"{op}_backward")(dout, cache[0], **options)
            found = [result] if isinstance(result, np.ndarray) else list(result)
            found = [None if g is None else g.copy() for g in found]
            spoil(found, dout, cache[1])
            return found[0] if len(found) == 1 else tuple(found)

        kernel = changed(op, **{f"{op}_forward": forward, f"{op}_backward": backward})
        SUBTLE.append(Written(title, op, wrong, kernel, dtype))

    return register


def before(title: str, op: str, wrong: str, dtype: str = "float32", name: str = "") -> Any:
    """Register a change of a forward's arguments: f(arguments by name) in place."""

    def register(spoil: Callable[[dict[str, Any]], None]) -> None:
        what = f"{op}_forward" if hasattr(ops, f"{op}_forward") else op
        real = getattr(ops, what)

        def forward(*args: Any, **options: Any) -> Any:
            bound = inspect.signature(real).bind(*args, **options)
            bound.apply_defaults()
            spoil(bound.arguments)
            return real(*bound.args, **bound.kwargs)

        forward.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
        SUBTLE.append(Written(title, op, wrong, changed(op, **{what: forward}), dtype))

    return register


def whole(title: str, op: str, wrong: str, dtype: str = "float32") -> Any:
    """Register a function in place of one of the op's."""

    def register(function: Callable[..., Any]) -> None:
        kernel = changed(op, **{function.__name__: function})
        SUBTLE.append(Written(title, op, wrong, kernel, dtype))

    return register


# ---- attention -----------------------------------------------------------------------------------


@after("dk of one head lost in groups of three", "attention", "dk")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if a.q.shape[2] == 3 * a.k.shape[2]:
        found[1] *= np.float32(2 / 3)


@after("dk of masked keys not zero", "attention", "dk")
def _(found: list[Array], dout: Array, a: Any) -> None:
    out, cache = ops.attention_forward(**{**vars(a), "dropout_p": 0.0})
    seen = ops.attention_backward(np.ones_like(out), cache)[2].any(axis=-1, keepdims=True)
    found[1][:] = np.where(seen, found[1], 1e-3)


@after("the last of an odd number of keys left out of dq", "attention", "dq")
def _(found: list[Array], dout: Array, a: Any) -> None:
    B, S = a.k.shape[:2]
    if S > 32 and S % 2:
        seen = np.ones((B, S), np.bool_) if a.key_mask is None else a.key_mask.copy()
        seen[:, -1] = False
        _, short = ops.attention_forward(**{**vars(a), "key_mask": seen})
        found[0][:] = ops.attention_backward(dout, short)[0]


@after("P of the backward off by 2e-4", "attention", "dv")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if a.k.shape[1] > 16:
        found[2] *= np.asarray(1.0002, found[2].dtype)


@before("scale is 1/d", "attention", "out")
def _(a: dict[str, Any]) -> None:
    if a["scale"] is None:
        a["scale"] = 1 / a["q"].shape[-1]


@before("the option scale ignored", "attention", "out")
def _(a: dict[str, Any]) -> None:
    a["scale"] = None


@before("documents of the batch's first row for all", "attention", "out")
def _(a: dict[str, Any]) -> None:
    if a["documents"] is not None:
        a["documents"] = np.repeat(a["documents"][:1], len(a["q"]), axis=0)


@before("key mask of the batch's first row for all", "attention", "out")
def _(a: dict[str, Any]) -> None:
    if a["key_mask"] is not None:
        a["key_mask"] = np.repeat(a["key_mask"][:1], len(a["q"]), axis=0)


@before("scale by the width of the values", "attention", "out")
def _(a: dict[str, Any]) -> None:
    if a["scale"] is None:
        a["scale"] = 1 / np.sqrt(a["v"].shape[-1])


@before("the dropout's step ignored", "attention", "out")
def _(a: dict[str, Any]) -> None:
    if a["dropout_key"] is not None:
        a["dropout_key"] = a["dropout_key"]._replace(step=0)


@before("a scale of one taken for none", "attention", "out")
def _(a: dict[str, Any]) -> None:
    a["scale"] = None if a["scale"] == 1 else a["scale"]


@whole("the last query of the last tile sees all but itself", "attention", "out")
def attention_forward(q: Array, k: Array, v: Array, *rest: Any, **options: Any) -> Any:
    out, cache = ops.attention_forward(q, k, v, *rest, **options)
    T = q.shape[1]
    if T > 64 and T % 64 and options.get("causal", True) and k.shape[1] > 1:
        out = out.copy()
        twice = np.concatenate([q[:, -1:], q[:, -1:]], axis=1)  # the first stands one place before
        out[:, -1] = ops.attention_forward(twice, k, v, *rest, **options)[0][:, 0]
    return out, cache


def _tiled(title: str, wrong: str, tile: int, padding: bool) -> None:
    """In bf16: keys of zeros beyond the last are not masked, or causality within a tile is not."""

    def attention_forward(
        q: Array, k: Array, v: Array, *, causal: bool = True, scale: float | None = None
    ) -> Array:
        T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
        s = scale * np.einsum("bthd,bshd->bhts", q, np.repeat(k, G, axis=2))
        if padding:
            s = np.concatenate([s, np.zeros((*s.shape[:3], -S % tile), s.dtype)], axis=-1)
        t, u = np.arange(S - T, S)[:, None], np.arange(s.shape[-1])
        seen = (u <= t) | (u >= S) if causal else np.ones((T, len(u)), bool)
        if not padding and causal:  # whole as soon as its last key is seen by the 16th query
            end = u // tile * tile + tile - 1
            seen = seen | ((end <= t // 16 * 16 + 15) & (end < S))
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = e.sum(axis=-1, keepdims=True)
        p = round_bf16(e / np.where(total == 0, 1, total))[..., :S]
        return round_bf16(np.einsum("bhts,bshd->bthd", p, np.repeat(v, G, axis=2)))

    kernel = SimpleNamespace(attention_forward=attention_forward)
    SUBTLE.append(Written(title, "attention", wrong, kernel, "bf16"))


_tiled("bf16: the last tile's padding is not masked", "out", 128, True)
_tiled("bf16: a tile on the diagonal taken for a whole one", "out", 64, False)
_tiled("bf16: a small tile on the diagonal taken for a whole one", "out", 16, False)


# ---- the other differentiable ops ----------------------------------------------------------------


@after("broadcast not summed", "add", "db")
def _(found: list[Array], dout: Array, a: Any) -> None:
    new = dout.ndim - a.b.ndim
    first = tuple(slice(0, n) for n in (1,) * new + a.b.shape)
    found[1][:] = dout[first].reshape(a.b.shape)


@before("rotate_heads = 0 taken for all", "rope", "out")
def _(a: dict[str, Any]) -> None:
    a["rotate_heads"] = a["rotate_heads"] or None


@before("negative positions taken for positive", "rope", "out")
def _(a: dict[str, Any]) -> None:
    a["start"] = np.abs(a["start"])


@before("starts in 12 bits", "rope", "out")
def _(a: dict[str, Any]) -> None:
    a["start"] = np.asarray(a["start"]) % 4096


@after("the backward turns all heads", "rope", "dx")
def _(found: list[Array], dout: Array, a: Any) -> None:
    _, cache = ops.rope_forward(a.x, base=a.base, start=a.start)
    found[0][:] = ops.rope_backward(dout, cache)


@before("ε rounded to float32", "rmsnorm", "out", "float64")
def _(a: dict[str, Any]) -> None:
    a["eps"] = float(np.float32(a["eps"]))


@after("dgain of the first 128 rows only", "rmsnorm", "dgain")
def _(found: list[Array], dout: Array, a: Any) -> None:
    n = ops.rmsnorm_forward(a.x, np.ones_like(a.gain), eps=a.eps)[0]
    found[1][:] = (n * dout).reshape(-1, dout.shape[-1])[:128].sum(axis=0)


@after("a dout that is not contiguous read as if it were", "rmsnorm", "dx")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if dout.base is not None and dout.base.size == dout.size and not dout.flags.c_contiguous:
        wrong = dout.base.reshape(dout.shape)
        cache = ops.rmsnorm_forward(a.x, a.gain, eps=a.eps)[1]
        found[0][:] = ops.rmsnorm_backward(wrong, cache)[0]


@after("dbias of the batch's last row only", "layernorm", "dbias")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if dout.ndim > 2:
        found[2][:] = dout[-1].reshape(-1, dout.shape[-1]).sum(axis=0)


@after("dweight without the last of an odd number of rows", "linear", "dweight")
def _(found: list[Array], dout: Array, a: Any) -> None:
    rows = dout.reshape(-1, dout.shape[-1])
    if len(rows) % 2 and len(rows) > 16:
        found[1] -= np.outer(a.x.reshape(-1, a.x.shape[-1])[-1], rows[-1])


@after("dx by a weight rounded to bf16", "linear", "dx")
def _(found: list[Array], dout: Array, a: Any) -> None:
    found[0][:] = dout @ round_bf16(a.weight).T


@after("bias gradient over the wrong axis", "linear", "dbias")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if found[2] is not None:
        found[2][:] = np.sum(dout, axis=0).reshape(-1, dout.shape[-1])[0]


def _weights_by_shape() -> Any:
    kept: dict[Any, Array] = {}

    def linear_forward(x: Array, weight: Array, bias: Array | None = None) -> Any:
        weight = kept.setdefault((weight.shape, weight.dtype), weight.copy())
        return ops.linear_forward(x, weight, bias)

    return changed("linear", linear_forward=linear_forward)


SUBTLE.append(Written("packed weights kept by shape", "linear", "out", _weights_by_shape()))


@after("the last id's row left out", "embedding", "dtable")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if len(found[0]) > 16:
        found[0][-1] = 0


@after("an id counted 32 times at most", "embedding", "dtable")
def _(found: list[Array], dout: Array, a: Any) -> None:
    ids, rows = a.ids.reshape(-1), dout.reshape(-1, dout.shape[-1])
    for i in np.unique(ids):
        for at in np.flatnonzero(ids == i)[32:]:
            found[0][i] -= rows[at]


@whole("no valid target counted as one", "linear_cross_entropy", "n_valid")
def linear_cross_entropy_forward(*args: Any, **options: Any) -> Any:
    loss, cache = ops.linear_cross_entropy_forward(*args, **options)
    return Loss(loss.total, max(1, loss.n_valid)), cache


@after("dbias of masked rows, too", "linear_cross_entropy", "dbias")
def _(found: list[Array], dout: float, a: Any) -> None:
    if found[2] is not None:
        _, everybody = ops.linear_cross_entropy_forward(
            a.x, a.head, np.maximum(a.targets, 0), None, a.bias
        )
        found[2][:] = ops.linear_cross_entropy_backward(dout, everybody)[2]


@after("the sign of dloss lost", "linear_cross_entropy", "dx")
def _(found: list[Array], dout: float, a: Any) -> None:
    found[0] *= np.sign(dout)


@whole("σ that overflows", "swiglu", "out")
def swiglu_forward(x: Array) -> Any:
    gate, up = np.split(x, 2, axis=-1)
    with np.errstate(all="ignore"):
        sigma = np.exp(gate) / (1 + np.exp(gate))
    return gate * sigma * up, ops.swiglu_forward(x)[1]


@after("x² for 3x² in the slope", "gelu_tanh", "dx")
def _(found: list[Array], dout: Array, a: Any) -> None:
    x = a.x
    c = np.asarray(np.sqrt(2 / np.pi), x.dtype)
    t = np.tanh(c * (x + np.asarray(0.044715, x.dtype) * x**3))
    inner = c * (1 + np.asarray(0.044715, x.dtype) * x * x)
    found[0][:] = dout * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


@before("the site's number cut off", "dropout", "out")
def _(a: dict[str, Any]) -> None:
    if a["key"] is not None and a["p"] == 0.5:
        a["key"] = a["key"]._replace(site=a["key"].site % 8)


@after("no 1/(1 - p) where p is a half", "dropout", "dx")
def _(found: list[Array], dout: Array, a: Any) -> None:
    if a.p == 0.5:
        found[0] *= 0.5


# ---- without a backward --------------------------------------------------------------------------


@before("bias left out of the logits", "logits", "out")
def _(a: dict[str, Any]) -> None:
    a["bias"] = None


@before("nothing decays taken for everything", "adamw", "master")
def _(a: dict[str, Any]) -> None:
    a["n_decayed"] = a["n_decayed"] or len(a["master"])


@before("no bias correction from step 1,000 on", "adamw", "master")
def _(a: dict[str, Any]) -> None:
    if a["step"] >= 1000:
        a["step"] = 10**8


@whole("a last, partial block lost", "global_norm", "out")
def global_norm(x: Array) -> float:
    return ops.global_norm(x[: len(x) // 65_536 * 65_536] if len(x) > 65_536 else x)


@whole("a strided destination copied", "accumulate", "dst")
def accumulate(dst: Array, src: Array) -> None:
    flat = dst.reshape(-1)  # a copy where dst is strided
    flat += src.reshape(-1)


# ---- the KV cache --------------------------------------------------------------------------------


@before("the first row's position for all", "write_kv", "cache.k")
def _(a: dict[str, Any]) -> None:
    a["position"] = int(np.reshape(a["position"], -1)[0])


@whole("the last place wraps around", "write_kv", "cache.k")
def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: Any) -> None:
    room = cache.k[0].shape[1]
    for b, first in enumerate(np.broadcast_to(position, len(k))):
        for t in range(k.shape[1]):
            at = (first + t) % max(1, room - 1)  # a ring that is one too short
            cache.k[layer][b, at], cache.v[layer][b, at] = k[b, t], v[b, t]


@whole("only the last token written", "write_kv", "cache.v")
def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: Any) -> None:  # noqa: F811
    last = position + k.shape[1] - 1
    held = cache.v[layer].copy()
    ops.write_kv(cache, k, v, layer=layer, position=position)
    cache.v[layer][...] = held
    for b, at in enumerate(np.broadcast_to(last, len(k))):
        cache.v[layer][b, at] = v[b, -1]


@whole("a cache that is not empty", "kv_cache", "out.k[0]")
def kv_cache(*args: Any) -> KVCache:
    cache = ops.kv_cache(*args)
    return KVCache([k + 1 for k in cache.k], cache.v)


@whole("k and v in one and the same memory", "kv_cache", "out.v[0]")
def kv_cache(*args: Any) -> KVCache:  # noqa: F811
    k = ops.kv_cache(*args).k
    return KVCache(k, k)


@whole("a head for every query head", "kv_cache", "out.k[0]")
def kv_cache(params: Any, config: Any, batch: int, length: int) -> KVCache:  # noqa: F811
    shape = (config.n_layers, batch, length, config.n_heads, config.d_head)
    dtype = params["embedding.weight"].dtype
    return KVCache(list(np.zeros(shape, dtype)), list(np.zeros(shape, dtype)))


def _decoding(title: str, wrong: str, **functions: Callable[..., Any]) -> None:
    """Register a decoder composed of the reference's ops with some replaced."""
    own = SimpleNamespace(**{**vars(ops), **functions})

    def decode_step(params: Any, config: Any, token: Array, cache: KVCache, position: Any) -> Array:
        return compose(own, params, config, token, cache, position)

    SUBTLE.append(Written(title, "decode_step", wrong, SimpleNamespace(decode_step=decode_step)))


def _sees_stale(q: Array, k: Array, v: Array, *rest: Any, **options: Any) -> Any:
    """Rows that stand before the furthest one see what lies beyond their place."""
    return ops.attention_forward(q, k, v, rest[0] if rest else None, causal=False)


def _wrong_head(q: Array, k: Array, v: Array, *rest: Any, **options: Any) -> Any:
    G = q.shape[2] // k.shape[2]
    k, v = np.tile(k, (1, 1, G, 1)), np.tile(v, (1, 1, G, 1))
    return ops.attention_forward(q, k, v, *rest, **options)


def _at_zero(x: Array, *, start: Any = 0, **options: Any) -> Any:
    return ops.rope_forward(x, start=0, **options)


def _one_late(cache: KVCache, k: Array, v: Array, *, layer: int, position: Any) -> None:
    at = np.minimum(np.asarray(position) + 1, cache.k[layer].shape[1] - 1)
    ops.write_kv(cache, k, v, layer=layer, position=at)


def _first_layers(cache: KVCache, k: Array, v: Array, *, layer: int, position: Any) -> None:
    if layer < 2:
        ops.write_kv(cache, k, v, layer=layer, position=position)


_decoding("what is stale in a shorter row is seen", "out", attention_forward=_sees_stale)
_decoding("key/value head i % Hkv", "out", attention_forward=_wrong_head)
_decoding("a new token stands at zero", "cache.k", rope_forward=_at_zero)
_decoding("written one place late", "cache.k", write_kv=_one_late)
_decoding("the third layer's cache forgotten", "cache.v", write_kv=_first_layers)
