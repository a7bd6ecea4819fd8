"""Decoding on the cuda backend: single launches, and the same recorded once and sent again."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import decode, ops, ops_bf16, recorded
from accel.cuda import device as devices
from accel.cuda.loss import losses_of
from accel.tolerance import round_bf16
from reference import model
from reference.params import decoder_layout
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice, ShimError
from tests.helpers.cuda_cases import relative_error
from tests.helpers.cuda_decoding import LENGTHS, Text, attended, exact, ids_of
from tests.helpers.cuda_models import bf16_weights, parameters
from tests.helpers.models import MODELS

require.shim()

MODULES = pytest.mark.parametrize("module", [ops, ops_bf16], ids=["float32", "bf16"])
N = 8  # tokens: by single launches, recorded, and sent again


@pytest.fixture
def device() -> Iterator[ShimDevice]:
    found = ShimDevice("shuffled")
    before = devices.use(found)
    yield found
    devices.use(before)


def text(module: Any, name: str = "myllm") -> Text:
    config = MODELS[name]
    flat = parameters(config)
    return Text(module, config, bf16_weights(config, flat), ids_of(config))


@MODULES
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_the_reference(name: str, module: Any, device: ShimDevice) -> None:
    mine = text(module, name)
    wanted = exact(mine.config, bf16_weights(mine.config, parameters(mine.config)), mine.ids, N)
    for n, (got, want) in enumerate(zip(mine.steps(N), wanted, strict=True)):
        for row in range(len(LENGTHS)):
            error = relative_error(got[row], want[row])
            assert error <= (1e-5 if module is ops else 0.03), (n, row)


@MODULES
@pytest.mark.parametrize("name", ["myllm", "gpt2", "qk_norm_windows", "alibi_window_qk_norm"])
def test_recorded_tokens_have_the_bits_of_single_launches(
    name: str, module: Any, device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = text(module, name).steps(N)
    monkeypatch.setattr(decode, "kept", lambda make, *_: make(devices.current()))
    for a, b in zip(text(module, name).steps(N), recorded, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_recorded_token_is_no_launch_of_python_s(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = text(ops_bf16)
    mine.steps(2)
    wanted: list[str] = []
    launch = devices.launch

    def noted(source: str, kernel: str, *given: Any, **more: Any) -> None:
        wanted.append(kernel)
        launch(source, kernel, *given, **more)

    for module in ("accel.cuda.arrays", "accel.cuda.decode", "accel.cuda.norm"):
        monkeypatch.setattr(f"{module}.launch", noted)
    device.launches.clear()
    mine.step()
    assert wanted == ["copy_strided"] * 2  # the ids in, the logits out
    assert device.launches.count("attend_parts") == mine.config.n_layers
    assert len(device.launches) > 10 * mine.config.n_layers


def test_other_caches_rows_and_weights_are_recorded_apart(device: ShimDevice) -> None:
    mine, other = text(ops_bf16), text(ops_bf16)
    alone = mine.steps(N)
    mine.start()
    for n in range(N):  # by turns, with caches of their own
        np.testing.assert_array_equal(mine.step(), alone[n])
        np.testing.assert_array_equal(other.step(), alone[n])
    # fewer rows of one cache: what a row gives does not depend on the others
    mine.start()
    mine.steps(3)
    k, v = mine.cache
    fewer = type(mine.cache)([x[:2] for x in k], [x[:2] for x in v])
    for n in range(3, 6):
        token = ops_bf16.from_numpy(mine.ids[np.arange(2), mine.at[:2]])
        got = ops_bf16.decode_step(mine.params, mine.config, token, fewer, mine.at[:2])
        np.testing.assert_array_equal(ops_bf16.to_numpy(got), alone[n][:2])
        mine.at = mine.at + 1


def test_plain_weights_are_rounded_as_the_backend_rounds(device: ShimDevice) -> None:
    mine, plain = text(ops_bf16, "gpt2"), text(ops_bf16, "gpt2")
    plain.params = decoder_layout(plain.config).views(plain.flat)
    for a, b in zip(mine.steps(4), plain.steps(4), strict=True):
        np.testing.assert_array_equal(a, b)
    token = ops.from_numpy(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="the cache must be float32 as its keys, got bf16"):
        ops.decode_step(plain.params, plain.config, token, plain.cache, plain.at)


def test_the_same_keys_with_other_values_are_another_kind(device: ShimDevice) -> None:
    mine, other = text(ops), text(ops)
    wanted = other.steps(4)[3]
    mine.steps(3)
    k, v = mine.cache
    moved = [ops.scale_forward(x, factor=1.0)[0] for x in v]
    for x in v:
        devices.current().clear(x)
    mine.cache = type(mine.cache)(k, moved)
    np.testing.assert_array_equal(mine.step(), wanted)


def test_what_is_asked_for_again_is_kept_before_what_is_not(
    device: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "KINDS", 2)
    made: list[str] = []

    def ask(name: str) -> None:
        assert recorded.kept(lambda _: made.append(name) or name, (name,)) == name

    for name in "abacaba":
        ask(name)
    assert made == ["a", "b", "c", "b"] and len(device.recordings) == 2


def test_weights_that_change_where_they_lie_are_read_anew(device: ShimDevice) -> None:
    mine = text(ops)
    mine.steps(3)
    ops.scale_forward(mine.flat, factor=0.5, out=mine.flat)
    mine.start()
    fresh = Text(ops, mine.config, ops.to_numpy(mine.flat), mine.ids)
    for a, b in zip(mine.steps(3), fresh.steps(3), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_weights_of_the_same_cache_are_another_kind(device: ShimDevice) -> None:
    mine = text(ops_bf16)
    first = mine.steps(3)
    halves = {name: ops_bf16.scale_forward(x, factor=0.5)[0] for name, x in mine.params.items()}
    whole, mine.params = mine.params, halves
    mine.at = LENGTHS.copy()
    second = mine.steps(3)
    assert not np.array_equal(first[2], second[2])
    fresh = Text(ops_bf16, mine.config, ops_bf16.to_numpy(mine.flat), mine.ids)
    fresh.cache, fresh.params, fresh.at = mine.cache, halves, LENGTHS.copy()
    device.recordings.clear()
    for a, b in zip(fresh.steps(3), second, strict=True):
        np.testing.assert_array_equal(a, b)
    # one entry alone, of the same mapping
    mine.params = dict(whole)
    mine.params["embedding.weight"] = halves["embedding.weight"]
    mine.at = LENGTHS.copy()
    mixed = mine.steps(2)
    assert not np.array_equal(mixed[1], first[1]) and not np.array_equal(mixed[1], second[1])


def test_a_token_within_a_step_is_of_single_launches(device: ShimDevice) -> None:
    mine, other = text(ops), text(ops)
    wanted = other.steps(6)
    for a, b in zip(mine.steps(2), wanted, strict=False):
        np.testing.assert_array_equal(a, b)
    for n in range(2, 6):
        with ops.step():
            held = devices.zeros((1000,), np.float32)
            np.testing.assert_array_equal(mine.step(), wanted[n])
            assert not device.download(held).any()


def test_logits_stay_as_they_are_when_the_next_token_comes(device: ShimDevice) -> None:
    mine = text(ops)
    kept, copies = [], []
    for n in range(4):
        token = ops.from_numpy(mine.ids[np.arange(3), mine.at + n])
        kept.append(ops.decode_step(mine.params, mine.config, token, mine.cache, mine.at + n))
        copies.append(ops.to_numpy(kept[-1]))
    for a, b in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(ops.to_numpy(a), b)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_an_id_that_does_not_exist_is_named_and_loses_nothing(
    before: int, device: ShimDevice
) -> None:
    mine, other = text(ops), text(ops)
    mine.steps(before), other.steps(before)
    vocabulary = mine.config.vocab_size
    for wrong in (vocabulary, -1):
        token = ops.from_numpy(np.array([0, wrong, 0], np.int32))
        said = rf"decode_step: token must lie in 0\.\.{vocabulary - 1} .*token\[1\] is {wrong}"
        with pytest.raises(ValueError, match=said):
            ops.decode_step(mine.params, mine.config, token, mine.cache, mine.at)
    for a, b in zip(mine.steps(3), other.steps(3), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_fit_is_refused(device: ShimDevice) -> None:
    mine = text(ops)
    given = mine.params, mine.config
    with pytest.raises(ValueError, match=r"token must be integers \(int32\), got float32"):
        ops.decode_step(*given, ops.from_numpy(np.zeros(3, np.float32)), mine.cache, mine.at)
    token = ops.from_numpy(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"position must lie in 0\.\.11"):
        ops.decode_step(*given, token, mine.cache, mine.at + 12)
    with pytest.raises(ValueError, match=r"position must lie in 0\.\.11"):
        ops.decode_step(*given, token, mine.cache, mine.at - 5)
    with pytest.raises(ValueError, match=r"one for each row, got \(0,\)"):
        ops.decode_step(*given, token[:0], mine.cache, mine.at[:0])
    k, v = mine.cache
    with pytest.raises(ValueError, match=r"cache\.k must have an array for each of 2 .*, got 3"):
        ops.decode_step(*given, token, type(mine.cache)([*k, v[0]], v[1:]), mine.at)
    less = {name: x for name, x in mine.params.items() if name != "embedding.weight"}
    with pytest.raises(ValueError, match=r"embedding\.weight"):
        ops.decode_step(less, mine.config, token, mine.cache, mine.at)
    short = {**mine.params, "embedding.weight": mine.params["embedding.weight"][:5]}
    with pytest.raises(ValueError, match=r"embedding\.weight must have shape \(31, 16\)"):
        ops.decode_step(short, mine.config, token, mine.cache, mine.at)
    narrow = ops_bf16.kv_cache(*given, 3, 12)
    with pytest.raises(ValueError, match="the cache must be float32 as its keys, got bf16"):
        ops.decode_step(*given, token, narrow, mine.at)
    with pytest.raises(ValueError, match="the cache must be float32 as its values, got bf16"):
        ops.decode_step(*given, token, type(narrow)(k, narrow.v), mine.at)
    wide = [ops.from_numpy(np.zeros((*x.shape[:3], 12), np.float32))[..., ::2] for x in k]
    with pytest.raises(ValueError, match="contiguous along a head's width, as kv_cache makes it"):
        ops.decode_step(*given, token, type(narrow)(wide, v), mine.at)


def test_a_step_keeps_neither_cache_nor_weights(device: ShimDevice) -> None:
    mine = text(ops)
    mine.steps(3)
    held = device.memory()
    sizes = mine.flat.nbytes + sum(x.nbytes for x in (*mine.cache.k, *mine.cache.v))
    del mine
    gc.collect()
    assert device.memory() <= held - sizes


def test_nothing_passes_to_the_host_while_calls_are_recorded(device: ShimDevice) -> None:
    array = device.upload(np.zeros(3))
    with pytest.raises(ShimError, match="nothing passes between"):
        device.record(lambda: device.download(array) and None)
    device.record(lambda: device.clear(array))
    device.download(array)


@pytest.mark.parametrize("module", [ops, ops_bf16])
def test_ids_and_targets_that_do_not_exist_read_nothing(module: Any) -> None:
    before = devices.use(ShimDevice(races=True))
    V, D = 7, 24
    table = module.from_numpy(np.ones((V, D), np.float32), activation=True)
    wrong = np.array([0, -1, V, 2**30, V - 1, -(2**31)], np.int32)
    found = module.to_numpy(module.lookup(module.from_numpy(wrong), table))
    assert (found == np.isin(wrong, np.arange(V))[:, None]).all()
    x = module.from_numpy(np.ones((len(wrong), D), np.float32), activation=True)
    targets = module.from_numpy(wrong)
    losses, cache = losses_of(x, table, targets, None, None, need_backward=True)
    exist = np.isin(wrong, np.arange(V))
    assert ((module.to_numpy(losses) > 1) == exist).all()
    dx = module.to_numpy(cache.dx)
    assert (dx[~exist] == 0).all() and np.isfinite(dx).all()
    devices.use(before)


# ---- attention to a cache ------------------------------------------------------------------------

HEADS = [(1, 1, 6), (4, 2, 16), (9, 1, 64), (14, 2, 128), (3, 3, 40), (2, 1, 264)]  # Hq, Hkv, d


@pytest.mark.parametrize("kind", [np.float32, np.uint16], ids=["float32", "bf16"])
@pytest.mark.parametrize(("Hq", "Hkv", "d"), HEADS)
@pytest.mark.parametrize("options", ["", "window", "alibi", "ring"])
def test_attention_to_a_cache_equals_the_sum_over_keys(
    options: str, Hq: int, Hkv: int, d: int, kind: Any
) -> None:
    rng = np.random.default_rng(d)
    S = 130 if options == "ring" else 300
    last = [700, 129, 3] if options == "ring" else [299, 127, 128]
    window = {"window": 150, "ring": S}.get(options, 0)
    alibi = rng.random(Hq).astype(np.float32) / 50 if options == "alibi" else None
    module = ops if kind is np.float32 else ops_bf16
    arrays = [
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((3, 1, Hq, d), (3, S, Hkv, d), (3, S, Hkv, d))
    ]
    if kind is not np.float32:
        arrays = [round_bf16(x) for x in arrays]
    positions = np.array(last, np.int32)
    wanted = attended(*arrays, positions, alibi, window)
    for x in arrays[1:]:  # what was never written may be anything
        for b, t in enumerate(last):
            x[b, t + 1 :] = np.nan
    results = []
    for order in ORDERS:
        before = devices.use(ShimDevice(order))
        given: list[Array] = [module.from_numpy(x, activation=True) for x in arrays]
        wide = np.full((3, S + 2, Hkv + 1, d), np.nan, np.float32)  # v lies otherwise than k
        wide[:, 2:, 1:] = arrays[2]
        given[2] = module.from_numpy(wide, activation=True)[:, 2:, 1:]
        where = module.from_numpy(positions)
        slopes = None if alibi is None else module.from_numpy(alibi)
        results.append(module.to_numpy(decode.attend(*given, where, slopes, window)))
        devices.use(before)
    assert relative_error(results[0], wanted) <= (1e-5 if module is ops else 0.004)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_the_longest_context_s_parts_are_joined() -> None:
    before = devices.use(ShimDevice())
    rng = np.random.default_rng(0)
    S = 40 * decode.PART + 3  # more parts than the threads that join them
    arrays = [rng.standard_normal((1, n, 1, 4)).astype(np.float32) for n in (1, S, S)]
    given = [ops.from_numpy(x) for x in arrays]
    for position in (S - 1, 35 * decode.PART, 35 * decode.PART - 1):
        where = np.array([position], np.int32)
        got = ops.to_numpy(decode.attend(*given, ops.from_numpy(where), None, 0))
        assert relative_error(got, attended(*arrays, where, None, 0)) <= 1e-5, position
    devices.use(before)


def test_prompts_are_read_on_from_what_tokens_have_written(device: ShimDevice) -> None:
    mine = text(ops)
    mine.steps(3)
    one = ops.from_numpy(mine.ids[:1, 6:8])
    k, v = ([x[:1] for x in side] for side in mine.cache)
    cache = type(mine.cache)(k, v)
    got = model.prefill(ops, mine.params, mine.config, one, np.array([2]), cache, start=6)
    want = exact(mine.config, bf16_weights(mine.config, parameters(mine.config)), mine.ids, 5)
    assert relative_error(ops.to_numpy(got)[0], want[4][0]) <= 1e-5
