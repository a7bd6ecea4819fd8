"""What others must be told of a tokenizer beside its tokens: special ids, and how a chat looks."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dist.convert.mapping import shown
from dist.documents import END, EOS_NAMES, ROLES
from reference.config import Config
from tokenizer.interop import not_by_merges, spelled, unspelled
from tokenizer.patterns import DIGITS_GPT2, GPT2, GPT4, QWEN2, machine_of

if TYPE_CHECKING:
    from tokenizer import Tokenizer

# what ``documents.chat`` writes, and the beginning of an answer, in Jinja
CHAT = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in [" + ", ".join(map(repr, ROLES)) + "] -%}"
    "{{- raise_exception('the role of a message must be one of " + ", ".join(ROLES) + "') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '" + END + "' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ROLES["assistant"] + "' -}}{%- endif -%}"
)

ROLE_NAMES = {  # what a special token is for -> the names that it may have
    "bos": ("<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos": EOS_NAMES,
    "pad": ("<|pad|>",),
    "eot": (END, "<|eot_id|>", "<|im_end|>"),
}


def special_names(tokenizer: "Tokenizer") -> dict[str, str]:
    """Return what special tokens are for -> their names, as far as the tokenizer has them."""
    found = {}
    for role, names in ROLE_NAMES.items():
        known = [name for name in names if name in tokenizer.special_tokens]
        if known:
            found[role] = known[0]
    return found


def chat_template(tokenizer: "Tokenizer") -> str | None:
    """Return the chat template in Jinja, if the tokenizer has the tokens for it."""
    wanted = {*ROLES.values(), END}
    return CHAT if wanted <= tokenizer.special_tokens.keys() else None


def check_fits(tokenizer: "Tokenizer", config: Config, where: str) -> None:
    """Refuse a tokenizer that has ids which the model does not know."""
    if tokenizer.n_vocab > config.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has {tokenizer.n_vocab:,} ids, but vocab_size is "
            f"{config.vocab_size:,}"
        )


# ---- GGUF ----------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
# What llama.cpp calls a way of cutting text (``llama_vocab::impl::load``), and whether it then
# looks a whole piece up before it merges. Which way a pattern is, its state machine says.
PRE_OF = {
    machine_of(GPT4): "llama-bpe",
    machine_of(QWEN2): "qwen2",
    machine_of(GPT2): "gpt-2",
}
PATTERNS = {
    "llama-bpe": GPT4,
    "llama3": GPT4,
    "llama-v3": GPT4,
    "qwen2": QWEN2,
    "gpt-2": GPT2,
    "smollm": DIGITS_GPT2,
}
WHOLE_PIECES = {"llama-bpe", "llama3", "llama-v3"}


def gguf_keys(tokenizer: "Tokenizer", config: Config, where: str) -> dict[str, Any]:
    """Return the keys that tell llama.cpp of a tokenizer.

    Raises
    ------
    ValueError
        When it has no such tokenizer, that is one with the same ids for any text.
    """
    check_fits(tokenizer, config, where)
    vocabulary = tokenizer.vocabulary
    pattern = vocabulary.pattern
    machine = machine_of(pattern)
    pre = "smollm" if pattern == DIGITS_GPT2 else PRE_OF[machine] if machine in PRE_OF else None
    if pre is None:
        raise ValueError(
            f"{where}: llama.cpp cuts text in ways of its own, and none is the tokenizer's pattern "
            f"{pattern!r}"
        )
    whole = vocabulary.whole_pieces or vocabulary.merges is None
    if whole != (pre in WHOLE_PIECES):
        odd = not_by_merges(vocabulary)
        if odd is not None:
            raise ValueError(
                f"{where}: token {odd}, {vocabulary.tokens[odd]!r}, is not what its merges make of "
                f"these bytes, and llama.cpp's {pre} {'does not take' if whole else 'takes'} a "
                "piece that is a token for it"
            )
    names, merges = spelled(vocabulary)
    for i in range(config.vocab_size):
        names.setdefault(i, f"[PAD{i}]")
    specials = set(vocabulary.special_tokens.values())
    types = [
        CONTROL if i in specials else NORMAL if i in vocabulary.tokens else UNUSED
        for i in range(config.vocab_size)
    ]
    roles = special_names(tokenizer)
    if "eos" not in roles:
        raise ValueError(
            f"{where}: the tokenizer has no token that ends a text ({', '.join(EOS_NAMES)}), and "
            "llama.cpp would take another for it"
        )
    roles.setdefault("bos", roles["eos"])
    called = {"pad": "padding"}
    ids = {
        f"tokenizer.ggml.{called.get(role, role)}_token_id": vocabulary.special_tokens[name]
        for role, name in roles.items()
    }
    template = chat_template(tokenizer)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names[i] for i in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [np.int32(kind) for kind in types],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],  # llama.cpp wants the key
        **ids,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        **({} if template is None else {"tokenizer.chat_template": template}),
    }


def gguf_tokenizer(keys: Mapping[str, Any], vocab_size: int) -> "Tokenizer":
    """Return the tokenizer that a file's keys describe.

    Raises
    ------
    ValueError
        When it is no byte-level BPE, or its keys contradict each other.
    """
    from tokenizer import Tokenizer

    model, pre = keys["tokenizer.ggml.model"], keys.get("tokenizer.ggml.pre")
    if model != "gpt2":
        what = "SentencePiece" if model in ("llama", "t5") else shown(model)
        raise ValueError(f"it is a vocabulary of {what}; only byte-level BPE is known")
    if not isinstance(pre, str) or pre not in PATTERNS:
        raise ValueError(f"it cuts text by {shown(pre)}; known are {', '.join(PATTERNS)}")
    tokens = _strings(keys, "tokenizer.ggml.tokens")
    merges = _strings(keys, "tokenizer.ggml.merges")
    types = keys.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or len(tokens) > vocab_size:
        raise ValueError(f"tokenizer.ggml.tokens must be {vocab_size} at most, each with a type")
    if len(set(tokens)) < len(tokens):
        raise ValueError("two tokens are spelled alike")
    specials = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == NORMAL
    }
    whole = pre in WHOLE_PIECES
    vocabulary = unspelled(ids, merges, specials, PATTERNS[pre], whole)
    if whole and not_by_merges(vocabulary) is None:  # it makes no difference: as ours has it
        vocabulary = dataclasses.replace(vocabulary, whole_pieces=False)
    return Tokenizer(vocabulary)


def _strings(keys: Mapping[str, Any], name: str) -> list[str]:
    found = keys.get(name, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} must be a list of strings")
    return found
