"""The s and c of every op: what its rounding errors can add up to (see ``accel/tolerance.py``).

Each function takes the inputs of an op in float64 and returns a ``Magnitude`` for each result: the
reference's formula with every minus sign a plus and every factor its absolute value, the number r
of roundings on the longest path, and the number n of terms of its longest sum. Written in the
letters of the reference file of the same name.

Where a function bends, its slope enters s: exp(z) turns an absolute error u|z| of its argument
into a relative one, so a probability whose scores have magnitude A is off by about (1 + 2A) u
(``_bend``). All else is first order in u.

r counts, for each op: one rounding for a product or a sum; two for a division, root, exp, log,
tanh or erf (fast ones are right to two units in the last place); one for each result that a bf16
kernel may store on the way (n in a norm, P and ds in attention, the logits).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, Magnitude
from reference import ops
from reference.types import Array

Magnitudes = dict[str, Magnitude]
Values = Mapping[str, Any]

# A probability below this may be flushed to zero: exp of float32 has nothing below 1e-38.
_SMALLEST_P = 1e-30


def _rows(x: Array) -> tuple[int, ...]:
    return tuple(range(x.ndim - 1))


def _n_rows(x: Array) -> int:
    return math.prod(x.shape[:-1])


def _bend(top: Array, u: float) -> Array:
    """Return what the rounding of a probability grows by when its scores have magnitude top.

    exp(z (1 + u) - lse (1 + u)) is off by a factor of up to exp(2u·top): 1 + 2·top roundings where
    u·top is small, and more where a bf16 kernel keeps large scores in bf16.
    """
    return np.asarray(1 + np.expm1(np.minimum(2 * u * top, 40)) / u)


def add(v: Values, dout: Array, u: float) -> Magnitudes:
    """One rounding forward; the gradient of a repeated element is a sum."""
    a, b, d = np.abs(v["a"]), np.abs(v["b"]), np.abs(dout)
    _, cache = ops.add_forward(a, b)
    da, db = ops.add_backward(d, cache)
    return {
        "out": Magnitude(a + b, 1),
        "da": Magnitude(da, 1, max(1, d.size // max(1, a.size))),
        "db": Magnitude(db, 1, max(1, d.size // max(1, b.size))),
    }


def scale(v: Values, dout: Array, u: float) -> Magnitudes:
    """The factor is rounded to the working precision, then the product."""
    c = abs(float(v["factor"]))
    return {"out": Magnitude(c * np.abs(v["x"]), 2), "dx": Magnitude(c * np.abs(dout), 2)}


def embedding(v: Values, dout: Array, u: float) -> Magnitudes:
    """A copy forward; backward a sum over the positions that share an id."""
    ids, table = v["ids"], np.abs(v["table"])
    out, cache = ops.embedding_forward(ids, table)
    most = int(np.bincount(ids.reshape(-1)).max(initial=1))
    dtable = ops.embedding_backward(np.abs(dout), cache)
    return {"out": Magnitude(out, 1), "dtable": Magnitude(dtable, 2, most)}


def linear(v: Values, dout: Array, u: float) -> Magnitudes:
    """Sums of products; r = 2 is the product's rounding and the bias or the result's."""
    x, weight = np.abs(v["x"]), np.abs(v["weight"])
    bias = None if v.get("bias") is None else np.abs(v["bias"])
    out, cache = ops.linear_forward(x, weight, bias)
    dx, dweight, dbias = ops.linear_backward(np.abs(dout), cache)
    found = {
        "out": Magnitude(out, 3, weight.shape[0]),
        "dx": Magnitude(dx, 2, weight.shape[1]),
        "dweight": Magnitude(dweight, 2, _n_rows(x)),
    }
    if dbias is not None:
        found["dbias"] = Magnitude(dbias, 1, _n_rows(x))
    return found


def split_heads(v: Values, dout: tuple[Array, ...], u: float) -> Magnitudes:
    """Copies: a rounding at most, where a kernel stores bf16."""
    parts, _ = ops.split_heads_forward(np.abs(v["x"]), heads=v["heads"])
    found = {f"out[{i}]": Magnitude(part, 1) for i, part in enumerate(parts)}
    found["dx"] = Magnitude(np.abs(np.concatenate(dout, axis=2)), 1)
    return found


def merge_heads(v: Values, dout: Array, u: float) -> Magnitudes:
    """Copies, as above."""
    out, cache = ops.merge_heads_forward(np.abs(v["x"]))
    return {
        "out": Magnitude(out, 1),
        "dx": Magnitude(ops.merge_heads_backward(np.abs(dout), cache), 1),
    }


def rmsnorm(v: Values, dout: Array, u: float) -> Magnitudes:
    """Squares do not cancel, so r is right to a few u: r = 4 for it, then x r g and the result."""
    x, gain = np.abs(v["x"]), np.abs(v["gain"])
    out, cache = ops.rmsnorm_forward(x, gain, eps=v["eps"])
    n, dn = x * cache.rstd, np.abs(dout) * gain
    dx = cache.rstd * (dn + n * np.mean(dn * n, axis=-1, keepdims=True))
    width = x.shape[-1]
    return {
        "out": Magnitude(out, 7, width),
        "dx": Magnitude(dx, 10, 2 * width),
        "dgain": Magnitude(np.sum(np.abs(dout) * n, axis=_rows(x)), 7, _n_rows(x) + width),
    }


def layernorm(v: Values, dout: Array, u: float) -> Magnitudes:
    """x - μ cancels: an offset in x costs every digit that it has more than the deviations."""
    x, gain, d = v["x"], np.abs(v["gain"]), np.abs(dout)
    _, cache = ops.layernorm_forward(x, gain, gain, eps=v["eps"])
    n, rstd = np.abs(cache.n), cache.rstd
    centred = rstd * (np.abs(x) + np.mean(np.abs(x), axis=-1, keepdims=True))
    relative = 1 + np.mean(n * centred, axis=-1, keepdims=True)  # of rstd, through the variance
    s_n = centred + n * relative
    dn = d * gain
    along = np.mean(dn * n, axis=-1, keepdims=True)
    dx = rstd * (
        relative * (dn + np.mean(dn, axis=-1, keepdims=True) + n * along)
        + s_n * along
        + n * np.mean(dn * s_n, axis=-1, keepdims=True)
    )
    width, rows = x.shape[-1], _n_rows(x)
    return {
        "out": Magnitude(s_n * gain + np.abs(v["bias"]), 8, width),
        "dx": Magnitude(dx, 11, 2 * width),
        "dgain": Magnitude(np.sum(d * s_n, axis=_rows(x)), 8, rows + width),
        "dbias": Magnitude(np.sum(d, axis=_rows(x)), 1, rows),
    }


def rope(v: Values, dout: Array, u: float) -> Magnitudes:
    """cos and sin of an angle that is made in float64 in every precision.

    The angle t ω_j = t base^(-2j/d) is off by |t ω_j| (2 + ln base) u₆₄ when ω is made by way of
    exp and log; in units of the working precision that is divided by its u.
    """
    x = np.abs(v["x"])
    T, H, d = x.shape[1:]
    rotated = H if v.get("rotate_heads") is None else v["rotate_heads"]
    base = float(v["base"])
    position = np.abs(np.expand_dims(v.get("start", 0), -1) + np.arange(T))
    omega = base ** (-np.arange(0, d, 2) / d)
    angle = position[..., None, None] * omega * (2 + abs(math.log(base)))
    angle = 1 + angle * UNIT_ROUNDOFF["float64"] / u

    def turned(a: Array) -> Array:
        s = a.copy()
        both = (a[:, :, :rotated, 0::2] + a[:, :, :rotated, 1::2]) * angle
        s[:, :, :rotated, 0::2] = s[:, :, :rotated, 1::2] = both
        return s

    return {"out": Magnitude(turned(x), 5), "dx": Magnitude(turned(np.abs(dout)), 5)}


def attention(v: Values, dout: Array, u: float) -> Magnitudes:
    """P of scores whose terms add up to A in magnitude is off by (1 + 2A) u.

    In bf16 that holds of sums, which are kept in float32; what is stored on the way is counted by
    ``_attention_stored``.
    """
    a = _grouped(v, dout)
    kept = 1.0 if a.dropout is None else a.dropout
    unit = min(u, UNIT_ROUNDOFF["float32"])
    top = np.max(np.where(a.mask, a.score, 0), axis=-1, keepdims=True)
    p = (a.p + _SMALLEST_P * a.mask) * _bend(top, unit)
    k, w, do = np.abs(a.k), np.abs(a.v), np.abs(a.do)
    dp = (do @ w.swapaxes(-1, -2)) * kept
    ds = p * (dp + np.sum(a.p * dp, axis=-1, keepdims=True))
    found = _products(a, p * kept, ds, np.abs(a.q), k, w, do)
    d, dv, S, rows = k.shape[-1], w.shape[-1], k.shape[-2], a.q.shape[2] * a.q.shape[3]
    terms = {"out": d + 2 * S, "dq": d + dv + S, "dk": d + dv + S + rows, "dv": d + S + rows}
    roundings = {"out": 8, "dq": 12, "dk": 12, "dv": 8}
    if unit == u:
        return {n: Magnitude(s, roundings[n], terms[n]) for n, s in found.items()}
    stored = _attention_stored(a, kept, u)
    sums = {n: roundings[n] + min(terms[n], 4 * math.sqrt(terms[n])) for n in found}
    return {n: Magnitude(stored[n] + sums[n] * unit / u * s, 1) for n, s in found.items()}


class _Grouped(NamedTuple):
    """Attention with query heads in their groups: arrays are (B, Hkv, G, T or S, ...)."""

    q: Array
    k: Array  # G = 1
    v: Array  # G = 1
    do: Array
    p: Array
    dropout: Array | None
    scale: float
    exact: Array  # the scores
    score: Array  # what their terms add up to in magnitude
    mask: Array  # which keys may be seen


def _grouped(v: Values, dout: Array) -> _Grouped:
    q, k, w = v["q"], v["k"], v["v"]
    B, T, Hq, d = q.shape
    S, Hkv, dv = w.shape[1:]
    G = Hq // Hkv
    _, cache = ops.attention_forward(
        q, k, w, **{n: x for n, x in v.items() if n not in ("q", "k", "v")}
    )
    # with equal scores, whoever may be seen has a probability
    masks = {n: v[n] for n in ("key_mask", "documents", "causal") if n in v}
    mask = ops.attention_forward(0 * q, k, w, **masks)[1].p > 0
    q = q.reshape(B, T, Hkv, G, d).transpose(0, 2, 3, 1, 4)
    do = dout.reshape(B, T, Hkv, G, dv).transpose(0, 2, 3, 1, 4)
    k, w = (x.transpose(0, 2, 1, 3)[:, :, None] for x in (k, w))
    scale = abs(cache.scale)
    exact = cache.scale * (q @ k.swapaxes(-1, -2))
    score = scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    if v.get("alibi") is not None:
        slope = v["alibi"].reshape(Hkv, G, 1, 1)
        distance = np.arange(S - T, S)[:, None] - np.arange(S)
        exact, score = exact - slope * distance, score + np.abs(slope * distance)
    return _Grouped(q, k, w, do, cache.p, cache.dropout, scale, exact, score, mask)


def _products(
    a: _Grouped, pk: Array, ds: Array, q: Array, k: Array, v: Array, do: Array
) -> dict[str, Array]:
    """Return the products that attention's results are, in the shapes of the results."""
    B, Hkv, G, T, _ = q.shape

    def flat(x: Array) -> Array:
        return np.asarray(x.transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, -1))

    return {
        "out": flat(pk @ v),
        "dq": flat(a.scale * (ds @ k)),
        "dk": a.scale * np.sum(ds.swapaxes(-1, -2) @ q, axis=2).transpose(0, 2, 1, 3),
        "dv": np.sum(pk.swapaxes(-1, -2) @ do, axis=2).transpose(0, 2, 1, 3),
    }


def _attention_stored(a: _Grouped, kept: Array | float, u: float) -> dict[str, Array]:
    """Return s of bf16 attention: what may be rounded to bf16 on the way, to first order in u.

    Plain code in bf16 adds up in float32 and rounds whatever it writes to memory. On the way to P
    that is q or its product with the scale (which is off by A u), the score, the score with ALiBi
    (|s| u each) and the distance from the largest: a score is off by η. Then
    p̃ = p exp(±η) / Σ p exp(±η), of which exp and the quotient are stored. On the way to ds: dp, dp
    with dropout, D = Σ p dp = do·out, where out was stored, dp - D, and the product with p. The
    results are stored, dk and dv for each query head before a group is added up.
    """
    p = a.p + _SMALLEST_P * a.mask
    top = np.max(np.where(a.mask, a.exact, -np.inf), axis=-1, keepdims=True)
    below = np.where(a.mask, top - np.where(a.mask, a.exact, 0), 0)
    eta = np.where(a.mask, u * (a.score + 2 * np.abs(a.exact) + below), 0)
    eta = np.minimum(eta, 40)  # beyond which anything goes
    least = np.sum(a.p * np.exp(-eta), axis=-1, keepdims=True)
    grown = np.exp(eta) / np.where(least > 0, least, 1)
    dp_err = p * (2 + (grown - 1) / u)  # of p, in units of u
    more = p * grown  # what p may have become
    kept = np.asarray(kept)
    pk_err = dp_err * kept + more * kept  # the product with dropout is stored

    dp = (a.do @ a.v.swapaxes(-1, -2)) * kept
    out = (a.p * kept) @ a.v
    D = np.sum(a.p * dp, axis=-1, keepdims=True)
    D_err = np.sum(dp_err * np.abs(dp) + 3 * more * np.abs(dp), axis=-1, keepdims=True)
    D_err = D_err + np.sum(np.abs(a.do * out), axis=-1, keepdims=True) + np.abs(D)
    off = np.abs(dp - D)
    ds_err = dp_err * off + more * (2 * np.abs(dp) + D_err + 2 * off)
    s = _products(a, pk_err, ds_err, np.abs(a.q), np.abs(a.k), np.abs(a.v), np.abs(a.do))
    ds, pk = a.p * (dp - D), a.p * kept
    stored = _products(a, pk, ds, a.q, a.k, a.v, a.do)
    for name, by_head in (("dk", ds.swapaxes(-1, -2) @ a.q), ("dv", pk.swapaxes(-1, -2) @ a.do)):
        scale = a.scale if name == "dk" else 1.0
        stored[name] = scale * np.sum(np.abs(by_head), axis=2).transpose(0, 2, 1, 3)
    return {name: x + 2 * np.abs(stored[name]) for name, x in s.items()}


def swiglu(v: Values, dout: Array, u: float) -> Magnitudes:
    """σ of |g| stands for σ(g), and 1 + |g| (1 + σ) for the slope."""
    gate, up = np.split(np.abs(v["x"]), 2, axis=-1)
    sigma, d = 1 / (1 + np.exp(-gate)), np.abs(dout)
    dgate = d * up * sigma * (1 + gate * (1 + sigma))
    return {
        "out": Magnitude(gate * sigma * up, 8),
        "dx": Magnitude(np.concatenate([dgate, d * gate * sigma], axis=-1), 12),
    }


def gelu(v: Values, dout: Array, u: float) -> Magnitudes:
    """Φ(|x|): ½(1 + erf) cancels for negative x and is a common way to write it."""
    x, d = np.abs(v["x"]), np.abs(dout)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    # the density is off by the rounding of x²/2
    return {"out": Magnitude(x, 8), "dx": Magnitude(d * (1 + x * density * (1 + x * x / 2)), 10)}


def gelu_tanh(v: Values, dout: Array, u: float) -> Magnitudes:
    """1 + tanh cancels for negative x, and so does 1 - tanh² in the slope for any large x."""
    x, d = np.abs(v["x"]), np.abs(dout)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    h = np.tanh(inner)
    bend = (1 - h * h) * inner  # of tanh, by the error of its argument
    slope = 1 + h + x * (1 + h * h + 2 * h * bend) * math.sqrt(2 / math.pi)
    slope = slope * (1 + 3 * 0.044715 * x * x) + bend
    return {"out": Magnitude(x * (1 + h + bend), 8), "dx": Magnitude(d * slope, 14)}


def relu(v: Values, dout: Array, u: float) -> Magnitudes:
    """Copies."""
    return {"out": Magnitude(np.abs(v["x"]), 1), "dx": Magnitude(np.abs(dout), 1)}


def dropout(v: Values, dout: Array, u: float) -> Magnitudes:
    """1/(1 - p) is rounded, or divided by."""
    grown = 1 / (1 - float(v["p"]))
    return {
        "out": Magnitude(np.abs(v["x"]) * grown, 4),
        "dx": Magnitude(np.abs(dout) * grown, 4),
    }


def linear_cross_entropy(v: Values, dout: float, u: float) -> Magnitudes:
    """Logits whose terms add up to A: a row's loss is off by 2A and its own size, p by 1 + 2A."""
    head = np.abs(v["head"])
    width = head.shape[1]
    x = np.abs(v["x"]).reshape(-1, width)
    mask = v.get("mask")
    mask = np.ones(len(x), bool) if mask is None else mask.reshape(-1)
    targets = np.where(mask, v["targets"].reshape(-1), 0)
    bias = v.get("bias")
    z = ops.logits(v["x"].reshape(-1, width), v["head"], bias)
    size = x @ head.T + (0 if bias is None else np.abs(bias))
    top = np.max(size, axis=-1, keepdims=True)
    p = (ops.softmax(z) + _SMALLEST_P) * _bend(top, u)
    losses = 1 + 3 * top[:, 0] + math.log(len(head))
    # p - 1 at the target: the one is exact, what is left of it is not
    p[np.arange(len(x)), targets] += 1
    dz = p * mask[:, None] * abs(float(dout))
    rows, terms = len(x), width + len(head)
    found = {
        "total": Magnitude(np.asarray(np.sum(losses * mask)), 6, terms + rows),
        "n_valid": Magnitude(np.asarray(0.0), 0),
        "dx": Magnitude((dz @ head).reshape(v["x"].shape), 9, terms),
        "dhead": Magnitude(dz.T @ x, 9, terms + rows),
    }
    if bias is not None:
        found["dbias"] = Magnitude(np.sum(dz, axis=0), 8, terms + rows)
    return found


# ---- without a backward --------------------------------------------------------------------------


def softmax(v: Values, dout: None, u: float) -> Magnitudes:
    """As P in attention, the scores being given."""
    top = np.max(np.abs(v["x"]), axis=-1, keepdims=True)
    p = (ops.softmax(v["x"]) + _SMALLEST_P) * _bend(top, u)
    return {"out": Magnitude(p, 7, v["x"].shape[-1])}


def logits(v: Values, dout: None, u: float) -> Magnitudes:
    """A linear layer."""
    bias = None if v.get("bias") is None else np.abs(v["bias"])
    out = ops.logits(np.abs(v["x"]), np.abs(v["head"]), bias)
    return {"out": Magnitude(out, 3, v["head"].shape[1])}


def square_sums(v: Values, dout: None, u: float) -> Magnitudes:
    """Kept in float64 in every precision, so counted in float64's u (see ``FLOAT64_OPS``)."""
    return {"out": Magnitude(ops.square_sums(v["x"]), 2, min(len(v["x"]), 65_536))}


def global_norm(v: Values, dout: None, u: float) -> Magnitudes:
    """The root of those sums, in float64 too."""
    return {"out": Magnitude(np.asarray(ops.global_norm(v["x"])), 4, len(v["x"]))}


def accumulate(v: Values, dout: None, u: float) -> Magnitudes:
    """One sum."""
    return {"dst": Magnitude(np.abs(v["dst"]) + np.abs(v["src"]), 1)}


def adamw(v: Values, dout: None, u: float) -> Magnitudes:
    """1 - β and 1 - βᵗ cancel, so each is taken as the sum."""
    beta1, beta2, t = v["beta1"], v["beta2"], v["step"]
    grad = np.abs(v["grad"]) * abs(float(v.get("grad_scale", 1.0)))
    master, m = np.abs(v["master"]), np.abs(v["m"])
    s_m = beta1 * m + (1 + beta1) * grad
    s_v = beta2 * v["v"] + (1 + beta2) * grad * grad
    root_v = np.sqrt((beta2 * v["v"] + (1 - beta2) * grad * grad) / (1 - beta2**t))
    exact_m = np.abs(beta1 * v["m"] + (1 - beta1) * v["grad"] * float(v.get("grad_scale", 1.0)))
    grown1, grown2 = (1 + beta1**t) / (1 - beta1**t), (1 + beta2**t) / (1 - beta2**t)
    # √v̂ is off relatively by half of v̂'s error: from v and from the bias correction
    relative = 1 + grown2 + s_v / np.maximum((1 - beta2**t) * root_v**2, np.finfo(float).tiny)
    update = (s_m + exact_m * (grown1 + relative)) / (1 - beta1**t) / (root_v + v["eps"])
    update[: v["n_decayed"]] += v["weight_decay"] * master[: v["n_decayed"]]
    return {
        "master": Magnitude(master + v["lr"] * update, 10),
        "m": Magnitude(s_m, 4),
        "v": Magnitude(s_v, 5),
    }


MAGNITUDES: dict[str, Callable[..., Magnitudes]] = {
    f.__name__: f
    for f in (
        add,
        scale,
        embedding,
        linear,
        split_heads,
        merge_heads,
        rmsnorm,
        layernorm,
        rope,
        attention,
        swiglu,
        gelu,
        gelu_tanh,
        relu,
        dropout,
        linear_cross_entropy,
        softmax,
        logits,
        square_sums,
        global_norm,
        accumulate,
        adamw,
    )
}
