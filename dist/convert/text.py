"""What others must be told of a tokenizer beside its tokens: special ids, and how a chat looks."""

from typing import TYPE_CHECKING

from dist.documents import END, EOS_NAMES, ROLES

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
