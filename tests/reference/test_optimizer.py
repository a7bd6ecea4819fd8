"""Norm, clipping, AdamW and the learning-rate schedules."""

import math
from typing import Any

import numpy as np
import pytest

from reference import ops
from reference.global_norm import SUM_BLOCK, clip_scale
from reference.schedule import learning_rate
from reference.types import Array

OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def test_the_norm_is_summed_by_fixed_blocks() -> None:
    x = np.random.default_rng(0).standard_normal(3 * SUM_BLOCK + 17)
    sums = ops.square_sums(x)
    assert sums.shape == (4,) and sums.dtype == np.float64
    assert ops.global_norm(x) == pytest.approx(np.linalg.norm(x), rel=1e-14)
    # a rank that holds whole blocks sums the very same numbers
    np.testing.assert_array_equal(ops.square_sums(x[SUM_BLOCK:]), sums[1:])
    np.testing.assert_array_equal(ops.square_sums(x.astype(np.float32))[:1].dtype, np.float64)
    assert ops.global_norm(np.zeros(0)) == 0.0


def test_clipping_shortens_long_gradients_only() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(0.0, 1.0) == 1.0
    for norm in (math.nan, math.inf):
        with pytest.raises(ValueError, match="skip this step"):
            clip_scale(norm, 1.0)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        clip_scale(1.0, 0.0)


def adamw_by_hand(theta: Array, grads: list[Array], n_decayed: int, scale: float) -> Array:
    """Return the parameters after the equations of the paper, coordinate by coordinate."""
    out = theta.copy()
    for i in range(len(theta)):
        m = v = 0.0
        for t, grad in enumerate(grads, 1):
            g = scale * grad[i]
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * g * g
            step = (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8)
            out[i] -= 0.1 * (step + (0.1 * out[i] if i < n_decayed else 0.0))
    return out


def test_adamw_is_its_equations_and_decays_the_first_elements_only() -> None:
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(7)
    grads = [rng.standard_normal(7) for _ in range(5)]
    expected = adamw_by_hand(theta, grads, 3, 0.5)
    m, v = np.zeros(7), np.zeros(7)
    for t, grad in enumerate(grads, 1):
        ops.adamw(theta, m, v, grad, step=t, n_decayed=3, grad_scale=0.5, **OPTIONS)
    np.testing.assert_allclose(theta, expected, rtol=1e-13)


def test_the_first_step_of_adamw_is_the_learning_rate_whatever_the_gradient() -> None:
    theta, grad = np.zeros(3), np.array([1e-3, -1.0, 1e3])
    ops.adamw(theta, np.zeros(3), np.zeros(3), grad, step=1, n_decayed=0, **OPTIONS)
    np.testing.assert_allclose(theta, [-0.1, 0.1, -0.1], rtol=1e-4)


def test_adamw_in_float32_gives_the_same_bits_for_numpy_s_scalars_as_for_python_s() -> None:
    results = []
    for scalar in (float, np.float64):  # a NumPy float64 scalar would promote the whole step
        theta, m, v, grad = np.random.default_rng(0).random((4, 1_000)).astype(np.float32)
        options = {name: scalar(value) for name, value in OPTIONS.items()}
        ops.adamw(theta, m, v, grad, step=3, n_decayed=500, grad_scale=scalar(0.3), **options)
        results.append((theta, m, v))
    np.testing.assert_array_equal(*results)


def test_adamw_refuses_what_does_not_fit() -> None:
    a = [np.zeros(4) for _ in range(4)]
    with pytest.raises(ValueError, match=r"grad must have shape \(4,\)"):
        ops.adamw(*a[:3], np.zeros(5), step=1, n_decayed=0, **OPTIONS)
    with pytest.raises(ValueError, match="step must be an integer >= 1"):
        ops.adamw(*a, step=0, n_decayed=0, **OPTIONS)
    for name, value in (("beta1", 1.0), ("beta2", -0.1), ("lr", math.nan), ("eps", -1.0)):
        with pytest.raises(ValueError, match=f"adamw: {name} must"):
            ops.adamw(*a, step=1, n_decayed=0, **{**OPTIONS, name: value})
    with pytest.raises(ValueError, match="grad_scale must be a finite number"):
        ops.adamw(*a, step=1, n_decayed=0, grad_scale=math.nan, **OPTIONS)
    with pytest.raises(ValueError, match="master must be flat"):
        ops.adamw(*(x.reshape(2, 2) for x in a), step=1, n_decayed=0, **OPTIONS)
    with pytest.raises(ValueError, match=r"n_decayed must be an integer in 0\.\.4, got 5"):
        ops.adamw(*a, step=1, n_decayed=5, **OPTIONS)


RATE: dict[str, Any] = {"peak": 2.0, "warmup_steps": 10, "total_steps": 110, "final_fraction": 0.1}


def test_warm_up_rises_linearly_to_the_peak() -> None:
    for schedule in ("cosine", "linear", "constant"):
        assert learning_rate(1, schedule=schedule, **RATE) == pytest.approx(0.2)
        assert learning_rate(5, schedule=schedule, **RATE) == pytest.approx(1.0)
        assert learning_rate(10, schedule=schedule, **RATE) == pytest.approx(2.0)


def test_schedules_end_where_they_say() -> None:
    assert learning_rate(60, schedule="cosine", **RATE) == pytest.approx(1.1)
    assert learning_rate(35, schedule="cosine", **RATE) == pytest.approx(
        0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2
    )
    assert learning_rate(60, schedule="linear", **RATE) == pytest.approx(1.1)
    assert learning_rate(60, schedule="constant", **RATE) == 2.0
    for schedule in ("cosine", "linear"):
        for step in (110, 500):
            assert learning_rate(step, schedule=schedule, **RATE) == pytest.approx(0.2)
    wsd = [
        learning_rate(s, schedule="wsd", decay_steps=20, **RATE) for s in (11, 90, 100, 110, 111)
    ]
    np.testing.assert_allclose(wsd, [2.0, 2.0, 1.1, 0.2, 0.2])
    assert learning_rate(1, peak=3.0, warmup_steps=0, total_steps=1) == pytest.approx(0.3)


def test_schedules_refuse_numbers_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="schedule must be one of"):
        learning_rate(1, schedule="step", **RATE)
    with pytest.raises(ValueError, match="steps count from 1"):
        learning_rate(0, **RATE)
    with pytest.raises(ValueError, match="warmup_steps 20, total_steps 10"):
        learning_rate(1, peak=1.0, warmup_steps=20, total_steps=10)
    with pytest.raises(ValueError, match="peak must be a finite learning rate"):
        learning_rate(1, peak=math.nan, warmup_steps=0, total_steps=10)
    with pytest.raises(ValueError, match=r"final_fraction must lie in \[0, 1\]"):
        learning_rate(1, peak=1.0, warmup_steps=0, total_steps=10, final_fraction=2)
    with pytest.raises(ValueError, match=r"needs decay_steps in 1\.\.100"):
        learning_rate(1, schedule="wsd", **RATE)
