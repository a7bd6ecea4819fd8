"""The sum over ranks: the same pairs whatever the levels, finished buckets, equal slices."""

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dist.comm import MESSAGE, MpiLevel, slices_of
from dist.reduction import add_in_tree_order, gather, number, reduce
from dist.slices import bounds_of_slices, cuts
from reference import ops
from reference.config import Config
from reference.global_norm import SUM_BLOCK
from reference.model import loss_backward, loss_forward
from reference.params import decoder_layout
from reference.types import Array
from tests.helpers.models import MODELS


class Group:
    """Ranks in threads of this process, which all must say the same."""

    def __init__(self, size: int) -> None:
        self.size, self.said = size, [None] * size
        self._barrier = threading.Barrier(size)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = value
        self._barrier.wait(10)
        everyone = list(self.said)
        self._barrier.wait(10)
        return everyone


class GroupLevel:
    """One rank's view of a group."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def broadcast(self, value: Any) -> Any:
        return self.group.all_gather(self.rank, value)[0]

    def exchange(self, flat: Array, bounds: Sequence[int]) -> list[Array]:
        everyone = self.group.all_gather(self.rank, [s.copy() for s in slices_of(flat, bounds)])
        return [slices[self.rank] for slices in everyone]

    def all_gather_slices(self, flat: Array, bounds: Sequence[int]) -> None:
        slices = slices_of(flat, bounds)
        everyone = self.group.all_gather(self.rank, slices[self.rank].copy())
        for mine, theirs in zip(slices, everyone, strict=True):
            mine[:] = theirs


def in_levels(machines: int, local: int) -> list[list[GroupLevel]]:
    """Return the levels of every rank, the machines' in a row."""
    within = [Group(local) for _ in range(machines)]
    between = [Group(machines) for _ in range(local)]
    return [
        [GroupLevel(within[m], p), GroupLevel(between[p], m)]
        for m in range(machines)
        for p in range(local)
    ]


def by_halves(leaves: list[Array]) -> Array:
    """Return the sum that the tree is defined to be."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return by_halves(leaves[:half]) + by_halves(leaves[half:])


@settings(deadline=None, max_examples=30, phases=[Phase.generate])  # ranks that wait are slow
@given(
    *(st.sampled_from([1, 2, 4]),) * 2,
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_the_sum_over_levels_adds_the_same_pairs_and_each_slice_is_one_rank_s(
    machines: int, local: int, buckets: list[int], seed: int
) -> None:
    ranks = machines * local
    edges = [0, *itertools.accumulate(size * 4 for size in buckets)]
    rng = np.random.default_rng(seed)
    shape = (ranks, edges[-1])
    leaves = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
    levels = in_levels(machines, local)
    bounds = bounds_of_slices(edges, 4, ranks)

    def one(rank: int) -> tuple[int, list[Array], Array]:
        flat = leaves[rank].copy()
        sums = [reduce(levels[rank], flat, b, ops.accumulate) for b in bounds]
        own, weights = number(levels[rank]), np.zeros_like(flat)
        for part, b in zip(sums, bounds, strict=True):
            weights[b[own] : b[own + 1]] = part
            gather(levels[rank], weights, b)
        return own, sums, weights

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(one, range(ranks)))
    whole = by_halves(list(leaves))
    assert sorted(own for own, _, _ in found) == list(range(ranks))
    for own, sums, weights in found:
        for part, b in zip(sums, bounds, strict=True):
            np.testing.assert_array_equal(part, whole[b[own] : b[own + 1]])
        np.testing.assert_array_equal(weights, whole)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
)
def test_slices_of_buckets_are_whole_blocks_and_about_equal(
    buckets: list[int], last: int, size: int
) -> None:
    edges = [0, *itertools.accumulate(8 * blocks for blocks in buckets)]
    edges[-1] += last - 8  # the last block may be short
    bounds = bounds_of_slices(edges, 8, size)
    assert [(b[0], b[-1]) for b in bounds] == list(itertools.pairwise(edges))
    for b in bounds:
        assert b == sorted(b) and all(edge % 8 == 0 for edge in b[:-1])
    owned = [sum(b[r + 1] - b[r] for b in bounds) for r in range(size)]
    assert max(owned) - min(owned) <= 8 * len(buckets)
    in_two = bounds_of_slices([0, 8, 16], 8, 2)
    assert {tuple(np.diff(b)) for b in in_two} == {(0, 8), (8, 0)}  # each rank gets one of two


DEEP = Config(
    vocab_size=300,
    d_model=128,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    d_head=32,
    d_ff=512,
    context_length=16,
)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_buckets_begin_behind_layers_and_every_rank_has_as_much_of_them(
    size: int, tied: bool
) -> None:
    config = dataclasses.replace(DEEP, tied=tied)
    layout = decoder_layout(config)
    edges = cuts(layout, config.n_layers, size)
    assert edges[0] == 0 and edges[-1] == layout.size and edges == sorted(set(edges))
    assert len(edges) > 3
    inside = list(itertools.pairwise(edges))[1:-1]
    for low, high in inside:
        assert (high - low) % (size * SUM_BLOCK) == 0
    assert (
        inside[-1][1] <= layout.n_decayed
        and inside[0][0] >= layout.offsets["layers.0.attention.wqkv"][0]
    )


def test_a_model_too_small_for_buckets_has_one() -> None:
    layout = decoder_layout(MODELS["gpt2"])
    assert cuts(layout, MODELS["gpt2"].n_layers, 2) == [0, layout.size]


@pytest.mark.parametrize("name", ["myllm", "gpt2", "untied_post_rmsnorm"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_what_is_finished_changes_no_more(name: str, recompute: Any) -> None:
    """All of a layer and behind it, gains included; and the layers come last to first."""
    config = MODELS[name]
    layout = decoder_layout(config)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, (2, config.context_length)).astype(np.int32)
    flat = np.full(layout.size, np.nan, np.float32)
    seen: dict[int, Array] = {}
    params = ops.parameters(layout.views(layout.init(0)))
    _, cache = loss_forward(ops, params, config, ids, ids, recompute=recompute)
    loss_backward(1.0, cache, layout.views(flat), lambda layer: seen.update({layer: flat.copy()}))
    assert list(seen) == list(reversed(range(config.n_layers)))
    for layer, then in seen.items():
        for parameter, (start, spec) in layout.offsets.items():
            part = slice(start, start + spec.size)
            is_later = any(
                parameter.startswith(f"layers.{i}.") for i in range(layer, config.n_layers)
            )
            if is_later or parameter.startswith(("head.", "final_norm")):
                np.testing.assert_array_equal(then[part], flat[part])
            elif parameter.startswith("layers."):
                assert np.isnan(then[part]).all()


def test_adding_parts_uses_the_first_one_s_memory() -> None:
    parts = [np.full(3, float(i), np.float32) for i in range(4)]
    first = parts[0]
    assert add_in_tree_order(ops.accumulate, parts) is first and first[0] == 6


@pytest.mark.parametrize("own", [0, 70_000])
def test_all_of_the_longest_slice_travels_whoever_has_it(own: int) -> None:
    """A rank may have less to receive than to send, or the other way round."""
    asked: list[tuple[str, int, int]] = []

    class Counting:
        rank, size = 0, 2

        def __getattr__(self, name: str) -> Any:
            return lambda array, peer: asked.append((name, peer, len(array)))

    level = MpiLevel(Counting(), threading.Event())
    level._wait = lambda requests: None  # type: ignore[method-assign]
    flat = np.zeros(3 * MESSAGE + 7, np.float32)
    level.exchange(flat, [0, own, len(flat)])
    level.all_gather_slices(flat, [0, own, len(flat)])
    moved = {name: sum(n for way, _, n in asked if way == name) for name in ("Isend", "Irecv")}
    # each way once own slices and once those of the other
    assert moved == {"Isend": len(flat) - own + own, "Irecv": own + len(flat) - own}
    assert max(n for *_, n in asked) <= MESSAGE
