"""``--like`` and PyTorch: gradients that are missing, and what is kept between calls."""

import json
from pathlib import Path

import pytest

from accel.verify import VerificationError
from accel.verify.report import Report
from accel.verify.subject import SubjectError
from dist.cli import main
from tests.helpers.like import checked

pytest.importorskip("torch", reason="PyTorch is not installed")

TANH = """
import torch
SHAPES = {"tanh": {"x": "N D"}}
def tanh(x):
    return torch.tanh(x)
"""


# ---- no gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new",
    [
        "import torch\ndef tanh(x):\n    return torch.tanh(x.detach())",
        "import torch\n@torch.no_grad()\ndef tanh(x):\n    return torch.tanh(x)",
        "import torch\ndef tanh(x):\n    return torch.tanh(x).detach().numpy()",
        "import numpy as np\ndef tanh(x):\n    return np.tanh(x)",
    ],
)
def test_a_gradient_that_the_reference_alone_has_is_not_tried(tmp_path: Path, new: str) -> None:
    report = checked(tmp_path, new, ref=TANH, examples=6)
    assert report.right and not report.ok, report.text()
    (said,) = json.loads(json.dumps(report.to_dict()))["untried"]
    assert said.startswith("tanh: no gradient was checked: ")
    report = checked(tmp_path, new, ref=TANH, examples=6, partial=True)
    assert report.ok and report.untried


def test_a_gradient_that_the_reference_has_not_is_no_matter(tmp_path: Path) -> None:
    ref = TANH.replace("torch.tanh(x)", "torch.tanh(x.detach())")
    for new in (ref, TANH, "import numpy as np\ndef tanh(x):\n    return np.tanh(x)"):
        report = checked(tmp_path, new, ref=ref, examples=6)
        assert report.ok and any("the reference has none" in note for note in report.notes)
    ref = TANH.replace("torch.tanh(x)", "x.argmax(-1)")
    new = "import numpy as np\ndef tanh(x):\n    return np.argmax(x, -1)"
    assert checked(tmp_path, new, ref=ref, examples=6).ok


def test_a_line_in_a_test_asks_for_the_gradient_unless_it_is_partial() -> None:
    import torch

    from accel.verify.torch import check

    def forward_only(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.detach())

    with pytest.raises(VerificationError, match="no gradient was checked"):
        check(forward_only, like=torch.tanh, x="N D", examples=4)
    report: Report = check(forward_only, like=torch.tanh, x="N D", examples=4, partial=True)
    assert report.untried


def test_the_command_s_status_says_that_a_gradient_was_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref.py").write_text(TANH, encoding="utf-8")
    new = TANH.replace("torch.tanh(x)", "torch.tanh(x.detach())")
    (tmp_path / "new.py").write_text(new, encoding="utf-8")
    words = ["verify", "--like", "ref.py", "--module", "new.py", "--examples", "4", "--json"]
    assert main(words) == 3
    (found,) = json.loads(capsys.readouterr().out)
    assert [said[:34] for said in found["untried"]] == ["tanh: no gradient was checked: its"]
    assert main([*words, "--partial"]) == 0


# ---- what is kept between calls ------------------------------------------------------------------

SILU = """
import torch
SHAPES = {"silu": {"x": "N D"}}
def silu(x):
    return torch.nn.functional.silu(x)
"""
KEPT = """
import torch
class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)
    @staticmethod
    def backward(ctx, dout):
        x, = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dout * s * (1 + x * (1 - s))
silu = Silu.apply
"""
WORKSPACE = """        kept = workspace.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return kept.copy_(dout * s * (1 + x * (1 - s)))
workspace = {}
"""
MISTAKES = {
    "on the class": (
        KEPT.replace("ctx.save_for_backward(x)", "Silu.x = x").replace("x, = ctx.saved_tensors",
                                                                     "x = Silu.x"),
        ("dx", "value"),
        "no other forward is called in between",
    ),
    "a workspace": (
        KEPT.replace("        return dout * s * (1 + x * (1 - s))\n", WORKSPACE),
        ("dx", "overwritten"),
        "",
    ),
    "saved, and written into": (
        KEPT.replace("ctx.save_for_backward(x)", "ctx.x = x.clone()").replace(
            "x, = ctx.saved_tensors", "x = ctx.x"
        ).replace("return dout * s * (1 + x * (1 - s))",
                  "d = s * (1 + x * (1 - s))\n        return x.copy_(d).mul_(dout).clone()"),
        ("dx", "second"),
        "a second backward of the same forward",
    ),
}  # fmt: skip


def test_a_function_that_keeps_nothing_passes(tmp_path: Path) -> None:
    report = checked(tmp_path, KEPT, ref=SILU, dtypes=("float32", "bf16"), examples=9)
    assert report.ok, report.text()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_kept_between_a_forward_and_its_backward_is_found(
    tmp_path: Path, mistake: str
) -> None:
    new, key, hint = MISTAKES[mistake]
    report = checked(tmp_path, new, ref=SILU, examples=9)
    assert [(f.name, f.kind) for f in report.failures] == [key], report.text()
    assert hint in report.text()


BY_HAND = """
import numpy as np
def silu(x):
    return x / (1 + np.exp(-x))
def silu_backward(dout, x):
    s = 1 / (1 + np.exp(-x))
    return dout * s * (1 + x * (1 - s))
"""
KEPT_BY_HAND = {
    "a workspace": (
        "kept, right = {}, silu_backward\ndef silu_backward(dout, x):\n"
        "    out = kept.setdefault((x.shape, x.dtype), np.empty(x.shape, x.dtype))\n"
        "    out[...] = right(dout, x)\n    return out\n",
        ("dx", "overwritten"),
    ),
    "by the input": (
        "kept, right = {}, silu_backward\ndef silu_backward(dout, x):\n"
        "    return kept.setdefault((x.tobytes(), x.dtype), right(dout, x)).copy()\n",
        ("dx", "second"),
    ),
}


@pytest.mark.parametrize("mistake", KEPT_BY_HAND)
def test_what_a_backward_by_hand_keeps_is_found(tmp_path: Path, mistake: str) -> None:
    more, key = KEPT_BY_HAND[mistake]
    assert checked(tmp_path, BY_HAND, ref=SILU, examples=4).ok
    report = checked(tmp_path, BY_HAND + more, ref=SILU, examples=4)
    assert key in [(f.name, f.kind) for f in report.failures], report.text()


# ---- sizes ---------------------------------------------------------------------------------------

HEADS = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        assert n_embd % n_head == 0
        self.out = nn.Linear(n_embd, n_embd)
    def forward(self, x):
        return self.out(x)
batch_size = 16
seq_len = 64
n_embd = 96
n_head = 8
def get_inputs():
    return [torch.rand(batch_size, seq_len, n_embd)]
def get_init_inputs():
    return [n_embd, n_head]
"""
GROUPS = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(num_groups, out_features)
    def forward(self, x):
        return self.norm(self.gemm(x))
batch_size = 128
in_features = 512
out_features = 256
num_groups = 8
def get_inputs():
    return [torch.rand(batch_size, in_features)]
def get_init_inputs():
    return [in_features, out_features, num_groups]
"""


@pytest.mark.parametrize("problem", [HEADS, GROUPS])
def test_sizes_that_a_problem_cannot_have_together_are_not_drawn(
    tmp_path: Path, problem: str
) -> None:
    new = problem.replace("class Model(", "class ModelNew(")
    report = checked(tmp_path, new, ref=problem, examples=12)
    assert report.right, report.text()


def test_a_problem_that_refuses_a_real_run_is_a_sentence(tmp_path: Path) -> None:
    refuses = "        if x.device.type == 'cpu':\n            raise ValueError('no CPU here')\n"
    problem = GROUPS.replace("    def forward(self, x):\n", f"    def forward(self, x):\n{refuses}")
    new = GROUPS.replace("class Model(", "class ModelNew(")
    with pytest.raises(SubjectError, match=r"ref.py: the reference raised ValueError: no CPU here"):
        checked(tmp_path, new, ref=problem, examples=2)


def test_a_module_that_refuses_its_sizes_is_a_sentence(tmp_path: Path) -> None:
    ref = HEADS + 'SHAPES = {"Model": {"init": ("C", "H"), "x": "B T C, H <= 8"}}\n'
    new = HEADS.replace("class Model(", "class ModelNew(")
    with pytest.raises(SubjectError, match=r"raised \w+: .*do the shapes that are declared hold"):
        checked(tmp_path, new, "Model=ModelNew", ref=ref)
    ref = ref.replace("H <= 8", "C % H == 0")
    report = checked(tmp_path, new, "Model=ModelNew", ref=ref, examples=6)
    assert report.ok, report.text()


# ---- what is said --------------------------------------------------------------------------------

BACKWARD = """
import torch
def silu_bwd(dout, x):
    s = torch.sigmoid(x)
    return dout * s * (1 + x * (1 - s))
"""


@pytest.mark.parametrize(
    "ref",
    [
        BACKWARD + 'SHAPES = {"silu_bwd": {"dout": "N D", "x": "N D"}}\n',
        BACKWARD + 'EXAMPLES = {"silu_bwd": (torch.ones(3, 4), torch.ones(3, 4))}\n',
        HEADS.replace("x)", "dout)"),
    ],
)
def test_an_input_may_not_have_the_name_of_a_cotangent(tmp_path: Path, ref: str) -> None:
    new = ref.replace("class Model(", "class ModelNew(")
    with pytest.raises(SubjectError, match=r"ref.py: .*dout .* call that input something else"):
        checked(tmp_path, new, ref=ref)


@pytest.mark.parametrize("code", ["silu(x)[:, :1]", "silu(x).sum(-1)", "silu(x)[None]"])
def test_a_wrong_shape_is_said_rather_than_what_the_backward_raises(
    tmp_path: Path, code: str
) -> None:
    new = SILU.replace("silu(x)\n", f"{code}\n").replace(f"def {code}", "def silu(x)")
    report = checked(tmp_path, new, ref=SILU, examples=6)
    assert {failure.kind for failure in report.failures} == {"shape"}, report.text()
    assert "out has shape" in report.text() and "should have" in report.text()


@pytest.mark.parametrize("grows", [False, True])
def test_a_module_may_write_into_its_buffers_and_not_into_its_weights(grows: bool) -> None:
    import torch

    from accel.verify.torch import check

    class Net(torch.nn.Module):
        def __init__(self, grows: bool = False) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
            self.grows = grows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(self.linear(x))
            if self.grows:
                self.linear.weight.data.mul_(1 + 2**-20)
            return y

    report: Report = check(
        Net(grows), like=Net(), x="N 4, N >= 2", examples=4, dtypes=["float32"], raises=False
    )
    assert report.ok != grows, report.text()
    assert ("params.linear.weight, an argument, was written into" in report.text()) == grows


def test_a_module_that_somebody_made_stays_as_it_is() -> None:
    import torch

    from accel.verify.torch import check

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()

    new, like = made(), made().train()
    before = [
        {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for module in (new, like)
    ]
    check(new, like=like, input="N 4, N >= 2", examples=4, dtypes=["bf16"], raises=False)
    for module, state in zip((new, like), before, strict=True):
        for name, tensor in module.state_dict().items():
            assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("kind", ["function", "module", "wrong"])
def test_a_program_s_generator_stays_where_it_was(kind: str) -> None:
    import torch

    from accel.verify.torch import check

    torch.manual_seed(3)
    torch.rand(5)
    before, few = torch.get_rng_state(), {"dtypes": "float32", "examples": 3, "raises": False}
    if kind == "module":
        check(torch.nn.Linear, like=torch.nn.Linear, init=("D", 3), input="B D", **few)
    else:
        check(torch.sin if kind == "wrong" else torch.tanh, like=torch.tanh, x="N D", **few)
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 3


def test_a_precision_may_be_named_by_itself_and_one_that_is_none_is_said() -> None:
    import torch

    from accel.verify.torch import check

    report: Report = check(torch.tanh, like=torch.tanh, x="N D", dtypes="bf16", examples=2)
    assert [op.dtype for op in report.ops] == ["bf16"]
    with pytest.raises(SubjectError, match=r"there is no dtype 'fp16'; known: float32, .*float16"):
        check(torch.tanh, like=torch.tanh, x="N D", dtypes=["fp16"])


def hints_of(report: Report) -> list[str]:
    return [hint for failure in report.failures for hint in failure.hints]


def test_a_stale_result_is_not_guessed_where_the_first_call_is_wrong_too(tmp_path: Path) -> None:
    ref = TANH.replace("torch.tanh(x)", "-x")
    new = TANH.replace("torch.tanh(x)", "x.float() * 2")
    report = checked(tmp_path, new, ref=ref, dtypes=("bf16",), examples=12)
    kinds = {(f.name, f.kind) for f in report.failures}
    assert ("out", "value") in kinds <= {("out", "value"), ("out", "dtype")}, report.text()
    assert not any("stale" in hint for hint in hints_of(report)), report.text()


@pytest.mark.parametrize("dtypes", [("bf16",), ("float32", "bf16")])
def test_roundings_are_not_blamed_for_what_is_wrong_in_float32_too(
    tmp_path: Path, dtypes: tuple[str, ...]
) -> None:
    new = TANH.replace("torch.tanh(x)", "torch.tanh(x) * 1.5")
    report = checked(tmp_path, new, ref=TANH, dtypes=dtypes, examples=12)
    assert "bf16" in {failure.dtype for failure in report.failures}, report.text()
    assert not any("follows from the roundings" in hint for hint in hints_of(report))


@pytest.mark.parametrize(("dtype", "factor"), [("bf16", 1.02), ("float16", 1.003)])
def test_a_factor_within_16_bits_roundings_is_found_in_many_cases(
    tmp_path: Path, dtype: str, factor: float
) -> None:
    silu = "(torch.nn.functional.silu(x.float()) * {}).to(x.dtype)"
    right, wrong = (TANH.replace("torch.tanh(x)", silu.format(f)) for f in (1, factor))
    ref = TANH.replace("torch.tanh(x)", "x * torch.sigmoid(x)")
    report = checked(tmp_path, right, ref=ref, dtypes=(dtype,), examples=40)
    assert report.ok, report.text()
    report = checked(tmp_path, wrong, ref=ref, dtypes=(dtype,), examples=40)
    assert {(f.name, f.kind) for f in report.failures} == {("out", "leans"), ("dx", "leans")}
    assert f"it is {factor} ± " in report.text()


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_a_function_that_leans_by_itself_is_right_beside_itself(tmp_path: Path, dtype: str) -> None:
    thirds = TANH.replace(
        "return torch.tanh(x)",
        "c = torch.tensor(1 / 3, dtype=x.dtype)\n    for _ in range(12): x = x * c\n    return x",
    )
    small = TANH.replace("torch.tanh(x)", "(x * 1e-6) ** 2")  # which float16 does not have
    for text in (thirds, small):
        report = checked(tmp_path, text, ref=text, dtypes=(dtype,), examples=40)
        assert report.ok, report.text()


def test_nothing_is_guessed_where_nothing_is_known(tmp_path: Path) -> None:
    ref = """
import torch
SHAPES = {"f": {"q": "N D", "k": "N D"}}
def f(q, k):
    return torch.softmax(q * k, -1)
"""
    new = """
import torch
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k):
        p = torch.softmax(q * k, -1)
        ctx.save_for_backward(q, k, p)
        return p
    @staticmethod
    def backward(ctx, dout):
        q, k, p = ctx.saved_tensors
        dz = p * (dout - (dout * p).sum(-1, keepdim=True))
        return dz * k * (torch.nan if q.abs().max() > 1e6 else 1), dz * q
f = F.apply
"""
    report = checked(tmp_path, new, ref=ref, examples=8, shrink=True)
    assert "dq" in {failure.name for failure in report.failures}, report.text()
    assert "has the right value" not in report.text(), report.text()
    assert not any("ignored?" in hint for hint in hints_of(report)), report.text()


def test_a_line_in_a_test_says_how_it_is_run_again(tmp_path: Path) -> None:
    import torch

    from accel.verify.torch import check

    report = check(lambda x: -x, like=torch.tanh, x="N D", seed=3, examples=4, raises=False,
                   save=tmp_path)  # fmt: skip
    assert not report.right and "<check" not in report.text()
    assert "again: the same check(…, dtypes=['float32'], seed=3, examples=4)" in report.text()
