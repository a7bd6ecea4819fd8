"""Patterns that mean something else elsewhere: spelled anew, or refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.helpers.tokenizer_texts import small
from tokenizer import (
    GPT2,
    Tokenizer,
    from_huggingface,
    from_tiktoken,
    to_huggingface,
    to_tiktoken,
    train_from_iterator,
)

# patterns and their spelling in Hugging Face's dialect
SPELLED = [
    (GPT2, GPT2),
    (r"\S+|\s++$|\s", r"\S+|\s++\z|\s"),
    (r"(?s:.+)", r"(?m:.+)"),
    (r"(?is)a.|(?s-i:.)(?i:b)", r"(?im)a.|(?m-i:.)(?i:b)"),
    (r"[^$]+|[]^$]|\^|\$|[\]$]|\p{^L}", r"[^$]+|[]^$]|\^|\$|[\]$]|\p{^L}"),
    (r"\A\p{L}|\P{L}|(?P<s>\p{L})", r"\A\p{L}|\P{L}|(?P<s>\p{L})"),
    (r"\p{N}{1,3}+|\s++$|\s|[a{1,3}+]", r"(?>\p{N}{1,3})|\s++\z|\s|[a{1,3}+]"),
    (r"(?s:(a|b){,2}+c)[^[ab]c]{2,}+", r"(?m:(?>(a|b){,2})c)(?>[^[ab]c]{2,})"),
    (r"(?>a{1,3}+b)|(?>ab{2})|(?>\{x})", r"(?>(?>a{1,3})b)|(?>ab{2})|(?>\{x})"),
    (r"\U0001f600|[\U0001f601-\U0001f609]", r"\x{0001f600}|[\x{0001f601}-\x{0001f609}]"),
    (
        r"\w|[^\s\W]|\W",
        r"[\w\u200c\u200d]|[^\s[\W&&[^\u200c\u200d]]]|[\W&&[^\u200c\u200d]]",
    ),
]


def with_pattern(pattern: str) -> Tokenizer:
    return Tokenizer(dataclasses.replace(small().vocabulary, pattern=pattern))


@pytest.mark.parametrize(("ours", "theirs"), SPELLED)
def test_a_pattern_is_spelled_in_hugging_face_s_dialect_and_back(
    ours: str, theirs: str, tmp_path: Path
) -> None:
    to_huggingface(with_pattern(ours), tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": theirs}
    assert from_huggingface(tmp_path / "t.json").vocabulary.pattern == ours


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"^\s+|\S+|\s",
            r"a$|.",
            r"\\s++$|.",
            r"[^a]$|.",
            r"\n\Z|.",
            r"\h+",
            r"[\h-]+",
            r"\b",
            r"\m",
        ),
        *(
            r"[([{]+",
            r"[+--]+",
            r"[a||b]",
            r"[[:digit:]]",
            r"\p{Word}",
            r"[\P{^XDigit}]",
            r"b(?i)a|c",
        ),
    ],
)
def test_a_pattern_that_cuts_otherwise_in_hugging_face_s_dialect_is_refused(
    pattern: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match="means something else in Hugging Face's dialect"):
        to_huggingface(with_pattern(pattern), path)
    assert not path.exists()
    with pytest.raises(ValueError, match="means something else in Hugging Face's dialect"):
        to_huggingface(with_pattern("(?m:.)"), path)
    to_huggingface(small(), path)
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"cannot be imported: .* something else in Hugging Face"):
        from_huggingface(path)


@pytest.mark.parametrize(
    "pattern", [r"\h+", r"[\h-]+", r"[([{]+", r"[+--]+", r"[a||b]", r"[a~~b]", r"[&&a]"]
)
def test_a_pattern_that_all_others_read_otherwise_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the pattern .* means something else to other tokenizers"
    ):
        train_from_iterator(["abc"], 276, pattern=pattern)
    to_tiktoken(small(), tmp_path / "t.tiktoken")
    for other in (pattern, r"a$|.", r"\n\Z|.", r"[[:alpha:]]+"):
        with pytest.raises(ValueError, match=r"t.tiktoken cannot be imported: .* else to tiktoken"):
            from_tiktoken(tmp_path / "t.tiktoken", pattern=other)


def test_a_file_with_a_bracket_as_a_sign_still_says_what_it_said(tmp_path: Path) -> None:
    """Others cannot read such a class, so it means what it meant here."""
    with_pattern(r"[([{]+|.").save(tmp_path / "t.tok")
    ids = Tokenizer.load(tmp_path / "t.tok").encode_ordinary("([{a")
    assert len(ids) > 1 and small().decode(ids) == "([{a"
