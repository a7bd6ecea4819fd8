"""The memory of a training step: the same offsets each time, nothing shared by what is alive."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16
from accel.cuda.arena import ALIGNMENT, Arena, Intervals
from dist.comm import Solo
from dist.stopping import StopRequest
from dist.train import Trainer
from reference.model import loss_backward, loss_forward
from reference.params import decoder_layout
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.cuda_shim.myllm import install
from tests.helpers.cuda_models import batch, parameters, train
from tests.helpers.models import MODELS
from tests.helpers.runs import prepare

require.shim()


@pytest.fixture
def shim() -> Iterator[ShimDevice]:
    device = ShimDevice()
    before = devices.use(device)
    yield device
    devices.use(before)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=60))
def test_no_two_taken_intervals_overlap_and_all_is_free_at_last(asked: list[Any]) -> None:
    """Takes (size, which of those alive to give back before)."""
    intervals, alive = Intervals(), []
    for size, which in asked:
        if which < len(alive):
            intervals.give(*alive.pop(which))
        free = intervals._free
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(free))  # sorted, joined
        start = intervals.take(size)
        for other, length in alive:
            assert start + size <= other or other + length <= start
        alive.append((start, size))
        assert max(s + n for s, n in alive) <= intervals.end
    random.Random(len(asked)).shuffle(alive)
    for piece in alive:
        intervals.give(*piece)
    assert intervals.take(10**6) == 0


def test_the_best_fit_is_taken_first() -> None:
    intervals = Intervals()
    starts = [intervals.take(n) for n in (10, 1, 4, 1, 6, 1)]
    for i in (0, 2, 4):  # holes of 10, 4 and 6
        intervals.give(starts[i], (10, 1, 4, 1, 6, 1)[i])
    assert [intervals.take(n) for n in (5, 4, 8, 1)] == [starts[4], starts[2], 0, starts[4] + 5]
    assert intervals.take(3) == intervals.end - 3 == 23  # nowhere else: the line has no end


def offsets(device: ShimDevice, sizes: list[int]) -> list[int]:
    """Return where arrays of a step come to lie; every other one dies at once."""
    found, alive = [], []
    with device.arena.step():
        for i, n in enumerate(sizes):
            array = devices.empty((n,), np.float32)
            found.append(device.address(array))
            if i % 2:
                alive.append(array)
        del array
    del alive
    return found


def test_from_the_second_step_on_all_arrays_lie_in_one_block(shim: ShimDevice) -> None:
    sizes = [1000, 64, 3, 5000, 5000, 1, 700]
    offsets(shim, sizes)
    arena = shim.arena
    assert arena.missed == len(sizes)  # the first shows how much is needed
    second = offsets(shim, sizes)
    assert arena.missed == len(sizes) and offsets(shim, sizes) == second
    assert all(address % ALIGNMENT == 0 for address in second)
    # what is alive together, and the largest that died, fit; the sum of all is 12 more arrays
    assert 4 * (64 + 5000 + 1) < arena.capacity < 4 * sum(sizes)
    offsets(shim, sizes[:3])  # a smaller step, an evaluation, moves nothing
    assert offsets(shim, sizes) == second
    capacity = arena.capacity
    offsets(shim, [*sizes, 10**4])  # a larger one makes the block grow
    assert arena.capacity > capacity
    missed = arena.missed
    offsets(shim, [*sizes, 10**4])
    assert arena.missed == missed


def test_an_array_holds_its_place_while_a_view_of_it_lives(shim: ShimDevice) -> None:
    for _ in range(2):
        with shim.arena.step():
            view = devices.empty((1000,), np.float32)[10:20].reshape(2, 5)
            view[...] = 7
            for _ in range(5):
                devices.empty((1000,), np.float32)[...] = 1
            assert (view == 7).all()


def test_arrays_die_with_the_outermost_step(shim: ShimDevice) -> None:
    for _ in range(2):
        with shim.arena.step():
            with shim.arena.step():
                inner = devices.zeros((100,), np.float32)
            assert not inner.any()
            with shim.arena.lasting():
                kept = devices.zeros((100,), np.float32)
            params = ops_bf16.parameters({"w": ops.from_numpy(np.ones((2, 4), np.float32))})
    assert np.isnan(inner).all()
    assert not kept.any() and (params["w"] == 0x3F80).all()
    del inner  # late: its place belongs to nobody by now
    with shim.arena.step():
        one, two = devices.zeros((100,), np.float32), devices.zeros((100,), np.float32)
        assert abs(shim.address(one) - shim.address(two)) >= 400


@pytest.mark.parametrize("name", ["myllm", "gpt2", "dropout"])
def test_a_step_in_the_arena_gives_the_bits_of_one_without(
    shim: ShimDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is dead or new holds NaN, so whatever reads it shows."""
    config = MODELS[name]
    flat, data = parameters(config), batch(config)
    for module in (ops, ops_bf16):
        losses, gradient, master = train(module, config, flat, data, 3)
        assert 0 < shim.arena.missed and shim.arena.capacity
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "empty", lambda arena, *what: shim.empty(*what))
            without = train(module, config, flat, data, 3)
        assert losses == without[0]
        np.testing.assert_array_equal(gradient, without[1])
        np.testing.assert_array_equal(master, without[2])


def test_a_run_allocates_in_its_first_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.cuda.device._device", None)
    device = install("none", monkeypatch.setattr)
    config = prepare(tmp_path, run__backend="cuda", run__compute="bf16", run__eval_every=2)
    trainer = Trainer(config, Solo())
    blocks: list[Array] = []
    missed: list[int] = []
    original = trainer.stepper.update

    def update(*arguments: Any) -> None:
        original(*arguments)
        blocks.append(device.arena._block)
        missed.append(device.arena.missed)

    monkeypatch.setattr(trainer.stepper, "update", update)
    assert trainer.run(StopRequest()) is None
    assert len(blocks) == config.steps
    assert len({id(block) for block in blocks}) == 1 and len(set(missed)) == 1


def test_keeping_less_takes_a_smaller_block(shim: ShimDevice) -> None:
    config = dataclasses.replace(MODELS["myllm"], n_layers=6, vocab_size=5)
    layout = decoder_layout(config)
    params = ops.parameters(layout.views(ops.from_numpy(layout.init(0))))
    grads = layout.views(ops.from_numpy(layout.init(0)))
    ids = np.random.default_rng(0).integers(0, 5, (16, 12)).astype(np.int32)
    taken = []
    for level in ("none", "norms", "block"):
        shim.arena = Arena(shim)
        with ops.step():
            given = ops.from_numpy(ids)
            cache = loss_forward(ops, params, config, given, given, recompute=level)[1]  # type: ignore[arg-type]
            loss_backward(1.0, cache, grads)
            del cache
        taken.append(shim.arena.capacity)
    rows, D, F = ids.size, config.d_model, config.d_ff
    dropped = 4 * rows * config.n_layers * (2 * D + F)
    assert taken[0] > taken[1] > taken[2]
    assert taken[0] - taken[1] > 0.8 * dropped  # what is made again needs room for a moment
