"""Hints of ``--like``: what many cases say together of a function that nobody knows."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.verify.calling import Judged
from accel.verify.like.hints import _of_numbers
from accel.verify.report import Report
from tests.helpers.like import checked

ATTENTION = """
import numpy as np
SHAPES = {"attn": {"q": "T D", "k": "S D", "v": "S D", "causal": [True, False]}}
def attn(q, k, v, causal):
    s = q @ k.T
    if causal:
        s = np.where(np.tril(np.ones(s.shape, bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
SCALED = """
import numpy as np
SHAPES = {"scaled": {"x": "B D", "s": 0.5}, "power": {"x": "B D", "p": [1, 3]}, "add": {
    "a": "M K", "b": "K N", "c": "N"}}
def scaled(x, s):
    return np.tanh(x) * x.dtype.type(s)
def scaled_backward(dout, x, s):
    return dout * (1 - np.tanh(x) ** 2) * x.dtype.type(s)
def power(x, p):
    return np.tanh(x) ** p
def add(a, b, c):
    return a @ b + c
"""


def hints_of(report: Report) -> str:
    return "\n".join(hint for failure in report.failures for hint in failure.hints)


@pytest.mark.parametrize("seed", [0, 1])
def test_another_mask_is_no_option_that_is_ignored(tmp_path: Path, seed: int) -> None:
    new = ATTENTION.replace("ones(s.shape, bool)", "ones(s.shape, bool), len(k) - len(q)").replace(
        "-np.inf", "-1e9"
    )
    report = checked(tmp_path, new, ref=ATTENTION, seed=seed, examples=32, shrink=True)
    assert not report.right and "is causal ignored?" not in hints_of(report), report.text()
    new = ATTENTION.replace("if causal:", "if False:")
    report = checked(tmp_path, new, ref=ATTENTION, seed=seed, examples=32, shrink=True)
    assert "is causal ignored?" in hints_of(report), report.text()


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("* x.dtype.type(s)", "is s forgotten? dx is 2 times what it should be"),
        ("", "is s forgotten? dx is 2 times what it should be"),
        ("* x.dtype.type(s * s)", "is s twice there? dx is 0.5 times what it should be"),
        ("* x.dtype.type(s * 1.25)", "a constant factor? dx is 1.25 times what it should be"),
        ("* x.dtype.type(s / len(x))", "a mean over B for a sum? dx is "),
    ],
)
def test_a_factor_is_what_holds_in_every_case(tmp_path: Path, wrong: str, hint: str) -> None:
    right = "(1 - np.tanh(x) ** 2) * x.dtype.type(s)"
    if wrong == "* x.dtype.type(s)":
        wrong = "* x.dtype.type(s / s)"
    new = SCALED.replace(right, f"(1 - np.tanh(x) ** 2) {wrong}")
    report = checked(tmp_path, new, "scaled", ref=SCALED, examples=24, shrink=True)
    assert hint in hints_of(report), report.text()


def test_when_it_fails_is_said_of_options_and_of_sizes_that_are_equal(tmp_path: Path) -> None:
    new = SCALED.replace("return np.tanh(x) ** p", "return np.tanh(x) ** p + 0.1 * x * (p == 3)")
    report = checked(tmp_path, new, "power", ref=SCALED, examples=48)
    assert re.search(r"cases with p > \d, and in none of the other", hints_of(report)), (
        report.text()
    )
    new = SCALED.replace("a @ b + c", "(a @ b + c) * (1.1 if len(a) == len(c) else 1)")
    report = checked(tmp_path, new, "add", ref=SCALED, examples=64)
    assert "cases with M = N, and in none of the other" in hints_of(report), report.text()


def test_no_number_for_rows_of_equal_numbers_is_said(tmp_path: Path) -> None:
    ref = """
import numpy as np
SHAPES = {"norm": {"x": "B D, D >= 2"}}
def norm(x):
    c = x - x.mean(-1, keepdims=True)
    return c / (np.sqrt((c * c).mean(-1, keepdims=True)) + x.dtype.type(1e-5))
"""
    new = ref.replace(
        "    return", "    d = np.abs(x - x[:, :1])\n    return d / d.max(-1, keepdims=True) * 0 +"
    )
    report = checked(tmp_path, new, ref=ref, examples=24)
    assert "it is no number only where those of a row of x are equal" in hints_of(report), (
        report.text()
    )


def test_what_is_off_by_little_is_not_right() -> None:
    """A factor near one moves the largest numbers most, and the others as well."""
    case: Any = SimpleNamespace(dtype="float32", sizes={}, options={}, arrays={})
    exact = np.array([-0.536656315, 1.609968945])
    for off, told in (([1e-3, 1e-3], False), ([0, 1e-3], True)):
        judged = Judged("dx", "value", got=exact * (1.00001 + np.array(off)), exact=exact)
        said = [*_of_numbers(case, judged, [])]
        assert any("is wrong only at index 1" in hint for hint in said) == told, said
