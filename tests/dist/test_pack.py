"""Packing: what is written for which input, whatever the processes and interruptions."""

import errno
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli, commands, manifest, pack, writer
from dist.documents import PIECE_BYTES, Part, chat, document_of, pieces
from dist.shards import Dataset, check_crcs, read_manifest
from reference.types import Array
from tests.helpers.runs import text
from tokenizer import Tokenizer, train_from_iterator


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "t.tok"
    train_from_iterator([text(i) for i in range(100)], 320).save(path)
    return path


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


def run(corpus: Path, out: Path, tokenizer_file: Path, *arguments: str) -> int:
    words = ["pack", str(corpus), "--tokenizer", str(tokenizer_file), "-o", str(out)]
    words += ["--processes", "1"]  # as quick for so little text; a later one replaces it
    return cli.main([*words, *arguments])


def tokens_of(folder: Path) -> Array:
    return Dataset(folder, read_manifest(folder).tokens).read(0)[0]


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


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
        yield Document("x", (Part("the fox"),))

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


def test_equal_texts_fall_on_the_same_side(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = [json.dumps({"text": text(i % 50)}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, "--heldout", "0.3")
    for split in ("train", "heldout"):
        assert read_manifest(tmp_path / "d" / split).documents % 4 == 0


@pytest.mark.parametrize(("processes", "share"), [("1", 1e-6), ("2", 1e-6), ("1", 0.02)])
def test_of_few_documents_a_share_of_the_text_is_held_out(
    processes: str,
    share: float,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = sorted((text(i) for i in range(7)), key=lambda t: pack.place(t.encode()))
    texts[:0] = [next(t for t in map(str, range(10**4)) if 0.02 < pack.place(t.encode()) < 0.03)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts[::-1]))
    words = ["--heldout", f"{share}", "--processes", processes]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    said = capsys.readouterr().err
    held = tokens_of(tmp_path / "d" / "heldout").tolist()
    count = 1
    while sum(map(len, texts[:count])) < share * sum(map(len, texts)):
        count += 1
    assert count == (1 if share < 0.01 else 2)  # the first is a few digits
    assert held == eos_behind(tokenizer_file, texts[:count][::-1])
    trained = tokens_of(tmp_path / "d" / "train").tolist()
    assert trained == eos_behind(tokenizer_file, texts[count:][::-1])
    assert "none of the 8 documents was held out for evaluation: packing again, to ho" in said
    assert not (tmp_path / "d" / "journal.json").exists()


def test_what_can_be_read_once_is_not_packed_again(
    tmp_path: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the fox\n" * 20_000)))
    words = ["pack", "-", "--tokenizer", str(tokenizer_file), "-o", str(tmp_path / "d")]
    assert cli.main([*words, "--processes", "1", "--heldout", "1e-9"]) == 1
    assert "none of the 4 documents was held out for evaluation: give" in capsys.readouterr().err


def test_held_out_documents_that_training_text_nearly_has_are_dropped(
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [f"word{i}" for i in range(30 * 40)]
    first = [" ".join(words[30 * i : 30 * i + 30]) for i in range(40)]
    texts = [*first, *(f"{t} and more" for t in first)]  # each near one other
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    held = {t for t in texts if pack.is_held_out(t.encode(), 0.5)}
    seen = {t for t, other in zip(texts, texts[40:] + texts[:40], strict=True) if other not in held}
    folders = [tmp_path / "all", tmp_path / "one", tmp_path / "two"]
    flag = "--drop-near-duplicates"
    for out, arguments in zip(folders, ([], [flag], [flag, "--processes", "2"]), strict=True):
        assert run(tmp_path / "a.jsonl", out, tokenizer_file, "--heldout", "0.5", *arguments) == 0
        monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 7)
    said = re.findall("left out: .*", capsys.readouterr().out)
    assert said[0].endswith("empty documents")
    assert all(line.endswith(f", {len(held & seen)} near-duplicates") for line in said[1:])
    assert len(held & seen) > 5 and len(held - seen) > 5
    kept = [t for t in texts if t in held - seen]
    expected = eos_behind(tokenizer_file, kept)
    assert tokens_of(folders[1] / "heldout").tolist() == expected
    assert contents(folders[1]) == contents(folders[2])
    train = [contents(folder / "train") for folder in folders[:2]]
    assert train[0] == train[1]
    monkeypatch.setattr("sys.stdin", None)  # not even looked at
    words = ["pack", "-", "--tokenizer", str(tokenizer_file), "-o", str(tmp_path / "no"), flag]
    assert cli.main(words) == 1
    assert "reads the texts three times: give files, not -" in capsys.readouterr().err


def test_dropping_every_held_out_document_is_an_error(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [f"{' '.join(f'word{i}' for i in range(30))} {n}" for n in range(100)]
    held = next(t for t in pair if pack.is_held_out(t.encode(), 0.5))
    rest = next(t for t in pair if not pack.is_held_out(t.encode(), 0.5))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in (held, rest)))
    words = ["--heldout", "0.5", "--drop-near-duplicates"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 1
    assert "all 1 held-out documents are near-duplicates" in capsys.readouterr().err


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
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 20)
    monkeypatch.setattr(pack, "JOURNAL_SECONDS", 0.0)
    original, encoded = pack.Encoder.encode, 0

    def encode(self: pack.Encoder, document: Any) -> Any:
        nonlocal encoded
        encoded += 1
        if encoded == 230:
            raise KeyboardInterrupt
        return original(self, document)

    monkeypatch.setattr(pack.Encoder, "encode", encode)
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
    assert encoded == 230 + 432 - 220
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
    for module in (manifest, pack):
        monkeypatch.setattr(module, "replace_durably", lambda path, data: path.write_bytes(data))
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
    assert document_of({"prompt": "a", "completion": "b"}, "x", "text").content == b"a\0b"
    # as in Cosmopedia: what a text was asked for with, and the text
    assert document_of({"prompt": "a", "text": "b"}, "x", "text").parts == (Part("b"),)
    for record in ({"prompt": "a"}, {"prompt": "a", "text": "b", "completion": None}):
        with pytest.raises(ValueError, match="must both be strings"):
            document_of(record, "x", "text")
    parts = list(chat([{"role": "system", "content": "s"}]))
    assert [p.control for p in parts] == [True, False, True]
    assert not any(p.predict for p in parts)


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


def eos_behind(tokenizer_file: Path, texts: list[str]) -> list[int]:
    t = Tokenizer.load(tokenizer_file)
    return [i for text in texts for i in [*t.encode_ordinary(text), t.special_tokens["<|eos|>"]]]


def test_rows_of_csv_json_and_parquet_are_documents(tmp_path: Path, tokenizer_file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.csv").write_text('\ufeffid,text\n1,"one, two\nthree"\n2,four\n', "utf-8")
    (tmp_path / "b.tsv").write_text("text\tid\nfive\t1\n", "utf-8")
    (tmp_path / "c.json").write_text(json.dumps([{"text": "six"}, {"text": "seven"}]))
    (tmp_path / "d.json").write_text('{"text": "no list"}')
    (tmp_path / "e.json").write_text("[1, // no JSON\n")
    said = {"role": ["user", "assistant"], "content": ["hi", "ho"]}
    chat_of = [{k: said[k][i] for k in said} for i in range(2)]
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [chat_of], "id": [1]}), tmp_path / "f.parquet"
    )
    out = tmp_path / "out"
    assert run(tmp_path / "[a-e].*", out / "a", tokenizer_file, "--heldout", "0") == 0
    texts = ["one, two\nthree", "four", "five", "six", "seven", '{"text": "no list"}']
    expected = eos_behind(tokenizer_file, [*texts, "[1, // no JSON\n"])
    assert tokens_of(out / "a" / "train").tolist() == expected
    assert run(tmp_path / "f.parquet", out / "f", tokenizer_file, "--heldout", "0") == 0
    (tmp_path / "f.jsonl").write_text(json.dumps({"messages": chat_of}))
    assert run(tmp_path / "f.jsonl", out / "g", tokenizer_file, "--heldout", "0") == 0
    assert contents(out / "f" / "train") == contents(out / "g" / "train")


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
        kept = ["one", "four"] if "item" in message else ["four"]
        assert tokens_of(tmp_path / "e" / "train").tolist() == eos_behind(tokenizer_file, kept)


def test_a_long_json_text_is_cut_as_others_are(tmp_path: Path, tokenizer_file: Path) -> None:
    words = " ".join(f"word{i}" for i in range(40_000))
    for name in ("a.json", "a.txt"):
        (tmp_path / name).write_text(json.dumps({"text": words}))
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


def test_packing_ends_behind_so_many_characters(tmp_path: Path, tokenizer_file: Path) -> None:
    texts = ["äöü" * 4, "x" * 10, "y" * 10, "z"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    words = ["--heldout", "0", "--max-chars", "22"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    expected = eos_behind(tokenizer_file, texts[:2])
    assert tokens_of(tmp_path / "d" / "train").tolist() == expected
    assert run(tmp_path / "a.jsonl", tmp_path / "e", tokenizer_file, "--max-chars", "0") == 1
