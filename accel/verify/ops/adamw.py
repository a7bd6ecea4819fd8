"""Cases of adamw."""

from typing import Any

import numpy as np

from accel.verify.contract import Case
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values

WEIGHT = 1.5
_DECAYS: dict[str, Any] = {"long": True, "n_decayed": 65_537, "lr": 0.1, "weight_decay": 0.1}
HARD: tuple[dict[str, Any], ...] = (
    {"long": False, "length": 17, "step": 1, "fresh": True, "n_decayed": 8, "grad_scale": True},
    {"long": False, "length": 33, "step": 2, "eps": 0.1, "n_decayed": 16, "grad": "tiny"},
    _DECAYS | {"length": 131_075, "step": 10},
    {"long": False, "length": 33, "step": 70_001, "beta2": 0.999, "grad": "tiny"},
    {"long": False, "length": 17, "step": 7_001, "beta2": 0.999},
    {"long": False, "length": 129, "special": "nan", "where": "grad"},
    {"long": False, "length": 7, "step": 2**31 - 1, "n_decayed": 0},
    _DECAYS | {"length": 65_537, "step": 3},
    {"long": False, "length": 1025, "step": 1000, "n_decayed": 1024, "layout": "strided"},
    {"long": False, "length": 7, "special": "inf", "where": "grad"},
)


def generate(draw: Draw) -> Draft:
    """The first steps, where the bias corrections act, and late ones; ε of every weight."""
    n = draw.flat()
    arrays = {
        "master": draw.values(n),
        "m": draw.values(n),
        "v": draw.values(n) ** 2,
        "grad": draw.values(n, kinds=("tiny", "wide"), name="grad"),
    }
    if draw.pick((False, True), "fresh"):
        arrays["m"], arrays["v"] = 0 * arrays["m"], 0 * arrays["v"]
    options: dict[str, Any] = {
        "step": draw.pick((1, 2, 3, 10, 257, 1000, 7_001, 70_001, 2**31 - 1), "step"),
        "lr": draw.pick((0.1, 1e-3, 0.0), "lr"),
        "beta1": draw.pick((0.9, 0.5, 0.0), "beta1"),
        "beta2": draw.pick((0.95, 0.999), "beta2"),
        "eps": draw.pick((1e-8, 0.1), "eps"),
        "weight_decay": draw.pick((0.1, 0.0), "weight_decay"),
        "n_decayed": draw.pick((n // 2, n, 0, 1, n - 1, min(n, 65_537)), "n_decayed"),
    }
    if draw.wants("grad_scale"):
        options["grad_scale"] = draw.pick((0.5, 0.013))
    return Draft(arrays, options)


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """1 - β and 1 - βᵗ cancel, so each is taken as the sum; m may be m + (1 - β)(g - m)."""
    beta1, beta2, t = v["beta1"], v["beta2"], v["step"]
    grad = np.abs(v["grad"]) * abs(float(v.get("grad_scale", 1.0)))
    master, m = np.abs(v["master"]), np.abs(v["m"])
    s_m = max(beta1, 1 - beta1) * m + (1 + beta1) * grad
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


def mistakes(case: Case) -> Mistakes:
    o = case.options
    yield "is weight decay applied to all elements?", case.but(n_decayed=len(case.arrays["master"]))
    yield "is weight decay left out?", case.but(weight_decay=0.0)
    yield "is grad_scale ignored?", case.but(grad_scale=1.0)
    yield "is the bias correction off by one step?", case.but(step=o["step"] + 1)
    yield "is the bias correction off by one step?", case.but(step=max(1, o["step"] - 1))
    yield "beta1 and beta2 swapped?", case.but(beta1=o["beta2"], beta2=o["beta1"])
