"""How far a kernel may be from a reference that nobody has analysed.

``accel/tolerance.py`` allows

    ‖err‖ ≤ k ‖plain err‖ + c u s,        c = r + min(n, 4√n)

for each result and each of its rows. For the contract's ops s, r and n are written down; here they
are measured, on the reference f alone and in each case anew.

*plain err*. A single evaluation in the working precision may be right by luck, above all where the
inputs are short numbers such as quarters. So f is also evaluated at neighbours x' of the inputs, in
which every float has moved by one unit in its last place, up or down at random. Plain err is, for
each element, the largest |f̂(x') - f(x')| of these and of x itself, f̂ being the reference in the
working precision and f the same in float64. M of them know the size of an error with M degrees of
freedom, a row with ν = M (Σσ²)² / Σσ⁴ (Satterthwaite 1946); where those are few plain err counts
1 + 20/ν times, about as Student's t would have it. A row narrower than 16 is taken with those
beside it.

*s*. One rounding of each input moves the result by f(x') - f(x) = Σ δᵢ xᵢ ∂f/∂xᵢ, to first order,
with |δᵢ| ≤ 2u. Over random signs its root mean square is S = u (Σ (xᵢ ∂f/∂xᵢ)²)^½, the spread. A
kernel that is backward stable gives f of inputs that are off by a few u (Higham 2002, section 1.5),
and by Hoeffding's inequality r roundings of random sign pass 4√r S with a chance below 2 exp(-8).
What is rounded on the way is, for a function without cancellation of its own, no larger than the
result and the spread together: s = |f| + S/u. Cancellation that f does have inside (log(1 + x))
shows in plain err, and what other right ways to compute f may cancel in floors under s:

- S̄/u, the spread at the same numbers in another order. A loss lse - z of a token that is nearly
  certain hardly moves with z, and yet both are rounded.
- λ S(x/λ)/u, with λ of 8 and 64, where that is far larger: f is saturated at x. A softmax by
  exp(z - lse) is off by u |lse| where one that divides is not.
- for a gradient dx, ‖dout f‖ / ‖x‖. A function that is homogeneous in x has ⟨dx, x⟩ = ⟨dout, f⟩
  (Euler), so that the terms of dx are of that size though they may cancel, as in the softmax of one
  number; and another input may be a factor of them.

Where a kernel cancels numbers that are larger than all these (x² - mean²) it is not allowed to be
off, which is the purpose.

*n*, the terms of the longest sum, is no more than the number of inputs that an element depends on.
A random share p of the inputs is moved: an element that depends on n of them changes with the
chance 1 - (1 - p)^n.

*r* = 6: an elementary function right to two units, a scaling before it, a product and a division
after it, and the store.

Float64 has no better truth here. Its plain err and S are those of float32, times 2^-29, since both
are first order in u.

Where f jumps (argmax, floor, a comparison; the gradient of a maximum where two are equal) the
spread says nothing of rounding. An element jumps when a step sixteen times smaller moves it by more
than a quarter as much, or by less than a thousandth. Steps as long as c u, all up, all down and at
random, look for jumps that one rounding does not reach. Gradients are also tried with zeros moved,
and with ties broken in favour of the last and of the first. Such elements leave the norms, and are
right when they lie within what f gives on either side. Integers and bools are right when f gives
that very value at x or at one of these points.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, Closeness, Magnitude, compare, round_bf16
from reference.types import Array

Results = dict[str, Array]
# f: (arrays, precision, whether gradients are wanted too) -> results by name, floats in float64
Evaluate = Callable[[Mapping[str, Array], str], Results]

ROUNDINGS = 6  # r
STEPS = 3  # neighbours at which the spread is measured
NEIGHBOURS = 5  # and at which plain code is
SHARES = (1 / 16, 1 / 256, 1 / 4096)  # p
NOISE = 2.0**-48  # what float64 itself is off by, of the result and its spread
JUMP = 64  # times what it should move by
NARROW = 16  # elements of a row that stands for itself
SATURATED = 4  # inputs above this may be
TIES = 8  # ways to break them
TIE = 2.0**-20  # by how much
TINY = 1e-300


class Truth(NamedTuple):
    """What a result should be, and how closely."""

    exact: Array
    plain: Array  # exact with the error of plain code on top
    magnitude: Magnitude
    jumps: Array  # bool: where the function jumps, and one of ``seen`` will do
    seen: tuple[Array, ...]  # what it gives at x and around it
    judged: Array  # bool: where anything is known


def rounded(x: Array, dtype: str) -> Array:
    """Return x in a precision; bf16 and float16 as float32."""
    if dtype == "float64":
        return np.asarray(x, np.float64)
    if dtype == "bf16":
        return round_bf16(x)
    with np.errstate(over="ignore"):
        if dtype == "float16":
            x = np.asarray(x, np.float16)
    return np.asarray(x, np.float32)


def moved(
    arrays: Mapping[str, Array], by: float, sign: Callable[..., Array], *, zeros: bool = False
) -> dict[str, Array]:
    """Return arrays with every float changed by a part of itself, up or down."""

    def one(a: Array) -> Array:
        if a.dtype.kind != "f":
            return a
        a = a.astype(np.float64)
        size = np.abs(a)
        if zeros and a.size:
            finite = np.where(np.isfinite(a), a, 0)
            size = np.where(size > 0, size, float(np.sqrt(np.mean(finite**2))) or 1.0)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(a), a + by * sign(a.shape) * size, a)

    return {name: one(a) for name, a in arrays.items()}


def expect(
    evaluate: Evaluate,
    arrays: Mapping[str, Array],
    dtype: str,
    rng: np.random.Generator,
    gradients: frozenset[str] = frozenset(),
) -> dict[str, Truth]:
    """Return what a function should give, by name, and how closely.

    Parameters
    ----------
    evaluate : callable
        The reference: ``evaluate(arrays, precision)`` gives all results, gradients among them.
    gradients : set of str
        Which of the results are gradients.
    """
    u = UNIT_ROUNDOFF[dtype]
    work = "float32" if dtype == "float64" else dtype
    u_work = UNIT_ROUNDOFF[work]

    def signs(shape: tuple[int, ...]) -> Array:
        return np.asarray(rng.choice([-1.0, 1.0], shape))

    wide = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    exact = evaluate(wide, "float64")
    gradients &= set(exact)
    terms = _terms(evaluate, wide, exact, rng, signs)

    plain: list[tuple[Results, Results]] = []
    if dtype != "float64":
        plain.append((evaluate(arrays, work), exact))
    steps: list[tuple[Results, Results]] = []
    for at in range(NEIGHBOURS):
        near = {
            name: rounded(a, work) if a.dtype.kind == "f" else a
            for name, a in moved(arrays, 1.5 * u_work, signs).items()
        }
        there = evaluate(near, "float64")
        plain.append((evaluate(near, work), there))
        if at < STEPS:
            steps.append((there, evaluate(_between(wide, near, 1 / 16), "float64")))

    reach = ROUNDINGS + 4 * max(terms.values(), default=1) ** 0.5 * 2.0**-24 / u_work
    reach = min(reach * u_work, 2.0**-4)
    ways: list[Callable[..., Array]] = [np.ones, lambda shape: -np.ones(shape), signs]
    far = [(evaluate(moved(wide, reach, way), "float64"), reach) for way in ways]
    far += [(found, TIE) for found in _ties(evaluate, wide, exact, rng, gradients)]
    floors = dict.fromkeys(exact, 0.0)
    for turned in (
        {name: _shuffled(a, None) for name, a in wide.items()},
        {name: _shuffled(a, rng) for name, a in wide.items()},
    ):
        try:
            here = evaluate(turned, "float64")
            there = evaluate(moved(turned, 1.5 * u_work, signs), "float64")
        except ValueError:
            continue  # the reference takes them in one order only
        for name in exact:
            if exact[name].dtype.kind == "f" and here[name].shape == exact[name].shape:
                floors[name] = max(floors[name], _typical(there[name] - here[name]) / u_work)
    top = max((float(np.max(np.abs(a), initial=0)) for a in _floats(wide)), default=0.0)
    for by in (8.0, 64.0) if top > SATURATED else ():
        small = {name: a / by if a.dtype.kind == "f" else a for name, a in wide.items()}
        here = evaluate(small, "float64")
        there = evaluate(moved(small, 1.5 * u_work, signs), "float64")
        for name in exact:
            if exact[name].dtype.kind == "f" and here[name].shape == exact[name].shape:
                now = max(_typical(a[name] - exact[name]) for a, _ in steps)
                then = _typical(there[name] - here[name])
                if then > 4 * now:
                    floors[name] = max(floors[name], by * then / u_work)
    results = [exact[name[1:]] * a for name, a in wide.items() if name.startswith("dout")]
    with np.errstate(all="ignore"):
        given = sum(float(np.sum(np.square(r), where=np.isfinite(r))) for r in results) ** 0.5
        for name in gradients:
            x = wide[name[1:]]
            others = max(_typical(a) for a in _floats(wide))
            factor = max(1.0, others, 1 / max(_typical(x), TINY) if x.any() else 0.0)
            floors[name] += given * factor / max(x.size, 1) ** 0.5
    found = {
        name: _truth(
            value,
            [(p[name], e[name]) for p, e in plain],
            [(a[name], b[name]) for a, b in steps],
            [(found[name], by) for found, by in far if name in found],
            Scales(terms[name], floors[name], u_work, float(u / u_work)),
        )
        for name, value in exact.items()
    }
    return found | {name: _with_equals(found[name], wide[name[1:]]) for name in gradients}


class Scales(NamedTuple):
    """What the bound of one result needs beside the result at many points."""

    terms: int  # n
    floor: float  # under s
    u: float  # of the precision that plain code was run in
    ratio: float  # the u of the case over that one


def _between(wide: Mapping[str, Array], near: Mapping[str, Array], part: float) -> Results:
    with np.errstate(invalid="ignore"):
        return {
            name: np.where(np.isfinite(a), a + (near[name] - a) * part, a)
            if a.dtype.kind == "f"
            else a
            for name, a in wide.items()
        }


def _shuffled(a: Array, rng: np.random.Generator | None) -> Array:
    """Return the floats of an array in another order: backwards, or any."""
    if a.dtype.kind != "f" or not a.size:
        return a
    flat = a.reshape(-1)
    return np.asarray((flat[::-1] if rng is None else rng.permutation(flat)).reshape(a.shape))


def _floats(arrays: Mapping[str, Array]) -> list[Array]:
    return [a for a in arrays.values() if a.dtype.kind == "f"]


def _with_equals(truth: Truth, x: Array) -> Truth:
    """Let what holds for one of several equal inputs, where there is a kink, hold for all."""
    if not truth.jumps.any():
        return truth
    alike = truth.judged & np.isin(x, x[truth.jumps])
    with np.errstate(all="ignore"):
        low = float(np.fmin.reduce([np.fmin.reduce(a[alike]) for a in truth.seen]))
        high = float(np.fmax.reduce([np.fmax.reduce(a[alike]) for a in truth.seen]))
    ends = tuple(np.where(alike, end, truth.exact) for end in (low, high))
    calm = ~alike
    return truth._replace(
        jumps=truth.jumps | alike,
        seen=(*truth.seen, *ends),
        plain=np.where(calm, truth.plain, truth.exact),
        magnitude=truth.magnitude._replace(s=np.where(calm, truth.magnitude.s, 0)),
    )


def _typical(x: Array) -> float:
    """Return the root mean square, which a few very large ones do not decide."""
    x = np.abs(x[np.isfinite(x)])
    if not x.size:
        return 0.0
    return float(np.sqrt(np.mean(np.minimum(x, np.quantile(x, 0.99, method="higher")) ** 2)))


def _ties(
    evaluate: Evaluate,
    wide: Mapping[str, Array],
    exact: Results,
    rng: np.random.Generator,
    gradients: frozenset[str],
) -> list[Results]:
    """Return the gradients where no two inputs are equal and none is zero."""
    if not gradients:
        return []

    def ramp(shape: tuple[int, ...]) -> Array:
        n = int(np.prod(shape))
        return np.linspace(-1.0, 1.0, n).reshape(shape) if n > 1 else np.ones(shape)

    def at(way: Callable[..., Array]) -> Results:
        found = evaluate(moved(wide, TIE, way, zeros=True), "float64")
        return {name: found[name] for name in gradients}

    far = [at(ramp), at(lambda shape: -ramp(shape))]
    with np.errstate(invalid="ignore"):
        off = [_typical(found[n] - exact[n]) for found in far for n in gradients]
        size = [_typical(exact[n]) for _ in far for n in gradients]
    if any(by > JUMP * TIE * max(s, TINY) for by, s in zip(off, size, strict=True)):
        far += [at(lambda shape: np.asarray(rng.uniform(-1, 1, shape))) for _ in range(TIES)]
    return far


def _terms(
    evaluate: Evaluate,
    wide: Mapping[str, Array],
    exact: Results,
    rng: np.random.Generator,
    signs: Callable[..., Array],
) -> dict[str, int]:
    """Return on how many inputs an element of each result depends, about."""
    inputs = sum(a.size for a in wide.values() if a.dtype.kind == "f")
    found = dict.fromkeys(exact, 1)
    left = {name for name, value in exact.items() if value.size and value.dtype.kind == "f"}
    for share in SHARES:
        if not left or inputs * share < 0.5:
            break

        def some(shape: tuple[int, ...], share: float = share) -> Array:
            return signs(shape) * (rng.random(shape) < share)

        changed = evaluate(moved(wide, 2.0**-20, some, zeros=True), "float64")
        for name in sorted(left):
            if changed[name].shape != exact[name].shape:
                continue
            differs = (changed[name] != exact[name]) & np.isfinite(exact[name])
            part = (np.count_nonzero(differs) + 1) / (differs.size + 1)
            if part < 0.95:
                left.discard(name)
                found[name] = max(1, round(np.log1p(-part) / np.log1p(-share)))
            else:
                found[name] = inputs
    return {name: max(1, min(n, inputs)) for name, n in found.items()}


def _truth(
    exact: Array,
    plain: list[tuple[Array, Array]],
    steps: list[tuple[Array, Array]],
    far: list[tuple[Array, float]],
    scales: Scales,
) -> Truth:
    """Put together what one result came to at all the points."""
    around = [value for pair in (*steps, *plain) for value in pair]
    around += [value for value, _ in far]
    around = [value for value in around if value.shape == exact.shape]
    none = np.zeros(exact.shape, bool)
    if exact.dtype.kind != "f":
        return Truth(exact, exact, Magnitude(none.astype(float), 0), ~none, (exact, *around), ~none)
    with np.errstate(all="ignore"):
        moves = [np.abs(there - exact) for there, _ in steps]
        spread = np.sqrt(np.mean([move**2 for move in moves], axis=0))
        size = np.abs(exact) + spread / scales.u + scales.floor
        errors = np.array([np.abs(p - e) for p, e in plain])
        # where plain code overflows a kernel may overflow as well
        judged = np.all([np.isfinite(p) for p, _ in plain], axis=0) | ~np.isfinite(exact)
        error = np.where(np.isfinite(errors), errors, 0)
        worst = np.max(error, axis=0)
        # float64 cancels what plain code cancels, with its own u
        noise = NOISE * size + 16 * _row_top(worst) * 2.0**-53 / scales.u
        jumps = none
        for move, (_, nearer) in zip(moves, steps, strict=True):
            less = np.abs(nearer - exact)
            before = (4 * less > move) & (less > noise)
            beyond = move > 1024 * np.maximum(less, noise)
            jumps = jumps | ((move > noise) & (before | beyond))
        for value, by in far:
            jumps = jumps | (np.abs(value - exact) > JUMP * by * size)
        calm = judged & np.isfinite(exact) & ~jumps
        worst = np.where(calm, worst, 0)
        variance = np.where(calm, np.mean(error**2, axis=0), 0)
        rows = as_rows(variance)
        fourth = np.sum(rows**2, axis=-1, keepdims=True)
        freedom = len(errors) * np.sum(rows, axis=-1, keepdims=True) ** 2
        few = 1 + 20 * np.divide(fourth, freedom, out=np.zeros_like(fourth), where=freedom > 0)
        error = scales.ratio * (as_rows(worst) * few).reshape(exact.shape)
    return Truth(
        exact,
        exact + np.where(calm, error, 0),
        Magnitude(np.where(calm & np.isfinite(size), size, 0), ROUNDINGS, scales.terms),
        jumps & judged & np.isfinite(exact),
        (exact, *around),
        judged,
    )


def _row_top(x: Array) -> Array:
    """Return the largest of each row in all its places."""
    rows = as_rows(x)
    return np.broadcast_to(np.max(rows, axis=-1, keepdims=True, initial=0.0), rows.shape).reshape(
        x.shape
    )


def as_rows(x: Array) -> Array:
    """Return x as rows along the last axis, of several where that is narrow."""
    axis = x.ndim
    width = 1
    while axis > 0 and width < NARROW:
        axis -= 1
        width *= x.shape[axis]
    return x.reshape(-1, width) if width else x.reshape(1, 0)


def close(got: Array, truth: Truth, dtype: str, *, gradient: bool) -> Closeness:
    """Hold a result to what it should be; ``got`` has the shape of the exact one."""
    exact = truth.exact
    if exact.dtype.kind != "f":
        right = np.any([got == value for value in truth.seen], axis=0)
        off = float(np.mean(~right)) if right.size else 0.0
        worst = tuple(int(i) for i in np.argwhere(~right)[0][:-1]) if off and right.ndim else ()
        return Closeness(off, 0.0, np.inf if off else 0.0, worst)
    got = np.asarray(got, np.float64)
    if truth.jumps.any():
        with np.errstate(all="ignore"):
            low, high = (f(truth.seen, axis=0) for f in (np.fmin.reduce, np.fmax.reduce))
            outside = got - np.clip(got, low, high)
            # what lies on one side is rounded too
            room = ROUNDINGS * UNIT_ROUNDOFF[dtype] * np.maximum(np.abs(low), np.abs(high))
            outside = np.where(np.abs(outside) <= room, 0, outside)
        got = np.where(truth.jumps, exact + outside, got)
    same = (np.isnan(got) & np.isnan(exact)) | (got == exact)
    got = np.where(truth.judged & ~(same & ~np.isfinite(exact)), got, 0)
    settled = ~truth.judged | (same & ~np.isfinite(exact))
    wrong = ~np.isfinite(exact) & ~settled  # infinity or NaN is due, and something else came
    exact = np.where(settled | wrong, 0, exact)
    plain = np.where(settled | wrong, 0, truth.plain)
    got = np.where(wrong, np.nan, got)
    got, exact, plain, s = (as_rows(a) for a in (got, exact, plain, truth.magnitude.s))
    magnitude = truth.magnitude._replace(s=s)
    return compare(got, exact, plain, magnitude, dtype, gradient=gradient)
