"""What packing takes for a document: rows, conversations, folders, and what is no text."""

import gzip
import json
import os
from pathlib import Path

import pytest

from dist import cli
from dist.documents import Part, chat, document_of
from dist.shards import read_manifest
from tests.helpers.packing import contents, eos_behind, run, tokens_of
from tests.helpers.tokenizer_texts import rows_with_more_than_a_text


def test_prompts_and_completions_may_be_turns_of_a_chat(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    rows = [{"prompt": "the fox", "completion": "jumps <|end|>"}]
    turns = [{"role": "user", "content": "the fox"}]
    turns += [{"role": "assistant", "content": "jumps <|end|>"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    for file, out, *words in (("rows", "rows", "--chat"), ("chats", "chats"), ("rows", "plain")):
        where = tmp_path / f"{file}.jsonl", tmp_path / out, tokenizer_file
        assert run(*where, "--heldout", "0", "--processes", "1", *words) == 0
    for file in ("00000.bin", "00000.mask"):
        same = {(tmp_path / name / "train" / file).read_bytes() for name in ("rows", "chats")}
        assert len(same) == 1
    names = ("rows", "chats", "plain")
    assert [read_manifest(tmp_path / name / "train").chats for name in names] == [1, 1, 0]


def test_a_record_says_what_it_is() -> None:
    asked = document_of({"prompt": "a", "completion": "é"})
    assert asked.content == b"a\0\xc3\xa9" and asked.n_bytes == 3
    # as in Cosmopedia: what a text was asked for with, and the text
    assert document_of({"prompt": "a", "text": "b"}).parts == (Part("b"),)
    for record in ({"prompt": "a"}, {"prompt": "a", "text": "b", "completion": None}):
        with pytest.raises(ValueError, match="must both be strings"):
            document_of(record)
    parts = list(chat([{"role": "system", "content": "s"}]))
    assert [p.control for p in parts] == [True, False, True]
    assert not any(p.predict for p in parts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_the_field_that_is_named_is_read_whatever_else_a_row_has(
    name: str, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows_with_more_than_a_text(tmp_path / name)
    for field, text in (("body", "the body"), ("text", "the text"), ("completion", "the end")):
        out = tmp_path / field
        assert run(path, out, tokenizer_file, "--heldout", "0", "--field", field) == 0
        assert tokens_of(out / "train").tolist() == eos_behind(tokenizer_file, [text])
        assert read_manifest(out / "train").chats == 0
    for out, *words in (("none",), ("chat", "--field", "messages")):
        if name == "a.csv":  # has no lists
            continue
        assert run(path, tmp_path / out, tokenizer_file, "--heldout", "0", *words) == 0
        assert read_manifest(tmp_path / out / "train").chats == 1
    assert run(path, tmp_path / "no", tokenizer_file, "--field", "bdy") == 1
    said = capsys.readouterr().err
    assert "'bdy'" in said and "'body'" in said and said.count("\n") == 1
    assert run(path, tmp_path / "no", tokenizer_file, "--field", "body", "--chat") == 1
    assert "--chat is for rows of prompt and completion" in capsys.readouterr().err


def test_of_many_bad_lines_the_first_are_named(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + "{}\n" * 500)
    words = ["--heldout", "0", "--skip-bad-lines"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    said = capsys.readouterr()
    assert said.err.count("(left out)") == 20 and said.err.count("\n") == 21
    assert "a.jsonl, line 21: " in said.err and "further bad lines are left out" in said.err
    assert "500 bad lines" in said.out


def test_rows_of_csv_json_and_parquet_are_documents(tmp_path: Path, tokenizer_file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.csv").write_text('\ufeffid,text\n1,"one, two\nthree"\n2,four\n', "utf-8")
    (tmp_path / "b.tsv").write_text("text\tid\nfive\t1\n", "utf-8")
    (tmp_path / "c.json").write_text(json.dumps([{"text": "six"}, {"text": "seven"}]))
    (tmp_path / "d.json").write_text('{"title": "no text"}')
    (tmp_path / "e.json").write_text("[1, // no JSON\n")
    said = {"role": ["user", "assistant"], "content": ["hi", "ho"]}
    chat_of = [{k: said[k][i] for k in said} for i in range(2)]
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [chat_of], "id": [1]}), tmp_path / "f.parquet"
    )
    out = tmp_path / "out"
    assert run(tmp_path / "[a-e].*", out / "a", tokenizer_file, "--heldout", "0") == 0
    texts = ["one, two\nthree", "four", "five", "six", "seven", '{"title": "no text"}']
    expected = eos_behind(tokenizer_file, [*texts, "[1, // no JSON\n"])
    assert tokens_of(out / "a" / "train").tolist() == expected
    assert run(tmp_path / "f.parquet", out / "f", tokenizer_file, "--heldout", "0") == 0
    (tmp_path / "f.jsonl").write_text(json.dumps({"messages": chat_of}))
    assert run(tmp_path / "f.jsonl", out / "g", tokenizer_file, "--heldout", "0") == 0
    assert contents(out / "f" / "train") == contents(out / "g" / "train")
    # what is null beside a text is not there, as in a column of Parquet
    rows = [{"text": "six", "messages": None, "prompt": None}, {"text": None, "messages": chat_of}]
    for name, written in (
        ("g.jsonl", "\n".join(map(json.dumps, rows))),
        ("g.json", json.dumps(rows)),
    ):
        (tmp_path / name).write_text(written)
        assert run(tmp_path / name, out / name, tokenizer_file, "--heldout", "0") == 0
        assert read_manifest(out / name / "train").chats == 1


def test_what_is_empty_in_csv_beside_a_text_is_not_there(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["one,,,", "two,two?,,", ",three?,three,", ",,,", "four,,five,", ",six,,"]
    (tmp_path / "a.csv").write_text("\n".join(["text,prompt,completion,messages", *rows]))
    assert run(tmp_path / "a.csv", tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    texts = ["one", "two", "three?three", "five", "six"]
    assert tokens_of(tmp_path / "d" / "train").tolist() == eos_behind(tokenizer_file, texts)
    assert "1 empty" in capsys.readouterr().out
    (tmp_path / "b.jsonl").write_text('{"prompt": "", "completion": ""}\n{"text": "one"}\n')
    assert run(tmp_path / "b.jsonl", tmp_path / "e", tokenizer_file, "--heldout", "0") == 0
    assert "1 empty" in capsys.readouterr().out


def test_bytes_of_text_are_those_of_people(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    assert "\n4 B of text" in capsys.readouterr().out


def test_a_parquet_file_without_rows_holds_none_and_a_null_is_named(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.parquet").touch()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "b.parquet")
    words = ["--heldout", "0"]
    assert run(tmp_path / "*.parquet", tmp_path / "d", tokenizer_file, *words) == 1
    assert "b.parquet, row 2: field 'text' holds no text but null" in capsys.readouterr().err
    words += ["--skip-bad-lines"]
    assert run(tmp_path / "*.parquet", tmp_path / "d", tokenizer_file, *words) == 0
    assert tokens_of(tmp_path / "d" / "train").tolist() == eos_behind(tokenizer_file, ["one"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "one"}, {"text": "tw', "a.json: no JSON: Unterminated string"),
        ("a.json", '\n[ {"text": "one"}, "two"]', "a.json, item 2: no JSON object but str"),
        ("a.json", '["one", "two", "th', "a.json: no JSON: Unterminated string"),
        ("a.json", '["one", null]', "a.json, item 2: field 'text' holds no text but null"),
        ("a.json", '{"messages": [{"role": "user"}]}', "a.json, item 1: a message must be"),
        ("a.csv", 'id,text\n1,one\n2,"two\n3,three\n', "in the row that begins on line 3: is a qu"),
        ("a.tsv", 'text\n"two\nthree\n', "in the row that begins on line 2: is a quote never"),
        (
            "a.csv",
            "id,body\n1,x\n",
            "no column 'text'; its columns: 'id', 'body' (--field names one)",
        ),
        ("a.csv", "id,text\n1,x,y\n", "a.csv, line 2: 3 values for 2 columns (--skip-bad-lines"),
        ("a.csv", "", "no document has any text"),
        ("a.csv", "\n", "no column 'text'; its columns: none"),
        ("a.jsonl", '{"text": 7}\n', "a.jsonl, line 1: field 'text' holds no text but int (--sk"),
        ("a.jsonl", '{"text": null}\n', "line 1: field 'text' holds no text but null (--skip"),
    ],
)
def test_rows_that_cannot_be_read_are_no_text(
    name: str,
    content: str,
    message: str,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(content)
    assert run(tmp_path / name, tmp_path / "d", tokenizer_file, "--heldout", "0") == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    if name == "a.json":
        (tmp_path / "b.txt").write_text("four")
        words = ["--heldout", "0", "--skip-bad-lines"]
        assert run(tmp_path / "[ab].*", tmp_path / "e", tokenizer_file, *words) == 0
        kept = ["one", "four"] if "item 2" in message else ["four"]
        assert tokens_of(tmp_path / "e" / "train").tolist() == eos_behind(tokenizer_file, kept)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_file_that_is_one_row_is_one_document(
    indent: int | None, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"text": "the text", "body": "the body", "n": 1}
    (tmp_path / "a.json").write_text(json.dumps(row, indent=indent))
    for field, text in ((None, "the text"), ("body", "the body")):
        out, words = tmp_path / f"of-{field}", ["--field", field] if field else []
        assert run(tmp_path / "a.json", out, tokenizer_file, "--heldout", "0", *words) == 0
        assert tokens_of(out / "train").tolist() == eos_behind(tokenizer_file, [text])
    for content, message in (
        (row, "a.json, item 1: there is no text field 'bdy'; it has 'text', 'body', 'n' (--field"),
        (["one", "two"], "a.json, item 1: no JSON object but str (--skip-bad-lines"),
        ({"title": "x"}, "a.json, item 1: there is no text field 'bdy'; it has 'title' (--field"),
        (7, "a.json, item 1: no JSON object but int (--skip-bad-lines"),
    ):
        (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
        assert run(tmp_path / "a.json", tmp_path / "d", tokenizer_file, "--field", "bdy") == 1
        assert message in capsys.readouterr().err
    (tmp_path / "a.json").write_text("no JSON")
    assert run(tmp_path / "a.json", tmp_path / "d", tokenizer_file, "--field", "bdy") == 1
    assert "a.json: no JSON: Expecting value" in capsys.readouterr().err
    (tmp_path / "a.json").write_text(json.dumps(["one", "two"], indent=indent))
    assert run(tmp_path / "a.json", tmp_path / "e", tokenizer_file, "--heldout", "0") == 0
    assert tokens_of(tmp_path / "e" / "train").tolist() == eos_behind(
        tokenizer_file, ["one", "two"]
    )
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": turns}, indent=indent))
    assert run(tmp_path / "a.json", tmp_path / "f", tokenizer_file, "--heldout", "0") == 0
    assert read_manifest(tmp_path / "f" / "train").chats == 1


def test_a_long_json_text_is_cut_as_others_are(tmp_path: Path, tokenizer_file: Path) -> None:
    words = " ".join(f"word{i}" for i in range(40_000))
    for name in ("a.json", "a.txt"):
        (tmp_path / name).write_text(json.dumps({"words": words}))
        assert run(tmp_path / name, tmp_path / name[2:], tokenizer_file, "--heldout", "0.4") == 0
    assert contents(tmp_path / "json" / "heldout") == contents(tmp_path / "txt" / "heldout")


def test_a_packed_folder_is_no_text(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert run(tmp_path / "a.txt", tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    assert run(tmp_path / "d" / "train", tmp_path / "e", tokenizer_file) == 1
    assert "is packed already: name the texts" in capsys.readouterr().err
    assert cli.main(["pack", "--check", str(tmp_path / "d")]) == 1
    assert f"name {tmp_path / 'd' / 'train'}\n" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="no text was held out when it was packed"):
        read_manifest(tmp_path / "d" / "heldout")


def test_what_is_written_below_the_texts_is_none_of_them(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by one who works inside the folder of the texts."""
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    for i, name in enumerate(["a.txt", "b.txt", "more/c.txt"]):
        (texts / name).write_text("a fox and a wolf " * 200 * (i + 1))
    (texts / "more" / "lock").write_text("others write locks, too, and texts in them")
    words = ["--heldout", "0"]
    assert run(texts, texts / "data", tokenizer_file, *words) == 0
    assert not capsys.readouterr().err
    keys = {"train.steps": 2, "data.heldout": '""', "run.eval_every": 0, "run.checkpoint_every": 0}
    keys |= {"data.train": f'"{texts / "data/train"}"', "run.out": f'"{texts / "runs/one"}"'}
    keys |= {"model.context_length": 32, "train.warmup_steps": 1}
    set_words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert cli.main(["train", "demo", "--set", "model.vocab_size=320", *set_words]) == 0
    capsys.readouterr()
    assert run(texts, texts / "again", tokenizer_file, *words) == 0
    first, second = (tokens_of(texts / name / "train") for name in ("data", "again"))
    assert first.tolist() == second.tolist()
    own = ", ".join(str(texts / name) for name in ("data", "runs/one"))
    assert f"passed over, as written by MyLLM: 2 folders ({own})" in capsys.readouterr().err
    assert run(texts, texts, tokenizer_file) == 1
    assert f"{texts} is the folder of the texts: name another by -o" in capsys.readouterr().err
    assert run(texts / "runs", tmp_path / "none", tokenizer_file) == 1
    assert "holds no file; passed over, as written by MyLLM" in capsys.readouterr().err
    assert run(texts / "runs" / "one", tmp_path / "none", tokenizer_file) == 1  # asked for by name
    assert "metrics.jsonl, line 1: there is no text field" in capsys.readouterr().err


def test_a_folder_of_texts_may_have_a_manifest_of_its_own(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"name": "an app"}')
    assert run(folder, tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    assert tokens_of(tmp_path / "d" / "train").size


def test_what_is_no_text_is_passed_over_in_folders_and_refused_by_name(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "c.zip").write_bytes(b"PK")
    (folder / "e.pdf").write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    (folder / "d.html").write_text("<p>hi</p>")
    (folder / "f.txt").write_bytes("hello".encode("utf-16"))
    assert run(folder, tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    said = capsys.readouterr().err
    assert f"passed over, as no text: 2 files ({folder}/b.png, {folder}/e.pdf)\n" in said
    assert f"as an archive, which has to be unpacked first: 1 file ({folder}/c.zip)\n" in said
    assert f"as UTF-16, which has to be saved as UTF-8: 1 file ({folder}/f.txt)\n" in said
    assert f"with its tags: 1 file ({folder}/d.html)" in said
    expected = eos_behind(tokenizer_file, ["hello", "<p>hi</p>"])
    assert tokens_of(tmp_path / "d" / "train").tolist() == expected
    refused = {"b.png": "is no text", "c.zip": "is an archive", "f.txt": "is UTF-16"}
    for name, why in refused.items():
        assert run(folder / name, tmp_path / "e", tokenizer_file) == 1
        assert why in capsys.readouterr().err
    assert run(folder / "[cf]*", tmp_path / "e", tokenizer_file) == 1
    said = capsys.readouterr().err
    assert "holds no text; passed over, as an archive" in said and "; passed over, as UTF" in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_what_is_no_text_is_so_in_a_packed_file_and_in_one_of_rows(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zstandard = pytest.importorskip("zstandard")
    utf16, utf32 = "text\nhello\n".encode("utf-16"), "text\nhello\n".encode("utf-32")
    files = {
        "a.txt": b"hello",
        "a.txt.gz": gzip.compress(b"packed"),
        "b.png.gz": gzip.compress(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
        "b.png.zst": zstandard.compress(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
        "c.txt.gz": gzip.compress(utf16),
        "c.jsonl": '{"text": "hello"}'.encode("utf-16"),
        "c.csv": utf16,
        "c.csv.gz": gzip.compress(utf16),
        "d.txt": utf32,
        "d.json": utf32,
        "e.txt.xz": b"\xfd7zXZ",
        "e.txt.BZ2": b"BZh9",
        "e.parquet.gz": gzip.compress(b"PAR1"),
    }
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    assert run(folder, tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    said = capsys.readouterr().err
    assert "as no text: 2 files" in said and "as UTF-16, which has to be saved as UTF-8: 4" in said
    assert "as UTF-32, which has to be saved as UTF-8: 2 files" in said
    assert "not read here, and has to be unpacked first: 3 files" in said
    assert f"as a pipe or device, which has to be named by itself: 1 file ({folder}/pipe)" in said
    expected = eos_behind(tokenizer_file, ["hello", "packed"])
    assert tokens_of(tmp_path / "d" / "train").tolist() == expected
    for name in files:
        if name[0] != "a":
            assert run(folder / name, tmp_path / "e", tokenizer_file) == 1
            told = capsys.readouterr().err
            assert f"{name}' is " in told and told.count("\n") == 1
    assert run(folder / "p*", tmp_path / "e", tokenizer_file) == 1
    assert "is no file, folder or glob of files; passed over, as a pipe" in capsys.readouterr().err
    (folder / "a.txt.gz").write_bytes(b"damaged")
    assert run(folder, tmp_path / "e", tokenizer_file) == 1
    assert "a.txt.gz cannot be unpacked" in capsys.readouterr().err


def test_links_to_folders_are_not_followed_but_named(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for each in (folder, other):
        each.mkdir()
        (each / "a.txt").write_text(f"text of {each.name}")
    (folder / "inner").symlink_to(other)
    (folder / "loop").symlink_to(folder)
    (folder / "b.txt").symlink_to(other / "a.txt")  # a file is read
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    assert run(folder, tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    named = ", ".join(f"{folder}/{name}" for name in ("gone", "inner", "loop"))
    assert f"not followed: 3 links ({named}); name what" in capsys.readouterr().err
    expected = eos_behind(tokenizer_file, ["text of in", "text of other"])
    assert tokens_of(tmp_path / "d" / "train").tolist() == expected
    (folder / "a.txt").unlink()
    (folder / "b.txt").unlink()
    assert run(folder, tmp_path / "e", tokenizer_file) == 1
    assert "holds no file; not followed: 3 links" in capsys.readouterr().err
