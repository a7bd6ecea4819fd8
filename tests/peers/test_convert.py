"""Exported models in ``transformers``, and its own imported: the same logits, ids and chats.

Both are run in float32 and held to the rule of ``test_transformers.py``: the distance of theirs
from our float64 is at most twice that of our own float32, plus c·u·s.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli
from dist.convert.families import GELU_TANH
from dist.documents import chat
from dist.pack import special_id
from dist.weights import Weights
from reference import ops
from reference.config import Config
from reference.model import logits
from reference.types import Array
from tests.helpers.hard_texts import HARD, SPELLINGS
from tests.helpers.rounding import excess
from tests.helpers.tokenizer_texts import corpus, small
from tests.helpers.weights import (
    FAMILIES,
    GPT2,
    LLAMA,
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    TOY,
    write_random,
)
from tokenizer import GPT2 as GPT2_PATTERN
from tokenizer import Tokenizer, from_huggingface, train_from_iterator
from tokenizer.interop import spelled
from tokenizer.patterns import QWEN2 as QWEN2_PATTERN
from tokenizer.patterns import machine_of

REASON = "needs the optional extra: pip install -e '.[peers]'"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

B, T = 3, 19
OLD = int(transformers.__version__.split(".")[0]) < 5


def distance(config: Config, params: dict[str, Array], model: Any, seed: int = 1) -> float:
    """Return the error of a model of theirs as a multiple of what the rule allows."""
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (B, T)).astype(np.int32)
    with torch.no_grad():
        peer = model.float().eval()(input_ids=torch.from_numpy(ids).long()).logits.numpy()
    own = logits(ops, params, config, ids)
    exact = logits(ops, {n: p.astype(np.float64) for n, p in params.items()}, config, ids)
    c = 2 * math.sqrt(16 * config.n_layers + (T if config.position == "rope" else 0))
    return excess(peer, own, exact, factor=2, c=c)


def exported(folder: Path, config: Config, *words: str) -> tuple[dict[str, Array], Path]:
    params = write_random(folder / "mine", config)
    assert cli.main(["export", str(folder / "mine"), str(folder / "hf"), *words]) == 0
    return params, folder / "hf"


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_exported_weights_give_our_logits_in_transformers(config: Config, tmp_path: Path) -> None:
    params, folder = exported(tmp_path, config)
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert distance(config, params, model) <= 1


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_narrow_weights_are_those_that_come_back(dtype: str, tmp_path: Path) -> None:
    _, folder = exported(tmp_path, LLAMA, "--dtype", dtype)
    # which transformers 5 does unasked
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == {"bf16": torch.bfloat16, "float16": torch.float16}[dtype]
    assert cli.main(["import", str(folder), "-o", str(tmp_path / "back")]) == 0
    weights = Weights(tmp_path / "back")
    params = {name: weights.read(name) for name in weights.layout.offsets}
    assert distance(LLAMA, params, model) <= 1


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def theirs(kind: str, **options: Any) -> Any:
    """Return a model of transformers with random weights, made from its own config."""
    sizes = {
        "vocab_size": TOY["vocab_size"],
        "hidden_size": TOY["d_model"],
        "intermediate_size": TOY["d_ff"],
        "num_hidden_layers": TOY["n_layers"],
        "num_attention_heads": TOY["n_heads"],
        "num_key_value_heads": 2,
        "max_position_embeddings": TOY["context_length"],
    }
    if kind == "GPT2":
        sizes = {"vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        options = {"bos_token_id": 0, "eos_token_id": 0, **options}
    if OLD and "rope_parameters" in options:
        scaling = {**options.pop("rope_parameters")}
        options |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config)
    with torch.no_grad():  # gains that are not one, biases that are not zero
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("Llama", {"tie_word_embeddings": True}, {"tied": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, {"attn_bias": True, "tied": False}),
        ("Llama", {"head_dim": 6}, {"d_head": 6}),
        (
            "Llama",
            {"head_dim": 16, "rope_parameters": LLAMA3_ROPE},
            {"rope_scaling": (8.0, 1.0, 4.0, 64.0), "rope_base": 1e4},
        ),
        ("Mistral", {"sliding_window": 5}, {"window": 5}),
        ("Qwen2", {}, {"qkv_bias": True, "attn_bias": False, "window": 0}),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            {"qkv_bias": True, "window": (0, 6)},
        ),
        (
            "Qwen3",
            {
                "head_dim": 8,
                "use_sliding_window": True,
                "sliding_window": 6,
                "max_window_layers": 1,
            },
            {"window": (0, 6), "qk_norm": True},
        ),
        ("GPT2", {}, {"ffn": "gelu_tanh", "d_ff": 128, "tied": True}),
        *(("GPT2", {"activation_function": name}, {"ffn": "gelu_tanh"}) for name in GELU_TANH),
        ("GPT2", {"activation_function": "gelu", "n_inner": 40}, {"ffn": "gelu", "d_ff": 40}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_models_of_transformers_are_imported_with_their_logits(
    kind: str, options: dict[str, Any], expected: dict[str, Any], shard: str, tmp_path: Path
) -> None:
    model = theirs(kind, **options)
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard)
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "ours")]) == 0
    weights = Weights(tmp_path / "ours")
    assert {name: getattr(weights.config, name) for name in expected} == expected
    params = {name: weights.read(name) for name in weights.layout.offsets}
    assert weights.layout.size == sum(p.numel() for p in model.parameters())
    assert distance(weights.config, params, model) <= 1


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_rope_with_other_pairs_would_be_noticed(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist.convert import huggingface

    mixed = [replace(family, half_split=False) for family in huggingface.HUGGING_FACE]
    monkeypatch.setattr(huggingface, "HUGGING_FACE", tuple(mixed))
    params, folder = exported(tmp_path, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert distance(config, params, model) > 1_000


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rope_is_read_at_each_of_its_places(place: str, tmp_path: Path) -> None:
    """Transformers 4 knows one of the two, transformers 5 both."""
    if OLD and place == "rope_parameters":
        pytest.skip("transformers 4 does not read it there")
    params, folder = exported(tmp_path, LLAMA3)
    written = json.loads((folder / "config.json").read_text())
    del written["rope_parameters" if place == "rope_scaling" else "rope_scaling"]
    (folder / "config.json").write_text(json.dumps(written))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert distance(LLAMA3, params, model) <= 1
    for field, other in (("rope_factor", 7.0), ("rope_original_context", 63), ("rope_base", 9e3)):
        assert distance(replace(LLAMA3, **{field: other}), params, model) > 100, field  # type: ignore[arg-type]


def test_a_window_one_token_off_would_be_noticed(tmp_path: Path) -> None:
    params, folder = exported(tmp_path, MISTRAL)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert distance(replace(MISTRAL, window=4), params, model) > 1_000


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt4", "gpt2", "qwen2"])
def spoken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """A tokenizer of ours, and what transformers makes of its export."""
    folder = tmp_path_factory.mktemp("spoken")
    config, ours = LLAMA, small()
    if request.param == "gpt2":
        ours = train_from_iterator(corpus(), 2000, pattern="gpt2")
    elif request.param == "qwen2":
        config = QWEN2
        ours = Tokenizer(replace(ours.vocabulary, pattern=QWEN2_PATTERN, nfc=True))
    config = replace(config, vocab_size=ours.n_vocab + 3)
    write_random(folder / "mine", config, ours)
    assert cli.main(["export", str(folder / "mine"), str(folder / "hf")]) == 0
    return ours, transformers.AutoTokenizer.from_pretrained(folder / "hf")


def test_ids_on_hard_text_are_ours(spoken: tuple[Tokenizer, Any]) -> None:
    ours, peer = spoken
    for text in (*HARD, *SPELLINGS):
        expected = ours.encode(text, allowed_special="all")
        assert peer(text)["input_ids"] == peer.encode(text) == expected
        assert peer.decode(expected) == ours.decode(expected)
    assert peer.eos_token_id == ours.special_tokens["<|eos|>"]
    assert peer.pad_token_id == ours.special_tokens["<|pad|>"]


@pytest.mark.skipif(OLD, reason="transformers 4 takes the class that a folder names")
def test_of_a_qwen2_with_a_tokenizer_of_its_own_it_is_said_how_to_load_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = small()
    write_random(tmp_path / "mine", replace(QWEN2, vocab_size=ours.n_vocab), ours)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    assert "load this one by PreTrainedTokenizerFast.from_pretrained" in capsys.readouterr().out
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    for text in HARD:
        assert peer(text)["input_ids"] == ours.encode(text, allowed_special="all")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "cafe\u0301 12345"
    assert other(text)["input_ids"] != ours.encode(text)  # else nothing needs to be said


def test_what_others_say_of_special_tokens_is_theirs_again(tmp_path: Path) -> None:
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fill|>")
    specials = dict(zip(names, small().special_tokens.values(), strict=False))
    theirs = Tokenizer(replace(small().vocabulary, special_tokens=specials))
    config = replace(LLAMA, vocab_size=small().n_vocab)
    write_random(tmp_path / "made", config, theirs)
    assert cli.main(["export", str(tmp_path / "made"), str(tmp_path / "first")]) == 0
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "first")
    peer.eos_token, peer.pad_token = "<|im_end|>", "<|fill|>"
    peer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    peer.save_pretrained(tmp_path / "first")
    generation = transformers.GenerationConfig(eos_token_id=[peer.eos_token_id, 0])
    generation.save_pretrained(tmp_path / "first")
    assert cli.main(["import", str(tmp_path / "first"), "-o", str(tmp_path / "in")]) == 0
    assert cli.main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (back.eos_token, back.pad_token) == ("<|im_end|>", "<|fill|>")
    chat = [{"role": "user", "content": "the fox"}]
    assert back.apply_chat_template(chat) == peer.apply_chat_template(chat)
    said = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert sorted(said.eos_token_id) == sorted([peer.eos_token_id, 0])


def test_chats_are_rendered_to_our_ids(spoken: tuple[Tokenizer, Any]) -> None:
    ours, peer = spoken
    messages = [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "What is 2+2? {{ x }} {% if %}"},
        {"role": "assistant", "content": "4\n\n"},
        {"role": "user", "content": "And Größe 中文 👩‍👩‍👧?"},
    ]
    ids: list[int] = []
    for part in chat(messages):
        text = str(part.text)
        ids += [special_id(ours, text)] if part.control else ours.encode_ordinary(text)
    assert peer.apply_chat_template(messages, return_dict=False) == ids
    asked = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == [*ids, special_id(ours, "<|assistant|>")]
    with pytest.raises(Exception, match="role of a message must be one of system, user, assistant"):
        peer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_greedy_continuations_are_ours(tmp_path: Path) -> None:
    from reference.generate import generate

    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        params, folder = exported(tmp_path / name, config)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        prompt = [3, 1, 4, 1, 5]
        own = generate(ops, params, config, [prompt], max_new_tokens=20, temperature=0)[0]
        their = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert their[0, 5:].tolist() == own


def test_qwen2_s_own_tokenizer_is_imported_with_its_ids(tmp_path: Path) -> None:
    """The class of transformers, which makes text NFC, with a vocabulary of ours."""
    names, merges = spelled(replace(small().vocabulary, special_tokens={}))
    vocab = {name: i for i, name in enumerate(names.values())}
    if OLD:
        files = {"vocab.json": json.dumps(vocab), "merges.txt": "\n".join(map(" ".join, merges))}
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        peer = transformers.Qwen2TokenizerFast(*(str(tmp_path / name) for name in files))
    else:
        peer = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    peer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    peer.save_pretrained(tmp_path)
    ours = from_huggingface(tmp_path / "tokenizer.json")
    assert ours.vocabulary.nfc
    assert machine_of(ours.vocabulary.pattern) == machine_of(QWEN2_PATTERN) is not None
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} <= set(ours.special_tokens)
    chat = "<|im_start|>user\nCafe\u0301 1234?<|im_end|>\n<|endoftext|>"
    for text in (*HARD, *SPELLINGS, chat):
        assert peer.encode(text) == ours.encode(text, allowed_special="all"), ascii(text)
        plain = peer.encode(text, split_special_tokens=True)
        assert plain == ours.encode_ordinary(text), ascii(text)


def test_single_digits_before_gpt2_s_pattern_are_imported_with_their_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models, pre_tokenizers, trainers

    theirs = Theirs(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>"]
    )
    theirs.train_from_iterator(corpus()[::3], trainer)
    theirs.save(str(tmp_path / "theirs.json"))
    ours = from_huggingface(tmp_path / "theirs.json")
    assert ours.vocabulary.pattern != GPT2_PATTERN
    for text in (*HARD, *corpus()[::9], "x  5 \n\n7  y\t8", " 1", "1 ", "a 1\n 2"):
        assert ours.encode_ordinary(text) == theirs.encode(text, add_special_tokens=False).ids
    kept = json.loads((tmp_path / "theirs.json").read_text())["model"]["vocab"]
    assert len(kept) == ours.n_vocab
