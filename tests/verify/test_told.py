"""What is told of several mistakes: each once, with its own hint, and none that is not there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.verify import Report, check_op
from reference import ops
from reference.types import Array
from tests.helpers.like import checked


def judged(op: str, **how: Any) -> Report:
    return check_op(op, dtypes="float32", raises=False, partial=True, **how)


def told(report: Report) -> list[tuple[str, str]]:
    return [(failure.name, failure.kind) for failure in report.failures]


def hints(report: Report) -> str:
    return "\n".join(hint for failure in report.failures for hint in failure.hints)


# ---- functions of the contract -------------------------------------------------------------------


def test_what_overflows_is_neither_stale_nor_reached_by_nan() -> None:
    def softmax(x: Array) -> Array:
        e = np.exp(x)
        return np.asarray(e / e.sum(-1, keepdims=True))

    report = judged("softmax", forward=softmax)
    assert told(report) == [("out", "nonfinite")], report.text()
    assert "is the maximum not taken off?" in hints(report)


def test_the_log_of_a_probability_is_named_and_nothing_else() -> None:
    def forward(x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None) -> Any:
        p = ops.softmax(ops.logits(x, head, bias))
        ids = targets if mask is None else np.where(mask, targets, 0)
        nll = -np.log(np.take_along_axis(p, ids[..., None], -1)[..., 0])
        here = np.ones(ids.shape, np.bool_) if mask is None else mask
        return np.sum(nll, where=here), here.sum()

    report = judged("linear_cross_entropy", forward=forward)
    assert told(report) == [("total", "nonfinite")], report.text()
    (hint,) = report.failures[0].hints
    assert hint.startswith("is the log taken of a probability")


def test_two_mistakes_that_fail_in_other_cases_are_both_told() -> None:
    def forward(q: Array, k: Array, v: Array, **options: Any) -> Any:
        if options.get("window"):
            options["window"] += 1
        out, cache = ops.attention_forward(q, k, v, **options)
        return out, (cache, q.shape[2] // k.shape[2])

    def backward(dout: Array, cache: Any) -> Any:
        dq, dk, dv = ops.attention_backward(dout, cache[0])
        return dq, dk / cache[1], dv

    report = judged("attention", forward=forward, backward=backward)
    assert {("out", "value"), ("dk", "value")} <= set(told(report)), report.text()
    by_name = {failure.name: failure.hints for failure in report.failures}
    assert "window off by one?" in by_name["out"][0]
    assert "mean for sum over the query heads" in by_name["dk"][0]


def test_one_mistake_is_told_once() -> None:
    def forward(x: Array, gain: Array, **options: Any) -> Any:
        return ops.rmsnorm_forward(x, gain + 1, **options)

    report = judged("rmsnorm", forward=forward, backward=ops.rmsnorm_backward)
    assert told(report) == [("out", "value")], report.text()

    def masked(x: Array, head: Array, targets: Array, mask: Any = None) -> Any:
        return ops.linear_cross_entropy_forward(x, head, np.maximum(targets, 0))

    # in the cases with a mask alone, where several results are wrong
    def turn(dloss: float, cache: Any) -> Any:
        return ops.linear_cross_entropy_backward(dloss, cache)[:2]

    report = judged("linear_cross_entropy", forward=masked, backward=turn)
    assert told(report) == [("total", "value")] and report.failures[0].also, report.text()


def test_heads_that_are_added_up_wrongly_are_named() -> None:
    def forward(q: Array, k: Array, v: Array, **options: Any) -> Any:
        Hkv, G = k.shape[2], q.shape[2] // k.shape[2]
        out, _ = ops.attention_forward(q, k, v, **options)
        wide = np.repeat(k, G, axis=2), np.repeat(v, G, axis=2)
        return out, (ops.attention_forward(q, *wide, **options)[1], G, Hkv)

    def backward(dout: Array, cache: Any) -> Any:
        dq, *both = ops.attention_backward(dout, cache[0])
        B, S = dout.shape[0], both[0].shape[1]
        return dq, *(x.reshape(B, S, *cache[1:], x.shape[3]).sum(2) for x in both)

    report = judged("attention", forward=forward, backward=backward)
    assert "dk and dv are added up over heads i % Hkv, not i // G" in hints(report), report.text()


def test_a_scale_of_zero_is_not_the_default() -> None:
    def forward(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Any:
        return ops.attention_forward(q, k, v, scale=scale or q.shape[-1] ** -0.5, **options)

    report = judged("attention", forward=forward, backward=ops.attention_backward)
    assert "is the option scale ignored" in hints(report), report.text()


@pytest.mark.parametrize("ones", [False, True])
def test_a_gradient_that_is_not_summed_where_its_array_was_repeated(ones: bool) -> None:
    def backward(dout: Array, inputs: Any) -> Any:
        def of(x: Array) -> Array:
            lead = tuple(range(dout.ndim - x.ndim)) if ones else ()
            return np.sum(dout, axis=lead)

        return of(inputs.a), of(inputs.b)

    report = judged("add", backward=backward)
    size = "of size 1 " if ones else ""
    for name in "ab":
        text = f"is d{name} not summed over the axes {size}along which {name} was repeated?"
        assert text in hints(report), report.text()
    assert "`b` for `a`" not in hints(report)


def test_a_factor_of_one_is_no_hint() -> None:
    report = judged("global_norm", forward=lambda x: np.sqrt(np.sum(x * x)))
    assert not report.right and "is 1 times what it should be" not in report.text()


def test_a_kernel_that_does_not_give_one_answer_is_said_to_and_nothing_else() -> None:
    rng, seen = np.random.default_rng(0), set()

    def race(dout: Array, cache: Any) -> Any:
        dx, dgain = ops.rmsnorm_backward(dout, cache)
        return dx, dgain * dgain.dtype.type(1 + (rng.random() < 0.3) * rng.random())

    def tuned(dout: Array, cache: Any) -> Any:  # the first call of a shape runs twice
        dx, dgain = ops.rmsnorm_backward(dout, cache)
        first = dx.shape not in seen
        seen.add(dx.shape)
        return dx, dgain * dgain.dtype.type(1 + first)

    says = "this case passes when it is run again: the kernel does not give one answer"
    for backward, more in ((race, []), (tuned, ["dgain is 2 times what it should be"])):
        report = judged("rmsnorm", forward=ops.rmsnorm_forward, backward=backward)
        by_name = {failure.name: failure.hints for failure in report.failures}
        first, *rest = by_name["dgain"]
        assert first.startswith(says), report.text()
        assert len(rest) == len(more), report.text()
        assert all(a.startswith(b) for a, b in zip(rest, more, strict=True)), report.text()


def test_what_a_second_call_alone_shows_is_not_put_down_to_its_being_made() -> None:
    def backward(dout: Array, cache: Any, *, plus: Array | None = None) -> Any:
        dx, dgain = ops.rmsnorm_backward(dout, cache)
        return dx if plus is None else dx + plus * (1 + (dout.shape[-1] > 16)), dgain

    report = judged("rmsnorm", forward=ops.rmsnorm_forward, backward=backward)
    assert told(report) == [("dx", "second")], report.text()
    assert "in between" not in hints(report)
    assert "cases with D > " in hints(report), report.text()


def test_what_is_not_written_is_said_to_be_as_it_was() -> None:
    def adamw(*arrays: Array, **options: Any) -> None:
        if options["lr"] != 0:
            ops.adamw(*arrays, **options)

    report = judged("adamw", forward=adamw)
    assert told(report) == [("m", "value")], report.text()
    says, *more = report.failures[0].hints
    assert says.startswith("m is as it was before the call, in ") and says.endswith("written?")
    assert len(more) == 1 and more[0].startswith("it is wrong in "), report.text()


def test_no_place_is_named_by_results_that_are_all_nan_or_zero() -> None:
    def muon(master: Array, m: Array, grad: Array, **options: Any) -> None:
        ops.muon(master, m, grad, **options)
        if not grad.any() and not m.any():
            master[...] = np.nan

    def backward(dout: Array, cache: Any) -> Any:
        dx, dgain, dbias = ops.layernorm_backward(dout, cache)
        return dx, dgain * (dgain.size > 16), dbias

    report = judged("muon", forward=muon)
    assert told(report) == [("master", "nonfinite")] and "?" not in hints(report), report.text()
    report = judged("layernorm", forward=ops.layernorm_forward, backward=backward)
    (says, *more) = report.failures[0].hints
    assert says.startswith("dgain is zero everywhere"), report.text()
    assert not any("?" in hint for hint in more), report.text()


def test_a_total_that_overflows_is_not_the_log_of_a_probability() -> None:
    def forward(x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None) -> Any:
        loss, _ = ops.linear_cross_entropy_forward(x, head, targets, mask, bias)
        return (float(np.float16(loss[0])), loss[1])

    report = judged("linear_cross_entropy", forward=forward)
    assert ("total", "nonfinite") in told(report), report.text()
    assert "log taken of a probability" not in hints(report), report.text()
    assert "is it rounded to float16?" in hints(report), report.text()


def test_a_mean_over_valid_targets_is_told_from_one_over_all() -> None:
    def forward(x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None) -> Any:
        loss, cache = ops.linear_cross_entropy_forward(x, head, targets, mask, bias)
        return (loss[0] / max(1, loss[1]), loss[1]), cache

    for backward in (None, ops.linear_cross_entropy_backward):
        report = judged("linear_cross_entropy", forward=forward, backward=backward)
        assert "by the number of valid targets" in report.failures[0].hints[0], report.text()
        assert hints(report).count("mean for sum") == 1, report.text()


@pytest.mark.parametrize(("bits", "first"), [(16, 65_536), (15, 32_768)])
def test_an_index_of_few_bits_is_told_by_where_it_ends(bits: int, first: int) -> None:
    def backward(dout: Array, cache: Any) -> Array:
        dtable = ops.embedding_backward(dout, cache)
        dtable[first:] = 0
        return dtable

    report = judged("embedding", forward=ops.embedding_forward, backward=backward)
    kind = "uint16" if bits == 16 else "int16"
    says = f"dtable is wrong only from index {first} on along axis 0, as with {kind} indices"
    assert any(says in hint for hint in report.failures[0].hints), report.text()
    assert f"cases with V > {first}" in hints(report) or bits == 16, report.text()


def test_places_are_named_by_the_largest_bound_that_fits() -> None:
    def backward(dout: Array, cache: Any) -> Any:
        dx, dgain = ops.rmsnorm_backward(dout, cache)
        dgain[600:] *= 2
        return dx, dgain

    report = judged("rmsnorm", forward=ops.rmsnorm_forward, backward=backward)
    assert "dgain is wrong only from index 512 on along axis 0" in hints(report), report.text()


@pytest.mark.parametrize("bits", ["uint16", "int16"])
def test_an_index_that_wraps_around_is_told_by_both_its_places(bits: str) -> None:
    def backward(dout: Array, cache: Any) -> Array:
        ids, table = cache
        dtable = np.zeros_like(table)
        np.add.at(dtable, ids.astype(bits), dout)
        return dtable

    def forward(ids: Array, table: Array) -> Any:
        return table[ids], (ids, table)

    report = judged("embedding", forward=forward, backward=backward)
    first = 65_536 if bits == "uint16" else 32_768
    says = f"from index {first} on along axis 0 and where these wrap around, as with {bits} indices"
    assert says in hints(report), report.text()


def test_what_a_case_passes_without_is_said_where_others_that_fail_do_too() -> None:
    def forward(
        q: Array, k: Array, v: Array, alibi: Any = None, key_mask: Any = None, **options: Any
    ) -> Any:
        out, cache = ops.attention_forward(q, k, v, alibi, key_mask, **options)
        both = alibi is not None and key_mask is not None and k.shape[1] > 16 and not only
        return (out * (1 - out) if options.get("window") or both else out), cache

    for only in (True, False):
        report = judged("attention", forward=forward)
        said = [h for failure in report.failures for h in failure.hints if "passes without" in h]
        assert said[:1] == ["it passes without window, here and in 3 of 3 larger cases."] * only
        assert len(said) == only, report.text()


def test_what_a_call_raises_with_is_said() -> None:
    def forward(q: Array, k: Array, v: Array, *, documents: Any = None, **options: Any) -> Any:
        assert documents is None
        return ops.attention_forward(q, k, v, **options)

    report = judged("attention", forward=forward)
    assert ("", "raised") in told(report), report.text()
    assert "it passes without documents, here and in 3 of 3 larger" in hints(report), report.text()


def test_a_gradient_is_not_said_to_be_right_without_its_own_array() -> None:
    def backward(dout: Array, cache: Any) -> Any:
        *others, dbias = ops.linear_backward(dout, cache)
        return (*others, dbias if dbias is None else dbias * dbias)

    def forward(x: Array, weight: Array, bias: Array | None = None) -> Any:
        return ops.linear_forward(x, weight, bias)

    report = judged("linear", forward=forward, backward=backward)
    assert told(report) == [("dbias", "value")], report.text()
    assert "without bias" not in hints(report) and "bias given" not in hints(report)


def test_a_gradient_of_none_is_told_from_no_array() -> None:
    def forward(x: Array, weight: Array, bias: Array | None = None, *, plus: Any = None) -> Any:
        return ops.linear_forward(x, weight, bias, plus=plus)

    def backward(dout: Array, cache: Any) -> Any:
        return (*ops.linear_backward(dout, cache)[:2], None)

    report = judged("linear", forward=forward, backward=backward)
    assert told(report) == [("dbias", "missing")], report.text()
    assert "dbias is None, though bias was given" in report.text()
    assert "to_numpy" not in report.text()


def test_what_takes_any_option_is_not_given_those_that_save_memory() -> None:
    def loss(x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None) -> Any:
        return ops.linear_cross_entropy_forward(x, head, targets, mask, bias)

    def backward(dout: Any, cache: Any) -> Any:
        return ops.linear_cross_entropy_backward(dout, cache)

    def wrapped(function: Any) -> Any:
        return lambda *args, **options: function(*args, **options)

    report = judged("linear_cross_entropy", forward=wrapped(loss), backward=wrapped(backward))
    assert report.right, report.text()
    assert "not covered: linear_cross_entropy takes no need_backward, out" in report.text()


# ---- functions of one's own ----------------------------------------------------------------------

LINEAR = """
import numpy as np
SHAPES = {"lin": {"x": "B D", "w": "O D"}}
def lin(x, w):
    return x @ w.T
def lin_backward(dout, x, w):
    return dout @ w, dout.T @ x
"""


def test_a_result_that_is_kept_by_address_is_stale(tmp_path: Path) -> None:
    kept = LINEAR.replace(
        "    return x @ w.T",
        "    key = w.ctypes.data, w.shape\n"
        "    if key not in packed:\n        packed[key] = w.T.copy(), w\n"
        "    return x @ packed[key][0]",
    )
    report = checked(tmp_path, f"packed = {{}}\n{kept}", ref=LINEAR, dtypes=("float32",))
    assert told(report) == [("out", "refilled")], report.text()
    assert "is something kept by the address of its arguments" in hints(report)
    right = checked(tmp_path, LINEAR, ref=LINEAR)
    assert right.right, right.text()


def test_a_call_that_gives_other_bits_is_noted(tmp_path: Path) -> None:
    noisy = LINEAR.replace("x @ w.T", "x @ w.T * x.dtype.type(1 + 1e-2 * np.random.rand())")
    report = checked(tmp_path, noisy, ref=LINEAR, dtypes=("float32",))
    assert ("out", "value") in told(report)
    assert any("the same call twice gives other bits" in note for note in report.notes)
    report = checked(tmp_path, LINEAR, ref=LINEAR, dtypes=("float32",))
    assert not any("other bits" in note for note in report.notes)


POOL = """
import numpy as np
SHAPES = {"pool": {"x": "B T D", "m": "B T bool"}}
def pool(x, m):
    return (x * m[..., None]).sum(1) / np.maximum(m.sum(1), 1)[:, None]
"""


def test_what_numpy_widens_may_stay_narrow_and_a_wrong_value_is_told_first(tmp_path: Path) -> None:
    narrow = POOL.replace("[:, None]\n", "[:, None].astype(x.dtype)\n")
    report = checked(tmp_path, narrow, ref=POOL)
    assert report.right, report.text()
    wrong = POOL.replace("np.maximum(m.sum(1), 1)[:, None]", "x.shape[1]")
    report = checked(tmp_path, wrong, ref=POOL, dtypes=("float32",))
    assert told(report) == [("out", "value")], report.text()
    half = narrow.replace("x.dtype", "np.float16").replace("x * m", "x.astype('e') * m")
    report = checked(tmp_path, half, ref=POOL, dtypes=("float32",))
    assert not report.right


def test_a_sign_is_named_also_where_the_smallest_case_is_one_number(tmp_path: Path) -> None:
    wrong = LINEAR.replace("dout.T @ x", "-(dout.T @ x)")
    report = checked(tmp_path, wrong, ref=LINEAR, dtypes=("float32",), shrink=True)
    assert "the sign is flipped: dw is -1 times" in hints(report), report.text()


def test_of_a_gradient_of_zeros_no_input_is_called_ignored(tmp_path: Path) -> None:
    wrong = LINEAR.replace("dout.T @ x", "np.zeros_like(w)")
    report = checked(tmp_path, wrong, ref=LINEAR, dtypes=("float32",))
    assert "dw is zero everywhere: was it written at all?" in hints(report)
    assert "ignored?" not in hints(report), report.text()
