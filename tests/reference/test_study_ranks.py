"""Sums over ranks: what depends on their number, what does not, and what is sent."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.adamw import adamw
from reference.study import ranks
from reference.study.ranks import M, along_the_tree, in_turn, train

WORLDS = (1, 2, 4, 8)
STEPS = 4


def weights(W: int, total: ranks.Sum) -> bytes:
    *_, (world, _) = train(W, total, STEPS)
    assert all(rank.master.tobytes() == world[0].master.tobytes() for rank in world)
    return world[0].master.tobytes()


def test_along_the_tree_the_weights_are_the_same_bits_on_any_number_of_ranks() -> None:
    assert len({weights(W, along_the_tree) for W in WORLDS}) == 1


def test_added_in_turn_they_depend_on_the_number_of_ranks() -> None:
    assert len({weights(W, in_turn) for W in (1, 2, 4)}) == 3
    assert weights(1, in_turn) == weights(M, in_turn)  # a leaf a rank: the brackets of one rank


def test_ranks_take_the_step_that_one_optimizer_would() -> None:
    master, gradient = ranks.task()
    grad = along_the_tree([gradient(master, 1, leaf) for leaf in range(M)]) * np.float32(1 / M)
    m, v = np.zeros_like(master), np.zeros_like(master)
    adamw(
        master,
        m,
        v,
        grad,
        step=1,
        lr=0.01,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.0,
        n_decayed=0,
    )
    (world, _), *_ = train(4, along_the_tree, 1)
    np.testing.assert_array_equal(world[2].master, master)
    np.testing.assert_array_equal(np.concatenate([rank.m for rank in world]), m)


def test_every_micro_batch_reads_a_text_of_its_own() -> None:
    master, gradient = ranks.task()
    made = {gradient(master, step, leaf).tobytes() for step in (1, 2) for leaf in range(M)}
    assert len(made) == 2 * M


@pytest.mark.parametrize("W", WORLDS)
def test_what_is_sent_and_kept_is_what_the_page_says(W: int) -> None:
    *_, (world, wires) = train(W, along_the_tree, 2)
    N = len(world[0].master)
    assert sum(wires.sent) / 2 == 4 * 2 * N * (W - 1)  # over all ranks, in bytes a step
    assert max(wires.sent) - min(wires.sent) <= 2 * 2 * 4 * W  # slices differ by one number
    assert sum(len(rank.m) for rank in world) == sum(len(rank.v) for rank in world) == N


@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_both_sums_are_right_to_rounding(seed: int, depth: int) -> None:
    parts = np.random.default_rng(seed).standard_normal((2**depth, 3)).astype(np.float32)
    for total, roundings in ((in_turn, 2**depth), (along_the_tree, depth + 1)):
        for got, column in zip(total(list(parts)), parts.T.astype(float), strict=True):
            bound = roundings * 2.0**-24 * np.abs(column).sum()
            assert abs(got - math.fsum(column)) <= 1.01 * bound


def test_parcels_arrive_where_they_were_sent() -> None:
    wires = ranks.Wires(3)
    outgoing = [[np.full(2, 10 * r + s, np.float32) for s in range(3)] for r in range(3)]
    received = wires.all_to_all(outgoing)
    assert [[int(p[0]) for p in row] for row in received] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert wires.sent == [16, 16, 16]  # two parcels of two numbers each; one's own is not sent
    received[0][1][:] = -1  # a copy: a rank cannot write into another's memory
    assert outgoing[1][0][0] == 10
