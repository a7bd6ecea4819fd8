"""GGUF files in the packages of llama.cpp: read by ``gguf``, run by ``llama-cpp-python``.

llama.cpp is at hand as source alone, which takes half an hour to build: its tests are marked slow,
and skip where it is missing (pip install llama-cpp-python).
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli
from dist.documents import chat
from dist.numbers import KINDS
from dist.pack import special_id
from dist.weights import Weights
from reference import ops
from reference.config import Config
from reference.generate import generate
from reference.model import logits
from reference.types import Array
from tests.helpers.hard_texts import HARD
from tests.helpers.rounding import excess
from tests.helpers.tokenizer_texts import corpus, small
from tests.helpers.weights import GPT2, LLAMA, LLAMA3, QWEN2, QWEN3, write_random
from tokenizer import Tokenizer, train_from_iterator
from tokenizer.patterns import DIGITS_GPT2
from tokenizer.patterns import QWEN2 as QWEN2_PATTERN

gguf = pytest.importorskip("gguf", reason="needs the optional extra: pip install -e '.[peers]'")

T = 24
# sizes of which 32 is a divisor, as Q8_0 wants
SIZES: dict[str, Any] = {"d_model": 64, "d_ff": 96, "d_head": 16, "vocab_size": 320}
MODELS = {
    "llama": replace(LLAMA, **SIZES),
    "llama_odd": replace(
        LLAMA, **{**SIZES, "d_head": 24}, attn_bias=True, ffn_bias=True, tied=False, n_kv_heads=1
    ),
    # RoPE turns by other angles from the first pairs on, so that few tokens tell
    "llama3": replace(LLAMA3, **SIZES, rope_base=100.0, rope_original_context=32),
    "qwen2": replace(QWEN2, **SIZES),
    "qwen2_as_llama": replace(QWEN2, **{**SIZES, "d_head": 24}),
    "qwen3": replace(QWEN3, **SIZES, window=0),
    "gpt2": replace(GPT2, **SIZES),
}


def exported(folder: Path, config: Config, *words: str, tokenizer: Any = None) -> Path:
    write_random(folder / "mine", config, tokenizer)
    assert cli.main(["export", str(folder / "mine"), str(folder / "m.gguf"), *words]) == 0
    return folder / "m.gguf"


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bf16", "float16", "q8_0"])
def test_gguf_reads_what_is_written(config: Config, dtype: str, tmp_path: Path) -> None:
    path = exported(tmp_path, config, "--dtype", dtype, tokenizer=None)
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    assert reader.fields[f"{arch}.block_count"].contents() == config.n_layers
    assert reader.fields[f"{arch}.attention.key_length"].contents() == config.d_head
    weights = Weights(tmp_path / "mine")
    theirs = {t.name: t for t in reader.tensors}
    scaled = theirs.pop("rope_freqs.weight", None)
    assert sum(t.n_elements for t in theirs.values()) == weights.layout.size
    assert (scaled is None) == (config.rope_scaling is None)
    if scaled is not None:
        assert scaled.data.dtype == np.float32 and scaled.data.shape == (config.d_head // 2,)
        assert scaled.data[0] == 1 and scaled.data[-1] == config.rope_factor
    theirs = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    np.testing.assert_array_equal(theirs["output_norm.weight"], weights.read("final_norm.gain"))
    down = weights.read("layers.1.ffn.w_down").T
    kind = {"float32": "F32", "bf16": "BF16", "float16": "F16", "q8_0": "Q8_0"}[dtype]
    assert {t.tensor_type.name for t in reader.tensors if "ffn_down.weight" in t.name} == {kind}
    rounded = gguf.quantize(np.ascontiguousarray(down), gguf.GGMLQuantizationType[kind])
    expected = gguf.dequantize(rounded, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(theirs["blk.1.ffn_down.weight"].reshape(down.shape), expected)


def test_quantized_blocks_are_those_of_gguf() -> None:
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    x[3] = 0
    x[4] *= 1e-30
    x[5, :32] = np.arange(32) - 15.5  # halves, which are rounded away from zero
    x[5, 0] = 127 / 2
    for name in ("BF16", "F16", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        theirs = gguf.quantize(x, kind)
        ours = KINDS[name].encode(x)
        assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()
        back = KINDS[name].decode(ours)
        np.testing.assert_array_equal(back, gguf.dequantize(theirs, kind))
        if name == "Q8_0":  # down the columns
            turned = KINDS["Q8_0T"].encode(np.ascontiguousarray(x[:32].T))
            np.testing.assert_array_equal(turned.T, ours[:32])


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_files_that_gguf_writes_are_read(config: Config, tmp_path: Path) -> None:
    """The package's own writer: other order, other types of numbers, other padding."""
    reader = gguf.GGUFReader(exported(tmp_path, config))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", arch)
    writer.add_custom_alignment(128)
    for name, field in reader.fields.items():
        if name.startswith(arch) and isinstance(field.contents(), int):
            writer.add_uint64(name, field.contents())
        elif name.startswith(arch):
            writer.add_float32(name, field.contents())
    for tensor in sorted(reader.tensors, key=lambda t: t.name):
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert cli.main(["import", str(tmp_path / "theirs.gguf"), "-o", str(tmp_path / "back")]) == 0
    whole = [(tmp_path / name / "master.bin").read_bytes() for name in ("mine", "back")]
    assert whole[0] == whole[1] and Weights(tmp_path / "back").config == config


# ---- llama.cpp -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python (cmake)")


def loaded(llama_cpp: Any, path: Path) -> Any:
    f32 = llama_cpp.GGML_TYPE_F32  # of the cache of keys and values
    options = {"type_k": f32, "type_v": f32, "flash_attn": False, "logits_all": True}
    return llama_cpp.Llama(str(path), n_ctx=32, n_threads=1, verbose=False, **options)


def theirs(model: Any, ids: list[int]) -> Array:
    """Return the logits (T, V) of llama.cpp after each token."""
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def parameters(path: Path) -> dict[str, Array]:
    weights = Weights(path)
    return {name: weights.read(name) for name in weights.layout.offsets}


def spoken(config: Config) -> tuple[Config, Tokenizer]:
    ours = train_from_iterator(corpus()[:20], config.vocab_size)
    return config, ours


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bf16", "q8_0"])
def test_llama_cpp_gives_our_logits(name: str, dtype: str, llama_cpp: Any, tmp_path: Path) -> None:
    """F32 is held to the rule of ``test_transformers.py``, of the weights as they come back.

    ``gpt2`` looks its GELU up by float16, and products of narrow weights narrow the other factor
    too: BF16 and F16 to that type, Q8_0 to 8 bits a block. So these are bounded by 4u√n of each
    row's size, u that type's roundoff and n the roundings that a number passes through.
    """
    config, tokenizer = spoken(MODELS[name])
    path = exported(tmp_path, config, "--dtype", dtype, tokenizer=tokenizer)
    assert cli.main(["import", str(path), "-o", str(tmp_path / "back")]) == 0
    params = parameters(tmp_path / "back")  # as rounded
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, T)).astype(np.int32)
    peer = theirs(loaded(llama_cpp, path), ids[0].tolist())
    exact = logits(ops, {n: p.astype(np.float64) for n, p in params.items()}, config, ids)[0]
    own = logits(ops, params, config, ids)[0]
    n = 16 * config.n_layers + T
    u = {"float32": 2.0**-24, "float16": 2.0**-11, "bf16": 2.0**-9, "q8_0": 0.5 / 127}[dtype]
    c = 2 * math.sqrt(n)
    if dtype != "float32" or name == "gpt2":
        c *= 2 * max(u, 2.0**-11) / 2.0**-24
    print(f"{name} {dtype}: {np.linalg.norm(peer - exact) / np.linalg.norm(exact):.2e} of the size")
    assert excess(peer, own, exact, factor=2, c=c) <= 1


@pytest.mark.slow
def test_a_permutation_of_llama_s_pairs_would_be_noticed(
    llama_cpp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist.convert import gguf as ours

    mixed = tuple(replace(family, half_split=not family.half_split) for family in ours.GGUF)
    monkeypatch.setattr(ours, "GGUF", mixed)
    for name in ("llama", "qwen2", "qwen3"):
        config, tokenizer = spoken(MODELS[name])
        path = exported(tmp_path / name, config, tokenizer=tokenizer)
        params = parameters(tmp_path / name / "mine")
        ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, T)).astype(np.int32)
        peer = theirs(loaded(llama_cpp, path), ids[0].tolist())
        own = logits(ops, params, config, ids)[0]
        assert np.linalg.norm(peer - own) > 0.05 * np.linalg.norm(own)


@pytest.mark.slow
def test_a_scaling_left_out_would_be_noticed(
    llama_cpp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist.convert import rope

    config, tokenizer = spoken(MODELS["llama3"])
    monkeypatch.setattr(rope, "divisors", lambda config: None)
    path = exported(tmp_path, config, tokenizer=tokenizer)
    params = parameters(tmp_path / "mine")
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, T)).astype(np.int32)
    peer = theirs(loaded(llama_cpp, path), ids[0].tolist())
    own = logits(ops, params, config, ids)[0]
    assert np.linalg.norm(peer - own) > 0.01 * np.linalg.norm(own)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gpt4", "gpt2", QWEN2_PATTERN, DIGITS_GPT2])
def test_ids_and_chats_are_ours(pattern: str, llama_cpp: Any, tmp_path: Path) -> None:
    tokenizer = (
        small() if pattern == "gpt4" else train_from_iterator(corpus(), 2000, pattern=pattern)
    )
    config = replace(MODELS["llama"], vocab_size=tokenizer.n_vocab + 3)
    path = exported(tmp_path, config, tokenizer=tokenizer)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in HARD:
        data = text.encode()
        ordinary = tokenizer.encode_ordinary(text)
        assert model.tokenize(data, add_bos=True, special=False) == ordinary, text
        special = tokenizer.encode(text, allowed_special="all")
        assert model.tokenize(data, add_bos=False, special=True) == special, text
    assert model.token_eos() == tokenizer.special_tokens["<|eos|>"]
    messages = [
        {"role": "user", "content": "What is 2+2? {{ x }}"},
        {"role": "assistant", "content": "4\n\n"},
        {"role": "user", "content": "Größe 中文 👩‍👩‍👧?"},
    ]
    ids: list[int] = []
    for part in chat(messages):
        said = str(part.text)
        ids += [special_id(tokenizer, said)] if part.control else tokenizer.encode_ordinary(said)
    ids.append(special_id(tokenizer, "<|assistant|>"))
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = model.metadata["tokenizer.chat_template"]
    formatter = Jinja2ChatFormatter(template, eos_token="", bos_token="")
    prompt = formatter(messages=messages).prompt
    assert model.tokenize(prompt.encode(), add_bos=False, special=True) == ids


@pytest.mark.slow
def test_greedy_continuations_are_ours_token_for_token(llama_cpp: Any, tmp_path: Path) -> None:
    config, tokenizer = spoken(MODELS["llama"])
    path = exported(tmp_path, config, tokenizer=tokenizer)
    params = parameters(tmp_path / "mine")
    model = loaded(llama_cpp, path)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(4, config.vocab_size, 6).tolist()
        own = generate(ops, params, config, [prompt], max_new_tokens=20, temperature=0)[0]
        ids = list(prompt)
        for token in own:
            scores = theirs(model, ids)[-1]
            if int(np.argmax(scores)) != token:  # a near-tie is judged by the logits
                exact = logits(ops, params, config, np.array([ids], np.int32))[0, -1]
                best, chosen = np.sort(exact)[-1], exact[int(np.argmax(scores))]
                assert best - chosen <= 1e-5 * np.abs(exact).max(), (seed, ids)
            ids.append(token)
