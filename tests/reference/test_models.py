"""Whole models: parameter counts, gradients, causality, masks, initialisation."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest

from reference import encoder_decoder as seq2seq
from reference import model, ops
from reference.config import Config
from reference.gradcheck import GradientError, check_vjp
from reference.params import Layout, ParamSpec, attention_specs, block_specs, decoder_layout
from reference.params import ffn_specs as feed_forward_specs
from reference.presets import GPT2_SMALL, GPT2_TEXTBOOK, MYLLM_1B, ORIGINAL_DECODER, TINY
from reference.types import Array, DropoutKey, Loss
from tests.helpers.models import MODELS, encoder_decoder, toy

B, T = 2, 9
KEY = DropoutKey(seed=3, step=4, sample=5, site=0)


def batch(config: Config, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, config.vocab_size, (B, T)).astype(np.int32),
        "targets": rng.integers(0, config.vocab_size, (B, T)).astype(np.int32),
        "mask": rng.random((B, T)) < 0.7,
    }


def parameters(layout: Layout, seed: int = 1) -> Array:
    """Return float64 parameters large enough that every part of the model matters."""
    flat = layout.init(seed, np.float64)
    return flat + 0.2 * np.random.default_rng(seed).standard_normal(layout.size)


def size(specs: list[ParamSpec]) -> int:
    return sum(spec.size for spec in specs)


# ---- counts --------------------------------------------------------------------------------------


def test_the_headline_model_has_its_parameters() -> None:
    assert decoder_layout(MYLLM_1B).size == 1_055_231_744
    for n_layers, count in ((27, 1_021_739_264), (29, 1_088_724_224)):
        assert decoder_layout(dataclasses.replace(MYLLM_1B, n_layers=n_layers)).size == count
    assert (MYLLM_1B.rope_base, MYLLM_1B.norm_eps) == (500_000.0, 1e-5)
    assert size(block_specs(MYLLM_1B, "b", 0.02)) == 33_492_480
    assert size(attention_specs(MYLLM_1B, "a", 0.02)) == 7_340_032
    assert size(feed_forward_specs(MYLLM_1B, "f", 0.02)) == 26_148_864


def test_gpt2_has_its_parameters() -> None:
    assert decoder_layout(GPT2_SMALL).size == 124_439_808
    c = GPT2_TEXTBOOK
    weights = (
        12 * c.d_model**2 * c.n_layers + c.vocab_size * c.d_model + c.context_length * c.d_model
    )
    norms = (2 * c.n_layers + 1) * 2 * c.d_model
    assert weights == 124_318_464
    assert decoder_layout(c).size == weights + norms
    assert decoder_layout(c).n_decayed == weights


def test_attention_and_feed_forward_of_the_original_have_biases_where_the_paper_has_them() -> None:
    names = decoder_layout(ORIGINAL_DECODER).offsets
    assert "layers.0.ffn.b_up" in names and "layers.0.attention.bqkv" not in names
    assert "head.weight" in names and "head.bias" not in names and "final_norm.gain" not in names


# ---- the buffer ----------------------------------------------------------------------------------


def test_parameters_are_views_into_one_buffer_decayed_first() -> None:
    layout = decoder_layout(MODELS["gpt2"])
    flat = np.arange(layout.size, dtype=np.float32)
    views = layout.views(flat)
    joined = np.concatenate([view.ravel() for view in views.values()])
    np.testing.assert_array_equal(joined, flat)
    assert all(np.shares_memory(view, flat) for view in views.values())
    decays = [view.ndim >= 2 for view in views.values()]
    assert decays == sorted(decays, reverse=True)
    assert layout.n_decayed == sum(view.size for view in views.values() if view.ndim >= 2)


def test_a_buffer_of_the_wrong_size_or_stride_is_refused() -> None:
    layout = decoder_layout(MODELS["gpt2"])
    with pytest.raises(ValueError, match=rf"shape \({layout.size},\), got \(3,\)"):
        layout.views(np.zeros(3))
    with pytest.raises(ValueError, match="not contiguous"):
        layout.views(np.zeros(2 * layout.size)[::2])


def test_initialisation_is_scaled_seeded_and_keyed_by_name() -> None:
    wide = {"vocab_size": 4096, "d_model": 192, "n_heads": 6, "d_head": 32, "d_ff": 512}
    config = dataclasses.replace(TINY, **wide, n_layers=8)
    layout = decoder_layout(config)
    views = layout.views(layout.init(0))
    assert views["embedding.weight"].std() == pytest.approx(0.02, rel=0.01)
    assert views["layers.3.attention.wqkv"].std() == pytest.approx(0.02, rel=0.02)
    for name in ("layers.3.attention.wo", "layers.3.ffn.w_down"):
        assert views[name].std() == pytest.approx(0.02 / np.sqrt(2 * 8), rel=0.02)
    assert (views["layers.0.ffn_norm.gain"] == 1).all()
    # no two parameters of one shape are alike
    assert (views["layers.2.ffn.w_down"] != views["layers.3.ffn.w_down"]).mean() > 0.99
    deeper = decoder_layout(dataclasses.replace(config, n_layers=9))
    again = deeper.views(deeper.init(0))
    np.testing.assert_array_equal(views["layers.2.ffn.w_gate_up"], again["layers.2.ffn.w_gate_up"])
    assert (layout.init(0) != layout.init(1)).any()
    for wide in (np.float64, "float64", np.dtype("float64")):
        np.testing.assert_array_equal(layout.init(0).astype(np.float64), layout.init(0, wide))
    with pytest.raises(ValueError, match="are float32 or float64, not int32"):
        layout.init(0, "int32")


def test_an_encoder_decoder_scales_residual_projections_by_the_branches_of_their_stack() -> None:
    config = encoder_decoder(d_model=128, d_ff=256, n_layers=5, n_encoder_layers=3)
    layout = seq2seq.encoder_decoder_layout(config)
    views = layout.views(layout.init(0))
    assert views["encoder.0.ffn.w_down"].std() == pytest.approx(0.02 / np.sqrt(2 * 3), rel=0.02)
    assert views["layers.0.ffn.w_down"].std() == pytest.approx(0.02 / np.sqrt(3 * 5), rel=0.02)


# ---- gradients -----------------------------------------------------------------------------------


def check_model(
    layout: Layout, flat: Array, loss_forward: Any, loss_backward: Any, relu: bool
) -> None:
    """Check the gradient of every parameter, one by one, and all of them at once."""

    def forward(**arrays: Array) -> tuple[Loss, Any]:
        return loss_forward(arrays)

    def backward(dloss: float, cache: Any) -> tuple[Array, ...]:
        grads = layout.views(np.full(layout.size, np.nan))
        loss_backward(dloss, cache, grads)
        return tuple(grads.values())

    params = layout.views(flat)

    def smooth(name: str, behind: Array, ahead: Array) -> bool:
        """Say whether every ReLU keeps its sign between two values of a parameter."""
        signs = [relu_signs(forward(**{**params, name: x})[1]) for x in (behind, ahead)]
        return all((a == b).all() for a, b in zip(*signs, strict=True))

    check_vjp(forward, backward, params, tolerance=1e-6, smooth=smooth if relu else None)


def relu_signs(cache: Any) -> list[Array]:
    blocks = cache.blocks if hasattr(cache, "blocks") else [*cache.encoder, *cache.decoder]
    return [block.ffn.branch.activation[0][0].cache > 0 for block in blocks]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_every_family_member(name: str) -> None:
    config = MODELS[name]
    layout = decoder_layout(config)
    documents = np.array([[0] * 4 + [1] * 5, [2] * 9], np.int32) if name == "myllm" else None
    loss_forward = partial(
        _decoder_loss, config, batch(config), documents, KEY if "dropout" in name else None
    )
    flat = parameters(layout)
    check_model(layout, flat, loss_forward, model.loss_backward, relu=config.ffn == "relu")


def _decoder_loss(
    config: Config,
    data: dict[str, Array],
    documents: Array | None,
    key: DropoutKey | None,
    params: dict[str, Array],
) -> tuple[Loss, Any]:
    return model.loss_forward(ops, params, config, **data, documents=documents, dropout_key=key)


ENCODER_DECODERS = {
    "original": encoder_decoder(),
    "pre_norm_untied_learned": encoder_decoder(
        norm_placement="pre", tied=False, head_bias=True, position="learned", ffn="gelu"
    ),
    "rope_gqa_qk_norm_dropout": encoder_decoder(
        position="rope",
        qk_norm=True,
        n_kv_heads=2,
        attn_bias=True,
        ffn="swiglu",
        dropout_embedding=0.1,
        dropout_attention=0.2,
        dropout_residual=0.1,
    ),
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_gradients_of_the_encoder_decoder(name: str) -> None:
    config = ENCODER_DECODERS[name]
    layout = seq2seq.encoder_decoder_layout(config)
    rng = np.random.default_rng(0)
    source = rng.integers(0, config.vocab_size, (B, 7)).astype(np.int32)
    source_mask = np.arange(7)[None, :] < np.array([[7], [4]])
    data = batch(config)

    def loss_forward(params: dict[str, Array]) -> tuple[Loss, Any]:
        return seq2seq.loss_forward(
            ops,
            params,
            config,
            source,
            data["ids"],
            data["targets"],
            source_mask,
            data["mask"],
            dropout_key=KEY if "dropout" in name else None,
        )

    flat = parameters(layout)
    check_model(layout, flat, loss_forward, seq2seq.loss_backward, relu=config.ffn == "relu")


def test_a_forgotten_tied_gradient_is_caught() -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)

    def forgetful(dloss: float, cache: Any, grads: dict[str, Array]) -> None:
        [loss_cache] = cache.loss
        model.loss_backward(dloss, cache, grads)
        # what the head alone contributes
        grads["embedding.weight"][...] = ops.linear_cross_entropy_backward(dloss, loss_cache)[1]

    loss_forward = partial(_decoder_loss, config, batch(config), None, None)
    with pytest.raises(GradientError, match=r"gradient of embedding\.weight"):
        check_model(layout, parameters(layout), loss_forward, forgetful, relu=False)


# ---- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_changing_a_token_changes_no_earlier_output(name: str) -> None:
    config = MODELS[name]
    layout = decoder_layout(config)
    params = layout.views(parameters(layout))
    ids = batch(config)["ids"]
    before = model.logits(ops, params, config, ids)
    changed = ids.copy()
    changed[:, 5] = (changed[:, 5] + 1) % config.vocab_size
    after = model.logits(ops, params, config, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=(0, 2)).all()


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_a_prefix_equal_the_prefix_of_outputs(name: str) -> None:
    config = MODELS[name]
    layout = decoder_layout(config)
    params = layout.views(parameters(layout))
    ids = batch(config)["ids"]
    whole = model.logits(ops, params, config, ids)
    part = model.logits(ops, params, config, ids[:, :6])
    np.testing.assert_allclose(whole[:, :6], part, rtol=1e-11, atol=1e-11)


def test_masked_targets_give_no_loss_and_no_gradient_anywhere() -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)
    params, data = layout.views(parameters(layout)), batch(config)
    results = []
    for elsewhere in (0, 7, -1):  # a masked target may hold anything, even no token at all
        targets = np.where(data["mask"], data["targets"], elsewhere).astype(np.int32)
        loss, cache = model.loss_forward(ops, params, config, data["ids"], targets, data["mask"])
        flat = np.empty(layout.size)
        model.loss_backward(1.0, cache, layout.views(flat))
        results.append((loss, flat))
    for loss, flat in results[1:]:
        assert loss == results[0][0]
        np.testing.assert_array_equal(flat, results[0][1])
    nothing = np.zeros((B, T), np.bool_)
    loss, cache = model.loss_forward(ops, params, config, data["ids"], data["targets"], nothing)
    flat = np.full(layout.size, np.nan)
    model.loss_backward(1.0, cache, layout.views(flat))
    assert loss == Loss(0.0, 0) and not flat.any()


def test_weight_tying_sums_the_two_gradients() -> None:
    config = MODELS["myllm"]
    untied = dataclasses.replace(config, tied=False)
    layout, untied_layout = decoder_layout(config), decoder_layout(untied)
    flat = parameters(layout)
    params = layout.views(flat)
    untied_flat = np.empty(untied_layout.size)
    for name, view in untied_layout.views(untied_flat).items():
        view[...] = params["embedding.weight" if name == "head.weight" else name]
    gradients = []
    for c, where in ((config, layout), (untied, untied_layout)):
        _, cache = model.loss_forward(
            ops, where.views(flat if c.tied else untied_flat), c, **batch(config)
        )
        gradient = where.views(np.empty(where.size))
        model.loss_backward(1.0, cache, gradient)
        gradients.append(gradient)
    tied_gradient, apart = gradients
    np.testing.assert_allclose(
        tied_gradient["embedding.weight"],
        apart["embedding.weight"] + apart["head.weight"],
        rtol=1e-12,
        atol=1e-12,
    )


def test_isolated_documents_give_the_loss_of_each_alone() -> None:
    # without positions a packed document cannot tell where it lies
    config = toy(MYLLM_1B, position="none")
    layout = decoder_layout(config)
    params, data = layout.views(parameters(layout)), batch(config)
    documents = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * B, np.int32)
    packed, _ = model.loss_forward(ops, params, config, **data, documents=documents)
    parts = [
        model.loss_forward(ops, params, config, **{k: x[:, cut] for k, x in data.items()})[0]
        for cut in (slice(0, 4), slice(4, 9))
    ]
    assert packed.total == pytest.approx(sum(part.total for part in parts), rel=1e-12)
    crossing, _ = model.loss_forward(ops, params, config, **data)
    assert crossing.total != pytest.approx(packed.total, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float32_stays_in_float32(name: str) -> None:
    config = MODELS[name]
    layout = decoder_layout(config)
    flat = layout.init(0)
    key = KEY if "dropout" in name else None
    _, cache = model.loss_forward(ops, layout.views(flat), config, **batch(config), dropout_key=key)
    assert _float_dtypes(cache) == {np.dtype(np.float32)}
    assert model.logits(ops, layout.views(flat), config, batch(config)["ids"]).dtype == np.float32


def _float_dtypes(value: Any) -> set[np.dtype[Any]]:
    if isinstance(value, np.ndarray):
        return {value.dtype} if value.dtype.kind == "f" else set()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return set().union(*(_float_dtypes(item) for item in value))
    return set()


def test_dropout_draws_the_same_bits_however_the_batch_is_split() -> None:
    config = MODELS["dropout"]
    layout = decoder_layout(config)
    params, data = layout.views(parameters(layout)), batch(config)
    whole, _ = model.loss_forward(ops, params, config, **data, dropout_key=KEY)
    parts = [
        model.loss_forward(
            ops,
            params,
            config,
            **{k: x[b : b + 1] for k, x in data.items()},
            dropout_key=KEY._replace(sample=KEY.sample + b),
        )[0].total
        for b in range(B)
    ]
    assert whole.total == pytest.approx(sum(parts), rel=1e-13)
    evaluation, _ = model.loss_forward(ops, params, config, **data)
    assert evaluation.total != pytest.approx(whole.total, rel=1e-4)


class Recorder:
    """The reference, which notes the options that its ops are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arrays: Any, **options: Any) -> Any:
            self.calls.append((name, options))
            return getattr(ops, name)(*arrays, **options)

        return call

    def options(self, op: str, option: str) -> list[Any]:
        return [options[option] for name, options in self.calls if name == op]


def dropout_draws(recorder: Recorder) -> list[tuple[int, float]]:
    """Return the site and rate of every dropout that was drawn, on activations and attention."""
    draws = []
    for _, options in recorder.calls:
        if "dropout_key" in options:
            draws.append((options["dropout_key"].site, options["dropout_p"]))
        elif "p" in options:
            draws.append((options["key"].site, options["p"]))
    return sorted(draws)


RATES = {"dropout_embedding": 0.1, "dropout_attention": 0.2, "dropout_residual": 0.3}


def test_every_dropout_has_a_site_of_its_own_and_the_rate_of_its_kind() -> None:
    def block(n: int, *, cross: bool) -> list[tuple[int, float]]:
        first = 8 * (n + 1)
        between = [(first + 2, 0.2), (first + 3, 0.3)] if cross else []
        return [(first, 0.2), (first + 1, 0.3), *between, (first + 4, 0.3)]

    config = toy(MYLLM_1B, **RATES)
    layout, recorder = decoder_layout(config), Recorder()
    model.loss_forward(
        recorder, layout.views(layout.init(0)), config, **batch(config), dropout_key=KEY
    )
    assert dropout_draws(recorder) == [(0, 0.1), *block(0, cross=False), *block(1, cross=False)]

    both = encoder_decoder(position="rope", **RATES)  # two decoder blocks, three encoder blocks
    layout, recorder = seq2seq.encoder_decoder_layout(both), Recorder()
    ids, targets = batch(both)["ids"], batch(both)["targets"]
    params = layout.views(layout.init(0))
    seq2seq.loss_forward(recorder, params, both, ids, ids, targets, dropout_key=KEY)
    blocks = [draw for n in range(5) for draw in block(n, cross=n < 2)]
    assert dropout_draws(recorder) == [(0, 0.1), (1, 0.1), *blocks]


def test_the_config_s_epsilon_and_base_reach_every_op() -> None:
    for choices in ({}, {"norm": "layernorm"}):
        config = toy(MYLLM_1B, norm_eps=0.03, rope_base=77.0, **choices)
        layout, recorder = decoder_layout(config), Recorder()
        model.logits(recorder, layout.views(layout.init(0)), config, batch(config)["ids"])
        assert recorder.options(f"{config.norm}_forward", "eps") == [0.03] * 5
        assert recorder.options("rope_forward", "base") == [77.0] * 2
        # the queries and keys turn, the values do not
        assert recorder.options("rope_forward", "rotate_heads") == [4 + 2] * 2


def test_each_dropout_rate_acts_alone() -> None:
    for site in ("dropout_embedding", "dropout_attention", "dropout_residual"):
        config = toy(MYLLM_1B, **{site: 0.5})
        layout = decoder_layout(config)
        params, data = layout.views(parameters(layout)), batch(config)
        training, _ = model.loss_forward(ops, params, config, **data, dropout_key=KEY)
        evaluation, _ = model.loss_forward(ops, params, config, **data)
        assert training.total != pytest.approx(evaluation.total, rel=1e-4), site


def test_padding_of_the_source_is_seen_by_neither_encoder_nor_decoder() -> None:
    config = encoder_decoder()
    layout = seq2seq.encoder_decoder_layout(config)
    params, data = layout.views(parameters(layout)), batch(config)
    source = np.random.default_rng(0).integers(0, config.vocab_size, (B, 7)).astype(np.int32)
    mask = np.arange(7)[None, :] < np.array([[7], [4]])
    padded = np.where(mask, source, 5).astype(np.int32)
    results = [
        seq2seq.logits(ops, params, config, text, data["ids"], mask) for text in (source, padded)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    alone = seq2seq.logits(ops, params, config, source[1:, :4], data["ids"][1:])
    np.testing.assert_allclose(results[0][1:], alone, rtol=1e-11, atol=1e-11)


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_input_to_a_model_is_refused_in_words() -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)
    params, data = layout.views(layout.init(0)), batch(config)
    with pytest.raises(ValueError, match=r"exceeds context_length \(12\)"):
        model.logits(ops, params, config, np.zeros((1, 13), np.int32))
    with pytest.raises(ValueError, match=r"ids\[1, 2\] is 31"):
        bad = data["ids"].copy()
        bad[1, 2] = 31
        model.logits(ops, params, config, bad)
    with pytest.raises(ValueError, match=r"ids must be \(B, T\)"):
        model.logits(ops, params, config, data["ids"][0])
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 9\)"):
        model.loss_forward(ops, params, config, data["ids"], data["targets"][:, 1:])
    _, cache = model.loss_forward(ops, params, config, data["ids"], data["targets"])
    with pytest.raises(ValueError, match=r"the gradients do not fit .* missing embedding\.weight"):
        model.loss_backward(1.0, cache, {})
    without = {name: view for name, view in params.items() if name != "final_norm.gain"}
    with pytest.raises(ValueError, match=r"missing final_norm\.gain"):
        model.logits(ops, without, config, data["ids"])
    with pytest.raises(ValueError, match=r"unknown extra"):
        model.logits(ops, {**params, "extra": flat_like(params)}, config, data["ids"])


def test_bad_input_to_an_encoder_decoder_is_refused_in_words() -> None:
    for position in ("rope", "sinusoidal"):
        config = encoder_decoder(position=position)
        layout = seq2seq.encoder_decoder_layout(config)
        params = layout.views(layout.init(0))
        short, long = np.zeros((1, 5), np.int32), np.zeros((1, 13), np.int32)
        for source, target in ((short, long), (long, short)):
            with pytest.raises(ValueError, match=r"13 tokens exceeds context_length \(12\)"):
                seq2seq.logits(ops, params, config, source, target)
            with pytest.raises(ValueError, match=r"ids must be \(B, T\), got shape"):
                seq2seq.logits(ops, params, config, source[0, :5], short)
    # -m·(t - u) is a penalty only where no key lies ahead of its query
    with pytest.raises(ValueError, match=r"position 'alibi' .* encoder"):
        encoder_decoder(position="alibi")


@pytest.mark.parametrize("n_encoder_layers", [0, -1, 2.0, True, 10_001])
def test_an_encoder_has_a_number_of_layers(n_encoder_layers: Any) -> None:
    with pytest.raises(
        ValueError, match="n_encoder_layers must be a positive integer up to 10,000"
    ):
        encoder_decoder(n_encoder_layers=n_encoder_layers)


def flat_like(params: dict[str, Array]) -> Array:
    return np.zeros(3, next(iter(params.values())).dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, r"n_heads \(14\) must be a multiple of n_kv_heads \(3\)"),
        ({"d_head": 127}, "d_head must be even"),
        ({"position": "sinusoidal", "d_model": 7}, "d_model must be even"),
        ({"norm": "batchnorm"}, "norm must be one of rmsnorm, layernorm, got 'batchnorm'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"n_layers": 2.0}, "n_layers must be a positive integer"),
        ({"n_layers": True}, "n_layers must be a positive integer"),
        ({"tied": 1}, "tied must be true or false"),
        ({"dropout_attention": 1.0}, r"dropout_attention must be a probability in \[0, 1\)"),
        ({"norm_eps": 0.0}, "norm_eps must be a positive number"),
        ({"rope_base": "big"}, "rope_base must be a positive number"),
        ({"rope_base": 10**400}, "rope_base must be a positive number"),
        ({"rope_base": float("nan")}, "rope_base must be a positive number"),
        ({"norm_eps": float("inf")}, "norm_eps must be a positive number"),
        ({"d_model": 2**31}, r"d_model must be a positive integer up to 2\^20, got 2147483648"),
        ({"n_layers": 10**30}, "n_layers must be a positive integer up to 10,000"),
        ({"context_length": 2**31}, r"context_length must be a positive integer below 2\^31"),
        ({"window": 10**30}, "window must be an integer >= 0"),
        ({"window": [[1]]}, "window must be an integer >= 0"),
        ({"position": ["rope"]}, "position must be one of rope"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MYLLM_1B, **change)


def test_a_config_from_a_table_names_what_is_wrong() -> None:
    fields = MYLLM_1B.to_dict()
    assert Config.from_dict(fields) == MYLLM_1B
    with pytest.raises(ValueError, match="unknown model field 'd_modle'"):
        Config.from_dict({**fields, "d_modle": 3})
    with pytest.raises(ValueError, match="the model needs d_ff"):
        Config.from_dict({k: v for k, v in fields.items() if k != "d_ff"})
