"""Models out to Hugging Face's folders and back."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from dist import cli, weights
from dist.convert import families, huggingface, mapping
from dist.weights import Weights, load_master
from reference.config import Config
from tests.helpers.models import MODELS
from tests.helpers.weights import (
    FAMILIES,
    GPT2,
    LLAMA,
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    check_refused,
    copied,
    parts_of,
    put_together,
    write_random,
)


def out_and_back(folder: Path, config: Config, *words: str) -> tuple[bytes, bytes]:
    write_random(folder / "mine", config)
    assert cli.main(["export", str(folder / "mine"), str(folder / "hf"), *words]) == 0
    assert cli.main(["import", str(folder / "hf"), "-o", str(folder / "back")]) == 0
    assert Weights(folder / "back").config == config
    return load_master(folder / "mine").tobytes(), load_master(folder / "back").tobytes()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_export_then_import_is_the_identity_bit_for_bit(config: Config, tmp_path: Path) -> None:
    mine, back = out_and_back(tmp_path, config)
    assert mine == back


@pytest.mark.parametrize("config", [replace(QWEN3, d_head=10), GPT2], ids=["qwen3", "gpt2"])
def test_the_size_of_pieces_changes_no_byte(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads stay whole, and blocks with CRCs reach over several parameters or the other way."""
    config = replace(config, vocab_size=5_000, tied=False)
    once = out_and_back(tmp_path / "once", config)
    for size in (1, 7, 700, 40_000):
        monkeypatch.setattr(mapping, "CHUNK", 4 * size if size > 1 else 128)
        monkeypatch.setattr(weights, "PART", 1_000 * size)
        monkeypatch.setattr(weights, "STRETCH", 100 * size)
        again = out_and_back(tmp_path / str(size), config)
        assert once[0] == once[1] == again[0] == again[1]
        for name in ("model.safetensors", "config.json"):
            files = [tmp_path / folder / "hf" / name for folder in ("once", str(size))]
            assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_large_models_are_sharded(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    mine, back = out_and_back(tmp_path, config)
    assert mine == back
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "hf" / "model.safetensors").exists()
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == len(mine)
    assert all(path.stat().st_size < 22_000 for path in files)


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("float16", 11)])
def test_narrow_types_round_to_nearest(dtype: str, bits: int, tmp_path: Path) -> None:
    mine, back = (np.frombuffer(b, "<f4") for b in out_and_back(tmp_path, LLAMA, "--dtype", dtype))
    error = np.abs(mine - back)
    floor = 2.0**-25 if dtype == "float16" else 0  # half of the smallest subnormal
    assert (error <= np.abs(mine) * 2.0**-bits + floor).all() and error.max() > 0


def test_the_library_reads_what_is_written_under_the_names_of_others(tmp_path: Path) -> None:
    views = write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    with safe_open(str(tmp_path / "hf" / "model.safetensors"), "np") as file:
        names = list(file.keys())
        gate = file.get_tensor("model.layers.1.mlp.gate_proj.weight")
        qkv = [file.get_tensor(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv"]
        assert file.metadata() == {"format": "pt"}
    assert len(names) == 2 + 9 * LLAMA.n_layers and "lm_head.weight" not in names
    np.testing.assert_array_equal(gate, views["layers.1.ffn.w_gate_up"][:, :48].T)
    # the second head of each: of queries and keys even coordinates first, then the odd ones
    for theirs, start in zip(qkv, (0, 32, 48), strict=True):
        ours = views["layers.0.attention.wqkv"][:, start + 8 : start + 16]
        if theirs is not qkv[2]:
            ours = np.concatenate([ours[:, 0::2], ours[:, 1::2]], axis=1)
        np.testing.assert_array_equal(theirs[8:16], ours.T)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert (config["num_key_value_heads"], config["head_dim"]) == (2, 8)
    assert (config["model_type"], config["hidden_act"]) == ("llama", "silu")


def test_a_scaled_rope_is_written_where_transformers_4_and_5_look(tmp_path: Path) -> None:
    write_random(tmp_path / "mine", LLAMA3)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    scaling = {**SCALED, "original_max_position_embeddings": 64}
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == {**scaling, "rope_theta": config["rope_theta"]}


def test_biases_of_queries_and_keys_are_turned_with_their_columns(tmp_path: Path) -> None:
    views = write_random(tmp_path / "mine", QWEN2)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    with safe_open(str(tmp_path / "hf" / "model.safetensors"), "np") as file:
        names = set(file.keys())
        theirs = [file.get_tensor(f"model.layers.1.self_attn.{x}_proj.bias") for x in "qkv"]
    assert not any(name.endswith("o_proj.bias") for name in names)
    for found, start in zip(theirs, (0, 32, 48), strict=True):
        ours = views["layers.1.attention.bqkv"][start + 8 : start + 16]  # the second head of each
        if found is not theirs[2]:
            ours = np.concatenate([ours[0::2], ours[1::2]])
        np.testing.assert_array_equal(found[8:16], ours)


# ---- what cannot be expressed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (MODELS["original"], ["norm_placement = 'post'", "position = 'sinusoidal'"]),
        (MODELS["alibi_mqa"], ["position = 'alibi'"]),
        (replace(GPT2, head_bias=True), ["head_bias = True"]),
        (replace(GPT2, attn_bias=False), ["attn_bias = False"]),
        (replace(GPT2, d_head=6), ["d_head = 6 (it has 8)"]),
        (replace(GPT2, n_kv_heads=2), ["n_kv_heads = 2 (it has 4)"]),
        (replace(LLAMA, window=(3, 5)), ["window = (3, 5)"]),
        (replace(QWEN3, window=(3, 5)), ["window = (3, 5)"]),
        (replace(MISTRAL, attn_bias=True), ["LlamaForCausalLM", "window = 5"]),
        (replace(LLAMA, n_heads=3, n_kv_heads=1, attn_bias=True), ["n_heads = 3 (it must divide"]),
        (replace(LLAMA, ffn="gelu"), ["ffn = 'gelu'"]),
        (replace(LLAMA, norm="layernorm"), ["norm = 'layernorm'"]),
    ],
)
def test_what_no_family_can_express_is_refused_with_the_field(
    config: Config, fields: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(config, fields, "hf", tmp_path, capsys)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, window=32))
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    assert "LlamaForCausalLM" in (tmp_path / "hf" / "config.json").read_text()


def test_what_means_nothing_there_is_not_said_to_be_lacking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", replace(LLAMA3, rope_base=Config.rope_base))
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.bin")]) == 1
    said = capsys.readouterr().err
    assert "position = 'rope'" in said and "rope_factor = 8.0 (it has 1.0)" in said
    assert "rope_base" not in said and "rope_low_freq_factor" not in said


def test_the_suffix_of_a_name_may_be_in_capitals(tmp_path: Path) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "M.GGUF")]) == 0
    assert (tmp_path / "M.GGUF").is_file()
    assert cli.main(["import", str(tmp_path / "M.GGUF"), "-o", str(tmp_path / "back")]) == 0


def test_dropout_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, dropout_residual=0.1, dropout_attention=0.2))
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert "dropout_residual = 0.1 matters in training alone" in said
    assert "dropout_attention" not in said  # it has a key
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 0
    assert Weights(tmp_path / "back").config == replace(LLAMA, dropout_attention=0.2)


@pytest.mark.parametrize(
    ("dtype", "value", "most"),
    [
        ("float16", 1e5, "65,504"),
        ("float16", -7e4, "65,504"),
        ("bf16", 3.4e38, "3.38953e+38"),
        ("bf16", -3.3999e38, "3.38953e+38"),
    ],
)
def test_numbers_too_large_for_a_type_are_refused(
    dtype: str, value: float, most: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dist.weights import write_weights

    views = write_random(tmp_path / "a", LLAMA)
    views["layers.1.ffn_norm.gain"][3] = value
    write_weights(tmp_path / "mine", LLAMA, copied(views), None)
    words = ["export", str(tmp_path / "mine"), str(tmp_path / "hf"), "--dtype", dtype]
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert "model.layers.1.post_attention_layernorm.weight holds" in said and most in said
    assert not (tmp_path / "hf").exists()


def test_nothing_that_is_there_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "letter.txt").write_text("dear")
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "other")]) == 0
    assert cli.main(["import", str(tmp_path / "other"), "-o", str(tmp_path / "mine")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "other"), "-o", str(tmp_path / "step-00000003")]) == 1
    assert "named as a run names its checkpoints" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "hf", "other"}


# ---- what others write ---------------------------------------------------------------------------

# config.json as it was published, with other sizes
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 40,
    "is_llama_config": True,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 61,
}
# as Llama 3.1's config.json has it
SCALED = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
OPENAI_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 32,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 32,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 61,
}


def described(config: dict[str, Any], **changes: Any) -> Config:
    theirs = {**config, **changes}
    path = Path("config.json")
    return huggingface.family_of(theirs, path).read(theirs, "config.json")


def test_configurations_as_published_are_read() -> None:
    smollm = described(SMOLLM2)
    assert smollm == replace(
        LLAMA,
        **{"d_model": 24, "d_ff": 40, "n_heads": 3, "n_kv_heads": 1, "context_length": 64},
        rope_base=100_000,
    )
    gpt2 = described(OPENAI_GPT2)
    assert gpt2 == replace(
        GPT2, d_ff=128, dropout_embedding=0.1, dropout_attention=0.1, dropout_residual=0.1
    )
    assert described(OPENAI_GPT2, activation_function="gelu_pytorch_tanh") == gpt2
    assert families.GPT2.describe(gpt2)["activation_function"] == "gelu_new"
    theirs = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None}
    assert described(SMOLLM2, **theirs).rope_base == 5e5  # as transformers 5 writes it
    llama3 = described(SMOLLM2, rope_scaling=SCALED, rope_theta=500000.0)
    assert llama3.rope_scaling == (8.0, 1.0, 4.0, 8192) and llama3.rope_base == 500_000
    theirs = {"rope_parameters": {**SCALED, "rope_theta": 5e5}, "rope_theta": None}
    assert described(SMOLLM2, **theirs) == llama3
    plain = {"rope_scaling": {"type": "default"}}
    assert described(SMOLLM2, **plain) == described(SMOLLM2)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert described(SMOLLM2, **mistral, sliding_window=7).window == 7
    assert described(SMOLLM2, **mistral, sliding_window=None).window == 0
    assert described(SMOLLM2, **mistral).window == 4096  # as transformers has it
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "sliding_window": 7}
    deep = described({**SMOLLM2, "num_hidden_layers": 30}, **qwen, use_sliding_window=True)
    assert deep.window == (0,) * 28 + (7, 7)  # transformers' own number of layers without
    assert described(SMOLLM2, **qwen, use_sliding_window=False).window == 0
    two = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 7}
    biased = described(SMOLLM2, **two, use_sliding_window=False)
    assert biased.qkv_bias and not biased.attn_bias and not biased.qk_norm and not biased.window
    late = described(SMOLLM2, **qwen, use_sliding_window=True, max_window_layers=1)
    assert late.window == (0, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.* is not known here"),
        ({"architectures": [], "model_type": "bert"}, "'bert' is not known here"),
        ({"architectures": 5}, "5 is not known"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        ({"rope_scaling": {**SCALED, "factor": "8"}}, ": factor must be a number >= 1"),
        ({"rope_scaling": {**SCALED, "factor": 0.5}}, ": factor must be a number >= 1"),
        (
            {"rope_scaling": {**SCALED, "low_freq_factor": 4}},
            ": low_freq_factor .* below high_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling .*'dynamic'"),
        (
            {"rope_scaling": SCALED, "rope_parameters": {**SCALED, "factor": 4.0}},
            "rope_parameters and rope_scaling say different things",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "differs from layer to layer"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling .*'linear'"),
        ({"rope_scaling": 3}, "rope_scaling must be a table"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters .*'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        (
            {"architectures": ["MistralForCausalLM"], "attention_bias": True},
            "attention_bias = True",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "x"}, "hidden_size must be a positive integer"),
        ({"hidden_size": 24, "num_attention_heads": 0}, "num_attention_heads must be"),
        ({"rms_norm_eps": "1e-5"}, ": rms_norm_eps must be a positive number, got '1e-5'"),
        ({"rope_theta": "1e4"}, ": rope_theta must be"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, ": rope_theta must be"),
        ({"num_key_value_heads": 2}, r"num_attention_heads \(3\) must .* num_key_value_heads \("),
        ({"head_dim": 7}, "so head_dim must be even"),
        ({"vocab_size": 10**400}, "vocab_size must be"),
        ({"tie_word_embeddings": 1}, ": tie_word_embeddings must be true or false"),
    ],
)
def test_models_that_are_built_otherwise_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        described(SMOLLM2, **changes)


def test_what_is_computed_of_two_keys_is_refused_by_both() -> None:
    with pytest.raises(ValueError, match=r"n_embd // n_head must be .*, got 0"):
        described(OPENAI_GPT2, n_embd=2, n_head=4)


def test_every_family_refuses_an_empty_configuration_with_a_sentence() -> None:
    for family in families.HUGGING_FACE:
        with pytest.raises(ValueError, match=r"config.json describes no model .* is missing"):
            family.read(dict(family.says), "config.json")


def tensors_of(path: Path) -> dict[str, Any]:
    with safe_open(str(path), "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


Change = Callable[[dict[str, Any]], None]


def shrink(name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, lambda t: t.pop("model.norm.weight"), r"has no tensor model.norm.weight"),
        (LLAMA, shrink("model.norm.weight"), r"model.norm.weight has shape \(31,\).* asks for"),
        (LLAMA, lambda t: t.update(odd=t["model.norm.weight"]), "does not know: odd"),
        (
            LLAMA,
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(np.int32)}),
            "model.norm.weight holds 'I32'; known are F32",
        ),
        (
            LLAMA,
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"] / 0}),
            "model.norm.weight is not finite everywhere",
        ),
        (
            LLAMA,
            lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]}),
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
        (
            LLAMA,
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:-1]}),
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
        # what says the same, or nothing
        (LLAMA, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), ""),
        (
            LLAMA,
            lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}),
            "",
        ),
        (
            GPT2,
            lambda t: t.update(
                {
                    f"transformer.h.{i}.attn.bias": np.ones((1, 1, 32, 32), np.float32)
                    for i in (0, 1)
                }
            ),
            "",
        ),
        (
            GPT2,  # as OpenAI's weights were published: without the first word
            lambda t: [t.update({n.removeprefix("transformer."): t.pop(n)}) for n in list(t)],
            "",
        ),
    ],
)
def test_tensors_must_be_those_that_the_configuration_asks_for(
    config: Config,
    change: Change,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from safetensors.numpy import save_file

    write_random(tmp_path / "mine", config)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "model.safetensors"
    tensors = tensors_of(path)
    with np.errstate(divide="ignore"):
        change(tensors)
    save_file(tensors, str(path))
    status = cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")])
    said = capsys.readouterr().err
    if message:
        assert status == 1 and re.search(message, said) and said.count("\n") == 1
        assert not (tmp_path / "back").exists()
    else:
        whole = [(tmp_path / name / "master.bin").read_bytes() for name in ("mine", "back")]
        assert status == 0 and whole[0] == whole[1]


# ---- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("config.json", b"{", "is no configuration"),
        ("config.json", b"[]", "is no configuration"),
        ("config.json", b"{}", "the architecture None is not known"),
        ("model.safetensors", b"", "its header is not whole"),
        ("model.safetensors", b"\xff" * 8, "its header is not whole"),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0{}", "has no tensor model."),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0[]", "a header that cannot be read"),
        ("model.safetensors.index.json", b"{}", "cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "no file of this"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "names b.saf"),
    ],
)
def test_damaged_files_end_in_a_sentence(
    name: str, data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    (tmp_path / "hf" / name).write_bytes(data)
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine"]


def test_a_truncated_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 1
    assert "is damaged: the tensor model.norm.weight" in capsys.readouterr().err


def overlapping(header: dict[str, Any], data: bytes) -> tuple[str, bytes]:
    return json.dumps({**header, "hidden": next(iter(header.values()))}), data


def named_twice(header: dict[str, Any], data: bytes) -> tuple[str, bytes]:
    name, entry = next(iter(header.items()))
    return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}", data


def with_a_hole(header: dict[str, Any], data: bytes) -> tuple[str, bytes]:
    last = list(header.values())[-1]
    last["data_offsets"] = [n + 4 for n in last["data_offsets"]]
    return json.dumps(header), data + bytes(4)


def too_long(header: dict[str, Any], data: bytes) -> tuple[str, bytes]:
    return json.dumps(header), data + bytes(5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overlapping, "the tensor (hidden|model.embed_tokens.weight) begins at byte 0, but what"),
        (named_twice, "it has model.embed_tokens.weight more than once"),
        (with_a_hole, "the tensor model.norm.weight begins at byte .*, but what comes before"),
        (too_long, "5 bytes follow the tensor model.norm.weight, and belong to none"),
    ],
)
def test_tensors_have_names_of_their_own_and_fill_the_file(
    damage: Callable[[dict[str, Any], bytes], tuple[str, bytes]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "model.safetensors"
    header, data = parts_of(path)
    del header["__metadata__"]
    put_together(path, *damage(header, data))
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert str(path) in said and re.search(message, said) and said.count("\n") == 1


def test_a_damaged_checkpoint_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    whole = bytearray((tmp_path / "mine" / "master.bin").read_bytes())
    whole[4000] ^= 1
    (tmp_path / "mine" / "master.bin").write_bytes(whole)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
