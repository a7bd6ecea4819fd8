"""A window on attention and QK-norm, in whole models: what a token sees, and what is kept of it."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reference import model, ops
from reference.blocks import self_attention_forward
from reference.config import Config
from reference.generate import generate
from reference.kv import room
from reference.model import start_pass
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B
from reference.types import Array, KVCache
from tests.helpers.models import encoder_decoder, toy

CONTEXT = 30
WINDOWS = {
    "one for all": toy(MYLLM_1B, window=4, context_length=CONTEXT),
    "by layer": toy(MYLLM_1B, n_layers=4, window=(3, 0, 7, 1), context_length=CONTEXT),
    "with QK-norm": toy(MYLLM_1B, qk_norm=True, window=(0, 5), context_length=CONTEXT),
    "learned positions": toy(GPT2_SMALL, window=(5, 2), context_length=CONTEXT),
    "ALiBi": toy(MYLLM_1B, position="alibi", window=(4, 6), context_length=CONTEXT),
    "longer than the text": toy(MYLLM_1B, window=(28, 99), context_length=CONTEXT),
}


def parameters(config: Config) -> dict[str, Array]:
    layout = decoder_layout(config)
    flat = layout.init(1, np.float64)
    return layout.views(flat + 0.2 * np.random.default_rng(1).standard_normal(layout.size))


@pytest.mark.parametrize("name", WINDOWS)
def test_decoding_far_beyond_the_window_gives_the_logits_of_the_whole_text(name: str) -> None:
    """Rows of unequal length, prompts longer and shorter than the windows, 15 tokens more."""
    config, params = WINDOWS[name], parameters(WINDOWS[name])
    rng = np.random.default_rng(0)
    lengths = np.array([13, 2, 6, 1])
    texts = rng.integers(0, config.vocab_size, (4, 13 + 15)).astype(np.int32)
    whole = model.logits(ops, params, config, texts)
    prompts = texts[:, :13].copy()
    for row, n in zip(prompts, lengths, strict=True):
        row[n:] = 7  # padding, which must not take the place of a token
    cache = ops.kv_cache(params, config, 4, 28)
    scores = model.prefill(ops, params, config, prompts, lengths, cache)
    for n in range(16):
        expected = whole[np.arange(4), lengths - 1 + n]
        np.testing.assert_allclose(scores, expected, rtol=1e-12, atol=1e-12)
        if n < 15:
            token = texts[np.arange(4), lengths + n]
            scores = ops.decode_step(params, config, token, cache, lengths + n)


def test_a_layer_s_cache_holds_its_window_and_no_more() -> None:
    params = parameters(WINDOWS["by layer"])
    for length, kept in ((28, [3, 28, 7, 1]), (5, [3, 5, 5, 1])):
        cache = ops.kv_cache(params, WINDOWS["by layer"], 2, length)
        assert [k.shape for k in cache.k] == [(2, n, 2, 6) for n in kept]
        assert [v.shape for v in cache.v] == [(2, n, 2, 6) for n in kept]
    # ALiBi's distances are those between places in the cache, so nothing may move
    cache = ops.kv_cache(parameters(WINDOWS["ALiBi"]), WINDOWS["ALiBi"], 2, 20)
    assert [k.shape[1] for k in cache.k] == [20, 20]


def test_a_cache_of_windows_ends_with_the_context_and_another_with_its_length() -> None:
    config, params = WINDOWS["one for all"], parameters(WINDOWS["one for all"])
    token = np.array([3], np.int32)
    cache = ops.kv_cache(params, config, 1, 8)
    ops.decode_step(params, config, token, cache, CONTEXT - 1)
    with pytest.raises(ValueError, match=r"position must lie in 0\.\.29, the cache's room"):
        ops.decode_step(params, config, token, cache, CONTEXT)
    config, params = WINDOWS["by layer"], parameters(WINDOWS["by layer"])
    cache = ops.kv_cache(params, config, 1, 8)
    with pytest.raises(ValueError, match=r"position must lie in 0\.\.7, the cache's room"):
        ops.decode_step(params, config, token, cache, 8)
    with pytest.raises(ValueError, match="the cache has room for 8 tokens, the prompts have 9"):
        model.prefill(ops, params, config, np.zeros((1, 9), np.int32), np.array([9]), cache)
    with pytest.raises(ValueError, match=r"must have an array for each of 4 layers, got 3"):
        less = cache._replace(k=cache.k[:3])
        ops.decode_step(params, config, token, less, 0)
    with pytest.raises(ValueError, match=r"positions 0\.\.3 lie outside .* room for 3 tokens"):
        ops.write_kv(cache, np.zeros((1, 4, 2, 6)), np.zeros((1, 4, 2, 6)), layer=0, position=0)


def test_greedy_generation_through_a_window_follows_the_uncached_model() -> None:
    config, params = WINDOWS["with QK-norm"], parameters(WINDOWS["with QK-norm"])
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [5]]
    rows = generate(ops, params, config, prompts, max_new_tokens=99, temperature=0)
    for prompt, row in zip(prompts, rows, strict=True):
        text = list(prompt)
        for token in row:
            assert token == np.argmax(model.logits(ops, params, config, np.array([text]))[0, -1])
            text.append(token)
    assert [len(row) for row in rows] == [CONTEXT - 8 + 1, CONTEXT]


@pytest.mark.parametrize(("window", "reach"), [(4, 6), ((3, 5), 6), ((5, 1), 4), ((0, 2), 99)])
def test_a_token_reaches_as_far_as_the_windows_add_up_to(window: Any, reach: int) -> None:
    """Through L layers with windows w a prediction depends on the last Σ(w - 1) + 1 tokens."""
    config = toy(MYLLM_1B, window=window)
    params, ids = parameters(config), np.arange(12, dtype=np.int32)[None]
    before = model.logits(ops, params, config, ids)[0]
    for place in range(12):
        other = ids.copy()
        other[0, place] = 20
        changed = np.any(model.logits(ops, params, config, other)[0] != before, axis=-1)
        expected = [place <= t <= place + reach for t in range(12)]
        assert changed.tolist() == expected


def test_each_layer_looks_through_its_own_window() -> None:
    config, seen = WINDOWS["by layer"], []

    def attention_forward(*arrays: Array, **options: Any) -> Any:
        seen.append(options["window"])
        return ops.attention_forward(*arrays, **options)

    own: Any = SimpleNamespace(**{**vars(ops), "attention_forward": attention_forward})
    model.logits(own, parameters(config), config, np.zeros((1, 9), np.int32))
    assert seen == [3, 0, 7, 1]


def test_a_window_as_long_as_the_text_changes_no_bit() -> None:
    config = toy(MYLLM_1B)
    params, ids = parameters(config), np.arange(12, dtype=np.int32)[None]
    expected = model.logits(ops, params, config, ids)
    got = model.logits(ops, params, dataclasses.replace(config, window=12), ids)
    np.testing.assert_array_equal(got, expected)


# ---- QK-norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["rope", "none"])
def test_qk_norm_is_what_it_says_on_paper(position: Any) -> None:
    """Attention of one layer, head by head and token by token, with complex numbers for RoPE."""
    config = toy(MYLLM_1B, qk_norm=True, position=position, norm_eps=1e-2, window=3)
    params = parameters(config)
    D, d, T = config.d_model, config.d_head, 5
    x = np.random.default_rng(0).standard_normal((1, T, D))
    run = start_pass(ops, params, config, decoder_layout(config))
    got, _ = self_attention_forward(run, "layers.1.attention", x, block=1, start=2)

    w = {name: params[f"layers.1.attention.{name}"] for name in ("wqkv", "wo")}
    gains = {name: params[f"layers.1.attention.{name}.gain"] for name in ("q_norm", "k_norm")}
    columns = (x[0] @ w["wqkv"]).reshape(T, 8, d)  # four heads of q, two of k, two of v

    def ready(t: int, head: int, gain: Array) -> Array:
        h = columns[t, head]
        h = h / np.sqrt(np.sum(h * h) / d + 1e-2) * gain
        if position == "none":
            return h
        turned = (h[0::2] + 1j * h[1::2]) * np.exp(
            1j * (t + 2) / config.rope_base ** (2 * np.arange(d // 2) / d)
        )
        return np.stack([turned.real, turned.imag], axis=-1).ravel()

    out = np.zeros((T, 4, d))
    for head in range(4):
        for t in range(T):
            q, past = ready(t, head, gains["q_norm"]), range(max(0, t - 2), t + 1)
            scores = [q @ ready(u, 4 + head // 2, gains["k_norm"]) / np.sqrt(d) for u in past]
            p = np.exp(scores) / np.sum(np.exp(scores))
            out[t, head] = sum(p[i] * columns[u, 6 + head // 2] for i, u in enumerate(past))
    np.testing.assert_allclose(got[0], out.reshape(T, 4 * d) @ w["wo"], rtol=1e-12, atol=1e-13)


def test_qk_norm_adds_two_gains_a_layer_that_do_not_decay() -> None:
    plain, normed = (decoder_layout(toy(MYLLM_1B, qk_norm=on)) for on in (False, True))
    added = [name for name in normed.offsets if name not in plain.offsets]
    assert added == [
        f"layers.{n}.attention.{which}.gain" for n in range(2) for which in ("q_norm", "k_norm")
    ]
    assert normed.size == plain.size + 4 * 6 and normed.n_decayed == plain.n_decayed
    views = normed.views(normed.init(0))
    assert all((views[name] == 1).all() for name in added)


def test_a_model_without_them_calls_what_it_always_called() -> None:
    """The same ops in the same order: rope on queries and keys at once, then the split."""
    calls: list[str] = []

    def listening(name: str) -> Any:
        def call(*arrays: Any, **options: Any) -> Any:
            calls.append(name)
            return getattr(ops, name)(*arrays, **options)

        return call

    own: Any = SimpleNamespace(
        **{n: listening(n) if n.endswith("_forward") else f for n, f in vars(ops).items()}
    )
    config = toy(MYLLM_1B, n_layers=1, tied=False)
    model.logits(own, parameters(config), config, np.zeros((1, 3), np.int32))
    assert [name.removesuffix("_forward") for name in calls] == [
        *("embedding", "dropout", "rmsnorm", "linear", "rope", "split_heads", "attention"),
        *("merge_heads", "linear", "rmsnorm", "linear", "swiglu", "linear", "rmsnorm"),
    ]


# ---- the config ----------------------------------------------------------------------------------


def test_a_window_is_one_number_or_one_for_each_layer() -> None:
    config = toy(MYLLM_1B, n_layers=3, window=[2, 0, 5])  # a list, as TOML has it
    assert config.window == (2, 0, 5)
    assert [config.window_of(n) for n in range(3)] == [2, 0, 5]
    assert [toy(MYLLM_1B, window=4).window_of(n) for n in range(2)] == [4, 4]
    assert Config.from_dict(config.to_dict()) == config and hash(config)


def test_a_config_of_before_has_no_window_and_no_qk_norm() -> None:
    fields = {k: v for k, v in MYLLM_1B.to_dict().items() if k not in ("window", "qk_norm")}
    assert Config.from_dict(fields) == MYLLM_1B
    assert MYLLM_1B.window == 0 and MYLLM_1B.qk_norm is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": -1}, r"window must be an integer >= 0 .*, got -1"),
        ({"window": (4, -2)}, r"window must be an integer >= 0 .*, got \(4, -2\)"),
        ({"window": 2.0}, r"window must be an integer >= 0 .*, got 2\.0"),
        ({"window": True}, "window must be an integer >= 0 .*, got True"),
        ({"window": "4"}, "window must be an integer >= 0 .*, got '4'"),
        ({"window": (4,)}, "window has 1 entries, but the model has n_layers = 2"),
        ({"window": []}, "window has 0 entries, but the model has n_layers = 2"),
        ({"qk_norm": 1}, "qk_norm must be true or false, got 1"),
        ({"rope_factor": 0.5}, "rope_factor must be a number >= 1, got 0.5"),
        ({"rope_low_freq_factor": 4.0}, r"rope_low_freq_factor \(4.0\) must be below"),
        ({"rope_original_context": 0}, "rope_original_context must be a positive integer"),
        ({"attn_bias": True, "qkv_bias": True}, "attn_bias and qkv_bias are both true"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy(MYLLM_1B, **fields)


def test_a_bias_on_q_k_and_v_alone_adds_one_vector_a_layer() -> None:
    plain, biased = (decoder_layout(toy(MYLLM_1B, qkv_bias=on)) for on in (False, True))
    added = [name for name in biased.offsets if name not in plain.offsets]
    assert added == [f"layers.{n}.attention.bqkv" for n in range(2)]
    assert biased.n_decayed == plain.n_decayed


def test_a_config_has_a_scaling_of_rope_where_it_says_so() -> None:
    assert MYLLM_1B.rope_scaling is None
    config = toy(MYLLM_1B, rope_factor=8)
    assert config.rope_scaling == (8.0, 1.0, 4.0, 8192.0)
    assert all(type(number) is float for number in config.rope_scaling)
    assert toy(MYLLM_1B, rope_factor=8, position="alibi").rope_scaling is None
    assert Config.from_dict(config.to_dict()) == config and hash(config)


def test_an_encoder_decoder_has_no_window() -> None:
    with pytest.raises(ValueError, match="attends to whole sentences, so window must be 0, got 3"):
        encoder_decoder(window=3)


def test_a_cache_with_slots_beside_its_window_takes_no_more_positions_than_slots() -> None:
    """Only one of just the window's slots is a ring, which takes any number."""
    config = toy(MYLLM_1B, window=8, context_length=64)
    for slots, expected in ((7, 7), (8, 64), (16, 16), (64, 64), (80, 64)):
        kept = tuple(np.zeros((1, slots, 2, 6)) for _ in range(config.n_layers))
        assert room(config, KVCache(kept, kept)) == expected
