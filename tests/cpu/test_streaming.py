"""What is written past the caches is what would have been written to them."""

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit, prange

import accel
from accel.cpu import embedding, memory, packing, streaming
from accel.cpu.simd import pointer
from accel.threads import set_threads, threads
from reference.ops import Ops

Array = npt.NDArray[Any]

OPS = ("add", "scale", "relu", "softmax", "rmsnorm", "layernorm", "embedding")
SHAPES = [(1, 1), (3, 17), (40, 255), (70, 256), (33, 257), (65, 1409), (5, 2048)]


def results(op: str, ops: Ops, shape: tuple[int, int], dtype: Any) -> list[Array]:
    """Return what an op's forward gives, and its backward, adding onto something and not."""
    rng = np.random.default_rng(0)
    x, dout, other = rng.standard_normal((3, *shape)).astype(dtype)
    gain, bias = rng.standard_normal((2, shape[1])).astype(dtype)
    if op == "add":
        return [ops.add_forward(x, other)[0]]
    if op == "softmax":
        return [ops.softmax(x)]
    if op == "scale":
        return [ops.scale_forward(x, factor=0.3)[0], ops.scale_forward(x, factor=2.0, out=x)[0]]
    if op == "relu":
        out, cache = ops.relu_forward(x)
        return [out, ops.relu_backward(dout, cache)]
    if op == "embedding":
        ids = rng.integers(0, 9, shape[0]).astype(np.int32)
        out, cache = ops.embedding_forward(ids, rng.standard_normal((9, shape[1])).astype(dtype))
        onto = ops.embedding_backward(dout, cache)
        twice = onto.copy()
        ops.embedding_backward(other, cache, out=twice, accumulate=True)
        return [out, onto, twice]
    if op == "rmsnorm":
        out, cache = ops.rmsnorm_forward(x, gain, eps=1e-5)
        backward = ops.rmsnorm_backward
    else:
        out, cache = ops.layernorm_forward(x, gain, bias, eps=1e-5)
        backward = ops.layernorm_backward
    return [out, *backward(dout, cache), *backward(dout, cache, plus=other)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_it_is_what_is_written_to_the_caches(
    op: str, shape: tuple[int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, before = accel.load("cpu"), threads()
    near = results(op, ops, shape, dtype)
    monkeypatch.setattr(streaming, "FAR", -1)
    try:
        set_threads(1)
        alone = results(op, ops, shape, dtype)
    finally:
        set_threads(before)
    with memory.poisoned():
        far = results(op, ops, shape, dtype)
    exact = op not in ("rmsnorm", "layernorm")  # sums of a row are those of its parts
    bound = 0.0 if exact else 16 * np.finfo(dtype).eps
    for mine, same, other in zip(far, alone, near, strict=True):
        np.testing.assert_array_equal(mine, same, strict=True)
        np.testing.assert_allclose(
            mine, other, rtol=bound, atol=bound * abs(other).max(), strict=True
        )


def test_only_what_no_cache_holds_goes_past_them() -> None:
    assert not streaming.is_far(np.empty(streaming.FAR // 4, np.float32))
    assert streaming.is_far(np.empty(streaming.FAR // 4 + 1, np.float32))


def test_an_array_that_lies_across_its_elements_is_no_landing_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "FAR", -1)
    out = np.frombuffer(bytearray(4 * 1000 + 1), np.float32, 1000, 1)
    x = np.arange(1000, dtype=np.float32)
    accel.load("cpu").scale_forward(x, factor=0.5, out=out)
    np.testing.assert_array_equal(out, x / 2)


def test_a_gradient_that_is_added_to_is_touched_only_where_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose ids do not occur would be read and written, most of a large table."""
    far: list[Any] = []
    monkeypatch.setattr(streaming, "FAR", -1)
    monkeypatch.setattr(embedding, "_scatter", lambda *arguments: far.append(arguments[-1]))
    ops = accel.load("cpu")
    ids, table = np.zeros(2, np.int32), np.zeros((3, 4), np.float32)
    out, cache = ops.embedding_forward(ids, table)
    ops.embedding_backward(out, cache, out=table, accumulate=True)
    ops.embedding_backward(out, cache, out=table)
    assert far == [None, True]


@njit  # type: ignore[untyped-decorator]
def _through(like: Any, source: int, target: int, n: int) -> None:
    x, z = pointer(source, like), pointer(target, like)
    w = streaming.landing(z, True)
    streaming.ask(x, n, True)
    for i in range(n):
        w[i] = x[i]
    streaming.leave(w, z, n, True)
    streaming.settle(True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_written_before_or_behind(dtype: Any) -> None:
    """Wherever in a line it begins and ends."""
    source = np.arange(1, packing.ROOM + 1, dtype=dtype)
    for first in range(17):
        for n in (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 100, packing.ROOM):
            held = memory.empty(packing.ROOM + 40, dtype)
            held.fill(0)
            step = held.itemsize
            _through(dtype(0), source.ctypes.data, held.ctypes.data + first * step, n)
            np.testing.assert_array_equal(held[first : first + n], source[:n])
            assert not held[:first].any() and not held[first + n :].any()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86's code")
def test_stores_go_past_the_caches_by_whole_lines() -> None:
    _through(np.float32(0), *np.zeros(2).view(np.int64), 0)
    code = "".join(_through.inspect_asm().values())
    assert "movntps" in code and ("mfence" in code or "lock" in code)
    # in the first-level cache few lines can be waited for
    assert "prefetcht1" in code and "prefetcht0" not in code


@njit(parallel=True)  # type: ignore[untyped-decorator]
def _numbered(like: Any, seen: Any) -> None:
    for task in prange(len(seen)):
        w = packing.room(like)
        for i in range(packing.ROOM):
            w[i] = task
        for i in range(packing.ROOM):
            seen[task] += w[i]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_task_has_room_of_its_own(dtype: Any) -> None:
    seen = np.zeros(200)
    _numbered(dtype(0), seen)
    np.testing.assert_array_equal(seen, packing.ROOM * np.arange(200.0))
