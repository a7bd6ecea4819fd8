"""The KV cache of the mode bf16: what is kept, decoding from it, and reading on behind it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu import memory
from accel.cpu.halves import BF16, to_bf16, to_float32
from accel.tolerance import UNIT_ROUNDOFF, round_bf16
from accel.verify import check_op
from reference import model
from reference import ops as reference
from reference.ops import NAMES, Ops
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from reference.types import Array, KVCache
from tests.helpers.models import MODELS, toy, weights

MODELS = MODELS | {"wide": toy(MYLLM_1B, d_model=200, d_ff=391, vocab_size=1031, d_head=18)}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return accel.load("cpu", compute="bf16")


def keeping(ops: Ops) -> SimpleNamespace:
    """Return the mode as verify can ask it, which brings caches of float32: they are kept in bf16.

    What verify puts in is bf16 already.
    """

    def kept(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            at = next(i for i, a in enumerate(args) if isinstance(a, KVCache))
            given, cache = args[at], KVCache(*(to_bf16(np.asarray(a)) for a in args[at]))
            out = getattr(ops, name)(*args[:at], cache, *args[at + 1 :], **options)
            for there, here in zip(given, cache, strict=True):
                there[...] = ops.to_numpy(here)
            return out

        return call

    module = {name: getattr(ops, name) for name in NAMES}
    return SimpleNamespace(**module | {name: kept(name) for name in ("write_kv", "decode_step")})


@pytest.mark.parametrize("op", ["kv_cache", "write_kv", "decode_step"])
def test_it_is_as_close_to_the_reference_as_bf16_is(ops: Ops, op: str) -> None:
    with memory.poisoned():
        check_op(op, keeping(ops), dtypes=["bf16"], examples=60)


def test_what_is_written_is_rounded_once_and_lies_in_two_bytes_a_number(ops: Ops) -> None:
    config, params = MODELS["myllm"], {"embedding.weight": np.zeros((31, 16), np.float32)}
    k, v = np.random.default_rng(0).standard_normal((2, 3, 2, 2, 12)).astype(np.float32)
    k, v = k[..., ::2], v[..., 1::2]
    k[0, 0, 0, 0] = np.nan
    cache, copy = (ops.kv_cache(params, config, 3, 8) for _ in range(2))
    ops.write_kv(cache, k, v, layer=1, position=np.array([0, 6, 3]))
    for kept, given in ((cache.k, k), (cache.v, v)):
        assert [a.dtype for a in kept] == [BF16] * 2 and not kept[0].any()
        np.testing.assert_array_equal(ops.to_numpy(kept[1][1, 6:8]), round_bf16(given[1]))
        np.testing.assert_array_equal(ops.to_numpy(kept[1][0, :2]), round_bf16(given[0]))
        assert not kept[1][0, 2:].any()
    # from one place of the cache to another, as a batch moves a row
    ops.write_kv(copy, cache.k[1], cache.v[1], layer=1, position=0)
    assert copy.k[1].tobytes() == cache.k[1].tobytes()
    assert copy.v[1].tobytes() == cache.v[1].tobytes()


def test_every_half_becomes_a_number_and_the_same_half_again() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    wide = to_float32(halves)
    np.testing.assert_array_equal(wide.view(np.uint32), halves.astype(np.uint32) << 16)
    again = to_bf16(wide)
    np.testing.assert_array_equal(again[~np.isnan(wide)], halves[~np.isnan(wide)])
    assert np.isnan(to_float32(again[np.isnan(wide)])).all()
    assert to_float32(wide) is wide


@pytest.mark.parametrize("window", [0, 5])
def test_attention_reads_a_cache_as_the_numbers_that_it_keeps(ops: Ops, window: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 7, 6, 18)).astype(np.float32)
    kept = to_bf16(rng.standard_normal((2, 2, 90, 2, 18)).astype(np.float32))
    k, v = kept[:, :, :70]  # neighbours in memory only within a row
    got, cache = ops.attention_forward(q, k, v, window=window)
    wide = ops.attention_forward(q, to_float32(k), to_float32(v), window=window)
    assert got.dtype == np.float32 and got.tobytes() == wide[0].tobytes()
    gradients = zip(
        ops.attention_backward(got, cache), ops.attention_backward(got, wide[1]), strict=True
    )
    assert all(a.dtype == np.float32 and a.tobytes() == b.tobytes() for a, b in gradients)


def read(ops: Ops, params: Any, config: Any, ids: Array, pieces: list[int]) -> Array:
    """Return the logits behind each of the pieces that two texts are read in."""
    cache = ops.kv_cache(params, config, 2, config.context_length)
    found, done = [], 0
    for n in pieces:
        if n == 1 and done:
            found.append(ops.decode_step(params, config, ids[:, done], cache, done))
        else:
            part, lengths = np.ascontiguousarray(ids[:, done : done + n]), np.array([n, n])
            found.append(model.prefill(ops, params, config, part, lengths, cache, start=done))
        done += n
    return np.array(found, np.float64)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_read_in_pieces_is_as_exact_as_one_read_at_once(ops: Ops, name: str) -> None:
    """A prompt, more of it onto the cache, then tokens; at once, nothing is kept."""
    config = MODELS[name]
    pieces = [4, 1, 1, 1, 1] if config.window else [4, 3, 2, 1, 1]  # a window lets go of some
    layout, flat = decoder_layout(config), weights(config, np.float32)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, (2, 11)).astype(np.int32)
    ends = np.cumsum(pieces) - 1
    exact = model.logits(reference, layout.views(flat.astype(np.float64)), config, ids)[:, ends]
    params = ops.parameters(layout.views(flat))
    whole = model.logits(ops, params, config, ids)[:, ends]
    got = read(ops, params, config, ids, pieces).swapaxes(0, 1)
    error, plain = (np.linalg.norm(x - exact) for x in (got, whole))
    size = np.linalg.norm(exact)
    assert error <= 2 * plain + UNIT_ROUNDOFF["bf16"] * size
    assert error > 1e-4 * size, "this is not float32"


def test_a_cache_of_the_other_mode_is_refused(ops: Ops) -> None:
    config, plain = MODELS["myllm"], accel.load("cpu")
    views = decoder_layout(config).views(weights(config, np.float32))
    cache, token = ops.kv_cache(views, config, 1, 4), np.array([1], np.int32)
    with pytest.raises(ValueError, match="float32 or float64, but cache is uint16"):
        plain.decode_step(views, config, token, cache, 0)
    k = np.zeros((1, 1, 2, 6), np.float32)
    with pytest.raises(ValueError, match="share one dtype, uint16, got float32"):
        plain.write_kv(cache, k, k, layer=0, position=0)
    with pytest.raises(ValueError, match="arrays must share one dtype"):
        plain.write_kv(plain.kv_cache(views, config, 1, 4), *cache.k, layer=0, position=0)
