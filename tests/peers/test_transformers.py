"""Hugging Face ``transformers``: Llama, Mistral, Qwen, GPT-2, from a config with random weights.

``transformers`` computes norms, RoPE's angles and softmax in float32 whatever it is told, so it is
run in float32 and held to the rule for fast code: its distance from our float64 is at most twice
(gradients three times) that of our own float32, plus c·u·s, for each tensor and each row of its
last axis. u is float32's unit roundoff. s is the norm of the exact result, which is no more than
the norm on absolute values that the rule allows. c = 2√n for the n roundings that a number passes
through one after another, each worth u of its size: being independent they add up to √n, and twice
that leaves room for the worst of many rows. n is about 16 in a block (two norms, four projections,
scores, softmax, mean, activation, two residuals; forward and backward alike), and T for RoPE, whose
angles of up to T radians are rounded to float32 before their sine is taken.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference import ops
from reference.config import Config
from reference.model import logits, loss_backward, loss_forward
from reference.params import decoder_layout
from reference.types import Array
from tests.helpers.rounding import excess
from tests.helpers.torch_weights import ALL, Slot, copy_in, gradients, linear_weight, plain
from tests.helpers.weights import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3

REASON = "needs the optional extra: pip install -e '.[peers]'"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

B, T = 3, 19
# of its four pairs one keeps its frequency, one lies between, two are divided
SCALED = replace(LLAMA, rope_factor=8.0, rope_original_context=150)


class Result(NamedTuple):
    logits: Array  # (B, T, V)
    loss: Array  # () mean
    grads: dict[str, Array]


def ours(config: Config, flat: Array, ids: Array, counted: Array) -> Result:
    layout = decoder_layout(config)
    params, grads = layout.views(flat), layout.views(np.full_like(flat, np.nan))
    z = logits(ops, params, config, ids)
    targets = np.roll(ids, -1, axis=1)
    mask = np.roll(counted, -1, axis=1)
    mask[:, -1] = False  # nothing follows the last token
    loss, cache = loss_forward(ops, params, config, ids, targets, mask)
    loss_backward(1 / loss.n_valid, cache, grads)
    return Result(z, np.asarray(loss.total / loss.n_valid), grads)


def theirs(model: Any, slots: dict[str, Slot], ids: Array, counted: Array) -> Result:
    labels = np.where(counted, ids, -100)
    out = model(input_ids=torch.from_numpy(ids).long(), labels=torch.from_numpy(labels).long())
    out.loss.backward()
    return Result(out.logits.detach().numpy(), out.loss.detach().numpy(), gradients(slots))


def llama(kind: str = "Llama", **options: Any) -> tuple[Any, dict[str, Slot]]:
    """Return a model of the family that Llama began, and where our parameters lie in it."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=LLAMA.vocab_size,
        hidden_size=LLAMA.d_model,
        intermediate_size=LLAMA.d_ff,
        num_hidden_layers=LLAMA.n_layers,
        num_attention_heads=LLAMA.n_heads,
        num_key_value_heads=LLAMA.n_kv_heads,
        max_position_embeddings=LLAMA.context_length,
        rms_norm_eps=LLAMA.norm_eps,
        tie_word_embeddings=True,
        **options,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    slots = {
        "embedding.weight": plain(model.model.embed_tokens.weight),
        "final_norm.gain": plain(model.model.norm.weight),
    }
    for i, layer in enumerate(model.model.layers):
        a, f = layer.self_attn, layer.mlp
        q, k, v = a.q_proj.weight, a.k_proj.weight, a.v_proj.weight
        slots |= {
            f"layers.{i}.attention_norm.gain": plain(layer.input_layernorm.weight),
            f"layers.{i}.attention.wqkv": Slot(
                [(q, rope_rows(q)), (k, rope_rows(k)), (v, ALL)], transposed=True
            ),
            f"layers.{i}.attention.wo": linear_weight(a.o_proj),
            f"layers.{i}.ffn_norm.gain": plain(layer.post_attention_layernorm.weight),
            f"layers.{i}.ffn.w_gate_up": linear_weight(f.gate_proj, f.up_proj),
            f"layers.{i}.ffn.w_down": linear_weight(f.down_proj),
        }
        if kind == "Qwen2":
            q, k, v = a.q_proj.bias, a.k_proj.bias, a.v_proj.bias
            slots[f"layers.{i}.attention.bqkv"] = Slot(
                [(q, rope_rows(q)), (k, rope_rows(k)), (v, ALL)], transposed=False
            )
        if kind == "Qwen3":
            for norm in ("q_norm", "k_norm"):
                gain = getattr(a, norm).weight
                slots[f"layers.{i}.attention.{norm}.gain"] = Slot(
                    [(gain, rope_rows(gain))], transposed=False
                )
    return model, slots


def llama3() -> tuple[Any, dict[str, Slot]]:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": LLAMA.rope_base,
        "factor": SCALED.rope_factor,
        "low_freq_factor": SCALED.rope_low_freq_factor,
        "high_freq_factor": SCALED.rope_high_freq_factor,
        "original_max_position_embeddings": SCALED.rope_original_context,
    }
    return llama(rope_parameters=scaling)


def mistral() -> tuple[Any, dict[str, Slot]]:
    return llama("Mistral", sliding_window=MISTRAL.window)


def qwen2() -> tuple[Any, dict[str, Slot]]:
    return llama("Qwen2")


def qwen3() -> tuple[Any, dict[str, Slot]]:
    # its layers from max_window_layers on have the window
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return llama("Qwen3", head_dim=LLAMA.d_head, **windows)


def rope_rows(weight: Any) -> Any:
    """Return which of Llama's rows are our columns 0, 1, 2, …, head by head.

    Llama turns coordinate j together with j + d/2 where we turn 2j with 2j + 1.
    """
    d = LLAMA.d_head
    within = torch.arange(d).reshape(2, d // 2).T.flatten()  # 0, d/2, 1, d/2 + 1, …
    heads = torch.arange(0, weight.shape[0], d)
    return (heads[:, None] + within).flatten()


def gpt2() -> tuple[Any, dict[str, Slot]]:
    config = transformers.GPT2Config(
        vocab_size=GPT2.vocab_size,
        n_positions=GPT2.context_length,
        n_embd=GPT2.d_model,
        n_layer=GPT2.n_layers,
        n_head=GPT2.n_heads,
        n_inner=GPT2.d_ff,
        layer_norm_epsilon=GPT2.norm_eps,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).float().eval()
    body = model.transformer
    slots = {
        "embedding.weight": plain(body.wte.weight),
        "position.weight": plain(body.wpe.weight),
        "final_norm.gain": plain(body.ln_f.weight),
        "final_norm.bias": plain(body.ln_f.bias),
    }
    for i, layer in enumerate(body.h):
        # GPT-2's Conv1D keeps (in, out), as we do, and q, k, v side by side
        slots |= {
            f"layers.{i}.attention_norm.gain": plain(layer.ln_1.weight),
            f"layers.{i}.attention_norm.bias": plain(layer.ln_1.bias),
            f"layers.{i}.attention.wqkv": plain(layer.attn.c_attn.weight),
            f"layers.{i}.attention.bqkv": plain(layer.attn.c_attn.bias),
            f"layers.{i}.attention.wo": plain(layer.attn.c_proj.weight),
            f"layers.{i}.attention.bo": plain(layer.attn.c_proj.bias),
            f"layers.{i}.ffn_norm.gain": plain(layer.ln_2.weight),
            f"layers.{i}.ffn_norm.bias": plain(layer.ln_2.bias),
            f"layers.{i}.ffn.w_up": plain(layer.mlp.c_fc.weight),
            f"layers.{i}.ffn.b_up": plain(layer.mlp.c_fc.bias),
            f"layers.{i}.ffn.w_down": plain(layer.mlp.c_proj.weight),
            f"layers.{i}.ffn.b_down": plain(layer.mlp.c_proj.bias),
        }
    return model, slots


def compare(config: Config, model: Any, slots: dict[str, Slot], seed: int) -> dict[str, float]:
    """Return, for the logits, the loss and every gradient, the error over what is allowed."""
    rng = np.random.default_rng(seed)
    layout = decoder_layout(config)
    flat = layout.init(seed) + 0.1 * rng.standard_normal(layout.size, dtype=np.float32)
    ids = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    counted = rng.random((B, T)) < 0.7

    copy_in(slots, layout.views(flat))
    peer = theirs(model, slots, ids, counted)
    own = ours(config, flat, ids, counted)
    exact = ours(config, flat.astype(np.float64), ids, counted)
    c = 2 * math.sqrt(16 * config.n_layers + (T if config.position == "rope" else 0))
    ratios = {
        "logits": excess(peer.logits, own.logits, exact.logits, factor=2, c=c),
        "loss": excess(*(r.loss.reshape(1) for r in (peer, own, exact)), factor=2, c=c),
    }
    for name in slots:
        tensors = (r.grads[name] for r in (peer, own, exact))
        ratios[name] = excess(*tensors, factor=3, c=c)
    return ratios


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("config", "peer"),
    [
        *((LLAMA, llama), (SCALED, llama3), (MISTRAL, mistral), (QWEN2, qwen2)),
        *((QWEN3, qwen3), (GPT2, gpt2)),
    ],
    ids=["Llama", "Llama 3", "Mistral", "Qwen2", "Qwen3", "GPT-2"],
)
def test_transformers_agrees_to_float32_rounding(config: Config, peer: Any, seed: int) -> None:
    model, slots = peer()
    ratios = compare(config, model, slots, seed)
    assert max(ratios.values()) <= 1, ratios


def test_llama_without_the_permutation_of_rope_is_another_function() -> None:
    model, slots = llama()
    slots = {
        name: slot._replace(parts=[(parameter, ALL) for parameter, _ in slot.parts])
        for name, slot in slots.items()
    }
    assert compare(LLAMA, model, slots, seed=0)["logits"] > 1_000
