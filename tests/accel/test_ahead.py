"""Work on other threads, wanted in order."""

import mmap
import queue
import random
import threading
import time
from typing import Any

import pytest

from accel import ahead
from accel.ahead import some_ahead

SIZES = [("a", 5), ("b", 7), ("c", 12), ("d", 1), ("e", 0), ("f", 12), ("g", 2), ("h", 3)]


@pytest.mark.parametrize("page", [1, 4, 1024])
@pytest.mark.parametrize("spare", [0, 3, 12, 4096])
def test_what_is_used_stays_while_others_are_filled(
    spare: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "AHEAD", spare)
    monkeypatch.setattr(ahead, "PAGE", page)
    rng = random.Random(spare + page)
    for sizes in (SIZES, *([(str(i), rng.randrange(20)) for i in range(30)] for _ in range(20))):
        begun: list[str] = []

        def fill(name: str, memory: Any, begun: list[str] = begun) -> tuple[str, Any]:
            begun.append(name)
            memory[:] = hash(name) % 1000
            return name, memory

        seen = []
        for name, memory in some_ahead(fill, sizes):
            seen.append((name, memory.size))
            time.sleep(0.001)
            assert (memory == hash(name) % 1000).all()
        assert seen == sizes and begun == [name for name, _ in sizes]
    assert [*some_ahead(fill, [])] == []


def test_as_many_are_filled_as_have_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PAGE", 1)
    begun: queue.Queue[str] = queue.Queue()
    iteration = some_ahead(lambda name, memory: begun.put(name), SIZES)  # a room of 12 + 24 + 1
    next(iteration)
    assert [begun.get(timeout=10) for _ in range(6)] == [*"abcdef"][:6]
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.05)
    next(iteration)
    assert begun.get(timeout=10) == "g"
    iteration.close()


def test_all_begin_where_pages_do() -> None:
    for array in some_ahead(lambda _, memory: memory, SIZES):
        assert array.ctypes.data % mmap.PAGESIZE == 0


def test_a_fault_comes_in_its_turn() -> None:
    def fill(name: str, memory: Any) -> str:
        if name == "c":
            raise ValueError("no c")
        return name

    seen = []
    with pytest.raises(ValueError, match="no c"):
        for name in some_ahead(fill, SIZES):
            seen.append(name)
    assert seen == ["a", "b"]


def test_who_stops_early_waits_for_what_is_under_way() -> None:
    """Nothing is written behind the back of somebody who has left."""
    under_way, ended = threading.Event(), threading.Event()

    def fill(name: str, memory: Any) -> None:
        if name == "b":
            under_way.set()
            time.sleep(0.2)
            ended.set()

    iteration = some_ahead(fill, SIZES)
    next(iteration)
    assert under_way.wait(10)
    iteration.close()
    assert ended.is_set()
