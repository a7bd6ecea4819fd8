"""Whole models on the shim: loss, gradients, optimizer steps and decoding equal the reference."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16
from reference import encoder_decoder as seq2seq
from reference import model
from reference import ops as reference
from reference.params import decoder_layout
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.helpers.cuda_cases import relative_error
from tests.helpers.cuda_models import B, T, batch, bf16_weights, parameters, train
from tests.helpers.models import MODELS, encoder_decoder

require.shim()


@pytest.fixture(scope="module")
def shim() -> ShimDevice:
    """One device: compiled kernels are kept."""
    return ShimDevice("shuffled")


@pytest.fixture(autouse=True)
def device(shim: ShimDevice) -> Iterator[ShimDevice]:
    """Use the shim for one test, and leave no device behind."""
    before = devices.use(shim)
    yield shim
    devices.use(before)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float32_equals_the_reference(name: str) -> None:
    config = MODELS[name]
    flat, data = parameters(config), batch(config)
    exact = train(reference, config, flat.astype(np.float64), data, 1)
    mine = train(ops, config, flat, data, 1)
    assert mine[0] == pytest.approx(exact[0], rel=1e-5)
    assert relative_error(mine[1], exact[1]) <= 1e-5
    views, expected = (decoder_layout(config).views(g) for g in (mine[1], exact[1]))
    size = np.linalg.norm(exact[1]) / np.sqrt(len(views))
    for parameter, gradient in views.items():  # none is hidden by a larger one
        error = np.linalg.norm(gradient - expected[parameter])
        assert error <= 1e-5 * max(float(np.linalg.norm(expected[parameter])), 0.1 * size), (
            parameter
        )


@pytest.mark.parametrize("name", ["myllm", "gpt2"])
def test_several_steps_in_float32_follow_the_reference(name: str) -> None:
    config = MODELS[name]
    flat, data = parameters(config), batch(config)
    exact = train(reference, config, flat.astype(np.float64), data, 4)
    mine = train(ops, config, flat, data, 4)
    assert mine[0] == pytest.approx(exact[0], rel=1e-5)
    assert exact[0][-1] < 0.9 * exact[0][0]  # it learns
    assert relative_error(mine[2], exact[2]) <= 1e-4  # AdamW divides by roots of small numbers


def test_two_runs_give_the_same_bits() -> None:
    config = MODELS["dropout"]
    flat, data = parameters(config), batch(config)
    for module in (ops, ops_bf16):
        one, two = (train(module, config, flat, data, 2) for _ in range(2))
        assert one[0] == two[0]
        np.testing.assert_array_equal(one[1], two[1])
        np.testing.assert_array_equal(one[2], two[2])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_bf16_is_as_close_as_plain_bf16_code(name: str) -> None:
    """‖err‖ ≤ 3 ‖plain err‖: plain is the reference with every op's result rounded to bf16."""
    config = MODELS[name]
    flat = bf16_weights(config, parameters(config))
    data = batch(config)
    exact = train(reference, config, flat.astype(np.float64), data, 1)
    plain = train(RoundedReference(), config, flat, data, 1)
    mine = train(ops_bf16, config, flat, data, 1)
    plain_error = relative_error(plain[1], exact[1])
    assert 1e-4 < plain_error < 0.1  # the yardstick is neither float32's nor broken
    assert relative_error(mine[1], exact[1]) <= 3 * plain_error
    assert abs(mine[0][0] - exact[0][0]) <= 3 * abs(plain[0][0] - exact[0][0]) + 2**-8 * exact[0][0]


class RoundedReference:
    """The reference in float32 with each op's activations rounded to bfloat16: plain bf16 code."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(reference, name)
        if name in ("linear_cross_entropy_forward", "adamw", "global_norm", "step", "to_numpy"):
            return function
        if name in ("from_numpy", "parameters"):
            return function

        def rounded(*arrays: Any, out: Any = None, **options: Any) -> Any:
            if name.endswith("_forward"):
                result, cache = function(*arrays, **options)
                return _round(result), cache
            if out is None:
                return _round(function(*arrays, **options))
            result = function(*arrays, out=out, **options)  # parameter gradients stay float32
            return (_round(result[0]), *result[1:]) if isinstance(result, tuple) else result

        return rounded


def _round(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_round(part) for part in value)
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return ops_bf16.to_numpy(ops_bf16.from_numpy(np.ascontiguousarray(value), activation=True))
    return value


@pytest.mark.parametrize("module", [ops, ops_bf16])
@pytest.mark.parametrize("name", ["myllm", "alibi_mqa"])
def test_decoding_gives_the_logits_of_the_whole_text(module: Any, name: str) -> None:
    if name not in MODELS:
        name = next(n for n, c in MODELS.items() if c.position == "alibi")
    config = MODELS[name]
    layout = decoder_layout(config)
    params = module.parameters(layout.views(module.from_numpy(parameters(config))))
    ids = batch(config)["ids"]
    whole = module.to_numpy(model.logits(module, params, config, module.from_numpy(ids)))
    cache = module.kv_cache(params, config, B, T)
    lengths = np.array([4, 2])
    prompt = module.from_numpy(ids[:, :4])
    got = module.to_numpy(model.prefill(module, params, config, prompt, lengths, cache))
    for t in range(4):
        for row in range(B):
            at = lengths[row] + t - 1
            error = relative_error(got[row], whole[row, at].astype(np.float64))
            assert error <= (1e-5 if module is ops else 0.03)
        token = module.from_numpy(ids[np.arange(B), lengths + t])
        got = module.to_numpy(module.decode_step(params, config, token, cache, lengths + t))


@pytest.mark.parametrize("module", [ops, ops_bf16], ids=["float32", "bf16"])
def test_a_second_turn_is_read_onto_the_cache(module: Any) -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)
    params = module.parameters(layout.views(module.from_numpy(parameters(config))))
    ids = batch(config)["ids"][:1]
    whole = module.to_numpy(model.logits(module, params, config, module.from_numpy(ids)))
    cache = module.kv_cache(params, config, 1, T)
    for start, end in ((0, 3), (3, 7)):
        turn, length = module.from_numpy(ids[:, start:end]), np.array([end - start])
        got = model.prefill(module, params, config, turn, length, cache, start=start)
        error = relative_error(module.to_numpy(got)[0], whole[0, end - 1].astype(np.float64))
        assert error <= (1e-5 if module is ops else 0.03)


def test_an_encoder_decoder_equals_the_reference() -> None:
    config = encoder_decoder()
    layout = seq2seq.encoder_decoder_layout(config)
    rng = np.random.default_rng(0)
    flat = layout.init(0) + 0.05 * rng.standard_normal(layout.size).astype(np.float32)
    source = rng.integers(0, config.vocab_size, (B, 7)).astype(np.int32)
    source_mask = np.arange(7)[None, :] < np.array([[7], [4]])
    target = rng.integers(0, config.vocab_size, (B, 5)).astype(np.int32)
    results = []
    for module, dtype in ((reference, np.float64), (ops, np.float32)):
        put = module.from_numpy
        params = module.parameters(layout.views(put(flat.astype(dtype))))
        arrays = [put(a) for a in (source, target, target, source_mask)]
        loss, cache = seq2seq.loss_forward(module, params, config, *arrays)  # type: ignore[arg-type]
        grad = put(np.full(layout.size, np.nan, dtype))
        seq2seq.loss_backward(1.0, cache, layout.views(grad))
        results.append((loss.total, module.to_numpy(grad)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert relative_error(results[1][1], results[0][1]) <= 1e-5


def test_documents_and_padding_reach_the_kernels() -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)
    flat, data = parameters(config), batch(config)
    data["documents"] = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * B, np.int32)
    exact = train(reference, config, flat.astype(np.float64), data, 1)
    mine = train(ops, config, flat, data, 1)
    assert relative_error(mine[1], exact[1]) <= 1e-5
    del data["documents"]
    assert train(ops, config, flat, data, 1)[0] != pytest.approx(mine[0], rel=1e-6)
    assert layout.size == mine[1].size
