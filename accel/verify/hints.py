"""What is probably wrong: each guess is put to the test on the failing case.

A guess is a mistake that people make, written as a change of the reference: the mask left out, the
heads mapped another way, ε outside the root. Where the kernel's result equals what the mistake
gives, and the mistake gives something else than the right answer, the guess is a hint.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accel.verify.contract import (
    Case,
    contract_parameters,
    floats,
    log_sum_exp,
    named_parts,
    reference_results,
)
from accel.verify.subject import Subject
from accel.verify.trial import Judged, run_case
from reference import ops
from reference.types import Array

_CLOSE = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-2}


def hints_for(subject: Subject, case: Case, judged: Judged) -> list[str]:
    """Return the guesses that explain a failure, the most telling first."""
    found: list[str] = list(_of_nothing(case, judged))
    if judged.kind in ("value", "shape", "nonfinite") and judged.got is not None:
        with np.errstate(all="ignore"):  # a mistake may well divide by zero
            found += list(_of_values(case, judged))
            found += list(_of_mistakes(case, judged))
    if judged.kind in ("value", "second", "nonfinite", "shape", "raised"):
        found += list(_of_manner(subject, case, judged))
    if not found:
        found += list(_of_shapes(case))
    return list(dict.fromkeys(found))


def _same(a: Any, b: Any, case: Case) -> bool:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return False
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) <= _CLOSE[case.dtype] * max(size, 1e-30)


def _explains(wrong: Any, got: Any, exact: Any) -> bool:
    """Say whether a mistake accounts for nearly all of what separates got from exact."""
    wrong, got, exact = (np.asarray(a, np.float64) for a in (wrong, got, exact))
    if not wrong.shape == got.shape == exact.shape:
        return False
    off = float(np.linalg.norm(got - exact))
    return off > 0 and float(np.linalg.norm(got - wrong)) <= 0.1 * off


def _of_nothing(case: Case, judged: Judged) -> Iterator[str]:
    """Say when all that is wrong with attention is what queries give that may see no key."""
    if case.op != "attention" or judged.name != "out" or judged.got is None:
        return
    seen = np.isfinite(log_sum_exp(case)).transpose(0, 2, 1)
    if judged.exact is not None and judged.got.shape == judged.exact.shape and not seen.all():
        right = _same(judged.got[seen], judged.exact[seen], case)
        if right and np.any(judged.got[~seen] != 0):
            when = "the first queries" if case.arrays["key_mask"] is None else "some queries"
            yield f"{when} may attend to nothing: they must give zeros."


# ---- from the numbers alone ----------------------------------------------------------------------


def _of_values(case: Case, judged: Judged) -> Iterator[str]:
    assert judged.got is not None and judged.exact is not None
    got, exact = np.asarray(judged.got, np.float64), np.asarray(judged.exact, np.float64)
    name = judged.name
    if exact.ndim >= 2:
        for i in range(exact.ndim):
            for j in range(i + 1, exact.ndim):
                swapped = exact.swapaxes(i, j)
                if not _same(swapped, exact, case) and _same(got, swapped, case):
                    yield f"transposed? {name} is right with axes {i} and {j} swapped"
                elif (
                    got.shape == exact.shape
                    and swapped.shape != exact.shape
                    and _same(got.reshape(-1), swapped.reshape(-1), case)
                ):
                    yield f"transposed? {name} lies in memory with axes {i} and {j} swapped"
    if got.shape != exact.shape or not np.all(np.isfinite(got)):
        return
    if not got.any():
        yield f"{name} is zero everywhere: was it written at all?"
        return
    size = float(np.sum(exact * exact))
    if size > 0:
        ratio = float(np.sum(got * exact)) / size
        if _same(got, ratio * exact, case) and abs(ratio - 1) > _CLOSE[case.dtype]:
            yield _name_ratio(case, name, ratio)
    wrong = np.abs(got - exact) > 10 * _CLOSE[case.dtype] * max(float(np.abs(exact).max()), 1e-30)
    if wrong.any() and not wrong.all():
        yield from _where_wrong(case, name, wrong)


def _where_wrong(case: Case, name: str, wrong: Array) -> Iterator[str]:
    """Say in which part of the array the wrong elements lie."""
    for axis in range(wrong.ndim):
        length = wrong.shape[axis]
        others = tuple(a for a in range(wrong.ndim) if a != axis)
        hit = np.flatnonzero(wrong.any(axis=others))
        first, last = int(hit[0]), int(hit[-1])
        tile = next((t for t in (128, 64, 32, 16, 8) if length > t), None)
        if tile and first >= tile and first % tile == 0:
            yield (
                f"last tile? {name} is wrong only from index {first} on along axis {axis} "
                f"(length {length})"
            )
        elif length > 1 and first > 0 and first == last == length - 1:
            yield f"off by one? {name} is wrong only at the last index of axis {axis}"
        elif length > 1 and first == last == 0:
            yield f"off by one? {name} is wrong only at the first index of axis {axis}"


def _name_ratio(case: Case, name: str, ratio: float) -> str:
    """Say what a constant factor might be."""
    known: list[tuple[float, str]] = [(-1.0, "the sign is flipped")]
    if case.op == "attention":
        d = case.arrays["q"].shape[-1]
        S = case.arrays["k"].shape[1]
        scale = case.options.get("scale") or 1 / math.sqrt(d)
        G = case.arrays["q"].shape[2] // case.arrays["k"].shape[2]
        known += [
            (1 / scale, "missing scale? the factor is missing once"),
            (scale, "scale? the factor is there once too often"),
            (float(S), "sum for mean over the keys?"),
            (1 / G, "mean for sum over the query heads of a group?"),
        ]
        p = case.options.get("dropout_p")
        if p:
            known += [(1 - p, "the 1/(1 - p) of dropout is missing")]
    if case.op == "dropout" and case.options["p"]:
        known += [(1 - case.options["p"], "the 1/(1 - p) of dropout is missing")]
    if case.op == "linear_cross_entropy":
        mask = case.arrays["mask"]
        n = int(case.arrays["targets"].size if mask is None else mask.sum())
        known += [(1 / max(n, 1), "mean for sum? it is divided by the number of valid targets")]
        if isinstance(case.cotangent, float):
            known += [(1 / case.cotangent, "dloss, the incoming gradient, is not used")]
            known += [(case.cotangent, "dloss is used twice")]
    if case.options.get("factor"):
        known += [(1 / case.options["factor"], "the factor is missing")]
    x = case.arrays.get("x")
    if x is not None and x.ndim > 1:
        rows, width = math.prod(x.shape[:-1]), x.shape[-1]
        known += [
            (1 / rows, "mean for sum over the rows?"),
            (1 / x.shape[0], "mean for sum over the batch?"),
            (float(width), "sum for mean over the last axis?"),
            (1 / width, "mean for sum over the last axis?"),
        ]
    for value, text in known:
        if abs(ratio - value) <= 10 * _CLOSE[case.dtype] * abs(value) and abs(value - 1) > 1e-6:
            return f"{text} ({name} is {ratio:.4g} times what it should be)"
    return f"a constant factor? {name} is {ratio:.4g} times what it should be"


# ---- from mistakes of the reference --------------------------------------------------------------


def _of_mistakes(case: Case, judged: Judged) -> Iterator[str]:
    for text, results in _mistakes(case):
        wrong = results.get(judged.name)
        if wrong is None or judged.exact is None:
            continue
        if _explains(wrong, judged.got, judged.exact):
            yield f"{text} That gives the {judged.name} which the kernel gave."


def _mistakes(case: Case) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield each mistake with the results that it gives."""
    for text, changed in _changed_arguments(case):
        try:
            if isinstance(changed, Case):
                changed = reference_results(changed, np.float64)
            yield text, changed
        except (ValueError, IndexError):
            continue  # the mistake does not apply to these shapes
    for text, make in _FORWARD_MISTAKES.get(case.op, ()):
        arrays = floats(case.arrays, np.float64)
        try:
            yield text, named_parts(make(arrays, case.options))
        except (ValueError, IndexError, KeyError):
            continue
    if case.cotangent is not None:
        for text, name, make in _BACKWARD_MISTAKES.get(case.op, ()):
            arrays, dout = floats(case.arrays, np.float64), floats(case.cotangent, np.float64)
            try:
                yield text, {name: make(arrays, case.options, dout)}
            except (ValueError, IndexError, KeyError):
                continue


def _changed_arguments(case: Case) -> Iterator[tuple[str, Case | dict[str, Array]]]:
    """Yield each mistake that is the same as other arguments."""

    def but(arrays: dict[str, Any] | None = None, **options: Any) -> Case:
        return dataclasses.replace(
            case,
            arrays={**case.arrays, **(arrays or {})},
            options={**case.options, **options},
        )

    a, o = case.arrays, case.options
    for name in ("alibi", "key_mask", "documents", "bias", "mask"):
        if a.get(name) is not None:
            blank: Any = None
            if name == "bias":
                blank = np.zeros_like(a[name])
            if name != "mask" or (a["targets"] >= 0).all():
                yield f"is {name} left out?", but({name: blank})
    for name in ("key_mask", "mask"):
        if a.get(name) is not None and (name != "mask" or (a["targets"] >= 0).all()):
            yield f"is {name} turned around (True = take part)?", but({name: ~a[name]})
            shifted = np.roll(a[name], 1, axis=-1)
            yield f"{name} off by one?", but({name: shifted})
    if a.get("alibi") is not None:
        yield "the sign of ALiBi?", but({"alibi": -a["alibi"]})
    if case.op == "attention":
        d = a["q"].shape[-1]
        yield "is the causal mask left out?", but(causal=not o.get("causal", True))
        yield "missing scale? the scores are not multiplied by it.", but(scale=1.0)
        if o.get("scale") is not None:
            yield "is the option scale ignored (1/√d taken instead)?", but(scale=None)
        yield "scale? it looks like 1/d rather than 1/√d.", but(scale=1 / d)
        Hq, Hkv = a["q"].shape[2], a["k"].shape[2]
        if 1 < Hkv < Hq:
            order = [g * Hkv + h for h in range(Hkv) for g in range(Hq // Hkv)]
            back = np.argsort(order)
            mapped = but({"q": a["q"][:, :, order]})
            changed = dataclasses.replace(
                mapped,
                cotangent=None if case.cotangent is None else case.cotangent[:, :, order],
                arrays={
                    **mapped.arrays,
                    "alibi": None if a["alibi"] is None else a["alibi"][order],
                },
            )
            results = reference_results(changed, np.float64)
            for name in ("out", "dq"):
                if name in results:
                    results[name] = results[name][:, :, back]
            yield (
                "head mapping? query head i seems to read key/value head i % Hkv, not i // G.",
                results,
            )
        if o.get("dropout_p"):
            yield "is dropout left out?", but(dropout_p=0.0)
    if case.op == "rope":
        start = o.get("start", 0)
        if np.any(start):
            yield "is start ignored?", but(start=0)
        yield "positions off by one?", but(start=np.asarray(start) + 1)
        if o.get("rotate_heads") is not None:
            yield "is rotate_heads ignored?", but(rotate_heads=None)
    for name, text in (("eps", "is eps left out?"),):
        if name in o and case.op in ("rmsnorm", "layernorm"):
            yield text, but(eps=1e-300)
    if case.op == "linear" and a["weight"].shape[0] == a["weight"].shape[1]:
        yield "transposed weight?", but({"weight": a["weight"].T.copy()})
    if case.op == "swiglu":
        gate, up = np.split(a["x"], 2, axis=-1)
        changed = but({"x": np.concatenate([up, gate], axis=-1)})
        results = reference_results(changed, np.float64)
        if "dx" in results:
            results["dx"] = np.roll(results["dx"], gate.shape[-1], axis=-1)
        yield "gate and up swapped? the gate is the first half.", results
    if "position" in o:
        yield "position off by one? it looks like one too far.", but(position=o["position"] + 1)
        yield "position off by one? it looks like one too few.", but(position=o["position"] - 1)
        if np.ndim(o["position"]):
            first = int(o["position"][0])
            yield "is the first row's position taken for all rows?", but(position=first)
    if case.op == "write_kv":
        yield "k and v swapped?", but({"k": a["v"], "v": a["k"]})
        yield "is layer ignored?", but(layer=0)
    if case.op == "adamw":
        yield "is weight decay applied to all elements?", but(n_decayed=len(a["master"]))
        yield "is weight decay left out?", but(weight_decay=0.0)
        yield "is grad_scale ignored?", but(grad_scale=1.0)
        yield "is the bias correction off by one step?", but(step=o["step"] + 1)
        yield "is the bias correction missing?", but(step=10**9)
        yield "beta1 and beta2 swapped?", but(beta1=o["beta2"], beta2=o["beta1"])
    if case.op in ("gelu", "gelu_tanh"):
        other = "gelu_tanh" if case.op == "gelu" else "gelu"
        yield f"is it {other}, the other GELU?", dataclasses.replace(case, op=other)


def _rope_by_halves(a: dict[str, Any], o: dict[str, Any]) -> Array:
    """Pair coordinate j with j + d/2, as Hugging Face's Llama does."""
    x = a["x"]
    d = x.shape[-1]
    order = np.stack([np.arange(d // 2), np.arange(d // 2) + d // 2], axis=-1).reshape(-1)
    rotated = o.get("rotate_heads")
    out, _ = ops.rope_forward(x[..., order], **o)
    out = out[..., np.argsort(order)]
    if rotated is not None:
        out[:, :, rotated:] = x[:, :, rotated:]
    return np.asarray(out)


def _rope_backwards(a: dict[str, Any], o: dict[str, Any]) -> Array:
    return np.asarray(ops.rope_backward(a["x"], ops.rope_forward(a["x"], **o)[1]))


def _norm(a: dict[str, Any], centre: bool, root: Callable[[Array], Array]) -> Array:
    x = a["x"] - np.mean(a["x"], axis=-1, keepdims=True) if centre else a["x"]
    shift = 0 if a.get("bias") is None else a["bias"]
    return np.asarray(x / root(np.mean(x * x, axis=-1, keepdims=True)) * a["gain"] + shift)


def _mask_shifted(a: dict[str, Any], o: dict[str, Any], by: int) -> Array:
    """Let each query see ``by`` more keys than causality allows (or fewer)."""
    T, S = a["q"].shape[1], a["k"].shape[1]
    seen = np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T + by
    out = np.zeros((*a["q"].shape[:3], a["v"].shape[3]))
    for t in range(T):
        mask = np.broadcast_to(seen[t], a["k"].shape[:2])
        if a["key_mask"] is not None:
            mask = mask & a["key_mask"]
        one = {**a, "q": a["q"][:, t : t + 1], "key_mask": mask, "documents": None, "alibi": None}
        if not mask.any():
            continue
        out[:, t : t + 1] = ops.attention_forward(**one, **{**o, "causal": False})[0]
    return out


def _mask_from_top(a: dict[str, Any], o: dict[str, Any]) -> Array:
    return _mask_shifted(a, o, a["q"].shape[1] - a["k"].shape[1])


_FORWARD_MISTAKES: dict[str, tuple[tuple[str, Callable[..., Any]], ...]] = {
    "rope": (
        ("wrong pairs? it pairs j with j + d/2 rather than 2j with 2j + 1.", _rope_by_halves),
        ("is the rotation the other way round?", _rope_backwards),
    ),
    "rmsnorm": (
        (
            "is eps outside the root?",
            lambda a, o: _norm(a, False, lambda v: np.sqrt(v) + o["eps"]),
        ),
        ("is the mean taken off, as in LayerNorm?", lambda a, o: _norm(a, True, np.sqrt)),
        (
            "sum for mean of squares?",
            lambda a, o: _norm(a, False, lambda v: np.sqrt(v * a["x"].shape[-1] + o["eps"])),
        ),
    ),
    "layernorm": (
        (
            "is eps outside the root?",
            lambda a, o: _norm(a, True, lambda v: np.sqrt(v) + o["eps"]),
        ),
        (
            "is the variance divided by D - 1?",
            lambda a, o: _norm(
                a,
                True,
                lambda v: np.sqrt(v * a["x"].shape[-1] / (a["x"].shape[-1] - 1) + o["eps"]),
            ),
        ),
        (
            "is the mean not taken off?",
            lambda a, o: _norm(a, False, lambda v: np.sqrt(v + o["eps"])),
        ),
    ),
    "attention": (
        ("mask off by one? each query sees one key too many.", lambda a, o: _mask_shifted(a, o, 1)),
        ("mask off by one? each query sees one key too few.", lambda a, o: _mask_shifted(a, o, -1)),
        (
            "causal mask from the top left? with S ≠ T key u is seen when u ≤ t + (S - T).",
            _mask_from_top,
        ),
    ),
}


def _rms_without_projection(a: dict[str, Any], o: dict[str, Any], dout: Array) -> Array:
    _, cache = ops.rmsnorm_forward(a["x"], a["gain"], eps=o["eps"])
    return np.asarray(dout * a["gain"] * cache.rstd)


def _ln_without(term: str) -> Callable[..., Array]:
    def make(a: dict[str, Any], o: dict[str, Any], dout: Array) -> Array:
        _, cache = ops.layernorm_forward(a["x"], a["gain"], a["bias"], eps=o["eps"])
        dn = dout * a["gain"]
        mean = np.mean(dn, axis=-1, keepdims=True)
        along = cache.n * np.mean(dn * cache.n, axis=-1, keepdims=True)
        kept = dn - (0 if term == "mean" else mean) - (0 if term == "along" else along)
        return np.asarray(cache.rstd * kept)

    return make


def _last_wins(a: dict[str, Any], o: dict[str, Any], dout: Array) -> Array:
    table: Array = np.zeros_like(a["table"])
    table[a["ids"].reshape(-1)] = dout.reshape(-1, table.shape[1])
    return table


_BACKWARD_MISTAKES: dict[str, tuple[tuple[str, str, Callable[..., Array]], ...]] = {
    "rmsnorm": (
        ("is the term n · mean(dn · n) missing?", "dx", _rms_without_projection),
        (
            "is dgain made of dout alone?",
            "dgain",
            lambda a, o, d: d.reshape(-1, d.shape[-1]).sum(0),
        ),
    ),
    "layernorm": (
        ("is the term mean(dn) missing?", "dx", _ln_without("mean")),
        ("is the term n · mean(dn · n) missing?", "dx", _ln_without("along")),
    ),
    "embedding": (
        ("is the gradient of a repeated id overwritten rather than added?", "dtable", _last_wins),
    ),
    "rope": (
        (
            "does the backward turn the same way as the forward?",
            "dx",
            lambda a, o, d: ops.rope_forward(d, **o)[0],
        ),
    ),
    "linear": (
        ("is dx made with the weight untransposed?", "dx", lambda a, o, d: d @ a["weight"]),
    ),
}


# ---- from the manner of the call -----------------------------------------------------------------


def _of_manner(subject: Subject, case: Case, judged: Judged) -> Iterator[str]:
    """Leave out one thing at a time: where the failure goes away, that thing is to blame."""

    def passes(changed: Case) -> bool:
        try:
            again = run_case(subject, changed)
        except ValueError:
            return False  # the reference refuses the changed case
        return all(j.ok for j in again if j.name in (judged.name, "")) and bool(again)

    if case.layouts and passes(dataclasses.replace(case, layouts={})):
        names = ", ".join(case.layouts)
        verb = "is" if len(case.layouts) == 1 else "are"
        yield f"are strides ignored? It passes when {names} {verb} contiguous."
    if case.interleaved and passes(dataclasses.replace(case, interleaved=False)):
        yield (
            "a stale cache? It passes when no other forward is called in between: state may be "
            "kept outside the cache."
        )
    if case.out and passes(dataclasses.replace(case, out="")):
        yield f"it passes without out={'' if case.out == 'out' else ' and accumulate=True'}."
    for parameter in contract_parameters(case.spec.forward):
        name = parameter.name
        if parameter.default is None and case.arrays.get(name) is not None:
            arrays = {**case.arrays, name: None}
            if name == "mask":
                arrays["targets"] = np.maximum(arrays["targets"], 0)
            if passes(dataclasses.replace(case, arrays=arrays)):
                yield f"it passes without {name}."
    if case.op == "linear_cross_entropy" and (case.arrays["targets"] < 0).any():
        arrays = {**case.arrays, "targets": np.maximum(case.arrays["targets"], 0)}
        if passes(dataclasses.replace(case, arrays=arrays)):
            yield "are masked targets read? They need not be entries of the vocabulary."
    for name in ("scale", "start", "rotate_heads", "dropout_p", "grad_scale"):
        if case.options.get(name) is not None and name in case.options:
            options = {n: v for n, v in case.options.items() if n != name}
            if passes(dataclasses.replace(case, options=options)):
                yield f"it passes without {name}."


def _of_shapes(case: Case) -> Iterator[str]:
    """Say what is special about a case when nothing else explains it."""
    if case.op == "attention":
        q, k = case.arrays["q"], case.arrays["k"]
        if q.shape[2] != k.shape[2]:
            yield f"query heads {q.shape[2]}, key/value heads {k.shape[2]}: look at the groups."
        if q.shape[1] != k.shape[1]:
            yield f"T = {q.shape[1]}, S = {k.shape[1]}: the queries are the last T positions."
