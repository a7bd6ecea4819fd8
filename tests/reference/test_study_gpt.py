"""The GPT on one page is the reference's model, number by number, and one token is followed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import model, ops
from reference.config import Config
from reference.params import decoder_layout
from reference.study import gpt, one_token, one_token_page
from tests.helpers import ROOT

NAMES = {  # of a block's parameters on the page, and in the reference
    "qkv": "attention.wqkv",
    "out": "attention.wo",
    "up": "ffn.w_up",
    "down": "ffn.w_down",
    "1.gain": "attention_norm.gain",
    "1.bias": "attention_norm.bias",
    "2.gain": "ffn_norm.gain",
    "2.bias": "ffn_norm.bias",
}


def reference_name(name: str) -> str:
    """Return the reference's name of a parameter of the page."""
    whole = {"E": "embedding.weight", "places": "position.weight"}
    whole |= {f"last.{x}": f"final_norm.{x}" for x in ("gain", "bias")}
    if name in whole:
        return whole[name]
    layer, _, rest = name.partition(".")
    return f"layers.{layer}.{NAMES[rest]}"


def config_of(V: int, T: int, D: int, L: int, H: int) -> Config:
    return Config(
        vocab_size=V,
        d_model=D,
        n_layers=L,
        n_heads=H,
        n_kv_heads=H,
        d_head=D // H,
        d_ff=4 * D,
        context_length=T,
        norm="layernorm",
        position="learned",
        ffn="gelu_tanh",
    )


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
)
def test_loss_and_gradients_are_the_reference_s(seed: int, B: int, T: int, L: int, H: int) -> None:
    V, room, D = 7, 6, 8
    rng = np.random.default_rng(seed)
    p = {n: x + 0.3 * rng.standard_normal(x.shape) for n, x in gpt.init(V, room, D, L, rng).items()}
    ids, targets = rng.integers(0, V, (2, B, T), dtype=np.int32)
    loss, d = gpt.loss_and_gradients(p, ids, targets, H)

    config = config_of(V, room, D, L, H)
    layout = decoder_layout(config)
    params, grads = (layout.views(np.full(layout.size, np.nan)) for _ in range(2))
    assert {reference_name(name) for name in p} == set(params)
    for name, x in p.items():
        params[reference_name(name)][...] = x
    total, cache = model.loss_forward(ops, params, config, ids, targets)
    assert loss == pytest.approx(total.total / total.n_valid, abs=1e-12)
    model.loss_backward(1 / total.n_valid, cache, grads)
    for name, dx in d.items():
        np.testing.assert_allclose(dx, grads[reference_name(name)], atol=1e-12, err_msg=name)


def test_a_step_of_adamw_is_the_reference_s() -> None:
    rng = np.random.default_rng(0)
    p = gpt.init(5, 4, 8, 1, rng)
    layout = decoder_layout(config_of(5, 4, 8, 1, 2))
    master, grad, m, v = (np.zeros(layout.size) for _ in range(4))
    for name, x in p.items():
        layout.views(master)[reference_name(name)][...] = x
    ours_m, ours_v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for step in (1, 2, 3):
        d = {name: rng.standard_normal(x.shape) for name, x in p.items()}
        for name, dx in d.items():
            layout.views(grad)[reference_name(name)][...] = dx
        gpt.adamw(p, d, ours_m, ours_v, step, lr=0.1)
        ops.adamw(
            master,
            m,
            v,
            grad,
            step=step,
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.01,
            n_decayed=layout.n_decayed,
        )
    for name, x in p.items():
        np.testing.assert_allclose(x, layout.views(master)[reference_name(name)], atol=1e-12)


def test_the_text_is_the_zen_and_reading_it_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Namespaces are one honking great idea" in gpt.zen()
    assert capsys.readouterr().out == ""


def test_the_page_needs_nothing_of_ours(tmp_path: Path) -> None:
    shutil.copy(gpt.__file__, tmp_path / "alone.py")
    code = "import sys, alone; alone.zen(); print('reference' in sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_training_computes_in_single_precision_throughout() -> None:
    (_, _, p), *_ = gpt.train(np.arange(40) % 5, 5, steps=1)
    z, _ = gpt.forward(p, np.zeros((1, 3), int), H=4)
    assert z.dtype == np.float32


# ---- one token -----------------------------------------------------------------------------------

STUDY = ROOT / "reference" / "study"
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.mark.parametrize(
    ("kept", "made"),
    [("one_token.md", one_token_page.page), ("pictures/one_token.svg", one_token_page.shapes)],
)
def test_the_page_of_one_token_is_what_a_run_writes(kept: str, made: Callable[[], str]) -> None:
    page, again = (STUDY / kept).read_text(encoding="utf-8"), made()
    assert NUMBER.sub("#", page) == NUMBER.sub("#", again)
    ours, theirs = ([float(n) for n in NUMBER.findall(text)] for text in (page, again))
    np.testing.assert_allclose(ours, theirs, atol=1.5e-3)  # the last digit may be rounded elsewhere
    assert len(page.encode()) <= 60_000


def test_the_run_of_one_token_is_the_model_s() -> None:
    p, ids = one_token.parameters(), np.array([4, 3, 0], np.int32)
    forward, backward = one_token.run(p, ids[:-1], ids[1:])
    loss, cache = model.loss_forward(ops, p, one_token.CONFIG, ids[None, :-1], ids[None, 1:])
    layout = decoder_layout(one_token.CONFIG)
    grads = layout.views(np.full(layout.size, np.nan))
    model.loss_backward(1 / 2, cache, grads)
    assert float(forward[-1].value) == pytest.approx(loss.total / 2, abs=1e-12)
    np.testing.assert_allclose(backward[-1].value, grads["embedding.weight"], atol=1e-12)
    named = {step.name: step.value for step in [*forward, *backward]}
    for x, dy, name in (
        ("n", "dqkv", "attention.wqkv"),
        ("o", "dr", "attention.wo"),
        ("m", "dg du", "ffn.w_gate_up"),
        ("h", "dw", "ffn.w_down"),
    ):  # each gradient on the way is the right one, as those of the matrices follow from them
        np.testing.assert_allclose(named[x].T @ named[dy], grads[f"layers.0.{name}"], atol=1e-12)


def test_the_shapes_written_are_those_of_the_numbers() -> None:
    sizes = {"T": 2, "V": 5, "D": 4, "3D": 12, "F": 3, "2F": 6}
    p, ids = one_token.parameters(), np.array([4, 3, 0])
    for steps in one_token.run(p, ids[:-1], ids[1:]):
        for step in steps:
            assert step.value.shape == tuple(sizes[letter] for letter in step.shape.split()), step


def test_merges_of_the_six_bytes() -> None:
    lines, vocabulary, parts = one_token.merges("banana", 2)
    assert vocabulary == ["a", "b", "n", "an", "ban"] and parts == ["ban", "an", "a"]
    assert lines[0] == "a + n occurs 2 times:  b an an a"
    assert one_token.merges("aaaaa", 1)[2] == ["aa", "aa", "a"]
