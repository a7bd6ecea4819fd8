"""Adapters that are no ops of the contract: cases, what is right, and what people get wrong."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from accel.verify.calls import Raised, short
from reference import ops
from reference.adamw import adamw
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

        taken = getattr(module, "to_numpy", take)

        def narrow(value: Any) -> Array:
            """Take a result as float32 where it is float64: it may be wider than it has to be."""
            array = np.asarray(taken(value))
            return array.astype(np.float32) if array.dtype == np.float64 else array

        return cls(
            getattr(module, "from_numpy", give), narrow, getattr(module, "parameter", parameter)
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


def _floats(rng: np.random.Generator, *shape: int, size: float = 1.0) -> Array:
    return (size * rng.normal(size=shape)).astype(np.float32)


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


BETAS, EPS = (0.9, 0.99), 1e-8
IDLE = np.ones(2, np.float32)  # a parameter that never gets a gradient


def _adamw_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Yield parameters, the gradients of each step, and groups: the last has the last parameter."""
    for shapes, steps, groups, size in (
        ([(1,)], 1, 1, 1),
        ([(1,)], 2, 1, 1),
        ([(7,)], 10, 1, 1),
        ([(3,), (3,)], 5, 1, 1),
        ([(2,), (2,)], 2, 2, 1),
        ([(2, 3), (4,), (3, 1)], 5, 2, 1),
        ([(5,)], 3, 1, 10 * EPS),  # eps decides
    ):
        for decay in (0.0, 0.1):
            starts = [_floats(rng, *shape) for shape in shapes]
            grads = [[_floats(rng, *shape, size=size) for shape in shapes] for _ in range(steps)]
            first = {"lr": 0.1, "weight_decay": decay}
            yield starts, grads, [first, {"lr": 0.03, "weight_decay": 0.1 - decay}][:groups]


def _adamw_text(starts: list[Array], grads: list[list[Array]], groups: list[dict[str, Any]]) -> str:
    steps = ", ".join(map(short, grads))
    options = f"groups = {groups}, betas = {BETAS}, eps = {EPS}"
    return f"AdamW(parameters = {short(starts)}, gradients = [{steps}], {options})"


def _call_adamw(
    get: Any,
    arrays: Arrays,
    starts: list[Array],
    grads: list[list[Array]],
    groups: list[dict[str, Any]],
) -> Any:
    parameters = [arrays.parameter(start) for start in (*starts, IDLE)]
    cut = len(starts) - len(groups) + 1
    members = [parameters] if len(groups) == 1 else [parameters[:cut], parameters[cut:]]
    optimizers = _optimizers(get(), members, groups)
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=False):
            parameter.grad = arrays.give(grad)
        for optimizer in optimizers:
            optimizer.step()
        for parameter, grad in zip(parameters, step, strict=False):
            after = arrays.take(parameter.grad)
            if not np.array_equal(grad, after):
                says = f"step changes a gradient, {short(grad)}, to {short(after)}"
                return Raised("", f"{says}: it is to stay; the training loop calls zero_grad")
    return [arrays.take(parameter.data) for parameter in parameters]


def _optimizers(make: Any, members: list[Any], groups: list[dict[str, Any]]) -> list[Any]:
    """Return one optimizer of all groups, or, where it knows no groups, one of each."""
    first = {**groups[0], "betas": BETAS, "eps": EPS}
    optimizer = make(members[0], **first)
    if len(groups) == 1:
        return [optimizer]
    if not hasattr(optimizer, "param_groups"):
        return [optimizer, make(members[1], **first | groups[1])]
    return [make([{"params": members[0]}, {"params": members[1], **groups[1]}], **first)]


def _adamw(
    starts: list[Array],
    grads: list[list[Array]],
    groups: list[dict[str, Any]],
    *,
    late: bool = False,
    first: int = 1,
    coupled: bool = False,
    pure: bool = False,
    shared: bool = False,
    counted: bool = False,
    beside: bool = False,
    eps: float = EPS,
    inside: bool = False,
) -> list[Array]:
    """Return the weights.

    ``late``: the decay acts on the weights after the step, as well right; ``beside``: eps stands
    beside √v rather than √v̂, as the course has it, as well right; ``shared``: there is one m and
    one v; ``counted``: each parameter counts as a step; ``inside``: eps stands in the root.
    """
    masters = [start.astype(np.float64).reshape(-1) for start in starts]
    means, squares = ([np.zeros_like(master) for master in masters] for _ in "mv")
    for step, each in enumerate(grads):
        for i, (master, grad) in enumerate(zip(masters, each, strict=True)):
            lr, decay = (groups[-1] if i == len(starts) - 1 else groups[0]).values()
            t = first + (step * len(starts) + i if counted else step)
            before, at = master.copy(), 0 if shared else i
            g = grad.astype(np.float64).reshape(-1) + (decay * before if coupled else 0)
            scale = 1 - BETAS[1] ** t if beside else 1.0
            added: Any = eps / math.sqrt(scale)
            if inside:  # what the root gains by it
                v = BETAS[1] * squares[at] + (1 - BETAS[1]) * g * g
                root = np.sqrt(v / (1 - BETAS[1] ** t))
                added = np.sqrt(root**2 + eps / scale) - root
            how: dict[str, Any] = {"step": t, "lr": lr, "eps": added, "n_decayed": len(master)}
            how |= {"beta1": BETAS[0], "beta2": BETAS[1]}
            how |= {"weight_decay": 0.0 if late or coupled or pure else decay}
            adamw(master, means[at], squares[at], g, **how)
            if late or pure:
                master -= (1.0 if pure else lr) * decay * (master if late else before)
    moved = [m.reshape(start.shape) for m, start in zip(masters, starts, strict=True)]
    return [*moved, IDLE.astype(np.float64)]


def _shared(
    error: type[Exception],
    starts: list[Array],
    grads: list[list[Array]],
    groups: list[dict[str, Any]],
    **how: bool,
) -> list[Array]:
    """Return what one m and one v make; where shapes differ, raise PyTorch's error or NumPy's."""
    try:
        return _adamw(starts, grads, groups, shared=True, **how)
    except ValueError:
        raise error from None


def _with(
    options: Callable[[dict[str, Any]], dict[str, Any]],
    starts: list[Array],
    grads: list[list[Array]],
    groups: list[dict[str, Any]],
    **how: bool,
) -> list[Array]:
    """Return what comes of other options in all groups, made of those of the first."""
    changed = [group | options(groups[0]) for group in groups]
    return _adamw(starts, grads, changed, **how)


_SHARED = "are m and v shared by the parameters? Each has its own, and its own count t."
_OF_FIRST = "of the first group, or the default, for all? Each group has its own."
_ADAMW_FORMS: list[dict[str, Any]] = [
    {"late": late, "beside": beside} for late in (False, True) for beside in (False, True)
]
_ADAMW_MISTAKES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("is the bias correction missing? m and v start at zero.", partial(_adamw, first=10**9)),
    ("is the bias correction off by one step?", partial(_adamw, first=2)),
    (
        "is the decay added to the gradient, as in Adam with L2? It acts on the weights.",
        partial(_adamw, coupled=True),
    ),
    ("is the decay not multiplied by the learning rate?", partial(_adamw, pure=True)),
    ("is weight decay left out?", partial(_with, lambda first: {"weight_decay": 0.0})),
    ("is eps inside the root? It is added to the root.", partial(_adamw, inside=True)),
    ("is eps left out?", partial(_adamw, eps=0.0)),
    (_SHARED, partial(_shared, ValueError)),
    (_SHARED, partial(_shared, RuntimeError)),
    (_SHARED, partial(_shared, ValueError, counted=True)),
    (_SHARED, partial(_shared, RuntimeError, counted=True)),
    ("is t counted up at each parameter? It counts the steps.", partial(_adamw, counted=True)),
    (f"is lr that {_OF_FIRST}", partial(_with, lambda first: {"lr": first["lr"]})),
    (
        f"is weight_decay that {_OF_FIRST}",
        partial(_with, lambda first: {"weight_decay": first["weight_decay"]}),
    ),
    (f"are lr and weight_decay those {_OF_FIRST}", partial(_with, dict)),
)


# ---- gradient clipping ---------------------------------------------------------------------------


def _clip_cases(rng: np.random.Generator) -> Iterator[Case]:
    for size in (0.1, 1.0, 10.0):
        for shapes in (((1,),), ((2,), (3,)), ((2, 3), (4,), (1,))):
            yield [_floats(rng, *shape, size=size) for shape in shapes], 1.0


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
        lambda *case: [_adamw(*case, **form) for form in _ADAMW_FORMS],
        tuple(
            (says, partial(wrong, **form))
            for says, wrong in _ADAMW_MISTAKES
            for form in _ADAMW_FORMS
        ),
        _adamw_text,
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
