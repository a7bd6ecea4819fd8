"""Cases of decode_step: whole decoding steps, for every member of the family."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF
from accel.verify.ops import Draft, Draw, Magnitude, Magnitudes, Values, write_kv
from accel.verify.ops.kv_cache import LENGTHS, parameters, small_model
from reference import ops
from reference.model import decode_step as compose
from reference.types import Array, KVCache

WEIGHT = 0.5
CUTS = "B S"
SAMPLES = 16  # runs with perturbed results

mistakes = write_kv.misplaced


def generate(draw: Draw) -> Draft:
    """The cache is full: what stands at the token's place and beyond is stale, and loud."""
    B, room = draw.pick((1, 2, 3)), draw.pick(LENGTHS)
    config = small_model(draw, room)
    position = write_kv.places(draw, B, room, 1)
    shape = (config.n_layers, B, room, config.n_kv_heads, config.d_head)
    stale = np.arange(room) >= np.broadcast_to(position, (B,))[:, None]
    loud = np.where(stale, 3.0, 1.0)[..., None, None]
    arrays: dict[str, Any] = parameters(draw, config)
    arrays["token"] = draw.rng.integers(0, config.vocab_size, B).astype(np.int32)
    arrays["cache.k"] = draw.rounded(draw.rng.standard_normal(shape) * loud)
    arrays["cache.v"] = draw.rounded(draw.rng.standard_normal(shape) * loud)
    return Draft(arrays, {"config": config, "position": position})


def magnitude(v: Values, dout: None, u: float) -> Magnitudes:
    """What a rounding of every op's result comes to, found by making some.

    A model is no sum of products, so its s on absolute values says little. Instead each result of
    each op is multiplied by 1 + ε ξ, ξ uniform in [-1, 1] and its own for every element, in
    float64: stochastic arithmetic (Vignes 1993; Parker 1997). s is two standard deviations of the
    change over some such runs, in units of ε: of the element, or of all that a layer writes where
    that is more, since of one number a few runs may by chance see little. An op has r = 12
    roundings on its longest path as counted in ``rounding.py``, of which 4 may be bf16's, and
    the longest sum of the model's widths. ε is r u, since in bf16 that is no small step for a
    norm over few numbers, whose curve it must follow; but large enough to stand out from the
    roundings of float64.
    """
    config, position = v["config"], v["position"]

    def run(backend: Any) -> dict[str, Array]:
        cache = KVCache(*([a.copy() for a in arrays] for arrays in v["cache"]))
        out = compose(backend, v["params"], config, v["token"], cache, position)
        return {"out": out, "cache.k": np.asarray(cache.k), "cache.v": np.asarray(cache.v)}

    r = 4 if u == UNIT_ROUNDOFF["bf16"] else 12
    step = max(r * u, 2.0**-30)
    exact = run(ops)
    changes = [run(_perturbed(seed, step)) for seed in range(SAMPLES)]
    length = int(np.max(position)) + 1
    terms = max(config.d_model, config.d_ff, config.n_heads * config.d_head, length)

    def spread(name: str) -> Array:
        squares = np.mean([(c[name] - exact[name]) ** 2 for c in changes], axis=0)
        written = squares > 0
        axes = tuple(range(1, squares.ndim)) if name != "out" else None
        together = np.sum(squares, axis=axes, keepdims=True)
        together = together / np.maximum(1, np.sum(written, axis=axes, keepdims=True))
        return 2 * np.sqrt(np.where(written, np.maximum(squares, together), 0)) / step

    return {name: Magnitude(spread(name), r, terms) for name in exact}


def _perturbed(seed: int, step: float) -> Any:
    """Return the reference with a small error in every result."""
    rng = np.random.default_rng(seed)

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
