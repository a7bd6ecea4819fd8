"""Gradients of micro-batches on the cuda backend: one by one, recorded, and sent again."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import attention, ops, ops_bf16
from accel.cuda import device as devices
from accel.cuda.device import BF16, F32, launch
from accel.cuda.recorded import Recorded, RecordedOps
from reference import model
from reference.params import decoder_layout
from reference.types import Array, DropoutKey, Loss
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.helpers.cuda_models import B, T, bf16_weights, parameters
from tests.helpers.models import MODELS

require.shim()

MODULES = pytest.mark.parametrize("module", [ops, ops_bf16], ids=["float32", "bf16"])


@pytest.fixture
def device() -> Iterator[ShimDevice]:
    found = ShimDevice("shuffled")
    before = devices.use(found)
    yield found
    devices.use(before)


WIDE = dataclasses.replace(MODELS["myllm"], d_head=16)  # as tensor cores take it


class Micro:
    """A model, and gradients of batches that are drawn by a number."""

    def __init__(self, module: Any, name: str, buffers: int = 1) -> None:
        self.module, self.config = module, MODELS.get(name, WIDE)
        self.layout = decoder_layout(self.config)
        flat = bf16_weights(self.config, parameters(self.config))
        self.master = module.from_numpy(flat)
        self.params = module.parameters(self.layout.views(self.master))
        self.leaves = [module.from_numpy(np.zeros_like(flat)) for _ in range(buffers)]

    def batch(self, seed: int, shape: tuple[int, int] = (B, T)) -> list[Array]:
        rng = np.random.default_rng(seed)
        V = self.config.vocab_size
        ids, targets = (rng.integers(0, V, shape).astype(np.int32) for _ in range(2))
        documents = np.cumsum(rng.random(shape) < 0.2, axis=1).astype(np.int32)
        return [ids, targets, rng.random(shape) < 0.8, documents]

    def gradient(
        self, given: list[Any], leaf: int = 0, *, plain: bool = False, **how: Any
    ) -> tuple[Loss, Array]:
        """Return the loss and the flat gradient, by the backend's way or launch by launch."""
        module, flat = self.module, self.leaves[leaf]
        arrays = [None if x is None else module.from_numpy(x) for x in given]
        views = self.layout.views(flat)
        rest = self.params, self.config, *arrays, views
        if plain:
            loss = model.gradient(module, *rest, **how)
        else:
            loss = module.gradient(*rest, **how)
        return loss, np.array(module.to_numpy(flat))


def same(a: tuple[Loss, Array], b: tuple[Loss, Array]) -> None:
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


@MODULES
@pytest.mark.parametrize("name", MODELS)
def test_recorded_gradients_have_the_bits_of_single_launches(
    name: str, module: Any, device: ShimDevice
) -> None:
    with module.step():  # so that there is room in the arena when the first one comes
        devices.empty((1 << 20,), np.uint8)
    micro = Micro(module, name)
    for seed in range(4):
        given = micro.batch(seed)
        same(micro.gradient(given), micro.gradient(given, plain=True))


@pytest.mark.parametrize("recompute", ["norms", "block"])
def test_what_is_made_again_is_recorded_too(recompute: Any, device: ShimDevice) -> None:
    micro = Micro(ops_bf16, "qk_norm_windows")
    for seed in range(3):
        given = micro.batch(seed)
        device.launches.clear()
        same(micro.gradient(given, recompute=recompute), micro.gradient(given, plain=True))
        again = len(device.launches)
        device.launches.clear()
        same(micro.gradient(given), micro.gradient(given, plain=True))
        assert again > len(device.launches)  # in each of the three ways


def test_masks_shapes_and_buffers_are_recorded_apart(device: ShimDevice) -> None:
    micro = Micro(ops_bf16, "myllm", buffers=2)
    kinds = [
        micro.batch(0),
        [*micro.batch(1)[:3], None],
        [*micro.batch(2)[:2], None, None],
        micro.batch(3, (B + 1, T - 2)),
    ]
    for _ in range(4):
        for given in kinds:
            for leaf in range(2):
                same(micro.gradient(given, leaf), micro.gradient(given, leaf, plain=True))


def test_a_recorded_micro_batch_asks_for_few_launches(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro = Micro(ops_bf16, "myllm")
    for seed in range(2):
        micro.gradient(micro.batch(seed))
    asked: list[str] = []

    def noted(source: str, kernel: str, *given: Any, **more: Any) -> None:
        asked.append(kernel)
        launch(source, kernel, *given, **more)

    modules = ("arrays", "attention", "elementwise", "embedding", "loss", "norm")
    for name in modules:
        monkeypatch.setattr(f"accel.cuda.{name}.launch", noted)
    device.launches.clear()
    given = micro.batch(2)
    found = micro.gradient(given)
    assert asked == ["copy_strided", "copy_strided", "copy_bytes", "copy_strided"]  # the inputs
    assert len(device.launches) > 20 * micro.config.n_layers
    same(found, micro.gradient(given, plain=True))


def test_plain_weights_are_read_by_each_mode_in_its_own_way(device: ShimDevice) -> None:
    rounded, strict = Micro(ops_bf16, "gpt2"), Micro(ops, "gpt2")
    plain = rounded.layout.views(rounded.master)
    for micro in (rounded, strict):
        micro.params, micro.leaves = plain, rounded.leaves  # the same arrays
    given = rounded.batch(0)
    wanted = [micro.gradient(given, plain=True) for micro in (rounded, strict)]
    assert wanted[0][0].total != wanted[1][0].total
    for _ in range(3):
        same(rounded.gradient(given), wanted[0])
        same(strict.gradient(given), wanted[1])


def test_what_comes_in_between_a_recording_leaves_it_to_be_done_again(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro = Micro(ops_bf16, "myllm")
    micro.gradient(micro.batch(0))
    given = micro.batch(1)
    with monkeypatch.context() as patch:

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(model, "loss_backward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            micro.gradient(given)
    for _ in range(2):
        same(micro.gradient(given), micro.gradient(given, plain=True))


def counted(device: ShimDevice, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each recording."""
    found: list[bool] = []
    record = device.record

    def noted(run: Any) -> Any:
        found.append(True)
        return record(run)

    monkeypatch.setattr(device, "record", noted)
    return found


def test_what_moves_the_arena_is_noticed(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro, recorded = Micro(ops_bf16, "myllm"), counted(device, monkeypatch)
    for seed in range(3):
        micro.gradient(micro.batch(seed))
    assert len(recorded) == 1
    capacity, held = device.arena.capacity, device.memory()
    with ops_bf16.step():
        devices.empty((4 * capacity,), np.uint8)
    assert device.arena.capacity > capacity
    # nothing that was recorded keeps the memory that it was recorded for
    assert device.memory() == held - capacity + device.arena.capacity
    for seed in range(3, 6):
        given = micro.batch(seed)
        same(micro.gradient(given), micro.gradient(given, plain=True))
    assert len(recorded) == 2


def test_an_arena_that_is_too_small_is_recorded_in_once_more(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro, recorded = Micro(ops_bf16, "myllm"), counted(device, monkeypatch)
    micro.gradient(micro.batch(0))
    device.arena._intervals.end = 0  # as if it had given its block up
    device.arena._block, device.arena.capacity = None, 0
    for seed in range(3):
        given = micro.batch(seed)
        same(micro.gradient(given), micro.gradient(given, plain=True))
        missed = device.arena.missed
    assert len(recorded) == 2 and device.arena.missed == missed


def test_constants_are_told_apart(device: ShimDevice) -> None:
    recorded = Recorded(device)
    mine = RecordedOps(ops_bf16, recorded, 12)
    x = np.arange(4, dtype=np.float32)
    first = [mine.from_numpy(x), mine.from_numpy(x, activation=True), mine.from_numpy(x[None])]
    assert [(a.shape, a.dtype) for a in first] == [((4,), F32), ((4,), BF16), ((1, 4), F32)]
    assert mine.from_numpy(x.copy()) is first[0] and mine.from_numpy(x + 1) is not first[0]


def test_an_arena_that_could_not_grow_goes_on(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro = Micro(ops_bf16, "myllm")
    for seed in range(3):
        micro.gradient(micro.batch(seed))
    room = 4 * device.arena.capacity
    block = devices.empty((room,), np.uint8)
    empty = device.empty

    def full(shape: tuple[int, ...], dtype: Any) -> Any:
        if len(shape) == 1 and shape[0] > room:
            raise OSError("the GPU's memory is full")
        return empty(shape, dtype)

    monkeypatch.setattr(device, "empty", full)
    with pytest.raises(OSError, match="memory is full"), ops_bf16.step():
        held = [devices.empty((room // 2,), np.uint8) for _ in range(3)]
        assert len(held) == 3 and block.size
    for seed in range(3, 6):
        given = micro.batch(seed)
        same(micro.gradient(given), micro.gradient(given, plain=True))


def test_another_path_of_attention_is_recorded_anew(device: ShimDevice) -> None:
    micro = Micro(ops_bf16, "wide")
    for path in ("mma", "plain", "mma"):
        attention.take(path)
        for seed in range(3):
            given = micro.batch(seed)
            same(micro.gradient(given), micro.gradient(given, plain=True))


def test_weights_that_are_updated_are_read_anew(device: ShimDevice) -> None:
    micro, plain = Micro(ops_bf16, "gpt2"), Micro(ops_bf16, "gpt2")
    for step in range(1, 5):
        given = micro.batch(step)
        same(micro.gradient(given), plain.gradient(given, plain=True))
        for one in (micro, plain):
            state = [ops_bf16.from_numpy(np.zeros(one.layout.size, np.float32)) for _ in range(2)]
            numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
            ops_bf16.adamw(one.master, *state, one.leaves[0], step=1, n_decayed=9, **numbers)
            one.params = ops_bf16.parameters(one.layout.views(one.master))


def test_dropout_and_who_wants_to_know_of_layers_get_single_launches(device: ShimDevice) -> None:
    micro = Micro(ops, "dropout")
    for step in range(3):
        given, told = micro.batch(step), []
        key = DropoutKey(3, step, 5, 0)
        dropped = micro.gradient(given, dropout_key=key)
        same(dropped, micro.gradient(given, plain=True, dropout_key=key))
        plain = micro.gradient(given, finished=told.append)
        same(plain, micro.gradient(given))
        assert told == [1, 0] and plain[0] != dropped[0]


def test_within_a_step_launches_are_single(device: ShimDevice) -> None:
    micro = Micro(ops, "myllm")
    given = micro.batch(0)
    wanted = micro.gradient(given, plain=True)
    for _ in range(3):
        same(micro.gradient(given), wanted)
        with ops.step():
            held = devices.zeros((1000,), np.float32)
            same(micro.gradient(given), wanted)
            assert not device.download(held).any()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_ids_and_targets_that_do_not_exist_are_named(before: int, device: ShimDevice) -> None:
    micro = Micro(ops_bf16, "myllm")
    V = micro.config.vocab_size
    for seed in range(before):
        micro.gradient(micro.batch(seed))
    for which, value, said in (
        (0, V, rf"embedding: ids must lie in 0\.\.{V - 1} \(the table .* ids\[1, 3\] is {V}"),
        (1, -1, r"linear_cross_entropy: targets must lie .* targets\[1, 3\] is -1"),
        (1, V, rf"linear_cross_entropy: targets must lie .* targets\[1, 3\] is {V}"),
    ):
        given = micro.batch(7)
        given[which][1, 3] = value
        given[2][1, 3] = True
        with pytest.raises(ValueError, match=said):
            micro.gradient(given)
    given = micro.batch(8)
    given[1][given[2] == 0] = V + 5  # targets that do not count may be anything
    same(micro.gradient(given), micro.gradient(given, plain=True))


@pytest.mark.parametrize(
    ("which", "value", "said"),
    [
        (1, lambda x: x[:, :-1], r"targets must have shape \(2, 9\).*got \(2, 8\)"),
        (1, lambda x: np.concatenate([x, x], 1), r"targets must have shape .*got \(2, 18\)"),
        (1, lambda x: x.reshape(-1), r"targets must have shape .*got \(18,\)"),
        (2, lambda x: x[:, :-1], r"mask must have shape"),
        (3, lambda x: x[:1], r"documents must have shape"),
        (0, lambda x: x.astype(np.int64), "ids must be int32, got int64"),
        (1, lambda x: x.astype(np.int64), "targets must be int32, got int64"),
        (2, lambda x: x.astype(np.int32), "mask must be bool, got int32"),
        (3, lambda x: x.astype(np.uint8), "documents must be int32, got uint8"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    which: int, value: Any, said: str, device: ShimDevice
) -> None:
    micro = Micro(ops, "myllm")
    micro.gradient(micro.batch(0))
    given = micro.batch(1)
    given[which] = value(given[which])
    with pytest.raises(ValueError, match=f"gradient: {said}"):
        micro.gradient(given)
    with pytest.raises(ValueError, match=f"gradient: {said}"):  # and is not kept
        micro.gradient(given)


def test_parameters_that_do_not_fit_are_refused(device: ShimDevice) -> None:
    micro = Micro(ops, "myllm")
    given = micro.batch(0)
    whole = micro.params
    micro.params = {**whole, "embedding.weight": whole["embedding.weight"][:5]}
    with pytest.raises(ValueError, match=r"gradient: embedding\.weight must have shape \(31, 16\)"):
        micro.gradient(given)
    micro.params = {name: x for name, x in whole.items() if name != "embedding.weight"}
    with pytest.raises(ValueError, match=r"embedding\.weight"):
        micro.gradient(given)


def test_gradients_that_lie_otherwise_at_the_same_place_are_another_kind(
    device: ShimDevice,
) -> None:
    micro = Micro(ops, "myllm")
    for seed in range(3):
        micro.gradient(micro.batch(seed))
    views = micro.layout.views(micro.leaves[0])
    square = next(name for name, x in views.items() if x.shape == (24, 16))
    views[square] = views[square].reshape(16, 24).T
    arrays = [ops.from_numpy(x) for x in micro.batch(4)]
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.gradient(micro.params, micro.config, *arrays, views)


def test_nothing_is_held_but_what_is_small(device: ShimDevice) -> None:
    device.recordings.clear()
    micro = Micro(ops_bf16, "gpt2")
    for seed in range(3):
        micro.gradient(micro.batch(seed))
    held = device.memory() - device.arena.capacity
    sizes = [x.nbytes for x in (micro.master, micro.params.tie.copy, *micro.leaves)]
    del micro
    assert device.memory() - device.arena.capacity <= held - sum(sizes)
