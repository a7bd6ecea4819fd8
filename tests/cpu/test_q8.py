"""The mode q8_0: matrices rounded to eight bits a weight, and decoded from there."""

from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu import decode, q8
from accel.q8_0 import to_blocks
from dist.numbers import from_q8_0, to_q8_0
from reference import ops as reference
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from tests.helpers.models import MODELS, B, toy, weights

CONFIGS = {
    **MODELS,
    "wide": toy(MYLLM_1B, d_model=200, d_ff=391, vocab_size=1031, d_head=18, n_layers=1),
    "whole blocks": toy(MYLLM_1B, d_model=128, d_ff=96, vocab_size=64, d_head=32),
}


@pytest.mark.parametrize("name", [*CONFIGS, "small"])
def test_decoding_is_the_reference_s_with_the_rounded_matrices(name: str) -> None:
    config, ops = CONFIGS.get(name, CONFIGS["wide"]), accel.load("cpu", compute="q8_0")
    views = decoder_layout(config).views(weights(config, np.float32))
    if name == "small":  # so small that float16 has fewer digits for the scales
        views = {n: w * np.float32(1e-3 if w.ndim == 2 else 1) for n, w in views.items()}
        w = views["layers.0.attention.wo"]
        assert (np.abs(w).max(axis=0) / 127 < np.finfo(np.float16).tiny).any()
    params = ops.parameters(views)
    exact = {n: np.asarray(w, np.float64) for n, w in params.items()}
    ours, theirs = ops.kv_cache(params, config, B, 12), reference.kv_cache(exact, config, B, 12)
    rng = np.random.default_rng(0)
    for step in range(8):
        token = rng.integers(0, config.vocab_size, B).astype(np.int32)
        position: Any = step if step < 5 else np.array([step, step - 3, step + 2])
        got = ops.decode_step(params, config, token, ours, position)
        expected = reference.decode_step(exact, config, token, theirs, position)
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_there_is_room_for_the_logits_of_a_vocabulary_that_no_tile_divides() -> None:
    config = toy(MYLLM_1B, vocab_size=20_001)
    parts = decode._work(config, 3, 12)
    assert parts["end"] - parts["partial"] >= 3 * 20_032


def test_plain_weights_are_rounded_on_the_way() -> None:
    config, ops = CONFIGS["myllm"], accel.load("cpu", compute="q8_0")
    plain = decoder_layout(config).views(weights(config, np.float32))
    token, logits = np.array([3, 5], np.int32), []
    for params in (
        plain,
        ops.parameters(plain),
        {**ops.parameters(plain), "final_norm.gain": plain["final_norm.gain"]},
    ):
        cache = ops.kv_cache(params, config, 2, 4)
        logits.append(ops.decode_step(params, config, token, cache, 0))
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


@pytest.mark.parametrize("shape", [(64, 96), (32, 31), (128, 1)])
def test_matrices_are_those_of_a_gguf_file(shape: tuple[int, int]) -> None:
    w = np.random.default_rng(0).standard_normal(shape, np.float32)
    w[:, 0] = 0  # a block without a scale
    table = np.ascontiguousarray(w.T)
    stored = from_q8_0(to_q8_0(table))
    made = q8.parameters({"layers.0.ffn.w_down": w, "head.weight": table, "final_norm.gain": w[0]})
    np.testing.assert_array_equal(made["layers.0.ffn.w_down"].T, stored)
    np.testing.assert_array_equal(made["head.weight"], stored)
    assert made["final_norm.gain"].base is w


def test_a_number_is_off_by_half_a_step_of_its_block_at_most() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 32), np.float32) * np.float32(1e3)
    d, q = to_blocks(x)
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    # and by what float16 makes of the scale
    assert (np.abs(d[..., None].astype(np.float32) * q - x) <= step * (0.5 + 127 * 2**-11)).all()
    assert d.dtype == np.float16 and q.dtype == np.int8 and np.abs(q).max() == 127


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e7])
def test_a_weight_that_cannot_be_rounded_is_named(value: float) -> None:
    w = np.ones((40, 40), np.float32)
    w[3, 5] = value
    with pytest.raises(
        ValueError, match=r"layers\.0\.ffn\.w_up holds .*Q8_0 goes to 8,319,008: choose"
    ):
        q8.parameters({"layers.0.ffn.w_up": w})


def test_other_backends_say_what_to_take_instead() -> None:
    with pytest.raises(ValueError, match="'cuda' has no mode q8_0; choose bf16, or backend cpu"):
        accel.load("cuda", compute="q8_0")
    with pytest.raises(ValueError, match="leave compute at 'float32'"):
        accel.load("reference", compute="q8_0")
