"""Numbers as files hold them."""

import itertools
import math
import re

import numpy as np
import pytest

from accel.q8_0 import columns_from_blocks, columns_to_blocks, to_blocks
from accel.transpose import transpose
from dist.numbers import (
    KINDS,
    converted,
    from_bf16,
    from_q8_0,
    places,
    size_of,
    to_bf16,
    to_q8_0,
    turned,
)
from reference.params import decoder_layout
from tests.helpers.weights import LLAMA

# halfway between two bfloat16, once with the even one below and once above, and what lies beside
TIES = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3e38, 1e-40], np.float32)


def test_bf16_rounds_ties_to_even() -> None:
    expected = [1, 1 + 2**-6, -1, 1 + 2**-7]
    np.testing.assert_array_equal(from_bf16(to_bf16(TIES))[:4], np.array(expected, np.float32))
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    x = bits.view(np.float32)
    back = from_bf16(to_bf16(x))
    assert (np.isnan(back) == np.isnan(x)).all()
    finite = np.isfinite(x) & (np.abs(x) < 3.3e38)
    with np.errstate(invalid="ignore"):
        off = np.abs(back - x)
    spacing = np.spacing(np.abs(x[finite])).astype(np.float64) * 2**15
    assert (off[finite] <= spacing).all()
    exact = (bits & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(
        from_bf16(to_bf16(exact)).view(np.uint32)[~np.isnan(exact)],
        exact.view(np.uint32)[~np.isnan(exact)],
    )


@pytest.mark.parametrize("name", KINDS)
def test_what_came_back_goes_out_the_same(name: str) -> None:
    kind = KINDS[name]
    x = np.random.default_rng(1).standard_normal((64, 160)).astype(np.float32)
    elements = kind.encode(x)
    assert elements.shape == kind.shape(x.shape) and elements.dtype == kind.element
    assert elements.nbytes == size_of(x.size, name)
    once = kind.decode(elements)
    assert once.dtype == np.float32 and once.shape == x.shape
    again = converted(elements, name, "F32")
    np.testing.assert_array_equal(again, once)
    assert converted(elements, name, name) is elements
    twice = kind.decode(converted(once, "F32", name))
    np.testing.assert_allclose(twice, once, rtol=2e-3 if "Q8_0" in name else 0)


@pytest.mark.parametrize("name", [name for name in KINDS if name[-1] != "T"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_seen(name: str, wrong: float) -> None:
    kind = KINDS[name]
    for at in (0, 34, 68, 95):
        elements = kind.encode(np.full(96, -1, np.float32)).copy()
        assert kind.finite(elements)
        if name == "Q8_0":
            elements[at // 32 * 17] = np.float16(wrong).view("<u2")
        else:
            elements[at] = kind.encode(np.full(1, wrong, np.float32))[0]
        assert not kind.finite(elements)
    largest = np.full(96, -65_504, np.float32)
    assert kind.finite(kind.encode(largest))


@pytest.mark.parametrize("name", [name for name in KINDS if name[-1] != "T"])
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 67, 512, 515])
@pytest.mark.parametrize("rows", [32, 96])
def test_what_is_kept_of_the_transpose_is_its_transpose(name: str, columns: int, rows: int) -> None:
    x = np.random.default_rng(5).standard_normal((rows, columns), np.float32)
    x[:, columns // 2] *= np.float32(1e-38)
    x[:32, columns // 3] = 0
    x[0], x[1], x[2] = 127, 0.5, -0.5  # a scale of 1, where nothing is larger
    ours, theirs = KINDS[turned(name)], KINDS[name]
    kept, expected = ours.encode(x), theirs.encode(transpose(x))
    assert kept.shape == ours.shape(x.shape)
    np.testing.assert_array_equal(kept.T, expected)
    np.testing.assert_array_equal(ours.decode(kept), theirs.decode(expected).T)
    assert np.abs(ours.decode(kept) - x).max() <= 0.51 * np.abs(x).max() / 127
    firsts = [ours.row(i) for i in range(0, rows, 32)]
    for first, low in zip(firsts, range(0, rows, 32), strict=True):
        np.testing.assert_array_equal(
            ours.decode(kept[first : first + ours.row(32)]), ours.decode(kept)[low : low + 32]
        )


@pytest.mark.parametrize("name", KINDS)
def test_numbers_that_are_not_whole_blocks_are_refused(name: str) -> None:
    kind = KINDS[name]
    if kind.numbers == 1:
        assert kind.shape((5, 7)) == (5, 7) and kind.shape((7,)) == (7,)
        return
    wrong = [(33, 64), (64,)] if kind.in_columns else [(64, 33), (33,)]
    for shape in wrong:
        with pytest.raises(ValueError, match="whole blocks"):
            kind.shape(shape)


def test_each_parameter_begins_where_the_one_before_ends() -> None:
    layout = decoder_layout(LLAMA)
    kinds = {"embedding.weight": "BF16", "layers.1.attention.wo": "Q8_0T"}
    found = [*places(layout, kinds).items()]
    assert [name for name, _ in found] == [*layout.offsets, ""]
    for (name, at), (_, end) in itertools.pairwise(found):
        width = {"BF16": 2, "Q8_0T": 34 / 32}.get(kinds.get(name, ""), 4)
        assert end - at == width * layout.offsets[name][1].size
    with pytest.raises(ValueError, match="does not have"):
        places(layout, {"embedding": "BF16"})
    with pytest.raises(ValueError, match="no known kind"):
        places(layout, {"embedding.weight": "Q4_0"})
    with pytest.raises(ValueError, match="whole blocks"):
        places(layout, {"final_norm.gain": "Q8_0T"})


def test_a_block_of_zeros_is_zeros_and_halves_go_away_from_zero() -> None:
    assert not to_q8_0(np.zeros(32, np.float32)).any()
    block = np.zeros(32, np.float32)
    block[:4] = 127, 0.5, -0.5, 1.5
    assert to_q8_0(block)[1:3].view(np.int8).tolist() == [127, 1, -1, 2]


def test_bf16_is_integer_arithmetic_on_each_number() -> None:
    special = [
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,
        0x7F800001,
        0xFFFFFFFF,
        0x8000,
        0x18000,
        0,
        1 << 31,
    ]
    bits = np.random.default_rng(3).integers(0, 2**32, 3_001, np.uint32)
    bits[: len(special)] = special
    expected = [
        b >> 16 | 0x40 if b & 0x7FFFFFFF > 0x7F800000 else b + 0x7FFF + (b >> 16 & 1) >> 16
        for b in bits.tolist()
    ]
    assert to_bf16(bits.view(np.float32)).tolist() == expected


def one_block(x: list[float]) -> tuple[np.float32, list[int]]:
    """``quantize_row_q8_0_ref``, number by number: float32 throughout, halves away from zero."""
    d = np.float32(max(map(abs, x))) / np.float32(127)
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / d if d else np.float32(0)
    scaled = [float(np.float32(each) * inverse) for each in x]
    return d, [int(math.copysign(math.floor(abs(s) + 0.5), s)) for s in scaled]  # in float64: exact


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 1, 33)])
@pytest.mark.parametrize("power", [-36, -20, 0, 6])
def test_q8_0_is_that_of_ggml_number_by_number(shape: tuple[int, ...], power: int) -> None:
    x = np.random.default_rng(4).standard_normal((*shape, 32)).astype(np.float32)
    x *= np.float32(10.0**power)
    d, q = to_blocks(x)
    assert d.shape == shape and q.shape == x.shape
    for block, scale, rounded in zip(x.reshape(-1, 32), d.ravel(), q.reshape(-1, 32), strict=True):
        exact, expected = one_block(block.tolist())
        assert scale == np.float16(exact) and rounded.tolist() == expected


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_q8_0_rounds_halves_away_from_zero_and_nothing_beside_them(beside: int) -> None:
    halves = np.arange(0.5, 127, dtype=np.float32)
    for _ in range(abs(beside)):
        halves = np.nextafter(halves, np.float32(beside * np.inf))
    x = np.zeros((127, 32), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = 127, halves, -halves  # 127 makes the scale 1
    q = to_blocks(x)[1]
    up = np.arange(127) + (beside >= 0)
    np.testing.assert_array_equal(q[:, 1], up)
    np.testing.assert_array_equal(q[:, 2], -up)


@pytest.mark.filterwarnings("error")
def test_a_block_too_small_for_a_scale_is_zeros() -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, :3] = 1e-40, -1e-38, 0
    x[1, :2] = 1e-44, -0.0
    assert not from_q8_0(to_q8_0(x)).any()
    assert not columns_from_blocks(columns_to_blocks(transpose(x))).any()
    assert not to_blocks(x)[1].any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e7])
@pytest.mark.parametrize("at", [0, 15, 16, 31])
def test_q8_0_refuses_what_it_cannot_hold(wrong: float, at: int) -> None:
    x = np.ones((3, 32), np.float32)
    x[1, at] = wrong
    message = re.escape(f"holds {abs(wrong):.3g}, and Q8_0 goes to")
    with pytest.raises(ValueError, match=message):
        to_q8_0(x)
    wide = np.ones((32, 600), np.float32)
    for column in (0, 511, 512, 599):
        wide[at, column] = wrong
        with pytest.raises(ValueError, match=message):
            columns_to_blocks(wide)
        wide[at, column] = 1
