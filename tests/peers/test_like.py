"""A reference of one's own in PyTorch, JAX, Triton and C, and KernelBench's form."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.verify import VerificationError
from accel.verify.apart import Source
from accel.verify.check import Options, check_subject
from tests.helpers import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
EXAMPLES = ROOT / "accel" / "verify" / "examples"


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def held(module: Path, *more: str, **environment: str) -> str:
    """Run the command in a process of its own and return what it says; it must be all right."""
    files = ["--like", str(EXAMPLES / "like_torch.py"), "--module", str(module)]
    words = ["verify", *files, "--partial", *more]
    done = subprocess.run(
        [sys.executable, "-m", "dist.cli", *words, "--examples=3", "--dtype=float32", "--jobs=1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_in_triton() -> None:
    needs("triton")
    said = held(EXAMPLES / "like_triton.py", TRITON_INTERPRET="1")
    assert "dy" in said and "softmax: no gradient was checked" in said


def test_kernels_in_jax_and_pallas() -> None:
    needs("jax")
    said = held(EXAMPLES / "like_jax.py")
    assert "dx" in said and "gated: no gradient was checked" in said


def test_kernels_in_c() -> None:
    needs("cffi")
    assert "no gradient was checked: there is no gated_backward" in held(EXAMPLES / "like_c.py")


# ---- one line each -------------------------------------------------------------------------------


class Norm(torch.autograd.Function):
    """Layer norm with its backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any) -> Any:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(centred * r, r, w)
        return (centred * r * w + b).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        n, r, w = ctx.saved_tensors
        dout, kind = dout.to(n.dtype), dout.dtype
        dn = dout * w
        dx = r * (dn - dn.mean(-1, keepdim=True) - n * (dn * n).mean(-1, keepdim=True))
        rows = tuple(range(dout.ndim - 1))
        return dx.to(kind), (dout * n).sum(rows).to(kind), dout.sum(rows).to(kind)


class Shortened(Norm):
    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        n, r, w = ctx.saved_tensors
        dx, dw, db = Norm.backward(ctx, dout)
        return dx + (r * n * (dout * w * n).mean(-1, keepdim=True)).to(dx.dtype), dw, db


def plain_norm(x: Any, w: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)


def test_an_autograd_function_in_a_line() -> None:
    from accel.verify.torch import check

    check(Norm.apply, like=plain_norm, x="B T D", w="D", b="D", examples=10)
    with pytest.raises(VerificationError, match="gradient dx"):
        check(Shortened.apply, like=plain_norm, x="B T D", w="D", b="D", examples=10, shrink=False)


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.up = heads, torch.nn.Linear(width, 2 * width)

    def forward(self, x: Any) -> Any:
        gate, value = self.up(x).chunk(2, dim=-1)
        return x + torch.nn.functional.gelu(gate) * value


class Fused(Block):
    def forward(self, x: Any) -> Any:
        width = x.shape[-1]
        both = torch.addmm(self.up.bias, x.reshape(-1, width), self.up.weight.T)
        gate, value = both[:, :width], both[:, width:]
        half = 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5))
        return (x.reshape(-1, width) + half * value).view(x.shape)


class Untrained(Fused):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.up.bias.zero_()
        return super().forward(x)


def test_a_module_in_a_line_with_the_weights_of_the_other() -> None:
    from accel.verify.torch import check

    shapes = {"init": ("D", 2), "x": "B T D, D % 2"}
    report = check(Fused, like=Block, examples=8, **shapes)
    assert "dparams.up.weight" in report.ops[0].results
    with pytest.raises(VerificationError):
        check(Untrained, like=Block, examples=8, shrink=False, **shapes)


def test_an_op_of_torch_library_in_a_line() -> None:
    from accel.verify.torch import check

    @torch.library.custom_op("myllm_tests::double_gelu", mutates_args=())
    def double_gelu(x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.gelu(x)

    op = torch.ops.myllm_tests.double_gelu
    like, given = (lambda x: 2 * torch.nn.functional.gelu(x)), {"x": "... D", "examples": 8}
    report = check(op, like=like, **given, partial=True)
    assert any("no gradient was checked" in said for said in report.untried)
    with pytest.raises(VerificationError, match="no gradient was checked"):
        check(op, like=like, **given)


# ---- files ---------------------------------------------------------------------------------------

REF = """
import torch
import torch.nn.functional as F
SHAPES = {
    "attention": {"q": "B H T d", "k": "B H S d", "v": "B H S d"},
    "conv": {"x": "B C H W, H <= 17, W <= 17", "w": "O C 3 3, O <= 8"},
    "entropy": {"logits": "N V", "targets": "N int < V"},
    "pool": {"x": "B C H W, H >= 2, W >= 2"},
    "chain": {"x": "... D"},
    "parts": {"x": "B D"},
    "upcast": {"x": "B D"},
}
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
def conv(x, w):
    return F.relu(F.conv2d(x, w, padding=1))
def entropy(logits, targets):
    return F.cross_entropy(logits, targets)
def pool(x):
    return F.max_pool2d(x, 2, return_indices=True)
def chain(x):
    return F.gelu(F.silu(x) * 0.5 + 1)
def parts(x):
    return {"sum": x.sum(-1), "top": x.max(-1).values, "arg": x.argmax(-1), "big": x > 0}
def upcast(x):
    return x.float().softmax(-1, dtype=torch.float32).to(x.dtype)
"""
RIGHT = """
import torch
import torch.nn.functional as F
def attention(q, k, v):  # PyTorch's own has gradients of NaN where scores come to 1e16
    return torch.softmax(q * q.shape[-1] ** -0.5 @ k.mT, -1) @ v
def conv(x, w):
    u = w.flatten(1) @ F.unfold(x, 3, padding=1)
    return F.relu(u.view(len(x), len(w), *x.shape[2:]))
def entropy(logits, targets):
    return (logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]).mean()
pool = lambda x: F.max_pool2d(x, 2, return_indices=True)
def chain(x):
    y = x * torch.sigmoid(x) * 0.5 + 1
    return y * 0.5 * (1 + torch.erf(y * 0.5**0.5))
def parts(x):
    ordered = x.sort(-1)
    one = torch.ones(x.shape[-1], dtype=x.dtype)
    top, arg = ordered.values[:, -1], x.max(-1).indices
    return {"sum": x @ one, "top": top, "arg": arg, "big": ~(x <= 0)}
upcast = lambda x: torch.softmax(x, -1)
"""


def checked(folder: Path, new: str, *functions: str, ref: str = REF, **options: Any) -> Any:
    for name, text in (("ref.py", ref), ("new.py", new)):
        (folder / name).write_text(text, encoding="utf-8")
    source = Source(str(folder / "new.py"), like=str(folder / "ref.py"), functions=functions)
    given = {"shrink": False, "dtypes": ("float32",), "examples": 12, **options}
    return check_subject(source.load(), Options(**given))


FUNCTIONS = ("attention", "conv", "entropy", "pool", "chain", "parts", "upcast")


LONG = ("attention", "conv")  # many products for each case
QUICK = [pytest.param(f, marks=[pytest.mark.slow] if f in LONG else []) for f in FUNCTIONS]


@pytest.mark.parametrize("function", QUICK)
def test_right_functions_pass(tmp_path: Path, function: str) -> None:
    report = checked(tmp_path, RIGHT, function, dtypes=("float32", "bf16"))
    assert report.right, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_right_functions_pass_with_many_seeds(tmp_path: Path, function: str) -> None:
    for seed in range(20):
        report = checked(tmp_path, RIGHT, function, seed=seed, examples=40)
        assert report.right, report.text()


STEPS = """
def norm(x, g):
    return x / torch.sqrt((x ** 2).mean(-1, keepdim=True) + 1e-6) * g
"""
FUSED = """
def norm(x, g):
    return F.rms_norm(x, g.shape, g, 1e-6)
"""


def test_roundings_after_each_step_are_allowed_where_the_reference_makes_them(
    tmp_path: Path,
) -> None:
    head = "import torch\nimport torch.nn.functional as F\n"
    shapes = "SHAPES = {'norm': {'x': 'B T D', 'g': 'D'}}\n"
    how: dict[str, Any] = {"dtypes": ("bf16",), "examples": 100, "seed": 3}
    report = checked(tmp_path, head + STEPS, "norm", ref=head + shapes + FUSED, **how)
    assert not report.right
    said = [hint for failure in report.failures for hint in failure.hints]
    assert any("write the reference in such steps" in hint for hint in said), report.text()
    report = checked(tmp_path, head + STEPS, "norm", ref=head + shapes + STEPS, **how)
    assert report.right, report.text()


WRONG = {
    "attention": "attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0)",
    "conv": "conv = lambda x, w: F.relu(F.conv2d(x, w.flip(-1), padding=1))",
    "entropy": "entropy = lambda x, t: F.cross_entropy(x, t, label_smoothing=0.01)",
    "pool": "pool = lambda x: F.max_pool2d(x, 2, return_indices=True, ceil_mode=True)",
    "chain": "chain = lambda x: F.gelu(F.silu(x) * 0.5 + 1, approximate='tanh')",
    "parts": (
        "def parts(x):\\n    top = x.abs().max(-1).values\\n"
        "    return {'sum': x.sum(-1), 'top': top, 'arg': x.argmax(-1), 'big': x > 0}"
    ),
    "upcast": "upcast = lambda x: x.half().softmax(-1).to(x.dtype)",
}


@pytest.mark.parametrize("function", QUICK)
def test_wrong_functions_are_found(tmp_path: Path, function: str) -> None:
    wrong = WRONG[function].replace("\\n", "\n")
    assert not checked(tmp_path, f"{RIGHT}\n{wrong}\n", function).right


# ---- KernelBench's form --------------------------------------------------------------------------

PROBLEM = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
    def forward(self, x):
        return torch.relu(self.gemm(x) - 0.5)
batch_size = 16384
in_features = 16384
out_features = 8192
def get_inputs():
    return [torch.rand(batch_size, in_features)]
def get_init_inputs():
    return [in_features, out_features]
"""
SOLUTION = """
import torch
import torch.nn as nn
class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
    def forward(self, x):
        return torch.relu(x @ self.gemm.weight.T + (self.gemm.bias - 0.5))
"""
LITERAL = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return torch.relu(a @ b)
def get_inputs():
    return [torch.rand(4096, 8192), torch.rand(8192, 2048)]
def get_init_inputs():
    return []
"""


def test_a_problem_of_kernelbench_is_taken_as_it_is(tmp_path: Path) -> None:
    report = checked(tmp_path, SOLUTION, ref=PROBLEM)
    assert report.right, report.text()
    assert {"out", "dx", "dparams.gemm.weight"} <= set(report.ops[0].results)
    unclamped = SOLUTION.replace("torch.relu", "")
    assert not checked(tmp_path, unclamped, ref=PROBLEM).right


def test_sizes_that_stand_in_get_inputs_itself_are_varied(tmp_path: Path) -> None:
    new = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, a, b):\n"
    report = checked(tmp_path, f"{new}        return (a @ b).relu()\n", ref=LITERAL)
    assert report.right, report.text()
    assert not checked(tmp_path, f"{new}        return a @ b\n", ref=LITERAL).right


def test_a_rule_that_raises_is_no_missing_gradient() -> None:
    needs("jax")
    # by itself: where JAX was imported, no test could fork afterwards
    code = f"from {__name__} import rules_that_raise; rules_that_raise()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rules_that_raise() -> None:
    """Have JAX's rules of two kinds raise, and see which of them says that it has no gradient."""
    import jax

    from accel.verify.like.frameworks import Jax, NoGradient

    @jax.custom_vjp
    def own(x: Any) -> Any:
        return 2 * x

    def forward(x: Any) -> Any:
        raise TypeError("a mistake of its own")

    own.defvjp(forward, lambda _, dout: (dout,))

    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 2 * c[1]), (0, x))[1]

    x = np.ones(3, np.float32)
    for function, error in ((own, TypeError), (loop, NoGradient)):
        with pytest.raises(error, match=r"of its own|while_loop"):
            Jax().gradients(
                lambda given, f=function: f(given["x"]), {"x": x}, "float32", ["x"], {"out": x}
            )
