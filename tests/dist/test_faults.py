"""What is damaged, missing, swapped or another's: nothing wrong is accepted, nothing is lost."""

import errno
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import checkpoint, cli, pack, shards
from dist.comm import Solo
from dist.config import RunFile
from dist.lock import locked
from dist.shards import Dataset, check_crcs
from dist.train import StopRequest, Trainer
from tests.helpers.runs import (
    digest,
    prepare,
    random_walk,
    save_run_file,
    tables,
    text,
    train,
    with_run,
    write_dataset,
)
from tokenizer import train_from_iterator

Said = pytest.CaptureFixture[str]


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


# ---- packed folders ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, another one of the same size, and two corpora."""
    folder = tmp_path_factory.mktemp("texts")
    for name, first in (("one", 0), ("two", 5000)):
        train_from_iterator([text(first + i) for i in range(99)], 320).save(folder / f"{name}.tok")
        lines = [json.dumps({"text": text(first + i)}) for i in range(3000)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def words(texts: Path, out: Path, name: str = "one") -> list[str]:
    tokenizer = str(texts / "one.tok")
    return ["pack", str(texts / f"{name}.jsonl"), "--tokenizer", tokenizer, "-o", str(out)]


def test_two_packings_cannot_write_to_one_folder(texts: Path, tmp_path: Path, capsys: Said) -> None:
    with locked(tmp_path / "d" / pack.LOCK, "packing"):
        assert cli.main([*words(texts, tmp_path / "d"), "--processes", "1"]) == 1
    assert "another packing is writing to" in capsys.readouterr().err
    environment = {**os.environ, "PYTHONPATH": str(Path(pack.__file__).parents[1])}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "dist", *words(texts, tmp_path / "d", name), "--processes=1"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in ("one", "two")
    ]
    assert 0 in [process.wait(timeout=100) for process in both]
    for split in ("train", "heldout"):
        assert check_crcs(tmp_path / "d" / split) == 1


def test_a_block_is_checked_when_it_is_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BLOCK", 256)
    ids = random_walk(1900)
    folder = write_dataset(tmp_path / "d", ids, ids % 2 > 0)
    flip(folder / "00001.bin", shards.HEADER_BYTES + 300)  # token 150 of 700, of 128 to 256
    flip(folder / "00002.mask", shards.HEADER_BYTES + 499)
    dataset = Dataset(folder, 10)
    for window in range(190):
        start, stop = 10 * window, 10 * window + 10
        inside = start < 700 + 256 and stop > 700 + 128
        masked = start < 1400 + 500 and stop > 1400 + 256
        if inside or masked:
            name, at = ("00001.bin", "1,280") if inside else ("00002.mask", "1,280")
            with pytest.raises(ValueError, match=f"{name} has changed .* bytes from {at} on"):
                dataset.read(window)
        else:
            got, mask = dataset.read(window)
            np.testing.assert_array_equal(got, ids[start:stop])
            np.testing.assert_array_equal(mask, ids[start:stop] % 2 > 0)
    with pytest.raises(ValueError, match=r"00001\.bin has changed"):
        check_crcs(folder)
    flip(folder / "00000.bin", 999)  # of the header, where nothing stands
    with pytest.raises(ValueError, match=r"00000\.bin has a damaged header, at byte 999"):
        Dataset(folder, 10)


def packed(folder: Path) -> Any:
    return Dataset(folder, 12).manifest


def saved(folder: Path) -> Any:
    return checkpoint.read_manifest(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    config = prepare(folder, run__checkpoint_every=3, run__keep=9)
    assert train(config) == 0
    return config


@pytest.fixture
def run(trained: RunFile, tmp_path: Path) -> RunFile:
    """A copy of it that can be damaged."""
    shutil.copytree(Path(trained.run.out).parent, tmp_path / "copy")
    out = tmp_path / "copy" / "run"
    return with_run(trained, out=str(out))


def folders(run: RunFile) -> list[tuple[Path, Callable[[Path], Any]]]:
    base = Path(run.run.out)
    return [(base.parent / "train", packed), (base / "checkpoints" / "step-00000006", saved)]


def test_a_changed_byte_of_a_manifest_is_refused_or_changes_nothing(run: RunFile) -> None:
    for folder, read in folders(run):
        path = folder / "manifest.json"
        whole, raw = read(folder), path.read_bytes()
        refused = 0
        for at in range(0, len(raw), 3):
            flip(path, at)
            try:
                assert read(folder) == whole  # white space, say
            except ValueError as error:
                assert str(path) in str(error)
                refused += 1
            path.write_bytes(raw)
        assert refused > 0.9 * len(raw) / 3


def test_an_edited_value_of_a_manifest_is_refused(run: RunFile) -> None:
    for folder, read in folders(run):
        path = folder / "manifest.json"
        raw = path.read_bytes()
        for key, value in json.loads(raw).items():
            other = {int: lambda v: v + 1, str: lambda v: v + "0", list: lambda v: v[:-1]}
            change = other.get(type(value), lambda v: {} if v else {"a": 1})
            changed = {key: change(value)}
            edit(path, lambda fields, changed=changed: fields.update(changed))
            with pytest.raises(ValueError, match=r"manifest\.json"):
                read(folder)
            edit(path, lambda fields, k=key: fields.pop(k))
            with pytest.raises(ValueError, match=r"manifest\.json"):
                read(folder)
            path.write_bytes(raw)


def as_version_1(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a manifest as it was before it had a checksum."""

    def older(fields: dict[str, Any]) -> None:
        del fields["checksum"]
        fields["format_version"] = 1
        for entry in fields.get("shards", []):
            shard, mask = (path.parent / entry["name"]).with_suffix(".bin"), entry["mask"]
            entry["crc32"] = shards._file_crc(shard)
            entry["mask_crc32"] = shards._file_crc(shard.with_suffix(".mask")) if mask else None
            del entry["crcs"], entry["mask_crcs"]
        change(fields)

    edit(path, older)


def test_what_an_older_version_wrote_is_read_and_what_is_unchecked_is_said(
    run: RunFile, capsys: Said
) -> None:
    data = Path(run.run.out).parent / "train"
    longer = ["--set", "train.steps=7", "--set", f"data.train={data}", "--changed"]
    for folder, _ in folders(run):
        as_version_1(folder / "manifest.json", lambda fields: None)
    assert train(run, *longer) == 0
    said = capsys.readouterr().out
    assert said.count("was packed by an older version") == 1
    assert said.count("was saved by an older version: nothing checks its manifest.json") == 1
    assert check_crcs(data) == 6
    flip(data / "00001.bin", 1500)
    with pytest.raises(ValueError, match=r"00001\.bin has changed"):
        check_crcs(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["shards"][0].update(name="../../00000.bin"), r"at `\$\.shards\[0\]\.name`"),
        (lambda f: f["shards"][0].update(tokens="700"), r"at `\$\.shards\[0\]\.tokens`"),
        (lambda f: f.update(tokens=10**400), "is damaged"),
        (lambda f: f.update(tokens=f["tokens"] + 1), "do not add up"),
        (lambda f: f.update(surprise=1), "unknown field `surprise`"),
        (lambda f: f.update(format_version=3), "version 3"),
        (lambda f: f.update(format_version="1"), "version '1'"),
    ],
)
def test_a_manifest_holds_what_is_declared_and_nothing_else(
    run: RunFile, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    (data, _), _ = folders(run)
    as_version_1(data / "manifest.json", change)
    with pytest.raises(ValueError, match=message):
        Dataset(data, 12)
    (data / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        Dataset(data, 12)


def test_a_shortened_list_of_crcs_does_not_switch_checking_off(run: RunFile) -> None:
    _, (path, _) = folders(run)
    as_version_1(path / "manifest.json", lambda fields: fields["crc32"].update(m=[]))
    with pytest.raises(ValueError, match="does not have a CRC for each block"):
        saved(path)


def test_packing_leaves_what_it_did_not_write(texts: Path, tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "d" / "train").mkdir(parents=True)
    theirs = tmp_path / "d" / "train" / "00007.bin"
    theirs.write_bytes(b"mine")
    assert cli.main([*words(texts, tmp_path / "d"), "--processes", "1"]) == 1
    said = capsys.readouterr().err
    assert "00007.bin was not left by an unfinished packing" in said and said.count("\n") == 1
    assert theirs.read_bytes() == b"mine"
    theirs.rename(theirs.with_name("7.bin"))
    assert cli.main([*words(texts, tmp_path / "d"), "--processes", "1"]) == 0
    assert theirs.with_name("7.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("at", ["tokenizer.myllm", "train/manifest.json", "journal.json"])
def test_a_packing_killed_at_its_end_goes_on(
    texts: Path, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = [*words(texts, tmp_path / "whole")], [*words(texts, tmp_path / "parts")]
    assert cli.main([*whole, "--processes", "1"]) == 0
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if str(target).endswith(at) and "journal" not in at:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    monkeypatch.setattr(pack, "replace_durably", lambda path, data: path.write_bytes(data))
    if at == "journal.json":  # all is there but the end of the journal

        def unlink(self: Path, missing_ok: bool = False) -> None:
            if self.name == at:
                raise KeyboardInterrupt
            os.unlink(self)

        monkeypatch.setattr(Path, "unlink", unlink)
    elif at == "tokenizer.myllm":

        def stop(path: Path, data: bytes) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pack, "replace_durably", stop)
    assert cli.main([*parts, "--processes", "1"]) == 130
    monkeypatch.undo()

    def killed_again(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as again:  # while it is taken up, it is not taken for whole
        again.setattr(pack, "encode_all", killed_again)
        assert cli.main([*parts, "--processes", "1"]) == 130
    for split in ("train", "heldout"):
        with pytest.raises(FileNotFoundError, match="packing did not finish"):
            Dataset(tmp_path / "parts" / split, 1)
    assert cli.main([*parts, "--processes", "1"]) == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_a_damaged_journal_begins_anew(texts: Path, tmp_path: Path, capsys: Said) -> None:
    for broken in ("{", '{"mark": 1}', "[" * 99_999, ""):
        out = tmp_path / str(len(broken))
        out.mkdir()
        (out / "journal.json").write_text(broken)
        assert cli.main([*words(texts, out), "--processes", "1"]) == 0
        assert "packing from the start" in capsys.readouterr().err
        assert check_crcs(out / "train") == 1


# ---- tokenizers ----------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_wherever_one_is_read(
    texts: Path, tmp_path: Path, capsys: Said
) -> None:
    assert cli.main([*words(texts, tmp_path), "--processes", "1"]) == 0
    raw = tables(tmp_path, model__vocab_size=320, run__out=str(tmp_path / "run"))
    path = tmp_path / "run.toml"
    from dist.config import from_tables

    config = from_tables(raw)
    save_run_file(config, path)
    assert cli.main(["train", str(path)]) == 0
    beside = {
        "data": tmp_path / "train" / "tokenizer.myllm",
        "run": checkpoint.find(tmp_path / "run") / "tokenizer.myllm",
    }
    for where, commands in {
        "data": [["train", str(path)], ["pack", "--check", str(tmp_path / "train")]],
        "run": [["eval", str(tmp_path / "run")], ["generate", str(tmp_path / "run"), "--prompt=a"]],
    }.items():
        ours = beside[where].read_bytes()
        for damage, message in (
            (lambda p: p.write_bytes((texts / "two.tok").read_bytes()), "is another tokenizer"),
            (lambda p: p.unlink(), "is missing: put the tokenizer"),
        ):
            damage(beside[where])
            for command in commands:
                backend = ["--backend", "reference"] if where == "run" else []
                capsys.readouterr()
                assert cli.main([*command, *backend]) == 1
                said = capsys.readouterr().err
                assert message in said and str(beside[where]) in said and said.count("\n") == 1
            beside[where].write_bytes(ours)
        for command in commands:
            assert cli.main([*command, *(["--backend", "reference"] * (where == "run"))]) == 0


# ---- the folder of a run -------------------------------------------------------------------------


def test_a_missing_latest_does_not_begin_anew_over_checkpoints(run: RunFile, capsys: Said) -> None:
    folder = Path(run.run.out) / "checkpoints"
    before = digest(run)
    (folder / "latest").unlink()
    assert train(run) == 0
    assert "going on after step 6" in capsys.readouterr().out
    assert digest(run) == before
    assert train(run, "--from", "step-3") == 0
    assert "going on after step 3" in capsys.readouterr().out
    assert digest(run) == before  # it took the same way again
    assert train(run, "--from", "step-5") == 1
    assert "has no checkpoint 'step-5'; there are: step-00000003" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["../../elsewhere", "step-00000003-mine", "", "/tmp", "step-3"])
def test_latest_names_a_checkpoint_of_its_own_folder(
    run: RunFile, content: str, capsys: Said
) -> None:
    (Path(run.run.out) / "checkpoints" / "latest").write_text(content)
    assert train(run) == 1
    said = capsys.readouterr().err
    assert "does not name a checkpoint" in said and said.count("\n") == 1


def test_a_latest_that_is_a_folder_is_one_sentence(run: RunFile, capsys: Said) -> None:
    latest = Path(run.run.out) / "checkpoints" / "latest"
    latest.unlink()
    latest.mkdir()
    assert train(run) == 1
    said = capsys.readouterr().err
    assert "latest: Is a directory" in said and said.count("\n") == 1


def test_a_damaged_newest_checkpoint_leaves_the_older_to_choose(run: RunFile, capsys: Said) -> None:
    before = digest(run)
    flip(Path(run.run.out) / "checkpoints" / "step-00000006" / "v.bin", 99)
    assert train(run) == 1
    said = capsys.readouterr().err
    assert "v.bin is damaged: elements 0 to" in said and "--from step-N" in said
    assert train(run, "--from", "step-00000003") == 0
    assert digest(run) == before


def test_a_renamed_checkpoint_is_refused(run: RunFile, capsys: Said) -> None:
    folder = Path(run.run.out) / "checkpoints"
    shutil.rmtree(folder / "step-00000003")
    (folder / "step-00000006").rename(folder / "step-00000003")
    assert train(run, "--from", "step-3") == 1
    assert "holds the checkpoint of step 6" in capsys.readouterr().err


def test_only_our_own_checkpoints_are_removed(run: RunFile, tmp_path: Path) -> None:
    folder = Path(run.run.out) / "checkpoints"
    kept = tmp_path / "elsewhere"
    (folder / "step-00000003").rename(kept)
    (folder / "step-00000003").symlink_to(kept)
    mine = ["step-00000003-mybackup", "step-00000001", "step-2", "step-00000002.tmp.mine"]
    for name in mine:
        (folder / name).mkdir()
        (folder / name / "notes").write_text("mine")
    (folder / "step-00000001.tmp").symlink_to(kept)
    (folder / "step-00000002.old").mkdir()
    config = with_run(run, keep=1, checkpoint_every=1)
    stop = StopRequest()
    trainer = Trainer(config, Solo(), begin="step-3")
    assert trainer.run(stop) is None
    assert all((folder / name / "notes").read_text() == "mine" for name in mine)
    assert (kept / "manifest.json").exists() and (folder / "step-00000001.tmp").is_symlink()
    assert not (folder / "step-00000002.old").exists()
    assert checkpoint.steps(folder) == [3, 6]  # what the link leads to, and the newest


def test_a_folder_in_the_way_of_a_checkpoint_is_not_removed(run: RunFile, capsys: Said) -> None:
    folder = Path(run.run.out) / "checkpoints"
    shutil.rmtree(folder / "step-00000006")
    (folder / "step-00000006").mkdir()
    (folder / "step-00000006" / "notes").write_text("mine")
    assert train(run, "--from", "step-3") == 1
    assert "is in the way and is no checkpoint" in capsys.readouterr().err
    assert (folder / "step-00000006" / "notes").read_text() == "mine"
    assert checkpoint.pointed(folder) == folder / "step-00000006"


# ---- the disk ------------------------------------------------------------------------------------


def test_a_copy_of_a_run_at_any_fsync_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash leaves: all that was fsynced is there, what follows may be."""
    config = prepare(tmp_path, run__checkpoint_every=2, run__eval_every=2, run__keep=1)
    out, copies = Path(config.run.out), tmp_path / "copies"
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if out.exists():
            shutil.copytree(out, copies / f"{len(list(copies.glob('*'))):03d}")
        sync(descriptor)

    copies.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    assert train(config) == 0
    monkeypatch.undo()
    whole, moments = digest(config), sorted(copies.iterdir())
    assert len(moments) > 20
    for copy in moments:
        resumed = with_run(config, out=str(copy))
        assert train(resumed) == 0
        assert digest(resumed) == whole, copy


def test_a_copy_of_a_packing_at_any_fsync_goes_on_to_the_same_bytes(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copies = tmp_path / "d", tmp_path / "copies"
    few = ["--processes", "1", "--shard-tokens", "20000"]
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        shutil.copytree(out, copies / f"{len(list(copies.glob('*'))):03d}")
        sync(descriptor)

    copies.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(pack, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 1000)
    assert cli.main([*words(texts, out), *few]) == 0
    monkeypatch.undo()
    moments = sorted(copies.iterdir())
    assert len(moments) > 10
    for copy in moments:
        assert cli.main([*words(texts, copy), *few]) == 0
        assert contents(copy) == contents(out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a disk with room for so many KiB, or gives it other room."""
    path = tmp_path / "disk"
    path.mkdir()

    def make(size: int) -> Path:
        remount = ",remount" if os.path.ismount(path) else ""
        options = f"size={size}k{remount}"
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        may = shutil.which("mount") is not None
        if not may or subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("needs mount, and the right to mount a disk")
        return path

    yield make
    if os.path.ismount(path):
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_one_sentence_and_a_run_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Callable[[int], Path], capsys: Said
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=1, run__keep=2)
    assert train(config) == 0
    whole = digest(config)
    for room in (4, 16, 28, 40, 64, 100):
        out = small_disk(room) / str(room)
        capsys.readouterr()
        full = with_run(config, out=str(out))
        (tmp_path / "run.toml").write_text(full.to_toml())
        status = cli.main(["train", str(tmp_path / "run.toml")])
        said = capsys.readouterr().err
        assert (status == 1 and said.count("\n") == 1 and "No space left" in said) or room == 100
        folder = out / "checkpoints"
        assert all(checkpoint.load_master(folder / checkpoint.folder_name(s)).size
                   for s in checkpoint.steps(folder))  # fmt: skip
        small_disk(1000)
        assert cli.main(["train", str(tmp_path / "run.toml")]) == 0
        assert digest(full) == whole
        shutil.rmtree(out)


def test_a_full_disk_ends_a_packing_that_goes_on_when_there_is_room(
    texts: Path, tmp_path: Path, small_disk: Callable[[int], Path], capsys: Said
) -> None:
    assert cli.main([*words(texts, tmp_path / "whole"), "--processes=1"]) == 0
    for room in (4, 20, 60, 100):
        out = small_disk(room) / "d"
        capsys.readouterr()
        assert cli.main([*words(texts, out), "--processes=1"]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "No space left" in said
        small_disk(1000)
        assert cli.main([*words(texts, out), "--processes=1"]) == 0
        assert contents(out) == contents(tmp_path / "whole")
        shutil.rmtree(out)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_disk_that_fails_at_any_write_is_one_sentence_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said, first: int
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=2, run__eval_every=2)
    assert train(config) == 0
    whole, sync, failed = digest(config), os.fsync, 0
    for broken in range(first, 24, 3):
        calls = itertools.count()

        def fsync(descriptor: int, calls: Any = calls, broken: int = broken) -> None:
            if next(calls) == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(descriptor)

        run = with_run(config, out=str(tmp_path / str(broken)))
        capsys.readouterr()
        monkeypatch.setattr(os, "fsync", fsync)
        status = train(run)
        monkeypatch.undo()
        said = capsys.readouterr().err
        assert status == 1 and said.count("\n") == 1 and "Input/output error" in said
        failed += 1
        assert train(run) == 0 and digest(run) == whole
    assert failed == 8


def test_a_disk_that_fails_while_it_is_read_is_one_sentence(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    class Broken(io.FileIO):
        def read(self, *size: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.name))

        readinto = read

    opened = Path.open
    for name in ("00000.bin", "00001.mask", "master.bin", "v.bin"):

        def fails(self: Path, mode: str = "r", *rest: Any, name: str = name, **more: Any) -> Any:
            raw = self.name == name and more.get("buffering") == 0
            return Broken(self, "rb") if raw else opened(self, mode, *rest, **more)

        monkeypatch.setattr(Path, "open", fails)
        status = train(run, "--set", "train.steps=8", "--changed")
        monkeypatch.undo()
        said = capsys.readouterr().err
        assert status == 1 and said.count("\n") == 1
        assert name in said and "Input/output error" in said


def test_a_disk_that_became_read_only_is_one_sentence(
    tmp_path: Path, small_disk: Callable[[int], Path], capsys: Said
) -> None:
    disk = small_disk(1000)
    config = prepare(tmp_path, run__checkpoint_every=3, run__out=str(disk / "run"))
    path = save_run_file(config, tmp_path / "run.toml")
    assert cli.main(["train", str(path)]) == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    capsys.readouterr()
    assert cli.main(["train", str(path), "--set", "train.steps=8", "--changed"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Read-only file system" in said
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert cli.main(["train", str(path), "--set", "train.steps=8", "--changed"]) == 0


# ---- every file ----------------------------------------------------------------------------------


def damages(path: Path, other: Path) -> dict[str, Callable[[], None]]:
    """Return what may become of a file: another of its kind lies at ``other``."""
    raw = path.read_bytes()
    middle = len(raw) // 2
    return {
        "flipped": lambda: flip(path, middle),
        "cut": lambda: path.write_bytes(raw[:middle]),
        "empty": lambda: path.write_bytes(b""),
        "longer": lambda: path.write_bytes(raw + b"\0\0"),
        "gone": path.unlink,
        "another's": lambda: path.write_bytes(other.read_bytes()),
    }


def test_no_damage_to_a_file_is_accepted_in_silence(run: RunFile, capsys: Said) -> None:
    """It is refused and named, or it changes nothing of what the run learns."""
    base = Path(run.run.out)
    longer = with_run(run, out=str(base))
    command = ["--set", "train.steps=7", "--changed"]
    for place in ("train", "heldout"):  # this run's own copies
        command += ["--set", f"data.{place}={base.parent / place}"]
    pristine = base.parent.parent / "pristine"
    shutil.copytree(base.parent, pristine)
    assert train(longer, *command) == 0
    whole = checkpoint.load_master(checkpoint.find(base / "checkpoints/step-00000007"))
    harmless = set()
    files = sorted(p.relative_to(pristine) for p in pristine.rglob("*") if p.is_file())
    passed = ("step-00000003", "lock")  # an older checkpoint, and a file without content
    newest = [p for p in files if not set(passed) & set(p.parts) and p.suffix != ".toml"]
    assert len(newest) > 14
    for name in newest:
        alike = [p for p in files if p.suffix == name.suffix and p != name]
        other = (alike or files)[0]
        for what in damages(pristine / name, pristine / other):
            shutil.rmtree(base.parent)
            shutil.copytree(pristine, base.parent)
            damages(base.parent / name, pristine / other)[what]()
            capsys.readouterr()
            status = train(longer, *command)
            said = capsys.readouterr().err
            if status == 0:
                harmless.add((str(name), what))
                got = checkpoint.load_master(base / "checkpoints/step-00000007")
                np.testing.assert_array_equal(got, whole)
            else:
                # it is named, or what is beside it and does not fit
                named = str((base.parent / name).parent) in said
                assert status == 1 and said.count("\n") == 1 and named, (name, what, said)
    # a lock has no content; the newest checkpoint is found without latest; what a metrics file lost
    # is not needed; a shard's damage in a block that the run did not read is not seen
    loose = {name for name, _ in harmless}
    assert not {n for n in loose if n.endswith(("master.bin", "m.bin", "v.bin", "manifest.json"))}
    assert not {n for n in loose if n.endswith((".bin", ".mask")) and "heldout" not in n}
