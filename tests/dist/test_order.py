"""The order of windows: a bijection, in exact shares, from one integer."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist.order import MIX_BLOCK, DataOrder, Mixture, permute, shares


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_permute_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, n, (seed, epoch)) for i in range(n)) == list(range(n))


def test_permute_mixes_and_depends_on_every_part_of_its_key() -> None:
    n = 2000
    order = [permute(i, n, (1, 2, 3)) for i in range(n)]
    for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert sum(permute(i, n, key) == order[i] for i in range(n)) < 12  # one expected
    mean = (n - 1) / 2
    for other in (list(range(n)), order[1:] + order[:1]):  # neither the identity nor its neighbour
        pairs = zip(order, other, strict=True)
        covariance = sum((a - mean) * (b - mean) for a, b in pairs) / n
        assert abs(covariance / (n * n / 12)) < 0.1


def test_permute_is_frozen() -> None:
    """A changed order would break resuming and every published run."""
    assert [permute(i, 1_530_776, (0, 0, 0)) for i in range(4)] == [
        647929,
        1158845,
        1100148,
        116499,
    ]


def test_permute_refuses_an_index_outside() -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.9"):
        permute(10, 10, (0,))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_add_up_and_are_within_one_of_exact(weights: list[float]) -> None:
    if min(weights) / sum(weights) * MIX_BLOCK < 1:
        return
    counts = shares(weights)
    assert sum(counts) == MIX_BLOCK
    exact = [w / sum(weights) * MIX_BLOCK for w in weights]
    assert all(abs(c - e) < 1 for c, e in zip(counts, exact, strict=True))


def test_weights_may_be_as_large_as_numbers_are() -> None:
    assert shares([1e308, 1e308]) == (512, 512)
    assert shares([3e307, 1e307]) == (768, 256)


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ((0.3, 0.6, 0.1), (307, 615, 102)),
        ((1.0, 3.0, 6.0), (103, 307, 614)),
        ((2.0, 5.0, 5.0), (170, 427, 427)),
    ],
)
def test_shares_are_frozen(weights: tuple[float, ...], found: tuple[int, ...]) -> None:
    """Runs go on in the order in which they began."""
    assert shares(weights) == found


def test_a_source_without_a_share_is_refused() -> None:
    with pytest.raises(ValueError, match="source 2 has less than 1/1024"):
        shares([1.0, 1e-6])


def test_every_epoch_takes_every_window_once() -> None:
    order = DataOrder(7, [50], [Mixture(120, (0,), (1.0,))])
    places = [order[p] for p in range(len(order))]
    for epoch in (0, 1):
        taken = [p.window for p in places if p.epoch == epoch]
        assert sorted(taken) == list(range(50))
    assert [p.window for p in places[:50]] != [p.window for p in places[50:100]]
    assert len({p.window for p in places[100:]}) == 20


def test_sources_have_their_weights_and_go_on_across_phases() -> None:
    mixtures = [Mixture(1500, (0, 1), (3.0, 1.0)), Mixture(700, (1, 0), (1.0, 1.0))]
    order = DataOrder(3, [900, 5000], mixtures)
    places = [order[p] for p in range(len(order))]
    assert Counter(p.source for p in places[:1024]) == {0: 768, 1: 256}
    first = places[:100]
    assert 10 < sum(p.source == 1 for p in first) < 45  # mixed, not one after the other
    # source 1 is never read to its end, so nothing of it may come twice, over both phases
    windows = [p.window for p in places if p.source == 1]
    assert len(set(windows)) == len(windows)
    epochs = Counter(p.epoch for p in places if p.source == 0)
    assert epochs[0] == 900 and set(epochs) == {0, 1}


def test_positions_outside_are_refused() -> None:
    order = DataOrder(0, [5], [Mixture(8, (0,), (1.0,))])
    for position in (-1, 8):
        with pytest.raises(IndexError):
            order[position]
    with pytest.raises(ValueError, match="no whole window"):
        DataOrder(0, [0], [Mixture(8, (0,), (1.0,))])
