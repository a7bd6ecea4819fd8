"""How long a piece of work may last, and what is said where ranks cannot hear each other."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dist import watchdog
from dist.watchdog import FACTOR, FIRST, FLOOR, REMEMBERED, Watch


def work(watch: Watch, clock: list[float], kind: str, seconds: float) -> float:
    """Let a piece of work last; return the limit that it had."""
    watch.begin(kind, 1)
    clock[0] += seconds
    return watch.limit


def test_the_limit_follows_the_slowest_of_the_last_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    watch = Watch(0, 2)
    assert work(watch, clock, "step", 92) == FIRST  # compiles kernels
    assert work(watch, clock, "step", 1) == FACTOR * 92
    assert work(watch, clock, "evaluation", 40) == FIRST
    assert work(watch, clock, "step", 1) == FACTOR * 92
    limits = [work(watch, clock, "step", 1) for _ in range(REMEMBERED)]
    assert limits[-1] == FLOOR
    assert work(watch, clock, "evaluation", 1) == FACTOR * 40


def test_run_timeout_is_the_limit_after_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(0, 2)
    watch.follow(Path("run"), 7.0, "the same command")
    assert work(watch, [0.0], "step", 0) == FIRST
    assert work(watch, [0.0], "step", 0) == 7.0


def test_time_in_which_the_watch_did_not_run_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn an hour goes by, as where the machine was suspended."""
    clock, judged, watch = [0.0], [], Watch(0, 2)

    def receive(seconds: float) -> None:
        clock[0] += 3600

    def judge(place: watchdog.Place, seconds: float) -> None:
        judged.append(seconds)
        if len(judged) == 10:
            watch.stop()

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(watch, "_send", lambda place: None)
    monkeypatch.setattr(watch, "_receive", receive)
    monkeypatch.setattr(watch, "_judge", judge)
    watch._socket = socket.socket()
    watch._watch()
    assert judged[-1] == 20 * watchdog.TICK


@pytest.mark.parametrize(
    ("unheard", "named"),
    [
        ((3.5, 1.4, 0.2), "rank 1 hangs: "),  # rank 2 waits for a core
        ((0.2, 1.4, 0.2), None),
        ((2.9, 0.2, 0.2), None),  # of rank 1 it is not certain yet
        ((0.2, 0.9, 0.2), "the ranks hang in MPI: "),
    ],
)
def test_who_was_heard_of_lately_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unheard: tuple[float, ...],
    named: str | None,
) -> None:
    """Ranks 1 to 3 were last heard of so many seconds ago, and wait in MPI as rank 0 does."""
    place = watchdog.Place("step", 3, 28, "all_gather", True)
    watch = Watch(0, 4)
    watch.follow(Path("run"), 2.0, "the same command without --from")
    watch.limit, watch._clock = 2.0, 100.0
    watch._machines = ["here"] * 4
    watch._places = dict.fromkeys((1, 2, 3), place)
    watch._heard = {rank: 100.0 - ago for rank, ago in enumerate(unheard, 1)}
    watch._all_heard.set()
    monkeypatch.setattr(watchdog, "end_within", lambda seconds: True)
    monkeypatch.setattr(watch, "_send", lambda place: None)
    monkeypatch.setattr(watch, "_leave", lambda: None)
    watch._judge(place, 2.0)
    said = capsys.readouterr().err
    assert said.count(" hang") == (named is not None) and (named or "") in said
    assert said.count(". The same command without --from goes on") == (named is not None)


@pytest.mark.parametrize(("address", "unheard"), [("127.0.0.1", []), ("192.0.2.1", [0, 1])])
def test_ranks_that_cannot_hear_each_other_know_it(
    monkeypatch: pytest.MonkeyPatch, address: str, unheard: list[int]
) -> None:
    monkeypatch.setattr(watchdog, "addresses", lambda: [address])
    barrier = threading.Barrier(2)
    said: list[Any] = [None, None]
    watches = [Watch(0, 2), Watch(1, 2)]

    def all_gather(rank: int, value: Any) -> list[Any]:
        barrier.wait()
        said[rank] = value
        barrier.wait()
        return list(said)

    threads = [
        threading.Thread(target=w.start, args=(lambda value, r=w.rank: all_gather(r, value),))
        for w in watches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [w.unheard for w in watches] == [unheard, unheard]
    for watch in watches:
        watch.stop()
        watch._thread.join()
