"""``myllm bench verify``: who tells wrong kernels from right ones, and by which rule."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest

from accel.verify import check_module
from accel.verify.board import bench, mutants
from accel.verify.board.corpus import calls
from accel.verify.board.corpus.build import build, right
from accel.verify.board.corpus.right import all_right
from accel.verify.board.corpus.wrong import LATER, WRONG, Wrong
from accel.verify.board.outcome import Call, differs, outcome, suits
from accel.verify.board.rules import RULES, Judge
from reference import ops
from reference.ops import OPS
from reference.types import Array
from tests.helpers import ROOT
from tests.helpers.kernels.corpus import corpus

RULE = {rule.name: rule for rule in RULES}
BOARD = ROOT / "accel/verify/board/board.json"


def shown_by(op: str) -> list[Call]:
    return [calls.read(wrong.witness) for wrong in WRONG if wrong.op == op]


# ---- the kernels ---------------------------------------------------------------------------------


def test_there_are_enough_wrong_kernels_of_every_op_and_none_twice() -> None:
    assert len(WRONG) == len({(wrong.op, wrong.name) for wrong in WRONG})
    assert {wrong.op for wrong in WRONG} == set(OPS)
    assert sum(wrong.op not in LATER for wrong in WRONG) == 244  # the unseen ones
    assert next(bench.wrong_kernels("muon", None)).corpus == "planted"
    assert all(wrong.what and wrong.words for wrong in WRONG)


def test_every_wrong_kernel_is_an_edit_of_the_right_one() -> None:
    assert all(build(wrong) for wrong in WRONG)


def wrong_and_seen(wrong: Wrong) -> None:
    call = calls.read(wrong.witness)
    assert differs(build(wrong), call), f"{wrong.op} {wrong.name} is as the reference"
    assert not differs(right(wrong.op), call), f"the kernel that {wrong.name} was made of is wrong"


SHARED = [wrong for wrong in WRONG if wrong.name == "values_are_keys"]


@pytest.mark.parametrize(
    "wrong", WRONG[::12] + SHARED, ids=lambda wrong: f"{wrong.op}: {wrong.name}"
)
def test_a_wrong_kernel_differs_from_the_reference_where_it_says(wrong: Wrong) -> None:
    wrong_and_seen(wrong)


@pytest.mark.slow
def test_every_wrong_kernel_differs_from_the_reference_where_it_says() -> None:
    for wrong in WRONG:
        wrong_and_seen(wrong)


def test_every_op_has_a_right_kernel_and_calls_to_judge_it_by() -> None:
    for op in OPS:
        names = [name for name, _, _ in all_right(op)]
        assert names and len(names) == len(set(names))
        assert RULE["KernelBench"].calls(op) and RULE["gpucheck"].calls(op)
    muon, *_ = bench.right_kernels("muon")
    assert bench.verify(muon, quick=True)[0] == ""
    for rule in ("KernelBench", "BackendBench", "gpucheck"):
        assert not Judge(RULE[rule]).catches("muon", muon.module, ("float32",))


@pytest.mark.parametrize("op", ["add", "layernorm", "rope", "adamw", "muon"])
def test_right_kernels_are_right_wherever_the_wrong_ones_are_not(op: str) -> None:
    for name, kind, module in all_right(op):
        if kind in ("bf16", "tf32"):
            continue
        for call in shown_by(op):
            if suits(module, call) and not call.receivers:
                assert not differs(module, call), f"{name} {kind}"


def test_mutants_are_wrong_in_float64_and_name_the_line() -> None:
    found = [*mutants.mutants("rmsnorm", shown_by("rmsnorm"))]
    assert len(found) > 20
    for mutant in found:
        assert mutant.name.startswith("rmsnorm.py:") and " -> " in mutant.name
        assert any(differs(mutant.kernel, call, "float64") for call in shown_by("rmsnorm"))


def test_mutants_of_a_helper_reach_the_op() -> None:
    found = [m.name for m in mutants.mutants("softmax", shown_by("softmax"))]
    assert any("np.max" in name for name in found)
    mutated = mutants.MUTATED["attention"]
    assert {where.partition(".")[0] for where in mutated if "." in where} == {
        "softmax",
        "visibility",
    }


def test_planted_kernels_come_by_op() -> None:
    assert {precision for _, _, precision in corpus("attention")} >= {"float32", "bf16"}
    assert not [*corpus("kv_cache_of_another_op")]


# ---- the rules of others -------------------------------------------------------------------------


def spoiled(op: str, gradients: bool, by: Any) -> Any:
    """The right kernels of an op, with something done to the outputs or to the gradients."""
    module = right(op)

    def forward(*arrays: Any, **options: Any) -> Any:
        out, cache = getattr(module, f"{op}_forward")(*arrays, **options)
        return (out if gradients else by(out)), cache

    def backward(dout: Array, cache: Any) -> Any:
        found = getattr(module, f"{op}_backward")(dout, cache)
        if not gradients:
            return found
        return tuple(map(by, found)) if isinstance(found, tuple) else by(found)

    return SimpleNamespace(**{f"{op}_forward": forward, f"{op}_backward": backward})


def judged(rule: str, op: str, kernel: Any, precision: str = "float32") -> bool:
    """Whether a rule catches a kernel by the smallest of its calls."""
    smallest = sorted(RULE[rule].calls(op), key=lambda call: call.arrays[0].size)[:8]
    return bool(Judge(RULE[rule], lambda _: smallest).catches(op, kernel, (precision,)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_catches_zeros_and_lets_a_right_kernel_pass(rule: Any) -> None:
    op = "attention" if rule.name == "flash-attention" else "rmsnorm"
    short = Judge(rule, lambda op: rule.calls(op)[:2])
    precisions = rule.precisions[:1]
    assert not short.catches(op, right(op), precisions)
    assert short.catches(op, spoiled(op, False, np.zeros_like), precisions)
    assert rule.source and rule.says


def test_kernelbench_looks_at_no_gradient_and_at_one_ten_thousandth() -> None:
    assert not judged("KernelBench", "relu", spoiled("relu", True, np.zeros_like))
    assert not judged("KernelBench", "relu", spoiled("relu", False, lambda y: y * (1 + 5e-5)))
    assert judged("KernelBench", "relu", spoiled("relu", False, lambda y: y * (1 + 5e-4)))
    identity = SimpleNamespace(relu_forward=lambda x: (x.copy(), x))
    assert not judged("KernelBench", "relu", identity)  # no number of torch.rand is negative


def test_backendbench_allows_a_hundredth_whoever_asks() -> None:
    assert not judged("BackendBench", "softmax", right("softmax"))
    assert not judged("BackendBench", "relu", spoiled("relu", False, lambda y: y * 1.009))
    assert judged("BackendBench", "relu", spoiled("relu", False, lambda y: y * 1.03 + 0.02))
    assert judged("BackendBench", "relu", spoiled("relu", False, lambda y: y.astype(np.float64)))


def test_liger_kernel_has_a_tolerance_for_each_op() -> None:
    zeros = spoiled("swiglu", False, np.zeros_like)
    assert not judged("Liger-Kernel", "swiglu", zeros, "bf16")  # atol 1e4
    assert judged("Liger-Kernel", "swiglu", zeros, "float32")
    assert not Judge(RULE["Liger-Kernel"]).of("adamw")


def test_flash_attention_allows_twice_the_error_of_eager_code() -> None:
    close = RULE["flash-attention"].close
    result = outcome(ops, calls.one("relu", (3,)))[0]
    exact = np.zeros(3)
    got = result._replace(value=np.array([0.0, 0.19, 0.0]))
    assert close("attention", got, exact + 0.1, exact, "bf16")
    assert not close("attention", got, exact + 0.09, exact, "bf16")
    assert close("attention", got._replace(name="dq"), exact + 0.07, exact, "bf16")


def test_gpucheck_runs_three_times_and_takes_strides() -> None:
    rng = np.random.default_rng(0)
    noisy = spoiled("relu", False, lambda y: y + np.float32(1e-6) * rng.random())
    assert judged("gpucheck", "relu", noisy)
    assert any(not call.arrays[0].flags.c_contiguous for call in RULE["gpucheck"].calls("relu"))


def test_a_rule_leaves_out_options_that_a_kernel_does_not_take() -> None:
    plain = SimpleNamespace(
        linear_forward=lambda x, weight: ops.linear_forward(x, weight),
        linear_backward=ops.linear_backward,
    )
    assert not judged("BackendBench", "linear", plain)


# ---- the command ---------------------------------------------------------------------------------


def test_the_quick_form_counts_writes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, chart = tmp_path / "board.json", tmp_path / "board.svg"
    asked = ["--quick", "--op", "rmsnorm", "--op", "relu", "--processes", "1"]
    assert bench.main([*asked, "--json", str(counts), "--chart", str(chart)]) == 0
    said = capsys.readouterr().out
    assert "| verify |" in said and "| KernelBench |" in said and "unseen (" in said
    assert matplotlib.rcParams["svg.fonttype"] == "path"  # the picture's settings are its own
    drawn = chart.read_text(encoding="utf-8")
    assert all(f">{judge}<" in drawn for judge in ("verify", *RULE))
    data = json.loads(counts.read_text(encoding="utf-8"))
    assert data["counts"]["verify"]["float32"] == [0, 2]
    assert bench.main(["--read", str(counts)]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    "op",
    [
        "logits",  # float32, bf16 and tf32, of which the reference has no arrays
        *(pytest.param(op, marks=pytest.mark.slow) for op in OPS if op != "logits"),
    ],
)
def test_the_quick_form_judges_every_op_in_every_precision(op: str) -> None:
    found = bench.judge_op(op, None, bench.QUICK, True)
    corpora = {kind if kind in ("bf16", "tf32") else "float32" for _, kind, _ in all_right(op)}
    assert corpora <= {verdict.corpus for verdict in found}
    assert {verdict.judge for verdict in found} >= {"verify", "KernelBench", "gpucheck"}


def test_runs_over_different_ops_add_up() -> None:
    one = {
        "machine": "a",
        "every": {"relu": 1},
        "counts": {"verify": {"unseen": [1, 2]}},
        "missed": {"unseen": ["x"]},
    }
    two = {
        "machine": "a",
        "every": {"rope": 5},
        "counts": {"verify": {"unseen": [3, 3]}},
        "missed": {},
    }
    both = bench.added([one, two])
    assert both["counts"] == {"verify": {"unseen": [4, 5]}}
    assert both["missed"] == {"unseen": ["x"]} and both["machine"] == "a"
    assert "in 2 ops; a. A part of the kernels of rope (one in 5)." in bench.table(both)


def test_a_kernel_that_goes_wrong_in_the_last_cases_only_is_caught() -> None:
    called, late = 0, 10**9

    def forward(x: Array) -> Any:
        nonlocal called
        called += 1
        return np.maximum(x, 0) + (called > late) * np.float32(1), x

    module = SimpleNamespace(relu_forward=forward, relu_backward=right("relu").relu_backward)
    check_module(module, dtypes=["float32"])
    called, late = 0, called  # as many calls as a default run makes; bench makes some before
    kernel = bench.Kernel("unseen", "relu", "late", module, ("float32",))
    assert bench.verify(kernel)[0]


@pytest.mark.parametrize("name", ["no_correction_late", "out_ignored"])
def test_what_verify_once_passed_is_caught(name: str) -> None:
    (wrong,) = [wrong for wrong in WRONG if wrong.name == name]
    assert bench.verify(bench.Kernel("unseen", wrong.op, name, build(wrong)))[0]


def test_seeds_are_counted_and_an_alarm_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--seeds", "2", "--quick", "--op", "relu", "--processes", "1"]) == 0
    assert "0 false alarms: 1 right kernels, 2 seeds, " in capsys.readouterr().out


def test_the_table_of_the_page_is_what_the_counts_give() -> None:
    page = (ROOT / "accel/verify/BOARD.md").read_text(encoding="utf-8")
    data = json.loads(BOARD.read_text(encoding="utf-8"))
    assert bench.table(data) in page
    assert set(data["every"]) <= set(OPS)
    assert (ROOT / "accel/verify/board.svg").exists()
