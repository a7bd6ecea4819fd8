"""Cases of attention.

Within this file query heads stand in their groups: arrays are (B, Hkv, G, T or S, ...), with G = 1
for keys and values.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from accel.tolerance import Unit
from accel.verify.contract import Case, numpy_dtype, reference_results
from accel.verify.draw import LENGTHS, MAX_SCORES
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from accel.verify.rounding import bend
from reference.alibi import alibi_slopes
from reference.philox import keep_mask
from reference.types import Array
from reference.visibility import Visibility

WEIGHT = 1.5
TABLES = ("philox",)
PRODUCTS = True
CUTS = "B T S Hkv G d dv"

# (T, S): long and thin, beyond 8 tiles of 128 and what 15 and 16 bits can count
LONG = (
    (300, 300),
    (513, 513),
    (33, 1025),
    (1025, 33),
    (3, 4097),
    (4097, 3),
    (1, 65_537),
    (65_537, 1),
)
WIDE = 16  # the width of a head up to which a table of scores may be as large as any
WINDOWS = (1, 2, 3, 7, 16, 33, 64, 65, 129, 257, 300, 1025)
_SHORT: dict[str, Any] = {"long": False}
_ALL_SEE: dict[str, Any] = {
    **{"long": True, "documents": False, "key_mask": False},
    "dropout_p": False,
}
HARD: tuple[dict[str, Any], ...] = (
    _SHORT | {"T": 17, "relation": "S = T", "heads": (2, 3, 1), "d": 8, "causal": True},
    _SHORT | {"T": 33, "relation": "S > T", "more": 16, "heads": (2, 2, 3), "d": 16, "dv": True},
    _SHORT | {"T": 65, "relation": "S = T", "heads": (1, 2, 2), "window": True, "within": 16},
    _SHORT | {"T": 33, "relation": "S = T", "heads": (2, 2, 2), "d": 128, "causal": True},
    _SHORT | {"T": 128, "relation": "S = T", "heads": (1, 1, 4), "d": 64, "causal": True},
    _SHORT | {"T": 16, "relation": "S = T", "heads": (5, 2, 16), "d": 8, "key_mask": True},
    _SHORT | {"T": 5, "relation": "S = T", "heads": (1, 2, 2), "scale": True, "factor": 0.0},
    {"long": True, "T S": (3, 4097), "heads": (1, 2, 1), "key_mask": True, "masked": "few"},
    _SHORT | {"T": 17, "relation": "any", "S": 5, "heads": (2, 1, 2), "causal": True},
    _SHORT | {"T": 3, "relation": "S = T", "heads": (3, 3, 1), "d": 3, "dv": False},
    _ALL_SEE | {"T S": (300, 300), "window": True, "within": 129, "causal": True},
    _SHORT | {"T": 7, "relation": "S = T", "heads": (2, 2, 2), "special": "nan", "where": "k"},
    _SHORT | {"T": 33, "relation": "S = T", "q": "large", "heads": (2, 1, 5), "alibi": True},
    _SHORT | {"T": 64, "relation": "S = T", "heads": (1, 3, 1), "documents": True, "q": "faint"},
    {"long": True, "T S": (1025, 33), "causal": False, "window": False},
    _SHORT | {"T": 16, "relation": "S = T", "heads": (3, 2, 7), "dropout_p": True, "p": 0.5},
    _ALL_SEE | {"T S": (513, 513), "window": True, "within": 257, "causal": False},
    _SHORT | {"T": 129, "relation": "S = T", "heads": (1, 2, 3), "key_mask": True},
    _SHORT | {"T": 5, "relation": "S = T", "special": "nan", "where": "v", "heads": (2, 3, 2)},
    _SHORT | {"T": 31, "relation": "S > T", "more": 33, "layout": "transposed", "laid": "all"},
    _SHORT | {"T": 65, "relation": "S = T", "heads": (2, 1, 3), "d": 1, "below zero": True},
    _ALL_SEE | {"T S": (1, 65_537), "window": True, "within": 129, "alibi": False},
    _SHORT | {"T": 7, "relation": "any", "S": 3, "special": "nan", "where": "dout"},
    _SHORT | {"T": 17, "relation": "S > T", "more": 7, "heads": (1, 2, 2), "d": 256},
    _SHORT | {"T": 16, "relation": "S = T", "heads": (2, 1, 3), "d": 96, "dv": False},
    _SHORT | {"T": 17, "relation": "S = T", "special": "inf", "where": "q"},
    {"long": True, "T S": (4097, 3), "causal": False},
    {"long": True, "T S": (65_537, 1), "causal": False, "documents": False},
)


def generate(draw: Draw) -> Draft:
    """Every way to mask, with groups of 1 to 16 query heads and more keys than queries or fewer.

    A forgotten mask shows best where scores are faint, so that nothing else can be off by much; and
    where they are below zero and values are above, so that a key of zeros draws all attention.
    """
    long = draw.rarely("long", 12)
    if long:
        T, S = draw.pick(LONG, "T S")
    else:
        # a window leaves whole tiles of the longest unseen
        lengths = (*LENGTHS, 256, 257) if draw.offers("window") else (*LENGTHS, 256)
        T = draw.pick(lengths, "T")
        relation = draw.pick(("S = T", "S > T", "any"), "relation")
        S = T
        if relation == "S > T":
            S = T + draw.pick((1, 2, 7, 16, 33, 64), "more")
        elif relation == "any":
            S = draw.pick(lengths, "S")
    heads = [(B, Hkv, G) for B in (1, 2, 3) for Hkv in (1, 2, 3) for G in (1, 2, 3, 4, 5, 6, 7)]
    heads += [(B, Hkv, G) for B in (1, 5) for Hkv in (1, 2) for G in (8, 16)]
    heads = [h for h in heads if math.prod(h) * T * S <= MAX_SCORES or math.prod(h) == 1]
    B, Hkv, G = draw.pick(heads, "heads")
    # the widest heads where there is little else
    wide = [d for d in (80, 96, 128, 129, 256) if B * Hkv * G * T * S * d <= WIDE * MAX_SCORES]
    d = draw.pick((1, 2, 3, 8) if long else (1, 2, 3, 4, 8, 16, 17, 33, 64, 65, *wide), "d")
    dv = draw.pick((1, 2, 3, 8, 17, 40)) if draw.pick((False, True), "dv") and not long else d
    kinds = ("large", "wide", "faint")
    arrays: dict[str, Any] = {
        "q": draw.values(B, T, Hkv * G, d, kinds=kinds, name="q"),
        "k": draw.values(B, S, Hkv, d, kinds=("wide", "zero rows"), name="k"),
        "v": draw.values(B, S, Hkv, dv, name="v"),
        "alibi": None,
        "key_mask": None,
        "documents": None,
    }
    if draw.rarely("below zero", 4):
        arrays["q"], arrays["k"] = np.abs(arrays["q"]), -np.abs(arrays["k"])
        arrays["v"] = np.abs(arrays["v"])
    if draw.wants("alibi"):
        slopes = alibi_slopes(Hkv * G, np.float64)
        arrays["alibi"] = draw.rounded(draw.pick((slopes, draw.rng.random(Hkv * G)), "slopes"))
    if draw.wants("key_mask"):
        arrays["key_mask"] = _key_mask(draw, B, S)
    if S >= T and draw.wants("documents"):
        runs = np.cumsum(draw.rng.random((B, S)) < draw.pick((0.3, 0.03), "changes"), axis=1)
        mixed = draw.rng.integers(0, 3, (B, S))
        documents = draw.pick((runs, mixed), "kind of documents")
        # numbers that are alike in their low 16 bits, too, or as float32
        documents = documents * draw.pick((1, 2**16), "apart") + draw.pick((0, 2**24), "from")
        arrays["documents"] = documents.astype(np.int32)
    options: dict[str, Any] = {}
    if draw.offers("causal"):
        options["causal"] = draw.pick((True, False), "causal")
    if draw.wants("scale"):
        options["scale"] = draw.pick((0.3, 1.0, 0.0), "factor")
    if draw.offers("dropout_key") and draw.wants("dropout_p"):
        options["dropout_p"] = draw.pick((0.5, 0.1), "p")
        options["dropout_key"] = draw.key(B)
    if draw.wants("window"):
        options["window"] = draw.pick((*WINDOWS, S, S + 1), "within")
    return Draft(arrays, options)


def _key_mask(draw: Draw, B: int, S: int) -> Array:
    """Return which keys may be seen (B, S): padding behind or before, holes, few, none, all."""
    kind = draw.pick(("behind", "before", "holes", "few", "nothing", "everything"), "masked")
    lengths = draw.rng.integers(0, S + 1, (B, 1))
    if kind == "behind":
        return np.asarray(np.arange(S) < np.maximum(lengths, 1))
    if kind == "before":
        return np.asarray(np.arange(S) >= np.minimum(lengths, S - 1))
    if kind == "holes":
        return np.asarray(draw.rng.random((B, S)) < 0.6)
    if kind == "few":  # of which each counts, however many there are
        mask = draw.rng.random((B, S)) < 8 / S
        mask[:, -1] = True
        return np.asarray(mask)
    if kind == "everything":
        return np.ones((B, S), np.bool_)
    mask = np.ones((B, S), np.bool_)
    mask[int(draw.rng.integers(B))] = False  # a row of the batch in which nothing may be seen
    return mask


# ---- how close -----------------------------------------------------------------------------------


class _Table(NamedTuple):
    """What attention makes of every query and key."""

    scale: float
    product: Array  # the score before ALiBi
    score: Array
    size: Array  # what the terms of a score add up to in magnitude
    seen: Array  # which keys may be seen, and have a score
    lse: Array  # log Σ exp(score) of what is seen; +inf where that is nothing
    p: Array
    kept: Array  # κ of the dropout


def _by_head(x: Array, Hkv: int) -> Array:
    B, T, Hq, width = x.shape
    return x.reshape(B, T, Hkv, Hq // Hkv, width).transpose(0, 2, 3, 1, 4)


def _visibility(v: Values) -> Visibility:
    rules = {name: v[name] for name in ("causal", "window", "key_mask", "documents") if name in v}
    return Visibility(v["q"].shape[1], v["k"].shape[1], **rules)


def _table(v: Values) -> _Table:
    Hkv, d = v["k"].shape[2:]
    q, k, who = _by_head(v["q"], Hkv), _by_head(v["k"], Hkv), _visibility(v)
    scale = 1 / math.sqrt(d) if v.get("scale") is None else v["scale"]
    score = product = scale * (q @ k.swapaxes(-1, -2))
    size = abs(scale) * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    if v.get("alibi") is not None:
        lower = v["alibi"].reshape(Hkv, -1, 1, 1) * who.distance
        score, size = score - lower, size + np.abs(lower)

    seen = who.allowed()[:, None, None] & (score != -np.inf)
    masked = np.where(seen, score, -np.inf)
    top = np.max(masked, axis=-1, keepdims=True)
    top = np.where(top == -np.inf, 0, top)
    p = np.exp(masked - top)
    total = np.sum(p, axis=-1, keepdims=True)
    lse = np.where(total == 0, np.inf, np.log(np.where(total == 0, 1, total)) + top)
    p = p / np.where(total == 0, 1, total)
    kept: Array = np.ones(1)
    if v.get("dropout_p"):
        B, T, Hq, _ = v["q"].shape
        keep = keep_mask((B, Hq, T, len(k[0, 0, 0])), v["dropout_p"], v["dropout_key"])
        kept = keep.reshape(score.shape) / (1 - v["dropout_p"])
    return _Table(abs(scale), product, score, size, seen, lse[..., 0], p, kept)


def magnitude(v: Values, dout: Array, u: Unit) -> Magnitudes:
    """P of scores whose terms add up to A in magnitude is off by (1 + 2A) u.

    In 16 bits that holds of sums, which are kept in float32; what is stored on the way is counted
    by ``_stored``. TF32 rounds both inputs of a product, which is off by 2u then: 2A u of a score.
    """
    a = _table(v)
    unit = u.sums if u.stored else u
    top = np.max(a.size, axis=-1, keepdims=True, where=a.seen, initial=0)
    p = (a.p + u.least * a.seen) * bend(top, unit)
    q, k, w, do = (_by_head(x, v["k"].shape[2]) for x in (v["q"], v["k"], v["v"], dout))
    sizes = [np.abs(x) for x in (q, k, w, do)]
    ds = None
    if backward := bool(np.any(dout)):  # as no call without a backward has it
        dp = (sizes[3] @ sizes[2].swapaxes(-1, -2)) * a.kept
        ds = p * (dp + np.sum(a.p * dp, axis=-1, keepdims=True))
    found = _products(a.scale, p * a.kept, ds, *sizes)
    d, dv, S, rows = k.shape[-1], w.shape[-1], k.shape[-2], q.shape[2] * q.shape[3]
    terms = {"out": d + 2 * S, "dq": d + dv + S, "dk": d + dv + S + rows, "dv": d + S + rows}
    roundings = {"out": 8, "dq": 12, "dk": 12, "dv": 8}
    zero = {f"d{n}": Magnitude(np.zeros(v[n].shape), 0) for n in "qkv" if not backward}
    if not u.stored:
        return {n: Magnitude(s, roundings[n], terms[n]) for n, s in found.items()} | zero
    stored = _stored(a, q, k, w, do, u)
    sums = {n: roundings[n] + min(terms[n], 4 * math.sqrt(terms[n])) for n in found}
    return {n: Magnitude(stored[n] + sums[n] * unit / u * s, 1) for n, s in found.items()} | zero


def _products(
    scale: float, pk: Array, ds: Array | None, q: Array, k: Array, v: Array, do: Array
) -> dict[str, Array]:
    """Return the products that attention's results are, in the shapes of the results.

    Without ds they are those of the forward.
    """
    B, Hkv, G, T, _ = q.shape

    def flat(x: Array) -> Array:
        return np.asarray(x.transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, -1))

    found = {"out": flat(pk @ v)}
    if ds is None:
        return found
    return found | {
        "dq": flat(scale * (ds @ k)),
        "dk": scale * np.sum(ds.swapaxes(-1, -2) @ q, axis=2).transpose(0, 2, 1, 3),
        "dv": np.sum(pk.swapaxes(-1, -2) @ do, axis=2).transpose(0, 2, 1, 3),
    }


def _stored(a: _Table, q: Array, k: Array, v: Array, do: Array, u: Unit) -> dict[str, Array]:
    """Return s of 16-bit attention: what may be rounded to 16 bits on the way, to first order in u.

    Plain code adds up in float32 and rounds whatever it writes to memory. On the way to P that is
    q or its product with the scale (which, with what ALiBi takes off, is off by A u), the score
    before ALiBi and with it, and the distance from the largest: a score is off by η. How far P
    moves then is counted whole (``_moved``); of it, exp is stored, which a sum is made of, and the
    quotient. On the way to ds: dp, dp with dropout, D = Σ p dp = do·out, where out was stored,
    dp - D, and the product with p; of dropout the factor too. The results are stored, dk and dv for
    each query head before a group is added up. A backward that makes P again has to take scores as
    they were in its lse: of others P has not the sum 1, and with scores of 1,000 it may be
    anything.
    """
    top = np.max(np.where(a.seen, a.score, -np.inf), axis=-1, keepdims=True)
    z = np.where(a.seen, a.score - np.where(a.seen, top, 0), -np.inf)
    below = np.where(a.seen, -z, 0)
    eta = np.where(a.seen, u * (a.size + np.abs(a.product) + np.abs(a.score) + below), 0)
    least, most = _moved(z, eta)
    p_err = np.maximum(most - a.p, a.p - least) / u + 3 * (most + u.least * a.seen)  # in units of u
    pk_err = (p_err + 2 * most) * a.kept

    pk, sizes = a.p * a.kept, [np.abs(x) for x in (q, k, v, do)]
    if not np.any(do):
        found = _products(a.scale, pk_err, None, *sizes)
        return {"out": found["out"] + 2 * np.abs(_products(a.scale, pk, None, q, k, v, do)["out"])}

    dp = (do @ v.swapaxes(-1, -2)) * a.kept
    D = np.sum(a.p * dp, axis=-1, keepdims=True)
    D_err = np.sum(p_err * np.abs(dp) + 4 * most * np.abs(dp), axis=-1, keepdims=True)
    D_err = D_err + np.sum(np.abs(do * (pk @ v)), axis=-1, keepdims=True) + np.abs(D)
    off = np.abs(dp - D)
    ds_err = p_err * off + most * (3 * np.abs(dp) + D_err + 2 * off) + u.least * a.seen
    ds = a.p * (dp - D)
    stored = _products(a.scale, pk, ds, q, k, v, do)
    for name, by_head in (
        ("dk", a.scale * ds.swapaxes(-1, -2) @ q),
        ("dv", pk.swapaxes(-1, -2) @ do),
    ):
        stored[name] = np.sum(np.abs(by_head), axis=2).transpose(0, 2, 1, 3)
    s = _products(a.scale, pk_err, ds_err, *sizes)
    return {name: x + 2 * np.abs(stored[name]) for name, x in s.items()}


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _moved(z: Array, eta: Array) -> tuple[Array, Array]:
    """Return the least and the most that each P may become when each score is off by η at most.

    P_i = exp(z_i) / Σ exp(z_j) grows with z_i and falls with all other scores, so that it is most
    at z_i + η_i and z_j - η_j.
    """
    up, down = z + eta, z - eta
    least = 1 / (1 + np.exp(_log_of_others(up) - down))
    most = 1 / (1 + np.exp(_log_of_others(down) - up))
    seen = z > -np.inf
    # exp has nothing below -745, which 2η may bring back
    return np.where(seen & (eta < 300), least, 0), np.where(seen, most, 0)


def _log_of_others(z: Array) -> Array:
    """Return log Σ exp(z_j) over all j ≠ i along the last axis, without taking e_i off a sum."""
    first = np.argmax(z, axis=-1, keepdims=True)
    top = np.take_along_axis(z, first, axis=-1)
    e = np.exp(z - np.where(top == -np.inf, 0, top))
    np.put_along_axis(e, first, 0, axis=-1)
    others = np.sum(e, axis=-1, keepdims=True)
    rest = others - e + 1  # the largest is 1
    np.put_along_axis(rest, first, others, axis=-1)
    return np.asarray(np.log(rest) + np.where(top == -np.inf, 0, top))


# ---- what a backward is given, and what goes wrong -----------------------------------------------


def saved(case: Case) -> dict[str, Array]:
    """Return lse, log Σ exp(score) of each query, (B, Hq, T).

    It is +inf for a query that may attend to nothing, so that exp(score - lse) is zero there.
    """
    with np.errstate(invalid="ignore"):  # of what is infinite already
        lse = _table(case.values()).lse
    B, Hkv, G, T = lse.shape
    dtype = numpy_dtype(case.dtype)
    return {"lse": np.asarray(lse.reshape(B, Hkv * G, T), dtype)}


def only(case: Case) -> Iterator[tuple[str, str, Array]]:
    nothing = np.isinf(saved(case)["lse"]).transpose(0, 2, 1)
    when = "the first queries" if case.arrays["key_mask"] is None else "some queries"
    yield f"{when} may attend to nothing: they must give zeros.", "out", nothing


def ratios(case: Case) -> Iterator[tuple[float, str]]:
    q, k, p = case.arrays["q"], case.arrays["k"], case.options.get("dropout_p", 0)
    given = case.options.get("scale")
    if scale := 1 / math.sqrt(q.shape[-1]) if given is None else given:
        yield 1 / scale, "missing scale? the factor is missing once"
        yield scale, "scale? the factor is there once too often"
    yield float(k.shape[1]), "sum for mean over the keys?"
    yield k.shape[2] / q.shape[2], "mean for sum over the query heads of a group?"
    yield 1 - p, "the 1/(1 - p) of dropout is missing"


def mistakes(case: Case) -> Mistakes:
    a, o = case.arrays, case.options
    (Hq, d), Hkv = a["q"].shape[2:], a["k"].shape[2]
    if a["alibi"] is not None:
        yield "the sign of ALiBi?", case.but({"alibi": -a["alibi"]})
    yield "is the causal mask left out?", case.but(causal=not o.get("causal", True))
    yield "missing scale? the scores are not multiplied by it.", case.but(scale=1.0)
    if o.get("scale") is not None:
        yield "is the option scale ignored (1/√d taken instead)?", case.but(scale=None)
    yield "scale? it looks like 1/d rather than 1/√d.", case.but(scale=1 / d)
    if 1 < Hkv < Hq:
        text = "head mapping? query head i seems to read key/value head i % Hkv, not i // G."
        yield text, lambda: _otherwise_mapped(case, np.arange(Hq).reshape(-1, Hkv).T.reshape(-1))
        if case.cotangent is not None:
            text = "head mapping? dk and dv are added up over heads i % Hkv, not i // G."
            yield text, lambda: _added_up(case)
    if o.get("dropout_p"):
        yield "is dropout left out?", case.but(dropout_p=0.0)
    window, dv = o.get("window", 0), a["v"].shape[3]
    if dv != d:
        yield "is the scale made of the width of the values, 1/√dv?", case.but(scale=dv**-0.5)
    if window:
        text = "window off by one? each query sees one position too"
        yield "is window ignored?", case.but(window=0)
        yield f"{text} many.", case.but(window=window + 1)
        if window > 1:
            yield f"{text} few.", case.but(window=window - 1)


def _added_up(case: Case) -> dict[str, Array]:
    """Return dk and dv, added up over other heads than those that read them."""
    Hq, Hkv = case.arrays["q"].shape[2], case.arrays["k"].shape[2]
    each = case.but({n: np.repeat(case.arrays[n], Hq // Hkv, axis=2) for n in "kv"})
    results = reference_results(each, np.float64)
    for name in ("dk", "dv"):
        x = results[name]
        results[name] = np.sum(x.reshape(*x.shape[:2], -1, Hkv, x.shape[3]), axis=2)
    return results


def _otherwise_mapped(case: Case, order: Array) -> dict[str, Array]:
    """Return the results of query heads that read the key/value heads in another order."""
    a, dout = case.arrays, case.cotangent
    mapped = case.but(
        {
            "q": a["q"][:, :, order],
            "alibi": None if a["alibi"] is None else a["alibi"][order],
        }
    )
    mapped = dataclasses.replace(mapped, cotangent=None if dout is None else dout[:, :, order])
    results = reference_results(mapped, np.float64)
    for name in {"out", "dq"} & set(results):
        results[name] = results[name][:, :, np.argsort(order)]
    return results
