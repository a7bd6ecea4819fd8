"""Adapters that are no ops of the contract: cases, what is right, and what people get wrong."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from accel.verify.calls import short
from reference import ops
from reference.schedule import learning_rate
from reference.types import Array

Case = tuple[Any, ...]


class Arrays(NamedTuple):
    """How arrays get to a module and back."""

    give: Callable[[Array], Any]
    take: Callable[[Any], Array]
    parameter: Callable[[Array], Any]  # with data and grad

    @classmethod
    def of(cls, module: Any) -> "Arrays":
        """Return a module's own ways, those of PyTorch if it imported that, or NumPy's."""
        torch = getattr(module, "torch", None) or sys.modules.get("torch")

        def give(array: Array) -> Any:
            array = np.array(array, order="C")
            return array if torch is None else torch.from_numpy(array)

        def take(value: Any) -> Array:
            if torch is not None and isinstance(value, torch.Tensor):
                value = value.detach().cpu().numpy()
            return np.array(value)

        def parameter(array: Array) -> Any:
            if torch is None:
                return SimpleNamespace(data=np.array(array), grad=None)
            return torch.nn.Parameter(torch.from_numpy(np.array(array)))

        return cls(
            getattr(module, "from_numpy", give),
            getattr(module, "to_numpy", take),
            getattr(module, "parameter", parameter),
        )


class Trial(NamedTuple):
    """Calls of one adapter."""

    adapter: str
    cases: Callable[[np.random.Generator], Iterator[Case]]
    call: Callable[..., Any]  # (adapter, arrays, *case) -> what it gives, as NumPy's
    right: Callable[..., Sequence[Any]]  # (*case) -> every right result
    mistakes: tuple[tuple[str, Callable[..., Any]], ...]  # a hint; (*case) -> what comes of it
    text: Callable[..., str]  # (*case) -> how the call is written


def written(name: str, *arguments: str) -> Callable[..., str]:
    """Return what writes a call of such arguments."""

    def text(*case: Any) -> str:
        given = (f"{n} = {short(a)}" for n, a in zip(arguments, case, strict=True))
        return f"{name}({', '.join(given)})"

    return text


def _floats(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


# ---- softmax, over any axis ----------------------------------------------------------------------


def _softmax_cases(rng: np.random.Generator) -> Iterator[Case]:
    for shape in ((2, 3), (3, 2), (2, 3, 4)):
        for axis in (0, 1, -1):
            yield _floats(rng, *shape), axis


def _softmax(x: Array, axis: int) -> Array:
    return ops.softmax(x.swapaxes(axis, -1)).swapaxes(axis, -1)


# ---- rope ----------------------------------------------------------------------------------------


def _rope_cases(rng: np.random.Generator) -> Iterator[Case]:
    for lead, T, d in (((1,), 1, 2), ((1,), 2, 2), ((2,), 3, 4), ((2, 3), 5, 8), ((), 7, 16)):
        for theta in (10_000.0, 100.0):
            x = _floats(rng, *lead, T, d)
            yield x, theta, np.arange(T)
            yield x, theta, np.broadcast_to(np.sort(rng.permutation(40)[:T]), (*lead, T))


def _rope(x: Array, theta: float, positions: Array, sign: int = 1) -> Array:
    rows, where = x.reshape(-1, 1, 1, x.shape[-1]), np.broadcast_to(positions, x.shape[:-1])
    turned, _ = ops.rope_forward(rows, base=theta, start=sign * where.reshape(-1).astype(np.int64))
    return np.asarray(turned.reshape(x.shape))


def _by_halves(x: Array, theta: float, positions: Array) -> Array:
    half = x.shape[-1] // 2
    order = np.arange(2 * half).reshape(2, half).T.reshape(-1)
    return _rope(x[..., order], theta, positions)[..., np.argsort(order)]


def _call_rope(run: Any, arrays: Arrays, x: Array, theta: float, positions: Array) -> Array:
    where = arrays.give(positions.astype(np.int64))
    return arrays.take(run(x.shape[-1], theta, 64, arrays.give(x), where))


# ---- swiglu --------------------------------------------------------------------------------------


def _swiglu_cases(rng: np.random.Generator) -> Iterator[Case]:
    for D, F, lead in ((1, 1, (1,)), (2, 3, (2,)), (4, 3, (2, 2)), (8, 21, (3,)), (3, 3, (4,))):
        yield _floats(rng, F, D), _floats(rng, D, F), _floats(rng, F, D), _floats(rng, *lead, D)


def _swiglu(w1: Array, w2: Array, w3: Array, x: Array) -> Array:
    h, _ = ops.swiglu_forward(np.concatenate([x @ w1.T, x @ w3.T], axis=-1))
    return np.asarray(h @ w2.T)


def _call_swiglu(run: Any, arrays: Arrays, w1: Array, w2: Array, w3: Array, x: Array) -> Array:
    F, D = w1.shape
    return arrays.take(run(D, F, *map(arrays.give, (w1, w2, w3, x))))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


# ---- AdamW ---------------------------------------------------------------------------------------


def _adamw_cases(rng: np.random.Generator) -> Iterator[Case]:
    for n, steps in ((1, 1), (1, 2), (3, 5), (7, 10)):
        for decay in (0.0, 0.1):
            start, grads = _floats(rng, n), _floats(rng, steps, n)
            yield start, grads, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "decay": decay}


def _call_adamw(get: Any, arrays: Arrays, start: Array, grads: Array, o: dict[str, Any]) -> Array:
    """Take the steps; a second parameter never gets a gradient."""
    parameter, idle = arrays.parameter(start), arrays.parameter(start)
    options = {"lr": o["lr"], "betas": o["betas"], "eps": o["eps"], "weight_decay": o["decay"]}
    optimizer = get()([parameter, idle], **options)
    for grad in grads:
        parameter.grad = arrays.give(grad)
        optimizer.step()
    return np.stack([arrays.take(parameter.data), arrays.take(idle.data)])


def _adamw(
    start: Array,
    grads: Array,
    o: dict[str, Any],
    *,
    late: bool = False,
    first: int = 1,
    coupled: bool = False,
    pure: bool = False,
) -> Array:
    """Return the weights; ``late``: the decay acts on the weights after the step, as well right."""
    master, m, v = start.astype(np.float64), np.zeros(len(start)), np.zeros(len(start))
    beta1, beta2 = o["betas"]
    for t, grad in enumerate(grads.astype(np.float64), first):
        before = master.copy()
        decay = 0.0 if late or coupled or pure else o["decay"]
        ops.adamw(
            *(master, m, v, grad + (o["decay"] * before if coupled else 0)),
            **{"step": t, "lr": o["lr"], "beta1": beta1, "beta2": beta2, "eps": o["eps"]},
            **{"weight_decay": decay, "n_decayed": len(master)},
        )
        rate = 1.0 if pure else o["lr"]
        if late or pure:
            master -= rate * o["decay"] * (master if late else before)
    return np.stack([master, start])


# ---- gradient clipping ---------------------------------------------------------------------------


def _clip_cases(rng: np.random.Generator) -> Iterator[Case]:
    for size in (0.1, 1.0, 10.0):
        for shapes in (((1,),), ((2,), (3,)), ((2, 3), (4,), (1,))):
            yield [(size * _floats(rng, *shape)) for shape in shapes], 1.0


def _call_clip(run: Any, arrays: Arrays, grads: list[Array], most: float) -> list[Array]:
    """Clip; one parameter has no gradient."""
    parameters = [arrays.parameter(np.zeros_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = arrays.give(grad)
    run([*parameters, arrays.parameter(np.zeros(2, np.float32))], most)
    return [arrays.take(parameter.grad) for parameter in parameters]


def _norm(grads: list[Array]) -> float:
    return math.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in grads))


def _clip(grads: list[Array], most: float) -> list[Array]:
    norm = _norm(grads)
    return [g * (most / norm if norm > most else 1.0) for g in grads]


# ---- the cosine schedule -------------------------------------------------------------------------


def _schedule_cases(rng: np.random.Generator) -> Iterator[Case]:
    for step in (0, 1, 2, 3, 4, 5, 7, 10, 11, 15):
        yield step, 1.0, 0.1, 4, 10
        yield step, 0.5, 0.0, 2, 9


def _schedule(step: int, most: float, least: float, warmup: int, end: int) -> float:
    if step == 0:
        return 0.0
    return learning_rate(
        step, peak=most, warmup_steps=warmup, total_steps=end, final_fraction=least / most
    )


def _cosine(x: float, most: float, least: float) -> float:
    return least + (most - least) * (1 + math.cos(math.pi * x)) / 2


# ---- all of them ---------------------------------------------------------------------------------

TRIALS = (
    Trial(
        "run_softmax",
        _softmax_cases,
        lambda run, arrays, x, axis: arrays.take(run(arrays.give(x), axis)),
        lambda x, axis: [_softmax(x, axis)],
        (
            ("is dim ignored, and the last axis taken?", lambda x, axis: _softmax(x, -1)),
            ("is the sum taken over all elements?", lambda x, axis: np.exp(x) / np.exp(x).sum()),
        ),
        written("run_softmax", "in_features", "dim"),
    ),
    Trial(
        "run_swiglu",
        _swiglu_cases,
        _call_swiglu,
        lambda *case: [_swiglu(*case)],
        (
            (
                "w1 and w3 swapped? w1 makes the gate, which silu is applied to.",
                lambda w1, w2, w3, x: _swiglu(w3, w2, w1, x),
            ),
            (
                "sigmoid for silu? silu(g) = g · sigmoid(g).",
                lambda w1, w2, w3, x: (_sigmoid(x @ w1.T) * (x @ w3.T)) @ w2.T,
            ),
            (
                "is there no gate? w3 x multiplies silu(w1 x).",
                lambda w1, w2, w3, x: ((x @ w1.T) * _sigmoid(x @ w1.T)) @ w2.T,
            ),
        ),
        written("run_swiglu", "w1_weight", "w2_weight", "w3_weight", "in_features"),
    ),
    Trial(
        "run_rope",
        _rope_cases,
        _call_rope,
        lambda *case: [_rope(*case)],
        (
            ("wrong pairs? it pairs j with j + d/2 rather than 2j with 2j + 1.", _by_halves),
            ("is the rotation the other way round?", partial(_rope, sign=-1)),
            (
                "is token_positions ignored, and 0, 1, 2, … taken?",
                lambda x, theta, where: _rope(x, theta, np.arange(x.shape[-2])),
            ),
            (
                "positions off by one? They count from 0.",
                lambda x, theta, where: _rope(x, theta, where + 1),
            ),
        ),
        written("run_rope", "in_query_or_key", "theta", "token_positions"),
    ),
    Trial(
        "get_adamw_cls",
        _adamw_cases,
        _call_adamw,
        lambda *case: [_adamw(*case), _adamw(*case, late=True)],
        (
            (
                "is the bias correction missing? m and v start at zero.",
                partial(_adamw, first=10**9),
            ),
            ("is the bias correction off by one step?", partial(_adamw, first=2)),
            (
                "is the decay added to the gradient, as in Adam with L2? It acts on the weights.",
                partial(_adamw, coupled=True),
            ),
            ("is the decay not multiplied by the learning rate?", partial(_adamw, pure=True)),
            (
                "is the decay not multiplied by the learning rate?",
                partial(_adamw, pure=True, late=True),
            ),
            (
                "is weight decay left out?",
                lambda start, grads, o: _adamw(start, grads, o | {"decay": 0.0}),
            ),
        ),
        written("AdamW", "parameter", "gradients", "options"),
    ),
    Trial(
        "run_gradient_clipping",
        _clip_cases,
        _call_clip,
        lambda *case: [_clip(*case)],
        (
            (
                "is each parameter clipped by its own norm? There is one norm, of all.",
                lambda grads, most: [_clip([g], most)[0] for g in grads],
            ),
            (
                "are small gradients made longer? The factor is never above 1.",
                lambda grads, most: [g * most / _norm(grads) for g in grads],
            ),
            (
                "is each element cut off at the limit? All are multiplied by one factor.",
                lambda grads, most: [np.clip(g, -most, most) for g in grads],
            ),
            (
                "is nothing written? The gradients are changed in place.",
                lambda grads, most: grads,
            ),
        ),
        written("run_gradient_clipping", "gradients", "max_l2_norm"),
    ),
    Trial(
        "run_get_lr_cosine_schedule",
        _schedule_cases,
        lambda run, arrays, *case: float(run(*case)),
        lambda *case: [_schedule(*case)],
        (
            (
                "does the cosine start at step 0 rather than at the end of the warm-up?",
                lambda it, a, b, w, c: it / w * a if it < w else _cosine(min(it, c) / c, a, b),
            ),
            (
                "does the warm-up take one step too few? It is it / warmup_iters.",
                lambda it, a, b, w, c: (it + 1) / w * a if it < w else _schedule(it, a, b, w, c),
            ),
            (
                "does the rate rise again after cosine_cycle_iters? It stays at the minimum.",
                lambda it, a, b, w, c: it / w * a if it < w else _cosine((it - w) / (c - w), a, b),
            ),
            (
                "does it end at zero? It ends at the minimum.",
                lambda it, a, b, w, c: _schedule(it, a, 0.0, w, c),
            ),
        ),
        written(
            "run_get_lr_cosine_schedule",
            *("it", "max_learning_rate", "min_learning_rate", "warmup_iters"),
            "cosine_cycle_iters",
        ),
    ),
)
