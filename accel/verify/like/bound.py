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
- λ S(x/λ)/u, with λ of 8, 64 and on until x/λ is small, where that is far larger: f is saturated at
  x. A softmax by exp(z - lse) is off by u |lse| where one that divides is not. Where that is an
  eighth of what f usually is, no digit is known.
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

A result that is zero whatever the inputs are, as the loss over one class lse - z, moves with
nothing and says nothing of what was cancelled in it. There the largest input is a floor under s, of
a gradient dout times that.

NaN and infinity are due where f has them at x, and with inputs scaled to below one of which no two
are equal: elsewhere f overflows on the way, or divides one difference of equal numbers by another,
and a kernel need not. A number is due where f and plain code have one, at all points and, past
log(max), at inputs ``HEADROOM`` times as large: exponentials are zero or infinite there, and powers
may overflow in one order and not in another. Nothing more is known of it where plain code is off by
an eighth of s, in rows that one rounding of the inputs moves by an eighth of themselves in most of
their places, and where f is saturated by more than its usual size, as above.

Where f jumps (argmax, floor, a comparison; the gradient of a maximum where two are equal) the
spread says nothing of rounding. An element jumps when a step sixteen times smaller moves it by more
than a quarter as much, or by less than a thousandth. Steps as long as c u, all up, all down and at
random, look for jumps that one rounding does not reach. Gradients are also tried with zeros moved,
and with ties broken in favour of the last and of the first. Such elements leave the norms, and are
right when they lie within what f gives on either side. Integers and bools are right when f gives
that very value at x or at one of these points.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from accel.tolerance import UNIT_ROUNDOFF, round_tf32, round_to
from accel.verify.like.truth import (
    JUMP,
    KNOWN,
    NOISE,
    ROUNDINGS,
    TINY,
    Scales,
    Truth,
    truth_of,
    with_equals,
)
from reference.types import Array

Results = dict[str, Array]
# f: (arrays, precision, whether gradients are wanted too) -> results by name, floats in float64
Evaluate = Callable[[Mapping[str, Array], str], Results]

STEPS = 3  # neighbours at which the spread is measured
NEIGHBOURS = 5  # and at which plain code is
SHARES = (1 / 16, 1 / 256, 1 / 4096)  # p
SATURATED = 4  # inputs above this may be
TIES = 8  # ways to break them
TIE = 2.0**-20  # by how much
HEADROOM = 16  # how far from overflow plain code has to be


def working(dtype: str) -> str:
    """Return the precision that plain code is run in for cases of another."""
    return {"float64": "float32", "e4m3": "bf16", "e5m2": "bf16"}.get(dtype, dtype)


def floor_of_zero(
    values: Iterable[Array], arrays: Mapping[str, Array], name: str, noise: float
) -> float:
    """Return the floor under s of a result that is zero at all points, else 0."""
    inputs = [a for n, a in arrays.items() if a.dtype.kind == "f" and not n.startswith("dout")]
    top = max([1.0, *(float(np.max(np.abs(a), initial=0)) for a in inputs)])
    if name[0] == "d":
        douts = [a for n, a in arrays.items() if n.startswith("dout")]
        top *= max([float(np.max(np.abs(a), initial=0)) for a in douts], default=0.0)
    if not np.isfinite(top) or any(np.any(~(np.abs(v) <= noise * top)) for v in values):
        return 0.0
    return top


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


@np.errstate(all="ignore")
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
    work = working(dtype)
    u_work = UNIT_ROUNDOFF[work]

    def signs(shape: tuple[int, ...]) -> Array:
        return np.asarray(rng.choice([-1.0, 1.0], shape))

    def plainly(given: Mapping[str, Array]) -> Results:
        if work != "tf32":
            return evaluate(given, work)
        kept = {n: round_tf32(a) if a.dtype.kind == "f" else a for n, a in given.items()}
        return evaluate(kept, "float32")

    wide = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    exact = evaluate(wide, "float64")
    gradients &= set(exact)
    terms = _terms(evaluate, wide, exact, rng, signs)

    plain: list[tuple[Results, Results]] = []
    if dtype != "float64":
        plain.append((plainly(arrays), exact))
    steps: list[tuple[Results, Results]] = []
    for at in range(NEIGHBOURS):
        near = {
            name: round_to(a, work) if a.dtype.kind == "f" else a
            for name, a in moved(arrays, 1.5 * u_work, signs).items()
        }
        there = evaluate(near, "float64")
        plain.append((plainly(near), there))
        if at < STEPS:
            steps.append((there, evaluate(_between(wide, near, 1 / 16), "float64")))

    reach = ROUNDINGS + 4 * max(terms.values(), default=1) ** 0.5 * 2.0**-24 / u_work
    reach = min(reach * u_work, 2.0**-4)
    ways: list[Callable[..., Array]] = [np.ones, lambda shape: -np.ones(shape), signs]
    far = [(evaluate(moved(wide, reach, way), "float64"), reach) for way in ways]
    ties = _ties(evaluate, wide, exact, rng, gradients)
    far += [(there, TIE) for there, _ in ties]
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
    lost: set[str] = set()
    for by in _scales(top):
        small = _times(wide, 1 / by)
        here = evaluate(small, "float64")
        there = evaluate(moved(small, 1.5 * u_work, signs), "float64")
        for name in exact:
            if exact[name].dtype.kind == "f" and here[name].shape == exact[name].shape:
                now = max(_typical(a[name] - exact[name]) for a, _ in steps)
                then = _typical(there[name] - here[name])
                if then > 4 * now:
                    floors[name] = max(floors[name], by * then / u_work)
                    usual = max(_typical(exact[name]), _typical(here[name]))
                    lost |= {name} if KNOWN * by * then * float(u / u_work) > usual else set()
    results = [exact[name[1:]] * a for name, a in wide.items() if name.startswith("dout")]
    with np.errstate(all="ignore"):
        given = sum(float(np.sum(np.square(r), where=np.isfinite(r))) for r in results) ** 0.5
        for name in gradients:
            x = wide[name[1:]]
            others = max(_typical(a) for a in _floats(wide))
            factor = max(1.0, others, 1 / max(_typical(x), TINY) if x.any() else 0.0)
            floors[name] += given * factor / max(x.size, 1) ** 0.5
    for name, value in exact.items():
        if value.dtype.kind == "f":
            points = [value, *(a[name] for pair in steps for a in pair)]
            floors[name] += floor_of_zero(points, wide, name, 16 * NOISE)
            lost |= {name} if KNOWN * floors[name] * u > 1 and not value.any() else set()
    due = _due(evaluate, wide, exact, rng)
    near_top = {} if top <= np.log(largest(work)) else plainly(_times(arrays, HEADROOM))
    found = {
        name: truth_of(
            value,
            [(p[name], e[name]) for p, e in plain],
            [(a[name], b[name]) for a, b in steps],
            [(found[name], by) for found, by in far if name in found],
            [(a[name], b[name]) for a, b in ties if name in a],
            Scales(terms[name], floors[name], u_work, float(u / u_work)),
            due.get(name),
            near_top.get(name),
            lost=name in lost,
        )
        for name, value in exact.items()
    }
    return found | {name: with_equals(found[name], wide[name[1:]]) for name in gradients}


def _due(
    evaluate: Evaluate, wide: Mapping[str, Array], exact: Results, rng: np.random.Generator
) -> Results:
    """Return where f is not finite elsewhere either, of results that are not finite.

    That is with all inputs below one, and where no two are equal.
    """
    odd = [n for n, v in exact.items() if v.dtype.kind == "f" and not np.isfinite(v).all()]
    if not odd:
        return {}
    small = {
        name: a / max(1.0, float(np.max(np.abs(a), initial=0, where=np.isfinite(a))))
        if a.dtype.kind == "f"
        else a
        for name, a in wide.items()
    }
    small = moved(small, TIE, lambda shape: np.asarray(rng.uniform(-1, 1, shape)))
    found = evaluate(small, "float64")
    return {n: ~np.isfinite(found[n]) for n in odd if found[n].shape == exact[n].shape}


def _times(arrays: Mapping[str, Array], by: float) -> dict[str, Array]:
    """Return arrays with every float times a number."""
    return {n: a * a.dtype.type(by) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def largest(dtype: str) -> float:
    """Return the largest number of the precision that plain code is run in."""
    return float(np.finfo("float16" if dtype == "float16" else "float32").max)


def _scales(top: float) -> Iterator[float]:
    """Yield by how much inputs are divided until the largest is about one."""
    by = 8.0
    while top > SATURATED and np.isfinite(top) and (by <= 64 or by < 16 * top):
        yield by
        by *= 8 if by == 8 else 64


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
) -> list[tuple[Results, Results]]:
    """Return the gradients where no two inputs are equal and none is zero, and nearer by."""
    if not gradients:
        return []

    def ramp(shape: tuple[int, ...]) -> Array:
        n = int(np.prod(shape))
        return np.linspace(-1.0, 1.0, n).reshape(shape) if n > 1 else np.ones(shape)

    def at(way: Callable[..., Array]) -> tuple[Results, Results]:
        there = moved(wide, TIE, way, zeros=True)
        pair = evaluate(there, "float64"), evaluate(_between(wide, there, 1 / 16), "float64")
        near, nearer = ({name: found[name] for name in gradients} for found in pair)
        return near, nearer

    far = [at(ramp), at(lambda shape: -ramp(shape))]
    with np.errstate(invalid="ignore"):
        off = [_typical(found[n] - exact[n]) for found, _ in far for n in gradients]
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
