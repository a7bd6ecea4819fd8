"""What is packed or described: nothing damaged, another's or undeclared is accepted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import checkpoint, cli, pack, shards
from dist.config import RunFile, from_tables
from dist.lock import locked
from dist.manifest import crc32
from dist.shards import Dataset, check_crcs
from tests.helpers.damage import contents, edit, flip, words
from tests.helpers.runs import (
    random_walk,
    save_run_file,
    tables,
    train,
    write_dataset,
)

Said = pytest.CaptureFixture[str]


def test_two_packings_cannot_write_to_one_folder(texts: Path, tmp_path: Path, capsys: Said) -> None:
    with locked(tmp_path / "d", "packing"):
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
        (lambda f: f.update(format_version=4), "version 4"),
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
    if at == "journal.json":  # all is there but the end of the journal

        def unlink(self: Path, missing_ok: bool = False) -> None:
            if self.name == at:
                raise KeyboardInterrupt
            os.unlink(self)

        monkeypatch.setattr(Path, "unlink", unlink)
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


def test_another_tokenizer_is_refused_wherever_one_is_read(
    texts: Path, tmp_path: Path, capsys: Said
) -> None:
    assert cli.main([*words(texts, tmp_path), "--processes", "1"]) == 0
    raw = tables(tmp_path, model__vocab_size=320, run__out=str(tmp_path / "run"))
    path = tmp_path / "run.toml"
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


def test_crcs_are_the_same_where_zlib_ng_is_missing() -> None:
    code = "import sys\nsys.modules['zlib_ng'] = None\nfrom dist.manifest import crc32\n"
    code += "print(crc32(b'the quick brown fox', 7), crc32.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(crc32(b"the quick brown fox", 7)), "zlib"]
    assert crc32.__module__ != "zlib"
