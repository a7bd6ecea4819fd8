"""By which kernels attention goes on this GPU: each path is checked, then timed, at a run's shapes.

A path on tensor cores is held to the plain kernel by the rule of ``accel/tolerance.py``::

    exact   the plain kernel in float32, whose error is nothing beside one of bf16
    plain   the plain kernel in bf16
    s       the plain kernel in float32 on absolute values

For the last, v and dout lose their signs and D = Σ dout·out its minus: a backward that is given
-out makes ds = P (dP + D). q and k keep theirs, which are drawn once for each coordinate: then no
two terms of q·k, of ds·k or of dsᵀ·q differ in sign, and a result's magnitude is s. Scores have a
standard deviation of 2.3, so that a query attends to few keys, and no error is lost in a mean.

That holds for a row, whatever its roundings are, but over thousands of tokens their worst case lies
far above what they add up to: independent of each other, as the signs of v and dout are, they grow
no faster than the sum itself. So the whole tensor is held to s = |exact| where bf16 rounds, and to
the s above where float32 adds up. Right kernels take up to 0.3 of it at 9 to 1,000 tokens.

Only training is timed, a forward and a backward; what is chosen depends on the clock, so it is
for who calls this to write it down.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel import Attention
from accel.bench.timing import medians
from accel.cache_files import default_root
from accel.cuda import attention, sources
from accel.cuda.arrays import to_numpy, upload
from accel.cuda.compiler import keep
from accel.cuda.device import current
from accel.tolerance import UNIT_ROUNDOFF, Closeness, Magnitude, allowed, round_bf16
from reference.alibi import alibi_slopes
from reference.config import Config
from reference.types import Array, Dropout, DropoutKey
from reference.visibility import Visibility

CHECKED = 4096  # tokens of a sequence that is checked, at most: the plain kernel is slow
DOCUMENTS = 4  # in a sequence, where attention stays within them
SECONDS, ROUNDS = 4.0, (3, 11)  # of timing all paths in turn, about; the fewest and most rounds
SAMPLE, MOST_CALLS = 0.05, 50  # seconds and calls of a sample
# each rounded to bf16 once: P and the result; ds, out in D and the result
ROUNDINGS = {"out": 2, "dq": 3, "dk": 3, "dv": 2}
clock: Callable[[], float] = time.perf_counter


class Shapes(NamedTuple):
    """The attention of a training step, causal, of bf16."""

    B: int
    T: int
    Hq: int
    Hkv: int
    d: int
    window: int = 0
    alibi: bool = False
    documents: bool = False  # it stays within documents
    dropout: float = 0.0

    @property
    def fit(self) -> bool:
        """Whether tensor cores take heads of this width."""
        return self.d <= attention.WIDEST and self.d % attention.CHUNK == 0


class Choice(NamedTuple):
    """A path, and a sentence on why it is taken."""

    path: Attention
    said: str


def shapes_of(config: Config, batch: int, *, documents: bool = False) -> Shapes:
    """Return the shapes of a model's attention; of several windows the widest."""
    c = config
    windows = c.window if isinstance(c.window, tuple) else (c.window,)
    window = 0 if 0 in windows else max(windows)
    heads = c.n_heads, c.n_kv_heads, c.d_head
    alibi = c.position == "alibi"
    return Shapes(batch, c.context_length, *heads, window, alibi, documents, c.dropout_attention)


def choose(shapes: Shapes, *, remember: bool = True) -> Choice:
    """Return the faster right path of the device in use, which goes on as it was.

    Parameters
    ----------
    shapes : Shapes
    remember : bool
        Whether times taken earlier on a GPU of this kind will do. They are looked for, and kept,
        beside the machine code (``$MYLLM_CACHE_DIR``).

    Raises
    ------
    ValueError
        When no path on tensor cores is right.
    """
    device = current()
    before = device.attention
    try:
        return _choose(shapes, remember)
    finally:
        device.attention = before
        device.trim()


def _choose(shapes: Shapes, remember: bool) -> Choice:
    paths = [path for path in attention.offered() if path != attention.PLAIN]
    checked = check(shapes, paths)
    wrong = {path: worst for path in paths if (worst := _worst(checked[path]))}
    right = [path for path in paths if path not in wrong]
    left_out = "; ".join(f"{path} is left out: {why}" for path, why in wrong.items())
    if not right:
        raise ValueError(
            f"no fast path of attention is right on this GPU ({left_out}): python -m tests.gpu "
            "says more; run.attention = 'plain' is slow, and needs no tensor cores"
        )
    if len(right) == 1:
        why = f"the only {'right one' if wrong else 'one'} here for bf16"
    else:
        seconds, where = _times(shapes, right, remember)
        right.sort(key=lambda path: seconds[path])
        each = ", ".join(f"{path} {1e3 * t:.2f} ms" for path, t in seconds.items())
        why = f"forward and backward at this run's shapes: {each}{where}"
    return Choice(right[0], f"attention: {right[0]} ({'; '.join(filter(None, (why, left_out)))})")


# ---- right ---------------------------------------------------------------------------------------


def check(shapes: Shapes, paths: Sequence[Attention]) -> dict[str, dict[str, Closeness]]:
    """Return path -> how close each of its results is to the plain kernel's, of one sequence."""
    shapes = shapes._replace(B=1, T=min(shapes.T, CHECKED))
    q, k, v, dout = _drawn(shapes)
    exact, plain = (_results(shapes, attention.PLAIN, q, k, v, dout, bf16=b) for b in (False, True))
    sizes = _results(shapes, attention.PLAIN, q, k, np.abs(v), np.abs(dout), bf16=False, plus=True)
    terms = shapes.T * shapes.Hq // shapes.Hkv
    u, rules = UNIT_ROUNDOFF["bf16"], {}
    for name, roundings in ROUNDINGS.items():
        s, gradient = np.abs(sizes[name]), name != "out"
        together = roundings * np.abs(exact[name]) + min(terms, 4 * terms**0.5) * u.sums / u * s
        rows, whole = (
            allowed(exact[name], plain[name], magnitude, "bf16", gradient=gradient)
            for magnitude in (Magnitude(s, roundings, terms), Magnitude(together, 1))
        )
        rules[name] = rows._replace(total=whole.total)
    return {
        path: {
            name: rules[name].closeness(got)
            for name, got in _results(shapes, path, q, k, v, dout, bf16=True).items()
        }
        for path in paths
    }


def _worst(found: dict[str, Closeness]) -> str:
    """Say what is wrong with results; nothing where nothing is."""
    name = max(found, key=lambda name: found[name].ratio)
    if found[name].ok:
        return ""
    return f"its {name} is {found[name].ratio:.2g} times as far from the plain kernel's as allowed"


def _drawn(shapes: Shapes) -> tuple[Array, Array, Array, Array]:
    """Return q, k, v and dout of some sequences, float32 of values that bf16 has."""
    rng = np.random.default_rng(0)
    B, T, Hq, Hkv, d = shapes[:5]
    q, k, v, dout = (rng.standard_normal((B, T, h, d), np.float32) for h in (Hq, Hkv, Hkv, Hq))
    signs = rng.choice(np.array([-1, 1], np.float32), d)
    given = (3 * signs * np.abs(q), signs * np.abs(k), v, dout)
    return tuple(map(round_bf16, given))  # type: ignore[return-value]


def _options(shapes: Shapes) -> tuple[Visibility, float, Dropout | None]:
    """Return who may see whom, the scale and the dropout."""
    B, T, Hq = shapes[:3]
    who = Visibility(T, T, window=shapes.window)
    if shapes.alibi:
        who = who._replace(alibi=upload(alibi_slopes(Hq), as_bf16=False))
    if shapes.documents:
        ids = np.tile(np.arange(T, dtype=np.int32) * DOCUMENTS // T, (B, 1))
        who = who._replace(documents=upload(ids, as_bf16=False))
    dropout = Dropout(shapes.dropout, DropoutKey(0, 1, 0, 0)) if shapes.dropout else None
    return who, shapes.d**-0.5, dropout


def _results(
    shapes: Shapes, path: Attention, *arrays: Array, bf16: bool, plus: bool = False
) -> dict[str, Array]:
    """Return what a path makes of q, k, v and dout; with ``plus`` ds = P (dP + D)."""
    attention.take(path)
    q, k, v, dout = (upload(array, as_bf16=bf16) for array in arrays)
    who, scale, dropout = _options(shapes)
    out, cache = attention.attention_forward(q, k, v, who, scale=scale, dropout=dropout)
    if plus:
        cache = cache._replace(out=upload(-to_numpy(out), as_bf16=bf16))
    gradients = attention.attention_backward(dout, cache)
    return dict(zip(ROUNDINGS, map(to_numpy, (out, *gradients)), strict=True))


# ---- fast ----------------------------------------------------------------------------------------


def _times(
    shapes: Shapes, paths: Sequence[Attention], remember: bool
) -> tuple[dict[str, float], str]:
    """Return the seconds of each path, and where they are from, if from earlier."""
    kernels = [sources.join(sources.parts(f"attention_{path}")) for path in attention.TILES]
    decides = [repr(shapes), repr(attention.TILES), *kernels]
    return remembered("attention", decides, paths, partial(measure, shapes, paths), remember)


def remembered(
    what: str,
    decides: Sequence[str],
    names: Sequence[str],
    timed: Callable[[], dict[str, float]],
    remember: bool,
) -> tuple[dict[str, float], str]:
    """Return the seconds of each way to compute, and where they are from, if from earlier.

    Parameters
    ----------
    what, decides
        What is computed; and what decides how fast, beside the GPU's kind.
    names
        Of the ways.
    timed : callable
        Takes the times.
    remember : bool
        Whether times of earlier will do, and are kept.
    """
    root = default_root() if remember else None
    hashed = hashlib.sha256("\0".join([current().kind(), *decides]).encode()).hexdigest()
    kept = None if root is None else root / "cuda" / f"{what}-{hashed[:20]}.json"
    found = None if kept is None else _read(kept, names)
    if found is not None:
        return found, ", timed here before"
    seconds = timed()
    if kept is not None:
        keep(kept, json.dumps(seconds).encode())
    return seconds, ""


def _read(kept: Path, names: Sequence[str]) -> dict[str, float] | None:
    """Return the times in a file; None where it is missing, or says something else."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        seconds = {str(name): float(found[name]) for name in names}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return seconds if all(0 < t < float("inf") for t in seconds.values()) else None


def measure(shapes: Shapes, paths: Sequence[Attention]) -> dict[str, float]:
    """Return the median seconds of a forward and a backward by each path, taken in turn."""
    B = shapes.B
    drawn = (np.repeat(array, B, axis=0) for array in _drawn(shapes._replace(B=1)))
    q, k, v, dout = (upload(array, as_bf16=True) for array in drawn)
    who, scale, dropout = _options(shapes)

    def train(path: Attention) -> None:
        attention.take(path)
        _, cache = attention.attention_forward(q, k, v, who, scale=scale, dropout=dropout)
        attention.attention_backward(dout, cache)

    return in_turn({str(path): partial(train, path) for path in paths}, SECONDS, SAMPLE)


def in_turn(
    functions: Mapping[str, Callable[[], object]], seconds: float, sample: float
) -> dict[str, float]:
    """Return the median seconds of a call of each, of samples taken in turn.

    Parameters
    ----------
    functions
        What the device is asked for.
    seconds, sample : float
        What all of it shall take, about, and a sample of the slowest, which is at least one call.
    """
    end = upload(np.zeros(1, np.float32), as_bf16=False)

    def taken(call: Callable[[], object], calls: int) -> float:
        """Return the seconds of a call, of as many that the device is asked for at once."""
        started = clock()
        for _ in range(calls):
            call()
        current().download(end)  # waits for all work before
        return (clock() - started) / calls

    for call in functions.values():  # the first compiles
        taken(call, 1)
    longest = max(taken(call, 1) for call in functions.values())
    calls = max(1, min(MOST_CALLS, int(sample / longest)))
    least, most = ROUNDS
    rounds = max(least, min(most, int(seconds / (len(functions) * calls * longest))))
    return medians(functions, rounds, lambda call: taken(call, calls))
