"""Launchers and kernels agree by name: the list of parameters stands in the kernel's text alone."""

import ctypes
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.cuda import cupy_device, sources
from accel.cuda import device as devices
from accel.cuda.device import launch
from reference.types import Array

X = np.zeros((3,), np.float32)


class Recorder:
    """A device that keeps what it was asked to launch."""

    shared_limit = 99 * 1024

    def launch(
        self, source: str, kernel: str, grid: Any, threads: int, arguments: Any, **how: Any
    ) -> None:
        self.given = (source, kernel, grid, threads, arguments, how)


@pytest.fixture
def device() -> Iterator[Recorder]:
    recorder = Recorder()
    before = devices.use(recorder)  # type: ignore[arg-type]
    yield recorder
    devices.use(before)


def test_every_parameter_of_every_kernel_is_read_from_its_text() -> None:
    for source in sources.SOURCES:
        text = re.sub(r"//.*", "", "".join(sources.parts(source).values()))
        macro = re.search(r"#define ATTENTION_PARAMETERS((?:.*\\\n)*.*\n)", text)
        more = macro.group(1).count(",") if macro else 0
        for kernel, declared in sources.kernels(text).items():
            commas = declared.count(",") + more * ("ATTENTION_PARAMETERS" in declared)
            parameters, elem, macros = sources.signature(source, kernel)
            assert len(dict(parameters)) == commas + 1
            assert (elem is not None) == ("elem" in declared or "ATTENTION" in declared)
            assert "BF16" in macros
    assert dict(sources.signature("rope", "rope").parameters) == {
        **dict.fromkeys(("x", "table", "starts", "y")),
        **dict.fromkeys(("T", "H", "d", "turning"), np.int32),
        "table_stride": np.int64,
        "sign": np.float32,
    }


def test_arguments_are_put_in_order_and_take_the_declared_types(device: Recorder) -> None:
    launch("elementwise", "scale", (2, 3), 64, 8, factor=2, n=3, y=None, x=X)
    source, kernel, grid, threads, arguments, how = device.given
    assert (source, kernel, grid, threads) == ("elementwise", "scale", (2, 3, 1), 64)
    assert arguments[0] is X and arguments[1] is None
    assert [type(a) for a in arguments[2:]] == [np.int64, np.float32] and arguments[2:] == [3, 2]
    assert how == {"shared": 8, "defines": {"BF16": 0}}


def test_bf16_follows_from_the_activations(device: Recorder) -> None:
    for table, expected in ((X, 0), (X.astype(np.uint16), 1)):
        launch("embedding", "embedding_forward", 1, ids=X, table=table, out=X, N=1, V=1, D=1)
        assert device.given[-1]["defines"] == {"BF16": expected}
    launch("attention", "document_ranges", 1, documents=X, ranges=X, pairs=1, S=1, BF16=1)
    assert device.given[-1]["defines"] == {"BF16": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": X, "y": X, "n": 3}, r"elementwise\.cu: scale has a parameter 'factor', got none"),
        (
            {"x": X, "y": X, "n": 3, "factor": 1, "HEAD": 64, "fctor": 2},
            r"scale has no parameter or macro \['HEAD', 'fctor'\]",
        ),
    ],
)
def test_a_missing_or_surplus_name_is_an_error(
    given: dict[str, Array | float], message: str, device: Recorder
) -> None:
    with pytest.raises(TypeError, match=message):
        launch("elementwise", "scale", 1, **given)


def test_a_number_that_its_type_cannot_hold_is_an_error(device: Recorder) -> None:
    with pytest.raises(OverflowError):
        launch("rope", "rope", 1, x=X, table=X, y=X, starts=None, T=2**31, H=1, d=1, turning=1,
            table_stride=0, sign=1)  # fmt: skip


def test_more_shared_memory_than_the_gpu_has_is_an_error(device: Recorder) -> None:
    launch("elementwise", "scale", 1, 64, 99 * 1024, x=X, y=X, n=3, factor=1)
    said = r"scale needs 101,377 bytes of shared memory .* this GPU has 101,376: take narrower"
    with pytest.raises(ValueError, match=said):
        launch("elementwise", "scale", 1, 64, 99 * 1024 + 1, x=X, y=X, n=3, factor=1)


def test_more_blocks_than_a_grid_may_have_are_an_error(device: Recorder) -> None:
    most = (2**31 - 1, 65_535, 65_535)
    launch("elementwise", "scale", most, x=X, y=X, n=3, factor=1)
    assert device.given[2] == most
    for axis in range(3):
        grid = tuple(n + (i == axis) for i, n in enumerate(most))
        said = rf"scale needs {' x '.join(f'{n:,}' for n in grid)} blocks .* most 2,147,483,647 x"
        with pytest.raises(ValueError, match=said):
            launch("elementwise", "scale", grid, x=X, y=X, n=3, factor=1)


def test_a_grid_without_blocks_launches_nothing() -> None:
    launch("elementwise", "scale", 0)
    launch("elementwise", "scale", (3, 0))


def test_a_text_is_read_once_per_kernel(device: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    launch("elementwise", "scale", 1, x=X, y=X, n=3, factor=1)
    monkeypatch.setattr(sources, "text_of", lambda name: pytest.fail("read again"))
    launch("elementwise", "scale", 1, x=X, y=X, n=3, factor=1)


class Driver:
    """Stands in for CuPy's: reads what a launch was given, as the driver would."""

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[str, str]] = {}
        self.launches: list[tuple[Any, ...]] = []

    def launchKernel(self, function: int, *given: int) -> None:
        *sizes, stream, none, at = given
        source, kernel = self.kernels[function]
        extra = (ctypes.c_uint64 * 5).from_address(at)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        assert (extra[0], extra[2], extra[4], none) == (1, 2, 0, 0)
        buffer, size = extra[1], ctypes.c_size_t.from_address(extra[3]).value
        types = {None: ctypes.c_uint64, np.int32: ctypes.c_int32, np.uint32: ctypes.c_uint32}
        types |= {np.int64: ctypes.c_int64, np.float32: ctypes.c_float}
        at, values = 0, []
        for _, make in sources.signature(source, kernel).parameters:
            kind = types[make]  # type: ignore[index]
            at = -(-at // ctypes.alignment(kind)) * ctypes.alignment(kind)
            values.append(kind.from_address(buffer + at).value)
            at += ctypes.sizeof(kind)
        assert at == size
        self.launches.append((kernel, tuple(sizes), stream, values))


def gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a device whose driver is the stand-in."""
    monkeypatch.setattr(cupy_device, "cubin_file", lambda source, *how: source)

    def loaded(path: str) -> Any:
        def get_function(kernel: str) -> Any:
            number = len(driver.kernels) + 1
            driver.kernels[number] = path, kernel
            return SimpleNamespace(kernel=SimpleNamespace(ptr=number))

        return SimpleNamespace(get_function=get_function)

    device: Any = cupy_device.CuPyDevice.__new__(cupy_device.CuPyDevice)
    device._cupy, device._driver = SimpleNamespace(RawModule=loaded), driver
    device._kernels, device._launching = {}, threading.Lock()
    device._seen, device._gpu = threading.local(), SimpleNamespace(use=lambda: None)
    device.architecture, device.stream = "sm_90a", lambda: 77
    return device


def test_the_driver_finds_every_kernel_s_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, rng = Driver(), np.random.default_rng(0)
    device = gpu(driver, monkeypatch)
    for source in sources.SOURCES:
        for kernel in sources.kernels("".join(sources.parts(source).values())):
            given, wanted = [], []
            for _, make in sources.signature(source, kernel).parameters:
                number = int(rng.integers(1, 2**31))
                if make is None:
                    number <<= 20
                    given.append(SimpleNamespace(data=SimpleNamespace(ptr=number)))
                elif make is np.int64:
                    number <<= 20
                    given.append(make(number))
                else:
                    given.append(make(number))
                    number = given[-1].item()
                wanted.append(number)
            how = {"shared": 8, "defines": {"BF16": 1}}
            for first in (given[0], None):
                arguments = [first, *given[1:]]
                device.launch(source, kernel, (1, 2, 3), 64, arguments, **how)
                wanted[0] = wanted[0] if first is not None else 0
                launched = kernel, (1, 2, 3, 64, 1, 1, 8), 77, wanted
                assert driver.launches.pop() == launched
    assert len(driver.kernels) == len(device._kernels) > 30


def test_a_kernel_of_other_macros_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    device = gpu(driver, monkeypatch)
    arguments = [None, None, np.int64(3)]
    for bf16 in (0, 1, 0):
        how = {"shared": 0, "defines": {"BF16": bf16}}
        device.launch("loss", "softmax", (1, 1, 1), 64, arguments, **how)
    assert len(driver.kernels) == len(device._kernels) == 2


def test_each_thread_takes_the_gpu_before_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(Driver(), monkeypatch)
    taken: list[int] = []
    device._gpu = SimpleNamespace(use=lambda: taken.append(threading.get_ident()))

    def launches() -> None:
        for _ in range(2):
            arguments = [None, None, np.int64(3)]
            device.launch("loss", "softmax", (1, 1, 1), 64, arguments, shared=0, defines={})

    other = threading.Thread(target=launches)
    other.start()
    other.join()
    launches()
    assert len(taken) == len(set(taken)) == 2


def test_threads_do_not_write_over_each_other_s_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Driver):
        def launchKernel(self, function: int, *given: int) -> None:
            time.sleep(0.05)  # in which another thread may come to the same kernel
            super().launchKernel(function, *given)

    driver = Slow()
    device = gpu(driver, monkeypatch)

    def launch_with(number: int) -> None:
        arguments = [None, None, np.int64(number)]
        device.launch("loss", "softmax", (1, 1, 1), 64, arguments, shared=0, defines={})

    launch_with(0)
    threads = [threading.Thread(target=launch_with, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values[-1] for *_, values in driver.launches) == [0, 1, 2, 3]


def test_a_block_is_allowed_more_memory_when_it_first_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    device = gpu(driver, monkeypatch)
    array = SimpleNamespace(data=SimpleNamespace(ptr=1))
    asked: list[int] = []
    for shared in (8, 49_152, 50_000, 49_153, 60_000):
        arguments = [array, array, np.int64(3)]
        device.launch("loss", "softmax", (1, 1, 1), 64, arguments, shared=shared, defines={})
        [loaded] = device._kernels.values()
        asked.append(getattr(loaded._function, "max_dynamic_shared_size_bytes", 0))
    assert asked == [0, 0, 50_000, 50_000, 60_000]


def test_an_array_that_is_not_on_the_gpu_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = gpu(Driver(), monkeypatch)
    with pytest.raises(TypeError, match=r"arrays that are on the GPU, .*numpy.*ops\.from_numpy"):
        arguments = [np.zeros(3, np.float32), None, np.int64(3)]
        device.launch("loss", "softmax", (1, 1, 1), 64, arguments, shared=0, defines={})
