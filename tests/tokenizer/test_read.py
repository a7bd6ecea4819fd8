"""Where texts come from: pipes, names in capitals, marks and bytes that are no text."""

import gzip
import os
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.tokenizer_texts import rows_of
from tokenizer import read
from tokenizer.read import Source, expand

TEXT = b"".join(b"line %d of many\n" % i for i in range(20_000))  # more than a pipe holds


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_a_pipe_is_read_once_and_whole(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(TEXT,))
    writer.start()
    source = Source([str(pipe)])
    assert source.total_bytes == 0 and source.inputs.streams == [str(pipe)]
    assert b"".join(source.texts(cut_freely=True)) == TEXT
    writer.join()


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="- is given twice"):
        expand(["-", "-"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed: name a file"):
        list(Source(["-"]).texts())


def test_files_given_more_than_once_are_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    twice = [str(tmp_path), str(tmp_path / "." / "b.txt"), str(tmp_path / "b.*")]
    again = os.path.realpath(tmp_path / "b.txt")
    assert list(expand(twice).remarks()) == [
        f"given more than once, and read as often: 1 file ({again})"
    ]
    assert list(expand(twice[:1]).remarks()) == []


def test_endings_may_be_capitals(tmp_path: Path) -> None:
    texts = ["one, two", "drei ü"]
    paths = rows_of(texts, tmp_path)
    (tmp_path / "t.csv").write_text('id,text\n1,"one, two"\n2,drei ü\n', "utf-8")
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(TEXT))
    for path in [*paths, tmp_path / "t.csv", tmp_path / "t.txt.gz"]:
        capitals = path.rename(path.with_name(path.name.upper()))
        expected = [TEXT] if path.name == "t.txt.gz" else [text.encode() for text in texts]
        assert list(Source([str(capitals)]).texts()) == expected, path


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "BLOCK_BYTES", 7)  # the second block begins with another
    (tmp_path / "a.txt").write_text("\ufeffone\n\ufefftwo", "utf-8")
    assert list(Source([str(tmp_path / "a.txt")]).texts()) == ["one\n\ufefftwo".encode()]


def test_a_byte_that_is_no_utf8_costs_its_row_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,one\n2,"two\ncaf\xe9"\n3,three\n')
    said: list[str] = []
    assert list(Source([str(path)], report_bad=said.append).texts()) == [b"one", b"three"]
    assert said == [f"{path}, line 4: byte 0xe9 is no UTF-8"]
    with pytest.raises(ValueError, match="line 4: byte 0xe9 is no UTF-8"):
        list(Source([str(path)]).texts())


def test_columns_that_share_their_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,id,id,text\none,1,2,two\n")
    with pytest.raises(ValueError, match="2 columns are called 'text': rename all but one"):
        list(Source([str(path)]).texts())
