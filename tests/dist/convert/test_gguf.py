"""Models out to GGUF and back."""

import itertools
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist import cli
from dist.convert import gguf, rope
from dist.model import load_model
from dist.weights import Weights, load_master
from reference.config import Config
from reference.rope import frequencies, stretch
from reference.types import RopeScaling
from tests.helpers.models import MODELS
from tests.helpers.runs import text
from tests.helpers.weights import (
    FAMILIES,
    GPT2,
    LLAMA,
    LLAMA3,
    QWEN2,
    QWEN3,
    check_refused,
    write_random,
)
from tokenizer import Tokenizer, train_from_iterator
from tokenizer.patterns import DIGITS_GPT2, GPT4
from tokenizer.patterns import QWEN2 as QWEN2_PATTERN
from tokenizer.vocabulary import Vocabulary

HELD = {
    **{name: FAMILIES[name] for name in ("llama", "llama_odd", "smollm", "three_heads", "gpt2")},
    "qwen3": replace(QWEN3, window=0, d_head=10),
    "llama3": LLAMA3,
    "llama3_wide": replace(
        LLAMA3, d_head=128, rope_base=5e5, rope_factor=32.0, rope_original_context=8192
    ),
    "qwen2": QWEN2,
    "qwen2_untied": replace(QWEN2, n_kv_heads=1, tied=False),
    "llama_qkv_bias": replace(QWEN2, d_head=6),  # llama.cpp's qwen2 has no such heads
    "llama3_qkv_bias": replace(LLAMA3, qkv_bias=True),  # nor a scaled RoPE
    "qwen3_untied": replace(QWEN3, window=0, tied=False),
    "gpt2_untied": replace(GPT2, tied=False, d_ff=40),
    "llama_long_window": replace(LLAMA, window=0, rope_base=123_456.7, norm_eps=3.3e-6),
}


def out_and_back(folder: Path, config: Config, *words: str) -> tuple[bytes, bytes]:
    write_random(folder / "mine", config)
    assert cli.main(["export", str(folder / "mine"), str(folder / "m.gguf"), *words]) == 0
    assert cli.main(["import", str(folder / "m.gguf"), "-o", str(folder / "back")]) == 0
    return load_master(folder / "mine").tobytes(), load_master(folder / "back").tobytes()


@pytest.mark.parametrize("config", HELD.values(), ids=HELD)
def test_export_then_import_is_the_identity_bit_for_bit(config: Config, tmp_path: Path) -> None:
    mine, back = out_and_back(tmp_path, config)
    assert mine == back and Weights(tmp_path / "back").config == config


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN2, replace(QWEN3, window=0)], ids=["llama", "qwen2", "qwen3"]
)
def test_only_llama_s_heads_are_as_ours(config: Config, tmp_path: Path) -> None:
    """llama.cpp turns adjacent coordinates in the architecture llama, and halves in the others."""
    views = write_random(tmp_path / "mine", config)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    _, stored = gguf.header(tmp_path / "m.gguf")
    for name, start in (("q", 0), ("k", 32), ("v", 48)):
        theirs = stored[f"blk.1.attn_{name}.weight"].rows(8, 16)  # the second head
        ours = views["layers.1.attention.wqkv"][:, start + 8 : start + 16]
        if config != LLAMA and name != "v":
            ours = np.concatenate([ours[:, 0::2], ours[:, 1::2]], axis=1)
        np.testing.assert_array_equal(theirs, ours.T)
    if config.qkv_bias:
        bias = views["layers.1.attention.bqkv"][40:48]
        theirs = stored["blk.1.attn_k.bias"].rows(8, 16)
        np.testing.assert_array_equal(theirs, np.concatenate([bias[0::2], bias[1::2]]))
    if config.qk_norm:
        gain = views["layers.1.attention.k_norm.gain"]
        theirs = stored["blk.1.attn_k_norm.weight"].rows(0, 8)
        np.testing.assert_array_equal(theirs, np.concatenate([gain[0::2], gain[1::2]]))


def families_of(folder: Path, *configs: Config) -> list[str]:
    found = []
    for i, config in enumerate(configs):
        write_random(folder / f"{i}", config)
        assert cli.main(["export", str(folder / f"{i}"), str(folder / f"{i}.gguf")]) == 0
        found.append(gguf.header(folder / f"{i}.gguf")[0]["general.architecture"])
    return found


def test_qwen2_is_that_of_heads_that_add_up_to_the_width(tmp_path: Path) -> None:
    configs = (QWEN2, replace(QWEN2, d_head=6), replace(LLAMA3, qkv_bias=True))
    assert families_of(tmp_path, *configs) == ["qwen2", "llama", "llama"]


# ---- a scaled RoPE -------------------------------------------------------------------------------


@given(
    *(st.floats(1.1, 100.0), st.floats(0.1, 4.0), st.floats(1.01, 50.0), st.integers(1, 200_000)),
    *(st.floats(5.0, 1e6), st.integers(1, 128)),
)
def test_a_scaling_is_found_again_from_what_it_divides_frequencies_by(
    factor: float, low: float, ratio: float, original: int, base: float, pairs: int
) -> None:
    scaling = RopeScaling(factor, low, low * ratio, float(original))
    omega = frequencies(base, 2 * pairs)
    numbers = stretch(omega, scaling)
    found = rope.scaling_of(numbers.astype(np.float32), base)
    again = np.ones(pairs) if found is None else stretch(omega, found)
    np.testing.assert_allclose(again, numbers, rtol=1.1e-5)


def test_llama_s_own_numbers_are_found_though_others_make_them_in_float32() -> None:
    """As llama.cpp's converter makes them, a frequency at a time."""
    for base, d, factor in ((5e5, 128, 8.0), (5e5, 64, 32.0), (5e5, 128, 32.0)):
        low, high, original = 1.0, 4.0, 8192
        numbers = []
        for freq in 1 / np.float32(base) ** (np.arange(0, d, 2, np.float32) / np.float32(d)):
            wavelength = np.float32(2 * math.pi) / freq
            smooth = (original / wavelength - np.float32(low)) / np.float32(high - low)
            blended = 1 / ((1 - smooth) / np.float32(factor) + smooth)
            short, long = wavelength < original / high, wavelength > original / low
            numbers.append(1.0 if short else factor if long else blended)
        found = rope.scaling_of(np.array(numbers, np.float32), base)
        assert found == (factor, low, high, original)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1.0, 2.0, 1.5, 4.0, 8.0, 8.0, 8.0, 8.0], "otherwise than Llama 3's scaling does"),
        ([8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0], "otherwise than Llama 3's scaling does"),
        ([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0], "must hold finite numbers >= 1"),
        ([1.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "must hold finite numbers >= 1"),
        ([1.0, 8.0], r"has shape \(2,\), but a head has 8 pairs"),
    ],
)
def test_other_divisors_are_refused(
    numbers: list[float],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "divisors", lambda config: np.array(numbers, np.float32))
    write_random(tmp_path / "mine", LLAMA3)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    assert cli.main(["import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("float16", 11)])
def test_narrow_types_round_to_nearest(dtype: str, bits: int, tmp_path: Path) -> None:
    mine, back = (np.frombuffer(b, "<f4") for b in out_and_back(tmp_path, LLAMA, "--dtype", dtype))
    error = np.abs(mine - back)
    floor = 2.0**-25 if dtype == "float16" else 0  # half of the smallest subnormal
    assert (error <= np.abs(mine) * 2.0**-bits + floor).all() and error.max() > 0


def test_what_is_added_or_multiplied_number_by_number_stays_float32(tmp_path: Path) -> None:
    """As llama.cpp's operations on them want it."""
    out_and_back(tmp_path, GPT2, "--dtype", "float16")
    kinds = {name: each.kind for name, each in gguf.header(tmp_path / "m.gguf")[1].items()}
    wide = {name for name in kinds if "norm" in name or "bias" in name} | {"position_embd.weight"}
    assert {name for name in kinds if kinds[name] == "F32"} == wide


def test_q8_0_is_off_by_half_a_step_of_each_block_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(LLAMA, d_ff=48)  # of which 32 is no divisor
    out_and_back(tmp_path, config, "--dtype", "q8_0")
    said = capsys.readouterr().out
    names = ", ".join(f"blk.{i}.ffn_down.weight" for i in range(2))
    assert f"kept as F16, since 32 does not divide their width: {names}" in said
    mine, back = Weights(tmp_path / "mine"), Weights(tmp_path / "back")
    for name in mine.layout.offsets:
        ours, theirs = mine.read(name), back.read(name)
        if ours.ndim == 1:
            np.testing.assert_array_equal(ours, theirs)
        elif name.endswith("w_down"):
            np.testing.assert_array_equal(ours.astype(np.float16).astype(np.float32), theirs)
        else:
            rows = ours if name.startswith("embedding") else ours.T
            off = (theirs if name.startswith("embedding") else theirs.T) - rows
            most = np.abs(rows).reshape(-1, 32).max(axis=1, keepdims=True)
            # half a step of 1/127 of the greatest, and the rounding of the step to float16
            assert (np.abs(off.reshape(-1, 32)) <= most * (0.5 / 127 + 2.0**-11) + 1e-7).all(), name
            assert off.any()


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (replace(LLAMA, window=5), ["window = 5"]),
        (QWEN3, ["window = (0, 6)"]),
        (replace(QWEN3, window=0, ffn_bias=True), ["qwen3, cannot", "ffn_bias = True"]),
        (replace(QWEN3, window=0, rope_factor=4.0), ["qwen3, cannot", "rope_factor = 4.0"]),
        (replace(GPT2, ffn="relu"), ["ffn = 'relu'"]),
        (replace(GPT2, ffn="gelu"), ["ffn = 'gelu'"]),
        (replace(GPT2, n_kv_heads=2), ["n_kv_heads = 2"]),
        (replace(GPT2, d_head=6), ["d_head = 6"]),
        (MODELS["alibi_mqa"], ["position = 'alibi'"]),
        (MODELS["untied_post_rmsnorm"], ["norm_placement = 'post'"]),
    ],
)
def test_what_no_architecture_can_express_is_refused_with_the_field(
    config: Config, fields: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(config, fields, "m.gguf", tmp_path, capsys)


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt4", "gpt2", QWEN2_PATTERN, DIGITS_GPT2])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_from_iterator([text(i) for i in range(100)], 320, pattern=request.param)


def test_the_tokenizer_travels_along(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=323), tokenizer)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    keys, _ = gguf.header(tmp_path / "m.gguf")
    ids = tokenizer.special_tokens
    assert keys["tokenizer.ggml.eos_token_id"] == ids["<|eos|>"]
    assert keys["tokenizer.ggml.eot_token_id"] == ids["<|end|>"]
    assert keys["tokenizer.ggml.padding_token_id"] == ids["<|pad|>"]
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.ggml.tokens"][320:] == ["[PAD320]", "[PAD321]", "[PAD322]"]
    types = keys["tokenizer.ggml.token_type"]
    assert types[320:] == [5, 5, 5] and types[ids["<|user|>"]] == 3 and types[100] == 1
    assert "<|assistant|>" in keys["tokenizer.chat_template"]
    assert cli.main(["import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "back")]) == 0
    path = load_model(tmp_path / "back", "reference").tokenizer
    assert path is not None
    back = Tokenizer.load(path).vocabulary
    assert (back.tokens, back.special_tokens) == (
        dict(tokenizer.vocabulary.tokens),
        tokenizer.special_tokens,
    )
    assert back == tokenizer.vocabulary


def test_published_vocabularies_travel_along(tmp_path: Path) -> None:
    """Llama 3's has merges before those of their parts, SmolLM's lacks bytes; one may not merge."""
    ours = train_from_iterator([text(i) for i in range(100)], 320)
    v = ours.vocabulary
    assert v.merges is not None
    early = [0, *range(2, len(v.merges)), 1]  # the second, after those that join what it makes
    lacking = {i: token for i, token in v.tokens.items() if token != b"\x04"}
    plain = train_from_iterator([], 276)
    for name, tokenizer in (
        ("early", remade(ours, merges=v.merges[early])),
        ("lacking", remade(ours, tokens=lacking)),
        ("plain", plain),
    ):
        write_random(tmp_path / name, replace(LLAMA, vocab_size=320), tokenizer)
        for out in (f"{name}.gguf", f"{name}-hf"):
            assert cli.main(["export", str(tmp_path / name), str(tmp_path / out)]) == 0
            back = tmp_path / f"{out}-back"
            assert cli.main(["import", str(tmp_path / out), "-o", str(back)]) == 0
            assert Tokenizer.load(back / "tokenizer.myllm").vocabulary == tokenizer.vocabulary
    assert gguf.header(tmp_path / "plain.gguf")[0]["tokenizer.ggml.merges"] == []


ODD: list[Any] = [
    *(True, False, 0, -1, 3, 2**32 - 1, 2**63, 0.5, 1e308, math.nan, math.inf, "", "x", "llama"),
    *(["a", "b"], [1, 2, 3], [0.5], []),
]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "qwen3"])
def test_whatever_metadata_says_it_is_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_from_iterator([text(i) for i in range(40)], 300)
    write_random(tmp_path / "mine", replace(HELD[name], vocab_size=300), tokenizer)
    path = tmp_path / "m.gguf"
    assert cli.main(["export", str(tmp_path / "mine"), str(path)]) == 0
    keys, stored = gguf.header(path)
    scaling = (f"{name}.rope.{key}" for key in ("scaling.type", "scaling.factor", "scale_linear"))
    tried = [*keys, "tied", "rope_freqs", "split.count", *scaling]
    refused = 0
    for key, value in itertools.product(tried, ODD):
        monkeypatch.setattr(gguf, "header", lambda _, k=key, v=value: ({**keys, k: v}, stored))
        try:
            gguf.read(path, with_tokenizer="tokenizer" in key)
        except (ValueError, OSError) as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 600
    assert refused > len(tried)


def remade(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    v = tokenizer.vocabulary
    fields = {
        **{"tokens": v.tokens, "merges": v.merges, "special_tokens": v.special_tokens},
        **{"pattern": v.pattern, "classes": v.classes},
        **changes,
    }
    return Tokenizer(Vocabulary(**fields))


def test_tokenizers_that_llama_cpp_would_read_otherwise_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = train_from_iterator([text(i) for i in range(100)], 320)
    tokens = dict(ours.vocabulary.tokens)
    assert ours.vocabulary.merges is not None
    last = max(tokens)
    odd = {**tokens, last + 200: b"qzx"}  # made by no merge
    specials = {"<|pad|>": 0}
    for i, (changed, message) in enumerate(
        {
            remade(ours, pattern=r"\S+|\s+"): "cuts text in ways of its own",
            remade(ours, tokens=odd): f"token {last + 200}, b'qzx', is not what its merges make",
            remade(ours, special_tokens=specials): "no token that ends a text",
        }.items()
    ):
        config = replace(LLAMA, vocab_size=600)
        write_random(tmp_path / f"{i}", config, changed)
        assert cli.main(["export", str(tmp_path / f"{i}"), str(tmp_path / "m.gguf")]) == 1
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    # the same token is no hindrance to one that takes whole pieces, as this way of cutting does
    whole = remade(ours, tokens=odd, whole_pieces=True)
    write_random(tmp_path / "whole", replace(LLAMA, vocab_size=600), whole)
    assert cli.main(["export", str(tmp_path / "whole"), str(tmp_path / "m.gguf")]) == 0
    assert cli.main(["import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "back")]) == 0
    back = Tokenizer.load(tmp_path / "back" / "tokenizer.myllm").vocabulary
    assert back.whole_pieces and back.pattern == GPT4


def test_foreign_vocabularies_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = train_from_iterator([text(i) for i in range(100)], 320)
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=320), ours)
    honest = gguf.gguf_keys
    for i, (changes, message) in enumerate(
        [
            ({"model": "llama"}, "a vocabulary of SentencePiece"),
            ({"pre": "tekken"}, "it cuts text by 'tekken'"),
            ({"token_type": ["x"]}, "each with a type"),
            ({"tokens": [0]}, "must be a list of strings"),
        ]
    ):
        changed = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
        monkeypatch.setattr(gguf, "gguf_keys", lambda *given, c=changed: {**honest(*given), **c})
        path = tmp_path / f"{i}.gguf"
        assert cli.main(["export", str(tmp_path / "mine"), str(path)]) == 0
        assert cli.main(["import", str(path), "-o", str(tmp_path / "back")]) == 1
        said = capsys.readouterr().err
        assert message in said and "--without-tokenizer" in said
        words = ["import", str(path), "-o", str(tmp_path / f"back{i}"), "--without-tokenizer"]
        assert cli.main(words) == 0
        capsys.readouterr()


# ---- other files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "the architecture 'gemma' is not known"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window = 4096"),
        ({"llama.rope.scaling.type": "linear"}, "scaling.type = 'linear'"),
        ({"llama.rope.scaling.factor": 4.0}, "scaling.factor = 4.0 scales RoPE"),
        ({"llama.rope.scale_linear": 0.5}, "scale_linear = 0.5 scales RoPE"),
        (
            {"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 1.0},
            "scaling.factor = 2.0 scales RoPE",
        ),
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.attn_factor": 1.5},
            "attn_factor = 1.5",
        ),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.attention.value_length": 4}, "value_length must be the width of keys, 8, got 4"),
        ({"llama.embedding_length": 64}, "has shape"),
        ({"llama.block_count": 3}, "has no tensor blk.2."),
        ({"llama.block_count": 1}, "does not know: blk.1."),
        ({"general.alignment": 0}, "general.alignment is 0"),
        ({"split.count": 2}, "one of several parts"),
    ],
)
def test_models_that_are_built_otherwise_are_refused_by_name(
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    family = gguf.choose(gguf.GGUF, LLAMA, "GGUF")
    described = {**family.describe(LLAMA), **changes}
    monkeypatch.setattr(type(family), "describe", lambda self, config: described)
    monkeypatch.setattr(gguf, "choose", lambda *given: family)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    assert cli.main(["import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def check_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, described: dict[str, Any]
) -> None:
    """Export weights under such a description, and expect the import to find their config."""
    family = gguf.choose(gguf.GGUF, config, "GGUF")
    with monkeypatch.context() as patch:
        patch.setattr(type(family), "describe", lambda self, config: described)
        patch.setattr(gguf, "choose", lambda *given: family)
        assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    assert cli.main(["import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "back")]) == 0
    assert Weights(tmp_path / "back").config == config


@pytest.mark.parametrize(
    "said",
    [
        {"scaling.type": "none", "scaling.factor": 4.0, "scale_linear": 4.0},
        {"scaling.factor": 1.0, "scale_linear": 4.0, "scaling.attn_factor": 1.0},
        {"scale_linear": 1.0},
        {"scaling.factor": 0.0},
    ],
    ids=str,
)
def test_a_factor_by_which_llama_cpp_does_not_scale_is_none(
    said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never scales where the type is none, reads the older key in default of the newer."""
    write_random(tmp_path / "mine", LLAMA)
    described = gguf.choose(gguf.GGUF, LLAMA, "GGUF").describe(LLAMA)
    described |= {f"llama.rope.{name}": value for name, value in said.items()}
    check_read(tmp_path, monkeypatch, LLAMA, described)


def test_older_files_without_a_vocab_size_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    described = gguf.choose(gguf.GGUF, LLAMA, "GGUF").describe(LLAMA)
    for name in ("vocab_size", "attention.key_length", "attention.value_length"):
        del described[f"llama.{name}"]
    check_read(tmp_path, monkeypatch, LLAMA, described)


def test_a_base_written_as_a_whole_number_scales_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random(tmp_path / "mine", LLAMA3)
    described = gguf.choose(gguf.GGUF, LLAMA3, "GGUF").describe(LLAMA3)
    described["llama.rope.freq_base"] = 10_000
    check_read(tmp_path, monkeypatch, LLAMA3, described)


def header_of(n_tensors: int, n_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


NAMED = struct.pack("<Q", 1) + b"a"
LLAMA_SAID = b"".join(
    [struct.pack("<Q", 20), b"general.architecture", struct.pack("<IQ", 8, 5), b"llama"]
)
NO_AXES = struct.pack("<Q", 17) + b"token_embd.weight" + struct.pack("<IIQ", 0, 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no GGUF file"),
        (b"\x89PNG" + b"\0" * 40, "no GGUF file"),
        (header_of(0, 0, version=1), "version 1 of GGUF"),
        (header_of(1 << 60, 0), "it cannot hold"),
        (header_of(0, 1 << 60), "it cannot hold"),
        (header_of(0, 1, b"\xff" * 12), "it ends within its metadata"),
        (header_of(0, 1, struct.pack("<Q", 1) + b"\xff" + bytes(20)), "is no text"),
        (header_of(0, 1, NAMED + struct.pack("<I", 77)), "no type 77"),
        (header_of(0, 1, NAMED + struct.pack("<IIQ", 9, 9, 1)), "a list of lists"),
        (header_of(0, 1, NAMED + struct.pack("<IIQ", 9, 4, 1 << 60)), "it cannot hold"),
        (header_of(1, 0, NAMED + struct.pack("<I", 9) + bytes(80)), "has 9 axes"),
        (header_of(1, 0, NAMED + struct.pack("<IQIQ", 1, 4, 2, 0)), "quantized in a way"),
        (header_of(1, 0, NAMED + struct.pack("<IQIQ", 1, 4, 8, 0)), "does not divide a row"),
        (header_of(1, 0, NAMED + struct.pack("<IQIQ", 1, 4, 0, 0)), "reaches past its end"),
        (header_of(2, 0, 2 * (NAMED + struct.pack("<IQIQ", 1, 0, 0, 0)) + bytes(64)), "a twice"),
        (header_of(0, 0), "the architecture None is not known"),
        (header_of(1, 1, LLAMA_SAID + NO_AXES + bytes(64)), "llama.vocab_size is missing"),
    ],
)
def test_damaged_files_end_in_a_sentence(
    data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    assert cli.main(["import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
