"""Calls of every op, in a word each: what ``wrong.py`` shows its mistakes by."""

from typing import Any

import numpy as np

from accel.verify.board.outcome import Call, rng
from accel.verify.board.outcome import normal as _f
from reference import ops
from reference.alibi import alibi_slopes
from reference.config import Config
from reference.params import decoder_specs
from reference.types import DropoutKey, KVCache


def att(T=8, S=None, Hq=2, Hkv=2, d=4, dv=None, B=1, size=1.0, dtype=np.float32, seed=0, **o):
    more = {k: o.pop(k) for k in ("receivers", "times", "again", "forward_only") if k in o}
    S, dv = S or T, dv or d
    q, k, v = (
        _f((B, T, Hq, d), size, seed, dtype),
        _f((B, S, Hkv, d), size, seed + 1, dtype),
        _f((B, S, Hkv, dv), 1, seed + 2, dtype),
    )
    if o.pop("far", False):  # every score far below zero
        q, k = np.abs(q) * 20 + 5, -np.abs(k) * 20 - 5
    alibi = o.get("alibi")
    if alibi is True:
        o["alibi"] = alibi_slopes(Hq, dtype)
    elif alibi is not None:
        o["alibi"] = np.full(Hq, alibi, dtype)
    if o.get("key_mask") == "random":
        o["key_mask"] = rng(7).random((B, S)) < 0.6
    elif o.get("key_mask") == "none":
        o["key_mask"] = np.zeros((B, S), bool)
    if "documents" in o:
        o["documents"] = np.broadcast_to(np.asarray(o["documents"], np.int32), (B, S)).copy()
    if "dropout_p" in o:
        o.setdefault("dropout_key", key())
    return Call("attention", (q, k, v), o, **more)


def key(seed=5, step=3, sample=2, site=9):
    return DropoutKey(seed, step, sample, site)


def rope(T=5, H=4, d=8, B=2, base=10000.0, dtype=np.float32, again="", times=1, **o):
    return Call("rope", (_f((B, T, H, d), dtype=dtype),), {"base": base, **o}, "", times, again)


def norm(op, rows=5, D=8, size=1.0, shift=0.0, eps=1e-5, dtype=np.float32, seed=0, **more):
    rows = rows if isinstance(rows, tuple) else (rows,)
    x, gain = _f((*rows, D), size, seed, dtype, shift), _f((D,), 1, seed + 1, dtype)
    arrays = (x, gain, _f((D,), 1, seed + 2, dtype)) if op == "layernorm" else (x, gain)
    return Call(op, arrays, {"eps": eps}, **more)


def lin(rows=5, I=6, O=7, bias=True, dtype=np.float32, size=1.0, transposed=False, **more):
    x, weight = _f((rows, I), size, 0, dtype), _f((I, O), 1, 1, dtype)
    if transposed:
        x, weight = np.asfortranarray(x), np.asfortranarray(weight)
    options = {"bias": _f((O,), 1, 2, dtype)} if bias else {}
    return Call("linear", (x, weight), options, **more)


def lce(
    rows=5, V=11, D=6, mask=True, bias=True, dtype=np.float32, size=1.0, ids=None, dloss=None, **m
):
    x, head = _f((rows, D), size, 0, dtype), _f((V, D), size, 1, dtype)
    targets = rng(3).integers(0, V, rows).astype(np.int32) if ids is None else np.asarray(ids)
    options: dict[str, Any] = {}
    if mask:
        options["mask"] = rng(4).random(rows) < 0.6
    if bias:
        options["bias"] = _f((V,), 1, 5, dtype)
    return Call("linear_cross_entropy", (x, head, targets.astype(np.int32)), options, **m)


def emb(ids, V=10, D=3, dtype=np.float32, **more):
    return Call("embedding", (np.asarray(ids, np.int32), _f((V, D), 1, 1, dtype)), {}, **more)


def one(op, shape, size=1.0, dtype=np.float32, put=None, shift=0.0, transposed=False, **o):
    more = {k: o.pop(k) for k in ("receivers", "times", "again", "forward_only") if k in o}
    x = _f(shape, size, 0, dtype, shift)
    if put is not None:
        x.reshape(-1)[: len(put)] = put
    if transposed:
        x = np.asfortranarray(x)
    return Call(op, (x,), o, **more)


def two(op, a, b, dtype=np.float32, **o):
    return Call(op, (_f(a, 1, 0, dtype), _f(b, 1, 1, dtype)), o)


def lgt(rows=4, V=9, D=5, bias=True, size=1.0, dtype=np.float32, **more):
    options = {"bias": _f((V,), 1, 2, dtype)} if bias else {}
    return Call("logits", (_f((rows, D), size, 0, dtype), _f((V, D), 1, 1, dtype)), options, **more)


def adam(n=20, step=3, lr=0.1, n_decayed=None, dtype=np.float32, times=1, **o):
    o = {
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_scale": 1.0,
        **o,
        "step": step,
        "lr": lr,
        "n_decayed": n // 2 if n_decayed is None else n_decayed,
    }
    arrays = (_f(n, 1, 0, dtype), _f(n, 0.1, 1, dtype), _f(n, 0.1, 2, dtype) ** 2)
    return Call("adamw", (*arrays, _f(n, o.pop("grad_size", 1.0), 3, dtype)), o, times=times)


def matrix_step(rows, columns, size=1.0, **o):
    """Return a step of Muon on two matrices side by side, or on one where there is one column."""
    half = columns // 2
    o = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "grad_scale": 1.0, **o}
    o["parts"] = (half, columns - half) if half else (columns,)
    shape = (rows, columns)
    return Call("muon", (_f(shape, 1, 0), _f(shape, 0.1 * size, 1), _f(shape, size, 3)), o)


def add_onto(shape, sliced=False, dtype=np.float32):
    wide = _f((*shape[:-1], 2 * shape[-1]), 1, 0, dtype)
    dst = wide[..., ::2] if sliced else _f(shape, 1, 0, dtype)
    return Call("accumulate", (dst, _f(shape, 1, 1, dtype)), {})


BASE: dict[str, Any] = {
    "vocab_size": 13,
    "d_model": 8,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_head": 4,
    "d_ff": 6,
    "context_length": 16,
}


def made(dtype=np.float32, **fields):
    config = Config(**{**BASE, **fields})
    specs = decoder_specs(config)
    params = {spec.name: _f(spec.shape, 0.5, i, dtype) for i, spec in enumerate(specs)}
    return config, params


def cache_of(batch=2, length=5, dtype=np.float32, **fields):
    config, params = made(dtype, **fields)
    return Call("kv_cache", (params, config, batch, length), {})


def write(position=1, T=2, B=2, S=8, layers=2, layer=1, dtype=np.float32):
    cache = KVCache(
        [_f((B, S, 2, 3), 1, i, dtype) for i in range(layers)],
        [_f((B, S, 2, 3), 1, 9 + i, dtype) for i in range(layers)],
    )
    k, v = _f((B, T, 2, 3), 1, 20, dtype), _f((B, T, 2, 3), 1, 21, dtype)
    return Call("write_kv", (cache, k, v), {"layer": layer, "position": position})


def dec(steps=4, batch=2, position=None, length=None, kind="rope", dtype=np.float32, **fields):
    """The last of ``steps`` tokens, or one at given positions on a cache that is full of numbers."""
    config, params = made(dtype, position=kind, **fields)
    length = length or config.context_length
    cache = ops.kv_cache(params, config, batch, length)
    for i, array in enumerate((*cache.k, *cache.v)):
        array[...] = _f(array.shape, 1, 50 + i, dtype)
    where = np.asarray(steps - 1 if position is None else position)
    token = rng(8).integers(0, config.vocab_size, batch).astype(np.int32)
    return Call("decode_step", (params, config, token, cache, where), {})


def read(text):
    """Return the call that a line of ``wrong.py`` writes down."""
    return eval(text, {**globals()})
