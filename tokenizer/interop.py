"""To and from the files of others: Hugging Face's ``tokenizer.json`` and OpenAI's ``.tiktoken``.

Ids are kept in both directions. Neither file holds the Unicode class table; an import takes the
installed one.
"""

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tokenizer.classes import installed_classes
from tokenizer.files import read_json, replace_durably
from tokenizer.patterns import (
    DIGITS_GPT2,
    GPT2,
    ODD_TO_HUGGINGFACE,
    ODD_TO_TIKTOKEN,
    check_dialect,
    elements,
)
from tokenizer.reference import encode_word
from tokenizer.tokenizer import Tokenizer
from tokenizer.vocabulary import Id, Vocabulary

# --- bytes as printable characters ---------------------------------------------------------------


def byte_letters() -> list[str]:
    """Return the 256 characters that stand for bytes in GPT-2's files.

    Printable ones stand for themselves.

    Source: ``bytes_to_unicode`` of GPT-2's ``encoder.py`` (Radford et al., 2019).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _spell(token: bytes, letters: list[str]) -> str:
    return "".join(letters[byte] for byte in token)


def _unspell(text: str, values: Mapping[str, int]) -> bytes:
    try:
        return bytes(values[letter] for letter in text)
    except KeyError as error:
        raise ValueError(
            f"token {text!r} holds {error.args[0]!r}, which stands for no byte: only "
            "byte-level vocabularies can be imported"
        ) from None


def spelled(vocabulary: Vocabulary) -> tuple[dict[int, str], list[tuple[str, str]]]:
    """Return every id's token and every merge in printable characters, special tokens by name.

    A vocabulary without a list of merges (imported from ``.tiktoken``) gets one derived from it.

    Raises
    ------
    ValueError
        If two ids are spelled alike.
    """
    letters = byte_letters()
    names = {i: _spell(token, letters) for i, token in vocabulary.tokens.items()}
    merges = vocabulary.merges
    pairs = _derived_merges(vocabulary) if merges is None else merges.tolist()
    merged = [(names[a], names[b]) for a, b in pairs]
    names |= {i: name for name, i in vocabulary.special_tokens.items()}
    if len(set(names.values())) < len(names):
        raise ValueError("a special token is spelled as another token is: rename it first")
    return names, merged


def unspelled(
    ids_of: Mapping[str, int],
    merges: Sequence[Sequence[str] | str],
    special_tokens: Mapping[str, int],
    pattern: str,
    whole_pieces: bool,
    nfc: bool = False,
) -> Vocabulary:
    """Return the vocabulary of tokens and merges in printable characters.

    Parameters
    ----------
    ids_of : mapping
        Token -> id, with or without the special ones.
    merges : sequence
        Pairs of tokens, or "a b".
    special_tokens, pattern, whole_pieces, nfc
        As in ``Vocabulary``.

    Raises
    ------
    ValueError
        If these contradict each other; the message names the token or merge.
    """
    values = {letter: byte for byte, letter in enumerate(byte_letters())}
    ids = {_unspell(t, values): i for t, i in ids_of.items() if t not in special_tokens}
    tokens = {i: token for token, i in sorted(ids.items(), key=lambda item: item[1])}
    if len(tokens) < len(ids):
        raise ValueError("two tokens have the same id")
    found = []
    for k, entry in enumerate(merges):
        pair = entry.split(" ") if isinstance(entry, str) else entry
        parts = [ids.get(_unspell(part, values), -1) for part in pair]
        if len(parts) != 2 or min(parts) < 0:
            raise ValueError(f"merge {k}, {entry!r}, does not join two tokens of the vocabulary")
        found.append(parts)
    return Vocabulary(
        tokens,
        np.array(found, np.int32).reshape(-1, 2),
        special_tokens,
        pattern,
        installed_classes(),
        whole_pieces,
        nfc,
    )


def not_by_merges(vocabulary: Vocabulary) -> int | None:
    """Return the first id whose bytes its merges make into other tokens; None if there is none.

    Without such a token it makes no difference whether whole pieces are looked up first. One whose
    merges nobody could follow in seconds, thousands of tokens of thousands of bytes, counts too.
    """
    if vocabulary.merges is None:
        return None
    columns = (column.tolist() for column in vocabulary.ranked_pairs())
    ranks = {(a, b): (rank, new) for a, b, rank, new in zip(*columns, strict=True)}
    byte_ids = vocabulary.byte_ids.tolist()
    work = 0
    for i, token in vocabulary.tokens.items():
        work += len(token) ** 2
        if work > 200_000_000 or encode_word(token, byte_ids, ranks) != [i]:
            return i
    return None


# --- Hugging Face --------------------------------------------------------------------------------


def to_huggingface(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Write a ``tokenizer.json`` with which ``tokenizers`` of Hugging Face gives the same ids.

    Raises
    ------
    ValueError
        If the pattern has what means something else there and cannot be spelled anew, as ``^``.
    """
    vocabulary = tokenizer.vocabulary
    names, merges = spelled(vocabulary)
    split = {
        "type": "Split",
        "pattern": {"Regex": _in_dialect(vocabulary.pattern, theirs=True)},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name, i in sorted(vocabulary.special_tokens.items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": "NFC"} if vocabulary.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**level, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.whole_pieces or vocabulary.merges is None,
            "vocab": {names[i]: i for i in sorted(names)},
            "merges": merges,
        },
    }
    replace_durably(Path(path), json.dumps(content, ensure_ascii=False, indent=1).encode())


# Of \w: what belongs to it here alone, and there alone, but not in a class.
_JOINERS, _RAISED = r"\u200c\u200d", r"\u00b2\u00b3\u00b9\u00bc-\u00be"


def _in_dialect(pattern: str, *, theirs: bool) -> str:
    """Return our pattern in Hugging Face's dialect, Oniguruma's; with ``theirs`` false the reverse.

    There m lets a dot take newlines, which is s here, and behind a number of times + repeats what
    was repeated, and is not possessive.

    Raises
    ------
    ValueError
        If it has what means something else in the other dialect.
    """
    dot, other = "sm" if theirs else "ms"
    odd = rf"{ODD_TO_HUGGINGFACE}|\(\?.*{other}.*" + r"|\[?\\(?:U.*|[pP][^{])" * (not theirs)
    check_dialect(pattern, odd, "in Hugging Face's dialect of regular expressions")
    out: list[str] = []
    opened: list[int] = []  # where in ``out`` groups begin
    at = atom = 0  # where in the pattern; where in ``out`` that begins what may be repeated
    for text, depth in elements(pattern):
        at += len(text)
        if text.startswith("(?"):  # flags
            text = text.replace(dot, other)
        elif text in (r"\s++$", r"\s++\z"):
            text = r"\s++\z" if theirs else r"\s++$"
        elif text[:2].lower() == r"\w":
            parts = (_JOINERS, "") if theirs else (_RAISED * (not depth), _JOINERS)
            more, less = parts if text[1] == "w" else parts[::-1]
            text = f"[{text}{more}" + f"&&[^{less}]" * bool(less) + "]"
        elif text[:2].lower() == r"\p" and len(text) == 3:
            text = f"{text[:2]}{{{text[2]}}}"
        elif text.startswith(r"\U") and theirs:
            text = rf"\x{{{text[2:]}}}"
        elif text.startswith(r"\x{") and not theirs:
            text = rf"\U{int(text[3:-1], 16):08x}"
        if depth:
            out.append(text)
            continue
        if text[:1] == "{" and len(text) > 1 and out:
            exact = "," not in text
            if text[-1] == "+" and theirs:
                out[atom], text = f"(?>{out[atom]}", f"{text[:-1]})"
            elif text[-1] == "?" and exact and theirs:
                text = text[:-1]
            elif text[-1] == "+" or (text[-1] == "?" and exact):
                out[atom], text = f"(?:{out[atom]}", f"{text[:-1]}){text[-1]}"
        elif text == ")" and opened:
            begin, last = opened.pop(), out[-1]
            bounded = last[:1] == "{" and last[-1:] == "}" and atom == begin + 1
            alone = bounded and pattern[at : at + 1] not in ("*", "+", "?", "{")
            if out[begin] == "(?>" and alone and not theirs:
                out[begin], out[-1], text = "", last + "+", ""
            atom = begin
        elif text not in ("*", "+", "?", "|", ""):
            atom = len(out)
            opened += [atom] * (text[0] == "(" and text[-1] != ")")
        out.append(text)
    pattern = "".join(out)
    if not theirs:  # a \w, or \W, of ours that has been there
        pattern = pattern.replace(rf"[[\w&&[^{_JOINERS}]]{_JOINERS}]", r"\w")
        pattern = pattern.replace(rf"[[\W{_JOINERS}]&&[^{_JOINERS}]]", r"\W")
    return pattern


def _derived_merges(vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """Return, for each token in the order of ids, the two tokens that earlier ones leave of it."""
    ranks: dict[tuple[int, int], tuple[int, int]] = {}
    by_left: dict[int, list[tuple[int, int]]] = {}
    for a, b, _, result in zip(*(x.tolist() for x in vocabulary.ranked_pairs()), strict=True):
        by_left.setdefault(result, []).append((a, b))
    byte_ids = vocabulary.byte_ids.tolist()
    out = []
    for i in sorted(vocabulary.tokens):
        parts = encode_word(vocabulary.tokens[i], byte_ids, ranks)
        if len(parts) == 2:
            out.append((parts[0], parts[1]))
        for pair in by_left.get(i, ()):
            ranks[pair] = (i, i)
    return out


class _Cut(msgspec.Struct):
    """A pre-tokenizer, or one of a sequence of them."""

    type: str
    pretokenizers: list["_Cut"] = []
    add_prefix_space: bool = False
    use_regex: bool = True
    pattern: dict[Literal["Regex", "String"], str] = {}
    behavior: str = ""
    invert: bool = False
    individual_digits: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, Id]
    merges: list[tuple[str, str] | str]  # "a b" in older files
    type: str = "BPE"
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False
    unk_token: str | None = None


class _ModelType(msgspec.Struct):
    type: str = "BPE"
    byte_fallback: bool = False  # bytes are tokens of their own, beside characters


class _AnyHuggingface(msgspec.Struct):
    """What is read of any ``tokenizer.json``, to name what cannot be imported."""

    model: _ModelType


class _Added(msgspec.Struct):
    content: str
    id: Id
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Normalizer(msgspec.Struct):
    """What is done to text before it is cut, or a sequence of that."""

    type: str
    normalizers: list["_Normalizer"] = []


class _Huggingface(msgspec.Struct):
    """What is read of a ``tokenizer.json``."""

    model: _Model
    pre_tokenizer: _Cut
    added_tokens: list[_Added] = []
    normalizer: _Normalizer | None = None


def from_huggingface(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a byte-level BPE ``tokenizer.json``; its added tokens become special tokens.

    What it puts around a text (a post-processor) is left out: ``encode`` adds nothing. A normalizer
    that makes text NFC is taken along, although it is not lossless (``Tokenizer.loss``).

    Raises
    ------
    ValueError
        If the file is no such tokenizer, or does something else to text that loses it (another
        normalizer, a prefix space).
    """
    data = Path(path).read_bytes()
    try:
        kind = read_json(data, _AnyHuggingface).model
        if kind.type == "Unigram" or kind.byte_fallback:
            raise ValueError("it is a SentencePiece vocabulary; only byte-level BPE is known")
        content = read_json(data, _Huggingface)
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer.json that can be read: {error}") from None
    try:
        return Tokenizer(_vocabulary_of(content))
    except ValueError as error:
        raise ValueError(f"{path} cannot be imported: {error}") from None


def _vocabulary_of(content: _Huggingface) -> Vocabulary:
    model = content.model
    if model.type != "BPE":
        raise ValueError(f"it is a {model.type!r} model; only byte-level BPE is known")
    for field in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if getattr(model, field):
            raise ValueError(f"the model has {field} = {getattr(model, field)!r}")
    nfc = _makes_nfc(content.normalizer)
    for added in content.added_tokens:
        if added.lstrip or added.rstrip or added.single_word:
            raise ValueError(
                f"its added token {added.content!r} looks at what stands beside it (lstrip, rstrip "
                "or single_word), which is not known here"
            )
    specials = {token.content: token.id for token in content.added_tokens}
    if len(specials) < len(content.added_tokens):
        raise ValueError("two added tokens have the same content")
    pattern = _pattern_of(content.pre_tokenizer)
    found = unspelled(model.vocab, model.merges, specials, pattern, model.ignore_merges, nfc)
    if found.lacking and model.unk_token:
        raise ValueError(
            f"it has no token for byte 0x{found.lacking[0]:02x} and takes {model.unk_token!r} for "
            "it, which is not known here"
        )
    return found


def _makes_nfc(normalizer: _Normalizer | None) -> bool:
    """Return whether text is made NFC; refuse whatever else may be done to it."""
    if normalizer is None:
        return False
    steps = normalizer.normalizers if normalizer.type == "Sequence" else [normalizer]
    kinds = [step.type for step in steps]
    if any(kind != "NFC" for kind in kinds):
        raise ValueError(
            f"its normalizer changes text by {' + '.join(map(repr, kinds))}; of those that are not "
            "lossless, NFC alone is known"
        )
    return bool(kinds)


def _pattern_of(whole: _Cut) -> str:
    """Return the pattern of a ByteLevel pre-tokenizer, or of a Split or Digits before one."""
    steps = whole.pretokenizers or [whole]
    kinds = [step.type for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"], ["Digits", "ByteLevel"]):
        raise ValueError(
            f"it cuts text by {' + '.join(map(repr, kinds))}; known is Split + ByteLevel"
        )
    level = steps[-1]
    if level.add_prefix_space:
        raise ValueError("it adds a space before the text, which is not lossless")
    if kinds[0] == "Digits":
        if not (steps[0].individual_digits and level.use_regex):
            raise ValueError("only single Digits before GPT-2's pattern can be imported")
        return DIGITS_GPT2
    if len(steps) == 1:
        return GPT2 if level.use_regex else r"(?s:.+)"
    split = steps[0]
    if level.use_regex or split.behavior != "Isolated" or split.invert or len(split.pattern) != 1:
        raise ValueError("only an isolating Split by one pattern can be imported")
    text = split.pattern.get("Regex") or _escape(split.pattern.get("String", ""))
    return _in_dialect(text, theirs=False)


def _escape(text: str) -> str:
    return "".join(rf"\u{ord(c):04x}" if ord(c) < 1 << 16 else rf"\x{{{ord(c):x}}}" for c in text)


# --- tiktoken ------------------------------------------------------------------------------------


def to_tiktoken(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Write tokens and ranks as ``tiktoken.load.load_tiktoken_bpe`` reads them; ranks are ids.

    The file holds neither the special tokens nor the pattern: give both to ``tiktoken.Encoding``.

    Raises
    ------
    ValueError
        If the order of ids is not the order of merges.
    """
    vocabulary = tokenizer.vocabulary
    if vocabulary.lacking:
        raise ValueError(f"no token for byte 0x{vocabulary.lacking[0]:02x}, as tiktoken must have")
    if vocabulary.merges is not None:
        single = int(vocabulary.byte_ids.max())
        if (np.diff(vocabulary.results, prepend=single) <= 0).any():
            raise ValueError("ids do not follow the order of merges, which tiktoken takes them for")
        if len(vocabulary.tokens) != 256 + len(vocabulary.results):
            raise ValueError("some tokens are made by no merge; tiktoken would make them")
    lines = [
        base64.b64encode(token) + b" " + str(i).encode() + b"\n"
        for i, token in sorted(vocabulary.tokens.items())
    ]
    replace_durably(Path(path), b"".join(lines))


def from_tiktoken(
    path: str | os.PathLike[str],
    *,
    pattern: str = "gpt4",
    special_tokens: Mapping[str, int] | None = None,
) -> Tokenizer:
    """Read a ``.tiktoken`` file.

    Parameters
    ----------
    path : path
        Lines of a token in base64, a space, and its rank, which is its id.
    pattern : str
        The ``pat_str`` of the encoding.
    special_tokens : mapping, optional
        Name -> id, as given to ``tiktoken.Encoding``.

    Raises
    ------
    ValueError
        If a line cannot be read, or the pattern means something else to tiktoken than here; the
        message says which.
    """
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token, i = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}, line {number}: not a token in base64 and a rank") from None
        if i in tokens:
            raise ValueError(f"{path}, line {number}: rank {i} has come before")
        tokens[i] = token
    if not tokens:
        raise ValueError(f"{path} holds no token")
    specials = dict(special_tokens or {})
    try:
        check_dialect(pattern, ODD_TO_TIKTOKEN, "to tiktoken")
        return Tokenizer(
            Vocabulary(dict(sorted(tokens.items())), None, specials, pattern, installed_classes())
        )
    except ValueError as error:
        raise ValueError(f"{path} cannot be imported: {error}") from None
