"""The command, as a person at a terminal uses it."""

import errno
import gzip
import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli
from tests.helpers.tokenizer_texts import corpus, rows_of, rows_with_more_than_a_text, small
from tokenizer import Tokenizer, read, train_from_iterator
from tokenizer.cli import _sample
from tokenizer.read import Source


class Output(io.StringIO):
    """Standard output that takes bytes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = io.BytesIO()


def run(
    monkeypatch: pytest.MonkeyPatch, *argv: object, stdin: bytes = b""
) -> tuple[int, str, str, bytes]:
    out, err = Output(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    try:
        status = cli.main(["tokenizer", *map(str, argv)])
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue(), out.buffer.getvalue()


@pytest.fixture
def tok(tmp_path: Path) -> Path:
    small().save(tmp_path / "small.tok")
    return tmp_path / "small.tok"


def test_a_sample_takes_as_much_from_each_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letters, rows in (("a", "äb", 400), ("b", "cd", 20), ("c", "ef", 400)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"text": letters * 10}) for _ in range(rows)]  # of 20 characters
        (tmp_path / name / "1.jsonl").write_text("\n".join(lines))
    seen: list[bytes] = []

    def learn(texts: Iterable[bytes], *sizes: int, **options: object) -> Tokenizer:
        seen.extend(texts)
        return small()

    monkeypatch.setattr("tokenizer.cli.train_from_iterator", learn)
    words = ("train", *(tmp_path / name for name in "abc"), "--vocab-size", 300)
    status, *_ = run(monkeypatch, *words, "--max-chars", "3e3", "-o", tmp_path / "t.tok")
    assert status == 0
    assert [seen.count(letters.encode() * 10) for letters in ("äb", "cd", "ef")] == [50, 20, 50]
    assert len(seen) == 120
    status, _, err, _ = run(monkeypatch, *words, "--max-chars", 0, "-o", tmp_path / "t.tok")
    assert status == 2 and "--max-chars must be above 0" in err


def test_progress_of_a_sample_does_not_go_back(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text("x" * 1000)
    told: list[int] = []
    source = Source([str(tmp_path / name) for name in "ab"], advance=told.append)
    assert len(list(_sample(source, 4e3, False))) == 4
    assert told == sorted(told) and told[0] <= 1000 and told[-1] >= 4000


def test_train_encode_decode_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(corpus()[:10])
    (tmp_path / "a.txt").write_text(text)
    status, out, _, _ = run(
        monkeypatch, "train", tmp_path / "a.txt", "--vocab-size", 800, "-o", tmp_path / "t.tok"
    )
    assert status == 0 and "800 ids, 524 merges" in out
    assert Tokenizer.load(tmp_path / "t.tok").sha256 == train_from_iterator([text], 800).sha256

    _, ids, _, _ = run(monkeypatch, "encode", tmp_path / "t.tok", tmp_path / "a.txt")
    assert ids.count("\n") == 1
    status, _, _, back = run(monkeypatch, "decode", tmp_path / "t.tok", stdin=ids.encode())
    assert status == 0 and back == text.encode()

    run(monkeypatch, "encode", tmp_path / "t.tok", tmp_path / "a.txt", "-o", tmp_path / "a.npy")
    assert np.load(tmp_path / "a.npy").dtype == np.uint16
    assert run(monkeypatch, "decode", tmp_path / "t.tok", tmp_path / "a.npy")[3] == text.encode()

    status, out, _, _ = run(monkeypatch, "info", tmp_path / "t.tok", tmp_path / "a.txt")
    n = len(ids.split())
    assert status == 0 and f"{len(text.encode()) / n:.3f} bytes per token" in out
    assert "784  <|system|>" in out and "longest tokens" in out


def test_any_bytes_go_through_the_pipe(tok: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytes(range(256)) * 3 + "\n\nü\r\n<|user|>".encode() + b"\xff"
    _, ids, _, _ = run(monkeypatch, "encode", tok, stdin=raw)
    assert run(monkeypatch, "decode", tok, stdin=ids.encode())[3] == raw
    assert not {*map(int, ids.split())} & {*small().special_tokens.values()}


def test_special_tokens_are_encoded_only_when_asked_for(
    tok: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = str(small().special_tokens["<|user|>"])
    assert user not in run(monkeypatch, "encode", tok, "--text", "<|user|>")[1].split()
    assert run(monkeypatch, "encode", tok, "--text", "<|user|>", "--allow-special")[1].split() == [
        user
    ]


def test_export_and_import(tok: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("t.json", "t.tiktoken"):
        assert run(monkeypatch, "export", tok, "-o", tmp_path / name)[0] == 0
    specials = [f"--special={name}={i}" for name, i in small().special_tokens.items()]
    for name, arguments in (("t.json", []), ("t.tiktoken", specials)):
        status, *_ = run(
            monkeypatch, "import", tmp_path / name, "-o", tmp_path / "back.tok", *arguments
        )
        back = Tokenizer.load(tmp_path / "back.tok")
        assert status == 0 and back.special_tokens == small().special_tokens
        assert back.encode_ordinary(corpus()[0]) == small().encode_ordinary(corpus()[0])


def test_compare_prints_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(corpus()[0][:8000])
    status, out, _, _ = run(monkeypatch, "compare", tmp_path / "a.txt", "--vocab-size", 300)
    assert status == 0 and "unigram LM" in out


# --- inputs


def test_all_formats_hold_the_same_texts(tmp_path: Path) -> None:
    texts = ["one\ntwo", "", "drei ü", "四"]
    for path in rows_of(texts, tmp_path):
        assert [*Source([str(path)]).texts()] == [text.encode() for text in texts], path
    (tmp_path / "plain.gz").write_bytes(gzip.compress("四\n".encode()))
    assert [*Source([str(tmp_path / "plain.gz")]).texts()] == ["四\n".encode()]


def test_json_lines_are_known_by_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path
) -> None:
    lines = '{"text": "one"}\n{"text": "two"}\n'
    said = set()
    for name in ("t.jsonl", "t.ndjson", "t.ndjson.gz"):
        write = gzip.compress if name.endswith(".gz") else bytes
        (tmp_path / name).write_bytes(write(lines.encode()))
        said.add(run(monkeypatch, "encode", tok, tmp_path / name)[1])
    one, two = small().encode_batch(["one", "two"])
    assert said == {" ".join(map(str, one)) + "\n" + " ".join(map(str, two)) + "\n"}


def test_options_may_stand_before_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path
) -> None:
    (tmp_path / "a.txt").write_text("a <|eos|>")
    status, out, _, _ = run(monkeypatch, "info", tok, "--longest", 2, tmp_path / "a.txt")
    assert status == 0 and "on these texts  9 bytes" in out
    status, out, _, _ = run(monkeypatch, "encode", tok, "--allow-special", tmp_path / "a.txt")
    assert status == 0
    assert out.split() == [str(i) for i in small().encode("a <|eos|>", allowed_special="all")]


def test_folders_and_globs_give_files_by_name(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", "b/.hidden/3.txt", ".4.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    assert [*Source([str(tmp_path)]).texts()] == [b"a/1.txt", b"b/2.txt"]
    assert [*Source([f"{tmp_path}/**/2.*"]).texts()] == [b"b/2.txt"]
    for bad in ("missing.txt", "*.nothing"):
        with pytest.raises(ValueError, match="is no file, folder or glob"):
            Source([str(tmp_path / bad)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no file"):
        Source([str(tmp_path / "empty")])


def test_of_a_conversation_what_people_wrote_is_read(tmp_path: Path) -> None:
    """As ``myllm pack`` takes it: messages, else a prompt and its completion, else the text."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows: list[dict[str, Any]] = [{"messages": turns, "text": "not this", "id": 1}]
    rows += [{"prompt": "a", "completion": "b", "text": "nor this"}, {"prompt": "a", "text": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [*Source([str(tmp_path)]).texts()] == [b"hi", b"ho", b"a", b"b", b"c"]
    message = "line 1: a message's 'content' is no text, or there is no message"
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    for broken, said in (
        ({"messages": []}, message),
        ({"messages": ["hi"]}, message),
        ({"messages": [turns[0], {"role": "assistant", "content": None}]}, message),
        ({"messages": [parts]}, message),
        ({"prompt": ["a"], "completion": "b"}, "line 1: 'prompt' and 'completion' must be texts"),
        ({"prompt": "a", "completion": None}, "line 1: no field 'text'; its fields: 'prompt'"),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=said):
            [*Source([str(tmp_path)]).texts()]


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b/c.txt", ".d/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if path.endswith(("b", ".d")):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    with pytest.raises(PermissionError, match="b'"):  # what is hidden is not looked into
        Source([str(tmp_path)])


@pytest.mark.parametrize("pattern", ["gpt4", "gpt2"])
def test_cutting_a_long_file_changes_no_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(read, "BLOCK_BYTES", 1000)
    text = "".join(corpus()[:4]) + "\n\n  'll don't  \n" * 50 + corpus()[-1]
    (tmp_path / "t.txt").write_text(text)
    parts = [*Source([str(tmp_path / "t.txt")]).texts(cut_freely=True)]
    assert len(parts) > 10 and b"".join(parts) == text.encode()
    whole = train_from_iterator([text], 1000, pattern=pattern)
    assert train_from_iterator(parts, 1000, pattern=pattern).sha256 == whole.sha256


# --- bad input ends in one sentence


def failing(monkeypatch: pytest.MonkeyPatch, *argv: object, stdin: bytes = b"") -> str:
    status, _, err, _ = run(monkeypatch, *argv, stdin=stdin)
    assert status == 1 and "Traceback" not in err and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{bad", "line 3: no JSON"),
        (b"[1]", "line 3: no JSON object but list"),
        (b'{"other": 1}', "line 3: no field 'text'; its fields: 'other'"),
        (b'{"text": 5}', "line 3: field 'text' is no text"),
        (b'{"text": "\xff"}', "line 3: no JSON"),
        (b"[" * 100_000, "line 3: no JSON: "),  # deeper than the parser goes
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 3: no JSON: "),
    ],
)
def test_bad_json_lines_are_named_and_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str
) -> None:
    good = b'{"text": "abab abab"}\n\n'
    (tmp_path / "t.jsonl").write_bytes(good + line + b"\n" + good)
    arguments = ("train", tmp_path / "t.jsonl", "--vocab-size", 300, "-o", tmp_path / "t.tok")
    err = failing(monkeypatch, *arguments)
    assert f"t.jsonl, {message}" in err and "--skip-bad-lines" in err
    status, _, err, _ = run(monkeypatch, *arguments, "--skip-bad-lines")
    assert status == 0 and f"left out: {tmp_path}/t.jsonl, {message}" in err
    assert "1 lines were left out" in err
    expected = train_from_iterator(["abab abab"] * 2, 300)
    assert Tokenizer.load(tmp_path / "t.tok").sha256 == expected.sha256


def test_a_long_file_is_cut_between_lines_where_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "BLOCK_BYTES", 20)
    (tmp_path / "t.txt").write_text("one two three\nfour five six\nseven eight nine ten eleven")
    parts = [*Source([str(tmp_path / "t.txt")]).texts(cut_freely=True)]
    assert parts == [b"one two three", b"\nfour five six", b"\nseven eight nine ten eleven"]
    monkeypatch.setattr(read, "BLOCK_BYTES", 40)
    parts = [*Source([str(tmp_path / "t.txt")]).texts(cut_freely=True)]
    assert parts == [b"one two three\nfour five six", b"\nseven eight nine ten eleven"]


def test_a_line_that_is_no_utf8_is_left_out_whole(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"good words here \xe9 and more words \xe8 here")
    said: list[str] = []
    source = Source([str(tmp_path / "t.txt")], report_bad=said.append)
    assert [*source.texts(cut_freely=True)] == []
    assert said == [f"{tmp_path}/t.txt, line 1: byte 0xe9 at 16 is no UTF-8"]


def test_lines_that_are_no_utf8_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_bytes(b"good\nba\xffd\ngood\n")
    err = failing(
        monkeypatch, "train", tmp_path / "t.txt", "--vocab-size", 300, "-o", tmp_path / "t.tok"
    )
    assert "t.txt, line 2: byte 0xff at 2 is no UTF-8" in err
    bad: list[str] = []
    source = Source([str(tmp_path / "t.txt")], report_bad=bad.append)
    assert [*source.texts()] == [b"good\ngood\n"] and len(bad) == 1


def test_parquet_without_the_column_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path
) -> None:
    *_, path = rows_of(["x"], tmp_path)
    assert "no column 'body'; its columns: 'text', 'n'" in failing(
        monkeypatch, "info", tok, path, "--field", "body"
    )
    damaged = bytearray(path.read_bytes())
    damaged[4:40] = b"\xff" * 36  # the column's pages; the footer says that all is well
    path.write_bytes(damaged)
    assert f"{path} is no Parquet file" in failing(monkeypatch, "info", tok, path)
    path.write_bytes(b"PAR1 not")
    assert "is no Parquet file" in failing(monkeypatch, "info", tok, path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_the_field_that_is_named_is_read_whatever_else_a_row_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_with_more_than_a_text(tmp_path / name)
    for field, text in (("body", "the body"), ("text", "the text"), ("prompt", "the start")):
        assert [*Source([str(path)], field).texts()] == [text.encode()]
    said = [b"the start", b"the end"] if name == "a.csv" else [b"hi", b"ho"]
    assert [*Source([str(path)]).texts()] == said
    if name != "a.csv":
        assert [*Source([str(path)], "messages").texts()] == said
    trained = ["train", path, "--vocab-size", 300, "-o", tmp_path / "t.tok"]
    error = failing(monkeypatch, *trained, "--field", "bdy")
    assert "'bdy'" in error and "'body'" in error
    assert run(monkeypatch, *trained, "--field", "body")[0] == 0
    expected = train_from_iterator(["the body"], 300)
    assert Tokenizer.load(tmp_path / "t.tok").sha256 == expected.sha256


def test_json_lines_are_read_as_rows_by_either_name(tmp_path: Path) -> None:
    lines = tmp_path / "a.json"
    lines.write_text('\n{"text": "one"}\n{"text": "two"}\n')
    assert [*Source([str(lines)]).texts()] == [b"one", b"two"]
    lines.write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(ValueError, match=r"a\.json, line 2"):
        [*Source([str(lines)]).texts()]
    for text in ('{"text": "one"}', '{\n  "text": "one"\n}\n', '["one"]'):
        lines.write_text(text)
        assert [*Source([str(lines)]).texts()] == [b"one"]
    for text in ('{"text": 1}', '{\n  "title": "one"\n}\n', '["one", 2]', "[]", "{no JSON}\n{}\n"):
        lines.write_text(text)
        assert [*Source([str(lines)]).texts()] == [text.encode()]


@pytest.mark.parametrize("name", ["t.gz", "t.zst"])
def test_damaged_archives_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"no archive")
    assert f"{name} cannot be unpacked" in failing(monkeypatch, "info", tok, tmp_path / name)


@pytest.mark.parametrize("name", ["t.txt.gz", "t.txt.zst"])
def test_archives_that_are_cut_short_or_changed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path, name: str
) -> None:
    import zstandard

    compress = gzip.compress if name.endswith(".gz") else zstandard.compress
    parts = [text.encode() for text in corpus()[:2]]
    whole = b"".join(map(compress, parts))  # two members, or frames
    path = tmp_path / name

    def written(data: bytes) -> str:
        path.write_bytes(data)
        return str(path)

    assert [*Source([written(whole)]).texts()] == [b"".join(parts)]
    first = len(compress(parts[0]))
    assert [*Source([written(whole[:first])]).texts()] == [parts[0]]
    for end in (first // 2, first + 3, len(whole) - 1):
        err = failing(monkeypatch, "info", tok, written(whole[:end]))
        assert f"{name} cannot be unpacked: it is cut short" in err
    changed = whole[:60] + bytes(byte ^ 255 for byte in whole[60:90]) + whole[90:]
    assert f"{name} cannot be unpacked: " in failing(monkeypatch, "info", tok, written(changed))


def test_other_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path
) -> None:
    (tmp_path / "no.tok").write_bytes(b"hello")
    assert "is no tokenizer file" in failing(monkeypatch, "info", tmp_path / "no.tok")
    assert "No such file" in failing(monkeypatch, "encode", tmp_path / "missing.tok", "--text", "a")
    decode = ("decode", tok)
    assert "standard input, line 2: 'x' is no id" in failing(
        monkeypatch, *decode, stdin=b"5\n5 x\n"
    )
    for word in (b"9" * 5000, b"--" + b"9" * 5000, b"1_x"):
        err = failing(monkeypatch, *decode, stdin=b"5 " + word + b"\n")
        assert f"standard input, line 1: '{word[:40].decode()}' is no id" in err
    assert "line 1: id 9999 at position 1" in failing(monkeypatch, *decode, stdin=b"5 9999\n")
    (tmp_path / "bad.npy").write_bytes(b"junk")
    assert "is no NumPy array" in failing(monkeypatch, *decode, tmp_path / "bad.npy")
    train = ("train", tok.parent / "x.txt", "-o")
    (tmp_path / "x.txt").write_text("text")
    assert "276 to 65536" in failing(monkeypatch, *train, tmp_path / "o", "--vocab-size", 5)
    (tmp_path / "x.txt").write_text("")
    err = failing(monkeypatch, *train, tmp_path / "o", "--vocab-size", 300)
    assert "the texts are empty: there is nothing to learn from" in err
    assert not (tmp_path / "o").exists()
    file, learn = tmp_path / "x.txt", ("--vocab-size", 300)
    err = failing(monkeypatch, *train, tmp_path, *learn)
    assert f"{tmp_path} is a folder: -o names the file to write" in err
    err = failing(monkeypatch, *train, file / "a" / "o", *learn)
    assert f"{file} is a file: name another folder" in err
    err = failing(monkeypatch, "info", tmp_path)
    assert f"{tmp_path} is a folder: name the tokenizer's file" in err


def test_a_text_is_not_overwritten(
    tok: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, array = tmp_path / "text.npy", tmp_path / "ids.npy"
    text.write_text("a text of mine")
    learn = ("train", text, "--vocab-size", 300, "-o")
    for words in (
        (*learn, text),
        ("extend", tok, "--special", "<|new|>", "-o", text),
        ("encode", tok, text, "-o", text),
    ):
        err = failing(monkeypatch, *words)
        assert f"{text} is a file of another kind, and would be lost: name another by -o" in err
    assert text.read_text() == "a text of mine"
    for words in (
        (*learn, tmp_path / "t.tok"),
        ("encode", tok, text, "-o", array),
        ("export", tok, "-o", tmp_path / "t.json"),
    ):
        for _ in "twice":  # an older one of the same kind gives way
            assert run(monkeypatch, *words)[0] == 0
    before = array.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left" in failing(monkeypatch, "encode", tok, "--text", "ab", "-o", array)
    assert array.read_bytes() == before


def test_the_folder_of_what_is_written_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tok: Path
) -> None:
    new = tmp_path / "new"
    (tmp_path / "x.txt").write_text("ab ab")
    for number, (name, *words) in enumerate(
        (
            ("a.tok", "train", tmp_path / "x.txt", "--vocab-size", 276),
            ("a.npy", "encode", tok, "--text", "ab"),
            ("a.json", "export", tok),
            ("b.tok", "import", new / "2" / "a.json"),
            ("c.tok", "extend", tok, "--special", "<|mine|>"),
        )
    ):
        path = new / f"{number}" / name
        assert run(monkeypatch, *words, "-o", path)[0] == 0
        assert path.is_file()


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "x"],
        ["encode", "t", "--text", "a", "file"],
        ["encode", "t", "--text", "a", "-o", "a.txt"],
        ["export", "t", "-o", "t.bin"],
        ["import", "t.bin", "-o", "t"],
        ["import", "t.tiktoken", "-o", "t", "--special", "x"],
        ["compare", "x", "--vocab-size", "5"],
    ],
)
def test_wrong_usage_has_status_2(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err, _ = run(monkeypatch, *argv)
    assert status == 2 and "usage: myllm tokenizer" in err


@pytest.mark.parametrize(
    "name", ["train", "encode", "decode", "info", "export", "import", "compare"]
)
def test_help_has_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _, _ = run(monkeypatch, name, "--help")
    assert status == 0 and "example:\n  myllm tokenizer" in out
