"""``--like`` and PyTorch: how a backward is called, and what is written into on the way."""

from pathlib import Path

import pytest

from accel.verify.report import Report
from tests.helpers.like import checked

pytest.importorskip("torch", reason="PyTorch is not installed")

REF = """
import torch
SHAPES = {"scaled": {"x": "B T D", "gain": "D"}}
def scaled(x, gain):
    return torch.tanh(x) * gain
"""
NEW = """
import torch
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        t = torch.tanh(x)
        ctx.save_for_backward(t, gain)
        return t * gain
    @staticmethod
    def backward(ctx, dout):
        t, gain = ctx.saved_tensors
        dx, dgain = dout * gain * (1 - t * t), (dout * t).sum((0, 1))
        return dx, dgain
scaled = Scaled.apply
"""
UNLESS = "        if not ctx.needs_input_grad[{}]:\n            {}\n        return dx, dgain\n"
EXPANDED = (
    "        dout = dout if 0 not in dout.stride() else dout.clone().fill_(torch.nan)\n        dx, "
)


def said(report: Report) -> dict[tuple[str, str], str]:
    return {(f.name, f.kind): " ".join(f.hints) for f in report.failures}


def test_one_input_may_require_a_gradient_alone(tmp_path: Path) -> None:
    new = NEW.replace("        return dx, dgain\n", UNLESS.format(0, "dgain = 0 * dgain"))
    report = checked(tmp_path, new, ref=REF, examples=24)
    assert set(said(report)) == {("dgain", "alone")}, report.text()
    assert "needs_input_grad" in said(report)["dgain", "alone"]
    assert "dgain, where gain alone requires a gradient, is off by" in report.text()
    right = NEW.replace("        return dx, dgain\n", UNLESS.format(0, "dx = None"))
    for new in (NEW, right, REF):
        assert checked(tmp_path, new, ref=REF, examples=24).ok


def test_a_backward_that_raises_where_one_input_requires_a_gradient_alone(tmp_path: Path) -> None:
    new = NEW.replace("        return dx, dgain\n", UNLESS.format(1, "raise ValueError('no gain')"))
    report = checked(tmp_path, new, ref=REF, examples=24)
    assert set(said(report)) == {("", "raised")}, report.text()
    assert "ValueError: no gain" in report.text()
    assert ", where x alone requires a gradient\n" in report.text()


def test_a_weight_that_alone_requires_a_gradient_which_nobody_has_is_judged_once(
    tmp_path: Path,
) -> None:
    new = REF.replace("* gain", "* gain.detach()")
    report = checked(tmp_path, new, ref=REF, examples=24)
    assert set(said(report)) == {("dgain", "value")} and not report.untried, report.text()


def test_a_cotangent_may_be_one_number_expanded(tmp_path: Path) -> None:
    report = checked(tmp_path, NEW.replace("        dx, ", EXPANDED), ref=REF, examples=24)
    assert {name for name, _ in said(report)} == {"dx"}, report.text()
    assert "the cotangent has memory of its own" in report.text()


def test_what_is_written_into_is_no_stale_result(tmp_path: Path) -> None:
    ref = """
import torch
SHAPES = {"step": {"p": "N", "g": "N", "m": "N"}}
def step(p, g, m):
    m = 0.9 * m + 0.1 * g
    return p - 0.5 * m, m
"""
    new = """
import torch
def step(p, g, m):
    with torch.no_grad():
        m.mul_(0.9).add_(g, alpha=0.1)
    return p - 0.5 * m, m
"""
    report = checked(tmp_path, new, ref=ref, examples=24)
    assert ("m", "written") in said(report)
    assert not {"second", "refilled", "overwritten"} & {kind for _, kind in said(report)}
