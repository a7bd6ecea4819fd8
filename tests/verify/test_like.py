"""A reference of one's own: ``myllm verify --like``, here in NumPy; tests/peers has frameworks."""

import re
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from accel.verify.calling import Judged
from accel.verify.contract import Case
from accel.verify.report import failure_text
from accel.verify.search import Failure
from accel.verify.subject import SubjectError
from dist.cli import main
from tests.helpers import ROOT, like

PAGE = ROOT / "accel" / "verify" / "LIKE.md"

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
    wide = np.promote_types(x.dtype, np.float32)
    r = 1 / np.sqrt(np.mean(np.square(x, dtype=wide), axis=-1, keepdims=True) + wide.type(eps))
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
        "    memory = (x if x.base is None else x.base).reshape(-1)\n"
        "    first = (x.ctypes.data - memory.ctypes.data) // x.itemsize\n"
        "    read = memory.take(range(first, first + x.size), mode='wrap')  # and no other memory\n"
        "    return right(read.reshape(x.shape))",
        "out",
    ),
}

CRASH = """
import ctypes
def relu(x):
    return ctypes.string_at(0) if x.size > 8 else x * (x > 0)
"""


checked = partial(like.checked, ref=REF)


@pytest.mark.parametrize("seed", range(2))
def test_right_functions_pass(tmp_path: Path, seed: int) -> None:
    report = checked(
        tmp_path, RIGHT, seed=seed, dtypes=("float32", "float64", "float16", "bf16"), examples=5
    )
    assert report.right, report.text()
    assert report.cases == 5 * 4 * 7
    assert {"dx", "dgain"} <= set(report.ops[0].results)
    assert any("loss: gradients are not checked" in note for note in report.notes)


def test_strides_are_said_to_be_ignored_where_that_gives_what_came(tmp_path: Path) -> None:
    text = (
        "right = relu\ndef relu(x):\n"
        "    return right(x) * (x.flags.c_contiguous or x.dtype.type(1.1))"
    )
    report = checked(tmp_path, f"{RIGHT}\n{text}\n", "relu", dtypes=("float32",))
    said = [hint for failure in report.failures for hint in failure.hints]
    assert any(re.fullmatch("it passes when .* contiguous.", hint) for hint in said)
    assert not any("are strides ignored?" in hint for hint in said)


def test_every_element_of_a_small_gradient_is_tried(tmp_path: Path) -> None:
    text = (
        "def running_backward(dout, x):\n"
        "    dx = np.cumsum(dout[:, ::-1], axis=1)[:, ::-1].copy()\n"
        "    if x.shape[1] == 1:\n        dx[-3:-2] = 0\n    return dx"
    )
    report = checked(tmp_path, f"{RIGHT}\n{text}\n", "running", seed=1, examples=80)
    assert [failure.name for failure in report.failures] == ["dx"], report.text()
    assert any("of a larger one 8 elements" in note for note in report.notes)


def test_a_cotangent_may_be_one_number_expanded(tmp_path: Path) -> None:
    text = (
        "right = relu_backward\ndef relu_backward(dout, x):\n"
        "    if 0 in dout.strides:\n        dout = np.full_like(dout, np.nan)\n"
        "    return right(dout, x)"
    )
    report = checked(tmp_path, f"{RIGHT}\n{text}\n", "relu")
    assert {failure.name for failure in report.failures} == {"dx"}, report.text()
    assert "the cotangent has memory of its own" in report.text()


def test_what_nobody_knows_is_a_question_mark_among_what_was_expected() -> None:
    x = np.array([1.0, 2.0, 3.0])
    unknown = np.array([False, True, False])
    judged = Judged("dx", "value", got=x, exact=np.array([1.5, 2.0, 3.0]), problem="is off",
                    unknown=unknown)  # fmt: skip
    case = Case("relu", "float32", {"x": x}, {}, None, {})
    said = failure_text(Failure("relu", "float32", "dx", "value", case, judged))
    assert "expected [1.5,   ?, 3. ]" in said and "got      [1., 2., 3.]" in said


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
    report = checked(tmp_path, f"{RIGHT}\n{text}\n", function, seed=3)
    assert any(hint in said for failure in report.failures for said in failure.hints), report.text()


Z_LOSS = """
import numpy as np
SHAPES = {"zloss": {"x": "N V"}}
def _parts(x):
    m = x.max(axis=-1, keepdims=True)
    e = np.exp(x - m)
    return e / e.sum(axis=-1, keepdims=True), m + np.log(e.sum(axis=-1, keepdims=True))
def zloss(x):
    return (_parts(x)[1] ** 2).mean()
"""
MEAN_OVER_V = """
def zloss_backward(dout, x):
    p, z = _parts(x)
    return dout * 2 * z * p / x.dtype.type(x.shape[1])
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_guess_that_holds_in_the_smallest_case_alone_is_not_said(
    tmp_path: Path, seed: int
) -> None:
    """With x (2, 1) and dout 1/2 the gradient over V for N is x itself, as if nothing were done."""
    new = Z_LOSS + MEAN_OVER_V
    report = like.checked(tmp_path, new, ref=Z_LOSS, seed=seed, shrink=True)
    (failure,) = report.failures
    assert failure.name == "dx" and failure.case.arrays["x"].shape == (2, 1)
    assert not any("as it was given" in hint or "ignored" in hint for hint in failure.hints)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_guess_is_one_whatever_value_each_case_has_for_it(tmp_path: Path, seed: int) -> None:
    ref = 'SHAPES = {"power": {"x": "B D", "p": [1, 2, 3]}}\n'
    ref += "def power(x, p):\n    return x**p\n"
    next_to_it = "def power(x, p):\n    return x ** (p % 3 + 1)\n"
    report = like.checked(tmp_path, next_to_it, ref=ref, seed=seed)
    said = [hint for failure in report.failures for hint in failure.hints]
    assert any("is p ignored?" in hint for hint in said), report.text()


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
    text = PAGE.read_text(encoding="utf-8")
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


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match=r"has no function of a name that .* has"):
        checked(tmp_path, "def other(x):\n    return x")
    with pytest.raises(SubjectError, match="does not say what f takes: give it SHAPES"):
        checked(tmp_path, "def f(x):\n    return x", ref="def f(x):\n    return x\n")
    with pytest.raises(SubjectError, match=r"DTYPES must name some of float32, .*got "):
        checked(tmp_path, f"DTYPES = 'half'\n{RIGHT}", dtypes=None)
