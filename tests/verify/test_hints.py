"""Hints: what is said was tried, on the smallest case and on larger ones, or is plain to see."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.verify import Report, check_module, check_op
from accel.verify.contract import Case, draw_case, reference_results
from accel.verify.draw import Draw
from accel.verify.evidence import Evidence, Wrong
from accel.verify.observed import of_values
from accel.verify.shrink import is_rich
from accel.verify.spoiled import Mistake, by_rule, listed, spoiled
from accel.verify.trial import Judged
from reference import ops
from reference.ops import OPS
from reference.types import Array
from tests.helpers.kernels.hinted import corpus, findings, judge


def hints(report: Report, name: str) -> list[str]:
    (failure, *_) = (f for f in report.failures if f.name == name)
    return failure.hints


def with_backward(op: str, backward: Any, dtype: str = "float32", **options: Any) -> Report:
    """The report on a backward beside the reference's forward."""
    right = getattr(ops, f"{op}_forward")
    how: dict[str, Any] = {"dtypes": [dtype], "raises": False, **options}
    return check_op(op, forward=right, backward=backward, **how)


def cases_of(op: str, count: int) -> list[Case]:
    rng, spec = np.random.default_rng(0), OPS[op]
    found: list[Case] = []
    while len(found) < count:
        draw = Draw(lambda options, name="": options[rng.integers(len(options))], "float64")
        case = draw_case(spec, draw, has_backward=spec.backward, backward_offers=lambda _: True)
        if case.size[0] < 140_000:
            found.append(case)
    return found


def test_strides_are_said_to_be_ignored_where_that_gives_what_the_kernel_gave() -> None:
    def forward(x: Array) -> Array:
        return np.maximum(x, 0) * (x.flags.c_contiguous or np.float32(1.01))

    said = hints(check_op("relu", forward=forward, dtypes=["float32"], raises=False), "out")
    assert "it passes when x is contiguous." in said
    assert not any("are strides ignored?" in hint for hint in said)


def test_plus_that_is_left_out_is_named() -> None:
    def backward(dout: Array, cache: Any, *, plus: Array | None = None) -> Any:
        return ops.rmsnorm_backward(dout, cache)

    found = with_backward("rmsnorm", backward, "float64")
    said = hints(found, "dx")
    assert said[0] == "is plus not added to dx?" and not any("stale" in hint for hint in said)


def test_another_call_that_is_wrong_by_itself_is_not_taken_for_a_stale_result() -> None:
    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> tuple[Array, Any]:
        return ops.rmsnorm_forward(x, gain, eps=min(eps, 0.6))  # 0.5 is drawn, and 0.25 added

    report = check_op("rmsnorm", forward=rmsnorm_forward, dtypes=["float32"], raises=False)
    for failure in report.failures:
        assert any("wrong as the only one, too: " in hint for hint in failure.hints), failure
        assert not any("?" in hint for hint in failure.hints), failure.hints


def test_what_finite_results_contradict_is_not_told_of_nan() -> None:
    def layernorm_backward(dout: Array, cache: Any) -> Any:
        dx, dgain, dbias = ops.layernorm_backward(dout, cache)
        with np.errstate(all="ignore"):
            return dx * np.float32(1.5) / np.float32(dx.shape[-1] != 1), dgain, dbias

    report = with_backward("layernorm", layernorm_backward)
    said = [h for f in report.failures for h in f.hints]
    assert said and not any("divided by D - 1" in h for h in said), said


def test_a_case_stays_one_in_which_the_truth_is_finite() -> None:
    """Numbers rounded to quarters may be equal, and 1/√(0 + 0) is infinite for everybody."""

    def layernorm_forward(x: Array, gain: Array, bias: Array, *, eps: float) -> Array:
        mean = x.mean(-1, keepdims=True)
        square = np.maximum(np.mean(x * x, axis=-1, keepdims=True) - mean * mean, 0)
        return np.asarray((x - mean) / np.sqrt(square + x.dtype.type(eps)) * gain + bias)

    report = check_op("layernorm", forward=layernorm_forward, dtypes=["float32"], raises=False)
    (infinite,) = (f for f in report.failures if f.kind == "nonfinite")
    assert infinite.judged.exact is not None and np.isfinite(infinite.judged.exact).all()


def test_zeros_are_no_sign_of_what_is_nearly_zero() -> None:
    def softmax(x: Array) -> Array:
        out = ops.softmax(x)
        return np.zeros_like(out) if x[..., 0].size > 60_000 else out

    report = check_op("softmax", forward=softmax, dtypes=["float32"], raises=False)
    (failure,) = report.failures
    assert not any("is the sum taken over" in hint for hint in failure.hints), failure.hints
    assert any("zero everywhere" in hint for hint in failure.hints), failure.hints


def test_a_second_condition_is_told_where_it_tells_something() -> None:
    cases = cases_of("rmsnorm", 200)
    for seed in (2, 4, 7):  # by chance a second one leaves some cases out
        evidence, rng = Evidence(), np.random.default_rng(seed)
        for case in cases:
            lost = case.arrays["x"][..., 0].size > 60 and rng.random() < 0.7
            evidence.add(case, [Judged("out", "value", problem="wrong" * bool(lost))])
        (told,) = evidence.conditions(("out", "value"))
        assert "rows > " in told and " and " not in told.partition(",")[0], told


def test_no_condition_is_told_of_what_fails_in_another_way_elsewhere() -> None:
    evidence = Evidence()
    for i, case in enumerate(cases_of("rmsnorm", 200)):
        many = case.arrays["x"][..., 0].size > 60
        elsewhere = Judged("out", "shape", problem="wrong" * (not many and i % 9 == 0))
        evidence.add(case, [elsewhere, Judged("out", "value", problem="wrong" * bool(many))])
    assert list(evidence.conditions(("out", "value"))) == []


def test_a_change_by_rule_that_right_results_contradict_is_not_told_of_nan() -> None:
    def attention_forward(q: Array, k: Array, v: Array, *given: Any, **options: Any) -> Array:
        out, _ = ops.attention_forward(q, k, v, *given, **options)
        options |= {"dropout_p": 0.0, "dropout_key": None}
        seen, _ = ops.attention_forward(q, k, np.ones_like(v), *given, **options)
        return np.where(seen == 0, np.asarray(np.nan, out.dtype), out)

    how: dict[str, Any] = {"dtypes": ["float64"], "partial": True, "raises": False}
    (failure,) = check_op("attention", forward=attention_forward, **how).failures
    assert any("np.where(m == -np.inf, 0, m)" in hint for hint in failure.hints), failure.hints
    assert not any("is the minus of" in hint for hint in failure.hints), failure.hints


def test_two_gradients_in_each_other_s_place_are_said_to_be() -> None:
    def attention_backward(dout: Array, cache: Any) -> Any:
        dq, dk, dv = ops.attention_backward(dout, cache)
        return dk, dq, dv

    report = with_backward("attention", attention_backward, examples=60)
    assert "are dq and dk returned in each other's place?" in hints(report, "dq")[0]
    # where it has another shape it is wrong as well
    assert not any("and in none of the other" in h for f in report.failures for h in f.hints)


# ---- mistakes of the reference -------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in OPS if listed(op)])
def test_every_mistake_of_a_room_changes_a_result(op: str) -> None:
    left = {mistake: spoiled(op, mistake) for mistake in listed(op)}
    assert left
    for case in cases_of(op, 150):
        for dtype in (np.float64, np.float32):  # exp overflows in float32 alone
            right = reference_results(case, dtype)
            for mistake, wrong in list(left.items()):
                if _differs(case, dtype, right, wrong):
                    del left[mistake]
        if not left:
            return
    assert [mistake.says for mistake in left] == []


def _differs(case: Case, dtype: Any, right: dict[str, Array], wrong: Any) -> bool:
    with np.errstate(all="ignore"):
        try:
            found = reference_results(case, dtype, wrong)
        except (ValueError, IndexError, ZeroDivisionError):
            return False  # it does not apply to this case
    return not all(np.array_equal(found[name], a, equal_nan=True) for name, a in right.items())


def test_a_mistake_that_the_reference_no_longer_has_a_place_for_is_told() -> None:
    with pytest.raises(ValueError, match=r"'is it so\?': reference/relu.py has no 'nothing \+ 1'"):
        spoiled("relu", Mistake("is it so?", "relu", (("nothing + 1", "2"),)))


@pytest.mark.parametrize(
    ("op", "says", "result"),
    [
        ("gelu_tanh", "two of its digits swapped", "out"),
        ("muon", "√max(1, I/O)", "master"),
        ("layernorm", "lanes beyond D, up to a power of two", "out"),
        ("attention", "the maximum start at 0", "out"),
        ("attention", "not scaled down when the maximum grows", "out"),
    ],
)
def test_a_mistake_of_a_room_is_named_in_a_kernel_that_makes_it(
    op: str, says: str, result: str
) -> None:
    made = [mistake for mistake in listed(op) if says in mistake.says]
    assert made
    for mistake in made:
        report = check_module(spoiled(op, mistake), ops=[op], dtypes=["float32"], raises=False)
        assert says in "".join(hints(report, result)[:1]), report.text()


def test_changes_by_rule_name_the_place_and_change_nothing_else() -> None:
    found = dict(by_rule("rmsnorm"))
    says = "is the factor `g` missing? (forward in reference/rmsnorm.py)"
    x, g = np.ones((2, 3)), np.full(3, 2.0)
    np.testing.assert_array_equal(
        found[says]().rmsnorm_forward(x, g, eps=1e-5)[0] * 2,
        ops.rmsnorm_forward(x, g, eps=1e-5)[0],
    )
    assert any("in reference/visibility.py" in text for text, _ in by_rule("attention"))


def test_a_mistake_that_no_list_has_is_found_by_its_place() -> None:
    def rmsnorm_backward(dout: Array, cache: Any) -> Any:
        x, gain, r = cache
        n = x * r
        dn = dout * gain
        dx = r * (dn - r * np.mean(dn * n, axis=-1, keepdims=True))  # r for n
        return dx, np.sum(dout * n, axis=tuple(range(dout.ndim - 1)))

    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Any:
        r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.asarray(eps, x.dtype))
        return x * r * gain, (x, gain, r)

    functions: dict[str, Any] = {"forward": rmsnorm_forward, "backward": rmsnorm_backward}
    report = check_op("rmsnorm", **functions, dtypes=["float32"], examples=40, raises=False)
    said = "`r` for `n`? (backward in reference/rmsnorm.py) That gives the dx which the kernel gave"
    assert said in hints(report, "dx")[0]


# ---- nothing is said that was not tried ----------------------------------------------------------


def test_what_nothing_explains_is_not_explained() -> None:
    def softmax(x: Array) -> Array:
        noise = np.random.default_rng(abs(int(1e6 * float(np.sum(np.abs(x))))))
        return ops.softmax(x) * noise.uniform(0.5, 1.5, x.shape).astype(x.dtype)

    report = check_module(
        SimpleNamespace(softmax=softmax), dtypes=["float32"], examples=40, raises=False
    )
    assert not [hint for hint in hints(report, "out") if "?" in hint]


def test_a_factor_is_named_only_when_it_holds_in_several_cases() -> None:
    def wrong(factor: Any) -> list[str]:
        def linear_forward(x: Array, weight: Array) -> Array:
            return np.asarray(ops.linear_forward(x, weight)[0] * factor(x, weight), x.dtype)

        report = check_op(
            "linear", forward=linear_forward, dtypes=["float32"], examples=40, raises=False
        )
        return hints(report, "out")

    assert any("out is 3 times what it should be, in " in h for h in wrong(lambda *_: 3.0))
    assert any("mean for sum over the rows?" in h for h in wrong(lambda x, w: w.shape[0] / x.size))
    by_chance = wrong(lambda x, w: 1.5 + np.sin(float(np.sum(x))))
    assert not any("times" in hint or "?" in hint for hint in by_chance)


def test_zero_is_said_only_where_something_else_is_due() -> None:
    def gelu_backward(dout: Array, x: Array) -> Array:
        return np.zeros_like(dout)

    def gelu_forward(x: Array) -> Any:
        return ops.gelu_forward(x)[0], x

    options: dict[str, Any] = {"dtypes": ["float32"], "examples": 40, "raises": False}
    report = check_op("gelu", forward=gelu_forward, backward=gelu_backward, **options)
    (failure, *_) = report.failures
    assert failure.judged.exact is not None and failure.judged.exact.any()
    assert "dx is zero everywhere in" in failure.hints[0]


@pytest.mark.parametrize(
    ("narrow", "said"),
    [
        (lambda x: x.astype(np.float16).astype(np.float32), "inputs rounded to float16?"),
        (lambda x: (x.view(np.int32) + 0x1000 & ~0x1FFF).view(np.float32), "rounded to TF32?"),
    ],
)
def test_rounded_inputs_are_told_from_rounded_results(narrow: Any, said: str) -> None:
    def linear_forward(x: Array, weight: Array) -> Array:
        x, weight = np.ascontiguousarray(x), np.ascontiguousarray(weight)
        return np.asarray(narrow(x) @ narrow(weight))

    report = check_op(
        "linear", forward=linear_forward, dtypes=["float32"], examples=40, raises=False
    )
    assert any(said in hint for hint in hints(report, "out"))

    def softmax(x: Array) -> Array:
        return np.asarray(narrow(ops.softmax(x)))

    report = check_module(
        SimpleNamespace(softmax=softmax), dtypes=["float32"], examples=40, raises=False
    )
    assert any("holds" in hint and "numbers only" in hint for hint in hints(report, "out"))


def test_zeros_are_not_taken_for_rounded_numbers() -> None:
    exact = np.random.default_rng(0).standard_normal((6, 16))
    (case,) = cases_of("gelu", 1)

    def said(got: Array) -> str:
        return "".join(of_values([Wrong(case, Judged("out", "value", None, *p)) for p in got]))

    zeros = np.where(np.arange(6)[:, None] < 5, 0, 1.01 * exact)
    assert "rounded" not in said(np.stack([zeros, exact], 1))
    halves = np.where(exact > 0, np.float32(exact), 0)
    assert "rounded to float32?" in said(np.stack([halves, exact], 1))


# ---- what many cases say together ----------------------------------------------------------------


def test_the_condition_under_which_an_op_fails_is_said() -> None:
    def gelu_forward(x: Array) -> Array:
        out, _ = ops.gelu_forward(x)
        return np.asarray(out * 1.01, x.dtype) if x.shape[-1] > 64 and x.ndim > 1 else out

    report = check_op("gelu", forward=gelu_forward, dtypes=["float32"], raises=False)
    (failure,) = report.failures
    assert any("cases with" in h and "last axis > 64" in h for h in failure.hints), failure.hints


def test_a_case_with_each_array_that_matters_is_kept() -> None:
    evidence, wrong = Evidence(), Judged("total", "value", problem="wrong")
    for case in cases_of("linear_cross_entropy", 60):
        given = case.arrays["mask"] is not None
        case = case.but({"mask": np.ones_like(case.arrays["mask"])} if given else {})
        evidence.add(case, [wrong])
    case = next(c for c in cases_of("linear_cross_entropy", 60) if c.arrays["targets"].size > 3)
    holes = case.but({"mask": np.arange(case.arrays["targets"].size).reshape(-1) % 2 == 0})
    holes = holes.but({"mask": holes.arrays["mask"].reshape(case.arrays["targets"].shape)})
    key = "total", "value"
    evidence.add(holes, [wrong])
    assert any(w.case is holes for w in evidence.telling(key))


def test_no_condition_is_made_of_chance() -> None:
    evidence = Evidence()
    rng = np.random.default_rng(0)
    for case in cases_of("gelu", 60):
        evidence.add(case, [Judged("out", "value", problem="wrong" * bool(rng.random() < 0.3))])
    assert list(evidence.conditions(("out", "value"))) == []


def test_the_smallest_case_has_something_to_show() -> None:
    def layernorm_forward(x: Array, gain: Array, bias: Array, *, eps: float) -> Array:
        c = x - np.mean(x, axis=-1, keepdims=True)
        return np.asarray(c / (np.std(x, axis=-1, keepdims=True) + 1e-2) * gain + bias, x.dtype)

    options: dict[str, Any] = {"dtypes": ["float32"], "examples": 40, "raises": False}
    report = check_op("layernorm", forward=layernorm_forward, **options)
    for failure in report.failures:
        assert is_rich(failure.judged), failure.case.describe()
    one = Judged("out", "value", exact=np.ones((2, 2)))
    assert not is_rich(one) and is_rich(one._replace(exact=np.array([0.0, 1.0])))
    assert not is_rich(one._replace(exact=np.zeros(3))) and is_rich(one._replace(exact=np.ones(())))


# ---- the planted mistakes ------------------------------------------------------------------------


def test_hints_are_judged_by_what_they_name() -> None:
    assert judge("eps outside", ["Is EPS outside the root?"]) == "right"
    assert judge("eps outside", ["is eps left out?"]) == "misleading"
    assert judge("eps outside", ["out is wrong only at the last index of axis 1"]) == "none"


def test_every_planted_kernel_has_a_pattern_of_its_hint() -> None:
    assert all(named.pattern for named in corpus())  # a KeyError names one that has none


@pytest.mark.slow
def test_hints_name_most_planted_mistakes_and_mislead_in_few() -> None:
    counts = Counter(findings(named)[0] for named in corpus())
    total = counts.total()
    print(counts)
    assert counts["right"] >= 0.6 * total, counts
    assert counts["misleading"] <= 0.05 * total, counts
