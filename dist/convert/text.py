"""What others must be told of a tokenizer beside its tokens: special ids, and how a chat looks."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dist.convert.mapping import shown
from dist.documents import END, EOS_NAMES, ROLES
from reference.config import Config
from tokenizer.interop import not_by_merges, spelled, unspelled
from tokenizer.patterns import DIGITS_GPT2, GPT2, GPT4, QWEN2, machine_of
from tokenizer.vocabulary import Uses

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

BOS_NAMES = ("<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>")
PAD_NAMES = ("<|pad|>",)
AROUND = (
    "the tokens that its tokenizer puts before or behind every text are put around none here, nor "
    "by what is exported from here: give a prompt that begins with them where the model needs them"
)
EOT_NAMES = (END, "<|eot_id|>", "<|im_end|>")  # what ends a turn


def uses_of(tokenizer: "Tokenizer", updates: int = 0) -> Uses:
    """Return what special tokens are for: as others said of theirs, else by their names.

    A model that took ``updates`` here learned to end a text as ``myllm pack`` ends one.
    """
    specials, said = tokenizer.special_tokens, tokenizer.vocabulary.uses

    def first(names: Iterable[str]) -> str:
        return next((name for name in names if name in specials), "")

    chats = {*ROLES.values(), END} <= specials.keys()  # ours, also where they came later
    ends = [first(EOS_NAMES), first(EOT_NAMES)]
    if said.ends:
        ends = [*said.ends, END * chats, first(EOS_NAMES) if updates else ""]
    return Uses(
        said.bos or first(BOS_NAMES),
        tuple(dict.fromkeys(filter(None, ends))),
        said.pad or first(PAD_NAMES),
        CHAT if chats else said.chat_template,
    )


def with_uses(
    tokenizer: "Tokenizer", *, bos: Any, ends: Iterable[Any], pad: Any, chat_template: str | None
) -> tuple["Tokenizer", list[str]]:
    """Return a tokenizer that keeps what others say of it, and sentences on what it does not keep.

    Parameters
    ----------
    bos, pad : str, int or None
        Special tokens by their name or id.
    ends : iterable of these
        First what ends a text.
    """
    from tokenizer import Tokenizer

    notes = []
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    by_name = uses_of(tokenizer)

    def name_of(token: Any, what: str) -> str:
        name = names.get(token) if isinstance(token, int) else token
        if isinstance(name, str) and name in tokenizer.special_tokens:
            return name
        if token is not None:
            notes.append(f"{what} is {shown(token)}, which is no special token, and was left out")
        return ""

    found = Uses(
        name_of(bos, "what begins a text"),
        tuple(dict.fromkeys(filter(None, (name_of(end, "what ends a text") for end in ends)))),
        name_of(pad, "what fills a text up"),
        chat_template or "",
    )
    chats = by_name.chat_template == CHAT
    plain = found.ends == by_name.ends and {*found.ends} <= {*EOS_NAMES, END}
    uses = Uses(
        # where a tokenizer has none, GGUF and GPT-2 say what ends a text
        "" if found.bos in (by_name.bos, *found.ends[:1]) else found.bos,
        # that of a chat of ours ends none but a chat's texts here, and is always named to others
        ()
        if plain
        else tuple(e for e in found.ends if e != END or e == found.ends[0] or not chats),
        "" if found.pad == by_name.pad else found.pad,
        "" if found.chat_template == CHAT else found.chat_template,
    )
    return Tokenizer(dataclasses.replace(tokenizer.vocabulary, uses=uses)), notes


def check_fits(tokenizer: "Tokenizer", config: Config, where: str) -> None:
    """Refuse a tokenizer that has ids which the model does not know."""
    if tokenizer.n_vocab > config.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has {tokenizer.n_vocab:,} ids, but vocab_size is "
            f"{config.vocab_size:,}"
        )


# ---- GGUF ----------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
GGUF_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message: llama.cpp ends at each
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


def gguf_keys(tokenizer: "Tokenizer", uses: Uses, config: Config, where: str) -> dict[str, Any]:
    """Return the keys that tell llama.cpp of a tokenizer, of its ends the first of ``GGUF_ENDS``.

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
    if not uses.ends:
        raise ValueError(
            f"{where}: the tokenizer has no token that ends a text ({', '.join(EOS_NAMES)}), and "
            "llama.cpp would take another for it"
        )
    named = {"bos": uses.bos or uses.ends[0], **dict(zip(GGUF_ENDS, uses.ends, strict=False))}
    if uses.pad:
        named["padding"] = uses.pad
    ids = {
        f"tokenizer.ggml.{role}_token_id": vocabulary.special_tokens[name]
        for role, name in named.items()
    }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names[i] for i in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [np.int32(kind) for kind in types],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],  # llama.cpp wants the key
        **ids,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        **({"tokenizer.chat_template": uses.chat_template} if uses.chat_template else {}),
    }


def gguf_tokenizer(keys: Mapping[str, Any], vocab_size: int) -> tuple["Tokenizer", list[str]]:
    """Return the tokenizer that a file's keys describe, and what was left out, in sentences.

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

    def told(role: str) -> Any:
        return keys.get(f"tokenizer.ggml.{role}_token_id")

    template = keys.get("tokenizer.chat_template")
    found, notes = with_uses(
        Tokenizer(vocabulary),
        bos=told("bos"),
        ends=map(told, GGUF_ENDS),
        pad=told("padding"),
        chat_template=template if isinstance(template, str) else None,
    )
    around = any(keys.get(f"tokenizer.ggml.add_{what}_token") is True for what in ("bos", "eos"))
    return found, notes + [AROUND] * around


def _strings(keys: Mapping[str, Any], name: str) -> list[str]:
    found = keys.get(name, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} must be a list of strings")
    return found
