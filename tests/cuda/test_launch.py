"""Launchers and kernels agree by name: the list of parameters stands in the kernel's text alone."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import device as devices
from accel.cuda import sources
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
        **dict.fromkeys(("x", "table", "y")),
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
        launch("embedding", "embedding_forward", 1, ids=X, table=table, out=X, N=1, D=1)
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
        launch("rope", "rope", 1, x=X, table=X, y=X, T=2**31, H=1, d=1, turning=1, table_stride=0,
            sign=1)  # fmt: skip


def test_more_shared_memory_than_the_gpu_has_is_an_error(device: Recorder) -> None:
    launch("elementwise", "scale", 1, 64, 99 * 1024, x=X, y=X, n=3, factor=1)
    said = r"scale needs 101,377 bytes of shared memory .* this GPU has 101,376: take narrower"
    with pytest.raises(ValueError, match=said):
        launch("elementwise", "scale", 1, 64, 99 * 1024 + 1, x=X, y=X, n=3, factor=1)


def test_a_grid_without_blocks_launches_nothing() -> None:
    launch("elementwise", "scale", 0)
    launch("elementwise", "scale", (3, 0))


def test_a_text_is_read_once_per_kernel(device: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    launch("elementwise", "scale", 1, x=X, y=X, n=3, factor=1)
    monkeypatch.setattr(sources, "text_of", lambda name: pytest.fail("read again"))
    launch("elementwise", "scale", 1, x=X, y=X, n=3, factor=1)
