"""``--like`` on hard cases and in narrow precisions: no right function is called wrong."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from accel.verify.like.bound import expect
from accel.verify.like.truth import close
from reference.types import Array
from tests.helpers.like import checked

ONE_CLASS = """
import numpy as np
SHAPES = {"loss": {"z": "N 1", "t": "N int < 1"}, "norm": {"x": "N 1"}}
def loss(z, t):
    m = z.max(-1)
    return (m + np.log(np.exp(z - m[:, None]).sum(-1)) - z[np.arange(len(t)), t]).mean()
def norm(x):
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5)
"""
BASE_2 = """
import numpy as np
def lse(z):
    y = z * z.dtype.type(1.4426950408889634)
    m = y.max(-1)
    return (m + np.log2(np.exp2(y - m[:, None]).sum(-1))) * z.dtype.type(0.6931471805599453)
def loss(z, t):
    return (lse(z) - z[np.arange(len(t)), t]).mean()
def loss_backward(dout, z, t):
    p = np.exp(z - lse(z)[:, None])
    p[np.arange(len(t)), t] -= 1
    return p * (dout / z.dtype.type(len(z)))
def norm(x):
    m = x.sum(-1, keepdims=True) / x.dtype.type(x.shape[-1])
    return (x - m) / np.sqrt(x.dtype.type(1e-5) + (x - m) ** 2)
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", None),
        ("(lse(z) - z[np.arange(len(t)), t])", "lse(z)", "out"),
        ("return (lse(z)", "return (lse(z) * z.dtype.type(1.001)", "out"),
        ("    p[np.arange(len(t)), t] -= 1\n", "", "dz"),
        ("return (x - m) /", "return x /", "out"),
    ],
)
def test_where_zero_is_due_whatever_comes_in_roundings_of_the_inputs_are_right(
    tmp_path: Path, old: str, new: str, found: str | None
) -> None:
    report = checked(
        tmp_path, BASE_2.replace(old, new), ref=ONE_CLASS, dtypes=("float32", "float64")
    )
    wrong = {failure.name for failure in report.failures}
    assert found in wrong if found else report.right, report.text()


HARD_REF = """
import numpy as np
SHAPES = {
    "layernorm": {"x": "B D"},
    "bare": {"x": "B D"},
    "softplus": {"x": "N"},
    "softmax": {"x": "B D"},
    "unit": {"x": "B D"},
    "silu": {"x": "B D", "y": "B D"},
}
def layernorm(x):
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5)
def bare(x):
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True))
def softplus(x):
    return np.log(1 + np.exp(x))
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
def unit(x):
    top = np.abs(x).max(-1, keepdims=True)
    return np.where(top > 0, x / np.where(top > 0, top, 1), 0)
def silu(x, y):
    return x / (1 + np.exp(-x)) * y
"""
HARD_RIGHT = """
import numpy as np
def mean(x):
    wide = np.promote_types(x.dtype, np.float32)
    total = np.add.reduce(x, -1, keepdims=True, dtype=wide)
    return (total * wide.type(1 / x.shape[-1])).astype(x.dtype)
def layernorm(x):
    c = x - mean(x)
    return c * (1 / np.sqrt(mean(np.square(c)) + x.dtype.type(1e-5)))
def bare(x):
    c = x - mean(x)
    return c * (1 / np.sqrt(mean(np.square(c))))
def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
def softmax(x):
    return np.exp(x - x.max(-1, keepdims=True) - np.log(
        np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)))
def unit(x):
    top = np.max([x, -x], 0).max(-1, keepdims=True)
    return np.divide(x, top, out=np.zeros_like(x), where=top > 0)
def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x > 0, 1 / (1 + e), e / (1 + e))
def silu(x, y):
    return x * y * sigmoid(x)
def layernorm_backward(dout, x):
    r = 1 / np.sqrt(mean(np.square(x - mean(x))) + x.dtype.type(1e-5))
    n = (x - mean(x)) * r
    return r * (dout - mean(dout) - n * mean(dout * n))
def softplus_backward(dout, x):
    return dout * sigmoid(x)
def softmax_backward(dout, x):
    p = softmax(x)
    return p * (dout - (dout * p).sum(-1, keepdims=True))
def silu_backward(dout, x, y):
    s = sigmoid(x)
    return dout * y * s * (1 + x * (1 - s)), dout * x * s
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (*range(1, 11), 24, 25))]
)
def test_right_functions_pass_what_is_hard(tmp_path: Path, seed: int) -> None:
    dtypes = ("float32", "float64", "bf16", "float16")[: 4 if seed else 1]
    report = checked(tmp_path, HARD_RIGHT, ref=HARD_REF, seed=seed, dtypes=dtypes, examples=12)
    assert report.right, report.text()


@pytest.mark.parametrize("factor", [1, 2])
def test_a_gradient_beyond_the_precision_s_range_may_be_infinite(
    tmp_path: Path, factor: int
) -> None:
    f = "def f(x):\n    return x * (8 / np.sqrt(x * x + x.dtype.type(2**-24)))\n"
    ref = f"import numpy as np\nSHAPES = {{'f': {{'x': 'B N'}}}}\n{f}"
    new = f"""import numpy as np\n{f}def f_backward(dout, x):
    r = 1 / np.sqrt(x * x + x.dtype.type(2**-24))  # 4096 for a zero
    return dout * 8 * r * (1 - (x * r) ** 2) * {factor}
"""
    report = checked(tmp_path, new, ref=ref, dtypes=("float16",), examples=30)
    assert ("dx" in {failure.name for failure in report.failures}) == (factor == 2), report.text()


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("layernorm", "mean(np.square(c))", "(mean(x * x) - mean(x) ** 2)"),
        ("layernorm", "mean(np.square(c)) + x.dtype.type(1e-5)", "mean(np.square(c))"),
        ("softmax", "x - x.max(-1, keepdims=True)", "x"),
        (
            "softplus",
            "np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))",
            "np.log1p(np.exp(x)) * 1.01",
        ),
        ("unit", "return np", "top = top + x.dtype.type(1e-30)\n    return np"),
        ("silu", "return x * y", "x = np.clip(x, -60000, 60000)\n    return x * y"),
        ("softmax", "    p = softmax(x)", "    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)"),
        (
            "softmax",
            "    return np.exp(x - x.max",
            "    x = x + 0 * x**5\n    return np.exp(x - x.max",
        ),
        ("layernorm", "n = (x - mean(x)) * r", "n = x * r - mean(x * r) * x.dtype.type(0.99)"),
    ],
)
def test_a_function_that_only_hard_cases_show_is_found_in_the_first(
    tmp_path: Path, function: str, old: str, new: str
) -> None:
    text = HARD_RIGHT.replace(old, new)
    assert text != HARD_RIGHT
    report = checked(tmp_path, text, function, ref=HARD_REF, examples=10)
    wrong = {failure.name for failure in report.failures}
    assert ("dx" if f"{function}_backward" in text.split(new)[0] else "out") in wrong, report.text()


PRODUCT = """
import numpy as np
SHAPES = {"product": {"x": "M K", "w": "K N"}}
def product(x, w):
    return np.tanh(x @ w)
"""
IN_A_PRECISION = """
import numpy as np
from accel.tolerance import round_bf16, round_fp8, round_tf32
DTYPES = {dtype!r}
def product(x, w):
    return {code}
def product_backward(dout, x, w):
    y = product(x, w)
    dz = dout * (1 - y * y)
    return dz @ w.T, x.T @ dz
"""


@pytest.mark.parametrize(
    ("dtype", "code", "right"),
    [
        ("tf32", "np.tanh(round_tf32(x) @ round_tf32(w))", True),
        ("float32", "np.tanh(round_tf32(x) @ round_tf32(w))", False),
        ("tf32", "np.tanh(round_fp8(x, 'e4m3') @ round_fp8(w, 'e4m3'))", False),
        ("e4m3", "round_bf16(np.tanh(x @ w))", True),
        ("e5m2", "np.tanh(x @ w)", True),
        ("e4m3", "1.1 * np.tanh(x @ w)", False),
        ("e5m2", "np.tanh(x @ np.abs(w))", False),
    ],
)
def test_tf32_and_8_bits_are_tried_when_they_are_declared(
    tmp_path: Path, dtype: str, code: str, right: bool
) -> None:
    text = IN_A_PRECISION.format(dtype=dtype, code=code)
    report = checked(tmp_path, text, ref=PRODUCT, dtypes=None, examples=16)
    assert [op.dtype for op in report.ops] == [dtype]
    assert report.right == right, report.text()
    hinted = any("rounded to TF32?" in hint for f in report.failures for hint in f.hints)
    assert hinted == (dtype == "float32")


def _sum_and_top(given: Mapping[str, Array], precision: str) -> dict[str, Array]:
    """Return the sums and maxima of rows, and dx, where the first of equal numbers is the top."""
    kind = np.float64 if precision == "float64" else np.float32
    x, by_sum, by_top = (np.asarray(given[n], kind) for n in ("x", "dout.sum", "dout.top"))
    rows, at = np.arange(len(x)), x.argmax(-1)
    dx = np.repeat(by_sum[:, None], x.shape[1], axis=1)
    dx[rows, at] += by_top
    return {"out.sum": x.sum(-1), "out.top": x[rows, at], "dx": dx}


@pytest.mark.parametrize("seed", range(16, 21))  # in 18 a row was taken to have no kink
def test_any_of_equal_numbers_may_be_the_largest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    alike = np.repeat(2 * rng.standard_normal(7).astype(np.float32)[:, None], 129, axis=1)
    by_sum, by_top = (f * rng.standard_normal(7).astype(np.float32) for f in np.float32([3, 1]))
    arrays = {"x": alike, "dout.sum": by_sum, "dout.top": by_top}
    truth = expect(_sum_and_top, arrays, "float32", rng, frozenset({"dx"}))["dx"]
    dx = np.repeat(by_sum[:, None], 129, axis=1)
    dx[:, 33] += by_top
    assert close(dx, truth, "float32", gradient=True).ok
    dx[:, 33] += 20
    assert not close(dx, truth, "float32", gradient=True).ok
    arrays["x"] = rng.standard_normal((7, 129)).astype(np.float32)  # of which one is the largest
    found = _sum_and_top(arrays, "float32")["dx"]
    truth = expect(_sum_and_top, arrays, "float32", rng, frozenset({"dx"}))["dx"]
    assert close(found, truth, "float32", gradient=True).ok
    assert not close(np.roll(found, 1, axis=1), truth, "float32", gradient=True).ok
