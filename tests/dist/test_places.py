"""New files: there whole, or not at all, and on the disk."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel import system
from accel.system import fresh_memory
from dist import places
from dist.places import ROOM, new_place, steadily

SIZES = [0, 1, 4095, 4096, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM + 4097]


def refused(file: int, *, on: bool) -> bool:
    return False


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_written_in_pieces_of_any_size(
    size: int, past: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not past:
        monkeypatch.setattr(places, "past_memory", refused)
        monkeypatch.setattr(places, "PAUSE", 0.0)
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    rng, at = np.random.default_rng(1), 0
    with steadily(tmp_path / "file") as file:
        while at < size:
            n = int(rng.choice([1, 13, 4096, 1_000_003, 2 * ROOM]))
            piece = data[at : at + n].copy()
            if at // 2 % 2:
                piece = np.frombuffer(fresh_memory(n), np.uint8)[
                    : len(piece)
                ]  # where a page begins
                piece[:] = data[at : at + n]
            file.write(piece.data)
            piece[:] = 0  # it may change afterwards
            at += len(data[at : at + n])
            assert file.tell() == at
        file.write(b"")
    assert (tmp_path / "file").read_bytes() == data.tobytes()


@pytest.mark.parametrize("past", [True, False])
def test_the_disk_is_waited_for_while_there_is_more_to_be_written(
    past: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not past:
        monkeypatch.setattr(places, "past_memory", refused)
    now, waited = [0.0], []
    fsync = os.fsync

    def slow(file: int) -> None:
        waited.append(now[0])
        now[0] += 3  # as long as three rooms take to be filled
        fsync(file)

    monkeypatch.setattr(places.os, "fsync", slow)
    monkeypatch.setattr(places.time, "monotonic", lambda: now[0])
    with steadily(tmp_path / "file") as file:
        for _ in range(20):
            now[0] += 1
            file.write(bytes(ROOM))
            file._wait()
    *during, last = waited
    assert len(during) == 5 and min(np.diff(during)) > 6  # no more than half of the time
    assert last == now[0] - 3  # and at the end, whatever was before


def test_many_pages_are_written_as_they_lie_and_the_rest_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.frombuffer(fresh_memory(4 * ROOM), np.uint8)
    kept = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    written: list[tuple[int, int]] = []
    put = places.Steady._put

    def seen(self: places.Steady, part: Any) -> None:
        written.append((part.ctypes.data - data.ctypes.data, part.size))
        time.sleep(0.05)
        put(self, part)

    monkeypatch.setattr(places.Steady, "_put", seen)
    pieces = [(0, 4096), (4096, 2 * ROOM + 5), (2 * ROOM, ROOM), (ROOM, 3 * ROOM)]
    with steadily(tmp_path / "file") as file:
        for k, (at, n) in enumerate(pieces):
            data[:] = kept ^ k
            file.write(data[at : at + n].data)
            data[:] = 0  # it may change afterwards
    as_it_lies = [(at, n) for at, n in written if 0 <= at < data.size and n]
    assert as_it_lies == [(4096, 2 * ROOM)]  # what comes behind five bytes has no place of its own
    expected = b"".join((kept[at : at + n] ^ k).tobytes() for k, (at, n) in enumerate(pieces))
    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.parametrize("size", [ROOM + 5, 3 * ROOM])
def test_a_file_system_that_takes_it_back_is_written_through_memory(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some let a file be opened so, and then say EINVAL."""
    asked: list[bool] = []

    def claims(file: int, *, on: bool) -> bool:
        asked.append(on)
        return on

    def grudging(self: Any, room: memoryview) -> int:
        if asked == [True]:
            raise OSError(errno.EINVAL, "not so")
        return os.write(self.fileno(), room[: len(room) // 2 + 1])  # and in parts

    class File:
        def __init__(self, file: Any) -> None:
            self.fileno = file.fileno

        write = grudging

    monkeypatch.setattr(places, "past_memory", claims)
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    with (tmp_path / "file").open("wb", buffering=0) as raw, places.ThreadPoolExecutor(1) as pool:
        file = places.Steady(File(raw), pool)  # type: ignore[arg-type]
        file.write(data)
        file.finish()
    assert (tmp_path / "file").read_bytes() == data and asked[:2] == [True, False]


def test_a_disk_that_is_full_is_said_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: places.Steady, room: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places.Steady, "_put", full)
    for size in (5, 2 * ROOM, 4 * ROOM):
        with (
            pytest.raises(OSError, match="No space left"),
            new_place(tmp_path / "new") as part,
            steadily(part) as file,
        ):
            file.write(bytes(size))
        assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="Linux's own")
def test_linux_is_asked_and_told_to_write_past_its_memory(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "file").open("wb") as file:
        for on in (True, False):
            told = system.past_memory(file.fileno(), on=on)
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            assert told == bool(flags & os.O_DIRECT) and told <= on


@pytest.mark.parametrize("kind", ["file", "folder", "in an empty folder", "at the last moment"])
def test_of_two_at_once_the_second_leaves_what_the_first_wrote(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new"
    if kind == "in an empty folder":
        path.mkdir()

    def write(text: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        with new_place(path) as part:
            if kind != "file":
                part.mkdir()
            (part if kind == "file" else part / "a").write_text(text)
            meanwhile()

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(places, "move", system.move)
        write("first")
        system.move(source, target)

    def meanwhile() -> None:
        if kind == "at the last moment":
            monkeypatch.setattr(places, "move", late)
        else:
            write("first")

    with pytest.raises(ValueError, match="new exists already: choose another name"):
        write("second", meanwhile)
    assert (path if kind == "file" else path / "a").read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["new"]
