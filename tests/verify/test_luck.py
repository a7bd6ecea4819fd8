"""Kernels that cheat, or are right by luck: each is caught, and told what it does."""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.verify import Report, check_module
from accel.verify.load import as_subject
from accel.verify.subject import Subject
from reference import ops
from reference.types import Array


def check(forward: Callable[..., Any], op: str = "gelu", **options: Any) -> Report:
    module = SimpleNamespace(**{f"{op}_forward": forward}) if op != "accumulate" else None
    module = module or SimpleNamespace(accumulate=forward)
    few = {"dtypes": ["float32"], "examples": 30, "shrink": False}
    options = {**few, "partial": True, "raises": False, **options}
    return check_module(module, **options)


def said(report: Report) -> str:
    assert not report.ok
    return " ".join(report.text().split())


def gelu(x: Array) -> Array:
    out, _ = ops.gelu_forward(x)
    return out


@pytest.mark.parametrize(
    ("shape", "most"), [((2, 3, 1, 5), 5 * 6 * 4 * 8), ((1, 65_537, 1, 8), 65_540 * 11)]
)
def test_a_slice_of_a_long_array_is_not_many_times_as_long(
    shape: tuple[int, ...], most: int
) -> None:
    array = np.arange(float(np.prod(shape))).reshape(shape)
    placed = as_subject(SimpleNamespace(gelu_forward=gelu)).place(array, "sliced", activation=True)
    assert np.array_equal(placed.view, array) and not placed.view.flags.c_contiguous
    assert placed.base.size == most and np.isnan(placed.base).sum() == most - array.size


def beyond(a: Array, at: int) -> Array:
    """Return the element that lies ``at`` elements from a's first; none where its memory ends."""
    memory = (a if a.base is None else a.base).reshape(-1)
    first = (a.ctypes.data - memory.ctypes.data) // a.itemsize
    return memory[first + at :][:1] if first + at >= 0 else memory[:0]


def test_a_result_kept_by_address_is_found_when_the_array_has_other_numbers() -> None:
    kept: dict[Any, Array] = {}

    def by_address(x: Array) -> Array:
        key = x.__array_interface__["data"][0], x.shape, x.strides
        return kept.setdefault(key, gelu(x)).copy()

    class Everlasting:
        """Arrays that are never freed, as addresses are used again otherwise."""

        def __init__(self) -> None:
            self.held: list[Array] = []

        def __call__(self, x: Array) -> Array:
            self.held.append(x)
            return by_address(x)

    text = said(check(Everlasting().__call__))
    assert "of a call with other numbers in the same arrays is off by" in text
    assert "kept by the address of its arguments?" in text


def test_elements_that_are_not_written_are_found() -> None:
    def without_the_last(x: Array) -> Array:
        out = np.empty(x.shape, x.dtype)
        out.reshape(-1)[:-1] = gelu(x).reshape(-1)[:-1]
        return out

    assert "FAIL gelu: out" in said(check(without_the_last))


def test_a_result_added_onto_the_one_before_is_found() -> None:
    sums: dict[Any, Array] = {}

    def adds(x: Array) -> Array:
        key = x.shape, float(np.abs(x).sum())
        sums[key] = sums.get(key, np.zeros_like(x)) + gelu(x)  # never set to zero again
        return sums[key]

    text = said(check(adds))
    assert "of a second call, the same again, is off by 1.00e+00 relative" in text


def test_a_place_for_the_result_that_is_not_written_is_found() -> None:
    def scale(x: Array, *, factor: float, out: Array | None = None) -> Array:
        y, _ = ops.scale_forward(x, factor=factor)
        if out is not None and written:
            out[...] = y
        return y

    written = True
    assert check(scale, op="scale").ok
    written = False
    assert "of a second call, into out=," in said(check(scale, op="scale"))


@pytest.mark.parametrize("factor", [1, 2])
def test_an_x_that_only_the_backward_is_given_is_tried(factor: int) -> None:
    def linear_forward(
        x: Array, weight: Array, *, bias: Array | None = None, keep_x: bool = True
    ) -> Any:
        y, _ = ops.linear_forward(x, weight, bias=bias)
        return y, (x if keep_x else None, weight, bias)

    def linear_backward(dout: Array, cache: Any, *, x: Array | None = None) -> Any:
        kept, weight, bias = cache
        kept = x * factor if kept is None and x is not None else kept
        return ops.linear_backward(dout, ops.linear_forward(kept, weight, bias=bias)[1])

    module = SimpleNamespace(linear_forward=linear_forward, linear_backward=linear_backward)
    report = check_module(module, dtypes=["float32"], examples=20, shrink=False, raises=False)
    if factor == 1:
        assert report.ok
    else:
        assert "dweight of a second backward, which is given x, is off by 1.00e+00" in said(report)


def test_two_buffers_in_turns_are_found() -> None:
    buffers: dict[Any, list[Array]] = {}

    def in_turns(x: Array) -> Array:
        pair = buffers.setdefault((x.shape, x.dtype), [np.empty_like(x), np.empty_like(x)])
        pair.reverse()
        pair[0][...] = gelu(x)
        return pair[0]

    assert "out changed after it was returned" in said(check(in_turns))


@pytest.mark.parametrize("buffers", [2, 4, 7])
def test_a_ring_of_buffers_is_found(buffers: int) -> None:
    """It serves a model of few layers, and gives a longer one what belongs to another layer."""
    ring: list[Any] = [None] * buffers
    calls = 0

    def forward(x: Array, gain: Array, *, eps: float) -> Any:
        nonlocal calls
        calls += 1
        out, ring[calls % buffers] = ops.rmsnorm_forward(x, gain, eps=eps)
        return out, calls % buffers

    def backward(dout: Array, cache: int) -> Any:
        return ops.rmsnorm_backward(dout, ring[cache])

    module = SimpleNamespace(rmsnorm_forward=forward, rmsnorm_backward=backward)
    report = check_module(module, dtypes=["float32"], examples=30, partial=True, raises=False)
    assert "a stale cache?" in said(report)


def test_a_factor_times_x_may_be_written_over_x() -> None:
    def forward(x: Array, *, factor: float, out: Any = None) -> Any:
        if out is None:
            return x * factor, factor
        out[...] = 0
        out += x * factor
        return out, factor

    assert "into out=x," in said(check(forward, "scale"))
    check(lambda x, *, factor, out=None: np.multiply(x, np.float32(factor), out=out), "scale")


def test_layers_of_a_cache_that_share_their_memory_are_found() -> None:
    def kv_cache(params: Any, config: Any, batch: int, length: int) -> Any:
        cache = ops.kv_cache(params, config, batch, length)
        return type(cache)([cache.k[0]] * len(cache.k), cache.v)

    few: dict[str, Any] = {"dtypes": ["float32"], "examples": 20, "partial": True}
    report = check_module(SimpleNamespace(kv_cache=kv_cache), **few, raises=False)
    assert "out.k[0] and out.k[1] lie in the same memory" in said(report)


def test_sums_in_a_varying_order_are_a_note_and_no_failure() -> None:
    rng = np.random.default_rng()

    def softmax(x: Array) -> Array:
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        order = rng.permutation(x.shape[-1])
        total = np.zeros(x.shape[:-1], x.dtype)
        for i in order:
            total = total + e[..., i]
        return e / total[..., None]

    report = check_module(SimpleNamespace(softmax=softmax), dtypes=["float32"], examples=40)
    assert "softmax: the same call twice gives other bits" in report.text()
    assert check_module(SimpleNamespace(softmax=ops.softmax), examples=10).notes == []


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_write_beyond_an_argument_is_found(where: str) -> None:
    def beyond_the_end(x: Array) -> Array:
        if x.flags.c_contiguous and x.ndim:
            beyond(x, -1 if where == "before" else x.size)[:] = 0
        return gelu(x)

    assert "elements before, behind or between x were written" in said(check(beyond_the_end))


def test_a_write_beyond_what_is_to_be_written_is_found() -> None:
    def accumulate(dst: Array, src: Array) -> None:
        dst += src
        if dst.flags.c_contiguous:
            beyond(dst, dst.size)[:] = 0

    text = said(check(accumulate, "accumulate"))
    assert "elements before, behind or between dst were written" in text


def test_positions_that_are_written_into_are_found() -> None:
    def rope_forward(x: Array, *, base: float, start: Any = 0) -> Array:
        out, _ = ops.rope_forward(x, base=base, start=start)
        if isinstance(start, np.ndarray):
            start += 1
        return out

    assert "start, an argument, was written into" in said(check(rope_forward, "rope"))


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (lambda: np.random.seed(0), "np.random"),  # noqa: NPY002
        (lambda: np.random.rand(), "np.random"),  # noqa: NPY002
        (lambda: random.seed(0), "random"),
        (lambda: random.random(), "random"),
    ],
)
def test_a_global_generator_that_a_call_seeds_or_draws_from_is_found(
    seed: Callable[[], Any], name: str
) -> None:
    def seeds(x: Array) -> Array:
        seed()
        return gelu(x)

    assert f"{name}'s global generator was seeded or drawn from" in said(check(seeds))


def test_the_program_s_generators_stay_where_they_were() -> None:
    np.random.seed(5), random.seed(5)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002 (of which NumPy keeps a second one)
    wanted = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    assert check(gelu).ok
    assert (random.getstate(), repr(np.random.get_state())) == wanted  # noqa: NPY002


def test_a_first_call_may_draw_random_numbers_as_compilers_do() -> None:
    called: list[float] = []

    def compiles(x: Array) -> Array:
        if not called:
            called.append(random.random())
        return gelu(x)

    assert check(compiles).ok


def test_a_result_that_is_not_waited_for_is_told() -> None:
    def not_waited_for(x: Array) -> Array:
        out, right = np.zeros_like(x), gelu(x)

        def later() -> None:
            time.sleep(0.05)
            out[...] = right

        threading.Thread(target=later).start()
        return out

    text = said(check(not_waited_for, examples=6))
    assert "is a stream or a thread not waited for?" in text


def test_a_report_says_nothing_of_nan_times_infinity() -> None:
    report = check(lambda x: gelu(x) * np.nan)
    text = said(report)
    assert "nan" not in text.split("FAIL gelu")[0] and "inf" not in text.split("FAIL gelu")[0]
    assert "not finite" in text


def test_arguments_lie_between_guards_and_on_the_boundaries_of_vectors() -> None:
    subject = Subject(SimpleNamespace(gelu_forward=gelu), "gelu", "")
    placed = subject.place(np.ones((3, 5), np.float32), "plain", activation=True)
    assert placed.view.flags.c_contiguous and placed.view.base is not None
    assert placed.around is not None and placed.around.sum() == 32
    offset = placed.view.__array_interface__["data"][0] - placed.base.__array_interface__["data"][0]
    assert offset % 64 == 0


class Bits:
    """A bf16 array as some backends keep it: bits, which reading makes a copy of."""

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    @property
    def __array_interface__(self) -> Any:
        return self.bits.__array_interface__

    def __getitem__(self, at: Any) -> "Bits":
        return Bits(self.bits[at])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.bits[at] = value.bits

    def swapaxes(self, a: int, b: int) -> "Bits":
        return Bits(self.bits.swapaxes(a, b))


def test_a_result_that_is_a_view_of_an_argument_may_change_with_it() -> None:
    def from_numpy(array: Array, *, activation: bool = False) -> Bits:
        return Bits((np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype("<u2"))

    def to_numpy(array: Bits) -> Array:
        return (array.bits.astype(np.uint32) << 16).view(np.float32)

    def merge_heads_forward(x: Bits) -> Any:
        B, T, H, d = x.bits.shape
        return Bits(x.bits.reshape(B, T, H * d)), (H, d)

    def merge_heads_backward(dout: Bits, cache: Any) -> Bits:
        return Bits(dout.bits.reshape(*dout.bits.shape[:2], *cache))

    module = SimpleNamespace(
        from_numpy=from_numpy,
        to_numpy=to_numpy,
        merge_heads_forward=merge_heads_forward,
        merge_heads_backward=merge_heads_backward,
    )
    check_module(module, dtypes=["bf16"], examples=12)
