"""Shards and windows: what is on disk, what is read, and what damaged files say."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist import shards
from dist.config import from_tables
from dist.data import TrainingData, Windows, make_batch
from dist.shards import Dataset
from dist.writer import ShardWriter, WriterState
from tests.helpers.damage import flip
from tests.helpers.runs import EOS, VOCAB, prepare, random_walk, tables, write_dataset


def test_the_headline_corpus_is_1530776_windows_and_25_gb() -> None:
    tokens = 1_530_776 * 8_192
    assert tokens * shards.dtype_for(65_536).itemsize == 25_080_233_984


def test_the_header_is_that_of_llm_c() -> None:
    head = np.frombuffer(shards.header(np.uint16, 77), "<i4")
    assert len(head) == 256 and head[:3].tolist() == [20240520, 1, 77] and not head[3:].any()
    head = np.frombuffer(shards.header(np.uint32, 78), "<i4")
    assert head[:3].tolist() == [20240801, 7, 78]
    assert shards.dtype_for(65_537) == np.uint32


@given(st.data())
def test_windows_are_the_stream_cut_up_whatever_the_shards(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    folder = tmp_path_factory.mktemp("data")
    n, window = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 50))
    ids = random_walk(n)
    predict = ids % 3 > 0
    writer = ShardWriter(folder, VOCAB, data.draw(st.integers(1, 150)))
    cuts = data.draw(st.sets(st.integers(1, n)))
    start = 0
    for stop in [*sorted(cuts), n]:
        masked = predict[start:stop]
        writer.write(ids[start:stop], None if masked.all() else masked)
        start = stop
    writer.finish(vocab_size=VOCAB, eos=EOS, window=None, documents=1, tokenizer_sha256="")
    if n < window:
        with pytest.raises(ValueError, match="less than one window"):
            Dataset(folder, window)
        return
    dataset = Dataset(folder, window)
    assert dataset.n_windows == n // window
    for i in range(dataset.n_windows):
        got, mask = dataset.read(i)
        np.testing.assert_array_equal(got, ids[i * window : (i + 1) * window])
        np.testing.assert_array_equal(mask, predict[i * window : (i + 1) * window])
    assert got.dtype == np.int32 and mask.dtype == np.bool_
    with pytest.raises(IndexError):
        dataset.read(dataset.n_windows)


def test_targets_are_the_next_tokens_and_the_last_has_none() -> None:
    ids = np.array([5, 6, EOS, 7, EOS, 8], np.int32)
    predict = np.array([1, 0, 1, 1, 0, 1], np.bool_)
    batch = make_batch([(ids, predict)], eos=EOS)
    assert batch.targets[0, :-1].tolist() == ids[1:].tolist()
    # mask[b, t] guards predicting targets[b, t], so it is indexed by the predicted token
    assert batch.mask[0].tolist() == [False, True, True, False, True, False]
    assert batch.documents is not None
    assert batch.documents[0].tolist() == [0, 0, 0, 1, 1, 2]
    assert make_batch([(ids, predict)]).documents is None


def test_a_run_reads_its_windows_in_the_order_of_the_bijection(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    data = TrainingData(config)
    whole = Dataset(tmp_path / "train", 12)
    for position in (0, 3, 47):
        batch = data.batch(position, 1)
        ids, predict = whole.read(data.order[position].window)
        np.testing.assert_array_equal(batch.ids[0], ids)
        np.testing.assert_array_equal(batch.mask[0, :-1], predict[1:])
    four = data.batch(8, 4)
    np.testing.assert_array_equal(four.ids[2], data.batch(10, 1).ids[0])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: cut(f / "00001.bin", 900), "has a damaged header"),
        (lambda f: cut(f / "00001.bin", 1500), "is cut short; pack it again"),
        (lambda f: cut(f / "00001.bin", 0), r"00001\.bin is empty"),
        (lambda f: cut(f / "00001.mask", 1200), "does not fit 00001.bin of 700 tokens"),
        (lambda f: (f / "00002.bin").unlink(), "No such file"),
        (lambda f: (f / "manifest.json").unlink(), "packing did not finish"),
        (
            lambda f: (f / "manifest.json").write_text(
                (f / "manifest.json").read_text().replace('"tokens": 500', '"tokens": 501')
            ),
            "manifest.json has changed since it was written",
        ),
        (lambda f: cut(f / "manifest.json", 60), "is damaged"),
        (lambda f: (f / "manifest.json").write_text("{}"), "is not a manifest"),
        (
            lambda f: (f / "00001.bin").write_bytes((f / "00001.bin").read_bytes() + b"xx"),
            "it is too long",
        ),
        (
            lambda f: (f / "00002.bin").write_bytes((f / "00001.bin").read_bytes()),
            "holds 700 tokens, but its manifest says 500",
        ),
    ],
)
def test_a_damaged_folder_is_an_error_at_opening(tmp_path: Path, damage: Any, message: str) -> None:
    ids = random_walk(1900)
    write_dataset(tmp_path / "d", ids, ids % 2 > 0)
    Dataset(tmp_path / "d", 12)
    damage(tmp_path / "d")
    with pytest.raises((ValueError, OSError), match=message):
        Dataset(tmp_path / "d", 12)


def test_a_shard_cut_while_in_use_is_an_error_and_no_crash(tmp_path: Path) -> None:
    dataset = Dataset(write_dataset(tmp_path / "d", random_walk(500)), 12)
    cut(tmp_path / "d" / "00000.bin", 1100)
    with pytest.raises(ValueError, match="cut short while in use"):
        dataset.read(30)


def test_check_finds_one_changed_bit(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_walk(1900), random_walk(1900) > 3)
    assert shards.check_crcs(folder) == 6
    path = folder / "00001.mask"
    raw = bytearray(path.read_bytes())
    raw[1500] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"00001\.mask has changed"):
        shards.check_crcs(folder)


def test_a_byte_that_changed_while_packing_went_on_is_found(tmp_path: Path) -> None:
    """The CRCs are of what was written, not of what lies at the path in the end."""
    ids = random_walk(300)
    writer = ShardWriter(tmp_path / "d", VOCAB, 700)
    writer.write(ids)
    writer.state()  # on the disk
    flip(tmp_path / "d" / "00000.bin", shards.HEADER_BYTES + 99)
    writer.write(ids)
    facts = {"vocab_size": VOCAB, "eos": EOS, "window": None, "documents": 1}
    writer.finish(**facts, tokenizer_sha256=None)
    with pytest.raises(ValueError, match=r"00000\.bin has changed"):
        shards.check_crcs(tmp_path / "d")


def test_foreign_token_files_can_be_read(tmp_path: Path) -> None:
    ids = random_walk(100)
    (tmp_path / "nanogpt.bin").write_bytes(ids.astype("<u2").tobytes())
    raw = shards.header(np.uint32, 100) + ids.astype("<u4").tobytes()
    (tmp_path / "llmc.bin").write_bytes(raw)
    for name in ("nanogpt.bin", "llmc.bin"):
        got, mask = Dataset(tmp_path / name, 30).read(2)
        np.testing.assert_array_equal(got, ids[60:90])
        assert mask.all()
    for name, content in (("odd.bin", b"abc"), ("text.txt", b"abcd")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="no token file"):
            Dataset(tmp_path / name, 1)
    with pytest.raises(FileNotFoundError, match="myllm pack"):
        Dataset(tmp_path / "none.bin", 1)


def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    (tmp_path / "wild.bin").write_bytes(np.full(40, VOCAB, "<u2").tobytes())
    with pytest.raises(ValueError, match=f"window 1 of .*wild.bin holds token id {VOCAB}"):
        Windows(str(tmp_path / "wild.bin"), config).batch(1, 2)
    write_dataset(tmp_path / "big", random_walk(100), vocab_size=VOCAB + 1)
    with pytest.raises(ValueError, match="set it to 41 or more"):
        Windows(str(tmp_path / "big"), config)
    isolating = from_tables(tables(tmp_path, data__isolate_documents=True))
    with pytest.raises(ValueError, match="has no eos"):
        Windows(str(tmp_path / "wild.bin"), isolating)


def test_windows_packed_one_a_document_fit_their_length_only(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", random_walk(100), window=10)
    assert Dataset(tmp_path / "d", 10).n_windows == 10
    with pytest.raises(ValueError, match="packed in windows of 10 tokens"):
        Dataset(tmp_path / "d", 12)


def test_sources_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    write_dataset(tmp_path / "other", random_walk(300), tokenizer_sha256="another")
    phase = {"tokens": 500, "sources": [{"path": str(tmp_path / d)} for d in ("train", "other")]}
    raw = tables(tmp_path, data__train="", data__phases=[phase], train__steps=0)
    with pytest.raises(ValueError, match="same tokenizer"):
        TrainingData(from_tables(raw))
    write_dataset(tmp_path / "other2", random_walk(300))
    phase["sources"][1]["path"] = str(tmp_path / "other2")
    data = TrainingData(from_tables(raw))
    assert len(data.sources) == 2 and len(data.order) == 48


def test_a_state_has_the_names_of_its_files_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("dist.writer.sync_folder", synced.append)
    writer = ShardWriter(tmp_path / "d", VOCAB, 700)
    writer.write(random_walk(100))
    writer.state()
    writer.close()
    assert synced == [tmp_path / "d"]


def test_a_writer_goes_on_from_its_state_with_identical_bytes(tmp_path: Path) -> None:
    ids = random_walk(1000)
    predict = (ids % 5 > 0) | (np.arange(1000) < 300)
    facts = {"vocab_size": VOCAB, "eos": EOS, "window": None, "documents": 1}
    whole = ShardWriter(tmp_path / "whole", VOCAB, 256)
    whole.write(ids, predict)
    whole.finish(**facts, tokenizer_sha256="")
    writer = ShardWriter(tmp_path / "parts", VOCAB, 256)
    writer.write(ids[:700], predict[:700])
    state = msgspec.json.decode(msgspec.json.encode(writer.state()), type=WriterState)
    writer.write(ids[:99])  # lost in the crash
    writer.close()
    writer = ShardWriter(tmp_path / "parts", VOCAB, 256, state)
    assert writer.tokens == 700
    writer.write(ids[700:], predict[700:])
    writer.finish(**facts, tokenizer_sha256="")
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "parts").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
