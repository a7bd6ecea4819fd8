"""A reference of one's own: ``myllm verify --like``, here in NumPy; tests/peers has frameworks."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.tolerance import Magnitude
from accel.verify.apart import Source
from accel.verify.check import Options, check_subject
from accel.verify.draw import Draw
from accel.verify.like.bound import expect
from accel.verify.like.declared import DeclarationError, read, value_of
from accel.verify.like.slopes import slopes
from accel.verify.like.truth import as_rows, close
from accel.verify.report import Report
from accel.verify.subject import SubjectError
from dist.cli import main
from tests.helpers import ROOT

README = ROOT / "accel" / "verify" / "README.md"

REF = """
import numpy as np
SHAPES = {
    "rmsnorm": {"x": "B D", "gain": "D", "eps": 1e-5},
    "softmatmul": {"x": "M K", "w": "K N"},
    "loss": {"logits": "N V", "targets": "N int < V"},
    "quantized": {"x": "... D", "step": [0.25, 0.1]},
    "running": {"x": "B T"},
    "relu": {"x": "... D"},
    "pool": {"x": "B 2*T"},
}
def rmsnorm(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain
def softmatmul(x, w):
    s = x @ w
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)
def loss(logits, targets):
    m = logits.max(axis=-1)
    lse = m + np.log(np.exp(logits - m[:, None]).sum(axis=-1))
    return (lse - logits[np.arange(len(targets)), targets]).mean(), logits.argmax(axis=-1)
def quantized(x, step):
    return np.floor(x / x.dtype.type(step)), x > 0
def running(x):
    return np.cumsum(x, axis=-1)
def relu(x):
    return np.maximum(x, 0)
def pool(x):
    return x.reshape(len(x), -1, 2).max(axis=-1)
"""
RIGHT = """
import numpy as np
def rmsnorm(x, gain, eps):
    wide = np.promote_types(x.dtype, np.float32)
    mean = np.einsum("bd,bd->b", x, x, dtype=wide) / wide.type(x.shape[1])
    return x * (1 / np.sqrt(mean + wide.type(eps)))[:, None].astype(x.dtype) * gain
def rmsnorm_backward(dout, x, gain, eps):
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    n, dn = x * r, dout * gain
    return r * (dn - n * np.mean(dn * n, axis=-1, keepdims=True)), np.sum(dout * n, axis=0)
def softmatmul(x, w):
    e = np.einsum("mk,kn->mn", x, w)
    e = np.exp(e - np.max(e, -1)[:, None])
    return e * (1 / e.sum(-1))[:, None]
def loss(logits, targets):
    z = logits - logits.max(-1, keepdims=True)
    each = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[:, None], -1)[:, 0]
    return each.mean(), np.argmax(logits, -1)
def quantized(x, step):
    return np.floor(x * x.dtype.type(1 / step)), ~(x <= 0)
def running(x):
    out, total = np.empty_like(x), np.zeros(len(x), x.dtype)
    for t in range(x.shape[1]):
        total = total + x[:, t]
        out[:, t] = total
    return out
def relu(x):
    return x * (x > 0)
def relu_backward(dout, x):
    return dout * (x >= 0)
def pool(x):
    return np.maximum(x[:, ::2], x[:, 1::2])
def pool_backward(dout, x):
    first = x[:, ::2] >= x[:, 1::2]
    return np.stack([dout * first, dout * ~first], -1).reshape(x.shape)
"""
WRONG = {  # a function in place of the right one, and the results that are found wrong
    "zeros": ("def softmatmul(x, w):\n    return np.zeros((len(x), w.shape[1]), x.dtype)", "out"),
    "x as it is": ("def relu(x):\n    return x", "out"),
    "past the tile": (
        "right = rmsnorm\ndef rmsnorm(x, gain, eps):\n    out = right(x, gain, eps)\n"
        "    out[:, 64:] = 0\n    return out",
        "out",
    ),
    "second input ignored": (
        "def rmsnorm(x, gain, eps):\n"
        "    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + x.dtype.type(eps))",
        "out",
    ),
    "sizes as in the example": ("def pool(x):\n    return x.reshape(2, -1, 2).max(-1)", ""),
    "a term of the backward": (
        "def rmsnorm_backward(dout, x, gain, eps):\n"
        "    r = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + x.dtype.type(eps))\n"
        "    return r * dout * gain, np.sum(dout * x * r, axis=0)",
        "dx",
    ),
    "ones for the cotangent": (
        "def relu_backward(dout, x):\n    return (x > 0) * x.dtype.type(1)",
        "dx",
    ),
    "half precision inside": (
        "right = softmatmul\ndef softmatmul(x, w):\n"
        "    return right(x.astype(np.float16).astype(x.dtype), w)",
        "out",
    ),
    "half precision sums": (
        "def running(x):\n    return np.cumsum(x.astype(np.float16), -1).astype(x.dtype)",
        "out",
    ),
    "x squared minus mean squared": (
        "def rmsnorm(x, gain, eps):\n    m = x.mean(-1, keepdims=True)\n"
        "    v = (x * x).mean(-1, keepdims=True) - m * m\n"
        "    return x / np.sqrt(v + m * m * x.dtype.type(0.999) + x.dtype.type(eps)) * gain",
        "out",
    ),
    "written into": ("def relu(x):\n    x *= x > 0\n    return x", "x"),
    "eps left out": (
        "def rmsnorm(x, gain, eps):\n"
        "    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + x.dtype.type(1e-30)) * gain",
        "out",
    ),
    "a sum for the mean": (
        "right = loss\ndef loss(logits, targets):\n    a, b = right(logits, targets)\n"
        "    return a * len(targets), b",
        "out[0]",
    ),
    "the last of the largest": (
        "right = loss\ndef loss(logits, targets):\n    a, b = right(logits, targets)\n"
        "    return a, np.maximum(b - 1, 0)",
        "out[1]",
    ),
    "ceil for floor": (
        "right = quantized\ndef quantized(x, step):\n    a, b = right(x, step)\n"
        "    return np.ceil(x / x.dtype.type(step)), b",
        "out[0]",
    ),
    "not below zero": (
        "right = quantized\ndef quantized(x, step):\n    return right(x, step)[0], x >= 0",
        "out[1]",
    ),
    "kept by shape": (
        "right, kept = running, {}\ndef running(x):\n"
        "    return kept.setdefault((x.shape, x.dtype), right(x))",
        "out",
    ),
    "strides ignored": (
        "right = running\ndef running(x):\n"
        "    base = x if x.base is None else np.lib.stride_tricks.as_strided(\n"
        "        x, x.shape, (x.itemsize * x.shape[1], x.itemsize))\n    return right(base)",
        "out",
    ),
}

CRASH = """
import ctypes
def relu(x):
    return ctypes.string_at(0) if x.size > 8 else x * (x > 0)
"""


def checked(folder: Path, new: str, *functions: str, ref: str = REF, **options: Any) -> Report:
    """Hold a file to a reference in this process, which costs less than another."""
    for name, text in (("ref.py", ref), ("new.py", new)):
        (folder / name).write_text(text, encoding="utf-8")
    source = Source(str(folder / "new.py"), like=str(folder / "ref.py"), functions=functions)
    given = {"shrink": False, "dtypes": ("float32",), "examples": 24, **options}
    return check_subject(source.load(), Options(**given))


@pytest.mark.parametrize("seed", range(2))
def test_right_functions_pass(tmp_path: Path, seed: int) -> None:
    report = checked(
        tmp_path, RIGHT, seed=seed, dtypes=("float32", "float64", "float16", "bf16"), examples=5
    )
    assert report.right, report.text()
    assert report.cases == 5 * 4 * 7
    assert {"dx", "dgain"} <= set(report.ops[0].results)
    assert any("loss: gradients are not checked" in note for note in report.notes)


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
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_right_functions_pass_with_many_seeds(tmp_path: Path, seed: int) -> None:
    report = checked(tmp_path, RIGHT, seed=seed, dtypes=("float32", "float64"), examples=None)
    assert report.right, report.text()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_function_is_found(tmp_path: Path, mistake: str) -> None:
    text, result = WRONG[mistake]
    (function,) = {n.removesuffix("_backward") for n in re.findall(r"^def (\w+)\(", text, re.M)}
    report = checked(tmp_path, f"{RIGHT}\n{text}\n", function)
    found = {name for failure in report.failures for name in (failure.name, *failure.also)}
    assert result in found, report.text()


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ("zeros", "out is zero everywhere"),
        ("x as it is", "out is x, as it was given"),
        ("past the tile", "past a tile? out is zero only from index 64 on along axis 1"),
        ("second input ignored", "is gain ignored? With ones for it"),
        ("half precision inside", "rounded to float16?"),
        ("kept by shape", "a stale result?"),
        ("strides ignored", "are strides ignored?"),
    ],
)
def test_a_hint_says_what_is_wrong(tmp_path: Path, mistake: str, hint: str) -> None:
    text, _ = WRONG[mistake]
    (function,) = {n.removesuffix("_backward") for n in re.findall(r"^def (\w+)\(", text, re.M)}
    report = checked(tmp_path, f"{RIGHT}\n{text}\n", function)
    assert any(hint in said for failure in report.failures for said in failure.hints), report.text()


def test_a_failure_is_shrunk_saved_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref.py").write_text(REF, encoding="utf-8")
    (tmp_path / "new.py").write_text(f"{RIGHT}\n{WRONG['zeros'][0]}\n", encoding="utf-8")
    files = ["--like", "ref.py", "--module", "new.py", "--function", "softmatmul"]
    assert main(["verify", *files, "--dtype", "float32", "--examples", "8"]) == 1
    said = capsys.readouterr().out
    assert "FAIL softmatmul: out (float32)" in said and "smallest case: float32: x (1, 1)" in said
    (again,) = re.findall(r"again: myllm (verify .*npz)", said)
    assert main(shlex.split(again)) == 1
    assert "FAIL softmatmul: out" in capsys.readouterr().out
    (tmp_path / "new.py").write_text(RIGHT, encoding="utf-8")
    assert main(shlex.split(again)) == 0
    assert "softmatmul is right in this case" in capsys.readouterr().out


def test_a_function_that_crashes_is_a_failure_with_its_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref.py").write_text(REF, encoding="utf-8")
    (tmp_path / "new.py").write_text(CRASH, encoding="utf-8")
    assert main(["verify", "--like", "ref.py", "--module", "new.py", "--dtype", "float32"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAIL relu \(float32\): relu ended the process by SIGSEGV .*new.py:4", said)
    assert "new.py has no rmsnorm, softmatmul" in said
    (again,) = re.findall(r"again: myllm (verify .*npz)", said)
    assert main(shlex.split(again)) == 1


def blocks(text: str, kind: str) -> dict[str, str]:
    """Return the README's code blocks that are marked so."""
    return dict(re.findall(rf"<!-- like {kind}: (.*?) -->\n```\w*\n(.*?)```", text, re.DOTALL))


def test_the_readme_s_example_is_what_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, code in blocks(text, "file").items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    ((command, output),) = blocks(text, "output").items()
    assert main(command.split()[1:]) == 1
    said = capsys.readouterr().out
    for line in output.splitlines():
        assert line in said, said
    mended = (tmp_path / "new.py").read_text(encoding="utf-8")
    for before, after in blocks(text, "mended").items():
        assert before in mended
        mended = mended.replace(before, after.strip())
    (tmp_path / "new.py").write_text(mended, encoding="utf-8")
    assert main(command.split()[1:]) == 0, capsys.readouterr().out


# ---- shapes --------------------------------------------------------------------------------------


def first(options: Any, name: str = "") -> Any:
    return options[0]


def test_a_declaration_is_read() -> None:
    declared = read(
        {"x": "B T 2*F, F % 8, T <= 100", "ids": "B T int < V", "table": "V 3", "eps": 1e-5}
    )
    assert declared.letters == ("B", "T", "F", "V")
    assert declared.options == {"eps": (1e-5,)}
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(40):
        draw = Draw(lambda options, name="": options[rng.integers(len(options))], "float32")
        sizes = declared.sizes(draw)
        assert sizes["F"] % 8 == 0 and sizes["T"] <= 100
        arrays = {name: a.values(draw, sizes) for name, a in declared.arrays.items()}
        assert arrays["x"].shape == (sizes["B"], sizes["T"], 2 * sizes["F"])
        assert arrays["table"].shape == (sizes["V"], 3)
        assert arrays["ids"].min() >= 0 and arrays["ids"].max() < sizes["V"]
        seen.add(sizes["F"])
    assert 8 in seen and len(seen) > 3
    assert value_of("2F + 1", {"F": 3}) == 7
    assert (
        read({"x": "... D > 0"})
        .arrays["x"]
        .values(Draw(first, "float32"), {"...": (2,), "D": 5})
        .min()
        > 0
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"eps": 1e-5}, "no array among eps"),
        ({"x": "B, T)"}, "is no expression of sizes"),
        ({"x": "B T!"}, "'T!' where an axis should stand"),
        ({"y": "B"}, "relu takes no y; it takes x"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_said(
    tmp_path: Path, shapes: dict[str, Any], message: str
) -> None:
    ref = f"import numpy as np\nSHAPES = {{'relu': {shapes!r}}}\ndef relu(x):\n    return abs(x)\n"
    with pytest.raises(SubjectError, match=re.escape(message)):
        checked(tmp_path, "def relu(x):\n    return x", ref=ref)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match=r"has no function of a name that .* has"):
        checked(tmp_path, "def other(x):\n    return x")
    with pytest.raises(SubjectError, match="does not say what f takes: give it SHAPES"):
        checked(tmp_path, "def f(x):\n    return x", ref="def f(x):\n    return x\n")
    with pytest.raises(SubjectError, match=r"DTYPES must name some of float32, .*got "):
        checked(tmp_path, f"DTYPES = 'half'\n{RIGHT}", dtypes=None)


def test_shapes_are_found_from_an_example(tmp_path: Path) -> None:
    ref = """
import numpy as np
EXAMPLES = {
    "f": (np.ones((4, 4)), np.ones((4, 4)), np.zeros(4, int), np.ones((6, 4)), 2),
    "heads": lambda: {"x": np.ones((3, 8)), "n": 4},
}
def f(x, w, ids, table, power):
    return (x @ w + table[ids]) ** power
def heads(x, n):
    return x.reshape(len(x), n, -1).sum(-1)
"""
    new = "def f(x, w, ids, table, power):\n    y = table[ids] + x @ w\n    return y * y\n"
    new += "def heads(x, n):\n    return x.reshape(len(x), n, -1).sum(2)\n"
    report = checked(tmp_path, new, "f", ref=ref)
    assert report.right, report.text()
    (tmp_path / "ref.py").write_text(ref, encoding="utf-8")
    subject = Source(str(tmp_path / "new.py"), like=str(tmp_path / "ref.py")).load()
    f = subject.pairs["f"].reference.declared  # type: ignore[attr-defined]
    x, w, ids, table = (f.arrays[n] for n in ("x", "w", "ids", "table"))
    assert x.axes[1] == w.axes[0] != w.axes[1] == table.axes[1] and ids.axes[0] == x.axes[0]
    assert ids.bounds == (("<", table.axes[0]),)
    heads = subject.pairs["heads"].reference.declared  # type: ignore[attr-defined]
    known = dict(heads.known)
    assert set(known[heads.arrays["x"].axes[1]]) >= {8, 16, 64}
    assert not {7, 17} & set(known[heads.arrays["x"].axes[1]])


# ---- the bound -----------------------------------------------------------------------------------


def test_the_bound_counts_terms_and_knows_jumps() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 129)).astype(np.float32)
    x[0, 0] = 1.0  # floor jumps here

    def f(arrays: Any, dtype: str) -> dict[str, Any]:
        kind = np.float64 if dtype == "float64" else np.float32
        given = arrays["x"].astype(kind)
        parts = {"each": np.exp(given), "sum": given.sum(-1), "floor": np.floor(given)}
        return {name: a.astype(np.float64) for name, a in parts.items()}

    truths = expect(f, {"x": x}, "float32", rng)
    assert truths["each"].magnitude.terms <= 2
    assert 100 <= truths["sum"].magnitude.terms <= 170
    assert truths["floor"].jumps[0, 0] and truths["floor"].jumps.mean() < 0.01
    floor = truths["floor"].exact.copy()
    floor[0, 0] = 0.0
    assert close(floor, truths["floor"], "float32", gradient=False).ok
    floor[0, 0] = 2.0
    assert not close(floor, truths["floor"], "float32", gradient=False).ok
    assert not close(
        truths["each"].exact * (1 + 1e-4), truths["each"], "float32", gradient=False
    ).ok


def test_infinity_and_nan_are_due_where_the_reference_has_them() -> None:
    x = np.array([[0.0, 1.0, 2.0, -1.0]], np.float32)

    def f(arrays: Any, dtype: str) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            return {"out": np.log(arrays["x"]).astype(np.float64)}

    truth = expect(f, {"x": x}, "float32", np.random.default_rng(0))["out"]
    right = truth.exact.copy()
    assert close(right, truth, "float32", gradient=False).ok
    for at, value in ((0, -1e30), (3, 0.0), (1, np.nan)):
        wrong = right.copy()
        wrong[0, at] = value
        assert not close(wrong, truth, "float32", gradient=False).ok


def test_a_narrow_row_is_taken_with_those_beside_it() -> None:
    assert as_rows(np.zeros((7, 40))).shape == (7, 40)
    assert as_rows(np.zeros((7, 4, 5))).shape == (7, 20)
    assert as_rows(np.zeros((3, 2))).shape == (1, 6)
    assert as_rows(np.float64(1)).shape == (1, 1)
    assert Magnitude(np.ones(3), 1).terms == 1


def test_slopes_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((3, 2)), rng.standard_normal((3, 2))
    x[2, 1] = 0.0
    found = slopes(
        lambda given: {"out": np.abs(np.sin(given["x"]))}, {"x": x}, ["x"], {"out": dout}, rng
    )["x"]
    want = dout * np.cos(x) * np.sign(np.sin(x))
    calm = x != 0
    assert np.max(np.abs(found.value - want)[calm]) < 1e-9
    assert found.low[2, 1] < 0 < found.high[2, 1]  # the kink at zero
    assert np.abs(found.low[2, 1] + abs(dout[2, 1])) < 1e-6


def test_steps_are_as_long_as_the_row_is_large_and_what_bends_within_them_is_left_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3)) * np.array([[1e-12], [1.0], [1e6], [1e12]])
    dout = rng.standard_normal((4, 3))

    def norm(given: Any) -> dict[str, Any]:
        return {"out": given["x"] / np.sqrt(np.sum(given["x"] ** 2, axis=-1, keepdims=True))}

    found = slopes(norm, {"x": x}, ["x"], {"out": dout}, rng)["x"]
    r = 1 / np.sqrt(np.sum(x**2, axis=-1, keepdims=True))
    want = r * (dout - x * r * np.sum(x * r * dout, axis=-1, keepdims=True))
    tried = ~np.isnan(found.value)
    assert tried[[0, -1]].any(axis=-1).all()
    np.testing.assert_allclose((found.value * x)[tried], (want * x)[tried], rtol=1e-6)

    def wave(given: Any) -> dict[str, Any]:
        return {"out": np.sin(1e6 * given["x"])}

    x = np.linspace(1.0, 2.0, 7)
    assert np.isnan(slopes(wave, {"x": x}, ["x"], {"out": x}, rng)["x"].value).all()


def test_where_one_rounding_decides_nothing_is_asked_but_a_number_is() -> None:
    rng = np.random.default_rng(0)
    x = np.array([[3e8, 1e8, -2e8, 5e7]] * 8, np.float32)

    def softmax(arrays: Any, dtype: str) -> dict[str, Any]:
        z = arrays["x"].astype(np.float64 if dtype == "float64" else np.float32)
        e = np.exp(z - z.max(-1, keepdims=True))
        return {"out": (e / e.sum(-1, keepdims=True)).astype(np.float64)}

    truth = expect(softmax, {"x": x}, "float32", rng)["out"]
    assert not truth.judged.any() and truth.finite.all()

    def mean_over_none(arrays: Any, dtype: str) -> dict[str, Any]:
        z = arrays["x"].astype(np.float64 if dtype == "float64" else np.float32)
        c = z - z.mean(-1, keepdims=True)
        with np.errstate(all="ignore"):
            return {"out": (c / np.sqrt((c * c).mean(-1, keepdims=True))).astype(np.float64)}

    x = np.linspace(1.0, 2.0, 40, dtype=np.float32).reshape(2, 20)
    x[1] = 0.1  # all but one, which is next to it: a mean that is rounded makes them all alike
    x[1, 0] = np.nextafter(x[1, 0], np.float32(1))
    truth = expect(mean_over_none, {"x": x}, "float32", rng)["out"]
    assert truth.judged[0].all() and truth.finite[0].all()
    assert not truth.judged[1].any() and not truth.finite[1].any()


def test_an_expression_may_not_call_anything() -> None:
    with pytest.raises(DeclarationError):
        value_of("__import__('os')", {})
