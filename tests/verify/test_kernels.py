"""``myllm verify``: right kernels pass, wrong ones are caught, named and shrunk."""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.tolerance import Magnitude, compare, round_bf16
from accel.verify import SubjectError, VerificationError, check_module, check_op
from accel.verify.check import Options, cases_of, check_subject
from accel.verify.contract import Case
from accel.verify.cuts import cuts
from accel.verify.load import as_subject
from accel.verify.ops import room
from accel.verify.search import search
from reference import ops
from reference.ops import OPS
from reference.types import Array
from tests.helpers.kernels.caught import wrong_results
from tests.helpers.kernels.correct import kernels
from tests.helpers.kernels.mutants import MUTATED, mutants
from tests.helpers.kernels.patches import PATCHES, Patch
from tests.helpers.kernels.subtle import SUBTLE
from tests.helpers.kernels.unfused import unfused_attention
from tests.helpers.kernels.wrong import WRITTEN, Written

CORRECT = kernels(lambda x: x)
CORRECT_BF16 = kernels(round_bf16)
SOME = ["add", "linear", "rmsnorm", "layernorm", "rope", "attention", "linear_cross_entropy"]


def test_every_op_of_the_contract_has_a_room() -> None:
    for op in OPS:
        assert callable(room(op).generate) and callable(room(op).magnitude)


def test_an_op_without_a_room_is_refused_with_the_file_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tanh = OPS["relu"]._replace(name="tanh")
    monkeypatch.setitem(OPS, "tanh", tanh)
    module = SimpleNamespace(tanh_forward=ops.relu_forward, relu_forward=ops.relu_forward)
    with pytest.raises(SubjectError, match="write accel/verify/ops/tanh"):
        check_module(module)
    check_module(module, ops=["relu"], examples=3, partial=True)


def test_a_new_op_is_checked_as_soon_as_it_has_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def cube_forward(x: Array) -> Any:
        return x * x * x, x

    def cube_backward(dout: Array, x: Array) -> Array:
        return 3 * dout * x * x

    def magnitude(v: Any, dout: Array, u: float) -> Any:
        x = np.abs(v["x"])
        return {"out": Magnitude(x**3, 2), "dx": Magnitude(3 * np.abs(dout) * x * x, 3)}

    cube = SimpleNamespace(generate=room("relu").generate, magnitude=magnitude)
    monkeypatch.setitem(sys.modules, "accel.verify.ops.cube", cube)
    monkeypatch.setitem(OPS, "cube", OPS["relu"]._replace(name="cube"))
    monkeypatch.setattr(ops, "cube_forward", cube_forward, raising=False)
    monkeypatch.setattr(ops, "cube_backward", cube_backward, raising=False)
    check_op("cube", forward=cube_forward, backward=cube_backward, examples=20)
    report = check_op("cube", forward=cube_forward, backward=lambda d, x: d * x * x, raises=False)
    assert {f.name for f in report.failures} == {"dx"}


# ---- the rule ------------------------------------------------------------------------------------


def test_a_result_as_far_off_as_plain_code_passes_and_one_ten_times_as_far_does_not() -> None:
    exact = np.random.default_rng(0).standard_normal((3, 50))
    plain = exact.astype(np.float32)
    magnitude = Magnitude(np.abs(exact), 1)
    assert compare(plain, exact, plain, magnitude, "float32", gradient=False).ok
    wrong = exact + 10 * np.max(np.abs(plain - exact))
    assert not compare(wrong, exact, plain, magnitude, "float32", gradient=False).ok


def test_one_wrong_row_among_large_ones_is_seen() -> None:
    exact = np.full((100, 4), 1e6)
    exact[7] = 1.0
    got = exact.copy()
    got[7, 2] = 1.001
    near = compare(got, exact, exact, Magnitude(exact, 4), "float32", gradient=True)
    assert not near.ok and near.row == (7,)


def test_nan_is_infinitely_wrong() -> None:
    exact = np.ones(3)
    near = compare(exact * np.nan, exact, exact, Magnitude(exact, 4), "bf16", gradient=True)
    assert near.ratio == np.inf


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_round_bf16_is_nearest_with_ties_to_even(x: float) -> None:
    (y,) = round_bf16(np.array([x], np.float32))
    assert int(y.view(np.uint32)) & 0xFFFF == 0
    step = np.float64(2.0) ** (np.floor(np.log2(abs(x))) - 7) if abs(x) > 1e-30 else 1e-30
    assert abs(float(y) - x) <= step / 2


# ---- right kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16"])
def test_the_reference_is_as_the_reference(dtype: str) -> None:
    report = check_module(ops, dtypes=[dtype], examples=8, raises=False)
    assert report.ok, report.text()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_correct_kernels_written_otherwise_raise_no_alarm(seed: int) -> None:
    check_module(CORRECT, dtypes=["float32", "float64"], seed=seed, examples=8)
    check_module(CORRECT_BF16, dtypes=["bf16"], seed=seed, examples=8)


@pytest.mark.parametrize("scale_first", [False, True])
def test_bf16_attention_that_writes_everything_to_memory_raises_no_alarm(scale_first: bool) -> None:
    check_module(unfused_attention(scale_first), dtypes=["bf16"], examples=60)


@pytest.mark.slow
def test_no_false_alarm_in_a_thousand_runs() -> None:
    for seed in range(1000):
        check_module(CORRECT, dtypes=["float32", "float64"], seed=seed, examples=5, shrink=False)
        check_module(CORRECT_BF16, dtypes=["bf16"], seed=seed, examples=5, shrink=False)


def test_bf16_rounding_is_an_error_in_float32() -> None:
    with pytest.raises(VerificationError, match="FAIL linear"):
        check_module(CORRECT_BF16, ops=["linear"], dtypes=["float32"], examples=10, shrink=False)


def cases_seen(seed: int) -> list[str]:
    seen: list[str] = []

    class Spy(SimpleNamespace):
        def softmax(self, x: Array) -> Array:
            seen.append(f"{x.shape} {float(x.sum()):.6g}")
            return ops.softmax(x)

    check_module(Spy(), seed=seed, examples=30, dtypes=["float32"])
    return seen


def test_the_same_seed_gives_the_same_cases() -> None:
    assert cases_seen(3) == cases_seen(3)
    assert cases_seen(3) != cases_seen(4)
    assert len(set(cases_seen(3))) > 25


# ---- wrong kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", SOME)
def test_of_a_right_kernel_nothing_is_wrong_whoever_was_tried_before(op: str) -> None:
    """What a case should give is worked out once: for the first of several kernels."""
    for _ in range(2):
        assert not wrong_results(op, CORRECT, examples=15)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.op}: {patch.title}")
def test_a_planted_mistake_is_caught_and_named(patch: Patch) -> None:
    assert patch.wrong in wrong_results(patch.op, patch.kernel, patch.wrong)


@pytest.mark.parametrize(
    "wrong", [*WRITTEN, *SUBTLE], ids=lambda wrong: f"{wrong.op}: {wrong.title}"
)
def test_a_mistake_of_manner_is_caught_and_named(wrong: Written) -> None:
    assert wrong.wrong in wrong_results(wrong.op, wrong.kernel, wrong.wrong, wrong.dtype)


LONG = ("attention", "linear_cross_entropy")  # many mutants of slow kernels
MUTANTS = [pytest.param(op, marks=[pytest.mark.slow] if op in LONG else []) for op in MUTATED]


@pytest.mark.parametrize("op", MUTANTS)
def test_mutants_made_by_rule_are_caught(op: str) -> None:
    survivors = [mutant.title for mutant in mutants(op) if not wrong_results(op, mutant.kernel)]
    assert survivors == []


# ---- a case that a person can read ---------------------------------------------------------------


def shrunk(title: str, dtype: str = "float32") -> Any:
    every: list[Patch | Written] = [*PATCHES, *WRITTEN, *SUBTLE]
    (wrong,) = [w for w in every if w.title == title]
    few = 60 if wrong.op == "attention" else None  # its cases are slow, and a few dozen enough
    report = check_module(wrong.kernel, ops=[wrong.op], dtypes=[dtype], examples=few, raises=False)
    (failure, *_) = [f for f in report.failures if f.name == wrong.wrong]
    return failure


def elements(case: Case) -> int:
    return case.size[0]


@pytest.mark.parametrize(
    ("title", "at_most", "hint"),
    [
        ("ε outside the root", 4, "is eps outside the root"),
        ("the projection along n missing", 4, "is the term n · mean"),
        ("repeated ids overwrite", 8, "is the gradient of a repeated id overwritten"),
        ("bias left out", 6, "is bias left out"),
        ("gate and up swapped", 4, "gate and up swapped"),
        ("the backward turns on", 8, "does the backward turn the same way"),
        ("stale cache", 4, "a stale cache"),
        ("strides ignored", 8, "are strides ignored"),
        ("no 1/(1 - p)", 4, "the 1/(1 - p) of dropout is missing"),
        ("scale missing in the backward", 2, "factor is missing"),
        ("pairs j with j + d/2", 16, "wrong pairs"),
        ("everything decays", 8, "is weight decay applied to all"),
    ],
)
def test_a_failure_shrinks_and_is_explained(title: str, at_most: int, hint: str) -> None:
    failure = shrunk(title)
    assert elements(failure.case) <= at_most, failure.case.describe()
    assert any(hint in h for h in failure.hints), failure.hints


@pytest.mark.parametrize(
    ("title", "hint"),
    [
        ("scale is 1/d", "1/d rather than 1/√d"),
        ("causal from the top left", "from the top left"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mask shows one key too many", "one key too many"),
                ("key mask turned around", "key_mask turned around"),
                ("the option scale ignored", "option scale ignored"),
            )
        ),
    ],
)
def test_attention_is_explained(title: str, hint: str) -> None:
    failure = shrunk(title)
    assert elements(failure.case) <= 60, failure.case.describe()
    assert any(hint in h for h in failure.hints), failure.hints


def test_a_head_mapping_is_recognised() -> None:
    def attention_forward(q: Array, k: Array, v: Array) -> Array:
        G = q.shape[2] // k.shape[2]
        return ops.attention_forward(q, np.tile(k, (1, 1, G, 1)), np.tile(v, (1, 1, G, 1)))[0]

    report = check_op("attention", forward=attention_forward, raises=False)
    assert any("head mapping?" in h for f in report.failures for h in f.hints)


def test_cutting_finds_the_one_key_that_matters() -> None:
    def attention_forward(q: Array, k: Array, v: Array) -> Array:
        k = np.where(k.max(axis=(0, 1, 2, 3)) > 1.9, k * 2, k)
        return ops.attention_forward(q, k, v)[0]

    report = check_op("attention", forward=attention_forward, dtypes=["float32"], raises=False)
    assert report.failures[0].case.arrays["k"].size <= 3, report.text()


def test_a_cut_leaves_every_query_head_its_key_head() -> None:
    heads = np.arange(3.0, dtype=np.float32).reshape(1, 1, 3, 1)
    arrays = {"q": np.repeat(heads, 2, axis=2), "k": heads, "v": heads}
    rest = dict.fromkeys(("alibi", "key_mask", "documents"))
    case = Case("attention", "float32", arrays | rest, {}, arrays["q"].copy(), {})
    found = list(cuts(case))
    assert len(found) >= 8
    for cut in found:
        q, k = cut.arrays["q"].reshape(-1), cut.arrays["k"].reshape(-1)
        np.testing.assert_array_equal(q, np.repeat(k, len(q) // len(k)))
        np.testing.assert_array_equal(q, cut.cotangent.reshape(-1))


# ---- forms of a kernel ---------------------------------------------------------------------------


def test_a_backward_alone_gets_the_forward_s_arguments_out_and_lse() -> None:
    def attention_backward(dout: Array, inputs: Any) -> Any:
        q, k, v, out, lse = inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse
        B, T, H = q.shape[:3]
        assert out.shape == dout.shape and lse.shape == (B, H, T)
        named = ("causal", "window", "scale", "dropout_p", "dropout_key")
        options = {name: getattr(inputs, name) for name in named}
        rest = (inputs.alibi, inputs.key_mask, inputs.documents)
        _, saved = ops.attention_forward(q, k, v, *rest, **options)
        p, scale = saved.cache.P.reshape(B, H, T, -1), saved.cache.scale
        seen = p.any(-1)
        assert np.isposinf(lse[~seen]).all()
        # of the key that is seen most, log p = score - lse
        if inputs.alibi is None and seen.any():
            G = H // k.shape[2]
            s = np.einsum("bthd,bshd->bhts", q, np.repeat(k, G, axis=2)) * scale
            best = p.argmax(-1)[..., None]
            score = np.take_along_axis(s, best, -1)[..., 0]
            top = np.take_along_axis(p, best, -1)[..., 0]
            np.testing.assert_allclose(
                (score - np.where(seen, lse, 0))[seen], np.log(top[seen]), rtol=1e-3, atol=1e-3
            )
        return ops.attention_backward(dout, saved)

    check_op("attention", backward=attention_backward, examples=40)


def test_a_forward_alone_needs_no_cache_and_a_backward_then_gets_its_inputs() -> None:
    def forward(x: Array, gain: Array, *, eps: float) -> Array:
        return ops.rmsnorm_forward(x, gain, eps=eps)[0]

    def backward(dout: Array, inputs: Any) -> list[Array]:
        cache = ops.rmsnorm_forward(inputs.x, inputs.gain, eps=inputs.eps)[1]
        return list(ops.rmsnorm_backward(dout, cache))

    assert set(check_op("rmsnorm", forward=forward).ops[0].results) == {"out"}
    both = check_op("rmsnorm", forward=forward, backward=backward).ops[0]
    assert set(both.results) == {"out", "dx", "dgain"} and both.not_covered == ["out"]


def test_a_forward_of_the_wrong_form_is_told_and_its_backward_not_called() -> None:
    def forward(*arrays: Array, **named: Array) -> Any:
        (total, n_valid), cache = ops.linear_cross_entropy_forward(*arrays, **named)
        return total, n_valid, cache

    def backward(dloss: float, cache: Any) -> Any:
        raise AssertionError("called without a cache")

    op = "linear_cross_entropy"
    report = check_op(op, forward=forward, backward=backward, examples=5, raises=False)
    assert {failure.kind for failure in report.failures} == {"missing"}
    assert "forward should give ((total, n_valid), cache), or (total, n_valid) alone, gave 3 p" in (
        report.text()
    )


@pytest.mark.parametrize("kind", [int, np.int64, np.array])
def test_a_count_may_be_an_array_of_one_integer(kind: Any) -> None:
    def forward(*arrays: Array, **named: Array) -> Any:
        (total, n_valid), _ = ops.linear_cross_entropy_forward(*arrays, **named)
        return total, kind(n_valid)

    check_op("linear_cross_entropy", forward=forward, examples=5)


def test_none_stands_where_nothing_was_given() -> None:
    def swapped(dout: Array, cache: Any) -> Any:
        return None, *ops.rmsnorm_backward(dout, cache)

    def by_argument(dloss: float, cache: Any) -> Any:
        dx, dhead, *dbias = ops.linear_cross_entropy_backward(dloss, cache)
        return dx, dhead, None, None, *(dbias or [None])

    few: dict[str, Any] = {"dtypes": ["float32"], "examples": 8}
    forward = ops.linear_cross_entropy_forward
    check_op("linear_cross_entropy", forward=forward, backward=by_argument, **few)
    report = check_op("rmsnorm", forward=ops.rmsnorm_forward, backward=swapped, **few, raises=False)
    assert {failure.kind for failure in report.failures} == {"count"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"examples": -1}, "examples must be at least 1, got -1"),
        ({"dtypes": []}, "dtypes is empty: name some, or leave it out for all there are"),
    ],
)
def test_a_check_of_nothing_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SubjectError, match=says):
        check_op("relu", forward=lambda x: np.maximum(x, 0), **given)


def test_options_that_a_kernel_lacks_are_left_out_and_said_to_be() -> None:
    def linear_forward(x: Array, w: Array) -> Array:
        return x @ w

    report = check_op("linear", forward=linear_forward)
    assert report.ops[0].not_covered == ["bias"] and "takes no bias" in report.text()


def test_an_optional_array_may_have_another_name_and_be_required() -> None:
    def linear_forward(x: Array, w: Array, b: Array) -> Array:
        return x @ w + b

    assert check_op("linear", forward=linear_forward).ops[0].not_covered == []


class Wrapped:
    """An array type of another library: neither NumPy's nor convertible by asarray."""

    def __init__(self, data: Array) -> None:
        self.data = data

    def __getitem__(self, at: Any) -> "Wrapped":
        return Wrapped(self.data[at])

    def swapaxes(self, a: int, b: int) -> "Wrapped":
        return Wrapped(self.data.swapaxes(a, b))


def test_arrays_cross_by_the_module_s_own_functions() -> None:
    def gelu_forward(x: Wrapped) -> Any:
        assert isinstance(x, Wrapped)
        out, cache = ops.gelu_forward(x.data)
        return Wrapped(out), cache

    module = SimpleNamespace(
        from_numpy=Wrapped, to_numpy=lambda array: array.data, gelu_forward=gelu_forward
    )
    check_module(module, partial=True)
    del module.to_numpy
    with pytest.raises(SubjectError, match="give the module a function to_numpy"):
        check_module(module)


@pytest.mark.parametrize("accumulate", [False, True])
def test_arrays_that_cannot_be_sliced_are_written_to_all_the_same(accumulate: bool) -> None:
    class Whole:
        def __init__(self, data: Array) -> None:
            self.data = data

    def forward(table: Whole, ids: Whole) -> Any:
        out, cache = ops.embedding_forward(table.data, ids.data)
        return Whole(out), cache

    def backward(dout: Whole, cache: Any, *, out: Any = None, accumulate: bool = False) -> Whole:
        given = None if out is None or wrong else out.data
        return Whole(ops.embedding_backward(dout.data, cache, out=given, accumulate=accumulate))

    wrong = False
    module = SimpleNamespace(
        from_numpy=Whole,
        to_numpy=lambda array: array.data,
        embedding_forward=forward,
        embedding_backward=backward
        if accumulate
        else lambda d, c, *, out=None: backward(d, c, out=out),
    )
    few: dict[str, Any] = {"dtypes": ["float32"], "examples": 20, "shrink": False, "raises": False}
    report = check_module(module, **few)
    assert report.ok and "cannot be sliced" in report.text(), report.text()
    wrong = True
    assert "dtable was not written into the out=" in check_module(module, **few).text()


def test_a_function_named_step_is_called_by_nobody() -> None:
    def step(parameters: Any) -> None:
        raise AssertionError("called")

    check_module(SimpleNamespace(step=step, softmax=ops.softmax), examples=3)


def test_a_module_that_refuses_a_precision_is_checked_in_the_other() -> None:
    def from_numpy(x: Array, *, activation: bool = False) -> Array:
        if x.dtype == np.float64 or (refuse_all and x.dtype == np.float32):
            raise ValueError("only what I like")
        return x

    refuse_all = False
    module = SimpleNamespace(
        from_numpy=from_numpy, to_numpy=lambda x: x, relu_forward=ops.relu_forward
    )
    report = check_module(module, ops=("relu",), examples=3, raises=False)
    assert [op.dtype for op in report.ops] == ["float32"]
    refuse_all = True
    with pytest.raises(SubjectError, match="from_numpy raised ValueError: only what I like"):
        check_module(module, ops=("relu",), examples=3)


def test_a_precision_that_an_op_does_not_have_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to check: adamw has no bf16"):
        check_module(ops, ops=("adamw",), dtypes=("bf16",), examples=3)


def test_a_module_that_rounds_to_bf16_is_checked_in_bf16() -> None:
    module = SimpleNamespace(
        from_numpy=lambda x: round_bf16(x) if x.dtype.kind == "f" else x,
        to_numpy=lambda x: x,
        relu_forward=ops.relu_forward,
    )
    assert [op.dtype for op in check_module(module, partial=True).ops] == ["bf16"]


def test_a_float32_kernel_need_not_offer_float64() -> None:
    def softmax(x: Array) -> Array:
        return ops.softmax(np.ascontiguousarray(x, np.float32))

    report = check_module(SimpleNamespace(softmax=softmax))
    assert [bool(op.not_offered) for op in report.ops] == [False, True]
    with pytest.raises(VerificationError, match="softmax"):
        check_module(SimpleNamespace(softmax=softmax), dtypes=["float64"])


def test_a_report_tells_every_result_of_a_backend() -> None:
    report = check_subject(as_subject(ops), Options(ops=("attention",), examples=5))
    assert list(report.ops[0].results) == ["out", "dq", "dk", "dv"]
    assert report.to_dict()["ops"][0]["results"]["dq"]["worst_ratio"] < 1


def test_thorough_takes_more_cases() -> None:
    assert cases_of(OPS["rope"], Options(thorough=True)) == 10 * cases_of(OPS["rope"], Options())


def test_a_result_and_the_gradients_of_an_op_have_the_names_of_its_arguments() -> None:
    for spec in OPS.values():
        names = list(inspect.signature(getattr(ops, spec.forward_name)).parameters)
        named = {*spec.gradients, *spec.parameters, *spec.written}
        assert {name.partition(".")[0] for name in named} <= set(names)


def test_a_search_reports_what_it_saw() -> None:
    ticks: list[int] = []
    report = search(
        as_subject(ops),
        OPS["scale"],
        "float32",
        seed=0,
        examples=7,
        tick=lambda: ticks.append(1),
    )
    assert report.cases == len(ticks) == 7 and report.results["out"].cases == 7


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match="no op 'rmsnrm'; known: add"):
        check_module(ops, ops=["rmsnrm"])
    with pytest.raises(SubjectError, match="did you mean rmsnorm"):
        check_op("rmsnorm_forward", ops)
    with pytest.raises(SubjectError, match="no dtype 'fp8'"):
        check_module(ops, dtypes=["fp8"])
    with pytest.raises(SubjectError, match="needs a module"):
        check_op("add")
    with pytest.raises(SubjectError, match="not both"):
        check_op("add", ops, forward=ops.add_forward)
    with pytest.raises(SubjectError, match="offers no gelu"):
        check_module(SimpleNamespace(softmax=ops.softmax), ops=["gelu"])
    with pytest.raises(SubjectError, match="DTYPES must name some of"):
        check_module(SimpleNamespace(softmax=ops.softmax, DTYPES=("fp8",)))
    with pytest.raises(SubjectError, match="there is no file"):
        check_module(tmp_path / "none.py")
