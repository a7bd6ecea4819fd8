"""The rungs of attention: each function is held to the one before it, the last to the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import ops
from reference.gradcheck import check_vjp
from reference.study import attention, tiled_attention
from reference.types import Array
from tests.helpers import ROOT

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.sampled_from([1, 2, 31, 32, 33, 64, 97])  # about the tile of 32, and a prime


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


# ---- from one head up ----------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 9), st.integers(1, 5))
def test_backward_of_one_head_matches_differences(seed: int, T: int, d: int) -> None:
    Q, K, V = drawn(seed, (T, d), (T, d), (T, d))

    def forward(Q: Array, K: Array, V: Array) -> tuple[Array, tuple[Array, ...]]:
        O, P = attention.forward(Q, K, V)
        return O, (Q, K, V, P)

    check_vjp(forward, lambda dO, cache: attention.backward(dO, *cache), {"Q": Q, "K": K, "V": V})


def test_a_word_takes_home_the_mean_of_values_by_its_shares() -> None:
    # two keys, of which the first fits better by log 3: shares of 3/4 and 1/4
    Q, K = np.array([[1.0], [1.0]]), np.array([[np.log(3)], [0.0]])
    O, P = attention.forward(Q, K, np.array([[4.0], [8.0]]))
    assert P == pytest.approx(np.array([[0.75, 0.25], [0.75, 0.25]]))
    assert O == pytest.approx(np.array([[5.0], [5.0]]))


@given(SEEDS, st.integers(2, 9))
def test_a_masked_key_has_no_share_and_gets_no_gradient(seed: int, T: int) -> None:
    Q, K, V, dO = drawn(seed, *[(T, 3)] * 4)
    O, P = attention.masked_forward(Q, K, V, attention.causal(T))
    assert (P[~attention.causal(T)] == 0).all()
    dO[:-1] = 0  # the last word alone moves the loss; hide it, and nothing before it is seen
    *_, dV = attention.backward(dO, Q, K, V, P)
    assert np.abs(dV).max() > 0
    dO[:] = 0
    dO[0] = 1  # the first word sees itself alone
    *_, dV = attention.backward(dO, Q, K, V, P)
    assert (dV[1:] == 0).all() and dV[0] == pytest.approx(dO[0])
    changed = K.copy()
    changed[-1] += 1
    later, _ = attention.masked_forward(Q, changed, V, attention.causal(T))
    np.testing.assert_array_equal(later[:-1], O[:-1])


@given(SEEDS, st.integers(1, 7), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_heads_and_groups_are_the_reference_s(seed: int, T: int, G: int, Hkv: int) -> None:
    H, d = G * Hkv, 4
    Q, dO, K, V = drawn(seed, (T, H * d), (T, H * d), (T, Hkv * d), (T, Hkv * d))
    O, Ps = attention.grouped_forward(Q, K, V, attention.causal(T), H, Hkv)
    grads = attention.grouped_backward(dO, Q, K, V, Ps, Hkv)
    q, k, v, do = (x.reshape(1, T, -1, d) for x in (Q, K, V, dO))
    o, cache = ops.attention_forward(q, k, v)
    np.testing.assert_allclose(O, o.reshape(T, -1), atol=1e-12)
    for ours, theirs in zip(grads, ops.attention_backward(do, cache), strict=True):
        np.testing.assert_allclose(ours, theirs.reshape(T, -1), atol=1e-12)
    if G == 1:  # then groups are heads
        alone, _ = attention.heads_forward(Q, K, V, attention.causal(T), H)
        np.testing.assert_array_equal(O, alone)


# ---- tile by tile --------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 12), st.integers(1, 13), st.floats(0.1, 300))
def test_online_softmax_is_softmax_however_a_row_is_cut(
    seed: int, n: int, piece: int, spread: float
) -> None:
    s, v = drawn(seed, (n,), (n, 3))
    s *= spread
    o, lse = tiled_attention.online_softmax(s, v, piece)
    e = np.exp(s - s.max())
    np.testing.assert_allclose(o, e @ v / e.sum(), atol=1e-12)
    assert lse == pytest.approx(s.max() + np.log(e.sum()), abs=1e-12 * spread)


def test_scores_that_would_overflow_do_not() -> None:
    s = np.array([800.0, 799.0, -900.0, 801.0])  # e^800 is beyond float64
    o, lse = tiled_attention.online_softmax(s, np.eye(4), piece=1)
    assert np.isfinite(o).all() and o.sum() == pytest.approx(1) and lse == pytest.approx(801.4076)


@given(SEEDS, LENGTHS, st.integers(1, 5))
def test_tiles_give_what_the_reference_gives(seed: int, T: int, d: int) -> None:
    Q, K, V, dO = drawn(seed, *[(T, d)] * 4)
    O, lse = tiled_attention.forward(Q, K, V)
    q, k, v, do = (x.reshape(1, T, 1, d) for x in (Q, K, V, dO))
    o, cache = ops.attention_forward(q, k, v)
    np.testing.assert_allclose(O, o[0, :, 0], atol=1e-12)
    grads = tiled_attention.backward(dO, Q, K, V, O, lse)
    for ours, theirs in zip(grads, ops.attention_backward(do, cache), strict=True):
        np.testing.assert_allclose(ours, theirs[0, :, 0], atol=1e-11)


@given(SEEDS, LENGTHS)
def test_the_row_sums_of_the_backward_are_do_times_o(seed: int, T: int) -> None:
    Q, K, V, dO = drawn(seed, *[(T, 4)] * 4)
    O, P = attention.masked_forward(Q, K, V, attention.causal(T))
    dP = dO @ V.T
    np.testing.assert_allclose(np.sum(dP * P, axis=1), np.sum(dO * O, axis=1), atol=1e-12)


def test_the_memory_of_tiles_is_linear_and_the_table_s_is_not() -> None:
    def growth(way: object) -> float:
        short, long = (np.zeros((4, T, 16)) for T in (256, 1024))
        return tiled_attention.peak_bytes(way, *long) / tiled_attention.peak_bytes(way, *short)

    assert growth(tiled_attention.tiled) < 4.5  # four times the tokens
    assert growth(tiled_attention.whole) > 12


# ---- the kernels ---------------------------------------------------------------------------------

KERNELS = sorted(
    path
    for backend in ("cpu", "cuda")
    for path in (ROOT / "accel" / backend).iterdir()
    if "attention" in path.name and path.suffix in (".py", ".cu", ".cuh")
)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_every_attention_kernel_sends_its_reader_to_the_rung_first(path: object) -> None:
    head = path.read_text(encoding="utf-8").lstrip('"/ ')
    assert head.startswith("Read reference/study/tiled_attention.py first")
