"""Cases of linear_cross_entropy."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from accel.tolerance import Unit
from accel.verify.contract import Case, numpy_dtype, reference_results
from accel.verify.draw import MAX_SCORES, SHAPES, WIDE, WIDTHS
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values
from accel.verify.rounding import bend
from reference import ops
from reference.types import Array

WEIGHT = 1.5
CUTS = "... D V"
PRODUCTS = True
_BOTH: dict[str, Any] = {"forward alone": False, "long": False}
HARD: tuple[dict[str, Any], ...] = (
    _BOTH | {"V": 17, "D": 17, "shape": (17,), "x": "large", "mask": True, "masked": "holes"},
    _BOTH | {"V": 33, "D": 7, "shape": (2, 33), "mask": True, "ignored": True, "bias": True},
    _BOTH | {"V": 129, "D": 3, "shape": (65,), "below zero": True, "bias": False, "x": "faint"},
    _BOTH | {"long": True, "V D": (70_001, 2, 3), "targets": "ends", "bias": True, "mask": False},
    _BOTH | {"V": 257, "D": 5, "shape": (257,), "targets": "ends", "mask": True, "masked": "last"},
    _BOTH | {"V": 5, "D": 8, "shape": (3, 2, 5), "special": "nan", "where": "x"},
    _BOTH | {"V": 65, "D": 65, "shape": (5, 7), "x": "wide", "layout": "transposed", "bias": True},
    _BOTH | {"V": 1025, "D": 2, "shape": (17,), "targets": "one id", "out": "out"},
    _BOTH | {"V": 7, "D": 33, "shape": (3, 200), "mask": True, "masked": "nothing"},
    _BOTH | {"long": True, "V D": (33_001, 3, 4), "targets": "random", "layout": "strided"},
    _BOTH | {"V": 1, "D": 1},
    _BOTH | {"long": True, "V D": (17, 3, 4_099), "mask": True, "masked": "holes"},
)


def generate(draw: Draw) -> Draft:
    """Masks of every kind; where a target is masked it need not be an entry of the vocabulary."""
    if draw.rarely("long", 12):
        V, D, rows = draw.pick(
            ((33_001, 3, 4), (70_001, 1, 3), (70_001, 2, 3), (17, 3, 4_099)), "V D"
        )
        shape: tuple[int, ...] = (rows,)
    else:
        V = draw.pick((1, 2, 3, 5, 7, 17, 33, 65, 128, 129, 256, 257, 1024, 1025), "V")
        D = draw.pick(WIDE if V <= 129 else WIDTHS, "D")
        shapes = [s for s in (*SHAPES, (257,), (3, 200)) if math.prod(s) * max(V, D) <= MAX_SCORES]
        shape = draw.pick(shapes, "shape")
    arrays: dict[str, Any] = {
        "x": draw.values(*shape, D, kinds=("wide", "large", "faint"), name="x"),
        "head": draw.values(V, D),
        "targets": draw.rng.integers(0, V, shape).astype(np.int32),
        "mask": None,
        "bias": None,
    }
    if draw.pick(
        (False, False, False, True), "below zero"
    ):  # a logit of zero, from beyond the head, would show
        arrays["x"], arrays["head"] = np.abs(arrays["x"]), -np.abs(arrays["head"])
    kind = draw.pick(("random", "one id", "ends"), "targets")
    if kind == "one id":
        arrays["targets"] = np.full(shape, draw.pick((0, 1 % V, V // 2, V - 1), "id"), np.int32)
    if kind == "ends":
        arrays["targets"] = np.where(draw.rng.random(shape) < 0.5, 0, V - 1).astype(np.int32)
        arrays["targets"].reshape(-1)[-1] = V - 1
    if draw.wants("mask"):
        kind = draw.pick(("holes", "last", "nothing", "everything"), "masked")
        mask = draw.rng.random(shape) < 0.6
        if kind != "holes":
            mask[...] = kind != "nothing"
        if kind == "last":
            mask[..., -1] = False
        arrays["mask"] = mask
        if draw.pick((False, True), "ignored"):
            arrays["targets"] = np.where(mask, arrays["targets"], -100).astype(np.int32)
    if draw.wants("bias"):
        arrays["bias"] = draw.values(V)
    options = {}
    if draw.offers("need_backward") and draw.pick((False, False, False, True), "forward alone"):
        options["need_backward"] = False
    return Draft(arrays, options)


def magnitude(v: Values, dout: float, u: Unit) -> Magnitudes:
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
    # of the roundings that grow: those of a logit's own sum are among its terms
    p = (ops.softmax(z) + u.least) * bend(top, u, 9)
    losses = 1 + 3 * top[:, 0] + math.log(len(head))
    # p - 1 at the target: the one is exact, what is left of it is not
    p[np.arange(len(x)), targets] += 1
    dz = p * mask[:, None] * abs(float(dout))
    rows, terms = len(x), width + len(head)
    found = {
        "total": Magnitude(np.asarray(np.sum(losses * mask)), 6, terms + rows, alike=True),
        "n_valid": Magnitude(np.asarray(0.0), 0),
        "dx": Magnitude((dz @ head).reshape(v["x"].shape), 9, terms, alike=True),
        "dhead": Magnitude(dz.T @ x, 9, terms + rows, alike=True),
    }
    if bias is not None:
        found["dbias"] = Magnitude(np.sum(dz, axis=0), 9, terms + rows, alike=True)
    return found


def ratios(case: Case) -> Iterator[tuple[float, str]]:
    if isinstance(case.cotangent, float):
        yield 1 / case.cotangent, "dloss, the incoming gradient, is not used"
        yield case.cotangent, "dloss is used twice"


def mistakes(case: Case) -> Mistakes:
    text = "is the log taken of a probability, which may have become 0? It is z - log Σ exp(z)."
    yield text, lambda: _log_of_softmax(case)


@np.errstate(divide="ignore")
def _log_of_softmax(case: Case) -> dict[str, Array]:
    """Return the sum of -log p in the precision of the case, and the other results as they are."""
    kind, a = numpy_dtype(case.dtype), case.arrays
    x, head = (a[name].astype(kind) for name in ("x", "head"))
    z = ops.logits(x, head, a["bias"] if a["bias"] is None else a["bias"].astype(kind))
    here = np.ones(a["targets"].shape, np.bool_) if a["mask"] is None else a["mask"]
    ids = np.where(here, a["targets"], 0)[..., None]
    p = np.take_along_axis(ops.softmax(z), ids, axis=-1)[..., 0]
    found = reference_results(case, np.float64)
    return found | {"total": np.asarray(-np.sum(np.log(p), where=here))}
