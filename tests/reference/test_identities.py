"""What the theory says of each op, as tests."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import cross_entropy, ops
from reference.alibi import alibi_slopes
from reference.philox import keep_mask, philox
from reference.rope import frequencies
from reference.sinusoidal import sinusoidal_table
from reference.softmax import softmax
from reference.types import Array, DropoutKey, RopeScaling

SEEDS = st.integers(0, 2**32 - 1)
KEY = DropoutKey(seed=2**40 + 7, step=2, sample=3, site=4)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


# ---- softmax and cross-entropy -------------------------------------------------------------------


@given(SEEDS, st.floats(-1e3, 1e3))
def test_softmax_is_shift_invariant_and_sums_to_one(seed: int, shift: float) -> None:
    z = 5 * normal(seed, 3, 7)
    np.testing.assert_allclose(softmax(z + shift), softmax(z), rtol=1e-10)
    np.testing.assert_allclose(softmax(z).sum(axis=-1), 1, rtol=1e-14)


def test_softmax_of_extreme_scores_is_finite() -> None:
    np.testing.assert_array_equal(softmax(np.array([1e4, 0, -1e4])), [1, 0, 0])


@given(SEEDS)
def test_the_logits_gradient_is_p_minus_onehot(seed: int) -> None:
    z = normal(seed, 4, 6)
    y = np.random.default_rng(seed).integers(0, 6, 4).astype(np.int32)
    _, cache = cross_entropy.forward(z, y)
    np.testing.assert_allclose(
        cross_entropy.backward(1.0, cache), softmax(z) - np.eye(6)[y], atol=1e-15
    )


def test_the_hessian_of_the_loss_is_diag_p_minus_ppt_and_positive_semidefinite() -> None:
    z, y = normal(0, 5), np.array(2, np.int32)
    h = 1e-5

    def gradient(z: Array) -> Array:
        return cross_entropy.backward(1.0, cross_entropy.forward(z, y)[1])

    hessian = np.stack([(gradient(z + h * e) - gradient(z - h * e)) / (2 * h) for e in np.eye(5)])
    p = softmax(z)
    np.testing.assert_allclose(hessian, np.diag(p) - np.outer(p, p), atol=1e-10)
    assert np.linalg.eigvalsh(np.diag(p) - np.outer(p, p)).min() > -1e-15


@given(SEEDS)
def test_cross_entropy_is_entropy_plus_divergence(seed: int) -> None:
    z, q = normal(seed, 5), softmax(normal(seed + 1, 5))
    losses = [cross_entropy.forward(z, np.array(y, np.int32))[0].total for y in range(5)]
    p = softmax(z)
    entropy, divergence = -np.sum(q * np.log(q)), np.sum(q * np.log(q / p))
    assert np.dot(q, losses) == pytest.approx(entropy + divergence, rel=1e-12)
    assert divergence > 0  # equal iff p = q
    same = [cross_entropy.forward(np.log(q), np.array(y, np.int32))[0].total for y in range(5)]
    assert np.dot(q, same) == pytest.approx(entropy, rel=1e-12)


def test_linear_cross_entropy_is_head_then_cross_entropy() -> None:
    x, head, bias = normal(0, 2, 300, 5), normal(1, 11, 5), normal(2, 11)
    rng = np.random.default_rng(3)
    targets, mask = rng.integers(0, 11, (2, 300)).astype(np.int32), rng.random((2, 300)) < 0.7
    fused, fused_cache = ops.linear_cross_entropy_forward(x, head, targets, mask, bias)
    plain, plain_cache = cross_entropy.forward(ops.logits(x, head, bias), targets, mask)
    assert fused.total == pytest.approx(plain.total, rel=1e-13)
    assert fused.n_valid == plain.n_valid == mask.sum()
    dz = cross_entropy.backward(0.3, plain_cache)
    dx, dhead, dbias = ops.linear_cross_entropy_backward(0.3, fused_cache)
    np.testing.assert_allclose(dx, dz @ head, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(dhead, np.einsum("btv,btd->vd", dz, x), rtol=1e-11, atol=1e-12)
    assert dbias is not None
    np.testing.assert_allclose(dbias, dz.sum(axis=(0, 1)), rtol=1e-11, atol=1e-12)


def test_linear_cross_entropy_never_holds_the_logits_of_all_rows() -> None:
    rows, V = 4_096, 1_024
    x, head, targets = normal(0, rows, 2), normal(1, V, 2), np.zeros(rows, np.int32)
    tracemalloc.start()
    _, cache = ops.linear_cross_entropy_forward(x, head, targets)
    ops.linear_cross_entropy_backward(1.0, cache)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows * V * x.itemsize / 2


# ---- norms ---------------------------------------------------------------------------------------


@given(SEEDS)
def test_rmsnorm_output_has_unit_mean_square_and_ignores_scale(seed: int) -> None:
    x, one = normal(seed, 3, 8), np.ones(8)
    y, _ = ops.rmsnorm_forward(x, one, eps=1e-12)
    np.testing.assert_allclose(np.mean(y * y, axis=-1), 1, rtol=1e-8)
    np.testing.assert_allclose(ops.rmsnorm_forward(7 * x, one, eps=1e-12)[0], y, rtol=1e-8)


def test_epsilon_is_inside_the_root() -> None:
    x, one, zero = np.array([[3.0, -3.0]]), np.ones(2), np.zeros(2)
    np.testing.assert_allclose(ops.rmsnorm_forward(x, one, eps=7.0)[0], [[0.75, -0.75]])
    np.testing.assert_allclose(ops.layernorm_forward(x, one, zero, eps=7.0)[0], [[0.75, -0.75]])


@given(SEEDS)
def test_layernorm_without_epsilon_is_the_standard_score(seed: int) -> None:
    z = normal(seed, 3, 8)
    y, _ = ops.layernorm_forward(z, np.ones(8), np.zeros(8), eps=0.0)
    mean, std = z.mean(axis=-1, keepdims=True), z.std(axis=-1, keepdims=True)  # divides by D
    np.testing.assert_allclose(y, (z - mean) / std, rtol=1e-12)


# ---- positions -----------------------------------------------------------------------------------


def rotation(t: int, d: int, base: float) -> Array:
    """Return R_t as a matrix: rope of the unit vectors."""
    return np.asarray(
        ops.rope_forward(np.eye(d).reshape(1, 1, d, d), base=base, start=t)[0][0, 0].T
    )


@given(st.integers(0, 9000), st.integers(0, 9000), st.sampled_from([2, 6, 8]))
def test_rotations_compose_to_the_distance(t: int, u: int, d: int) -> None:
    relative = rotation(abs(u - t), d, 500_000.0)
    relative = relative if u >= t else relative.T
    product = rotation(t, d, 500_000.0).T @ rotation(u, d, 500_000.0)
    np.testing.assert_allclose(product, relative, atol=1e-11)


def test_rope_turns_adjacent_pairs_by_the_stated_angles() -> None:
    x = normal(0, 1, 3, 1, 4)
    y, _ = ops.rope_forward(x, base=100.0, start=2)
    for t, position in enumerate((2, 3, 4)):
        for j in range(2):
            angle = position * 100.0 ** (-2 * j / 4)
            turned = (x[0, t, 0, 2 * j] + 1j * x[0, t, 0, 2 * j + 1]) * np.exp(1j * angle)
            assert y[0, t, 0, 2 * j] == pytest.approx(turned.real, abs=1e-14)
            assert y[0, t, 0, 2 * j + 1] == pytest.approx(turned.imag, abs=1e-14)


def test_rope_scores_depend_on_distance_alone_and_values_do_not_turn() -> None:
    qkv = normal(0, 1, 5, 3, 6)
    qkv[:, :] = qkv[:, :1]  # the same token everywhere
    for start in (0, 100):
        y, _ = ops.rope_forward(qkv, base=1e4, start=start, rotate_heads=2)
        scores = y[0, :, 0] @ y[0, :, 1].T
        for distance in range(5):
            diagonal = np.diagonal(scores, -distance)
            np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-11)
        np.testing.assert_array_equal(y[:, :, 2], qkv[:, :, 2])


def test_rope_in_float32_is_as_exact_far_out_as_near() -> None:
    x = normal(0, 1, 4, 1, 8)
    for start in (0, 8_188):  # angles taken in float32 would be off by 1e-4 there
        exact, _ = ops.rope_forward(x, base=500_000.0, start=start)
        y, _ = ops.rope_forward(x.astype(np.float32), base=500_000.0, start=start)
        np.testing.assert_allclose(y, exact, atol=1e-6)


def test_rope_takes_a_start_for_each_row() -> None:
    x = normal(0, 2, 3, 1, 4)
    y, _ = ops.rope_forward(x, base=1e4, start=np.array([4, 9]))
    for row, start in enumerate((4, 9)):
        alone, _ = ops.rope_forward(x[row : row + 1], base=1e4, start=start)
        np.testing.assert_array_equal(y[row : row + 1], alone)


def test_llama_3_s_scaling_keeps_fast_pairs_and_slows_slow_ones_by_the_factor() -> None:
    """As published, a wavelength at a time: Llama 3.1's numbers and heads."""
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192.0)
    plain, scaled = (frequencies(500_000.0, 128, s) for s in (None, scaling))
    kinds = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            kinds.add("kept")
            assert after == before
        elif wavelength > 8192:
            kinds.add("divided")
            assert after == pytest.approx(before / 8, rel=1e-15)
        else:
            kinds.add("between")
            blend = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - blend) * before / 8 + blend * before, rel=1e-14)
    assert len(kinds) == 3
    assert (np.diff(scaled) < 0).all()  # no pair overtakes its neighbour


def test_rope_with_scaling_turns_by_the_scaled_frequencies() -> None:
    x, scaling = normal(0, 1, 3, 1, 6), (8.0, 1.0, 4.0, 64)
    omega = frequencies(100.0, 6, RopeScaling(*scaling))
    assert omega[0] == 1 and 100.0 ** (-2 / 6) / 8 < omega[1] < 100.0 ** (-2 / 6)
    y, cache = ops.rope_forward(x, base=100.0, start=5, scaling=scaling)
    turned = (x[0, 2, 0, 0::2] + 1j * x[0, 2, 0, 1::2]) * np.exp(1j * 7 * omega)
    np.testing.assert_allclose(y[0, 2, 0, 0::2] + 1j * y[0, 2, 0, 1::2], turned, atol=1e-14)
    np.testing.assert_allclose(ops.rope_backward(y, cache), x, atol=1e-14)  # and turns back
    same, _ = ops.rope_forward(x, base=100.0, start=5, scaling=(1.0, 1.0, 4.0, 64))
    np.testing.assert_array_equal(same, ops.rope_forward(x, base=100.0, start=5)[0])


def test_the_sinusoidal_table_is_the_paper_s() -> None:
    table = sinusoidal_table(50, 6, np.float64)
    for p in (0, 1, 49):
        for i in range(3):
            assert table[p, 2 * i] == pytest.approx(math.sin(p / 10_000 ** (2 * i / 6)))
            assert table[p, 2 * i + 1] == pytest.approx(math.cos(p / 10_000 ** (2 * i / 6)))
    assert sinusoidal_table(3, 4).dtype == np.float32
    with pytest.raises(ValueError, match="width must be even"):
        sinusoidal_table(3, 5)


def test_alibi_slopes_are_geometric_and_interleave_for_other_counts() -> None:
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])
    # 12 heads: those of 8, then every second of 16's
    expected = np.concatenate([2.0 ** -np.arange(1, 9), 2.0 ** -np.array([0.5, 1.5, 2.5, 3.5])])
    np.testing.assert_allclose(alibi_slopes(12), expected, rtol=1e-6)
    for n in range(1, 40):
        slopes = alibi_slopes(n, np.float64)
        assert len(set(slopes)) == n and slopes.min() > 0 and slopes.max() < 1
    with pytest.raises(ValueError, match="n_heads must be positive"):
        alibi_slopes(0)


# ---- attention -----------------------------------------------------------------------------------


def one_by_one(q: Array, k: Array, v: Array, slopes: Array, allowed: Array) -> Array:
    """Return attention by the definition, one query at a time."""
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    out = np.zeros((B, T, Hq, dv))
    for b, t, i in np.ndindex(B, T, Hq):
        head = i // (Hq // Hkv)
        seen = [u for u in range(S) if allowed[b, t, u]]
        if seen:
            scores = [
                q[b, t, i] @ k[b, u, head] / math.sqrt(d) - slopes[i] * (t + S - T - u)
                for u in seen
            ]
            weights = np.exp(np.array(scores) - max(scores))
            out[b, t, i] = weights / weights.sum() @ v[b, seen, head]
    return out


@given(SEEDS, st.sampled_from([(5, 5), (3, 7), (6, 4), (1, 9)]), st.booleans())
def test_attention_is_its_definition(seed: int, lengths: tuple[int, int], causal: bool) -> None:
    T, S = lengths
    rng = np.random.default_rng(seed)
    q, k, v = normal(seed, 2, T, 6, 4), normal(seed + 1, 2, S, 2, 4), normal(seed + 2, 2, S, 2, 3)
    slopes, key_mask = rng.random(6), rng.random((2, S)) < 0.7
    allowed = np.broadcast_to(key_mask[:, None, :], (2, T, S)).copy()
    documents = None
    if S >= T:
        documents = np.sort(rng.integers(0, 3, (2, S)), axis=1).astype(np.int32)
        allowed &= documents[:, S - T :, None] == documents[:, None, :]
    if causal:
        allowed &= np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T
    out, _ = ops.attention_forward(q, k, v, slopes, key_mask, documents, causal=causal)
    np.testing.assert_allclose(out, one_by_one(q, k, v, slopes, allowed), rtol=1e-11, atol=1e-13)


def test_a_query_with_nothing_to_attend_to_gives_zeros_and_passes_no_gradient() -> None:
    q, k, v = normal(0, 1, 3, 2, 4), normal(1, 1, 3, 1, 4), normal(2, 1, 3, 1, 4)
    out, cache = ops.attention_forward(q, k, v, None, np.array([[False, False, True]]))
    np.testing.assert_array_equal(out[:, :2], 0)
    np.testing.assert_array_equal(out[0, 2], np.broadcast_to(v[0, 2], (2, 4)))
    dq, dk, dv = ops.attention_backward(normal(3, 1, 3, 2, 4), cache)
    assert np.isfinite(dq).all() and not dq[:, :2].any()
    assert not dk[:, :2].any() and not dv[:, :2].any() and dv[:, 2].any()


def test_multi_query_attention_is_multi_head_attention_with_its_head_repeated() -> None:
    q, k, v = normal(0, 2, 5, 4, 3), normal(1, 2, 5, 1, 3), normal(2, 2, 5, 1, 3)
    shared, cache = ops.attention_forward(q, k, v)
    k4, v4 = np.repeat(k, 4, axis=2), np.repeat(v, 4, axis=2)
    repeated, cache4 = ops.attention_forward(q, k4, v4)
    np.testing.assert_allclose(shared, repeated, rtol=1e-12)
    dout = normal(3, 2, 5, 4, 3)
    _, dk, dv = ops.attention_backward(dout, cache)
    _, dk4, dv4 = ops.attention_backward(dout, cache4)
    np.testing.assert_allclose(dk, dk4.sum(axis=2, keepdims=True), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(dv, dv4.sum(axis=2, keepdims=True), rtol=1e-10, atol=1e-14)


def test_attention_survives_extreme_scores() -> None:
    q, k, v = 1e4 * normal(0, 1, 6, 2, 4), normal(1, 1, 6, 2, 4), normal(2, 1, 6, 2, 4)
    out, cache = ops.attention_forward(q, k, v)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in ops.attention_backward(out, cache))


# ---- activations ---------------------------------------------------------------------------------


def test_gelu_is_x_times_the_normal_distribution_function() -> None:
    x = np.linspace(-30, 30, 2001)
    y, _ = ops.gelu_forward(x)
    expected = np.array([t * math.erfc(-t / math.sqrt(2)) / 2 for t in x])
    np.testing.assert_array_equal(y, expected)
    near, _ = ops.gelu_tanh_forward(x)
    assert np.abs(near - y).max() < 5e-4  # the tanh form is an approximation, and a good one
    assert ops.gelu_forward(np.array([-10.0]))[0][0] == pytest.approx(-7.619853e-23, rel=1e-6)


def test_swiglu_has_the_gate_first_and_neither_overflows_nor_cancels() -> None:
    gate, up = np.array([2.0, -1000.0, 1000.0, -40.0]), np.array([3.0, 1.0, 1.0, 1.0])
    y, _ = ops.swiglu_forward(np.concatenate([gate, up])[None])
    expected = [2 / (1 + math.exp(-2)) * 3, 0, 1000, -40 * math.exp(-40) / (1 + math.exp(-40))]
    np.testing.assert_allclose(y[0], expected, rtol=1e-14)


# ---- dropout -------------------------------------------------------------------------------------


def test_philox_gives_the_words_of_its_authors() -> None:
    ones = 0xFFFFFFFF
    known = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in known:
        a, b, c, d = (np.array(n) for n in counter)
        assert " ".join(f"{word:08x}" for word in philox((a, b, c, d), key)) == words


def test_each_element_owns_one_word_of_its_counter() -> None:
    keep = keep_mask((2, 3, 5), 0.37, KEY)
    for s in range(2):
        for i in range(15):
            counter = (np.array(i // 4), np.array(KEY.sample + s), np.array(2), np.array(4))
            word = philox(counter, (KEY.seed & 0xFFFFFFFF, KEY.seed >> 32))[i % 4]
            assert keep[s].ravel()[i] == (word >= math.floor(0.37 * 2**32))


def test_an_element_is_dropped_where_its_word_is_below_the_floor_of_p() -> None:
    counter = (np.array(0), np.array(KEY.sample), np.array(KEY.step), np.array(KEY.site))
    word = int(philox(counter, (KEY.seed & 0xFFFFFFFF, KEY.seed >> 32))[0])
    for above, keeps in ((0.0, True), (0.6, True), (1.0, False)):
        assert keep_mask((1, 1), (word + above) / 2**32, KEY)[0, 0] == keeps


@pytest.mark.parametrize(
    ("name", "bits"), [("seed", 64), ("step", 32), ("sample", 32), ("site", 32)]
)
def test_a_key_beyond_its_counter_is_refused(name: str, bits: int) -> None:
    last = 2**bits - (2 if name == "sample" else 1)  # the second sample is one further
    x = np.ones((2, 3))
    ops.dropout_forward(x, p=0.5, key=KEY._replace(**{name: last}))
    with pytest.raises(ValueError, match=f"{name} must lie in 0..2\\^{bits} - 1, got {2**bits}"):
        ops.dropout_forward(x, p=0.5, key=KEY._replace(**{name: 2**bits}))


def test_dropout_keeps_the_expected_share_and_the_mean() -> None:
    x = np.ones((4, 50_000))
    y, _ = ops.dropout_forward(x, p=0.3, key=KEY)
    assert (y == 0).mean() == pytest.approx(0.3, abs=0.005)
    assert y.mean() == pytest.approx(1, abs=0.01)
    for name in KEY._fields:  # another seed, step, sample or site draws other bits
        other, _ = ops.dropout_forward(x, p=0.3, key=KEY._replace(**{name: 11}))
        assert 0.3 < (y == other).mean() < 0.7


def test_dropout_at_rate_zero_is_the_identity() -> None:
    x = normal(0, 2, 5)
    y, cache = ops.dropout_forward(x, p=0.0)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(ops.dropout_backward(x, cache), x)


def test_dropout_on_probabilities_uses_the_flat_index_of_a_sample() -> None:
    q, k = np.zeros((2, 3, 4, 2)), np.zeros((2, 5, 2, 2))
    v = np.broadcast_to(np.eye(5)[None, :, None], (2, 5, 2, 5)).copy()  # the output is P itself
    out, _ = ops.attention_forward(q, k, v, causal=False, dropout_p=0.4, dropout_key=KEY)
    keep = keep_mask((2, 4, 3, 5), 0.4, KEY)
    np.testing.assert_allclose(out.transpose(0, 2, 1, 3), keep / 5 / 0.6, rtol=1e-14)
