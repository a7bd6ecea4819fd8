"""The bf16 mode of the CPU backend: packing, blocks, products, attention and whole models."""

import dataclasses
import os
import subprocess
import sys
from typing import get_args

import numba
import numpy as np
import pytest
from hypothesis import example, given

import accel
from accel.cpu import bf16_gemm, bf16_tiles, memory
from accel.cpu.halves import to_bf16
from accel.tolerance import round_bf16
from reference import model
from reference import ops as plain
from reference.config import Config, FeedForward
from reference.params import decoder_layout
from reference.types import DropoutKey
from tests.helpers.attention_cases import (
    KEY,
    WINDOWS,
    Case,
    assert_only_the_window_is_walked_over,
    cases,
    cast,
    on_absolute_values,
    run,
)
from tests.helpers.bf16 import U16, rounded


@pytest.fixture(scope="module")
def ops():
    return accel.load("cpu", compute="bf16")


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 45, 700])
def test_a_prompt_meets_the_weights_that_decoding_keeps(ops, rows, monkeypatch):
    """What few rows read then is what training reads, in fewer bytes: the same bits."""
    layout = decoder_layout(CONFIG)
    params = ops.parameters(layout.views(layout.init(0)))
    x = np.random.default_rng(0).standard_normal((rows, CONFIG.d_model), np.float32)
    monkeypatch.setattr(bf16_gemm, "team", lambda: 1)  # so few share a weight this narrow

    def results():
        """Return by weight the product that reads it."""
        name = "layers.0.ffn.w_gate_up"
        return {
            name: ops.linear_forward(x, params[name])[0],
            "embedding.weight": ops.logits(x, params["embedding.weight"]),
        }

    before = results()
    ops.decode_step(params, CONFIG, np.array([1], np.int32), ops.kv_cache(params, CONFIG, 1, 4), 0)
    for name, now in results().items():
        np.testing.assert_array_equal(now, before[name])
        params[name].halves[...] = 0
    for name, now in results().items():
        assert now.any() == (rows > 100), name


@pytest.mark.parametrize("name", get_args(FeedForward))
def test_activations_of_kept_numbers_are_those_of_the_rounded_ones(ops, name):
    rng = np.random.default_rng(0)
    forward, backward = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")
    x = rng.standard_normal((3, 70), dtype=np.float32) * 3
    x[1, 5] = np.nan
    kept, rounded = ops.keep(x), round_bf16(x)
    assert kept.nbytes == x.nbytes // 2
    (out, cache), (want, plain) = forward(kept), forward(rounded)
    np.testing.assert_array_equal(out, want)
    dout = rng.standard_normal(out.shape, dtype=np.float32)
    got = backward(dout, cache)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, backward(dout, plain))
    assert np.isnan(out[1]).any() and not np.isnan(out[[0, 2]]).any()


def test_a_former_result_of_parameters_gives_the_present_weights(ops):
    layout = decoder_layout(CONFIG)
    master = layout.init(0)
    params = ops.parameters(layout.views(master))
    x, token = np.ones((3, CONFIG.d_model), np.float32), np.array([1], np.int32)

    def results(params):
        weight, cache = params["layers.0.attention.wqkv"], ops.kv_cache(params, CONFIG, 1, 4)
        return ops.linear_forward(x, weight)[0], ops.decode_step(params, CONFIG, token, cache, 0)

    before = results(params)
    master *= 1.5
    latest = ops.parameters(layout.views(master))
    for old, was, now in zip(results(params), before, results(latest), strict=True):
        np.testing.assert_array_equal(old, now)
        assert not np.array_equal(was, now)


def test_rounding_row_by_row_is_to_nearest_even():
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    x[:4] = [np.nan, np.inf, -np.inf, -0.0]
    x[4:6] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # ties
    got = (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, rounded(x))


# --- attention -----------------------------------------------------------------------------------


def rounded_attention(case, arrays, dout):
    """Return out, dq, dk, dv as plain code with operands rounded to bfloat16 would compute them."""
    (q, k, v, *rest) = arrays
    exact = plain.attention_forward(*arrays, **case.options())[1].cache
    rough = (rounded(q), rounded(k), v, *rest)
    cache = plain.attention_forward(*rough, **case.options())[1].cache
    keep = 1.0 if cache.kappa is None else cache.kappa
    B, Hkv, G, T, _ = cache.q.shape
    do = dout.reshape(B, T, Hkv, G, -1).transpose(0, 2, 3, 1, 4)
    v = rounded(exact.v)
    p = cache.P
    out = rounded(p * keep) @ v
    dp = (rounded(do) @ v.swapaxes(-1, -2)) * keep
    ds = rounded(p * (dp - np.sum(do * out, axis=-1, keepdims=True)))
    dq = cache.scale * (ds @ cache.k)
    dk = cache.scale * np.sum(ds.swapaxes(-1, -2) @ cache.q, axis=2)
    dv = np.sum(rounded(p * keep).swapaxes(-1, -2) @ rounded(do), axis=2)
    back = (0, 3, 1, 2, 4)
    return (
        out.transpose(back).reshape(dout.shape),
        dq.transpose(back).reshape(q.shape),
        dk.transpose(0, 2, 1, 3),
        dv.transpose(0, 2, 1, 3),
    )


@given(case=cases)
@example(case=Case(queries=131, keys=131, width=64, value_width=64))
@example(case=Case(queries=200, keys=330, causal=False, alibi=True))
@example(case=Case(queries=97, keys=300, documents=True, key_mask=True, dropout_p=0.1, group=7))
@example(case=Case(batch=1, queries=33, keys=33, kv_heads=1, group=1, width=300, value_width=270))
@example(case=Case(queries=200, keys=200, window=1))
@example(case=Case(queries=131, keys=67, window=2, causal=False))
@example(case=Case(queries=97, keys=330, window=65, kv_heads=1, group=3, alibi=True))
@example(case=Case(queries=300, keys=300, window=64, causal=False, dropout_p=0.3, batch=1))
@example(case=Case(queries=300, keys=300, window=63, documents=True, key_mask=True, batch=1))
def test_attention_is_as_exact_as_plain_code_on_rounded_operands(ops, case):
    arrays, dout = case.arrays()
    exact = run(plain, arrays, dout, case.options(), np.float64)
    with memory.poisoned():
        got = run(ops, arrays, dout, case.options(), np.float32)
    near = rounded_attention(case, arrays, dout)
    absolute = on_absolute_values(case, arrays, dout, scores=False)  # their rounding is in near
    for i, (x, p, e, s) in enumerate(zip(got, near, exact, absolute, strict=True)):
        assert x.shape == e.shape and x.dtype == np.float32
        bound = (2 if i == 0 else 3) * np.linalg.norm(p - e) + 2 * U16 * np.linalg.norm(s)
        assert np.linalg.norm(x - e) <= bound, f"array {i} of (out, dq, dk, dv)"


@pytest.mark.parametrize("who", WINDOWS)
def test_tiles_outside_the_window_are_never_walked_over(ops, who):
    assert_only_the_window_is_walked_over(ops, who)


@pytest.mark.parametrize("window", [0, 70])
def test_attention_gives_the_same_bits_with_fewer_threads(ops, window):
    case = Case(queries=300, keys=300, group=3, dropout_p=0.2, key_mask=True, window=window)
    arrays, dout = case.arrays()
    results, threads = [run(ops, arrays, dout, case.options(), np.float32)], numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        results.append(run(ops, arrays, dout, case.options(), np.float32))
    finally:
        numba.set_num_threads(threads)
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


def test_attention_of_one_hot_probabilities_is_exact(ops):
    """Where P is 0 or 1 nothing is rounded: every tile, head and edge must be in its place."""
    T, heads = 200, 6
    q = np.zeros((1, T, heads, 32), np.float32)
    k = np.zeros((1, T, 2, 32), np.float32)
    codes = np.random.default_rng(0).choice([-1.0, 1.0], (T, 32)).astype(np.float32)
    k[0] = codes[:, None]
    order = np.random.default_rng(1).permutation(T)
    q[0] = 64 * codes[order][:, None]
    v = np.random.default_rng(2).integers(-100, 100, (1, T, 2, 50)).astype(np.float32)
    out, _ = ops.attention_forward(q, k, v, causal=False)
    want = v[:, order][:, :, np.arange(heads) // 3]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("keys", [1, 33, 70, 129, 200])
def test_attention_without_preference_is_the_mean_of_the_keys_there_are(ops, keys):
    """Tiles are padded with keys of score 0, which must not count."""
    v = np.random.default_rng(0).integers(-8, 9, (1, keys, 1, 5)).astype(np.float32)
    q, k = np.zeros((1, 40, 1, 7), np.float32), np.zeros((1, keys, 1, 7), np.float32)
    out, _ = ops.attention_forward(q, k, v, causal=False)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(1), (40, 1, 5))[None], atol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros(ops):
    case = Case(queries=150, keys=150)
    (q, k, v, *_), dout = case.arrays()
    key_mask = np.ones((case.batch, case.keys), np.bool_)
    key_mask[:, :140] = False
    with memory.poisoned():
        out, dq, dk, dv = run(ops, (q, k, v, None, key_mask, None), dout, {}, np.float32)
    assert not out[:, :140].any() and not dq[:, :140].any()
    assert not dk[:, :140].any() and not dv[:, :140].any()
    assert out[:, 140:].all() and np.isfinite(dk).all() and dv[:, 140:].all()


def test_extreme_scores_overflow_nothing(ops):
    case = Case(queries=200, keys=200)
    arrays, dout = case.arrays(1e6)
    assert all(np.isfinite(x).all() for x in run(ops, arrays, dout, {}, np.float32))


def test_nan_travels_to_every_query_that_sees_it(ops):
    (q, k, v, *_), _ = Case(queries=150, keys=150).arrays()
    k[0, 100, 0, 5] = np.nan
    out, _ = ops.attention_forward(*cast((q, k, v), np.float32))
    assert np.isnan(out[0, 100:, :2]).all() and not np.isnan(out[0, :100]).any()
    assert not np.isnan(out[1]).any() and not np.isnan(out[:, :, 2:]).any()


# --- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 40, 100), (300, 33, 37_000), (35, 40, 100), (1, 1, 1)])
def test_loss_and_gradients_are_those_of_rounded_operands(ops, shape, has_bias):
    n, d, vocabulary = shape  # the second takes more than one chunk; the last leave dhead for later
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, n, d), dtype=np.float32)
    head = rng.standard_normal((vocabulary, d), dtype=np.float32) / np.float32(np.sqrt(d))
    bias = rng.standard_normal(vocabulary).astype(np.float32) if has_bias else None
    targets = rng.integers(0, vocabulary, (1, n)).astype(np.int32)
    mask = rng.random((1, n)) < 0.8
    wide = [rounded(x), rounded(head), targets, mask, None if bias is None else bias.astype(float)]
    want, cache = plain.linear_cross_entropy_forward(*wide)
    want_gradients = plain.linear_cross_entropy_backward(0.5, cache)
    with memory.poisoned():
        got, cache = ops.linear_cross_entropy_forward(x, head, targets, mask, bias)
        gradients = ops.linear_cross_entropy_backward(0.5, cache)
    assert got.n_valid == want.n_valid
    assert abs(got.total - want.total) <= 1e-5 * max(want.total, 1)
    for i, (g, w) in enumerate(zip(gradients, want_gradients, strict=True)):
        assert (g is None) == (w is None)
        if g is not None:  # the gradient of the logits is rounded before it is multiplied
            limit = (1e-5 if i == 2 else 2 * U16) * np.linalg.norm(w) + 1e-6
            assert np.linalg.norm(g - w) <= limit
    alone, _ = ops.linear_cross_entropy_forward(x, head, targets, mask, bias, need_backward=False)
    assert alone.n_valid == got.n_valid and abs(alone.total - got.total) <= 1e-6 * got.total + 1e-6


def test_logits_are_those_of_rounded_operands(ops):
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal(s, dtype=np.float32) for s in [(2, 3, 40), (70, 40)])
    bias = rng.standard_normal(70).astype(np.float32)
    want = rounded(x) @ rounded(head).T + bias
    np.testing.assert_allclose(ops.logits(x, head, bias), want, atol=1e-5)


# --- whole models --------------------------------------------------------------------------------

CONFIG = Config(
    vocab_size=300,
    d_model=48,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    d_head=16,
    d_ff=100,
    context_length=150,
)


def one_step(ops, master, dtype):
    layout = decoder_layout(CONFIG)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, CONFIG.vocab_size, (2, 130)).astype(np.int32)
    targets = rng.integers(0, CONFIG.vocab_size, (2, 130)).astype(np.int32)
    master = master.astype(dtype)
    grad = np.full_like(master, np.nan)
    with ops.step():
        loss, cache = model.loss_forward(
            ops, ops.parameters(layout.views(master)), CONFIG, ids, targets
        )
        model.loss_backward(1.0, cache, layout.views(grad))
        del cache
    return loss.total, grad


def test_a_model_s_gradients_differ_by_the_rounding_of_bfloat16(ops):
    layout = decoder_layout(CONFIG)
    master = 3 * layout.init(0)
    exact_loss, exact = one_step(plain, master, np.float64)
    loss, grad = one_step(ops, master, np.float32)
    assert abs(loss - exact_loss) <= 1e-3 * exact_loss
    for name, x in layout.views(grad).items():
        e = layout.views(exact)[name]
        assert np.linalg.norm(x - e) <= 0.06 * np.linalg.norm(e), name
    assert np.linalg.norm(grad - exact) > 1e-4 * np.linalg.norm(exact), "this is not float32"


def test_a_step_gives_the_same_bits_again_and_with_fewer_threads(ops):
    master = decoder_layout(CONFIG).init(0)
    results = [one_step(ops, master, np.float32)]
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        results.append(one_step(ops, master, np.float32))
    finally:
        numba.set_num_threads(threads)
    results.append(one_step(ops, master, np.float32))
    for loss, grad in results[1:]:
        assert loss == results[0][0]
        np.testing.assert_array_equal(grad, results[0][1])


@pytest.mark.parametrize("fields", [{}, {"window": 3, "qk_norm": True}])
def test_decoding_reads_rounded_matrices(ops, fields):
    config = dataclasses.replace(CONFIG, **fields)
    layout = decoder_layout(config)
    master = 3 * layout.init(0)
    halves = {n: w for n, w in layout.views(rounded(master).astype(np.float32)).items()}
    exact = layout.views(master.astype(np.float64))
    params = ops.parameters(layout.views(master))
    rounded_matrices = {
        n: (halves[n] if w.ndim == 2 else w).astype(float) for n, w in exact.items()
    }
    caches = [o.kv_cache(p, config, 2, 8) for o, p in ((ops, params), (plain, rounded_matrices))]
    for position in range(5):
        token = np.array([3, 7 * position], np.int32)
        got = ops.decode_step(params, config, token, caches[0], position)
        want = plain.decode_step(rounded_matrices, config, token, caches[1], position)
        assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)
    assert params["layers.0.attention.wqkv"].halves is not None


# --- refusals ------------------------------------------------------------------------------------


def test_float64_is_refused_in_a_sentence(ops):
    x = np.ones((2, 3, 1, 4))
    with pytest.raises(
        ValueError, match=r"one dtype, float32, but .* products round it to bfloat16"
    ):
        ops.attention_forward(x, x, x)
    with pytest.raises(
        ValueError, match=r"one dtype, float32, but .* products round it to bfloat16"
    ):
        ops.linear_forward(x[0, :, 0], np.ones((4, 5)))


def test_a_transposed_weight_is_refused_in_a_sentence(ops):
    with pytest.raises(ValueError, match="is it transposed"):
        ops.linear_forward(np.ones((2, 3), np.float32), np.ones((4, 3), np.float32))


def test_a_gradient_of_the_wrong_shape_is_refused(ops):
    y, cache = ops.linear_forward(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="dout must have shape"):
        ops.linear_backward(y.T, cache)


def test_dropout_counters_are_checked(ops):
    x = np.ones((1, 3, 1, 4), np.float32)
    with pytest.raises(ValueError, match="seed must lie in"):
        ops.attention_forward(x, x, x, dropout_p=0.5, dropout_key=DropoutKey(-1, 0, 0, 0))
    assert KEY.seed > 2**32, "the seed's high half must matter in the cases above"


def test_a_processor_without_either_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.delenv("MYLLM_BF16", raising=False)
    monkeypatch.setattr(bf16_tiles, "_features", lambda: {"+avx2"})
    bf16_tiles.enable.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"AMX-BF16 .* or AVX512-BF16 .* neither"):
            accel.load("cpu", compute="bf16")
    finally:
        monkeypatch.undo()
        bf16_tiles.enable.cache_clear()
        bf16_tiles.enable()


def test_a_system_that_keeps_the_tiles_to_itself_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(bf16_tiles, "has_tiles", lambda: True)
    monkeypatch.setattr(bf16_tiles, "_request_tiles", lambda: -1)
    bf16_tiles.enable.cache_clear()
    try:
        with pytest.raises(ImportError, match="the operating system does not let"):
            accel.load("cpu", compute="bf16")
    finally:
        monkeypatch.undo()
        bf16_tiles.enable.cache_clear()
        bf16_tiles.enable()


@pytest.mark.parametrize(
    "setting", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": "+avx2,-avx512bf16"}]
)
def test_what_numba_compiles_for_decides(setting):
    code = "import accel\naccel.load('cpu', compute='bf16')"
    env = os.environ | setting | {"MYLLM_BF16": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "use compute='float32'" in done.stderr


def test_importing_the_mode_asks_for_nothing():
    code = (
        "import accel.cpu.ops_bf16 as o\n"
        "from accel.cpu import bf16_gemm as g, bf16_tiles as t\n"
        "assert not t.enable.cache_info().currsize and not g._multiply.signatures\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
