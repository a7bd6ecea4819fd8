"""Muon: what Newton-Schulz makes of singular values, the step, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import ops
from reference.flops import muon_flops
from reference.muon import orthogonalise
from reference.params import decoder_layout, matrix
from reference.types import Array
from tests.helpers.models import MODELS

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    x = normal(*shape)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    assert s.min() / np.linalg.norm(s) > 0.0016
    found = u.T @ orthogonalise(x) @ vt.T
    np.testing.assert_allclose(found, np.diag(np.diag(found)), atol=1e-12)
    assert np.diag(found).min() > 0.68 and np.diag(found).max() < 1.21


def test_each_singular_value_goes_through_the_polynomial_five_times() -> None:
    s = np.array([0.9, 0.4, 0.1, 1e-2, 1e-3, 0.0])
    u, _ = np.linalg.qr(normal(6, 6, seed=1))
    v, _ = np.linalg.qr(normal(9, 6, seed=2))
    expected = s / np.linalg.norm(s)
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    np.testing.assert_allclose(
        orthogonalise(u * s @ v.T), u * expected @ v.T, rtol=1e-9, atol=1e-12
    )
    assert expected[4] / s[4] * np.linalg.norm(s) == pytest.approx(485, rel=0.2)


@given(st.integers(1, 7), st.integers(1, 7), st.sampled_from([1e-20, 1.0, 1e20]))
def test_a_tall_matrix_is_its_wide_transpose_and_length_does_not_count(
    rows: int, columns: int, size: float
) -> None:
    x = normal(rows, columns, seed=rows + 10 * columns)
    found = orthogonalise(x)
    np.testing.assert_allclose(orthogonalise(x.T), found.T, atol=1e-9)
    np.testing.assert_allclose(orthogonalise(size * x), found, atol=1e-9)


def test_two_steps_are_their_equations() -> None:
    master, m, first, second = (normal(6, 4, seed=seed) for seed in range(4))
    expected, mean = master.copy(), m.copy()
    for grad in (first, second):
        g = 0.5 * grad
        mean = 0.9 * mean + g
        for columns in (slice(0, 1), slice(1, 4)):
            o = orthogonalise((0.9 * mean + g)[:, columns])
            expected[:, columns] -= 0.1 * (0.2 * np.sqrt(6) * o + 0.2 * expected[:, columns])
        ops.muon(master, m, grad, parts=(1, 3), grad_scale=0.5, **OPTIONS)
    np.testing.assert_allclose(master, expected, rtol=1e-12)
    np.testing.assert_allclose(m, mean, rtol=1e-12)


def test_an_update_is_about_as_large_as_adamw_s_whatever_the_gradient() -> None:
    for shape in ((40, 40), (20, 80), (80, 20)):
        master = np.zeros(shape)
        ops.muon(master, np.zeros(shape), 1e-6 * normal(*shape), **OPTIONS)
        assert np.sqrt(np.mean(master**2)) == pytest.approx(0.1 * 0.2, rel=0.25)


def test_nothing_moves_without_a_gradient_or_decay() -> None:
    master = normal(3, 4)
    before = master.copy()
    ops.muon(master, np.zeros((3, 4)), np.zeros((3, 4)), **(OPTIONS | {"weight_decay": 0}))
    np.testing.assert_array_equal(master, before)
    tiny = np.full((3, 4), 1e-40, np.float32)
    single = before.astype(np.float32)
    ops.muon(single, np.zeros_like(tiny), tiny, **(OPTIONS | {"weight_decay": 0}))
    assert np.isfinite(single).all()


def test_parts_are_those_of_the_fused_matrices_and_of_no_table() -> None:
    model = MODELS["myllm"]
    layout = decoder_layout(model)
    parts = {name: spec.parts for name, (_, spec) in layout.offsets.items()}
    q, kv = model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    assert parts["layers.0.attention.wqkv"] == (q, kv, kv)
    assert parts["layers.0.ffn.w_gate_up"] == (model.d_ff, model.d_ff)
    assert parts["layers.0.ffn.w_down"] == (model.d_model,)
    assert parts["embedding.weight"] == parts["final_norm.gain"] == ()
    for _, spec in layout.offsets.values():
        assert not spec.parts or sum(spec.parts) == spec.shape[1]


def test_its_work_is_that_of_its_products() -> None:
    """Per step: the Gram matrix, its square, and the product with X."""
    side, other = 3, 7
    products = 2 * side * side * other + 2 * side**3 + 2 * side * side * other
    assert muon_flops(matrix("w", 3, 7)) == muon_flops(matrix("w", 7, 3)) == 5 * products
    assert muon_flops(matrix("w", 3, 7, 7)) == 10 * products


def test_it_refuses_what_does_not_fit() -> None:
    x = [np.zeros((3, 4)) for _ in range(3)]
    with pytest.raises(ValueError, match=r"muon: grad must have shape \(3, 4\) .* transposed"):
        ops.muon(*x[:2], np.zeros((4, 3)), **OPTIONS)
    for parts in ((1, 2), (0, 4), (1.5, 2.5), ()):
        with pytest.raises(ValueError, match=r"muon: parts .* must add up to the columns"):
            ops.muon(*x, parts=parts, **OPTIONS)
    for name, value in {"lr": -1, "momentum": 1, "weight_decay": np.nan}.items():
        with pytest.raises(ValueError, match=f"muon: {name} must"):
            ops.muon(*x, **(OPTIONS | {name: value}))
    with pytest.raises(ValueError, match=r"muon: master must be \(I, O\)"):
        ops.muon(*(a.reshape(-1) for a in x), **OPTIONS)
    x[1].flags.writeable = False
    with pytest.raises(ValueError, match="muon: m is read-only"):
        ops.muon(*x, **OPTIONS)
