"""What a step keeps for its backward, by the bytes that the arena has given out."""

import gc
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

import accel
from accel.bench.training import Training
from accel.cpu import bf16, keeping, memory
from accel.cpu import loss as losses
from dist.plan import activation_bytes
from reference.blocks import Recompute
from reference.config import Config
from reference.model import hidden_forward, loss_backward, loss_forward, start_pass
from reference.params import decoder_layout

LEVELS = [level for level in get_args(Recompute) if level != "auto"]
# widths are multiples of 32, so that nothing is padded
LLAMA = Config(
    vocab_size=96,
    d_model=64,
    n_layers=3,
    n_heads=2,
    n_kv_heads=1,
    d_head=32,
    d_ff=160,
    context_length=1024,
)
GPT2 = replace(
    LLAMA,
    n_kv_heads=2,
    norm="layernorm",
    position="learned",
    ffn="gelu",
    attn_bias=True,
    ffn_bias=True,
)


@pytest.fixture(params=["float32", "bf16"])
def compute(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> memory.Arena:
    """An arena of its own, which small arrays lie in, too."""
    arena = memory.Arena()
    monkeypatch.setattr(memory, "_arena", arena)
    monkeypatch.setattr(memory, "SMALL", 0)
    return arena


def held(arena: memory.Arena) -> int:
    """Return the bytes given out, of arrays that are still there."""
    gc.collect()
    arena.take(1)  # which takes back what has gone
    return arena.held - memory.ALIGNMENT


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_forward_keeps_what_is_planned(
    arena: memory.Arena, compute: str, model: Config, level: Recompute
) -> None:
    ops, layout, (B, T) = accel.load("cpu", compute=compute), decoder_layout(model), (2, 64)
    params = ops.parameters(layout.views(layout.init(0)))
    ids = np.zeros((B, T), np.int32)
    run = start_pass(ops, params, model, layout, recompute=level)
    with ops.step():
        x, cache = hidden_forward(run, ids)
        kept = held(arena)
    planned = activation_bytes(model, B * T, 4, 2 if compute == "bf16" else 4)
    stats = 1 if model.norm == "rmsnorm" else 2
    ends = 4 * B * T * (2 * model.d_model + stats)  # what the last block gives, and its norm
    if level == "block":
        planned["block"] -= planned["none"] // model.n_layers  # none is being made again yet
    assert 0 <= kept - planned[level] - ends < 4 * T + 99
    del x, cache


def test_a_block_that_is_done_is_let_go(arena: memory.Arena, compute: str) -> None:
    ops, layout, (B, T) = accel.load("cpu", compute=compute), decoder_layout(LLAMA), (2, 64)
    params, grads = (ops.parameters(layout.views(layout.init(0))) for _ in range(2))
    ids = np.zeros((B, T), np.int32)
    left = []
    with ops.step():
        _, cache = loss_forward(ops, params, LLAMA, ids, ids)
        loss_backward(1.0, cache, grads, lambda layer: left.append(held(arena)))
    block = activation_bytes(LLAMA, B * T, 4, 2 if compute == "bf16" else 4)["none"] // 3
    assert left[0] - left[1] == left[1] - left[2] == block


def test_a_large_step_makes_norms_and_activations_again(arena: memory.Arena, compute: str) -> None:
    B, T, c = 16, 1024, LLAMA
    assert keeping.recompute(c, B * T) == "norms" and keeping.recompute(c, B * T - 1) == "none"
    Training(accel.load("cpu", compute=compute), c, B, T).step()
    kept = activation_bytes(c, B * T, 4, 2 if compute == "bf16" else 4)["norms"]
    # The last block's feed-forward: what its backward gets, and the gradients of its product and of
    # both halves. In bf16 as much again when these are also packed, beside dx, the norm's output
    # made again and the same packed, and what the activation read is gone.
    more = 3 * c.d_ff + c.d_model
    assert 0 <= arena.most - kept - 4 * more * B * T <= 4 * 0.5 * c.d_model * B * T


def loss(ops: Any, rows: int, V: int, D: int) -> list[Any]:
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal((n, D)).astype(np.float32) for n in (rows, V))
    targets = rng.integers(0, V, rows).astype(np.int32)
    total, cache = ops.linear_cross_entropy_forward(x, head, targets, None, None)
    return [total.total, *ops.linear_cross_entropy_backward(1.0, cache)[:2]]


@pytest.mark.parametrize("rows", [1900, 1700, 600, 480])
def test_the_logits_at_hand_change_no_bits_in_float32(
    arena: memory.Arena, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    V, D = 5000, 32  # chunks of 1,632 rows, and of the product for dhead some 408 to 512
    ops, found, most = accel.load("cpu"), [], []
    for height in (losses.DEPTH, 1 << 30):
        monkeypatch.setattr(losses, "DEPTH", height)
        before = arena.most = held(arena)
        with ops.step():
            found.append(loss(ops, rows, V, D))
        most.append(arena.most - before)
    for part, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(part, whole)
    assert most[0] < 0.5 * most[1] or rows <= 600


def test_the_logits_at_hand_change_no_bits(
    arena: memory.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, V, D = 1900, 5000, 32  # two chunks of 1,536 and 364 rows; 256 or 1,536 at hand
    ops = accel.load("cpu", compute="bf16")
    found, most = [], []
    for elements in (1, bf16.AT_HAND, 1 << 40):
        monkeypatch.setattr(bf16, "AT_HAND", elements)
        arena.most = held(arena)
        before = arena.most
        with ops.step():
            found.append(loss(ops, rows, V, D))
        most.append(arena.most - before)
    for few in found[:2]:
        for ours, all_at_hand in zip(few, found[2], strict=True):
            np.testing.assert_array_equal(ours, all_at_hand)
    assert most[0] == most[1] < 0.6 * most[2]
