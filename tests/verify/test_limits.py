"""What is drawn: sizes past every limit, numbers up to theirs, NaN, and the hard cases first."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.verify import check_op
from accel.verify.contract import Case, draw_case, expected
from accel.verify.draw import Draw
from accel.verify.ops import room
from accel.verify.travel import special_at
from reference import ops
from reference.ops import OPS
from reference.types import Array
from tests.helpers.kernels.caught import tried, wrong_results
from tests.helpers.kernels.limits import LIMITS
from tests.helpers.kernels.patches import PATCHES
from tests.helpers.kernels.wrong import Written

FIRST = 12  # cases that hold the hardest


# by default one in six, and all with -m slow
SLOW = [pytest.param(w, marks=[pytest.mark.slow] if i % 6 else []) for i, w in enumerate(LIMITS)]


@pytest.mark.parametrize("wrong", SLOW, ids=lambda wrong: f"{wrong.op}: {wrong.title}")
def test_what_is_wrong_beyond_a_limit_is_caught_and_named(wrong: Written) -> None:
    assert wrong.wrong in wrong_results(wrong.op, wrong.kernel, wrong.wrong)


@pytest.mark.parametrize("seed", range(5))
def test_a_variance_that_cancels_is_caught_in_the_first_cases(seed: int) -> None:
    (patch,) = [p for p in PATCHES if p.title == "variance that cancels"]
    assert "out" in wrong_results(patch.op, patch.kernel, examples=FIRST, seed=seed)


def named(op: str) -> set[str]:
    """Return the names of the choices that cases of an op are made of."""
    names = set()

    def pick(options: Any, name: str = "") -> Any:
        names.add(name)
        return options[int(rng.integers(len(options)))]

    rng = np.random.default_rng(0)
    for _ in range(60):
        draw_case(
            OPS[op],
            Draw(pick, "float32"),
            has_backward=OPS[op].backward,
            backward_offers=lambda name: True,
        )
    return names


@pytest.mark.parametrize("op", OPS)
def test_a_hard_case_names_choices_that_there_are(op: str) -> None:
    hard = room(op).HARD
    assert hard or op == "kv_cache"
    assert {name for case in hard for name in case} <= named(op)


# ---- NaN -----------------------------------------------------------------------------------------


def specials(op: str) -> Iterator[Case]:
    for seed in range(3):
        yield from (case for case in tried(op, 40, seed) if special_at(case) is not None)


@pytest.mark.parametrize("op", ["rmsnorm", "attention", "linear", "add", "adamw", "rope"])
def test_every_input_is_given_a_nan(op: str) -> None:
    found = {special_at(case).name for case in specials(op)}  # type: ignore[union-attr]
    floats = {o.name for o in OPS[op].floats if o.kind != "constant" and not o.optional}
    assert floats <= found


def test_where_a_nan_goes_is_said_of_each_element() -> None:
    x = np.ones((3, 4), np.float32)
    x[1, 2] = np.nan
    gain = np.ones(4, np.float32)
    case = Case("rmsnorm", "float32", {"x": x, "gain": gain}, {"eps": 0.1}, np.ones_like(x), {})
    travels = expected(case).travels
    rows = np.array([False, True, False])[:, None] & np.ones(4, bool)
    np.testing.assert_array_equal(travels["out"].must, rows)
    np.testing.assert_array_equal(travels["out"].may, False)
    np.testing.assert_array_equal(travels["dx"].may | travels["dx"].must, rows)
    assert travels["dgain"].must.all()


def test_a_nan_that_nothing_reads_may_stay_or_go() -> None:
    """A key that no query sees: 0 · NaN is NaN in plain code, and nothing in a kernel of tiles."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, 1, 2)).astype(np.float32) for _ in range(3))
    v[0, 3, 0, 0] = np.nan
    mask = np.array([[True, True, True, False]])
    rest = {"alibi": None, "documents": None, "key_mask": mask}
    case = Case("attention", "float32", {"q": q, "k": k, "v": v, **rest}, {}, None, {})
    travels = expected(case).travels["out"]
    assert not travels.must.any()
    np.testing.assert_array_equal(travels.may[..., 0], True)
    np.testing.assert_array_equal(travels.may[..., 1], False)


def test_infinity_may_have_its_limit_and_no_other_number() -> None:
    def gelu(limit: float) -> Any:
        def gelu_forward(x: Array) -> Any:
            out, cache = ops.gelu_forward(x)
            return np.where(np.isneginf(x), np.float32(limit), out).astype(x.dtype), cache

        return gelu_forward

    check_op("gelu", forward=gelu(0.0), partial=True)
    report = check_op("gelu", forward=gelu(-1.0), raises=False)
    assert {f.kind for f in report.failures} == {"value"}


def test_a_report_says_where_the_nan_was() -> None:
    def relu_forward(x: Array) -> Any:
        return np.where(x > 0, x, np.zeros((), x.dtype)), None

    text = check_op("relu", forward=relu_forward, dtypes=["float32"], raises=False).text()
    assert re.search(r"out\[.*\] is 0, but depends on the NaN at x\[.*\]: it must be NaN", text)
    assert "; nan at x[" in text and "is 0, should be nan" in text

    def scale_forward(x: Array, *, factor: float) -> Any:
        return np.full_like(x, np.nan), None

    text = check_op("scale", forward=scale_forward, dtypes=["float32"], raises=False).text()
    assert "inf ×" not in text and "nan ×" not in text and "not finite" in text


def test_a_backward_alone_is_given_what_nan_made_of_the_forward() -> None:
    def attention_backward(dout: Array, inputs: Any) -> Any:
        arrays = (inputs.q, inputs.k, inputs.v, inputs.alibi, inputs.key_mask, inputs.documents)
        names = ("causal", "window", "scale", "dropout_p", "dropout_key")
        options = {name: getattr(inputs, name) for name in names}
        out, cache = ops.attention_forward(*arrays, **options)
        np.testing.assert_array_equal(np.isnan(inputs.out), np.isnan(out))
        return ops.attention_backward(dout, cache)

    check_op(
        "attention", backward=attention_backward, dtypes=["float32"], examples=40, partial=True
    )


# ---- sizes and numbers ---------------------------------------------------------------------------


def test_sizes_reach_past_what_indices_count() -> None:
    for op in ("gelu", "rmsnorm", "softmax", "linear", "add"):
        shapes = [next(iter(case.arrays.values())).shape for case in tried(op)]
        assert max(s[-1] for s in shapes) > 2**16 or op == "add"
        assert max(int(np.prod(s[:-1])) for s in shapes) > 2**16
    lengths = {(c.arrays["q"].shape[1], c.arrays["k"].shape[1]) for c in tried("attention")}
    assert {(3, 4097), (513, 513), (1, 65_537), (65_537, 1), (4097, 3)} <= lengths
    assert max(c.arrays["table"].shape[0] for c in tried("embedding")) > 2**16


def test_keys_steps_and_positions_reach_their_limits() -> None:
    keys = [case.options["key"] for case in tried("dropout")]
    for field, bits in (("seed", 64), ("step", 32), ("site", 32)):
        assert max(getattr(key, field) for key in keys) == 2**bits - 1
    batches = [len(case.arrays["x"]) for case in tried("dropout")]
    assert 2**32 in {k.sample + n for k, n in zip(keys, batches, strict=True)}
    assert max(case.options["step"] for case in tried("adamw")) == 2**31 - 1
    starts = [np.max(case.options.get("start", 0)) for case in tried("rope")]
    assert max(starts) > 2**31 - 100 and min(starts) < 0


def test_a_head_count_is_met_alike_and_unlike() -> None:
    seen = {
        (q.shape[2] == k.shape[2] > 1, q.shape == k.shape == v.shape, q.shape[1] == q.shape[2])
        for q, k, v in (tuple(c.arrays[n] for n in "qkv") for c in tried("attention"))
    }
    for i in range(3):
        assert {bool(each[i]) for each in seen} == {False, True}
