"""Tokenizers that go with a Hugging Face folder: out, back, left behind, or refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dist import cli
from dist.model import load_model
from tests.helpers.runs import text
from tests.helpers.weights import LLAMA, QWEN2, write_random
from tokenizer import Tokenizer, train_from_iterator
from tokenizer.patterns import QWEN2 as QWEN2_PATTERN


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_from_iterator([text(i) for i in range(100)], 320)


def test_the_tokenizer_and_its_special_ids_travel_along(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=330), tokenizer)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    read = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "hf").glob("*.json")}
    ids = tokenizer.special_tokens
    assert read["generation_config"] == {
        "bos_token_id": ids["<|bos|>"],
        "pad_token_id": ids["<|pad|>"],
        "eos_token_id": sorted([ids["<|eos|>"], ids["<|end|>"]]),
    }
    assert read["tokenizer_config"]["eos_token"] == "<|eos|>"
    assert "<|assistant|>" in read["tokenizer_config"]["chat_template"]
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 0
    back = load_model(tmp_path / "back", "reference")
    assert back.tokenizer is not None
    loaded = Tokenizer.load(back.tokenizer)
    assert loaded.vocabulary == tokenizer.vocabulary
    capsys.readouterr()
    words = ["--prompt", "the quick", "--tokens", "3", "--backend", "reference"]
    assert cli.main(["generate", str(tmp_path / "back"), *words]) == 0
    assert capsys.readouterr().out.startswith("the quick")
    assert cli.main(["eval", str(tmp_path / "back"), "--backend", "reference"]) == 1
    assert "name a packed folder" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("".join(text(i) for i in range(50)))
    tokenizer.save(tmp_path / "t.tok")
    packed = ["--tokenizer", str(tmp_path / "t.tok"), "-o", str(tmp_path / "data")]
    packed += ["--heldout", "0", "--processes", "1"]
    assert cli.main(["pack", str(tmp_path / "a.txt"), *packed]) == 0
    capsys.readouterr()
    words = ["eval", str(tmp_path / "back"), str(tmp_path / "data" / "train")]
    assert cli.main([*words, "--backend", "reference", "--windows", "4"]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_tokenizer_that_is_not_lossless_says_so_on_its_way(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nfc = Tokenizer(replace(tokenizer.vocabulary, nfc=True, pattern=QWEN2_PATTERN))
    write_random(tmp_path / "mine", replace(QWEN2, vocab_size=330), nfc)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    assert "NFC" not in capsys.readouterr().out  # it goes along
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 0
    assert "this tokenizer is not lossless: it brings text" in capsys.readouterr().out
    back = load_model(tmp_path / "back", "reference")
    assert back.tokenizer is not None and Tokenizer.load(back.tokenizer).sha256 == nfc.sha256
    assert cli.main(["export", str(tmp_path / "back"), str(tmp_path / "m.gguf")]) == 0
    assert "llama.cpp does not bring text to NFC" in capsys.readouterr().out
    (tmp_path / "a.txt").write_text("cafe\u0301 " * 20)
    words = ["--tokenizer", str(back.tokenizer), "-o", str(tmp_path / "data"), "--heldout", "0"]
    assert cli.main(["pack", str(tmp_path / "a.txt"), *words, "--processes", "1"]) == 0
    assert "this tokenizer is not lossless" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_come_along_may_be_left(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=330), tokenizer)
    hf, back = tmp_path / "hf", tmp_path / "back"
    assert cli.main(["export", str(tmp_path / "mine"), str(hf)]) == 0
    content = json.loads((hf / "tokenizer.json").read_text())
    content["model"]["byte_fallback"] = True
    (hf / "tokenizer.json").write_text(json.dumps(content))
    assert cli.main(["import", str(hf), "-o", str(back)]) == 1
    said = capsys.readouterr().err
    assert "SentencePiece" in said and "--without-tokenizer" in said
    (hf / "tokenizer.json").rename(hf / "tokenizer.model")
    assert cli.main(["import", str(hf), "-o", str(back)]) == 1
    assert "tokenizer.model is a SentencePiece vocabulary" in capsys.readouterr().err
    assert cli.main(["import", str(hf), "-o", str(back), "--without-tokenizer"]) == 0
    assert load_model(back, "reference").tokenizer is None


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=300), tokenizer)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 1
    assert "320 ids" in capsys.readouterr().err


def test_files_that_lie_in_a_folder_are_not_taken_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.safetensors")]) == 1
    assert "name the folder" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    for name, message in (("hf/model.safetensors", "give the folder"), ("no", "there is no")):
        assert cli.main(["import", str(tmp_path / name), "-o", str(tmp_path / "back")]) == 1
        assert message in capsys.readouterr().err
