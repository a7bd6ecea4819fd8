"""The arena: arrays of a step share memory only when they cannot be seen together."""

import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel.cpu import memory


def test_a_dead_array_s_memory_is_used_again_within_a_step() -> None:
    with memory.step():
        first = memory.empty((300, 100), np.float32)
        place = first.ctypes.data
        del first
        assert memory.empty((300, 100), np.float32).ctypes.data == place


def test_a_view_keeps_its_memory() -> None:
    with memory.step():
        whole = memory.empty((300, 100), np.float32)
        whole[...] = 7
        view = whole[5:, ::3].T
        del whole
        other = memory.empty((300, 100), np.float32)
        other[...] = 9
        assert np.all(view == 7)


def test_a_view_of_an_array_s_base_gives_nothing_back() -> None:
    arena = memory.Arena()
    x = arena.take(5000)
    assert x.base is not None
    x.base[:100].fill(1)
    assert not np.shares_memory(x, arena.take(5000))


def test_an_array_outlives_its_step() -> None:
    with memory.step():
        kept = memory.empty(5000, np.float64)
        kept[...] = 3
    with memory.step():
        other = memory.empty(5000, np.float64)
        other[...] = 4
    assert np.all(kept == 3)


def test_every_array_starts_a_cache_line() -> None:
    for scope in (memory.step(), memory.poisoned()):
        with scope:
            for n in (1, 17, 5000):
                assert memory.empty(n, np.float32).ctypes.data % memory.ALIGNMENT == 0


def test_arrays_side_by_side_each_start_a_cache_line_and_share_nothing() -> None:
    shapes = [(3, 5), (1, 1), (40, 100), (17,)]
    with memory.step():
        arrays = memory.several(np.float32, *shapes)
        for i, array in enumerate(arrays):
            array.fill(i)
        assert [array.shape for array in arrays] == shapes
        assert not any(array.ctypes.data % memory.ALIGNMENT for array in arrays)
        (last,) = arrays[3:]
        for i, array in enumerate(arrays):
            assert (array == i).all()
        del arrays, array
        assert not np.shares_memory(last, memory.empty((50, 100), np.float32)), "it lives by one"


def test_the_second_step_takes_no_new_memory() -> None:
    def run() -> None:
        with memory.step():
            arrays = [memory.empty(n, np.float32) for n in (9000, 70_000, 1234, 500_000)]
            del arrays[1]
            arrays.append(memory.empty(60_000, np.float32))

    run()
    before = memory._arena.reserved
    for _ in range(20):
        run()
    assert memory._arena.reserved == before


def test_each_step_finds_its_places_where_the_first_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every step touches other pages, and all of the arena becomes resident."""
    monkeypatch.setattr(memory, "CHUNK", 1 << 20)
    arena = memory.Arena()

    def places() -> list[int]:
        return [x.ctypes.data for x in [arena.take(300_000) for _ in range(16)]]

    first = places()
    assert arena.reserved > 5 << 20  # several chunks
    assert places() == first
    assert places() == first


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of any size be planned."""
    monkeypatch.setattr(memory, "PLANNED", 0)


# A layer keeps 6 and 10 of what it makes, and a backward that follows needs 13 at once: holes of 4
# are left between what stays, and 13 does not fit in where 10 were.
LAYERS = 6


def layers(arena: memory.Arena) -> tuple[int, int]:
    """Take what some layers would; return the places where it began and ended."""
    unit, kept, places = 1 << 20, [], []

    def take(n: int) -> np.ndarray:
        array = arena.take(n * unit)
        array[::4096] = n
        places.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        return array

    for _ in range(LAYERS):
        made = take(10)
        kept.append(take(10))
        del made
        kept.append(take(6))
        take(4)
    while kept:
        big = take(13)
        kept.pop()
        kept.pop()
        del big
    return min(low for low, _ in places), max(high for _, high in places)


def test_a_step_that_comes_again_is_laid_out_without_holes() -> None:
    arena, unit = memory.Arena(), 1 << 20
    extents = []
    for _ in range(4):
        arena.begin()
        low, high = layers(arena)
        extents.append(high - low)
    most = LAYERS * 16 * unit + 13 * unit
    assert arena.most == most
    assert extents[0] >= most + 8 * unit  # it had holes
    assert extents[1:] == [most] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_a_larger_step_than_before_gives_back_what_it_frees() -> None:
    arena, unit = memory.Arena(), 1 << 20
    process = psutil.Process()
    first = process.memory_info().rss
    arena.begin()
    layers(arena)
    arena.begin()
    assert process.memory_info().rss - first < 6 * unit  # but for edges of huge pages
    layers(arena)
    arena.begin()  # as large: its pages stay
    most = LAYERS * 16 + 13
    assert (most - 4) * unit < process.memory_info().rss - first < (most + 6) * unit


def test_a_long_first_step_ends_up_with_pages_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, given = memory.Arena(), [0]
    monkeypatch.setattr(memory, "give_back", lambda *_: given.append(given.pop() + 1))
    arena.begin()
    counts = []
    for _ in range(20):
        arena.take(2 * memory.PLANNED)  # gone at once, as in a loop of one op
        counts.append(given[0])
    assert 1 <= counts[-1] == counts[10] <= memory.RETURNED


def test_no_page_of_an_array_that_lives_is_given_back() -> None:
    """In a larger step than before, of arrays that are larger than a huge page, and beside them."""
    rng = np.random.default_rng(0)
    for _ in range(3):
        arena = memory.Arena()
        arena.begin()
        alive: list[tuple[npt.NDArray[np.uint8], int]] = []
        for i in range(1, 60):
            alive.append((arena.take(8 << 20), i))
            alive[-1][0].fill(i)
            if i > 9 and i % 3 == 0:
                alive.pop(int(rng.integers(len(alive) - 1)))
            arena.take(1 << 20).fill(255)
            assert all((array[:: 1 << 12] == number).all() for array, number in alive)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_a_large_step_behind_a_small_one_gives_back_what_it_frees() -> None:
    arena, unit = memory.Arena(), 1 << 20
    process = psutil.Process()
    arena.begin()
    arena.take(unit)
    arena.begin()
    first = process.memory_info().rss
    layers(arena)
    arena.begin()
    assert process.memory_info().rss - first < 70 * unit
    low, high = layers(arena)
    assert high - low == LAYERS * 16 * unit + 13 * unit  # planned: the one before was seen whole


@pytest.mark.usefixtures("planned")
def test_a_larger_step_is_planned_when_it_comes_and_another_one_when_it_comes_again() -> None:
    arena = memory.Arena()

    def step(*sizes: int) -> list[int]:
        """Return where the arrays of a step lie that are all alive at its end."""
        arena.begin()
        return [x.ctypes.data for x in [arena.take(n) for n in sizes]]

    step(1000, 9000)
    planned = step(1000, 9000)
    assert planned[0] > planned[1]  # the largest comes first
    step(5000, 4000, 20_000)
    larger = step(5000, 4000, 20_000)
    assert larger[1] > larger[0] > larger[2]
    step(4000, 16_000)  # one smaller step may be an exception
    assert step(5000, 4000, 20_000) == larger
    for _ in range(2):
        step(4000, 16_000)
    again = step(4000, 16_000)
    assert again[0] > again[1]


def test_small_steps_are_not_planned_until_one_is_large() -> None:
    arena = memory.Arena()

    def step(*sizes: int) -> list[int]:
        arena.begin()
        return [x.ctypes.data for x in [arena.take(n) for n in sizes]]

    for _ in range(3):
        small = step(1000, 9000)
        assert small[0] < small[1]  # as they come
    for _ in range(3):
        large = step(1000, memory.PLANNED)
    assert large[0] > large[1]  # the largest first


@pytest.mark.usefixtures("planned")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(-9, 9000), max_size=40), min_size=1, max_size=4))
def test_arrays_that_are_alive_together_never_share_a_place(steps: list[list[int]]) -> None:
    """A number below 0 lets go of one of the arrays; some outlive their step."""
    arena = memory.Arena()
    alive: list[tuple[np.ndarray, int]] = []

    def whole(array: np.ndarray, mark: int) -> bool:
        return bool(np.all(array == mark))

    for events in [each for each in steps for _ in range(3)]:
        arena.begin()
        for event in events:
            if event < 0 and alive:
                assert whole(*alive.pop(event % len(alive)))
            elif event >= 0:
                alive.append((arena.take(event), event % 251))
                alive[-1][0].fill(event % 251)
    assert all(whole(*each) for each in alive)
    total = sum(-(-max(a.nbytes, 1) // memory.ALIGNMENT) * memory.ALIGNMENT for a, _ in alive)
    arena.take(1)
    assert arena.held == total + memory.ALIGNMENT


def test_pieces_lie_apart_inside_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1 << 20)
    arena = memory.Arena()
    first = arena.take(3 << 20)  # longer than a chunk
    arrays = [arena.take(1 << 20)]
    del first
    for n in [500_000] * 6 + [300_001, 2_000_003, 700_000, 5, 1_048_576] * 4:
        arrays.append(arena.take(n))
    for i, array in enumerate(arrays):
        array.fill(i)
    chunks = [(c.address, c.address + len(c.memory)) for c in arena._chunks]
    for i, array in enumerate(arrays):
        assert np.all(array == i)
        place = array.ctypes.data
        assert place % memory.ALIGNMENT == 0
        assert any(low <= place and place + array.size <= high for low, high in chunks)
    assert arena.reserved == sum(high - low for low, high in chunks)


def test_arrays_that_grow_beyond_a_chunk_use_its_memory_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1 << 20)
    arena = memory.Arena()
    for n in range(1_100_000, 2_000_000, 100_000):
        arena.take(n)
    assert arena.reserved == 2 << 20


@pytest.fixture
def switching() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_take_from_one_arena(switching: None) -> None:
    arena, wrong = memory.Arena(), []

    def run(number: int) -> None:
        for _ in range(100):
            arrays = [arena.take(5000 + 64 * i) for i in range(20)]
            for array in arrays:
                array.fill(number)
            if any(np.any(array != number) for array in arrays):
                wrong.append(number)

    workers = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_while_a_thread_takes_can_take() -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            memory._arena.take(5000)

    worker = threading.Thread(target=busy)
    worker.start()
    try:
        for _ in range(30):
            child = os.fork()
            if child == 0:
                signal.alarm(5)  # ends a child that waits
                memory._arena.take(5000)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        worker.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_writes_into_a_copy() -> None:
    with memory.step():
        array = memory.empty(5000, np.float32)
        array[...] = 1
        child = os.fork()
        if child == 0:
            array[...] = 2
            os._exit(0)
        os.waitpid(child, 0)
        assert np.all(array == 1)


def test_poisoned_memory_is_nan() -> None:
    with memory.poisoned():
        assert np.isnan(memory.empty((3, 4), np.float32)).all()
        with memory.step():
            assert np.isnan(memory.empty((300, 40), np.float64)).all()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400_000)), max_size=60))
def test_living_arrays_never_overlap(events: list[tuple[bool, int]]) -> None:
    arena = memory.Arena()
    living: list[np.ndarray] = []
    for drop, n in events:
        if drop and living:
            living.pop(n % len(living))
        else:
            array = arena.take(n)
            array.fill(len(living) % 251)
            living.append(array)
        gc.collect(0)
    places = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in living if a.nbytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_freed_neighbours_join() -> None:
    arena = memory.Arena()
    arrays = [arena.take(10_000) for _ in range(5)]
    del arrays
    arena.take(64)
    assert len(arena._free) == 1


@pytest.mark.parametrize("nbytes", [memory.CHUNK - 64, memory.CHUNK + 1])
def test_an_array_may_be_as_large_as_a_chunk_or_larger(nbytes: int) -> None:
    assert memory.Arena().take(nbytes).nbytes == nbytes


def test_a_shape_of_numpy_s_integers_leaves_none_behind() -> None:
    arena = memory.Arena()
    first = arena.take(1000)
    wide = arena.take((np.int64(30), np.int64(50)), np.dtype(np.float32))  # type: ignore[arg-type]
    assert wide.shape == (30, 50)
    del first, wide
    assert arena.take(500).size == 500
    assert arena.take((np.int64(7),)).size == 7  # type: ignore[arg-type]
    assert all(type(n) is int for interval in arena._free._free for n in interval)


def test_what_lasts_lies_in_the_arena_and_outlives_steps() -> None:
    with memory.step():
        kept = [memory.lasting((30, 11), np.uint16) for _ in range(3)]
        for i, each in enumerate(kept):
            each[...] = i
    with memory.step():
        others = [memory.empty((64, 64), np.float32) for _ in range(8)]
        for other in others:
            other.fill(9)
    assert [set(each.ravel().tolist()) for each in kept] == [{0}, {1}, {2}]
    chunks = [(c.address, c.address + len(c.memory)) for c in memory._lasting._chunks]
    for each in kept:  # in an arena, and so in its huge pages
        place = each.ctypes.data
        assert place % memory.ALIGNMENT == 0 and any(low <= place < high for low, high in chunks)
