"""RoPE's base and Llama 3's scaling as others write them: Hugging Face in words, GGUF as numbers.

transformers 4 has the base by itself and a scaling under ``rope_scaling``; transformers 5 has both
among ``rope_parameters``. GGUF has a tensor ``rope_freqs.weight``: by what each frequency is
divided, made of the scaling by whoever writes the file. What made it is found again from these
numbers: they are 1 up to some number of turns, the factor from another on, and 1/number is a
straight line of the frequency between.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from dist.convert.mapping import Key, shown
from reference.config import Config
from reference.rope import frequencies, stretch
from reference.types import Array, RopeScaling

GGUF_TENSOR = "rope_freqs.weight"
GGUF_SAID = "rope_freqs"  # stands among the keys of a file for what the tensor says
CLOSE = 1e-5  # relative: others make the numbers in float32
EXACT = 2e-7  # ours are rounded to it

# ours -> theirs, in the order of RopeScaling
_NAMES = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Config)}

# ---- Hugging Face --------------------------------------------------------------------------------


def _tables(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a configuration says of RoPE, checked: one table, or two that say the same."""
    tables = []
    for name in ("rope_parameters", "rope_scaling"):
        given = found.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} must be a table, got {shown(given)}")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"{name} is of the kind {shown(kind)}, which is not known here")
        if any(isinstance(value, Mapping) for value in given.values()):
            raise ValueError(f"{name} differs from layer to layer, which is not known here")
        if given.get("partial_rotary_factor", 1.0) not in (1.0, None):
            raise ValueError(
                f"{name} turns a part of each head alone (partial_rotary_factor = "
                f"{shown(given['partial_rotary_factor'])}), which is not known here"
            )
        missing = [key for key in _NAMES.values() if given.get(key) is None]
        if kind == "llama3" and missing:
            raise ValueError(f"{name} is of the kind 'llama3', but has no {missing[0]}")
        tables.append(given if kind == "llama3" else {"rope_theta": given.get("rope_theta")})
    if len(tables) == 2 and any(tables[0].get(n) != tables[1].get(n) for n in _NAMES.values()):
        raise ValueError("rope_parameters and rope_scaling say different things")
    return tables


def _read_base(found: Mapping[str, Any]) -> Any:
    given = [table.get("rope_theta") for table in (*_tables(found), found)]
    return next((base for base in given if base is not None), 10_000.0)


def _write(config: Config) -> dict[str, Any]:
    base = config.rope_base
    if config.rope_scaling is None:
        return {
            "rope_theta": base,
            "rope_parameters": {"rope_type": "default", "rope_theta": base},
        }
    scaling = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    table = {"rope_type": "llama3", **scaling}
    return {
        "rope_theta": base,
        "rope_scaling": table,
        "rope_parameters": {**table, "rope_theta": base},
    }


def _scaled(ours: str, theirs: str) -> Key:
    def read(found: Mapping[str, Any]) -> Any:
        return next((t[theirs] for t in _tables(found) if theirs in t), _DEFAULTS[ours])

    return Key(ours, theirs, read, lambda config: {})  # the base writes them all


HUGGING_FACE_KEYS = (
    Key("rope_base", "rope_theta", _read_base, _write),
    *(_scaled(ours, theirs) for ours, theirs in _NAMES.items()),
)

# ---- GGUF ----------------------------------------------------------------------------------------


def _of_tensor(place: int, ours: str) -> Key:
    def read(found: Mapping[str, Any]) -> Any:
        scaling, default = found.get(GGUF_SAID), _DEFAULTS[ours]
        return default if scaling is None else type(default)(scaling[place])

    return Key(ours, ours, read, lambda config: {GGUF_SAID: config.rope_scaling})


GGUF_KEYS = tuple(_of_tensor(place, ours) for place, ours in enumerate(_NAMES))


def divisors(config: Config) -> Array | None:
    """Return what ``rope_freqs.weight`` holds of a model, float32 (d/2,), if its RoPE is scaled."""
    if config.rope_scaling is None:
        return None
    omega = frequencies(config.rope_base, config.d_head)
    return stretch(omega, config.rope_scaling).astype(np.float32)


@np.errstate(all="ignore")  # of numbers that no scaling made, some divide by zero
def scaling_of(numbers: Array, base: float) -> RopeScaling | None:
    """Return a scaling that divides frequencies by these numbers; None where all are 1.

    Scalings whose last three numbers differ by a common factor are one function. It is the one with
    low_freq_factor about 1, as Llama has it, and a whole original_context.

    Raises
    ------
    ValueError
        When none does.
    """
    f = numbers.astype(np.float64)
    if f.ndim != 1 or not f.size or not np.isfinite(f).all() or (f < 1 - CLOSE).any():
        raise ValueError(f"{GGUF_TENSOR} must hold finite numbers >= 1, one for each pair")
    if (f <= 1 + CLOSE).all():
        return None
    omega = frequencies(base, 2 * len(f))
    order = np.argsort(omega)  # slow pairs first
    rate = omega[order] / (2 * np.pi)  # turns a token
    least = 1 / f.max()  # 1 / factor
    kept = (1 / f[order] - least) / (1 - least)
    slow = int(np.flatnonzero(kept <= CLOSE)[-1])  # the last that is divided by the factor
    fast = int(np.append(np.flatnonzero(kept >= 1 - CLOSE), len(f))[0])  # the first that is kept
    pairs = [(i, i + 1) for i in range(slow, min(fast, len(f) - 1))]
    if fast - slow > 2:
        pairs = [(slow + 1, fast - 1)]
    # with fewer than two between, the steepest line leaves those beside it where they are
    slopes = [((kept[j] - kept[i]) / (rate[j] - rate[i]), i) for i, j in pairs]
    slope, through = max(slopes, default=(1 / rate[-1], slow))
    low = float(rate[through] - kept[through] / slope)  # turns a token where nothing is kept
    high = float(low + 1 / slope)
    original = float(max(1, round(1 / low))) if low > 2**-31 else 1.0
    # the roundest numbers that do; where they are not round, as close as what we wrote, if it is
    tries = ((CLOSE, range(1, 5)), (EXACT, range(5, 10)), (CLOSE, range(5, 10)))
    for close, digits in ((close, digits) for close, many in tries for digits in many):
        factor, *turns = (
            float(f"{n:.{digits}g}") for n in (f.max(), low * original, high * original)
        )
        found = RopeScaling(factor, turns[0], turns[1], original)
        ordered = 0 < found.low_freq_factor < found.high_freq_factor
        if ordered and np.allclose(stretch(omega, found), f, rtol=close, atol=0):
            return found
    raise ValueError(f"{GGUF_TENSOR} divides frequencies otherwise than Llama 3's scaling does")
