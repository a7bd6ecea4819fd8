"""A tokenizer that makes text NFC first: by every road, beside special tokens, in files, said."""

import dataclasses
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given

from dist import cli
from tests.helpers.hard_texts import SPELLINGS
from tests.helpers.tokenizer_texts import data, small, texts
from tokenizer import Tokenizer, from_huggingface, to_huggingface

PLAIN = small()
NFC = Tokenizer(dataclasses.replace(PLAIN.vocabulary, nfc=True))


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@given(texts)
def test_every_road_gives_the_ids_of_the_composed_text(text: str) -> None:
    text += SPELLINGS[0]
    ids = PLAIN.encode_ordinary(nfc(text))
    assert NFC.encode_ordinary(text) == NFC.encode(text, disallowed_special=()) == ids
    assert NFC.encode_bytes(text.encode("utf-8", "surrogatepass")) == ids
    assert NFC.encode_batch([text, "", text], disallowed_special=()) == [ids, [], ids]
    assert NFC.encode_to_numpy(text, disallowed_special=()).tolist() == ids
    assert NFC.decode(ids) == nfc(text)


@given(data)
def test_bytes_that_are_no_text_stay_as_they_are(raw: bytes) -> None:
    accented = b"\xff" + raw + b"\xffe\xcc\x81\xcc"
    back = NFC.decode_bytes(NFC.encode_bytes(accented))
    assert back.endswith(b"\xff\xc3\xa9\xcc") and back.startswith(b"\xff")
    assert NFC.encode_bytes(back) == NFC.encode_bytes(accented)
    if raw.isascii():
        assert back == b"\xff" + raw + b"\xff\xc3\xa9\xcc"


def test_a_pattern_without_a_machine_cuts_the_composed_text() -> None:
    fields = {"pattern": r"(?s:..?)", "nfc": True}
    by_regex = Tokenizer(dataclasses.replace(PLAIN.vocabulary, **fields))  # type: ignore[arg-type]
    for text in SPELLINGS:
        assert by_regex.decode(by_regex.encode_ordinary(text)) == nfc(text)


def test_special_tokens_are_found_in_the_text_as_it_is() -> None:
    user = PLAIN.special_tokens["<|user|>"]
    ids = NFC.encode("e\u0301<|user|>\u0338", allowed_special="all")
    assert ids == [*PLAIN.encode("é"), user, *PLAIN.encode("\u0338")]
    assert user not in NFC.encode_ordinary("<|user|>")
    # of these one character is composed, and no name is left
    assert NFC.decode(NFC.encode_ordinary("<|user|>\u0338")) == "<|user|\u226f"


def test_the_file_keeps_it_and_that_of_others_has_not_changed(tmp_path: Path) -> None:
    NFC.save(tmp_path / "nfc.tok")
    PLAIN.save(tmp_path / "plain.tok")
    assert (tmp_path / "nfc.tok").read_bytes().startswith(b"MyLLM tokenizer 2\n")
    assert (tmp_path / "plain.tok").read_bytes().startswith(b"MyLLM tokenizer 1\n")
    assert Tokenizer.load(tmp_path / "nfc.tok").vocabulary == NFC.vocabulary != PLAIN.vocabulary
    assert NFC.sha256 != PLAIN.sha256
    for tokenizer in (NFC, PLAIN):
        to_huggingface(tokenizer, tmp_path / "t.json")
        assert from_huggingface(tmp_path / "t.json").vocabulary == tokenizer.vocabulary
    content = json.loads((tmp_path / "t.json").read_text())
    for normalizers, expected in (([{"type": "NFC"}], NFC), ([], PLAIN)):
        content["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
        (tmp_path / "t.json").write_text(json.dumps(content))
        assert from_huggingface(tmp_path / "t.json").vocabulary == expected.vocabulary


def test_the_command_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_huggingface(NFC, tmp_path / "t.json")
    tok, more = str(tmp_path / "t.tok"), str(tmp_path / "more.tok")
    assert cli.main(["tokenizer", "import", str(tmp_path / "t.json"), "-o", tok]) == 0
    assert NFC.loss in capsys.readouterr().out and "not lossless" in NFC.loss
    assert cli.main(["tokenizer", "extend", tok, "-o", more, "--special", "<|tool|>"]) == 0
    assert Tokenizer.load(more).vocabulary.nfc
    assert cli.main(["tokenizer", "info", more]) == 0
    assert NFC.loss in capsys.readouterr().out
    assert cli.main(["tokenizer", "export", tok, "-o", str(tmp_path / "t.tiktoken")]) == 0
    assert "unicodedata.normalize('NFC', text)" in capsys.readouterr().out
    PLAIN.save(tok)
    assert cli.main(["tokenizer", "info", tok]) == 0 and not PLAIN.loss
    assert "lossless" not in capsys.readouterr().out
