"""``myllm verify --adapters``: the course exercise's conventions, right and wrong files."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from accel.verify.adapters import ADAPTERS, OPS_OF, check_adapter, each_apart
from accel.verify.calls import Verdict, difference
from accel.verify.check import Options
from accel.verify.load import import_file
from dist.cli import main
from tests.helpers import ROOT

RIGHT = (ROOT / "tests" / "helpers" / "course_adapters.py").read_text(encoding="utf-8")


class Wrong(NamedTuple):
    """A mistake in an adapter, and what must be said of it."""

    adapter: str
    old: str
    new: str
    says: str


WRONG = [
    Wrong(
        "run_linear",
        "in_features @ weights.T",
        "in_features @ weights",
        "FAIL run_linear (float32): run_linear raised ValueError",
    ),
    Wrong("run_embedding", "weights[token_ids]", "weights[token_ids - 1]", "FAIL run_embedding"),
    Wrong("run_silu", "(1 + np.exp(-in_features))", "(1 + np.exp(in_features))", "FAIL run_silu"),
    Wrong(
        "run_silu",
        "in_features / (1 +",
        "in_features() / (1 +",
        "FAIL run_silu (float32): run_silu raised TypeError: 'numpy.ndarray' object is not "
        "callable (adapters.py:22)",
    ),
    Wrong(
        "run_swiglu",
        "(run_silu(in_features @ w1_weight.T) * (in_features @ w3_weight.T))",
        "(run_silu(in_features @ w3_weight.T) * (in_features @ w1_weight.T))",
        "w1 and w3 swapped?",
    ),
    Wrong("run_softmax", "e.sum(axis=dim, keep", "e.sum(axis=-1, keep", "FAIL run_softmax"),
    Wrong(
        "run_softmax",
        "np.exp(in_features - in_features.max(axis=dim, keepdims=True))",
        "np.exp(in_features)",
        "is the maximum not taken off?",
    ),
    Wrong(
        "run_rmsnorm",
        "np.sqrt((in_features**2).mean(axis=-1, keepdims=True) + eps)",
        "(np.sqrt((in_features**2).mean(axis=-1, keepdims=True)) + eps)",
        "is eps outside the root?",
    ),
    Wrong("run_cross_entropy", "targets]).mean()", "targets]).sum()", "sum for mean?"),
    Wrong(
        "run_scaled_dot_product_attention",
        "Q @ K.swapaxes(-1, -2) / np.float32(math.sqrt(Q.shape[-1]))",
        "Q @ K.swapaxes(-1, -2)",
        "missing scale?",
    ),
    Wrong(
        "run_scaled_dot_product_attention",
        "np.where(mask, s, -np.inf)",
        "np.where(mask, -np.inf, s)",
        "FAIL run_scaled_dot_product_attention",
    ),
    Wrong(
        "run_rope",
        "in_query_or_key[..., 0::2], in_query_or_key[..., 1::2]",
        "*np.split(in_query_or_key, 2, axis=-1),",
        "FAIL run_rope",
    ),
    Wrong(
        "run_rope",
        "token_positions[..., None] * omega",
        "np.arange(in_query_or_key.shape[-2])[..., None] * omega",
        "is token_positions ignored",
    ),
    Wrong("run_gradient_clipping", "if norm > max_l2_norm:", "if True:", "made longer?"),
    Wrong(
        "run_get_lr_cosine_schedule",
        "min(1, (it - warmup_iters) / (cosine_cycle_iters - warmup_iters))",
        "(it - warmup_iters) / (cosine_cycle_iters - warmup_iters)",
        "does the rate rise again after cosine_cycle_iters?",
    ),
    Wrong("get_adamw_cls", "        self.t += 1", "        self.t = 10**9", "correction missing?"),
    Wrong("get_adamw_cls", "g = p.grad\n", "g = p.grad + self.decay * p.data\n", "FAIL get_adamw"),
    Wrong("get_adamw_cls", "if p.grad is None", "if False", "raises TypeError"),
    Wrong(
        "get_adamw_cls",
        "self.lr * self.decay * p.data",
        "self.decay * p.data",
        "is the decay not multiplied by the learning rate?",
    ),
    Wrong(
        "run_train_bpe",
        "max(pairs, key=lambda pair: (pairs[pair], pair))",
        "min(pairs, key=lambda pair: (-pairs[pair], pair))",
        "do equal counts go to the smaller pair?",
    ),
    Wrong("run_train_bpe", "if special_tokens:", "if False:", "are special tokens not cut out?"),
    Wrong("run_train_bpe", "regex.findall(PAT, part)", "[part]", "is the text not cut into words"),
    Wrong(
        "run_train_bpe",
        "map(regex.escape, special_tokens)",
        "special_tokens",
        "are special tokens not escaped in the pattern that cuts them out?",
    ),
    Wrong("run_train_bpe", r"|\s+(?!\S)|\s+", r"|\s+", "is \\s+(?!\\S) missing in the pattern"),
    Wrong("run_train_bpe", ', newline=""', "", "has \\r\\n become \\n when the file was read?"),
]


@pytest.fixture(autouse=True)
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters here take NumPy's arrays, also where an earlier test imported PyTorch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def check_adapters(module: Any, options: Options) -> dict[str, Verdict]:
    """Hold the adapters of a module that are there to the reference, in this process."""
    found = {name: check_adapter(module, name, options) for name in ADAPTERS}
    return {name: verdict for name, verdict in found.items() if verdict}


def write(folder: Path, text: str) -> Path:
    path = folder / "adapters.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_right_file_passes_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, RIGHT)
    assert main(["verify", "--adapters", str(path), "--examples", "6"]) == 0
    said = capsys.readouterr().out
    assert said.count("ok in ") == len(ADAPTERS) == 13
    assert "13 of 13 adapters right, 0 wrong, 0 missing or not written yet" in said


# with -m slow: seven seconds, for the other mistake of an adapter
LONG = "FAIL run_scaled_dot_product_attention"
MISTAKES = [pytest.param(w, marks=[pytest.mark.slow] if w.says == LONG else []) for w in WRONG]


@pytest.mark.parametrize("wrong", MISTAKES, ids=lambda w: f"{w.adapter}: {w.says}")
def test_a_mistake_is_named(wrong: Wrong, tmp_path: Path) -> None:
    assert RIGHT.count(wrong.old) == 1
    text = RIGHT.replace(wrong.old, wrong.new)
    # the others would only take time
    others = "|".join(name for name in ADAPTERS if name != wrong.adapter)
    text = re.sub(rf"^def ({others})\(", r"def other_\1(", text, flags=re.MULTILINE)
    if wrong.adapter != "run_silu":
        text = text.replace("run_silu(", "other_run_silu(").replace("other_other_", "other_")
    if wrong.adapter != "run_softmax":
        text = text.replace(" run_softmax(", " other_run_softmax(")
    found = check_adapters(import_file(write(tmp_path, text)), Options(examples=20, shrink=False))
    assert set(found) == {wrong.adapter}
    assert not found[wrong.adapter].right
    assert wrong.says in found[wrong.adapter].text


@pytest.mark.parametrize(
    ("adapter", "last", "says"),
    [
        ("run_silu", "in_features *= 2", "argument 1, [["),
        ("run_softmax", "in_features -= 1", "argument 1, [["),
        ("run_linear", "weights *= 2", "argument 3, [["),
        ("run_rope", "token_positions += 0; in_query_or_key *= -1", "argument 4, [["),
        ("run_cross_entropy", "targets += 1", "argument 2, ["),
        (
            "run_scaled_dot_product_attention",
            "mask is not None and np.logical_not(mask, out=mask)",
            "argument 4, [[[[",
        ),
    ],
)
def test_an_argument_that_is_changed_is_told_in_a_sentence(
    adapter: str, last: str, says: str, tmp_path: Path
) -> None:
    """All else is right."""
    text = re.sub(r"\brun_(?=\w+\()", "other_run_", RIGHT)
    head = re.search(rf"def other_{adapter}(\(.*\)):", text)
    assert head
    text += f"""

def {adapter}{head[1]}:
    out = other_{adapter}{head[1].replace("=None", "")}
    {last}
    return out
"""
    found = check_adapters(import_file(write(tmp_path, text)), Options(examples=20))
    verdict = found[adapter]
    assert not verdict.right and verdict.text.startswith(f"FAIL {adapter}: changes its {says}")
    assert verdict.text.endswith(": it is to stay, as callers look at it again")
    assert verdict.text.count("\n") == 0


# as an optimizer of PyTorch: groups of parameters, and state of each
GROUPED = """
import math
import numpy as np

class AdamW:
    def __init__(self, params, lr, betas, eps, weight_decay):
        self.defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.param_groups = [self.defaults | group for group in groups]
        self.state = {}
        self.t = 0

    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                lr, decay, g = group["lr"], group["weight_decay"], p.grad
                state = self.state.setdefault(id(p), {"t": 0, "m": 0.0, "v": 0.0})
                state["t"] += 1
                t = state["t"]
                state["m"] = b1 * state["m"] + (1 - b1) * g
                state["v"] = b2 * state["v"] + (1 - b2) * g**2
                a = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
                p.data -= a * state["m"] / (np.sqrt(state["v"]) + group["eps"])
                p.data -= lr * decay * p.data
                # at the end

def get_adamw_cls():
    return AdamW
"""


ARRAYS = [*OPS_OF, "run_swiglu", "run_rope"]


@pytest.mark.parametrize("adapter", ARRAYS)
def test_a_result_may_be_float64(adapter: str, tmp_path: Path) -> None:
    text = re.sub(r"\brun_(?=\w+\()", "other_run_", RIGHT)
    text += f"\n\ndef {adapter}(*given):\n    return np.float64(other_{adapter}(*given))\n"
    found = check_adapters(import_file(write(tmp_path, text)), Options(examples=8))
    assert found[adapter].right, found[adapter].text


@pytest.mark.parametrize(
    ("want", "got", "says"),
    [
        (None, np.array([[0, 1]]), "is [[0, 1]], should be None"),
        (3, np.array([3, 3]), "is [3, 3], should be 3"),
        (np.array([[0, 1]]), None, "returns None: is there a return?"),
        (np.array([3, 3]), 3, "has shape (), should have (2,)"),
        ([np.array([0, 1]), None], [np.array([0, 1])] * 2, "item 1: is [0, 1], should be None"),
        (3, np.array(3), ""),
        (None, None, ""),
    ],
)
def test_an_array_where_none_is_due_is_a_difference(want: Any, got: Any, says: str) -> None:
    assert difference(want, got, 0.0) == says


def test_an_optimizer_with_groups_passes(tmp_path: Path) -> None:
    found = check_adapters(import_file(write(tmp_path, GROUPED)), Options())
    assert found == {"get_adamw_cls": Verdict(True, 14, "")}


ROOT_OF_V = 'np.sqrt(state["v"])'


def test_eps_may_stand_where_pytorch_has_it(tmp_path: Path) -> None:
    text = GROUPED.replace(ROOT_OF_V, f"{ROOT_OF_V} / math.sqrt(1 - b2**t)").replace(
        "lr * math.sqrt(1 - b2**t) / (", "lr / ("
    )
    verdict = check_adapters(import_file(write(tmp_path, text)), Options())["get_adamw_cls"]
    assert verdict.right, verdict.text


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("setdefault(id(p)", "setdefault(0", "are m and v shared by the parameters?"),
        ("t = state", "self.t += 1; t = self.t #", "is t counted up at each parameter?"),
        ('= group["lr"]', '= self.param_groups[0]["lr"]', "is lr that of the first group"),
        (
            ' group["weight_decay"]',
            ' self.defaults["weight_decay"]',
            "is weight_decay that of the first group",
        ),
        (
            "group in self.param_groups:\n            b1",
            'group in [self.defaults | {"params": g["params"]} for g in self.param_groups]:'
            "\n            b1",
            "are lr and weight_decay those of the first group",
        ),
        (
            ROOT_OF_V + ' + group["eps"]',
            'np.sqrt(state["v"] + group["eps"])',
            "is eps inside the root?",
        ),
        (ROOT_OF_V + ' + group["eps"]', ROOT_OF_V, "is eps left out?"),
        ("# at the end", "g *= 0", "step changes a gradient"),
        ("# at the end", "p.grad = None", "step changes a gradient"),
    ],
)
def test_a_mistake_with_several_parameters_is_named(
    old: str, new: str, says: str, tmp_path: Path
) -> None:
    assert GROUPED.count(old) == 1
    text = GROUPED.replace(old, new)
    verdict = check_adapters(import_file(write(tmp_path, text)), Options())["get_adamw_cls"]
    assert not verdict.right and says in verdict.text
    assert verdict.text.count("hint:") == (not says.startswith("step"))


def test_what_is_expected_is_the_right_result_that_is_nearest(tmp_path: Path) -> None:
    """The first parameter is right, with the decay after the step; the second is not."""
    text = GROUPED.replace(' group["weight_decay"]', ' self.defaults["weight_decay"]')
    found = check_adapters(import_file(write(tmp_path, text)), Options())
    assert "\n    item 1: first difference" in found["get_adamw_cls"].text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("inputs, targets", r"run_cross_entropy\(inputs = \[\[.*\]\], targets = \[.*\]\)"),
        ("*args", r"run_cross_entropy\(\[\[.*\]\], \[.*\]\)"),
    ],
)
def test_a_failure_shows_the_call_that_the_adapter_got(
    given: str, says: str, tmp_path: Path
) -> None:
    text = f"def run_cross_entropy({given}):\n    return 3.0\n"
    found = check_adapters(import_file(write(tmp_path, text)), Options(examples=8))
    said = found["run_cross_entropy"].text
    assert re.search(rf"\n  smallest case: {says}\n  first difference: total", said), said
    assert "head" not in said and "float32: x" not in said


def test_what_is_missing_or_not_written_is_counted_and_not_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
def run_linear(d_in, d_out, weights, in_features):
    return in_features @ weights.T
def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    raise NotImplementedError
def run_softmax(*args, **kwargs):
    raise NotImplementedError
def get_adamw_cls():
    raise NotImplementedError
"""
    path = write(tmp_path, text)
    assert main(["verify", "--adapters", str(path), "--examples", "5"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^run_rope +missing", said, re.MULTILINE)
    assert re.search(r"^run_linear +ok in 5 cases", said, re.MULTILINE)
    assert "1 of 13 adapters right, 0 wrong, 12 missing or not written yet" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_that_name", "does not import: ModuleNotFoundError"),
        ("def f(): pass", "has no adapter: none of run_linear"),
        ("def f(:", "does not import: SyntaxError"),
        (
            "import os\ndef run_silu(x): pass\nos.abort()",
            "importing it ended the process by SIGABRT",
        ),
    ],
)
def test_a_file_that_cannot_be_checked_is_said_in_a_sentence(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    assert main(["verify", "--adapters", str(path)]) == 1
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert main(["verify", "--adapters", str(tmp_path / "none.py")]) == 1
    assert "there is no file" in capsys.readouterr().err


CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("adapter", "body", "says"),
    [
        ("run_rope", CRASH, r"ended the process by SIGSEGV \(.*\) \(adapters\.py:\d+\)"),
        ("run_rope", "import os; os._exit(3)", "ended the process with status 3"),
        ("run_silu", CRASH, r"ended the process by SIGSEGV \(.*\) \(adapters\.py:\d+\)"),
        (
            "run_silu",
            "while True: pass",
            r"gave no answer within 2 s and was stopped \(--timeout\): is there an endless loop\?",
        ),
    ],
)
def test_one_that_ends_the_process_is_wrong_and_the_others_are_checked(
    adapter: str, body: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.sub(rf"\b{adapter}\(", f"right_{adapter}(", RIGHT)  # for the first two calls
    text += f"""
calls = []

def {adapter}(*args):
    calls.append(args)
    if len(calls) > 2:
        {body}
    return right_{adapter}(*args)
"""
    path = write(tmp_path, text)
    timeout = "2" if "while" in body else "120"
    words = ["verify", "--adapters", str(path), "--examples", "3", "--timeout", timeout]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert re.search(rf"^FAIL {adapter}: {says}\n  in {adapter}\W.*\d", said, re.MULTILINE), said
    assert re.findall(r"^(\w+) +FAIL$", said, re.MULTILINE) == [adapter]
    assert re.findall(r"^(\w+) +(?:ok in|FAIL)", said, re.MULTILINE) == list(ADAPTERS)
    assert "12 of 13 adapters right, 1 wrong, 0 missing" in said


def test_the_timeout_is_for_a_call_and_not_for_all(tmp_path: Path) -> None:
    text = RIGHT.replace("    omega =", "    __import__('time').sleep(0.12)\n    omega =")
    text = re.sub(r"^def (?!run_rope)", "def other_", text, flags=re.MULTILINE)
    found = dict(each_apart(write(tmp_path, text), Options(), timeout=2))
    assert {name for name in found if found[name]} == {"run_rope"}
    assert found["run_rope"] == Verdict(True, 20, "")  # 20 calls, 2.4 s


def test_a_verdict_comes_before_the_next_adapter_is_through(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    text = f"""
import os, time

def run_linear(d_in, d_out, weights, in_features):
    print("what an adapter prints is no verdict")
    return in_features @ weights.T

def run_embedding(vocab_size, d_model, weights, token_ids):
    while not os.path.exists({str(flag)!r}):
        time.sleep(0.01)
    return weights[token_ids]
"""
    begun: list[str] = []
    verdicts = each_apart(write(tmp_path, text), Options(examples=3), 60, begun.append)
    assert next(verdicts) == ("run_linear", Verdict(True, 3, "")) and begun == ["run_linear"]
    flag.touch()
    assert next(verdicts) == ("run_embedding", Verdict(True, 3, ""))
    assert [verdict for _, verdict in verdicts] == [None] * 11
    assert begun == list(ADAPTERS)
