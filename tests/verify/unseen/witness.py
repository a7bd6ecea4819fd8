"""A call on which a wrong kernel differs from the reference, and how that is seen.

Independent of ``accel.verify``: the reference in float64 on the same numbers is the truth, and a
result counts as wrong when it is off by more than 20 times what the reference loses in the
kernel's own precision and by more than 20 units of rounding of the largest element.
"""

from typing import Any, NamedTuple

import numpy as np

from reference import ops
from reference.alibi import alibi_slopes
from reference.config import Config
from reference.params import decoder_specs
from reference.types import DropoutKey, KVCache, Loss

OPS = ops.OPS


class Call(NamedTuple):
    op: str
    arrays: tuple[Any, ...]  # by position
    options: dict[str, Any]  # by name; optional arrays too
    receivers: str = ""  # "" | "out" | "accumulate": out= of the backward
    times: int = 1  # how often it is called; each must be right
    again: str = ""  # "new values": the same arrays with new numbers, called once more
    forward_only: bool = False
    dout_order: str = "C"
    then: Any = None  # another Call, made right after by the same kernel


def rng(seed=0):
    return np.random.default_rng(seed)


def _f(shape, size=1.0, seed=0, dtype=np.float32, shift=0.0):
    return (rng(seed).standard_normal(shape) * size + shift).astype(dtype)


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


def dec(steps=4, batch=2, position=None, length=None, kind='rope', dtype=np.float32, **fields):
    """The last of ``steps`` tokens, or one at given positions on a cache that is full of numbers."""
    config, params = made(dtype, position=kind, **fields)
    length = length or config.context_length
    cache = ops.kv_cache(params, config, batch, length)
    for i, array in enumerate((*cache.k, *cache.v)):
        array[...] = _f(array.shape, 1, 50 + i, dtype)
    where = np.asarray(steps - 1 if position is None else position)
    token = rng(8).integers(0, config.vocab_size, batch).astype(np.int32)
    return Call("decode_step", (params, config, token, cache, where), {})


# ---- running ----


def _copy(value, dtype=None):
    if isinstance(value, np.ndarray):
        new = value.copy(order="K") if value.flags.forc else value.base.copy()[..., ::2]
        return new.astype(dtype) if dtype is not None and value.dtype.kind == "f" else new
    if isinstance(value, KVCache):
        return KVCache([_copy(a, dtype) for a in value.k], [_copy(a, dtype) for a in value.v])
    if isinstance(value, dict):
        return {name: _copy(a, dtype) for name, a in value.items()}
    return value


def _arrays(value):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, KVCache):
        return [*value.k, *value.v]
    if isinstance(value, Loss):
        return [np.array(value.total), np.array(value.n_valid)]
    if isinstance(value, tuple | list):
        return [a for part in value for a in _arrays(part)]
    return [] if value is None else [np.asarray(value)]


def outcome(module, call, dtype=None, reference=False, given=None):
    """All results of one call: outputs, gradients, and what was written in place."""
    op = OPS[call.op]
    options = _copy(call.options, dtype)
    arrays = tuple(_copy(a, dtype) for a in (call.arrays if given is None else given))
    if given is not None and not reference:
        arrays = given
    before = [_copy(a) for a in arrays]
    out = getattr(module, op.forward_name)(*arrays, **options)
    results = []
    if op.backward:
        out, cache = out
        results += _arrays(out)
        if not call.forward_only:
            results += _gradients(module, op, call, out, cache, arrays, dtype)
    else:
        results += _arrays(out)
        if op.name in ("accumulate", "adamw", "write_kv", "decode_step"):
            kept = arrays[3:4] if op.name == "decode_step" else arrays
            results += [a for array in kept for a in _arrays(array)]
        if op.name == "kv_cache":
            pairs = zip(out.k, out.v, strict=True)
            results.append(np.array(any(np.shares_memory(k, v) for k, v in pairs)))
    unchanged = op.backward or op.name in ("softmax", "logits", "square_sums", "global_norm")
    if unchanged and any(
        not np.array_equal(a, b, equal_nan=True)
        for a, b in zip(_arrays(list(before)), _arrays(list(arrays)), strict=True)
    ):
        results.append(np.array(np.nan))
    elif unchanged:
        results.append(np.array(0.0))
    return results


def _gradients(module, op, call, out, cache, arrays, dtype):
    like = arrays[0] if op.name != "embedding" else arrays[1]
    if op.out == "Loss":
        dout = 0.7
    elif isinstance(out, tuple | list):
        dout = tuple(_f(p.shape, 1, 31 + i, p.dtype) for i, p in enumerate(out))
    else:
        dout = _f(out.shape, 1, 31, np.float32).astype(like.dtype, order=call.dout_order)
    options, receivers = {}, []
    if call.receivers:
        shapes = {"table": 1, "weight": 1, "gain": 1, "head": 1}
        receivers = [_f(arrays[shapes[p]].shape, 1, 40, like.dtype) for p in op.parameters[:1]]
        if "bias" in op.parameters:
            bias = call.options.get("bias")
            bias = arrays[2] if op.name == "layernorm" else bias
            receivers.append(None if bias is None else _f(bias.shape, 1, 41, like.dtype))
        options["out"] = receivers[0] if len(op.parameters) == 1 else tuple(receivers)
        if call.receivers == "accumulate":
            options["accumulate"] = True
    found = getattr(module, op.backward_name)(dout, cache, **options)
    found = found if isinstance(found, tuple | list) else (found,)
    # alone where there are receivers: they hold the truth
    kept = [g for g, name in zip(found, op.gradients, strict=True) if name not in op.parameters]
    return _arrays(list(kept) if call.receivers else list(found)) + _arrays(receivers)


def differs(module, call):
    """Return why the module's results are not the reference's, or "" when they are."""
    for _ in range(call.times):
        why = _differs(module, call, None)
        if why:
            return why
    if call.again:  # the same buffers, with other numbers in them
        given = tuple(_copy(a) for a in call.arrays)
        first = outcome(module, call, given=given)
        kept = [a.copy() for a in first]
        for a in given:
            if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                a[...] = _f(a.shape, 1, 77).astype(a.dtype)
        why = _differs(module, call, given)
        if why:
            return f"called again with new numbers: {why}"
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(first, kept, strict=True)):
            return "an earlier result changed"
    return differs(module, call.then) if call.then else ""


def _differs(module, call, given):
    with np.errstate(all="ignore"):
        used = given or call.arrays
        truth = outcome(ops, call, np.float64, reference=True, given=used)
        plain = outcome(ops, call, reference=True, given=used)
        found = outcome(module, call, given=given)
    if len(found) != len(truth):
        return f"{len(found)} results instead of {len(truth)}"
    for i, (t, p, f) in enumerate(zip(truth, plain, found, strict=True)):
        if f.shape != p.shape:
            return f"result {i} has shape {f.shape}, not {p.shape}"
        if f.dtype != p.dtype:
            return f"result {i} is {f.dtype}, not {p.dtype}"
        if t.dtype.kind == "b":
            if t != f:
                return "keys and values share memory"
            continue
        if not np.array_equal(np.isnan(t), np.isnan(f)):
            return f"result {i} has NaN elsewhere"
        with np.errstate(all="ignore"):
            same = (t == f) | np.isnan(t)
            error = np.where(same, 0, np.abs(f - t))
            own = np.where((t == p) | np.isnan(t), 0, np.abs(p - t))
        finite = np.abs(t[np.isfinite(t)]) if t.size else np.zeros(0)
        largest = float(finite.max()) if finite.size else 0.0
        unit = float(np.finfo(p.dtype).eps) if p.dtype.kind == "f" else 0.0
        allowed = 20 * max(float(own.max(initial=0)), unit * largest)
        worst = float(error.max(initial=0))
        if not worst <= allowed:
            return f"result {i} is off by {worst:.3g} of {largest:.3g}, {allowed:.3g} allowed"
    return ""


NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}
