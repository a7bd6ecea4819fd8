"""Whole models on the cpu backend: loss, every gradient, training and generation."""

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu import bf16, decode, memory, q8
from accel.threads import available_cores, set_threads
from accel.tolerance import UNIT_ROUNDOFF
from reference import boundary
from reference import ops as reference
from reference.generate import generate
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from reference.session import Session
from reference.types import Array
from tests.helpers.models import MODELS, B, gradient, toy, weights


def difference(a: Array, b: Array) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_the_reference_in_float64(name: str) -> None:
    config = MODELS[name]
    flat = weights(config, np.float64)
    loss, grads = gradient(accel.load("cpu"), config, flat)
    expected_loss, expected = gradient(reference, config, flat)
    assert abs(loss / expected_loss - 1) < 1e-12
    views, expected_views = (decoder_layout(config).views(x) for x in (grads, expected))
    for key in views:
        assert difference(views[key], expected_views[key]) < 1e-12, key


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_in_float32_is_as_exact_as_the_reference_s(name: str) -> None:
    config = MODELS[name]
    flat = weights(config, np.float32)
    _, grads = gradient(accel.load("cpu"), config, flat)
    _, plain = gradient(reference, config, flat)
    _, exact = gradient(reference, config, flat.astype(np.float64))
    views, plains, exacts = (decoder_layout(config).views(x) for x in (grads, plain, exact))
    for key in views:
        # 16 roundings of the gradient itself stand for the floor, which no one op's magnitudes give
        allowed = 3 * difference(plains[key], exacts[key]) + 16 * UNIT_ROUNDOFF["float32"]
        assert difference(views[key], exacts[key]) <= allowed, key


def test_twenty_training_steps_stay_together() -> None:
    config = toy(MYLLM_1B)
    layout = decoder_layout(config)
    paths: dict[str, list[float]] = {}
    for name, ops, dtype in (
        ("ours", accel.load("cpu"), np.float32),
        ("plain", reference, np.float32),
        ("exact", reference, np.float64),
    ):
        flat = weights(config, dtype)
        m, v = np.zeros_like(flat), np.zeros_like(flat)
        losses = []
        for step in range(1, 21):
            loss, grads = gradient(ops, config, flat)
            losses.append(loss)
            scale = min(1.0, 10.0 / ops.global_norm(grads))
            ops.adamw(
                *(flat, m, v, grads),
                **{"step": step, "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
                **{"weight_decay": 0.1, "n_decayed": layout.n_decayed, "grad_scale": scale},
            )
        paths[name] = losses
    assert paths["exact"][-1] < 0.9 * paths["exact"][0]  # it learns, so the steps are real
    error, plain = (np.array(paths[n]) - paths["exact"] for n in ("ours", "plain"))
    size = np.array(paths["exact"])
    assert np.linalg.norm(error) <= 3 * np.linalg.norm(plain) + 1e-5 * np.linalg.norm(size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", MODELS)
def test_decode_step_equals_the_reference_at_rows_of_their_own(name: str, dtype: Any) -> None:
    config = MODELS[name]
    ops = accel.load("cpu")
    params = decoder_layout(config).views(weights(config, dtype))
    ours, theirs = (o.kv_cache(params, config, B, 12) for o in (ops, reference))
    rng = np.random.default_rng(0)
    limit = 1e-12 if dtype == np.float64 else 1e-5
    for step in range(10):
        token = rng.integers(0, config.vocab_size, B).astype(np.int32)
        position = step if step < 6 else np.array([step, step - 3, step + 2])
        got = ops.decode_step(params, config, token, ours, position)
        expected = reference.decode_step(params, config, token, theirs, position)
        assert got.dtype == dtype
        assert difference(got, expected) < limit
        for mine, other in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
            assert difference(mine, other) < limit


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_scores_that_are_all_minus_infinity_are_as_none(compute: str) -> None:
    """A score of numbers of 1e20 is beyond float32; the reference gives zeros."""
    config = toy(MYLLM_1B)
    params = decoder_layout(config).views(weights(config, np.float32))
    Hq, Hkv, d = config.n_heads, config.n_kv_heads, config.d_head
    some = 1e20 * np.random.default_rng(0).standard_normal((config.d_model, d)).astype(np.float32)
    for name, wqkv in params.items():
        if name.endswith("wqkv"):
            wqkv[:, : Hq * d] = np.tile(some, Hq)
            wqkv[:, Hq * d : (Hq + Hkv) * d] = np.tile(-some, Hkv)
    ops = accel.load("cpu", compute=compute)
    token = np.array([3, 5], np.int32)
    with np.errstate(over="ignore"):
        expected = reference.decode_step(
            params, config, token, reference.kv_cache(params, config, 2, 4), 0
        )
    ours = ops.parameters(params)
    got = ops.to_numpy(ops.decode_step(ours, config, token, ops.kv_cache(ours, config, 2, 4), 0))
    assert np.isfinite(expected).all()
    assert difference(got, expected) < (1e-5 if compute == "float32" else 0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": 700},  # a ring of blocks of keys, gone round at position 1023
        {"window": 600, "position": "alibi"},  # all are kept, and the first blocks are not seen
    ],
)
def test_decode_step_joins_blocks_of_keys(fields: dict[str, Any]) -> None:
    """Beyond KEY_BLOCK positions attention is joined from several blocks."""
    config = toy(MYLLM_1B, context_length=1100, n_layers=1, **fields)
    params = decoder_layout(config).views(weights(config, np.float64))
    ops = accel.load("cpu")
    ours, theirs = (o.kv_cache(params, config, 2, 1100) for o in (ops, reference))
    rng = np.random.default_rng(0)
    for mine, other in ((ours.k[0], theirs.k[0]), (ours.v[0], theirs.v[0])):
        other[...] = rng.standard_normal(other.shape)
        mine[...] = other
    token = np.array([3, 4], np.int32)
    for position in ([30, 1099], [31, 32], [510, 511], [1023, 1024]):
        got = ops.decode_step(params, config, token, ours, np.array(position))
        expected = reference.decode_step(params, config, token, theirs, np.array(position))
        assert difference(got, expected) < 1e-12


@pytest.mark.parametrize("compute", ["float32", "bf16", "q8_0"])
def test_decode_step_reads_the_weights_that_it_is_given_now(
    compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was gathered for one token serves the next as long as the arrays are the same."""
    config = toy(MYLLM_1B)
    ops = accel.load("cpu", compute=compute)
    layout, flat = decoder_layout(config), weights(config, np.float32)
    made = [ops.parameters(layout.views(flat * np.float32(by))) for by in (1, 1.5)]

    def logits(params: dict[str, Array]) -> Array:
        cache = ops.kv_cache(params, config, 1, 4)
        return ops.decode_step(params, config, np.array([3], np.int32), cache, 0)

    params = dict(made[0])
    before = logits(params)
    np.testing.assert_array_equal(logits(params), before)
    for name in ("layers.1.ffn.w_down", "layers.0.ffn_norm.gain"):
        params[name] = made[1][name]
        mixed = logits(params)
        assert not np.array_equal(mixed, before)
        monkeypatch.setattr(decode, "_latest", None)
        before = logits(params)
        np.testing.assert_array_equal(mixed, before)
    gain = params["final_norm.gain"]
    gain *= 2  # in place
    assert difference(logits(params), 2 * before) < 1e-6
    params["final_norm.gain"] = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"final_norm\.gain must have shape"):
        logits(params)
    del params["final_norm.gain"]
    with pytest.raises(ValueError, match=r"missing final_norm\.gain"):
        logits(params)


def test_decode_step_keeps_no_weights_but_reads_those_that_are_not_contiguous() -> None:
    config = toy(MYLLM_1B)
    ops = accel.load("cpu")
    params = decoder_layout(config).views(weights(config, np.float32))
    name = "layers.0.attention.wo"
    params[name] = np.asfortranarray(params[name])
    cache = ops.kv_cache(params, config, 1, 4)
    token = np.array([3], np.int32)
    before = ops.decode_step(params, config, token, cache, 0)
    params[name] *= 2
    assert not np.array_equal(ops.decode_step(params, config, token, cache, 0), before)
    params[name] = np.ascontiguousarray(params[name])
    ops.decode_step(params, config, token, cache, 0)
    gone = weakref.ref(params.pop(name))
    assert gone() is None


@pytest.mark.parametrize(("compute", "module"), [("bf16", bf16), ("q8_0", q8)])
def test_decode_step_reads_forms_that_it_makes_anew_for_each_token(
    compute: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that did not come from ``ops.parameters`` have no forms that stay."""
    config = toy(MYLLM_1B)
    ops = accel.load("cpu", compute=compute)
    made: list[Array] = []  # else the next forms may lie where the former did

    def lasting(*arguments: Any) -> Array:
        made.append(memory.lasting(*arguments))
        return made[-1]

    monkeypatch.setattr(module, "lasting", lasting)
    params = decoder_layout(config).views(weights(config, np.float32))

    def logits(params: dict[str, Array]) -> Array:
        cache = ops.kv_cache(params, config, 1, 4)
        return ops.decode_step(params, config, np.array([3], np.int32), cache, 0)

    before = logits(params)
    params["layers.0.attention.wo"] *= 1.5
    after = logits(params)
    assert not np.array_equal(after, before)
    copies = {name: array.copy() for name, array in params.items()}
    np.testing.assert_array_equal(after, logits(copies))


@pytest.mark.parametrize("fields", [{}, {"window": (5, 0), "qk_norm": True}])
def test_generation_is_the_reference_s(fields: dict[str, Any]) -> None:
    config = toy(MYLLM_1B, context_length=40, **fields)
    params = decoder_layout(config).views(weights(config, np.float64))
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.8, "seed": 3}
    expected = generate(reference, params, config, prompts, **settings)
    assert generate(accel.load("cpu"), params, config, prompts, **settings) == expected


@pytest.mark.parametrize("fields", [{}, {"window": (5, 0), "qk_norm": True}])
def test_a_text_in_turns_is_the_reference_s(fields: dict[str, Any]) -> None:
    config = toy(MYLLM_1B, context_length=24, **fields)
    params = decoder_layout(config).views(weights(config, np.float64))
    written: list[list[int]] = []
    for ops in (reference, accel.load("cpu")):
        session, rng = Session(ops, params, config), np.random.default_rng(3)
        written.append([])
        for turn in ([1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]):  # and beyond the context
            session.read(turn)
            written[-1] += session.write(6, rng=rng)
        assert session.forgotten > 0
    assert written[0] == written[1]


@pytest.mark.skipif(available_cores() < 2, reason="one core has one number of threads")
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "FEW", -1)  # small arrays in threads, too
    config = toy(MYLLM_1B, d_model=200, d_ff=391, vocab_size=1031, d_head=18)
    flat = weights(config, np.float32)
    ops = accel.load("cpu")
    results = []
    for n in (1, 2, 1, 2):
        set_threads(n)
        results.append(gradient(ops, config, flat))
    set_threads(available_cores())
    for loss, grads in results[1:]:
        assert loss == results[0][0]
        assert np.array_equal(grads, results[0][1])


def test_a_nan_in_a_weight_reaches_the_loss() -> None:
    config = toy(MYLLM_1B)
    flat = weights(config, np.float32)
    decoder_layout(config).views(flat)["layers.1.ffn.w_down"][3, 5] = np.nan
    assert np.isnan(gradient(accel.load("cpu"), config, flat)[0])


@pytest.mark.parametrize("name", MODELS)
def test_where_weights_lie_in_memory_changes_no_bit_of_a_token(name: str) -> None:
    config, ops, rng = MODELS[name], accel.load("cpu"), np.random.default_rng(5)
    layout, flat = decoder_layout(config), weights(config, np.float32)
    found = set()
    for _ in range(60):
        # so that weights, and what decoding works in, fall into gaps of the heap
        others = [np.empty(n, np.uint8) for n in rng.integers(1, 3_000, rng.integers(1, 300))]
        rng.shuffle(others)
        del others[::2]
        start = int(rng.integers(0, 16))
        here = np.empty(layout.size + 16, np.float32)[start : start + layout.size]
        here[:] = flat
        params = layout.views(here)
        cache = ops.kv_cache(params, config, 2, 4)
        for position in range(3):
            token = np.array([3, 5 + position], np.int32)
            logits = ops.decode_step(params, config, token, cache, position)
        found.add(logits.tobytes())
    assert len(found) == 1


# what every backend refuses, and what only one that reads raw memory must
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"position": 12}, "position must lie in 0..11"),
    ({"token": np.array([0, 1, 99], np.int32)}, r"(token|ids)\[2(, 0)?\] is 99"),
    ({"position": 0.5}, "position must be an int"),
    ({"position": 2**32 + 3}, r"position must lie in 0\.\.11, the cache's room, got 4294967299"),
    ({"token": [0, 1, 2]}, "token must be an array, got list"),
    ({"position": np.array([1])}, r"\(3,\) ints, one for each row"),
    (
        {"token": np.array([0, 1], np.int32)},
        r"cache.k\[0\] must have shape \(2, 12, 2, 6\) to match token, .* got \(3, 12",
    ),
    ({"token": np.zeros((3, 1), np.int32)}, r"token must be \(B,\)"),
    ({"k": (1, 3, 12, 2, 6)}, "cache.k must have an array for each of 2 layers, got 1"),
    ({"k": (2, 3, 12, 1, 6)}, r"cache.k\[0\] must have shape"),
    ({"v": (2, 3, 11, 2, 6)}, r"cache.v\[0\] must have shape"),
    ({"v": (2, 3, 12, 2, 5)}, r"cache.v\[0\] must have shape"),
    ({"k": (2, 12, 2, 6)}, r"the cache of a layer must be \(B, S, Hkv, d\)"),
]
REFUSED_ON_THE_CPU: list[tuple[dict[str, Any], str]] = [
    ({"v": lambda array: array.astype(np.float64)}, "must share one dtype"),
    ({"v": "read-only"}, "v is read-only"),
    ({"v": "strided"}, "the cache must be contiguous"),
    ({"d_ff": 23}, r"layers.0.ffn.w_gate_up must have shape \(16, 46\)"),
    ({"vocab_size": 40}, r"embedding.weight must have shape \(40, 16\)"),
]


@pytest.mark.parametrize(
    ("backend", "change", "sentence"),
    [
        *(("reference", *case) for case in REFUSED),
        *(
            (compute, *case)
            for compute in ("float32", "bf16")
            for case in REFUSED + REFUSED_ON_THE_CPU
        ),
    ],
)
def test_decode_step_refuses_bad_input_in_a_sentence(
    backend: str, change: dict[str, Any], sentence: str
) -> None:
    config = toy(MYLLM_1B)
    ops = reference if backend == "reference" else accel.load("cpu", compute=backend)
    params = ops.parameters(decoder_layout(config).views(weights(config, np.float32)))
    given = {"token": np.array([0, 1, 2], np.int32), "position": 0} | change
    cache = ops.kv_cache(params, config, 3, 12)
    for name in ("k", "v"):
        array, wanted = getattr(cache, name), change.get(name)
        if wanted == "read-only":
            array[1].flags.writeable = False
        elif wanted == "strided":
            array[1] = np.zeros((*array[1].shape[:-1], 7), np.float32)[..., :6]
        elif isinstance(wanted, tuple):
            cache = cache._replace(**{name: list(np.zeros(wanted, np.float32))})
        elif wanted is not None:
            array[1] = wanted(array[1])
    said = {name: n for name, n in change.items() if name in ("d_ff", "vocab_size")}
    config = dataclasses.replace(config, **said)
    with pytest.raises(ValueError, match=sentence):
        ops.decode_step(params, config, given["token"], cache, given["position"])


@pytest.mark.parametrize("order", ["C", "F"])
def test_decode_step_takes_matrices_that_no_task_divides(order: Any) -> None:
    """Of more than one task each, and in an order that has to be copied first."""
    config = toy(MYLLM_1B, d_model=331, d_ff=701, vocab_size=401, n_layers=3)
    views = decoder_layout(config).views(weights(config, np.float64))
    params = {name: np.array(array, order=order) for name, array in views.items()}
    ops = accel.load("cpu")
    ours, theirs = (o.kv_cache(params, config, 2, 4) for o in (ops, reference))
    for position in range(3):
        token = np.array([3 + position, 400], np.int32)
        got = ops.decode_step(params, config, token, ours, position)
        expected = reference.decode_step(params, config, token, theirs, position)
        assert difference(got, expected) < 1e-12


def test_write_kv_writes_what_the_reference_writes() -> None:
    config, params = MODELS["myllm"], {"embedding.weight": np.zeros((31, 16), np.float32)}
    k, v = np.random.default_rng(0).standard_normal((2, 3, 2, 2, 6)).astype(np.float32)
    backends = (reference, accel.load("cpu"))
    caches = [ops.kv_cache(params, config, 3, 8) for ops in backends]
    for ops, cache in zip(backends, caches, strict=True):
        ops.write_kv(cache, k, v, layer=1, position=np.array([0, 6, 3]))
        ops.write_kv(cache, v, k, layer=0, position=2)
        with pytest.raises(ValueError, match=r"positions 7\.\.8 lie outside the cache"):
            ops.write_kv(cache, k, v, layer=0, position=7)
    for ours, theirs in zip(*caches, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.any(theirs)
