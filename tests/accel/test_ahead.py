"""Work on other threads, wanted in order."""

import threading
import time
from typing import Any

import pytest

from accel import ahead
from accel.ahead import one_ahead

SIZES = [("a", 5), ("b", 7), ("c", 12), ("d", 1), ("e", 0), ("f", 12)]


@pytest.mark.parametrize("spare", [0, 3, 12])
def test_what_is_used_stays_while_the_next_is_filled(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "AHEAD", spare)
    begun: dict[str, threading.Event] = {name: threading.Event() for name, _ in SIZES}

    def fill(name: str, memory: Any) -> tuple[str, Any]:
        begun[name].set()
        memory[:] = ord(name)
        return name, memory

    seen = []
    for name, memory in one_ahead(fill, SIZES):
        seen.append((name, memory.size))
        k = len(seen)
        if k < len(SIZES):
            following, n = SIZES[k]
            both = memory.size + n <= 12 + spare
            assert begun[following].wait(10 if both else 0.05) == both
        assert (memory == ord(name)).all()
    assert seen == SIZES and [*one_ahead(fill, [])] == []


def test_a_fault_comes_in_its_turn() -> None:
    def fill(name: str, memory: Any) -> str:
        if name == "c":
            raise ValueError("no c")
        return name

    seen = []
    with pytest.raises(ValueError, match="no c"):
        for name in one_ahead(fill, SIZES):
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

    iteration = one_ahead(fill, SIZES)
    next(iteration)
    assert under_way.wait(10)
    iteration.close()
    assert ended.is_set()
