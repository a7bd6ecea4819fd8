"""Cases of decode_step: whole decoding steps, for every member of the family."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.tolerance import Unit
from accel.verify.contract import Case, reference_results
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Mistakes, Values, write_kv
from accel.verify.ops.kv_cache import LENGTHS, LONG_LENGTHS, parameters, small_model
from accel.verify.spoiled import Mistake, listed, spoiled
from reference import kv, ops
from reference.model import decode_step as compose
from reference.types import Array, KVCache

WEIGHT = 0.35
CUTS = "B S"
_ROTARY: dict[str, Any] = {"long": False, "vast": False, "positions": "rope"}
HARD: tuple[dict[str, Any], ...] = (
    _ROTARY | {"B": 3, "length": 33, "Hkv": 2, "G": 2, "d": 4, "position": "rows", "window": 33},
    _ROTARY | {"B": 2, "length": 17, "Hkv": 3, "G": 1, "qk_norm": True, "window": 7},
    _ROTARY | {"long": True, "length": 1_025, "position": "last", "window": 0},
    {"long": False, "vast": True, "length": 5, "B": 2},
    {
        "long": True,
        "vast": False,
        "length": 4_099,
        "positions": "alibi",
        "position": "ends",
        "B": 2,
    },
    {"long": True, "vast": False, "length": 513, "positions": "learned", "window": 300},
    _ROTARY | {"B": 3, "length": 129, "norm": "layernorm", "norm_placement": "post", "L": 3},
)
SAMPLES = 16  # runs with perturbed results


def generate(draw: Draw) -> Draft:
    """The cache is full: slots that no token fills, and the token's own, are stale, and loud."""
    B, length = draw.pick((1, 2, 3), "B"), draw.pick(LENGTHS, "length")
    if draw.rarely("long"):
        length = draw.pick(LONG_LENGTHS, "length")
    config = small_model(draw, length)
    if draw.rarely("vast", 16):  # ids beyond what 16 bits can count
        config = dataclasses.replace(config, vocab_size=70_001, d_model=4)
    n_slots = kv.slots(config, 0, length)
    shape = (config.n_layers, B, n_slots, config.n_kv_heads, config.d_head)
    room = kv.room(config, KVCache([*np.zeros(shape)], [*np.zeros(shape)]))
    position = write_kv.places(draw, B, room, 1)
    at = np.broadcast_to(position, (B,))
    held = kv.held(at, n_slots)
    loud = np.where((held < 0) | (held == at[:, None]), 3.0, 1.0)[..., None, None]
    arrays: dict[str, Any] = parameters(draw, config)
    V = config.vocab_size
    tokens = draw.pick((draw.rng.integers(0, V, B), np.full(B, V - 1)), "token")
    arrays["token"] = tokens.astype(np.int32)
    arrays["cache.k"] = draw.rounded(draw.rng.standard_normal(shape) * loud)
    arrays["cache.v"] = draw.rounded(draw.rng.standard_normal(shape) * loud)
    return Draft(arrays, {"config": config, "position": position})


def mistakes(case: Case) -> Mistakes:
    yield from write_kv.misplaced(case)
    config = case.options["config"]
    if config.qk_norm:
        left_out = dataclasses.replace(config, qk_norm=False)
        yield "is qk_norm left out?", case.but(config=left_out)
    if config.rope_scaling:
        left_out = dataclasses.replace(config, rope_factor=1.0)
        yield "is the scaling of RoPE left out?", case.but(config=left_out)
    if config.window:
        yield "is window ignored?", case.but(config=dataclasses.replace(config, window=0))
    for op in ("attention", "rope", config.norm, config.ffn, "linear", "logits"):
        for mistake in listed(op):
            yield f"in its {op}: {mistake.says}", partial(_composed, case, op, mistake)


def _composed(case: Case, op: str, mistake: Mistake) -> dict[str, Array]:
    """Return the results of a decoder in which one op has a mistake."""
    own: Any = SimpleNamespace(**{**vars(ops), **vars(spoiled(op, mistake))})
    return reference_results(case, np.float64, SimpleNamespace(decode_step=partial(compose, own)))


def magnitude(v: Values, dout: None, u: Unit) -> Magnitudes:
    """What a rounding of every op's result comes to, found by making some.

    A model is no sum of products, so its s on absolute values says little. Instead each result of
    each op is multiplied by 1 + ε ξ, ξ uniform in [-1, 1] and its own for every element, in
    float64: stochastic arithmetic (Vignes 1993; Parker 1997). s is two standard deviations of the
    change over some such runs, in units of ε: of the element, or of all that a layer writes where
    that is more, since of one number a few runs may by chance see little. An op has r = 12
    roundings on its longest path as counted in ``rounding.py``, of which 4 may be of 16 bits, and
    the longest sum of the model's widths. ε is r u, since in bf16 that is no small step for a
    norm over few numbers, whose curve it must follow; but large enough to stand out from the
    roundings of float64.
    """
    config, position = v["config"], v["position"]

    def run(backend: Any, times: int) -> dict[str, Array]:
        """Return the results of so many runs, side by side in one batch."""
        cache = KVCache(*([np.tile(a, (times, 1, 1, 1)) for a in arrays] for arrays in v["cache"]))
        token, at = np.tile(v["token"], times), np.broadcast_to(position, len(v["token"]))
        out = compose(backend, v["params"], config, token, cache, np.tile(at, times))
        both = {"cache.k": np.asarray(cache.k), "cache.v": np.asarray(cache.v)}
        apart = {n: a.reshape(len(a), times, -1, *a.shape[2:]) for n, a in both.items()}
        kept = {n: np.moveaxis(a, 1, 0) for n, a in apart.items()}
        return {"out": out.reshape(times, -1, out.shape[-1]), **kept}

    r = 4 if u.stored else 12
    step = max(r * u, 2.0**-30)
    exact, changed = run(ops, 1), run(_perturbed(step), SAMPLES)
    length = int(np.max(position)) + 1
    terms = max(config.d_model, config.d_ff, config.n_heads * config.d_head, length)

    def spread(name: str) -> Array:
        squares = np.mean((changed[name] - exact[name]) ** 2, axis=0)
        written = squares > 0
        axes = tuple(range(1, squares.ndim)) if name != "out" else None
        together = np.sum(squares, axis=axes, keepdims=True)
        together = together / np.maximum(1, np.sum(written, axis=axes, keepdims=True))
        return 2 * np.sqrt(np.where(written, np.maximum(squares, together), 0)) / step

    return {name: Magnitude(spread(name), r, terms) for name in exact}


def _perturbed(step: float) -> Any:
    """Return the reference with a small error in every result."""
    rng = np.random.default_rng(0)

    def off(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(off(part) for part in x)
        return x * (1 + step * rng.uniform(-1, 1, x.shape))

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def perturbed(*args: Any, **options: Any) -> Any:
            out, cache = function(*args, **options)
            return off(out), cache

        return perturbed

    found: dict[str, Any] = {
        n: wrapped(f) if n.endswith("_forward") else f for n, f in vars(ops).items()
    }
    found["logits"] = lambda *args: off(ops.logits(*args))
    return SimpleNamespace(**found)
