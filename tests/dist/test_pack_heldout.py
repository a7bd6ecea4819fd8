"""Packing: which texts are held out, also of few, and what is dropped."""

import io
import json
import re
from pathlib import Path

import pytest

from dist import cli, pack
from dist.heldout import is_held_out, place
from dist.shards import read_manifest
from tests.helpers.packing import contents, eos_behind, interrupt, run, tokens_of
from tests.helpers.runs import text


def test_equal_texts_fall_on_the_same_side(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = [json.dumps({"text": text(i % 50)}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, "--heldout", "0.3")
    for split in ("train", "heldout"):
        assert read_manifest(tmp_path / "d" / split).documents % 4 == 0


def a_text(size: int, low: float, high: float) -> str:
    """Return a text of so many characters whose hash lies between two fractions."""
    tried = (f"{i} {'fox ' * size}"[:size] for i in range(10**5))
    return next(t for t in tried if low < place(t.encode()) < high)


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("share", "which"),
    [
        (1e-6, [1]),  # the shortest
        (0.208, [1, 3]),  # those that fit, in the order of their hashes
        (0.42, [1, 2, 3]),
        (0.272, [1, 3, 4]),  # and the shortest of the others, where that comes nearer
    ],
)
def test_of_few_documents_a_share_of_the_text_is_held_out(
    processes: str,
    share: float,
    which: list[int],
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [600, 100, 300, 100, 50]
    texts = [a_text(size, 0.5 + i / 10, 0.6 + i / 10) for i, size in enumerate(sizes)]
    order = [4, 4, 3, 2, 1, 0, 4]  # equal ones count together
    lines = [json.dumps({"text": t}) for t in ["", *(texts[i] for i in order)]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["--heldout", f"{share}", "--processes", processes]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    said = capsys.readouterr().err
    for split, held in (("heldout", True), ("train", False)):
        expected = eos_behind(tokenizer_file, [texts[i] for i in order if (i in which) == held])
        assert tokens_of(tmp_path / "d" / split).tolist() == expected
    assert said.startswith(
        "myllm pack: none of the 7 documents was held out for evaluation: packing again, to hold "
        f"out {share:g} of the text"
    )
    assert not (tmp_path / "d" / "journal.json").exists()


def test_what_the_hashes_leave_far_too_short_is_filled_up_by_size(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny row that is drawn by its hash does not stand for a hundredth of many long texts."""
    texts = [a_text(5, 0.0, 0.01), *(a_text(900, i / 50, i / 50 + 0.02) for i in range(3, 43))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, "--heldout", "0.05") == 0
    said = capsys.readouterr().err
    assert said.startswith("myllm pack: 5 of 36,005 bytes were held out: packing again, to hold")
    held, trained = (len(tokens_of(tmp_path / "d" / split)) for split in ("heldout", "train"))
    assert 0.03 < held / (held + trained) < 0.07


def test_equal_texts_alone_leave_nothing_to_hold_out(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': a_text(50, 0.5, 1)})}\n" * 3)
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file) == 1
    said = capsys.readouterr().err
    assert "none of the 3 documents was held out for evaluation: give" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "places", "share", "told"),
    [
        ([2000, 10], (0.0, 0.1), 0.1, True),  # the long one is drawn
        ([600, 1000], (0.0, 0.1), 0.1, True),
        ([2000, 10], (0.2, 0.3), 0.1, True),  # too little
        ([50, 150], (0.0, 0.1), 0.2, False),
        ([400, 1000], (0.2, 0.3), 0.2, False),
        ([900, 100], (0.0, 0.5), 0.6, True),  # not twice as much, but hardly any is left
    ],
)
def test_a_share_that_is_far_from_what_was_asked_for_is_told(
    sizes: list[int],
    places: tuple[float, float],
    share: float,
    told: bool,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [a_text(sizes[0], *places), a_text(sizes[1], 0.7, 1.0)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    words = ["--heldout", f"{share}"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    said = capsys.readouterr().err
    held, rest = (len(tokens_of(tmp_path / "d" / split)) for split in ("heldout", "train"))
    figures = f"{held:,} of {held + rest:,} tokens were held out, {held / (held + rest):.2g} of"
    assert (f"{figures} them, where --heldout asks for {share:g}: " in said) == told
    assert said.count("tokens were held out") == told


def test_what_was_said_is_not_said_again_where_all_is_packed_again(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"text": a_text(100, i / 10, i / 10 + 0.1)}) for i in range(3, 7)]
    (folder / "a.jsonl").write_text("\n".join([lines[0], "{bad", *lines[1:]]))
    (folder / "b.zip").write_bytes(b"PK")
    words = ["--heldout", "0.25", "--skip-bad-lines"]
    assert run(folder, tmp_path / "d", tokenizer_file, *words) == 0
    passed_over, bad, again = capsys.readouterr().err.splitlines()
    assert "b.zip" in passed_over and "a.jsonl, line 2: " in bad and "packing again" in again


def test_packing_again_goes_on_where_it_was_interrupted(
    tmp_path: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [a_text(100, i / 10, i / 10 + 0.1) for i in range(3, 7)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    whole, parts = ((tmp_path / "a.jsonl", tmp_path / d, tokenizer_file) for d in ("d", "e"))
    words = ["--heldout", "0.25"]
    assert run(*whole, *words) == 0
    interrupt(monkeypatch, batch=1, document=4 + 3)
    assert run(*parts, *words) == 130
    capsys.readouterr()
    assert run(*parts, *words) == 0
    assert capsys.readouterr().err == f"myllm pack: going on after 2 documents in {parts[1]}\n"
    assert contents(whole[1]) == contents(parts[1])


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
    held = {t for t in texts if is_held_out(t.encode(), 0.5)}
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
    held = next(t for t in pair if is_held_out(t.encode(), 0.5))
    rest = next(t for t in pair if not is_held_out(t.encode(), 0.5))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in (held, rest)))
    words = ["--heldout", "0.5", "--drop-near-duplicates"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 1
    assert "all 1 held-out documents are near-duplicates of training text: give more" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("held_by_hash", [False, True])
def test_of_few_documents_one_is_held_out_that_no_other_nearly_has(
    held_by_hash: bool,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shortest have a twin each; so does the one that its hash would hold out."""
    share, low = 0.1, 0.0 if held_by_hash else 0.1

    def a_version(of: int, low: float, high: float) -> str:
        words = " ".join(f"word{100 * of + i}" for i in range(30 + 10 * of))
        return next(t for i in range(10**5) if low < place((t := f"{words} {i}").encode()) < high)

    twins = [a_version(of, at, 1) for of in range(3) for at in (share, 0.5)]
    alone = [a_version(of, share, 1) for of in range(3, 6)]
    first = a_version(0, low, share) if held_by_hash else twins[0]
    texts = [first, *twins[1:], *alone]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    words = ["--heldout", f"{share}", "--drop-near-duplicates"]
    assert run(tmp_path / "a.jsonl", tmp_path / "d", tokenizer_file, *words) == 0
    expected = eos_behind(tokenizer_file, alone[:1])
    assert tokens_of(tmp_path / "d" / "heldout").tolist() == expected
    trained = [t for t in texts if t != alone[0] and not (held_by_hash and t == first)]
    assert tokens_of(tmp_path / "d" / "train").tolist() == eos_behind(tokenizer_file, trained)
    assert "packing again, to hold out 0.1 of the text" in capsys.readouterr().err

    monkeypatch.setattr(pack, "COMPARED_BYTES", 100)  # more than can be held against each other
    assert run(tmp_path / "a.jsonl", tmp_path / "no", tokenizer_file, *words) == 1
    assert "give more documents, a larger --heldout" in capsys.readouterr().err
