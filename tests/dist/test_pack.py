"""Packing: what is written for which input, whatever the processes and interruptions."""

import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli, commands, manifest, pack, writer
from dist.documents import PIECE_BYTES, pieces
from dist.shards import Dataset, check_crcs, read_manifest
from dist.writer import ShardWriter
from tests.helpers.packing import contents, eos_behind, interrupt, run, tokens_of
from tests.helpers.runs import text
from tokenizer import Tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    for i in range(30):
        (folder / "inner" / f"{i:02d}.txt").write_text(text(i))
    lines = [json.dumps({"text": text(100 + i), "other": 1}) for i in range(300)]
    with gzip.open(folder / "lines.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    (folder / ".hidden").write_text("no")
    (folder / "empty.txt").write_text("")
    return folder


def test_documents_come_back_whole_with_an_eos_behind_each(
    corpus: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "d", tokenizer_file, "--heldout", "0.2", "--processes", "1") == 0
    said = capsys.readouterr().out
    tokenizer = Tokenizer.load(tokenizer_file)
    eos = tokenizer.special_tokens["<|eos|>"]
    documents: dict[str, list[str]] = {}
    for split in ("train", "heldout"):
        manifest = read_manifest(tmp_path / "d" / split)
        ids = tokens_of(tmp_path / "d" / split)
        assert manifest.eos == eos and manifest.tokenizer_sha256 == tokenizer.sha256
        assert manifest.tokens == len(ids) and ids[-1] == eos
        pieces = np.split(ids, np.flatnonzero(ids == eos) + 1)[:-1]
        documents[split] = [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]
        assert manifest.documents == len(pieces)
        assert f"{split}: {len(pieces)} documents, {len(ids):,} tokens" in said
    expected = [text(i) for i in range(30)] + [text(100 + i) for i in range(300)]
    assert sorted(documents["train"] + documents["heldout"]) == sorted(expected)
    assert documents["train"] == [t for t in expected if t in set(documents["train"])]  # in order
    assert 30 < len(documents["heldout"]) < 110  # 66 expected
    assert "0 bad lines, 0 empty documents" in said
    assert check_crcs(tmp_path / "d" / "train") == 1
    assert cli.main(["pack", "--check", str(tmp_path / "d" / "heldout")]) == 0


def test_the_bytes_do_not_depend_on_processes_or_batches(
    corpus: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--shard-tokens", "1000", "--heldout", "0.1"]
    assert run(corpus, tmp_path / "one", tokenizer_file, "--processes", "1", *few) == 0
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 7)
    assert run(corpus, tmp_path / "two", tokenizer_file, "--processes", "2", *few) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) > 8


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_progress_counts_bytes_on_disk_of_which_text_may_be_few(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    texts = [f"{number:>98}\n\n" for number in range(300)]
    path, other = tmp_path / f"a.{kind}", "x" * 5000
    match kind:
        case "txt":
            path.write_text("".join(texts) * 20)
        case "jsonl":
            path.write_text("\n".join(json.dumps({"other": other, "text": t}) for t in texts))
        case "csv":
            path.write_text("text,other\n" + "".join(f'"{t}",{other}\n' for t in texts))
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 7)
    told: list[tuple[float, float]] = []
    size, content = path.stat().st_size, 300 * 100 * (20 if kind == "txt" else 1)

    def progress(n_bytes: int, tokens: int, done: int) -> None:
        told.append((done / size, n_bytes / content))

    pack.pack(
        [str(path)],
        tmp_path / "d",
        pack.Settings(str(tokenizer_file), heldout=0),
        progress=progress,
    )
    assert told == sorted(told) and len(told) > 2 and told[-1][1] == 1
    assert all(abs(done - packed) < 0.2 for done, packed in told)


def test_the_time_left_is_told_by_what_was_done_since_the_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    tell = commands.tell_of_packing(1000)
    for n_bytes, done in ((100, 500), (110, 520), (200, 750)):
        tell(n_bytes, 7, done)
        now += 1.5
    assert capsys.readouterr().out == "200 B of text, 7 tokens, 33 B/s, ETA 3s\n"


def test_workers_end_with_the_process_that_started_them(tokenizer_file: Path) -> None:
    program = f"""
import os, signal
from dist import pack
from dist.documents import Document, Part

def documents():
    while True:
        yield Document((Part("the fox"),))

if __name__ == "__main__":
    import multiprocessing
    encoded = pack.encode_all(documents(), pack.Settings({str(tokenizer_file)!r}), 2)
    next(encoded)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = tokenizer_file.parent / "packs_and_dies.py"
    script.write_text(program)
    # the workers inherit the pipes: without their end this call would not return
    environment = {**os.environ, "PYTHONPATH": str(Path(pack.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, timeout=120
    )
    assert done.returncode == -signal.SIGKILL and len(done.stdout.split()) == 2


def test_an_interrupted_packing_goes_on_with_identical_bytes(
    corpus: Path,
    tmp_path: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--shard-tokens", "1000", "--heldout", "0.1", "--processes", "1", "--skip-bad-lines"]
    more += ["--drop-near-duplicates"]
    again = [json.dumps({"text": text(100 + i) + "again"}) for i in range(100)]
    (corpus / "near.jsonl").write_text("\n".join(again))
    (corpus / "bad.jsonl").write_text('{"text": "first"}\n{"tex\n{"text": "second"}\n')
    assert run(corpus, tmp_path / "whole", tokenizer_file, *more) == 0
    capsys.readouterr()
    encoded = interrupt(monkeypatch, batch=20, document=230)
    assert run(corpus, tmp_path / "parts", tokenizer_file, *more) == 130
    before = capsys.readouterr().err
    assert "the same command goes on after 220 documents\n" in before
    with pytest.raises(FileNotFoundError, match="did not finish"):
        Dataset(tmp_path / "parts" / "train", 1)
    assert run(corpus, tmp_path / "parts", tokenizer_file, *more) == 0
    said = capsys.readouterr()
    assert "going on after 220 documents" in said.err
    # said once, although it was read twice
    assert (before + said.err).count("bad.jsonl, line 2") == 1
    assert "1 bad lines" in said.out and " 0 near-duplicates" not in said.out
    assert len(encoded) == 230 + 432 - 220
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_bad_lines_are_reported_with_file_and_line(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"text": "good"}', "nonsense", "", "[1]", '{"body": "x"}', '{"prompt": "only"}']
    lines += ['{"messages": [{"role": "robot", "content": "x"}]}', '{"messages": []}']
    lines += ['{"messages": [{"role": ["user"], "content": "x"}]}', "[" * 100_000]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert run(tmp_path / "a.jsonl", tmp_path / "e", tokenizer_file, "--heldout", "0") == 1
    assert "a.jsonl, line 2: no JSON: Expecting value" in (said := capsys.readouterr().err)
    assert "--skip-bad-lines leaves such lines out" in said
    more = ["--heldout", "0", "--skip-bad-lines"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *more) == 0
    said_all = capsys.readouterr()
    for line, why in {
        2: "Expecting value",
        4: "no JSON object but list",
        5: "no text field 'text'",
        6: "must both be strings",
        7: "must be one of system, user, assistant, got 'robot'",
        8: "a list of at least one",
        9: "must be one of system, user, assistant, got ['user']",
        10: "recursion",
    }.items():
        assert f"a.jsonl, line {line}: " in said_all.err and why in said_all.err
    assert "8 bad lines" in said_all.out
    assert not (tmp_path / "d" / "heldout").exists()


@pytest.mark.parametrize("between", [b"\n\n", b"\r\n \r\n", b"\n", b" "])
def test_a_long_text_is_cut_behind_paragraphs_lines_or_words_and_nothing_of_it_is_lost(
    between: bytes,
) -> None:
    whole = between.join(b"word%d" % i * 50 for i in range(700))
    parts = list(pieces(whole))
    assert b"".join(parts) == whole and len(parts) > 3
    assert list(pieces(b"x" * len(whole))) == [b"x" * len(whole)]
    late = list(pieces(b"x" * len(whole) + between + whole))  # whose first word is long
    assert late[0].strip() == b"x" * len(whole) and len(late) > 3
    assert all(part.endswith(between) for part in parts[:-1])
    assert all(PIECE_BYTES <= len(part) < 2 * PIECE_BYTES for part in parts[:-1])
    assert list(pieces(whole[: 2 * PIECE_BYTES])) == [whole[: 2 * PIECE_BYTES]]


@pytest.mark.parametrize("end", "　。．！？")
def test_a_long_text_without_spaces_is_cut_behind_sentences(end: str) -> None:
    sentences = [("文" * (i % 40 + 1) + end).encode() for i in range(3_000)]
    parts = list(pieces(b"".join(sentences)))
    assert b"".join(parts) == b"".join(sentences) and len(parts) > 3
    assert all(part.decode().endswith(end) for part in parts)
    assert all(PIECE_BYTES <= len(part) < 2 * PIECE_BYTES for part in parts[:-1])


def test_some_of_one_long_file_is_held_out(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(text(i) for i in range(20_000)))
    out = tmp_path / "d"
    assert run(tmp_path / "book.txt", out, tokenizer_file, "--heldout", "0.1") == 0
    sizes = [len(tokens_of(out / split)) for split in ("train", "heldout")]
    assert 0.02 < sizes[1] / sum(sizes) < 0.25


def test_prompts_are_masked_and_completions_are_not(tmp_path: Path, tokenizer_file: Path) -> None:
    records: list[dict[str, Any]] = [
        {"text": "plain"},
        {"prompt": "the fox", "completion": " jumps"},
        {
            "messages": [
                {"role": "user", "content": "hi <|end|>"},
                {"role": "assistant", "content": "ho"},
            ]
        },
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, "--heldout", "0")
    t = Tokenizer.load(tokenizer_file)
    special = t.special_tokens
    eos, end = special["<|eos|>"], special["<|end|>"]

    def o(said: str) -> list[int]:
        return t.encode_ordinary(said)

    expected = [(i, True) for i in [*o("plain"), eos]]
    expected += [(i, False) for i in o("the fox")] + [(i, True) for i in [*o(" jumps"), eos]]
    # what people write can never become a control id
    expected += [(i, False) for i in [special["<|user|>"], *o("hi <|end|>"), end]]
    expected += [(special["<|assistant|>"], False), *((i, True) for i in [*o("ho"), end])]
    expected += [(eos, False)]
    assert o("hi <|end|>").count(end) == 0
    ids, predict = Dataset(tmp_path / "d" / "train", len(expected)).read(0)
    assert list(zip(ids.tolist(), predict.tolist(), strict=True)) == expected


def test_truncate_makes_one_window_a_document(
    corpus: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    more = ["--layout", "truncate", "--window", "24", "--bos", "--heldout", "0"]
    assert run(corpus / "inner", tmp_path / "d", tokenizer_file, *more) == 0
    t = Tokenizer.load(tokenizer_file)
    dataset = Dataset(tmp_path / "d" / "train", 24)
    assert (
        dataset.n_windows == 30 and dataset.manifest is not None and dataset.manifest.window == 24
    )
    lengths = set()
    for i in range(30):
        ids, predict = dataset.read(i)
        whole = [t.special_tokens["<|bos|>"], *t.encode_ordinary(text(i))]
        whole.append(t.special_tokens["<|eos|>"])
        n = min(24, len(whole))
        assert ids.tolist() == whole[:n] + [t.special_tokens["<|pad|>"]] * (24 - n)
        assert predict.tolist() == [True] * n + [False] * (24 - n)
        lengths.add(n)
    assert 24 in lengths and min(lengths) < 24


def test_documents_whose_answers_lie_behind_the_window_are_left_out(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i} " + "why " * length},
                      {"role": "assistant", "content": "because"}]}
        for i, length in enumerate([1, 90, 2, 95, 3])
    ]  # fmt: skip
    texts = tmp_path / "chats.jsonl"
    texts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    more = ["--layout", "truncate", "--window", "24", "--heldout", "0"]
    assert run(texts, tmp_path / "d", tokenizer_file, *more) == 0
    assert "2 documents with nothing to predict within --window 24" in capsys.readouterr().out
    dataset = Dataset(tmp_path / "d" / "train", 24)
    assert dataset.n_windows == 3 and all(dataset.read(i)[1].any() for i in range(3))
    texts.write_text(json.dumps(rows[1]), encoding="utf-8")
    assert run(texts, tmp_path / "e", tokenizer_file, *more) == 1
    assert "no document has a token to be predicted; give a larger --window than 24" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        ("nowhere.txt", (), "is no file, folder or glob of files"),
        ("empty", (), "holds no file"),
        ("blank.txt", (), "there is nothing to train on: no document has any text"),
        ("blank", ("--heldout", "0"), "there is nothing to train on: no document has any text"),
        ("a.txt", (), "none of the 1 documents was held out"),
        ("a.txt", ("--heldout", "0.999999"), "1 documents were held out and 0 were empty"),
        ("broken.txt.gz", (), "broken.txt.gz cannot be unpacked"),
        ("changed.txt.gz", (), "changed.txt.gz cannot be unpacked"),
        ("a.txt", ("--heldout", "1"), "must lie in [0, 1)"),
        ("a.txt", ("--shard-tokens", "0"), "a shard holds 1 to"),
        (
            "a.txt",
            ("--heldout", "0", "--drop-near-duplicates"),
            "but --heldout is 0",
        ),
    ],
)
def test_what_cannot_be_packed_is_one_sentence(
    inputs: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "blank" / "b.txt").write_text("")
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(b"x" * 999)[:-9])
    (tmp_path / "changed.txt.gz").write_bytes(gzip.compress(b"")[:10] + b"\xff" * 20)
    assert run(tmp_path / inputs, tmp_path / "d", tokenizer_file, *arguments) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_packed_folder_is_not_packed_over(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert run(tmp_path / "a.txt", tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    assert run(tmp_path / "a.txt", tmp_path / "d", tokenizer_file, "--heldout", "0") == 1
    assert "is packed already" in capsys.readouterr().err
    assert run(tmp_path / "a.txt", tmp_path / "a.txt", tokenizer_file) == 1
    assert "a.txt is a file: name another folder" in capsys.readouterr().err
    assert run(tmp_path / "a.txt", tmp_path / "e", tmp_path) == 1
    assert f"{tmp_path} is a folder: name the tokenizer's file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        cli.main(["pack", "x"])
    assert usage.value.code == 2


def test_a_tokenizer_that_goes_meanwhile_is_the_one_that_encoded(
    corpus: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.tok"
    shutil.copy(tokenizer_file, mine)
    encode_all = pack.encode_all

    def gone(*given: Any) -> Iterator[Any]:
        for batch in encode_all(*given):
            mine.unlink(missing_ok=True)
            yield batch

    monkeypatch.setattr(pack, "encode_all", gone)
    assert run(corpus, tmp_path / "d", mine, "--heldout", "0") == 0
    kept = tmp_path / "d" / "train" / "tokenizer.myllm"
    assert kept.read_bytes() == tokenizer_file.read_bytes()


def test_what_an_earlier_start_held_out_does_not_stand_in_the_way(
    corpus: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ShardWriter, **facts: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "finish", full)
    assert run(corpus, tmp_path / "d", tokenizer_file, "--heldout", "0.2") == 1
    assert (tmp_path / "d" / "heldout" / "tokenizer.myllm").exists()
    monkeypatch.undo()
    assert run(corpus, tmp_path / "d", tokenizer_file, "--heldout", "0") == 0
    assert not (tmp_path / "d" / "heldout").exists()


def test_a_full_disk_is_named_with_what_to_do(
    corpus: Path,
    tmp_path: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.os, "fsync", full)
    (tmp_path / "a.txt").write_text("hello")
    for out, file in (("a.tok", "a.tok"), ("packed", "packed/journal.json")):
        words = ["pack", tmp_path / "a.txt", "--tokenizer", tokenizer_file, "--processes", 1]
        if out == "a.tok":
            words = ["tokenizer", "train", tmp_path / "a.txt", "--vocab-size", 276]
        assert cli.main([*map(str, words), "-o", str(tmp_path / out)]) == 1
        said = "No space left on device; make room there, and give the command again"
        assert f"{tmp_path / file}: {said}\n" in capsys.readouterr().err
    monkeypatch.setattr(manifest, "replace_durably", lambda path, data: path.write_bytes(data))
    monkeypatch.setattr(Tokenizer, "save", lambda self, path: None)
    monkeypatch.setattr(writer, "sync_folder", lambda folder: None)
    assert run(corpus, tmp_path / "more", tokenizer_file, "--heldout", "0") == 1
    assert f"{tmp_path}/more/train/00000.bin: No space left" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
def test_a_shard_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    stream = writer._Stream(tmp_path / "00000.bin", np.dtype("<u2"))
    stream.close()
    with open("/dev/full", "wb", buffering=0) as stream._file:
        with pytest.raises(OSError, match="No space left on device") as raised:
            stream.write(b"tokens")
        assert raised.value.filename == str(tmp_path / "00000.bin")


def test_other_readers(tmp_path: Path, tokenizer_file: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet"
    )
    lines = "\n".join(json.dumps({"body": w}) for w in ("three", "four"))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    out = tmp_path / "d"
    run(tmp_path / "a.parquet", out / "a", tokenizer_file, "--heldout", "0", "--skip-bad-lines")
    run(tmp_path / "b.jsonl.zst", out / "b", tokenizer_file, "--heldout", "0", "--field", "body")
    t = Tokenizer.load(tokenizer_file)
    for name, words in (("a", ("one", "two")), ("b", ("three", "four"))):
        expected = [i for w in words for i in [*t.encode_ordinary(w), t.special_tokens["<|eos|>"]]]
        assert tokens_of(out / name / "train").tolist() == expected


def test_packing_ends_behind_so_many_characters(tmp_path: Path, tokenizer_file: Path) -> None:
    texts = ["äöü" * 4, "x" * 10, "y" * 10, "z"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    words = ["--heldout", "0", "--max-chars", "22"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    expected = eos_behind(tokenizer_file, texts[:2])
    assert tokens_of(tmp_path / "d" / "train").tolist() == expected
    assert run(tmp_path / "a.jsonl", tmp_path / "e", tokenizer_file, "--max-chars", "0") == 1
