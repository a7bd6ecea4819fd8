"""Mistakes that no case shows, since each is within 16 bits' roundings: many cases together do."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.tolerance import round_bf16, round_bits, round_float16
from accel.verify import check_op
from accel.verify.board.eager import stepwise
from accel.verify.calling import Judged
from accel.verify.cli import run
from accel.verify.contract import applies
from accel.verify.evidence import TELLING, Evidence
from accel.verify.leaning import Fit, _compared
from accel.verify.load import as_subject
from accel.verify.report import Report
from accel.verify.search import Dealer
from accel.verify.travel import special_at
from reference import ops
from reference.ops import OPS
from reference.types import Array
from tests.helpers.kernels.unfused import unfused_attention

Rounded = Callable[[Array], Array]


def changed(op: str, *, forward: float = 1, backward: float = 1, how: Rounded) -> dict[str, Any]:
    """Return an op that is right but for a factor, its results rounded."""

    def times(factor: float, made: Any) -> Any:
        if isinstance(made, tuple):
            return tuple(times(factor, part) for part in made)
        return how(made * np.float32(factor)) if made is not None else None

    def first(*arrays: Any, **options: Any) -> Any:
        out, cache = getattr(ops, OPS[op].forward_name)(*arrays, **options)
        return times(forward, out), cache

    def turn(dout: Any, cache: Any) -> Any:
        return times(backward, getattr(ops, f"{op}_backward")(dout, cache))

    return {"forward": first, "backward": turn}


def judged(op: str, dtype: str = "bf16", **how: Any) -> Report:
    return check_op(op, dtypes=dtype, raises=False, partial=True, **how)


def kinds(report: Report) -> set[tuple[str, str]]:
    return {(failure.name, failure.kind) for failure in report.failures}


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "attention", "swiglu", "gelu"])
def test_a_factor_that_is_less_than_the_roundings_may_come_to(op: str) -> None:
    for dtype, how, factor in (("bf16", round_bf16, 1.02), ("float16", round_float16, 0.9975)):
        report = judged(op, dtype, **changed(op, forward=factor, how=how))
        assert ("out", "leans") in kinds(report), report.text()
        (lean,) = (f.judged.problem for f in report.failures if f.name == "out")
        assert f"it is {factor} ± " in lean
        report = judged(op, dtype, **changed(op, backward=factor, how=how))
        assert {"leans", "value"} >= {kind for _, kind in kinds(report)} and kinds(report)


@pytest.mark.parametrize("seed", range(3))
def test_large_cases_do_not_outvote_the_others(seed: int) -> None:
    def backward(dloss: float, cache: Any) -> Any:
        dx, *others = ops.linear_cross_entropy_backward(dloss, cache)
        return round_bf16(dx * np.float32(1.025)), *(
            o if o is None else round_bf16(o) for o in others
        )

    wrong = {"forward": ops.linear_cross_entropy_forward, "backward": backward, "seed": seed}
    assert ("dx", "leans") in kinds(judged("linear_cross_entropy", **wrong))


@pytest.mark.parametrize(
    ("part", "where"),
    [
        (lambda y: np.where(np.arange(y.shape[-1]) % 2, 1, 1.02), "at even indices of the last"),
        (lambda y: np.where(np.arange(y.shape[-1]) % 2, 0.98, 1), "at odd indices of the last"),
        (lambda y: np.where(y > 0, 1.02, 0.99), "where that is above zero"),
        (lambda y: np.where(y < 0, 1.02, 0.99), "where that is below zero"),
        (
            lambda y: np.where(2 * np.arange(y.shape[-1]) < y.shape[-1], 1, 1.02),
            "in the second half of the last axis",
        ),
    ],
)
def test_a_factor_of_a_part(part: Callable[[Array], Array], where: str) -> None:
    def forward(x: Array, gain: Array, bias: Array, *, eps: float) -> Array:
        y = ops.layernorm_forward(x, gain, bias, eps=eps)[0]
        return round_bf16(y * part(y).astype(np.float32))

    report = judged("layernorm", forward=forward)
    assert kinds(report) == {("out", "leans")}, report.text()
    assert f"times what it should be {where}" in report.text()


def gelu_tanh_backward(dout: Array, x: Array, *, three: float = 3.0) -> Array:
    c, a = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)
    h = np.tanh(c * (x + a * x * x * x))
    slope = 0.5 * (1 + h) + 0.5 * x * (1 - h * h) * c * (1 + np.float32(three) * a * x * x)
    return round_bf16(dout * slope)


def test_a_slope_without_its_factor_3_and_its_hint() -> None:
    def backward(dout: Array, inputs: Any, **how: float) -> Array:
        return gelu_tanh_backward(dout, inputs.x, **how)

    right = judged("gelu_tanh", backward=backward)
    assert right.ok, right.text()
    wrong = judged("gelu_tanh", backward=lambda dout, inputs: backward(dout, inputs, three=1.0))
    assert kinds(wrong) == {("dx", "leans")}, wrong.text()
    (failure,) = wrong.failures
    assert "its errors go one way, over 20 cases" in failure.judged.problem
    assert failure.hints[0].startswith("is the factor 3 missing in the derivative")
    assert "The errors of 20 cases together go that way, 1.0" in failure.hints[0]
    assert wrong.ops[0].results["dx"].failed > 0
    assert wrong.ops[0].results["dx"].ratio < 0.5  # of what is allowed, in the worst case


@pytest.mark.parametrize("three", [2.2, 4.0])
def test_a_slope_with_another_constant_goes_a_part_of_the_way(three: float) -> None:
    wrong = judged(
        "gelu_tanh", backward=lambda dout, inputs: gelu_tanh_backward(dout, inputs.x, three=three)
    )
    assert kinds(wrong) == {("dx", "leans")}, wrong.text()
    times = wrong.failures[0].hints[0].partition("go that way, ")[2]
    assert 0.33 < abs(float(times.split()[0])) < 0.6  # all of the way is without the factor 3


@pytest.mark.parametrize("op", ["gelu", "gelu_tanh"])
def test_another_approximation_of_gelu(op: str) -> None:
    def forward(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return round_bf16(x / (1 + np.exp(np.float32(-1.702) * x)))

    report = judged(op, forward=forward)
    assert kinds(report) == {("out", "leans")}, report.text()
    assert "x · σ(1.702 x)" in report.failures[0].hints[0]


IN_BF16 = [op for op in OPS if applies(OPS[op], "bf16")]


@pytest.mark.parametrize("op", IN_BF16)
def test_code_that_rounds_after_every_step_is_right(op: str) -> None:
    module = stepwise(ops, op)
    report = judged(op, module=module, shrink=False)
    assert report.ok, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("op", IN_BF16)
def test_code_that_rounds_after_every_step_is_right_in_fifty_seeds(op: str) -> None:
    for seed in range(50):
        report = judged(op, module=stepwise(ops, op), shrink=False, seed=seed)
        assert report.ok, report.text()


def test_steps_are_rounded() -> None:
    x, gain = (round_bf16(np.linspace(-3, 3, n, dtype=np.float32)) for n in (60, 15))
    x, eps = x.reshape(4, 15), np.float32(1e-5)
    out, _ = stepwise(ops, "rmsnorm").rmsnorm_forward(x, gain, eps=eps)
    b = round_bf16
    mean = b(np.mean(b(x * x), axis=-1, keepdims=True))
    r = b(1 / b(np.sqrt(b(mean + eps))))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, b(b(x * r) * gain))
    assert (out != b(ops.rmsnorm_forward(x, gain, eps=eps)[0])).any()
    _, cache = stepwise(ops, "embedding").embedding_forward(np.zeros(7, np.int32), x)
    grad = stepwise(ops, "embedding").embedding_backward(np.repeat(gain[None], 7, 0), cache)
    np.testing.assert_array_equal(grad, b(grad))  # added up in place, and kept in bf16
    assert (grad[0] != 7 * gain).any()
    alike = np.full((1, 3), -1000, np.float32)  # whose sum is -3008 in bf16
    out, _ = stepwise(ops, "layernorm").layernorm_forward(alike, gain[:3], gain[3:6], eps=eps)
    np.testing.assert_array_equal(out[0], gain[3:6])


def test_what_fails_in_a_case_by_itself_is_said_to_lean_no_more() -> None:
    wrong = changed("rmsnorm", forward=1.02, how=round_bf16)

    def forward(x: Array, gain: Array, **options: Any) -> Any:
        out, cache = wrong["forward"](x, gain, **options)
        return (out * (2 if x.shape[-1] == 7 else 1)), cache

    report = judged(
        "rmsnorm",
        forward=forward,
        backward=changed("rmsnorm", backward=1.02, how=round_bf16)["backward"],
    )
    assert kinds(report) == {("out", "value"), ("dx", "leans"), ("dgain", "leans")}
    dx = next(f for f in report.failures if f.name == "dx")
    assert f"over {report.ops[0].results['dx'].failed} cases" in dx.judged.problem


@pytest.mark.parametrize("op", ["gelu", "rmsnorm", "rope", "softmax", "attention"])
def test_errors_that_are_those_of_float32_are_no_mistake(op: str) -> None:
    report = judged(op, module=ops, shrink=False)  # whose results are not even rounded
    assert report.ok, report.text()


def test_rounding_what_16_bits_may_round_is_no_mistake() -> None:
    report = judged("attention", "float16", module=unfused_attention(False, round_float16))
    assert report.ok, report.text()


def test_what_is_no_number_or_not_known_is_no_error() -> None:
    got, exact = np.float32([1.5, np.inf, 2, 4]), np.array([1, np.inf, 3, 4.0])
    judged = Judged("dx", "value", None, got, exact, unknown=np.array([0, 0, 1, 0], np.bool_))
    error, due, there = _compared(judged) or ()
    assert error.tolist() == [0.5, 0, 0, 0] and due.tolist() == [1, 0, 0, 4]
    assert there.tolist() == [True, False, False, True]
    assert _compared(judged._replace(got=np.arange(4))) is None  # integers are exact


def test_the_largest_right_cases_are_looked_at() -> None:
    evidence, subject, spec = Evidence(), as_subject(ops), OPS["softmax"]
    dealer = Dealer(0, subject.hard(spec))
    cases = [subject.draw(spec, "bf16", dealer.picks([])) for _ in range(60)]
    for case in cases:
        evidence.add(case, [Judged("out", "value", problem="wrong" if case is cases[5] else "")])
    sizes = [c.size[0] for c in cases if special_at(c) is None and c is not cases[5]]
    kept = [seen.case.size[0] for seen in evidence.right]
    assert kept == sorted((n for n in sizes if n <= TELLING), reverse=True)[:20]


@pytest.mark.parametrize("op", ["softmax", "swiglu", "gelu", "gelu_tanh", "rope"])
def test_always_rounding_towards_zero_is_no_mistake(op: str) -> None:
    def down(x: Array) -> Array:
        x = np.ascontiguousarray(x, np.float32)
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    assert np.abs(down(np.float32([1.9999])) - 1.9921875) == 0 and round_bits([1.9999], 16) == 2
    report = judged(op, module=stepwise(ops, op, down), shrink=False)
    assert report.ok, report.text()


def test_how_much_of_the_errors_a_mistake_explains() -> None:
    rng = np.random.default_rng(0)
    right, wrong, few = Fit(), Fit(), Fit()
    for at in range(12):
        d, noise = rng.standard_normal(500), 5 * rng.standard_normal(500)
        right.add(noise, d)
        wrong.add(d + noise, d)
        few.add(d, d * 100.0 ** -(at > 1))
    assert abs(right.share) < 4 * right.spread < 0.4 and not right.certain
    assert wrong.share == pytest.approx(1, abs=4 * wrong.spread) and 0.9 < wrong.lean < 1.1
    assert wrong.explained > 50 * right.explained > 0
    assert 0.03 < wrong.spread < 0.12  # 5 / √6,000 = 0.065
    assert not few.certain  # two cases weigh as much as all

    together = Fit()  # errors of a case that go together are one error, not five hundred
    for _ in range(12):
        together.add(np.full(500, rng.standard_normal()), np.ones(500))
    assert together.spread > 0.1 and not together.certain


WRONG = """
import numpy as np
from accel.tolerance import round_bf16
DTYPES = ("bf16",)
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return round_bf16(np.float32(1.02) * e / e.sum(-1, keepdims=True))
"""


def test_the_report_names_the_cases_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(WRONG)
    assert run(["--module", "mine.py"]) == 1
    text = capsys.readouterr().out
    assert "FAIL softmax: out (bf16): out is near enough in each case, but it is 1.0" in text
    assert "times what it should be, over" in text and "smallest case" not in text
    again = "again: myllm verify --module mine.py --op softmax --dtype bf16 --seed 0 --examples 100"
    assert again in text
    assert not (tmp_path / "verify-failures").exists()
    words = again.split("verify ", 1)[1].split()
    assert run([*words, "--json"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)[0]["ops"][0]["failures"]
    assert (failure["kind"], failure["case"], failure["file"]) == ("leans", "", "")
    assert run(["--module", "mine.py", "--dtype", "float32"]) == 1  # there each case tells
    assert "smallest case" in capsys.readouterr().out


def test_few_cases_are_not_enough() -> None:
    module = SimpleNamespace(softmax=lambda x: round_bf16(np.float32(1.02) * ops.softmax(x)))
    assert judged("softmax", module=module, examples=3).ok
    assert not judged("softmax", module=module, examples=30).ok
