"""Recurrence, order and dropout: what the rungs say of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import dropout
from reference.gradcheck import check_vjp
from reference.philox import keep_mask
from reference.study import dropouts, order, rnn
from reference.types import Array, Dropout, DropoutKey

SEEDS = st.integers(0, 2**32 - 1)


# ---- a recurrent network -------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 9), st.integers(1, 4))
def test_backward_through_time_matches_differences(seed: int, T: int, D: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = {"x": (T, D), "W": (D, D), "U": (D, D), "b": (D,)}
    given_ = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    check_vjp(rnn.forward, rnn.backward, given_)


def test_a_state_knows_what_was_read_and_nothing_later() -> None:
    rng = np.random.default_rng(0)
    x, W, U, b = (rng.standard_normal(s) for s in ((6, 3), (3, 3), (3, 3), (3,)))
    h, _ = rnn.forward(x, W, U, b)
    x[3] += 1
    changed, _ = rnn.forward(x, W, U, b)
    np.testing.assert_array_equal(h[:3], changed[:3])
    assert (h[3:] != changed[3:]).any(axis=1).all()


def test_gradients_vanish_with_distance_in_recurrence_and_not_in_attention() -> None:
    found = rnn.reaches(T=48)
    first = {name: norms[0] for name, norms in found.items()}
    assert first["recurrent, ‖U‖₂ = 0.8"] <= 0.8**47 * 2  # no larger than U alone makes it
    assert first["recurrent, ‖U‖₂ = 0.8"] < 1e-3 * first["attention"]
    assert found["attention"].min() > 1e-3  # near to a 48th, at every distance
    assert first["recurrent, ‖U‖₂ = 1.2"] > found["recurrent, ‖U‖₂ = 1.2"][-1]  # it grows


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("places", "bent"), [*itertools.product(order.PLACES, (False, True))])
def test_gradients_of_the_order_models_match_differences(places: str, bent: bool) -> None:
    layout = order.layout_of(places, width=4, hidden=5)

    def forward(**params: Array) -> tuple[Array, tuple[Array, ...]]:
        grads = layout.views(np.full(layout.size, np.nan))
        loss = order.loss_and_grads(params, grads, places, bent)
        return np.asarray(loss), tuple(grads.values())

    def backward(dloss: Array, grads: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(dloss * grad for grad in grads)

    params = layout.views(layout.init(seed=3, dtype=np.float64))
    check_vjp(forward, backward, params, tolerance=1e-6)


@pytest.mark.parametrize("places", order.PLACES)
def test_straight_before_the_mean_order_is_lost_for_any_weights(places: str) -> None:
    ids, _ = order.sentences()
    layout = order.layout_of(places)
    for seed in range(3):
        p = layout.views(layout.init(seed, dtype=np.float64))
        z, _ = order.forward(p, ids, places, bent=False)
        backwards, _ = order.forward(p, ids[:, ::-1], places, bent=False)
        np.testing.assert_allclose(z, backwards, atol=1e-12)
    assert order.learn(places, bent=False) >= np.log(2)


def test_bent_before_the_mean_it_is_recovered_where_places_are_told() -> None:
    losses = {places: order.learn(places, bent=True) for places in order.PLACES}
    assert losses["none"] >= np.log(2)  # a bend alone knows no places
    assert losses["added"] < 0.01 and losses["concatenated"] < 0.01


def test_attention_without_positions_reads_a_bag_before_its_last_word() -> None:
    words = [0, 3, order.BITES, 1, 2]
    for told in (False, True):
        said = order.last_of(words, told)
        mixed = order.last_of([3, 0, 1, order.BITES, 2], told)
        assert (np.abs(said - mixed).max() < 1e-12) != told


# ---- dropout -------------------------------------------------------------------------------------


@given(SEEDS, st.floats(0.05, 0.9))
def test_the_two_forms_are_one_network(seed: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    x, W = rng.standard_normal(5), rng.standard_normal((5, 3))
    k, _ = dropouts.every_draw(5, p)
    smaller = (1 - p) * W
    np.testing.assert_allclose(
        dropouts.original_training(x, k, W),
        dropouts.inverted_training(x, k, smaller, p),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        dropouts.original_prediction(x, W, p), dropouts.inverted_prediction(x, smaller), atol=1e-12
    )


@given(SEEDS, st.floats(0.05, 0.9))
def test_the_prediction_is_the_mean_over_draws_where_all_is_linear(seed: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    x, W = rng.standard_normal(6), rng.standard_normal((6, 2))
    k, chance = dropouts.every_draw(6, p)
    assert chance.sum() == pytest.approx(1)
    mean = chance @ dropouts.original_training(x, k, W)
    np.testing.assert_allclose(mean, dropouts.original_prediction(x, W, p), atol=1e-12)
    mean = chance @ dropouts.inverted_training(x, k, W, p)
    np.testing.assert_allclose(mean, dropouts.inverted_prediction(x, W), atol=1e-12)


def test_the_inverted_form_is_the_reference_s() -> None:
    key = DropoutKey(seed=1, step=2, sample=3, site=4)
    x, W = np.random.default_rng(0).standard_normal((3, 8)), np.eye(8)
    k = keep_mask(x.shape, 0.5, key)
    y, _ = dropout.forward(x, Dropout(0.5, key))
    np.testing.assert_allclose(dropouts.inverted_training(x, k, W, 0.5), y, atol=1e-15)
