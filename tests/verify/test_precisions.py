"""Each precision: right kernels raise no alarm, those of the next coarser one are caught."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.tolerance import (
    FP8,
    UNIT_ROUNDOFF,
    Magnitude,
    compare,
    round_bf16,
    round_float16,
    round_fp8,
    round_tf32,
    round_to,
    scaled_fp8,
)
from accel.verify import check_module, check_op
from accel.verify.contract import DTYPES, Case, applies, plain_results, reference_results
from accel.verify.load import as_subject
from accel.verify.ops import linear_cross_entropy as loss
from accel.verify.ops import softmax
from accel.verify.ops.attention import _moved
from accel.verify.search import Dealer
from reference import linear_cross_entropy, ops
from reference.cross_entropy import dlogits
from reference.logits import logits
from reference.ops import OPS
from reference.types import Array
from tests.helpers.kernels.caught import wrong_results
from tests.helpers.kernels.correct import kernels
from tests.helpers.kernels.lowered import lowered, stored
from tests.helpers.kernels.unfused import unfused_attention

EIGHT_BITS = tuple(FP8)


def eight(dtype: str) -> Callable[[Array], Array]:
    return lambda x: scaled_fp8(x, dtype)


RIGHT: dict[str, list[Any]] = {
    "float16": [
        kernels(round_float16),
        unfused_attention(False, round_float16),
        unfused_attention(True, round_float16),
    ],
    "tf32": [lowered(round_tf32), lowered(lambda x: x)],
    "e4m3": [stored(eight("e4m3"), lambda x: x), stored(eight("e4m3"), round_bf16)],
    "e5m2": [stored(eight("e5m2"), lambda x: x), stored(eight("e5m2"), round_bf16)],
}


@pytest.mark.parametrize("dtype", RIGHT)
def test_right_kernels_raise_no_alarm(dtype: str) -> None:
    for kernel in RIGHT[dtype]:
        check_module(kernel, dtypes=[dtype], examples=12, partial=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", RIGHT)
def test_right_kernels_raise_no_alarm_in_fifty_seeds(dtype: str) -> None:
    for seed in range(50):
        for kernel in RIGHT[dtype]:
            check_module(kernel, dtypes=[dtype], seed=seed, shrink=False, partial=True)


def test_plain_code_in_tf32_multiplies_rounded_operands() -> None:
    subject, spec = as_subject(lowered(round_tf32)), OPS["linear"]
    case = subject.draw(spec, "tf32", Dealer(0, [{"bias": True}]).picks([]))
    x, weight, bias, dout = (
        np.asarray(a, np.float32)
        for a in (*(case.arrays[n] for n in ("x", "weight", "bias")), case.cotangent)
    )
    plain = plain_results(case)
    x, weight, dout = round_tf32(x), round_tf32(weight), round_tf32(dout)
    wide = [a.astype(np.float64) for a in (x, weight, dout)]
    exact = {"out": wide[0] @ wide[1] + bias, "dx": wide[2] @ wide[1].T}
    for name, value in exact.items():
        np.testing.assert_allclose(plain[name], value, rtol=0, atol=2e-6 * np.abs(value).max())
        assert np.abs(reference_results(case, np.float64)[name] - value).max() > 1e-5


HALF_SUMS = "float16, sums too"


def half_sums() -> SimpleNamespace:
    """Add up in float16, a product at a time."""

    def logits(x: Array, head: Array, bias: Array | None = None) -> Array:
        total = np.zeros((*x.shape[:-1], len(head)), np.float16)
        for i in range(x.shape[-1]):
            total += (x[..., i, None] * head[:, i]).astype(np.float16)
        out = total.astype(np.float32)
        return out if bias is None else round_float16(out + bias)

    return SimpleNamespace(logits=logits)


COARSER = [
    ("bf16 for float16", "float16", kernels(round_bf16), ("linear", "rmsnorm", "attention")),
    (HALF_SUMS, "float16", half_sums(), ("logits",)),
    ("float16 for float32", "float32", kernels(round_float16), ("linear", "gelu", "attention")),
    ("TF32 for float32", "float32", lowered(round_tf32), ("linear", "logits", "attention")),
    ("bf16 for TF32", "tf32", lowered(round_bf16), ("linear", "logits", "attention")),
    ("e5m2 for e4m3", "e4m3", stored(eight("e5m2"), round_bf16), ("linear", "embedding")),
    ("e4m3 for e5m2", "e5m2", stored(eight("e4m3"), round_bf16), ("linear", "write_kv")),
    ("results in 8 bits as well", "e4m3", stored(eight("e4m3"), eight("e4m3")), ("logits",)),
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "op"),
    [
        pytest.param(
            *(kernel, dtype, op),
            id=f"{title}: {op}",
            marks=[pytest.mark.slow] if op == "attention" else [],  # 10 to 20 s each
        )
        for title, dtype, kernel, ops in COARSER
        for op in ops
    ],
)
def test_a_coarser_precision_is_caught(kernel: Any, dtype: str, op: str) -> None:
    assert wrong_results(op, kernel, dtype=dtype, examples=15)


def tenfold(where: str) -> SimpleNamespace:
    """Return 16-bit attention that takes P ten times where a query's own score is beyond 300."""
    plain = unfused_attention(False)

    def large(cache: Any) -> Array:
        q, k, _, p, _, _, factor, _ = cache
        s = np.abs(factor * (q @ k.swapaxes(-1, -2)))
        own = np.take_along_axis(s, np.argmax(p, axis=-1, keepdims=True), axis=-1)
        return np.asarray(1 + 9 * (own > 300), np.float32)

    @functools.wraps(plain.attention_forward)
    def attention_forward(*arrays: Array, **options: Any) -> Any:
        out, cache = plain.attention_forward(*arrays, **options)
        times = large(cache).transpose(0, 2, 1, 3) if where == "out" else 1
        return out * np.asarray(times, np.float32), cache

    def attention_backward(dout: Array, cache: Any) -> Any:
        q, k, v, p, keep, pk, factor, G = cache
        times = large(cache) if where == "dv" else 1
        return plain.attention_backward(dout, (q, k, v, p * times, keep, pk * times, factor, G))

    return SimpleNamespace(
        attention_forward=attention_forward, attention_backward=attention_backward
    )


@pytest.mark.parametrize("where", ["out", "dv"])
def test_large_scores_are_held_to_more_than_being_finite(where: str) -> None:
    assert where in wrong_results("attention", tenfold(where), where, "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_beside_a_score_of_minus_infinity_the_others_decide(dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.random((1, 8, 1, 1)).astype(np.float32) for _ in "qkv")
    q, k[0, 3], v[0, 3] = 60 * q, -np.inf, 0
    store = round_bf16 if dtype == "bf16" else round_float16
    q, k, v = store(q), store(k), store(v)
    given: dict[str, Any] = dict.fromkeys(("alibi", "key_mask", "documents"))
    case = Case("attention", dtype, {"q": q, "k": k, "v": v} | given, {"causal": False}, None, {})
    (out,) = [j for j in as_subject(unfused_attention(False, store)).run(case) if j.name == "out"]
    assert out.ok, out.problem or out.closeness


def test_a_probability_moves_as_far_as_its_scores_let_it() -> None:
    """Beside the extremes that are met when each score takes either end of its interval."""
    rng = np.random.default_rng(0)
    score, eta = 20 * rng.standard_normal((3, 6)), 9 * rng.random((3, 6))
    seen = np.array([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 1, 0, 0]], np.bool_)
    z = np.where(seen, score - np.max(score, axis=-1, keepdims=True), -np.inf)
    ends = np.array([*itertools.product((-1, 1), repeat=6)])[:, None]
    e = np.exp(z + ends * eta)
    p = e / e.sum(axis=-1, keepdims=True)
    least, most = _moved(z, np.where(seen, eta, 0))
    np.testing.assert_allclose(least, p.min(axis=0), rtol=1e-12)
    np.testing.assert_allclose(most, p.max(axis=0), rtol=1e-12)


def test_tf32_and_eight_bits_are_for_what_is_multiplied_or_stored() -> None:
    takers = {d: [op for op in OPS if applies(OPS[op], d)] for d in DTYPES}
    assert takers["tf32"] == ["linear", "attention", "linear_cross_entropy", "logits"]
    for dtype in EIGHT_BITS:
        assert takers[dtype] == ["embedding", "linear", "logits", "write_kv"]
    assert takers["float16"] == takers["bf16"] and "adamw" not in takers["float16"]
    assert takers["float32"] == list(OPS)


def test_a_precision_that_says_nothing_of_an_op_is_told() -> None:
    module = SimpleNamespace(
        DTYPES=("tf32", "float32", "e4m3"),
        softmax=ops.softmax,
        linear_forward=ops.linear_forward,
        linear_backward=ops.linear_backward,
    )
    report = check_module(module, examples=3)
    assert {(op.op, op.dtype) for op in report.ops} == {
        ("softmax", "float32"),
        *(("linear", dtype) for dtype in module.DTYPES),
    }
    told = [f"without cases in {dtype}: softmax" for dtype in ("e4m3", "tf32")]
    assert sorted(report.notes) == told


def test_a_module_that_keeps_float16_is_checked_in_float16() -> None:
    def relu_forward(x: Array) -> Any:
        assert x.dtype == np.float16
        return np.maximum(x, 0), None

    module = SimpleNamespace(
        from_numpy=lambda x: x.astype(np.float16), to_numpy=lambda x: x, relu_forward=relu_forward
    )
    assert as_subject(module).dtypes() == ("float16",)
    assert [op.dtype for op in check_module(module, examples=10, partial=True).ops] == ["float16"]


# ---- long sums -----------------------------------------------------------------------------------


def test_plain_code_is_run_on_arrays_that_lie_as_those_of_the_case_do() -> None:
    rng = np.random.default_rng(0)
    head = (rng.integers(-8, 9, (34_994, 1)) / 4).astype(np.float32)
    arrays = {"x": np.full((2, 1), 1e-3, np.float32), "head": head}
    arrays["targets"] = np.zeros(2, np.int32)
    plain = Case("linear_cross_entropy", "float32", arrays, {}, 1.0, {})
    turned = replace(plain, layouts={"head": "reversed"})
    cache = linear_cross_entropy.forward(*arrays.values())[1]
    backwards = np.ascontiguousarray(head[::-1])[::-1]
    found = linear_cross_entropy.backward(1.0, cache._replace(E=backwards))[0]
    assert np.array_equal(plain_results(turned)["dx"], found)
    assert not np.array_equal(plain_results(plain)["dx"], found)  # another order of the sum


def test_a_sum_over_a_large_vocabulary_may_run_term_by_term() -> None:
    def forward(x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None) -> Any:
        return linear_cross_entropy.forward(x, head, targets, mask, bias)

    def backward(dloss: float, cache: Any) -> Any:
        x, head, targets, mask, bias, shape = cache
        dz = dlogits(logits(x, head, bias), targets, mask) * float(dloss)
        dx = np.stack([np.cumsum(dz * column, axis=1)[:, -1] for column in head.T], axis=-1)
        return dx.reshape(shape), *linear_cross_entropy.backward(dloss, cache)[1:]

    kernel: dict[str, Any] = {"forward": forward, "backward": backward, "dtypes": ["float32"]}
    for seed in (10, 11):
        check_op("linear_cross_entropy", **kernel, seed=seed)


@pytest.mark.parametrize("n", [3, 100, 5_000, 90_000])
def test_a_running_sum_of_equal_terms_is_right_and_one_that_is_off_by_more_is_not(n: int) -> None:
    terms = np.random.default_rng(0).random(100).astype(np.float32)
    exact = n * terms.astype(np.float64)
    got = np.cumsum(np.broadcast_to(terms, (n, 100)), axis=0)[-1].astype(np.float64)
    worst = np.argmax(np.abs(got - exact) / exact)
    alike = Magnitude(exact[worst], 1, n, alike=True)
    close = [
        compare(result[worst], exact[worst], exact[worst], alike, "float32", gradient=False)
        for result in (got, exact * (1 + n * 2.0**-24))
    ]
    assert close[0].ok and close[1].ok == (n < 16)
    assert n < 90_000 or np.abs(got - exact)[worst] > 4 * n**0.5 * 2.0**-24 * exact[worst]


# ---- the roundings themselves --------------------------------------------------------------------


@given(st.floats(-(2.0**60), 2.0**60, width=32))
def test_tf32_keeps_ten_explicit_bits(x: float) -> None:
    y = float(round_tf32(np.float32(x)))
    assert abs(y - x) <= 2.0**-11 * abs(x) + 1e-38
    assert int(np.float32(y).view(np.uint32)) & 0x1FFF == 0


@pytest.mark.parametrize(("dtype", "count", "least"), [("e4m3", 253, 2**-9), ("e5m2", 247, 2**-16)])
def test_eight_bits_hold_so_many_numbers(dtype: str, count: int, least: float) -> None:
    top = FP8[dtype][2]
    fine = np.concatenate([np.linspace(0, 1, 200_001), np.geomspace(1e-7, 2 * top, 200_001)])
    held = np.unique(round_fp8(np.concatenate([fine, -fine]), dtype) + 0.0)
    assert len(held) == count
    assert held.max() == top and held[held > 0].min() == least
    np.testing.assert_array_equal(round_fp8(held, dtype), held)
    between = (held[1:] + held[:-1]) / 2
    near = round_fp8(between * (1 + 1e-6), dtype)
    assert (np.abs(near - between) <= (held[1:] - held[:-1]) * 0.51).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_storing_in_eight_bits_again_loses_nothing(dtype: str) -> None:
    x = round_to(np.random.default_rng(0).standard_normal((50, 30)), dtype)
    np.testing.assert_array_equal(round_to(x, dtype), x)
    assert len(np.unique(np.abs(x))) < 130


def test_a_row_far_below_the_others_is_held_to_its_own_size() -> None:
    exact = np.array([[1.0, 2.0], [3e-175, 4e-175], [3e100, 4e100]])
    magnitude = Magnitude(np.abs(exact), 1, 2)

    def ratio(got: Array) -> float:
        return compare(got, exact, exact, magnitude, "float64", gradient=True).ratio

    near = exact.copy()
    near[1] *= 1 + 2.0**-52
    assert 0 < ratio(near) <= 1
    for row in range(3):
        wrong = near.copy()
        wrong[row] += (1e-9, 1e-30, 1e90)[row]
        assert ratio(wrong) > 1, row


@pytest.mark.parametrize("width", [1, 255, 256, 513, 4099, 65_539])
def test_one_wrong_column_of_a_wide_row_is_seen_in_its_piece(width: int) -> None:
    """In bf16 a row of 65,539 numbers without its last three is off by 0.7 %."""
    rng = np.random.default_rng(width)
    exact = rng.choice([-1.0, 1.0], (3, width))
    magnitude = Magnitude(np.abs(exact), 7)
    held = {"plain": exact, "magnitude": magnitude, "dtype": "bf16", "gradient": False}
    right = exact * (1 + rng.uniform(-7, 7, exact.shape) * 2.0**-8)
    assert compare(right, exact, **held).ok
    for column in {0, width // 2, width - 1}:
        wrong = right.copy()
        wrong[1, column] = 0
        found = compare(wrong, exact, **held)
        assert not found.ok and found.row == (1,)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3)])
def test_nothing_is_as_nothing(shape: tuple[int, ...]) -> None:
    none = np.zeros(shape)
    found = compare(none, none, none, Magnitude(none, 7), "float32", gradient=True)
    assert found.ok and found.error == 0


def test_sixteen_bits_hide_no_gross_mistake_of_a_softmax() -> None:
    rng, u = np.random.default_rng(0), UNIT_ROUNDOFF["bf16"]
    x = round_bf16(rng.standard_normal((5, 129)))
    x[:, -1] = 1  # as large as the root mean square of the others' exponentials
    exact = ops.softmax(x.astype(np.float64))
    cut = np.concatenate([ops.softmax(x[:, :-1].astype(np.float64)), np.zeros((5, 1))], axis=1)
    magnitude = softmax.magnitude({"x": x}, None, u)["out"]
    for got, ok in ((round_bf16(exact), True), (cut, False), (1.1 * exact, False)):
        assert compare(got, exact, exact, magnitude, "bf16", gradient=False).ok == ok

    x, head = (round_bf16(rng.standard_normal((n, 65))) for n in (35, 65))
    given = {"x": x, "head": head, "targets": rng.integers(0, 65, 35)}
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in given.items()}
    _, cache = ops.linear_cross_entropy_forward(**wide)
    exact, dhead, _ = ops.linear_cross_entropy_backward(1.0, cache)
    found = loss.magnitude(wide, 1.0, u)
    onehot = np.zeros((35, 65))
    onehot[np.arange(35), given["targets"]] = 1
    for name, due, wrong in (("dx", exact, 0 * exact), ("dhead", dhead, -onehot.T @ wide["x"])):
        for got, ok in ((round_bf16(due), True), (wrong, False)):
            closeness = compare(got, due, due, found[name], "bf16", gradient=True)
            assert closeness.ok == ok, (name, closeness)


def test_a_row_that_is_cut_at_sixteen_bits_is_seen_in_bf16() -> None:
    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Any:
        out, cache = ops.rmsnorm_forward(x, gain, eps=eps)
        out[..., 65_536:] = 0
        return out, cache

    module = SimpleNamespace(
        rmsnorm_forward=rmsnorm_forward, rmsnorm_backward=ops.rmsnorm_backward, DTYPES=("bf16",)
    )
    report = check_module(module, examples=60, shrink=False, raises=False)
    assert not report.right and not any("transposed" in h for f in report.failures for h in f.hints)
